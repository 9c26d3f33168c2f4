"""Processes that compute together: the only folder that imports ``torch.distributed``."""
