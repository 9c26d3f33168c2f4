"""Curvature matrices of neural networks as linear operators, for numpy and PyTorch alike."""

from curvlinops.algorithms.convergence import ConvergenceError, ConvergenceWarning
from curvlinops.algorithms.eigsh import Eigenpairs, eigsh
from curvlinops.core.operator import TorchLinearOperator
from curvlinops.core.space import ParameterSpace
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.empirical_fisher import EFLinearOperator
from curvlinops.operators.ggn import FisherMCLinearOperator, GGNLinearOperator
from curvlinops.operators.ggn_diagonal import GGNDiagonalLinearOperator
from curvlinops.operators.hessian import HessianLinearOperator
from curvlinops.operators.identity import IdentityLinearOperator
from curvlinops.operators.jacobian import (
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops.operators.per_sample import PerSampleGradientLinearOperator

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "DataLinearOperator",
    "EFLinearOperator",
    "Eigenpairs",
    "FisherMCLinearOperator",
    "GGNDiagonalLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "IdentityLinearOperator",
    "JacobianLinearOperator",
    "ParameterSpace",
    "PerSampleGradientLinearOperator",
    "TorchLinearOperator",
    "TransposedJacobianLinearOperator",
    "eigsh",
]
