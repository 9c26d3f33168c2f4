"""Tools composed of gradients of samples and their curvature. Nothing below imports this room."""

from curvlinops.influence.store import GradientStore

__all__ = ["GradientStore"]
