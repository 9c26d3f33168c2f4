"""Gradients of single samples: the matrix, and quantities that are computed without it."""

from functools import partial
from math import prod
from typing import Any

import problems
import pytest
import reference
import torch
from contract import CASES, CORE, MC, dense, error
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    JacobianLinearOperator,
    PerSampleGradientLinearOperator,
)
from curvlinops.layers import gradients, gram, samples

#: Parameters that no rule covers, by problem; all others must not need a pass for each sample.
UNCOVERED = {
    "pinn": {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"},
    "inner-steps": {"weight", "bias", "size"},
    # its rows are along no axis of samples
    "lstm-packed": {f"layer.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")},
}


def build(problem: str, **options) -> PerSampleGradientLinearOperator:
    """Build the operator for a problem."""
    return CASES["gradients"].build(problems.make(problem), **options)


@pytest.mark.parametrize("problem", problems.NAMES)
def test_dense(problem: str):
    tolerance = problems.make(problem).tolerance
    operator, rows = build(problem), dense("gradients", problem)
    assert error(operator.dense(), rows) <= tolerance
    assert set(operator.fallbacks) == UNCOVERED.get(problem, set())
    # what the first batches showed holds for a second pass
    assert error(operator.dense(), rows) <= tolerance


@pytest.mark.parametrize("problem", ["mlp-ce-all-mean", "functional", "closure"])
def test_gradients(problem: str):
    """Gradients are in a list or a dictionary, like parameters, with a first axis of samples."""
    operator, params = build(problem), problems.make(problem).params
    found = operator.gradients()
    assert type(found) is type(params)
    tensors = dict(found if isinstance(found, dict) else enumerate(found))
    given = dict(params if isinstance(params, dict) else enumerate(params))
    assert list(tensors) == list(given)
    for key, param in given.items():
        assert tensors[key].shape == (operator.shape[0], *param.shape)
    rows = torch.cat(
        [rows.flatten(1) if rows.ndim > 1 else rows[:, None] for rows in tensors.values()], 1
    )
    torch.testing.assert_close(rows, operator.dense())


@pytest.mark.parametrize("problem", problems.NAMES)
def test_norms_gram_and_moments(problem: str):
    p = problems.make(problem)
    operator, rows = build(problem), dense("gradients", problem)
    assert error(operator.norms(), rows.norm(dim=1)) <= p.tolerance
    assert error(operator.gram(), rows @ rows.T) <= p.tolerance
    assert error(operator.second_moment(), rows.square().mean(0)) <= p.tolerance
    if "low-precision" not in p.tags:
        scale = float(rows.square().mean(0).norm()) or 1.0
        found = operator.variance() - rows.var(0, correction=0)
        assert float(found.norm()) <= p.tolerance * scale


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


@pytest.mark.extensive
@pytest.mark.parametrize("problem", problems.NAMES)
def test_terms(problem: str):
    p = problems.make(problem)
    operator = build(problem, terms="term")
    expected = torch.cat(reference.term_gradients(p))
    rows = operator.dense()
    if len(rows) > len(expected):  # ignored terms have a row of zeros
        rows = rows[rows.norm(dim=1) > 0]
        expected = expected[expected.norm(dim=1) > 0]
    assert error(rows, expected) <= p.tolerance
    products = operator @ torch.eye(operator.shape[1], dtype=operator.torch_dtype)
    rows = operator.dense().double()
    assert error(products, rows) <= p.tolerance
    assert error(operator.norms(), rows.norm(dim=1)) <= p.tolerance
    assert error(operator.gram(), rows @ rows.T) <= p.tolerance
    assert error(operator.second_moment(), rows.square().mean(0)) <= p.tolerance


@pytest.mark.parametrize(
    "problem, terms",
    [
        ("mlp-ce-prob-all-mean", "sample"),
        ("mlp-ce-prob-all-mean", "term"),
        ("transformer-tied", "sample"),
        ("transformer-tied", "term"),
        # one term per sample
        ("lstm-packed", "sample"),
        ("pinn", "sample"),
    ],
)
def test_subsampling(problem: str, terms: str):
    p = problems.make(problem)
    rows = (
        reference.per_sample_gradients(p)
        if terms == "sample"
        else torch.cat(reference.term_gradients(p))
    )
    for indices in ([2, 0, 2], [], list(range(len(rows)))[::-1], torch.tensor([len(rows) - 1])):
        operator = build(problem, subsampling=indices, terms=terms)
        expected = rows[torch.as_tensor(indices, dtype=torch.long)]
        assert operator.shape == tuple(expected.shape)
        if len(indices) == 0:
            continue
        assert error(operator.dense(), expected) <= p.tolerance
        gradients = operator.gradients()
        if isinstance(gradients, dict):
            gradients = list(gradients.values())
        flat = torch.cat([x.reshape(len(expected), -1) for x in gradients], dim=1)
        assert error(flat, expected) <= p.tolerance
        assert error(operator.norms(), expected.norm(dim=1)) <= p.tolerance
        assert error(operator.gram(), expected @ expected.T) <= p.tolerance
        assert error(operator @ torch.eye(operator.shape[1]).double(), expected) <= p.tolerance
        u = torch.randn(len(expected), dtype=torch.float64)
        assert error(operator.T @ u, expected.T @ u) <= p.tolerance


