"""Callbacks of solvers and estimators, and histories of residuals."""

import warnings

import matrices
import problems
import pytest
import torch
from torch import Tensor

import curvlinops as C

GENERATOR = torch.Generator().manual_seed(0)
B = torch.randn(30, 3, dtype=torch.float64, generator=GENERATOR)
Q = torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64, generator=GENERATOR)).Q
A = (Q * torch.linspace(0.1, 1.0, 30, dtype=torch.float64)) @ Q.T
#: A preconditioner that is not symmetric.
P = torch.eye(30, dtype=torch.float64) + 0.02 * Q


def neumann(A: object, **options: object) -> C.NeumannInverseLinearOperator:
    return C.NeumannInverseLinearOperator(A, 60, preconditioner=P, **options)


def forms(interval: C.Interval) -> Tensor:
    return torch.stack(interval[:2])


#: Calls whose results are the field ``iterate``. The right-hand sides are the columns of ``B``.
SOLVERS = {
    "CG": lambda A, **o: C.CGInverseLinearOperator(A, **o) @ B,
    "CG, one column": lambda A, **o: (C.CGInverseLinearOperator(A, **o) @ B[:, 0])[:, None],
    "CG, restarts": lambda A, **o: C.CGInverseLinearOperator(A, rtol=1e-15, **o) @ B,
    "MINRES": lambda A, **o: C.MINRESInverseLinearOperator(A, **o) @ B,
    "Neumann": lambda A, **o: neumann(A, **o) @ B,
    "Neumann, adjoint": lambda A, **o: neumann(A, **o).T @ B,
    "eigsh": lambda A, **o: C.eigsh(A, 3, seed=0, **o).eigenvectors,
}
#: Calls whose results are the field ``values``.
SAMPLING = {"seed": 0, "chunk_size": 2}
ESTIMATORS = {
    "hutchinson_trace": lambda A, **o: C.hutchinson_trace(A, 8, **SAMPLING, **o),
    "hutchinson_diag": lambda A, **o: C.hutchinson_diag(A, 8, **SAMPLING, **o),
    "hutchinson_squared_fro": lambda A, **o: C.hutchinson_squared_fro(A, 8, **SAMPLING, **o),
    "hutchpp_trace": lambda A, **o: C.hutchpp_trace(A, 24, **SAMPLING, **o),
    "xtrace": lambda A, **o: C.xtrace(A, 24, **SAMPLING, **o),
    "xdiag, rtol": lambda A, **o: C.xdiag(A, 28, rtol=1e-5, **SAMPLING, **o),
    "xnystrace, rtol": lambda A, **o: C.xnystrace(A, 20, rtol=1e-5, **SAMPLING, **o),
    "trace_function": lambda A, **o: C.trace_function(A, torch.exp, 5, 8, **SAMPLING, **o),
    "lanczos_logdet": lambda A, **o: C.lanczos_logdet(A, 20, 8, **SAMPLING, **o),
    "quadratic_form": lambda A, **o: forms(C.quadratic_form(A, B, 1e-3, **o)),
    "bilinear_form": lambda A, **o: forms(C.bilinear_form(A, B, B[:, 0], 1e-3, **o)),
    "exact": lambda A, **o: C.hutchinson_trace(A, 30, **SAMPLING, **o),
}
CALLS = SOLVERS | ESTIMATORS
each_call = pytest.mark.parametrize("name", CALLS)


