"""The names of curvlinops-for-pytorch that this package has not, and what to write instead."""

import sys
from typing import Any

_MATRICES = "functions take matrices and tensors as they are, such as xtrace(matrix, 6)"
_NONE = "there is no counterpart"

#: Modules and classes by name; the page "Coming from other packages" has them, too.
FORMER = {
    # modules
    "ekfac": "from curvlinops import EKFACLinearOperator",
    "fisher": "from curvlinops import FisherMCLinearOperator",
    "ggn": "from curvlinops import GGNLinearOperator",
    "gradient_moments": "from curvlinops import EFLinearOperator",
    "hessian": "from curvlinops import HessianLinearOperator",
    "inverse": "from curvlinops import CGInverseLinearOperator, LSMRInverseLinearOperator, "
    "NeumannInverseLinearOperator, KFACInverseLinearOperator",
    "jacobian": "from curvlinops import JacobianLinearOperator, TransposedJacobianLinearOperator",
    "kfac": "from curvlinops import KFACLinearOperator, FisherType, KFACType",
    "submatrix": "from curvlinops import SubmatrixLinearOperator",
    "diagonal": "from curvlinops import hutchinson_diag, xdiag",
    "norm": "from curvlinops import hutchinson_squared_fro",
    "trace": "from curvlinops import hutchinson_trace, hutchpp_trace, xtrace",
    "papyan2020traces": "from curvlinops import lanczos_approximate_spectrum, "
    "lanczos_approximate_log_spectrum",
    "examples": _MATRICES,
    "experimental": _NONE,
    # classes
    "HutchinsonTraceEstimator": "hutchinson_trace(A, num_matvecs)",
    "HutchPPTraceEstimator": "hutchpp_trace(A, num_matvecs)",
    "HutchinsonDiagonalEstimator": "hutchinson_diag(A, num_matvecs)",
    "HutchinsonSquaredFrobeniusNormEstimator": "hutchinson_squared_fro(A, num_matvecs)",
    "TensorLinearOperator": _MATRICES,
    "ActivationHessianLinearOperator": _NONE,
    "KFOCLinearOperator": _NONE,
}


def explain(name: str) -> str:
    """Return the message for a former name."""
    return (
        f"'curvlinops.{name}' is a name of curvlinops-for-pytorch, which this package has not. "
        f"Here: {FORMER[name]}. See the page 'Coming from other packages' of the documentation."
    )


class _FormerNames:
    """Finds no module; Python asks it for those of this package that are not there.

    Python looks for a module of that name, too, if ``from curvlinops import name`` finds no
    attribute.
    """

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package == "curvlinops" and name in FORMER:
            raise ImportError(explain(name), name=fullname)


sys.meta_path.append(_FormerNames)