class Tokens(nn.Module):
    """An output for each token."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, X: dict[str, Tensor] | Tensor) -> Tensor:
        return self.linear(X["x"] if isinstance(X, dict) else X)


def _tokens(*shapes: tuple[int, int], packed: bool = False) -> list[tuple[Any, Tensor]]:
    """Return batches of so many samples and tokens; those that are packed have no evident size."""
    batches = [(torch.randn(*s, 3).double(), torch.randn(*s, 2).double()) for s in shapes]
    return [({"x": X, "table": torch.ones(7)}, y) for X, y in batches] if packed else batches


def _rows(model: Tokens, values: list[Tensor]) -> Tensor:
    """Return the gradients of numbers, one after the other."""
    params = list(model.parameters())
    grads = [torch.autograd.grad(v, params, retain_graph=True) for x in values for v in x.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in grad]) for grad in grads])


@pytest.mark.parametrize("terms, packed", [("sample", False), ("term", True)])
def test_subsampling_of_other_batches(terms: str, packed: bool):
    torch.manual_seed(0)
    model, data = Tokens(), _tokens((2, 4), (3, 4), packed=packed)
    size = (lambda X: len(X["x"])) if packed and terms == "term" else None
    arguments = (model, nn.MSELoss(), list(model.parameters()), data)
    rows = [4, 3] if terms == "sample" else [19, 8]  # of the second batch
    P = PerSampleGradientLinearOperator(
        *arguments, subsampling=rows, terms=terms, batch_size_fn=size
    )
    data[:] = _tokens((2, 4), (3, 4), packed=packed)
    for _ in range(2):  # nothing and something is kept
        losses = [((model(X) - y) ** 2).mean(-1) for X, y in data]
        wanted = _rows(model, [x.sum(1) for x in losses] if terms == "sample" else losses)[rows]
        torch.testing.assert_close(P.dense(), wanted)
        torch.testing.assert_close(P.gram(), wanted @ wanted.T)
        torch.testing.assert_close(P.norms(), wanted.norm(dim=1))
        torch.testing.assert_close(P.T @ torch.ones(2), wanted.sum(0))
        torch.testing.assert_close(P @ torch.ones(8), wanted.sum(1))
    others = [((1, 4), (4, 4)), ((3, 4), (2, 4)), ((3, 4), (3, 4))]
    if terms == "term":
        others.append(((2, 5), (3, 4)))
    for shapes in others:
        data[:] = _tokens(*shapes, packed=packed)
        with pytest.raises(RuntimeError, match="With subsampling=, batches must keep their len"):
            P.norms()
    data[:] = _tokens((2, 4), packed=packed)
    with pytest.raises(RuntimeError, match="at construction it had"):
        P.norms()


def test_empirical_fisher_of_batches_whose_size_is_not_evident():
    torch.manual_seed(0)
    model, data = Tokens(), _tokens((2, 4), (3, 4), packed=True)
    rows = _rows(model, [((model(X) - y) ** 2).mean(-1) for X, y in data])
    E = EFLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    torch.testing.assert_close(E.to_dense(), rows.T @ rows / len(rows))


def test_kernels_of_other_numbers_of_rows():
    model, data = Tokens(), _tokens((2, 4), (3, 4))
    J = JacobianLinearOperator(model, list(model.parameters()), data)
    data[:] = _tokens((1, 4), (4, 4))
    rows = _rows(model, [model(X) for X, _ in data])
    torch.testing.assert_close(J.gram(), rows @ rows.T)
    for other in ([(2, 4)], [(2, 4), (3, 4), (1, 4)], [(2, 4), (3, 5)]):
        data[:] = _tokens(*other)
        with pytest.raises(RuntimeError, match="Build a new operator|build a new operator"):
            J.gram()


@pytest.mark.extensive
@pytest.mark.parametrize("problem", problems.NAMES)
def test_tangent_kernel(problem: str):
    p = problems.make(problem)
    J = dense("jacobian", problem)
    assert error(CASES["jacobian"].build(p).gram(), J @ J.T) <= p.tolerance


def test_tangent_kernel_of_coupled_samples():
    """Rows that depend on several samples are computed one by one."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    data = [(torch.randn(5, 3).double(), None)]
    with pytest.warns(UserWarning, match="BatchNorm in train mode"):
        J = JacobianLinearOperator(model, list(model.parameters()), data)
    dense_J = J @ torch.eye(J.shape[1], dtype=torch.float64)
    torch.testing.assert_close(J.gram(), dense_J @ dense_J.T)
    torch.testing.assert_close(J.to_dense(), dense_J)


