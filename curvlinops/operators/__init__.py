"""Operators: one file each. They are exported by the package."""