def run(name: str, matrix: object, callback: C.algorithms.iteration.Callback = None) -> Tensor:
    """Return the result of a call, which need not reach its tolerance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", C.ConvergenceWarning)
        return CALLS[name](matrix, callback=callback)


def result_of(name: str, state: C.Iteration) -> Tensor:
    return state.iterate if name in SOLVERS else state.values


@each_call
def test_called_after_each_iteration(name: str):
    counting, seen, products = matrices.Counting(A), [], []

    def callback(state: C.Iteration) -> None:
        seen.append(state)
        products.append(counting.products)

    result = run(name, counting, callback)
    assert [state.iteration for state in seen] == list(range(1, len(seen) + 1))
    assert len(seen) > 1 or name in ("xtrace", "exact")
    assert [state.num_products for state in seen] == products == sorted(set(products))
    assert torch.equal(run(name, matrices.Counting(A)), result)
    if name != "CG, restarts":  # the last restart may gain nothing
        assert torch.equal(result_of(name, seen[-1]), result)


@each_call
def test_true_stops(name: str):
    everything, seen = [], []
    run(name, A, everything.append)
    stop = min(2, len(everything))

    def callback(state: C.Iteration) -> Tensor:
        seen.append(state)
        return torch.tensor(state.iteration == stop)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CALLS[name](A, callback=callback)
    assert len(seen) == stop and torch.equal(result, result_of(name, seen[-1]))
    for state, same in zip(seen, everything, strict=False):  # later iterations change no state
        assert torch.equal(result_of(name, state), result_of(name, same))


def overwrite(state: C.Iteration) -> None:
    """Change all tensors of a state."""
    for tensor in (state.residuals, state.iterate, state.values):
        if tensor is not None:
            tensor.fill_(torch.nan)


@each_call
def test_callbacks_may_change_what_they_get(name: str):
    assert torch.equal(run(name, A, overwrite), run(name, A))


def test_histories_and_densities_are_no_callbacks_tensors():
    for inverse in (C.CGInverseLinearOperator, C.MINRESInverseLinearOperator):
        changed, plain = (inverse(A, callback=f).solve(B).history for f in (overwrite, None))
        assert torch.equal(changed, plain)
    for function in (C.lanczos_approximate_spectrum, C.lanczos_approximate_log_spectrum):
        changed, plain = (
            function(A, 6, num_repeats=4, callback=f, **SAMPLING) for f in (overwrite, None)
        )
        assert all(map(torch.equal, changed, plain))
    changed, plain = (C.eigsh(A, 3, callback=f) for f in (overwrite, None))
    assert torch.equal(changed.history, plain.history)


@each_call
def test_what_is_no_callback(name: str):
    counting = matrices.Counting(A)
    with pytest.raises(TypeError, match="callback must be a function of an Iteration, got 3"):
        run(name, counting, 3)
    assert not counting.products


@pytest.mark.parametrize("inverse", [C.CGInverseLinearOperator, C.MINRESInverseLinearOperator])
@pytest.mark.parametrize("rtol", [1e-5, 1e-15])
def test_history_of_residuals(inverse: type, rtol: float):
    seen, X0 = [], torch.ones(30, dtype=torch.float64)
    columns = torch.cat([B, A[:, :1], 0 * B[:, :1]], dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", C.ConvergenceWarning)
        solution = inverse(A, rtol=rtol, x0=X0, callback=seen.append).solve(columns)
    assert torch.equal(solution.history, torch.stack([state.residuals for state in seen]))
    assert solution.history.shape == (len(seen), 5) and solution.history.dtype == torch.float64
    true = torch.stack([(columns - A @ state.iterate).norm(dim=0) for state in seen])
    torch.testing.assert_close(solution.history, true, rtol=1e-4, atol=1e-13)
    assert inverse(A).solve(0 * columns).history.shape == (0, 5)


def test_stopped_where_the_residual_has_grown():
    matrix = torch.diag(torch.tensor([1.0, 1000.0]))
    b, seen = torch.tensor([1.0, 0.03]), []

    def callback(state: C.Iteration) -> bool:
        seen.append(state)
        return True

    solution = C.CGInverseLinearOperator(matrix, callback=callback).solve(b)
    assert torch.equal(solution.x, seen[0].iterate[:, 0]) and not solution.converged
    assert float(solution.residuals) > 10 * float(b.norm())
    torch.testing.assert_close(solution.residuals, seen[0].residuals, rtol=1e-5, atol=0)


@pytest.mark.parametrize("log", [False, True])
def test_densities(log: bool):
    function = C.lanczos_approximate_log_spectrum if log else C.lanczos_approximate_spectrum
    seen: list[C.Iteration] = []
    options = {"boundaries": (0.05, 1.05), "seed": 0, "return_error": True, "chunk_size": 2}
    full = function(A, 6, num_repeats=5, callback=seen.append, **options)
    assert [state.num_products for state in seen] == [12, 24, 30]
    assert [tuple(state.values.shape) for state in seen] == [(2, 6), (2, 6), (1, 6)]
    assert all(map(torch.equal, full, function(A, 6, num_repeats=5, **options)))
    stopped = function(A, 6, num_repeats=5, callback=lambda s: s.iteration == 2, **options)
    assert all(map(torch.equal, stopped, function(A, 6, num_repeats=4, **options)))


@pytest.fixture
def G() -> C.GGNLinearOperator:
    p = problems.make("mlp-ce-mean")
    return p.build(C.GGNLinearOperator).damped(0.5)


def fail(state: C.Iteration) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize(
    "call",
    [
        lambda G, b, callback: C.hutchinson_trace(G, 8, seed=0, callback=callback),
        lambda G, b, callback: C.lanczos_approximate_spectrum(G, 4, seed=0, callback=callback)[1],
        lambda G, b, callback: C.CGInverseLinearOperator(G, callback=callback) @ b,
        lambda G, b, callback: C.MINRESInverseLinearOperator(G, callback=callback).solve(b).x,
        lambda G, b, callback: (
            C.NeumannInverseLinearOperator(G, 3, 0.5, rtol=1, callback=callback) @ b
        ),
    ],
)
def test_linearized_and_errors(call: object, G: C.TorchLinearOperator):
    b = torch.ones(G.shape[0], 2, dtype=G.torch_dtype)
    product = G @ b
    expected, inside = call(G, b, None), []
    with pytest.raises(KeyError, match="mine"):
        call(G, b, fail)
    with G.linearized():
        with pytest.raises(KeyError, match="mine"):
            call(G, b, fail)
        found = call(G, b, lambda state: inside.append(G @ b))
    for other in (found, call(G, b, None)):
        torch.testing.assert_close(other, expected)
    for same in inside:
        torch.testing.assert_close(same, product)
    assert inside
