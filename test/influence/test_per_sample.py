"""Gradients of single samples: the matrix, and quantities that are computed without it."""

from itertools import product
from math import prod
from typing import Any

import problems
import pytest
import reference
import torch
from contract import CASES, CORE, MC, dense, error, matrix
from models import Tokens, Using
from problems import Problem
from sample_gradients import check_rows
from tables import core
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlinops import PerSampleGradientLinearOperator
from curvlinops.layers import gradients, samples
from curvlinops.operators import gram

#: Parameters that no rule covers, by problem; all others must not need a pass for each sample.
UNCOVERED = {
    "inner-steps": {"weight", "bias", "size"},
    # its rows are along no axis of samples
    "lstm-packed": {f"layer.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")},
}


def build(problem: str, **options) -> PerSampleGradientLinearOperator:
    """Build the operator for a problem."""
    return CASES["gradients"].build(problems.make(problem), **options)


@pytest.mark.parametrize("problem", core(problems.MODEL_NAMES, problems.NAMES))
def test_rows(problem: str):
    p, rows = problems.make(problem), dense("gradients", problem)
    operator = build(problem)
    check_rows(operator, rows, p.tolerance)
    assert set(operator.fallbacks) == UNCOVERED.get(problem, set())
    if "low-precision" not in p.tags:
        scale = float(rows.square().mean(0).norm()) or 1.0
        found = operator.variance() - rows.var(0, correction=0)
        assert float(found.norm()) <= p.tolerance * scale


@pytest.mark.extensive
@pytest.mark.parametrize(
    "problem", [n for n in problems.NAMES if n in CORE or n.startswith(("tokens", "classes"))]
)
def test_terms(problem: str):
    """Of problems with several terms for a sample, and some others."""
    p, operator = problems.make(problem), build(problem, terms="term")
    expected, rows = torch.cat(reference.term_gradients(p)), torch.zeros(operator.shape).double()
    # ignored terms have a row of zeros
    rows[operator.dense().norm(dim=1) > 0] = expected[expected.norm(dim=1) > 0]
    check_rows(operator, rows, p.tolerance)


@pytest.mark.parametrize("problem", ["mlp-ce-all-mean", "functional", "closure"])
def test_gradients(problem: str):
    """Gradients are in a list or a dictionary, like parameters, with a first axis of samples."""
    operator, params = build(problem), problems.make(problem).params
    found = operator.gradients()
    assert type(found) is type(params)
    assert not isinstance(found, dict) or list(found) == list(params)
    for gradient, param in zip(tree_leaves(found), tree_leaves(params), strict=True):
        assert gradient.shape == (operator.shape[0], *param.shape)


def test_variance_of_gradients_that_are_almost_equal():
    """Squares of means are subtracted, which float32 has no digits for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 1))
    model.append(nn.PReLU())
    X = torch.randn(6) + 1e-3 * torch.randn(9, 1, 6)
    data = [(x, 3000 + torch.randn(len(x), 1)) for x in X.split([5, 4])]
    operator = PerSampleGradientLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    expected = operator.dense().double().var(0, correction=0)
    # where squares were subtracted in float32, the error was 0.1
    assert error(operator.variance(), expected) <= 1e-4


@pytest.mark.parametrize(
    "problem, terms",
    core(
        [
            *product(["mlp-ce-prob-all-mean", "transformer-tied"], ["sample", "term"]),
            ("pinn", "sample"),  # one term per sample
        ],
        [("lstm-packed", "sample")],
    ),
)
def test_subsampling(problem: str, terms: str):
    p = problems.make(problem)
    rows = torch.cat(reference.term_gradients(p))
    if terms == "sample":
        rows = reference.per_sample_gradients(p)
    for indices in ([2, 0, 2], list(range(len(rows)))[::-1], torch.tensor([len(rows) - 1])):
        operator = build(problem, subsampling=indices, terms=terms)
        check_rows(operator, rows[torch.as_tensor(indices)], p.tolerance)


def test_no_rows():
    operator = build("mlp-ce-all-mean", subsampling=[])
    assert operator.dense().shape == operator.shape == (0, operator.shape[1])
    assert operator.gram().shape == (0, 0)


@pytest.mark.parametrize("indices", [3, "ab", [0.5], [True], [9], [-1], [[0]]])
def test_refused_indices(indices: Any):
    with pytest.raises(ValueError, match="subsampling (must be|has indices)"):
        build("mlp-ce-all-mean", subsampling=indices)


def token_batches(*shapes: tuple[int, int], packed: bool = False) -> list[tuple[Any, Tensor]]:
    """Return batches of so many samples and tokens; those that are packed have no evident size."""
    batches = [(torch.randn(*s, 3).double(), torch.randn(*s, 2).double()) for s in shapes]
    return [({"x": X, "table": torch.ones(7)}, y) for X, y in batches] if packed else batches


def token_problem(packed: bool = False) -> Problem:
    """Return a model with an output for each token, and two batches."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    model = Using(lambda s, X: s.layer(X["x"] if isinstance(X, dict) else X), layer=layer)
    data = token_batches((2, 4), (3, 4), packed=packed)
    return Problem.of(model, nn.MSELoss(), data)


