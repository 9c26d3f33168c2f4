"""Algorithms that multiply by a matrix and need to know nothing else about it."""
