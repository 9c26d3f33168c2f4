"""Which rows of a layer belong to which sample, where no shape tells."""

import pytest
import torch
from contract import error
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from curvlinops import EKFACLinearOperator, KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.layers.detection import TOLERANCES, Detection, digits, proofs
from curvlinops.support.autograd_graph import graph_nodes, least_precise

pytestmark = pytest.mark.extensive

SIZES = [3, 2, 4, 1, 5, 2]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Sets(nn.Module):
    """Sets of points of unequal sizes, of which only the best one counts."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(self.embed(data["points"]))
        best = [part[part[:, 0].argmax()] for part in h.split(data["sizes"].tolist())]
        return self.head(torch.stack(best))


class TimeFirst(nn.Module):
    """Sequences, along the first axis, some of which are switched off."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x.transpose(0, 1).flatten(0, 1)))
        h = h.unflatten(0, (x.shape[1], -1)).transpose(0, 1)
        return self.head((h * (x[:, :1, :1] > 0)).sum(1))


class LastToken(nn.Module):
    """Sequences of which one token is read."""

    def __init__(self, settled: bool, hidden: bool):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.settled, self.hidden = settled, hidden

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(0, 1)))
        if self.settled:  # the first layer's rows show where they belong
            mean = h.unflatten(0, x.shape[:2]).mean(1)
            h = h + mean.repeat_interleave(x.shape[1], 0)
        h = torch.tanh(self.second(h)).unflatten(0, x.shape[:2])
        # the graph shows what is read in the samples' order
        own = torch.arange(len(x))
        order = own.flip(0) if self.hidden else own
        h = h[order, order % x.shape[1]]
        return self.head(h[order] if self.hidden else h)


