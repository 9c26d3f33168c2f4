"""Tools composed of gradients of samples and their curvature. Nothing below imports this room."""

from curvlinops.influence.datamodeling import DatamodelingScore, linear_datamodeling_score
from curvlinops.influence.scores import (
    preconditioned,
    score_batches,
    self_scores,
    top_scores,
)
from curvlinops.influence.store import GradientStore

__all__ = [
    "DatamodelingScore",
    "GradientStore",
    "linear_datamodeling_score",
    "preconditioned",
    "score_batches",
    "self_scores",
    "top_scores",
]
