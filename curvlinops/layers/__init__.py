"""How layers use their parameters: what per-sample and layerwise quantities are made of."""

# importing a file registers its rules
from curvlinops.layers import convolution, decompositions, elementwise, embedding, linear

__all__ = ["convolution", "decompositions", "elementwise", "embedding", "linear"]
