"""What is computed with operators: by methods of some of them, and by algorithms of any."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import curvlinops as C
from curvlinops import TorchLinearOperator

Spectrum = C.LanczosApproximateSpectrumCached


def ones(A: TorchLinearOperator, *shape: int) -> Any:
    """A vector of ones, or several; as DTensors where processes have parts of vectors."""
    own = A.domain.empty(0).shape[1]
    return A.domain.vectors(torch.ones(own, *shape, dtype=A.torch_dtype, device=A.device))


#: Of a positive definite operator with at least eight dimensions.
ALGORITHMS: dict[str, Callable[[TorchLinearOperator], Any]] = {
    "CG": lambda A: C.CGInverseLinearOperator(A) @ ones(A),
    "CG, damped": lambda A: C.CGInverseLinearOperator(A, damping=0.1) @ ones(A),
    "MINRES": lambda A: C.MINRESInverseLinearOperator(A).solve(ones(A)).x,
    "LSMR": lambda A: C.LSMRInverseLinearOperator(A) @ ones(A),
    "LSMR, info": lambda A: C.LSMRInverseLinearOperator(A).matvec_with_info(ones(A)).x,
    "Neumann": lambda A: C.NeumannInverseLinearOperator(A, scale=0.5, rtol=1) @ ones(A),
    "eigsh": lambda A: tuple(C.eigsh(A, 2, seed=0)),
    "hutchinson_trace": lambda A: C.hutchinson_trace(A, 2, seed=0),
    "hutchinson_diag": lambda A: C.hutchinson_diag(A, num_matvecs=2, seed=0),
    "hutchinson_squared_fro": lambda A: C.hutchinson_squared_fro(A, 2, seed=0),
    "hutchpp_trace": lambda A: C.hutchpp_trace(A, 6, seed=0),
    "xtrace": lambda A: C.xtrace(A, 6, seed=0),
    "xtrace to a tolerance": lambda A: C.xtrace(A, 4, "gaussian", rtol=0.1, seed=0),
    "xdiag": lambda A: C.xdiag(A, 6, seed=0),
    "xnystrace": lambda A: C.xnystrace(A, 6, seed=0),
    "trace_function": lambda A: C.trace_function(A, torch.exp, 3, seed=0),
    "lanczos_logdet": lambda A: C.lanczos_logdet(A, seed=0),
    "quadratic_form": lambda A: C.quadratic_form(A, ones(A, 2), 0.1, 5, 0)[:2],
    "bilinear_form": lambda A: C.bilinear_form(A, ones(A), ones(A, 2), 0.1, 5, 0)[:2],
    "spectrum": lambda A: C.lanczos_approximate_spectrum(A=A, ncv=3, seed=0),
    "cached spectrum": lambda A: Spectrum(A, 3, seed=0).approximate_spectrum(),
    "log spectrum": lambda A: C.lanczos_approximate_log_spectrum(A, 3, seed=0),
    "cached log spectrum": lambda A: Spectrum(A, 3, seed=0).approximate_log_spectrum(),
}

KFAC, REDUCE = {"fisher_type": "type-2"}, {"fisher_type": "empirical", "kfac_approx": "reduce"}


def drawn(K: TorchLinearOperator) -> Tensor:
    return K.inverse(damping=0.1).sample(torch.Generator(K.device).manual_seed(0), 3)


def root_of_four(K: TorchLinearOperator) -> TorchLinearOperator:
    return (4 * C.IdentityLinearOperator(K.space)) ** 0.5


#: The name of an operator in `contract.ALL`, its options, and what it computes.
METHODS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "gradient": ("ggn", {}, lambda G: G.gradient_and_loss()),
    "diagonal": ("ggn-diagonal", {}, lambda D: D.diagonal()),
    "Jacobian's gram": ("jacobian", {}, lambda J: J.gram()),
    "rows": ("gradients", {}, lambda R: R.dense()),
    "some rows": ("gradients", {"subsampling": [3, 0]}, lambda R: R.dense()),
    "gram": ("gradients", {}, lambda R: R.gram()),
    "norms": ("gradients", {}, lambda R: R.norms()),
    "second moment": ("gradients", {}, lambda R: R.second_moment()),
    "variance": ("gradients", {}, lambda R: R.variance()),
    "submatrix": ("ggn", {}, lambda G: C.SubmatrixLinearOperator(G, [0, 3], [1]).to_dense()),
    "factors": ("kfac", {}, lambda K: tuple(K.gradient_covariances.values())),
    "state": ("kfac", {}, lambda K: K.state_dict()),
    "trace": ("kfac", KFAC, lambda K: K.trace()),
    "determinant": ("kfac", KFAC, lambda K: K.inverse(damping=0.1).logdet()),
    "sample": ("kfac", KFAC, drawn),
    "reduce": ("kfac", REDUCE, lambda K: K.diagonal()),
    "product of structures": ("kfac", KFAC, lambda K: (K @ K).to_dense()),
    "eigendecomposition": ("kfac", KFAC, lambda K: K.eigh().to_dense()),
    "root of the identity": ("kfac", {}, lambda K: root_of_four(K).to_dense()),
    "inverse": ("kfac", KFAC, lambda K: K.inverse(damping=0.1).to_dense()),
    "inverse root": ("kfac", KFAC, lambda K: (K.inverse(damping=0.1) ** 0.5).to_dense()),
    "exact damping": ("kfac", KFAC, lambda K: K.inverse(0.1, use_exact_damping=True).diagonal()),
    "heuristic": ("kfac", KFAC, lambda K: K.inverse(0.1, use_heuristic_damping=True).diagonal()),
    "EKFAC inverse": ("ekfac", KFAC, lambda K: K.inverse(damping=0.1).to_dense()),
    "EKFAC root": ("ekfac", KFAC, lambda K: (K.inverse(damping=0.1) ** 0.5).diagonal()),
}
