"""Looks at losses and layers by products with operators. Nothing below imports this room."""

from curvlinops.landscape.by_layer import by_layer
from curvlinops.landscape.loss_along import LossAlong, loss_along
from curvlinops.landscape.plotting import plot_by_layer, plot_loss, plot_spectrum

__all__ = ["LossAlong", "by_layer", "loss_along", "plot_by_layer", "plot_loss", "plot_spectrum"]
