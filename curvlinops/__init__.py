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
from curvlinops.operators.kronecker.ekfac import EKFACLinearOperator
from curvlinops.operators.kronecker.inverse import KFACInverseLinearOperator
from curvlinops.operators.kronecker.kfac import KFACLinearOperator
from curvlinops.operators.kronecker.options import FisherType, KFACType
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
    "EKFACLinearOperator",
    "EighDecomposedLinearOperator",
    "FisherMCLinearOperator",
    "FisherType",
    "GGNDiagonalLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "IdentityLinearOperator",
    "JacobianLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KroneckerProductLinearOperator",
    "ParameterSpace",
    "PerSampleGradientLinearOperator",
    "TorchLinearOperator",
    "TransposedJacobianLinearOperator",
]
