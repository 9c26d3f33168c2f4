"""Models whose output for a sample depends on other samples are refused, and no others."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from models import Using
from small import build, mlp
from torch import Tensor, nn

import curvlinops

N = 16
LOSS = nn.MSELoss()
#: Operators of single samples.
OPERATORS = {
    "rows": curvlinops.PerSampleGradientLinearOperator,
    "EF": curvlinops.EFLinearOperator,
    "diagonal": curvlinops.GGNDiagonalLinearOperator,
    "KFAC": curvlinops.KFACLinearOperator,
    "EKFAC": curvlinops.EKFACLinearOperator,
}

#: Operators that are defined for interacting samples, too, if one batch is all data.
SUMS = {
    "H": curvlinops.HessianLinearOperator,
    "G": curvlinops.GGNLinearOperator,
    "MC": curvlinops.FisherMCLinearOperator,
    "J": curvlinops.JacobianLinearOperator,
    "J^T": curvlinops.TransposedJacobianLinearOperator,
}


def net(function: Callable[[Using, Any], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
    return Using(function, **layers).double()


def headed(function: Callable[[Using, Tensor], Tensor]) -> nn.Module:
    return net(lambda s, x: s.head(function(s, x)))


def inputs() -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rolled(m: Using, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return h + 0.5 * h.roll(2, 0) + m.second(x)


def following(m: Using, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x)) * m.second(x)
    return h + 0.5 * h.roll(-1, 0)


def centered(m: Using, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x) - m.second(x).mean(0))


def normalized(m: Using, x: Tensor) -> Tensor:
    return F.batch_norm(m.first(x), None, None, training=True) * m.second(x)


def standardized(m: Using, x: Tensor) -> Tensor:
    h = m.first(x)
    return (h - h.mean(0)) / h.std(0) * m.second(x)


def centered_by_constant(m: Using, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x) * m.second(x))
    return h - h.mean(0).detach()


def rescaled(m: Using, x: Tensor) -> Tensor:
    h = m.first(x) * m.second(x)
    return h / h.abs().max().detach()


def divided(m: Using, x: Tensor) -> Tensor:
    return m.first(x) * m.second(x) / len(x)


#: In the last ones, one sample alone is no number, or gradients have no part in the interaction.
COUPLED = [rolled, following, centered, normalized, standardized]
COUPLED += [centered_by_constant, rescaled, divided]


@pytest.mark.extensive
@pytest.mark.parametrize("function", COUPLED)
@pytest.mark.parametrize("kind", OPERATORS)
def test_samples_that_interact_are_refused(kind: str, function: Callable):
    model, data = headed(function), [(inputs(), torch.zeros(N, 2, dtype=torch.float64))]
    arguments = model, LOSS, list(model.parameters()), data
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS[kind](*arguments)
    curvlinops.HessianLinearOperator(*arguments)
    # empirical Fisher and KFAC-expand add up whatever the gradients are
    if function in (rolled, centered) and kind not in ("EF", "KFAC"):
        operator = OPERATORS[kind](*arguments, check_deterministic=False)
        with pytest.raises(ValueError, match="depends on the other samples"):
            operator.norms() if kind == "rows" else operator @ torch.ones(operator.shape[1])


@pytest.mark.extensive
@pytest.mark.parametrize("sizes", [[4, 12], [12, 4], [1, 15], [15, 1], [1, 1, 14]], ids=str)
def test_samples_that_interact_in_any_batch_are_refused(sizes: list[int]):
    """Construction looks at the first batch, which may have one sample."""
    model, y = headed(centered), torch.zeros(N, 2, dtype=torch.float64)
    data = list(zip(inputs().split(sizes), y.split(sizes), strict=True))
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS["rows"](model, LOSS, list(model.parameters()), data).norms()


def pairs(m: Using, x: dict) -> Tensor:
    """Compares each sample with each other, as contrastive models do."""
    return torch.tanh(m.first(x["images"])) @ torch.tanh(m.second(x["texts"])).T


@pytest.mark.extensive
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("size", [2, 5])
def test_outputs_for_pairs_of_samples_are_refused(kind: str, size: int):
    model = net(pairs)
    x = [torch.randn(size, 3).double() for _ in range(2)]
    data = [({"images": x[0], "texts": x[1]}, torch.arange(size))]
    options = {"batch_size_fn": lambda X: len(X["texts"])}
    with pytest.raises(ValueError, match="depends on the other samples"):
        build(OPERATORS[kind], model, data, **options)
    build(curvlinops.HessianLinearOperator, model, data, **options)


@pytest.mark.parametrize("kind", ["rows", "KFAC"])
def test_grids_with_a_point_for_each_sample(kind: str):
    """The output of a neural operator at all points of a grid, which samples share."""
    x, y, grid = (torch.randn(5, k).double() for k in (3, 5, 3))

    def at_points(m: Using, X: Any) -> Tensor:
        x, points = X if isinstance(X, tuple) else (X, m.points)
        return torch.tanh(m.first(x)) @ torch.tanh(m.second(points)).T

    model = net(at_points)
    model.register_buffer("points", grid)
    params = [*model.first.parameters(), *model.second.parameters()]
    with pytest.raises(ValueError, match="grid of points, make it a buffer"):
        OPERATORS[kind](model, LOSS, params, [((x, grid), y)], batch_size_fn=lambda X: len(X[0]))
    operator = OPERATORS[kind](model, LOSS, params, [(x, y)])
    if kind == "rows":
        rows = [torch.autograd.grad(LOSS(model(x[n, None]), y[n, None]), params) for n in range(5)]
        expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        torch.testing.assert_close(operator.dense(), expected)


def trimmed(m: Using, x: Tensor) -> Tensor:
    """Drops what is padding in all samples of a batch."""
    length = int((x.abs().sum(-1) > 0).sum(1).max())
    return m.head(torch.tanh(m.first(x[:, :length]))).mT


def test_lengths_that_depend_on_the_longest_sample_are_no_interaction():
    model, lengths = net(trimmed), [2, 1, 2, 4, 3]
    x, y = torch.randn(5, 4, 3).double(), torch.ones(5, 4).long()
    for n, length in enumerate(lengths):
        x[n, length:], y[n, length:] = 0, -100
    params, loss = [*model.first.parameters(), *model.head.parameters()], nn.CrossEntropyLoss()
    rows = curvlinops.PerSampleGradientLinearOperator(model, loss, params, [(x, y)]).dense()
    loss.reduction = "sum"
    for n, length in enumerate(lengths):
        value = loss(model(x[n : n + 1]), y[n : n + 1, :length])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, params)])
        torch.testing.assert_close(rows[n], expected)


def test_batch_norm_without_running_statistics():
    """It couples samples in any mode."""
    model = mlp(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.warns(UserWarning, match="BatchNorm without running statistics"):
        build(curvlinops.HessianLinearOperator, model)
    with pytest.raises(ValueError, match="statistics couples.*track_running_stats=True"):
        build(curvlinops.EFLinearOperator, model)


# --- operators of more than one batch


def quantized(m: Using, x: Tensor) -> Tensor:
    """Rounds to a grid that the largest entry of the batch defines."""
    h = m.first(x)
    step = h.detach().abs().max() / 127
    return h + ((h / step).round() * step - h).detach() + m.second(x)


def within_capacity(m: Using, x: Tensor) -> Tensor:
    """An expert takes half of the tokens of all samples, those that it prefers."""
    score = (m.first(x) - m.first.bias).flatten()
    chosen = score.argsort(descending=True)[: len(score) // 2]
    gate = torch.zeros_like(score).index_fill(0, chosen, 1.0)
    return m.second(x) * gate.reshape(len(x), -1)


def summed_before(m: Using, x: Tensor) -> Tensor:
    """A recurrence over samples."""
    return torch.tanh(m.first(x)).cumsum(0) * m.second(x)


MORE_KINDS = ["G", "MC", "J^T", "KFAC"]
INTERACTING = [*COUPLED, quantized, within_capacity, summed_before]


def built(kind: type, model: nn.Module, sizes: list[int], **options: Any) -> Any:
    x, y = inputs(), torch.ones(N, 2, dtype=torch.float64)
    data = list(zip(x.split(sizes), y.split(sizes), strict=True))
    losses = [] if "Jacobian" in kind.__name__ else [LOSS]
    return kind(model, *losses, list(model.parameters()), data, **options)


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")
@pytest.mark.parametrize("sizes", [[10, 6], [3, 13], [2, 14]], ids=str)
@pytest.mark.parametrize("function", INTERACTING)
@pytest.mark.parametrize(
    "kind",
    ["H", "J", "rows", *(pytest.param(kind, marks=pytest.mark.extensive) for kind in MORE_KINDS)],
)
def test_samples_of_several_batches_that_interact(kind: str, function: Callable, sizes: list[int]):
    """The risk would depend on the split. One sample of two or three alone may be no number."""
    if function is rolled and sizes[0] == 2:
        pytest.skip("two samples that are moved by two places do not interact")
    model = headed(function)
    what = (
        "gradients of single samples" if kind in OPERATORS else r"split into batches.*\[\(X, y\)\]"
    )
    with pytest.raises(ValueError, match=f"depends on the other samples.*{what}"):
        built({**SUMS, **OPERATORS}[kind], model, sizes)


@pytest.mark.parametrize("function", INTERACTING)
def test_samples_of_one_batch_may_interact(function: Callable):
    model = headed(function)
    x, y = inputs(), torch.ones(N, 2, dtype=torch.float64)
    params = list(model.parameters())
    H, G, J = (built(SUMS[kind], model, [N]) for kind in ("H", "G", "J"))
    loss, output = LOSS(model(x), y), model(x)
    flat = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}

    def gradient(value: Tensor, **options: Any) -> Tensor:
        grads = torch.autograd.grad(value, params, **flat, **options)
        return torch.cat([grad.flatten() for grad in grads])

    first = gradient(loss, create_graph=True)
    rows = torch.stack([gradient(entry) for entry in output.flatten()])
    hessian = torch.stack([gradient(entry) for entry in first])
    one = torch.eye(len(first), dtype=torch.float64)
    torch.testing.assert_close(H @ one, hessian)
    torch.testing.assert_close(J @ one, rows)
    torch.testing.assert_close(G @ one, 2 / (2 * N) * rows.T @ rows)
    torch.testing.assert_close(H.gradient_and_loss()[1], loss.detach())


@pytest.mark.parametrize("kind", SUMS)
def test_streams_may_have_more_than_one_batch(kind: str):
    """Without a length, one batch is not known to be all data."""

    class Stream:
        def __iter__(self):
            yield inputs(), torch.ones(N, 2, dtype=torch.float64)

    model = headed(centered)
    losses = [] if "J" in kind else [LOSS]
    with pytest.raises(ValueError, match="split into batches"):
        SUMS[kind](model, *losses, list(model.parameters()), Stream())


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("statistics", [True, False])
def test_batch_norm_of_several_batches(kind: str, statistics: bool):
    """A warning says that the result depends on them; it is no error."""
    layer = nn.BatchNorm1d(4, track_running_stats=statistics).double()
    model = nn.Sequential(nn.Linear(3, 4).double(), layer, nn.Linear(4, 2).double())
    with pytest.warns(UserWarning, match="BatchNorm.*the result depends on how the data is split"):
        operator = built(SUMS[kind], model, [10, 6])
    assert operator.shape[1] > 0


def alone(m: Using, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)) * m.second(x)


def masked(m: Using, x: Tensor) -> Tensor:
    """Infinite where a class is impossible."""
    impossible = torch.tensor([False, True, False, False])
    return alone(m, x).masked_fill(impossible & (x[:, :1] > 0), -torch.inf)


def rounded(m: Using, x: Tensor) -> Tensor:
    """As in kernels that round differently for another number of samples."""
    noise = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(len(x)))
    return alone(m, x) * (1 + 50 * torch.finfo(x.dtype).eps * noise.to(x))


def rounded_inside(m: Using, x: Tensor) -> Tensor:
    """The same in a part of the model that is less precise than its output."""
    y = alone(m, x).float()
    noise = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(len(x)))
    return (y * (1 + 50 * torch.finfo(y.dtype).eps * noise)).to(x)


def rounded_by_others(m: Using, x: Tensor) -> Tensor:
    """A small interaction, which is no rounding."""
    return alone(m, x) + 1e-3 * torch.tanh(m.first(x)).mean(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["H", "G", "rows"])
def test_rounding_is_no_interaction(kind: str, dtype: torch.dtype):
    kind_of = {**SUMS, **OPERATORS}[kind]

    def build_with(function: Callable, loss: nn.Module = LOSS, y: Any = None) -> Any:
        model = net(function).to(dtype)
        X = inputs().to(dtype)
        y = torch.ones(N, 4, dtype=dtype) if y is None else y
        data = [(X[:9], y[:9]), (X[9:], y[9:])]
        params = [*model.first.parameters(), *model.second.parameters()]
        return kind_of(model, loss, params, data)

    build_with(alone), build_with(rounded), build_with(rounded_inside)
    build_with(masked, nn.CrossEntropyLoss(), torch.zeros(N).long())
    with pytest.raises(ValueError, match="depends on the other samples"):
        build_with(rounded_by_others)


@pytest.mark.parametrize("mode, sizes", [("sum", [2, 2, 3]), ("mean", [3, 2, 2]), ("max", [4, 3])])
@pytest.mark.parametrize("kind", ["H", "G", "rows", "EF", "EKFAC"])
def test_bags_with_offsets(kind: str, sizes: list[int], mode: str):
    """The last bag of a part of a batch would get all entries behind it."""
    torch.manual_seed(0)
    bags = nn.EmbeddingBag(6, 4, mode=mode).double()
    model = Using(lambda s, X: s.head(s.bags(*X)), bags=bags, head=nn.Linear(4, 2).double())
    data, singles, generator = [], [], torch.Generator().manual_seed(1)
    for size in sizes:
        lengths = torch.arange(size) % 3 + 1
        offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)[:-1]]).long()
        entries = torch.randint(6, (int(lengths.sum()),), generator=generator)
        y = torch.randn(size, 2, dtype=torch.float64, generator=generator)
        data.append(((entries, offsets), y))
        singles += [
            ((part, torch.zeros(1).long()), y[n : n + 1])
            for n, part in enumerate(entries.split(lengths.tolist()))
        ]
    params = list(model.parameters())
    options: dict[str, Any] = {"batch_size_fn": lambda X: len(X[1])}
    if kind == "EKFAC":
        options |= {"fisher_type": "empirical", "fallback": "diagonal"}
    if kind == "EF":
        options |= {"terms": "sample"}
    operator = {**SUMS, **OPERATORS}[kind](model, LOSS, params, data, **options)
    gradients = []
    for X, y in singles:
        grads = torch.autograd.grad(LOSS(model(X), y), params)
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    rows = torch.stack(gradients)
    if kind == "rows":
        torch.testing.assert_close(operator.dense(), rows)
    elif kind == "EF":
        v = torch.ones(rows.shape[1], dtype=torch.float64)
        torch.testing.assert_close(operator @ v, rows.T @ (rows @ v) / len(rows))
    elif kind == "EKFAC":
        torch.testing.assert_close(operator.trace(), rows.square().sum() / len(rows))
    else:
        flat = torch.cat([g.flatten() for g in operator.gradient_and_loss()[0]])
        torch.testing.assert_close(flat, rows.mean(0))


# --- later operators on a model


class Switched(nn.Module):
    """A net whose samples interact if a flag says so, or a gate that is zero at first."""

    seen: ClassVar[list[int]] = []

    def __init__(self, function: Callable, gate: float, is_buffer: bool = False):
        super().__init__()
        self.inner, self.is_coupled = headed(function), False
        value = torch.full((2,), gate, dtype=torch.float64)
        self.gate: Any
        if is_buffer:
            self.register_buffer("gate", value)
        else:
            self.gate = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        Switched.seen += [len(x)]
        if self.is_coupled:
            return self.inner(x)
        z = self.inner.head(alone(self.inner, x))
        return z + self.gate.relu() * (z.roll(1, 0) - z.mean(0)).detach()


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom:UserWarning")
@pytest.mark.parametrize(
    "kind, function, gate, is_buffer",
    [
        *((kind, f, -1.0, False) for kind in ("H", "rows") for f in INTERACTING),
        *((kind, f, 0.0, is_buffer) for kind in ("H", "J", "rows", "KFAC")
          for f in (rolled, quantized) for is_buffer in (False, True)),
    ],
)  # fmt: skip
def test_samples_are_seen_alone_once_for_a_model(
    kind: str, function: Callable, gate: float, is_buffer: bool
):
    """At other parameters, too; but not if it computes something else, or a tensor is zero."""
    model, Switched.seen = Switched(function, gate, is_buffer), []

    def sizes_of_parts() -> list[int]:
        Switched.seen.clear()
        built({**SUMS, **OPERATORS}[kind], model, [10, 6])
        return [n for n in Switched.seen if n not in (10, 6)]

    assert sizes_of_parts() == [2, 2]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert sizes_of_parts() == ([] if gate else [2, 2])
    if not gate:
        nn.init.constant_(model.gate, 0.5)
    model.is_coupled = bool(gate)
    with pytest.raises(ValueError, match="depends on the other samples"):
        sizes_of_parts()
