"""Layers' uses of their parameters, of which per-sample and layerwise quantities are made."""

# importing a file registers its rules
from curvlinops.layers import convolution, elementwise, embedding, linear

__all__ = ["convolution", "elementwise", "embedding", "linear"]
