"""Curvature matrices of neural networks as linear operators, for numpy and PyTorch alike."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from curvlinops.algorithms.certified import CertifiedScores, certified_scores
from curvlinops.algorithms.cg import CGInverseLinearOperator
from curvlinops.algorithms.dottest import dottest
from curvlinops.algorithms.eigsh import Eigenpairs, eigsh
from curvlinops.algorithms.hutchinson import (
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
)
from curvlinops.algorithms.intervals import Interval, bilinear_form, quadratic_form
from curvlinops.algorithms.iteration import (
    ConvergenceError,
    ConvergenceWarning,
    DivergenceError,
    Iteration,
    NegativeCurvatureError,
)
from curvlinops.algorithms.krylov import Solution
from curvlinops.algorithms.lanczos import lanczos_logdet, trace_function
from curvlinops.algorithms.lsmr import LSMRInverseLinearOperator, LSMRSolution
from curvlinops.algorithms.minres import MINRESInverseLinearOperator
from curvlinops.algorithms.neumann import NeumannInverseLinearOperator
from curvlinops.algorithms.results import to_plain
from curvlinops.algorithms.spectrum import (
    LanczosApproximateSpectrumCached,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
)
from curvlinops.algorithms.submatrix import SubmatrixLinearOperator
from curvlinops.algorithms.xtrace import xdiag, xnystrace, xtrace
from curvlinops.autodiff.parameters import select_parameters
from curvlinops.influence.low_rank import LowRankColumns
from curvlinops.influence.per_sample import PerSampleGradientLinearOperator
from curvlinops.influence.scores import functional_variance
from curvlinops.landscape import (
    LossAlong,
    by_layer,
    loss_along,
    plot_by_layer,
    plot_loss,
    plot_spectrum,
)
from curvlinops.linear_operator.operator import REMEDIES, TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.losses import LinearCrossEntropyLoss
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.empirical_fisher import EFLinearOperator
from curvlinops.operators.ggn import FisherMCLinearOperator, GGNLinearOperator
from curvlinops.operators.ggn_diagonal import GGNDiagonalLinearOperator
from curvlinops.operators.hessian import HessianLinearOperator
from curvlinops.operators.jacobian import (
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops.operators.kfac.ekfac import EKFACLinearOperator
from curvlinops.operators.kfac.files import load, write_factors
from curvlinops.operators.kfac.inverse import KFACInverseLinearOperator
from curvlinops.operators.kfac.kfac import KFACLinearOperator
from curvlinops.operators.kfac.options import FisherType, FitType, KFACType
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.diagonal import DiagonalLinearOperator, IdentityLinearOperator
from curvlinops.structured.kronecker import (
    EighDecomposedLinearOperator,
    KroneckerProductLinearOperator,
    ShiftedLinearOperator,
    SumOfKroneckersLinearOperator,
)

__version__ = "0.1.0"

__all__ = [
    "BlockDiagonalLinearOperator",
    "CGInverseLinearOperator",
    "CertifiedScores",
    "ConvergenceError",
    "ConvergenceWarning",
    "DataLinearOperator",
    "DiagonalLinearOperator",
    "DivergenceError",
    "EFLinearOperator",
    "EKFACLinearOperator",
    "Eigenpairs",
    "EighDecomposedLinearOperator",
    "FisherMCLinearOperator",
    "FisherType",
    "FitType",
    "GGNDiagonalLinearOperator",
    "GGNLinearOperator",
    "HessianLinearOperator",
    "IdentityLinearOperator",
    "Interval",
    "Iteration",
    "JacobianLinearOperator",
    "KFACInverseLinearOperator",
    "KFACLinearOperator",
    "KFACType",
    "KroneckerProductLinearOperator",
    "LSMRInverseLinearOperator",
    "LSMRSolution",
    "LanczosApproximateSpectrumCached",
    "LinearCrossEntropyLoss",
    "LossAlong",
    "LowRankColumns",
    "MINRESInverseLinearOperator",
    "NegativeCurvatureError",
    "NeumannInverseLinearOperator",
    "ParameterSpace",
    "PerSampleGradientLinearOperator",
    "ShiftedLinearOperator",
    "Solution",
    "StructuredLinearOperator",
    "SubmatrixLinearOperator",
    "SumOfKroneckersLinearOperator",
    "TorchLinearOperator",
    "TransposedJacobianLinearOperator",
    "bilinear_form",
    "by_layer",
    "certified_scores",
    "dottest",
    "eigsh",
    "functional_variance",
    "hutchinson_diag",
    "hutchinson_squared_fro",
    "hutchinson_trace",
    "hutchpp_trace",
    "lanczos_approximate_log_spectrum",
    "lanczos_approximate_spectrum",
    "lanczos_logdet",
    "load",
    "loss_along",
    "plot_by_layer",
    "plot_loss",
    "plot_spectrum",
    "quadratic_form",
    "select_parameters",
    "to_plain",
    "trace_function",
    "write_factors",
    "xdiag",
    "xnystrace",
    "xtrace",
]

#: Modules with further public names, which are imported when they are first asked for.
_MODULES = ["influence", "integrations", "kfac_utils", "landscape", "training"]


def __dir__() -> list[str]:
    """List what users need."""
    return [*__all__, *_MODULES, "__version__"]


if TYPE_CHECKING:
    from curvlinops import influence as influence
    from curvlinops import integrations as integrations
    from curvlinops import kfac_utils as kfac_utils
    from curvlinops import landscape as landscape
    from curvlinops import training as training
else:  # type checkers know that other names are missing

    def __getattr__(name: str) -> Any:
        """Import a module, or refuse other names by what to write instead."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        near = [other for other in __all__ if name.lower() in other.lower()]
        hint = f"Did you mean {', '.join(near)}?" if near else REMEDIES.get(name, "")
        message = f"module 'curvlinops' has no attribute '{name}'. {hint}"
        raise AttributeError(message.strip(), name=name)