def test_tangent_kernel_of_unequal_batches(monkeypatch: pytest.MonkeyPatch):
    """With and without samples, and more gradients than fit the memory at once."""
    layers = [nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)]
    model, scale = nn.Sequential(*layers).double(), nn.Parameter(torch.ones(3).double())
    params = dict(model.named_parameters()) | {"scale": scale}

    def scaled(values: dict, X: torch.Tensor) -> torch.Tensor:
        weights = {name: value for name, value in values.items() if name != "scale"}
        return torch.func.functional_call(model, weights, X) * values["scale"].exp()

    data = [(torch.randn(n, 2, 4, 4).double(), None) for n in (3, 0, 5, 1)]
    J = JacobianLinearOperator(scaled, params, data)
    dense_J = J @ torch.eye(J.shape[1], dtype=torch.float64)
    for size in (gradients.BYTES, 2000, 500, 1):
        for module in (gradients, gram, samples):
            monkeypatch.setattr(module, "BYTES", size)
        torch.testing.assert_close(J.gram(), dense_J @ dense_J.T)
        torch.testing.assert_close(J.to_dense(), dense_J)


@pytest.mark.parametrize("problem", problems.MODEL_NAMES)
def test_dense_jacobian(problem: str):
    p = problems.make(problem)
    assert error(CASES["jacobian"].build(p).to_dense(), dense("jacobian", problem)) <= p.tolerance


def test_no_rows():
    operator = build("mlp-ce-all-mean", subsampling=[])
    assert operator.dense().shape == (0, operator.shape[1])
    assert operator.gram().shape == (0, 0)


def test_sequences_of_which_the_first_have_one_token():
    """Terms are finer than samples on a later batch only."""
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(X)).cumsum(1)).transpose(1, 2)

    model, loss = Tagger().double(), nn.CrossEntropyLoss(reduction="sum")
    params = list(model.parameters())
    data = [(torch.randn(3, T, 4).double(), torch.randint(3, (3, T))) for T in (1, 4)]
    terms = [
        loss(model(X)[n : n + 1, :, t], y[n : n + 1, t])
        for X, y in data
        for n in range(3)
        for t in range(y.shape[1])
    ]
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(z, params)]) for z in terms]
    v, rows = torch.randn(len(rows[0])).double(), torch.stack(rows)
    for cache in ("none", "auto", 2000):
        operator = EFLinearOperator(model, loss, params, data, cache=cache)
        torch.testing.assert_close(operator @ v, rows.T @ (rows @ v))
        with operator.linearized():
            for _ in range(2):
                torch.testing.assert_close(operator @ v, rows.T @ (rows @ v))


@pytest.mark.parametrize("problem", MC)
def test_trace_and_diagonal(problem: str):
    p = problems.make(problem)
    operator, expected = CASES["ggn-diagonal"].build(p), dense("ggn-diagonal", problem)
    assert error(operator.diagonal(), expected.diagonal()) <= p.tolerance
    assert error(operator.trace(), expected.trace()) <= p.tolerance


@pytest.mark.extensive
@pytest.mark.parametrize(
    "problem", ["mlp-ce-all-mean", "classes-ce-ignore-mean", "transformer-tied"]
)
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


@pytest.mark.parametrize("problem", CORE)
def test_fisher_without_rows(problem: str):
    """There is not enough memory to keep the gradients."""
    p, expected = problems.make(problem), dense("fisher-samples", problem)
    operator = CASES["fisher-samples"].build(p, cache=1)
    V = torch.randn(len(expected), 2, dtype=torch.float64)
    assert error(operator @ V, expected @ V) <= p.tolerance


@pytest.mark.parametrize("terms", ["term", "sample"])
@pytest.mark.parametrize("outputs", [(), (3,), (3, 2)], ids=str)
def test_batches_without_samples(outputs: tuple[int, ...], terms: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, max(prod(outputs), 1)), nn.Unflatten(1, outputs or (1,)))
    model = model if outputs else nn.Sequential(model, nn.Flatten(0))
    X, y = torch.randn(5, 4), torch.randn(5, *outputs)
    empty = (X[:0], y[:0])
    for kind in (EFLinearOperator, PerSampleGradientLinearOperator):
        for data in ([empty, (X, y)], [(X, y), empty]):
            build = partial(kind, model, nn.MSELoss(), list(model.parameters()), terms=terms)
            found, expected = build(data), build([(X, y)])
            v = torch.randn(found.shape[1])
            torch.testing.assert_close(found @ v, expected @ v)
            torch.testing.assert_close(found.T @ (found @ v), expected.T @ (expected @ v))


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
    operator = PerSampleGradientLinearOperator(p.model, p.loss, p.params, p.data)
    before, weight = operator.norms(), p.params[0].detach().clone()
    p.params[0].data.fill_(float("nan"))
    with pytest.raises(ValueError, match="loss on batch 0 is nan"):
        operator.norms()
    p.params[0].data.copy_(weight)
    torch.testing.assert_close(operator.norms(), before)
    assert not operator.fallbacks