class Experts(nn.Module):
    """Each sample goes to one of three layers."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList([nn.Linear(4, 2) for _ in "abc"])

    def forward(self, x: Tensor) -> Tensor:
        scale, choice = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            own = (choice == i).nonzero()[:, 0]
            out = out.index_add(0, own, expert(x[own]) * scale[own, None])
        return out


def sets(members: list[int], points: list[Tensor]) -> dict[str, Tensor]:
    chosen = [points[i] for i in members]
    return {"points": torch.cat(chosen), "sizes": torch.tensor([len(x) for x in chosen])}


def covariance(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def factors(model: nn.Module, data: list, approx: str, **options) -> KFACLinearOperator:
    options = {"fisher_type": "empirical", "kfac_approx": approx, **options}
    return KFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data, **options)


@pytest.mark.parametrize(
    "split", [[[0, 1, 2], [3, 4, 5]], [list(range(6))], [[i] for i in range(6)]]
)
@pytest.mark.parametrize("check", [True, False])
def test_rows_without_a_gradient_are_in_no_mean_by_chance(split: list, check: bool):
    """Whose rows they are no gradient tells; expand need not know."""
    model, points = Sets().double(), [torch.randn(size, 3).double() for size in SIZES]
    y = torch.randn(6, 2).double()
    data = [(sets(part, points), y[part]) for part in split]
    options = {"batch_size_fn": lambda X: len(X["sizes"]), "check_deterministic": check}
    K = factors(model, data, "expand", **options)
    torch.testing.assert_close(K.input_covariances["embed"], covariance(torch.cat(points)))
    K = factors(model, data, "reduce", **options)
    if len(split) == 6:
        means = torch.stack([x.mean(0) for x in points])
        torch.testing.assert_close(K.input_covariances["embed"], covariance(means))
    else:
        with pytest.raises(NotImplementedError, match="'embed.weight'.* rows have no gradient"):
            K.trace()
        K = factors(model, data, "reduce", fallback="dense", **options)
        assert {block.structure for block in K.report() if "embed.weight" in block.names} == {
            "dense"
        }


def test_batches_without_a_gradient():
    model, x, y = TimeFirst().double(), torch.randn(6, 3, 3).double(), torch.randn(6, 2).double()
    x[:, 0, 0] = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    for batches in (data, data[::-1], [(x, y)]):
        K = factors(model, batches, "expand")
        torch.testing.assert_close(K.input_covariances["embed"], covariance(x.flatten(0, 1)))
        K = factors(model, batches, "reduce")
        torch.testing.assert_close(K.input_covariances["embed"], covariance(x.mean(1)))


def test_irregular_rows_without_a_gradient_are_inputs():
    class Off(Experts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (x[:, :1] > 0)

    model, x, y = Off().double(), torch.randn(9, 4).double(), torch.randn(9, 2).double()
    x[:, 0] = x[:, 0].abs() * torch.tensor([1.0] * 5 + [-1.0] * 4)
    K = factors(model, [(x[:5], y[:5]), (x[5:], y[5:])], "expand")
    choice = model.gate(x).argmax(-1)
    for i in range(3):
        A = K.input_covariances[f"experts.{i}"]
        torch.testing.assert_close(A, covariance(x[choice == i]))


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("settled", [True, False])
def test_several_layouts_are_possible(settled: bool, hidden: bool):
    """Two sequences of two tokens, of which the first and the last one are read."""
    model, x, y = (
        LastToken(settled, hidden).double(),
        torch.randn(2, 2, 3).double(),
        torch.randn(2, 2),
    )
    K = factors(model, [(x, y.double())], "reduce")
    if settled or not hidden:
        torch.testing.assert_close(K.input_covariances["first"], covariance(x.mean(1)))
    else:
        with pytest.raises(NotImplementedError, match="no gradient"):
            K.trace()


@pytest.mark.parametrize(
    ("dtype", "num_samples", "tolerance"),
    [
        (torch.float64, 30, 1e-9),
        (torch.float32, 120, 1e-4),
        (torch.bfloat16, 20, 0.1),
    ],
)
@pytest.mark.parametrize("operator", [KFACLinearOperator, EKFACLinearOperator])
def test_routing_in_any_precision(
    dtype: torch.dtype, num_samples: int, tolerance: float, operator: type
):
    model, x, y = Experts().to(dtype), torch.randn(num_samples, 4), torch.randn(num_samples, 2)
    x, y = x.to(dtype), y.to(dtype)
    params = list(model.parameters())
    rows = PerSampleGradientLinearOperator(model, nn.MSELoss(), params, [(x, y)])
    wide = Experts().double()
    wide.load_state_dict(model.state_dict())
    arguments = (wide, nn.MSELoss(), list(wide.parameters()))
    quick = {"check_deterministic": False}
    one_by_one = [(x[n : n + 1].double(), y[n : n + 1].double()) for n in range(num_samples)]
    expected = PerSampleGradientLinearOperator(*arguments, one_by_one, **quick).dense()
    assert error(rows.dense(), expected) <= tolerance
    assert not rows.fallbacks
    for approx in ("expand", "reduce"):
        options = {"fisher_type": "empirical", "kfac_approx": approx}
        K = operator(model, nn.MSELoss(), params, [(x, y)], **options)
        truth = operator(*arguments, one_by_one, **options, **quick)
        v = torch.randn(K.shape[0])
        assert error(K @ v, truth @ v.double()) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_digits_tell_samples_apart(dtype: torch.dtype):
    num_samples, tolerance = 1000, TOLERANCES[dtype]
    owner = torch.randint(num_samples, (3000,))
    noise = 1 + 0.3 * tolerance * (2 * torch.rand(3000, 1) - 1)
    g = torch.randn(3000, 4).to(dtype)
    like = torch.ones((), dtype=dtype)
    numbers = digits(num_samples, tolerance, like)
    r = [*numbers, *proofs(num_samples, tolerance, like)]
    weighted = [(g.double() * noise * digit.double()[owner, None]).to(dtype) for digit in r]
    layout = Detection(g, 1, num_samples, dtype).scattered(weighted, r, len(numbers))
    found = layout.by_sample(torch.arange(1, 3001), 0, 1, num_samples)
    for n, rows in enumerate(found):
        assert bool((owner[rows[rows > 0] - 1] == n).all())
    assert int((found > 0).sum()) == 3000
    mixed = [digit + digit.roll(1, 0) for digit in weighted]
    assert Detection(g, 1, num_samples, dtype).scattered(mixed, r, len(numbers)) is None


class Numbered(torch.autograd.Function):
    """Returns integers beside the numbers."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        index = x.argsort(0)
        ctx.mark_non_differentiable(index)
        return 2 * x, index

    @staticmethod
    def backward(ctx, g: Tensor, _: Tensor) -> Tensor:
        return 2 * g


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: x.sin(), torch.float64),
        (lambda x: Numbered.apply(x)[0], torch.float64),
        (lambda x: x.sort()[0] + x.float().detach(), torch.float64),
        (lambda x: x.softmax(0, dtype=torch.float32).double(), torch.float32),
        (lambda x: torch.view_as_complex(x.reshape(-1, 2)).to(torch.complex64), torch.float32),
        (lambda x: x.float().sin().bfloat16().double(), torch.bfloat16),
        (lambda x: x.bfloat16(), torch.bfloat16),
    ],
)
def test_precision_within_a_model(function, expected: torch.dtype):
    """Only what gradients pass counts."""
    output = function(torch.randn(4, dtype=torch.float64, requires_grad=True))
    assert least_precise(graph_nodes(output), output) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_small_next_to_others(dtype: torch.dtype):
    """A layer sees samples along two axes of equal length; most have only the smaller gradient."""
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, X: torch.Tensor) -> torch.Tensor:
            large = torch.tanh(self.layer(X)) * X[:, :1, :1] * 1e7
            small = torch.sin(self.layer(X.transpose(0, 1))).transpose(0, 1)
            return self.head((large + small).mean(1))

    model, loss = Twice().to(dtype), nn.MSELoss(reduction="sum")
    X, y = torch.randn(4, 4, 3, dtype=dtype), torch.randn(4, 2, dtype=dtype)
    X[:, :, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=dtype)[:, None]
    params = list(model.parameters())
    found = PerSampleGradientLinearOperator(model, loss, params, [(X, y)]).dense()
    for n in range(4):
        grads = torch.autograd.grad(loss(model(X[n : n + 1]), y[n : n + 1]), params)
        row = torch.cat([g.flatten() for g in grads])
        assert float((found[n] - row).norm()) <= 1e-5 * float(row.norm())


