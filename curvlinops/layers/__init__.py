"""Layers' uses of their parameters, from which per-sample and layerwise quantities are computed."""

# importing a file registers its rules
from curvlinops.layers import convolution, elementwise, embedding, linear

__all__ = ["convolution", "elementwise", "embedding", "linear"]
