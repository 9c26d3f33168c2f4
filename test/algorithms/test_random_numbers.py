"""Which calls draw from the global generators of random numbers, and when."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import small
import torch

import curvlinops as C

NET = small.mlp()
H = small.build(C.HessianLinearOperator, NET)
G = small.build(C.GGNLinearOperator, NET).damped(0.1)
D = H.shape[0]
ONES = torch.ones(D, dtype=torch.float64)
DIAGONAL = C.DiagonalLinearOperator(ONES)
RUNS = C.LanczosApproximateSpectrumCached(H, 3)

#: The results of these do not depend on random numbers, or have a fixed seed.
SOLVERS = {
    "eigsh": lambda: C.eigsh(H, 2),
    "eigsh, v0": lambda: C.eigsh(H, 1, v0=ONES),
    "eigsh, many": lambda: C.eigsh(H, D),
    "eigsh, structure": lambda: C.eigsh(DIAGONAL, 2),
    "CG": lambda: C.CGInverseLinearOperator(G) @ ONES,
    "MINRES": lambda: C.MINRESInverseLinearOperator(G) @ ONES,
    "LSMR": lambda: C.LSMRInverseLinearOperator(G) @ ONES,
    "Neumann": lambda: C.NeumannInverseLinearOperator(G, 5, 0.1, rtol=1) @ ONES,
    "sampled Fisher": lambda: small.build(C.FisherMCLinearOperator, NET) @ ONES,
    "KFAC": lambda: small.build(C.KFACLinearOperator, NET).trace(),
    "exact trace": lambda: C.hutchinson_trace(H, D),
    "seed": lambda: C.xtrace(H, 6, seed=0),
    "generator": lambda: C.xtrace(H, 6, generator=torch.Generator().manual_seed(0)),
}
#: These refuse an argument, as in the tables of errors of estimators and spectra.
REFUSED = {
    "callback": lambda: C.hutchinson_trace(H, 4, callback=3),
    "cached spectrum": lambda: RUNS.approximate_spectrum(num_points=0),
    "dottest": lambda: C.dottest(H, 0),
    "sample": lambda: DIAGONAL.sample(num_samples=-1),
}
#: These draw from PyTorch's global generator.
ESTIMATES = {
    "hutchinson_trace": lambda: C.hutchinson_trace(H, 4),
    "hutchinson_diag": lambda: C.hutchinson_diag(H, 4),
    "hutchinson_squared_fro": lambda: C.hutchinson_squared_fro(H, 4),
    "hutchpp_trace": lambda: C.hutchpp_trace(H, 6),
    "xtrace": lambda: C.xtrace(H, 6),
    "xnystrace": lambda: C.xnystrace(G, 6),
    "xdiag": lambda: C.xdiag(H, 6),
    "trace_function": lambda: C.trace_function(G, torch.exp, 3, 2),
    "lanczos_logdet": lambda: C.lanczos_logdet(G, 3, 2),
    "spectrum": lambda: C.lanczos_approximate_spectrum(H, 3)[1],
    "sample": lambda: DIAGONAL.sample(),
}


def states() -> tuple:
    """Return the states of the global generators."""
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_draw_nothing(name: str):
    before = states()
    SOLVERS[name]()
    assert states() == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_draws_nothing(name: str):
    before = states()
    with pytest.raises((ValueError, TypeError)):
        REFUSED[name]()
    assert states() == before


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimators_draw_from_the_global_generator(name: str):
    def draws(estimate: Callable) -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [estimate(), estimate()]

    first, other = draws(ESTIMATES[name])
    assert not torch.equal(first, other)
    assert all(map(torch.equal, draws(ESTIMATES[name]), [first, other]))


def test_eigsh_repeats():
    first = C.eigsh(H, 3)
    torch.rand(5)
    assert torch.equal(C.eigsh(H, 3).eigenvectors, first.eigenvectors)
    assert not torch.equal(C.eigsh(H, 3, seed=1).eigenvectors, first.eigenvectors)