@pytest.mark.parametrize("terms, packed", [("sample", False), ("term", True)])
def test_subsampling_of_other_batches(terms: str, packed: bool):
    p = token_problem(packed)
    size = (lambda X: len(X["x"])) if packed else None
    rows = [4, 3] if terms == "sample" else [19, 8]  # of the second batch
    A = CASES["gradients"].build(p, subsampling=rows, terms=terms, batch_size_fn=size)
    p.data[:] = token_batches((2, 4), (3, 4), packed=packed)
    by_sample = reference.per_sample_gradients(p)
    wanted = by_sample if terms == "sample" else torch.cat(reference.term_gradients(p))
    check_rows(A, wanted[rows])
    others = [((1, 4), (4, 4)), ((3, 4), (2, 4)), ((3, 4), (3, 4))]
    if terms == "term":
        others.append(((2, 5), (3, 4)))
    for shapes in others:
        p.data[:] = token_batches(*shapes, packed=packed)
        with pytest.raises(RuntimeError, match="With subsampling=, batches must keep their len"):
            A.norms()
    p.data[:] = token_batches((2, 4), packed=packed)
    with pytest.raises(RuntimeError, match="at construction it had"):
        A.norms()


def test_empirical_fisher_of_batches_whose_size_is_not_evident():
    p = token_problem(packed=True)
    assert error(CASES["fisher"].build(p).to_dense(), reference.empirical_fisher(p)) <= 1e-10


def test_kernels_of_other_numbers_of_rows():
    p = token_problem()
    J = CASES["jacobian"].build(p)
    p.data[:] = token_batches((1, 4), (4, 4))
    rows = reference.jacobian(p)
    assert error(J.gram(), rows @ rows.T) <= 1e-10
    for other in ([(2, 4)], [(2, 4), (3, 4), (1, 4)], [(2, 4), (3, 5)]):
        p.data[:] = token_batches(*other)
        with pytest.raises(RuntimeError, match="Build a new operator|build a new operator"):
            J.gram()


def test_sequences_of_which_the_first_have_one_token():
    """Terms are finer than samples on a later batch only."""
    torch.manual_seed(0)
    model = Tokens(axis=1).double()
    data = [(torch.randint(5, (3, T)), torch.randint(3, (3, T))) for T in (1, 4)]
    loss = nn.CrossEntropyLoss(reduction="sum")
    p = Problem.of(model, loss, data)
    expected = reference.empirical_fisher(p)
    for cache in ("none", "auto", 2000):
        F = CASES["fisher"].build(p, cache=cache)
        v = torch.randn(len(expected)).double()
        assert error(F @ v, expected @ v) <= 1e-10
        with F.linearized():
            for _ in range(2):
                assert error(F @ v, expected @ v) <= 1e-10


@pytest.mark.parametrize("problem", core(CORE, problems.MODEL_NAMES))
def test_jacobian_and_tangent_kernel(problem: str):
    p, J = problems.make(problem), dense("jacobian", problem)
    operator = CASES["jacobian"].build(p)
    assert error(operator.to_dense(), J) <= p.tolerance
    assert error(operator.gram(), J @ J.T) <= p.tolerance


