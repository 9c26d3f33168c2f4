"""Checks of a batch, apart from the work: each raises an error, or does nothing."""
