"""Matrices with structure: Kronecker products, blocks, diagonals and eigendecompositions."""