def test_tangent_kernel_of_coupled_samples():
    """Rows that depend on several samples are computed one by one."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)]
    model, data = nn.Sequential(*layers).double(), [(torch.randn(5, 3).double(), None)]
    p = Problem.of(model, None, data)
    with pytest.warns(UserWarning, match="BatchNorm in train mode"):
        J = CASES["jacobian"].build(p)
    torch.testing.assert_close(J.gram(), matrix(J) @ matrix(J).T)
    torch.testing.assert_close(J.to_dense(), matrix(J))


def test_tangent_kernel_of_unequal_batches(monkeypatch: pytest.MonkeyPatch):
    """With and without samples, and more gradients than fit the memory at once."""
    layers = [nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)]
    net, scale = nn.Sequential(*layers), torch.ones(3)
    model = Using(lambda s, X: s.net(X) * s.scale.exp(), net=net, scale=scale).double()
    data = [(torch.randn(n, 2, 4, 4).double(), None) for n in (3, 0, 5, 1)]
    p = Problem.of(model, None, data)
    J, expected = CASES["jacobian"].build(p), reference.jacobian(p)
    for size in (gradients.BYTES, 2000, 500, 1):
        for module in (gradients, gram, samples):
            monkeypatch.setattr(module, "BYTES", size)
        torch.testing.assert_close(J.gram(), expected @ expected.T)
        torch.testing.assert_close(J.to_dense(), expected)


@pytest.mark.parametrize("problem", core([n for n in MC if not n.endswith("-sum")], MC))
def test_trace_and_diagonal(problem: str):
    p = problems.make(problem)
    operator, expected = CASES["ggn-diagonal"].build(p), dense("ggn-diagonal", problem)
    assert error(operator.diagonal(), expected.diagonal()) <= p.tolerance
    assert error(operator.trace(), expected.trace()) <= p.tolerance


@pytest.mark.parametrize("quantity", ["diagonal", "trace"])
def test_diagonals_that_are_no_numbers(quantity: str):
    """Norms of multiples of samples have no derivative where the factor is zero."""
    X, y = torch.randn(4, 2), torch.randn(4, 1)

    def compute(scale: float, num_samples: int) -> Tensor:
        model = Using(
            lambda s, x: (x * s.scale).pow(2).sum(-1, keepdim=True).sqrt(),
            scale=torch.full((2,), scale),
            unused=torch.ones(3),
        )
        data, loss = [(X[:num_samples], y[:num_samples])], nn.MSELoss(reduction="sum")
        p = Problem.of(model, loss, data)
        operator = CASES["ggn-diagonal"].build(p, check_deterministic=False)
        return getattr(operator, quantity)().sum()

    # of the norm of a x, with equal numbers a, the derivatives are x_i^2 / |x|
    expected = 2 * (X**2 / X.norm(dim=1, keepdim=True)).square().sum()
    torch.testing.assert_close(compute(0.5, 4), expected)
    with pytest.raises(ValueError, match="is not finite"):
        compute(0.0, 4)
    with pytest.raises(ValueError, match="The data has no term"):
        compute(0.5, 0)


@pytest.mark.extensive
@pytest.mark.parametrize("problem", ["classes-ce-ignore-mean", "transformer-tied"])
def test_sampled_diagonal_converges(problem: str):
    """Terms of one sample may interact."""
    p = problems.make(problem)
    exact, estimates = dense("ggn-diagonal", problem).diagonal(), []
    for seed in range(100):
        operator = CASES["ggn-diagonal"].build(p, mc_samples=10, seed=seed)
        estimates.append(operator.diagonal())
        torch.testing.assert_close(operator.trace(), estimates[-1].sum())
    mean = torch.stack(estimates).mean(0)
    deviation = torch.stack(estimates).std(0) / len(estimates) ** 0.5
    # about one in twenty is farther off than two standard errors, none farther than five
    off = (mean - exact).abs() / (deviation + 1e-12 * exact.max())
    assert float((off > 2).double().mean()) <= 0.12 and float(off.max()) <= 5


@pytest.mark.parametrize("terms", ["term", "sample"])
@pytest.mark.parametrize("outputs", [(), (3,), (3, 2)], ids=str)
def test_batches_without_samples(outputs: tuple[int, ...], terms: str):
    torch.manual_seed(0)
    layer = nn.Linear(4, prod(outputs)).double()
    model = Using(lambda s, X: s.layer(X).view(len(X), *outputs), layer=layer)
    data = [(torch.randn(n, 4).double(), torch.randn(n, *outputs).double()) for n in (0, 3, 0, 2)]
    p = Problem.of(model, nn.MSELoss(), data)
    rows = torch.cat(reference.term_gradients(p))
    rows = rows if terms == "term" else reference.per_sample_gradients(p)
    check_rows(CASES["gradients"].build(p, terms=terms), rows)
    F = CASES["fisher"].build(p, terms=terms)
    assert error(matrix(F), reference.empirical_fisher(p, terms)) <= 1e-10
    D, diagonal = CASES["ggn-diagonal"].build(p), reference.ggn(p).diagonal()
    assert error(D.diagonal(), diagonal) <= 1e-10
    assert error(D.trace(), diagonal.sum()) <= 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"subsampling": [4, 1]}, {"terms": "term"}], ids=str)
def test_to_device(options: dict):
    expected = build("mlp-ce-all-mean", **options).dense()
    operator = build("mlp-ce-all-mean", **options)
    assert operator.to_device("cuda") is operator
    U = torch.eye(len(expected), dtype=expected.dtype, device="cuda")
    for found in (operator.dense(), (operator.T @ U).T, U @ operator):
        assert found.device == operator.device == operator.codomain.device == U.device
        torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(operator.gram().cpu(), expected @ expected.T)
    torch.testing.assert_close(operator.norms().cpu(), expected.norm(dim=1))


@pytest.mark.parametrize("scale, is_finite", [(1e10, True), (1e20, False)])
def test_gradients_that_overflow(scale: float, is_finite: bool):
    """Inputs and output gradients are finite, their products not all."""
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    with torch.no_grad():
        model.weight.mul_(1e-30)
    op = PerSampleGradientLinearOperator(
        model,
        lambda output, _: (output * scale).sum(),
        list(model.parameters()),
        [(torch.full((3, 20), 1e25), torch.zeros(3))],
        check_deterministic=False,
        reduction="sum",
    )
    if is_finite:
        assert op.dense().amax() == pytest.approx(scale * 1e25)
        return
    with pytest.raises(ValueError, match="not finite in parameter 'weight'"):
        op.dense()


def test_rows_after_a_divergence():
    p = problems.make("mlp-ce-mean")
    operator = CASES["gradients"].build(p)
    before, weight = operator.norms(), p.params[0].detach().clone()
    p.params[0].data.fill_(float("nan"))
    with pytest.raises(ValueError, match="loss on batch 0 is nan"):
        operator.norms()
    p.params[0].data.copy_(weight)
    torch.testing.assert_close(operator.norms(), before)
    assert not operator.fallbacks