class Attention(nn.Module):
    """Sequences of which the first few tokens are read; of the first alone, softmax is constant."""

    def __init__(self, causal: bool):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head, self.causal = nn.Linear(16, 2), causal

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        x, mask = data["x"], data["mask"]
        layers = (self.query, self.key, self.value)
        qkv = [layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in layers]
        options = {"is_causal": True} if self.causal else {"attn_mask": mask[:, None, None]}
        out = scaled_dot_product_attention(*qkv, **options).transpose(1, 2).flatten(-2)
        if self.causal:
            return self.head(out[:, 0])
        return self.head((out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("causal", "lengths"),
    [
        (True, [(4, 4, 4)]),
        (True, [(4,), (4, 4)]),
        (False, [(1, 1, 1)]),
        (False, [(1,), (3, 2), (4, 1)]),
        (False, [(1, 1), (3, 2), (4, 1)]),
        (False, [(3, 2), (1,)]),
        (False, [(1, 3)]),
    ],
)
def test_gradients_that_are_rounding_errors(
    causal: bool, lengths: list, dtype: torch.dtype, seed: int, caplog: pytest.LogCaptureFixture
):
    """Kernels of attention return such instead of zeros."""
    torch.manual_seed(seed)
    model, loss = Attention(causal).to(dtype), nn.CrossEntropyLoss(reduction="sum")
    data = []
    for some in lengths:
        mask = torch.arange(4)[None] < torch.tensor(some)[:, None]
        x = torch.randn(len(some), 4, 16, dtype=dtype)
        data.append(({"x": x, "mask": mask}, torch.randint(2, (len(some),))))
    params = list(model.parameters())
    options = {"batch_size_fn": lambda X: len(X["x"])}
    found = PerSampleGradientLinearOperator(model, loss, params, data, **options).dense()
    rows = []
    for X, y in data:
        for n in range(len(y)):
            output = model({name: x[n : n + 1] for name, x in X.items()})
            grads = torch.autograd.grad(loss(output, y[n : n + 1]), params)
            rows.append(torch.cat([g.flatten() for g in grads]))
    assert error(found, torch.stack(rows)) <= (1e-5 if dtype == torch.float32 else 1e-12)
    assert not caplog.records
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        for approx in ("expand", "reduce"):
            K = kind(model, loss, params, data, kfac_approx=approx, **options)
            assert {block.structure for block in K.report()} == {"kronecker"}
            assert bool(K.trace().isfinite())


class Clip(torch.autograd.Function):
    """A small share of its input, whose gradient has a norm of one."""

    @staticmethod
    def forward(ctx, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return share * x

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return ctx.share * g / g.norm(), None


@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_gradients_that_are_not_linear(share: float):
    """Small ones, too, are no rounding errors."""
    torch.manual_seed(0)

    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.small = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, X: Tensor) -> Tensor:
            return self.large(X) + Clip.apply(self.small(X), share)

    model, loss = Clipped(), nn.MSELoss(reduction="sum")
    X, y, params = torch.randn(4, 3), torch.randn(4, 2), list(model.parameters())
    found = PerSampleGradientLinearOperator(model, loss, params, [(X, y)]).dense()
    for n in range(4):
        grads = torch.autograd.grad(loss(model(X[n : n + 1]), y[n : n + 1]), params)
        rows = found[n].split([param.numel() for param in params])
        for row, g in zip(rows, grads, strict=True):
            assert error(row, g.flatten()) <= 1e-5
