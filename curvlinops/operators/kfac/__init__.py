"""Kronecker-factored approximations of curvature matrices."""
