"""Matrices as objects, for NumPy and PyTorch alike."""
