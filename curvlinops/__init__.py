"""Curvature matrices of neural networks as linear operators, for numpy and PyTorch alike."""

from curvlinops.core.operator import TorchLinearOperator
from curvlinops.core.space import ParameterSpace
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.empirical_fisher import EFLinearOperator
from curvlinops.operators.ggn import FisherMCLinearOperator, GGNLinearOperator
from curvlinops.operators.ggn_diagonal import GGNDiagonalLinearOperator
from curvlinops.operators.hessian import HessianLinearOperator
from curvlinops.operators.jacobian import (
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops.operators.per_sample import PerSampleGradientLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.diagonal import DiagonalLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.identity import IdentityLinearOperator
from curvlinops.structured.kronecker import KroneckerProductLinearOperator

__all__ = [
    "BlockDiagonalLinearOperator",
    "DataLinearOperator",
    "DiagonalLinearOperator",
    "EFLinearOperator",
    "EighDecomposedLinearOperator",
    "FisherMCLinearOperator",
    "GGNDiagonalLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "IdentityLinearOperator",
    "JacobianLinearOperator",
    "KroneckerProductLinearOperator",
    "ParameterSpace",
    "PerSampleGradientLinearOperator",
    "TorchLinearOperator",
    "TransposedJacobianLinearOperator",
]
