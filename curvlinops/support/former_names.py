"""Names of curvlinops-for-pytorch that this package does not have, and what to write instead."""

_MATRICES = "functions take matrices and tensors as they are, such as xtrace(matrix, 6)"
_NONE = "there is no counterpart"
_HELPERS = "there is no counterpart, its functions were helpers"
_BASE = "from curvlinops import TorchLinearOperator"

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
    "outer": _HELPERS,
    "sampling": "torch.randn(D) draws a vector",
    "utils": _HELPERS,
    "_base": _BASE,
    "_torch_base": _BASE,
    # classes
    "PyTorchLinearOperator": _BASE,
    "HutchinsonTraceEstimator": "hutchinson_trace(A, num_matvecs)",
    "HutchPPTraceEstimator": "hutchpp_trace(A, num_matvecs)",
    "HutchinsonDiagonalEstimator": "hutchinson_diag(A, num_matvecs)",
    "HutchinsonSquaredFrobeniusNormEstimator": "hutchinson_squared_fro(A, num_matvecs)",
    "TensorLinearOperator": _MATRICES,
    "ActivationHessianLinearOperator": _NONE,
    "KFOCLinearOperator": "KFACLinearOperator(..., fit='frobenius')",
}

#: Methods by name, and what to write instead.
FORMER_METHODS = {
    **dict.fromkeys(("torch_matvec", "torch_matmat"), "Write A @ x, which takes tensors, too."),
    **dict.fromkeys(
        (
            "set_cg_hyperparameters",
            "set_lsmr_hyperparameters",
            "set_neumann_hyperparameters",
            "set_submatrix",
        ),
        "These are arguments of the constructor.",
    ),
    **dict.fromkeys(
        ("compute_eigenvalue_correction", "_compute_kfac"), "Call A.compute_kronecker_factors()."
    ),
    **dict.fromkeys(
        ("from_state_dict", "load_state_dict"),
        "Kronecker factors have it: call K.load_state_dict(state), then K.inverse(damping).",
    ),
}

#: Keywords by name, and what to do instead, for operators that do not have them.
FORMER_KEYWORDS = {
    "loss_average": "leave it out, since the reduction of the loss says what is averaged",
    "shape": "leave it out, since it follows from the other arguments",
    "backend": "leave it out, since there is only one",
    "group": "it is called process_group",
    "process_group": "leave it out, since rows are for the data of one process",
}


def explain(name: str) -> str:
    """Return the message for a former name."""
    return (
        f"'curvlinops.{name}' is a name of curvlinops-for-pytorch that this package does not have. "
        f"Here: {FORMER[name]}. See the page 'Coming from other packages' of the documentation."
    )
