"""How layers use their parameters: what per-sample and layerwise quantities are made of."""

# importing a file registers its rules
from curvlinops.layers import convolution, einsum, elementwise, embedding, linear, normalization

__all__ = ["convolution", "einsum", "elementwise", "embedding", "linear", "normalization"]
