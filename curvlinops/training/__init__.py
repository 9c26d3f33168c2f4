"""Tools for training loops, composed of public calls: nothing below imports it."""

from curvlinops.training.kfac_preconditioner import KFACPreconditioner
from curvlinops.training.monitor import CurvatureMonitor

__all__ = ["CurvatureMonitor", "KFACPreconditioner"]
