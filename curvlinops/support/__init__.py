"""Arguments, random numbers, files, warnings, and private functions of PyTorch."""
