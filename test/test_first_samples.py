"""What is tried on the first few samples of a batch must hold for all of them."""

from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import curvlinops
from curvlinops.core.data import Batch, first_samples
from curvlinops.core.risk import BatchRisk

pytestmark = pytest.mark.extensive

N = 16


class Model(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.double()
        self._function, self.box = function, {}

    def forward(self, x: Any) -> Tensor:
        return self.head(self._function(self, x))


def fixed_batch_size(m: Model, x: Tensor) -> Tensor:
    """Refuse any other number of samples."""
    return torch.tanh(m.first(x) * m.second(x).view(N, 4))


def late_expert(m: Model, x: Tensor) -> Tensor:
    """Use a layer for the last samples only."""
    late = x[:, 0] > 0
    out = m.first(x)
    out[late] = m.second(x[late])
    return torch.tanh(out)


def few_another_way(m: Model, x: Tensor) -> Tensor:
    """Call other functions, in another order, for few samples."""
    if len(x) < 8:
        second = torch.einsum("ni,oi->on", x, m.second.weight) + m.second.bias[:, None]
        return torch.tanh(second.T + m.first(x))
    return torch.tanh(F.linear(x, m.first.weight, m.first.bias) * m.second(x))


def late_gradients(m: Model, x: Tensor) -> Tensor:
    """Depend on a layer for the last samples only."""
    return m.first(x) + torch.relu(x[:, :1]) * torch.tanh(m.second(x))


def positions_first(m: Model, x: Tensor) -> Tensor:
    """Take a sequence as long as the batch, positions first."""
    return torch.tanh(m.first(x).cumsum(0) + m.second(x)).mean(0)


def interleaved(m: Model, x: Tensor) -> Tensor:
    """Take every other sample first, which two are in order already."""
    first, second = torch.tanh(m.first(torch.cat([x[0::2], x[1::2]]))).chunk(2)
    return torch.stack([first, second], 1).flatten(0, 1) * torch.tanh(m.second(x))


def dispatched(m: Model, x: Tensor) -> Tensor:
    """Sort samples by a dense permutation matrix, which leaves the first ones in order."""
    order = torch.cat([torch.arange(4), torch.arange(4, N).flip(0)])[: len(x)]
    P = F.one_hot(order, len(x)).to(x)
    return P.T @ torch.tanh(m.first(P @ x)) + m.first(x)


def cached(m: Model, x: Tensor) -> Tensor:
    """Keep what is made for the first batch where nobody restores it."""
    if "scale" not in m.box:
        m.box["scale"] = torch.ones(len(x), 4, dtype=x.dtype)
    return torch.tanh(m.first(x) * m.box["scale"]) * m.second(x)


def inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(N) < N // 2, -1, 1)
    return torch.stack([x.roll(i, 0) for i in range(N)]) if name == "positions_first" else x


MODELS = {
    f.__name__: f
    for f in (
        *(fixed_batch_size, late_expert, few_another_way, late_gradients, positions_first),
        *(interleaved, dispatched, cached),
    )
}
OPERATORS = {
    "Hessian": curvlinops.HessianLinearOperator,
    "GGN": curvlinops.GGNLinearOperator,
    "EF": curvlinops.EFLinearOperator,
    "Jacobian": curvlinops.JacobianLinearOperator,
    "diagonal": curvlinops.GGNDiagonalLinearOperator,
    "rows": curvlinops.PerSampleGradientLinearOperator,
    "KFAC": curvlinops.KFACLinearOperator,
    "EKFAC": curvlinops.EKFACLinearOperator,
}


def matrix(kind: str, name: str, **options: Any) -> Tensor:
    """Return an operator as a matrix, for the sum of squares."""
    model = Model(MODELS[name])
    x = inputs(name)
    y = torch.zeros(N, 2, dtype=torch.float64)
    if name == "positions_first":
        options["batch_size_fn"] = lambda X: X.shape[1]
    if kind in ("KFAC", "EKFAC"):
        options["fisher_type"] = "type-2"
    loss = [] if kind == "Jacobian" else [nn.MSELoss(reduction="sum")]
    operator = OPERATORS[kind](model, *loss, list(model.parameters()), [(x, y)], **options)
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("check_deterministic", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_nothing_else_is_computed(kind: str, name: str, check_deterministic: bool, monkeypatch):
    by_sample = kind not in ("Hessian", "GGN", "Jacobian")
    if name == "few_another_way" and by_sample and check_deterministic:
        # a sample's gradient depends on how many others there are
        with pytest.raises(ValueError, match="depends on the other samples"):
            matrix(kind, name)
        return
    found = matrix(kind, name, check_deterministic=check_deterministic)
    monkeypatch.setattr(BatchRisk, "first_samples", lambda self: None)
    expected = matrix(kind, name)  # nothing is cut
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10 * float(expected.norm()))


def rolled(m: Model, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return h + 0.5 * h.roll(2, 0) + m.second(x)


def centered(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x) - m.second(x).mean(0))


@pytest.mark.parametrize("function", [rolled, centered])
@pytest.mark.parametrize("kind", ["rows", "EF", "diagonal", "KFAC", "EKFAC"])
@pytest.mark.parametrize("check", [True, False])
def test_samples_that_interact_are_refused(kind: str, function: Callable, check: bool):
    """At construction, or where samples are told apart."""
    if kind == "EF" and not check:
        return  # adds up whatever the gradients of the batch's terms are
    model = Model(function)
    data = [(inputs(""), torch.zeros(N, 2, dtype=torch.float64))]
    arguments = model, nn.MSELoss(), list(model.parameters()), data
    with pytest.raises(ValueError, match="depends on the other samples"):
        operator = OPERATORS[kind](*arguments, check_deterministic=check)
        operator.norms() if kind == "rows" else operator @ torch.ones(operator.shape[1]).double()


def normalized(m: Model, x: Tensor) -> Tensor:
    return F.batch_norm(m.first(x), None, None, training=True) * m.second(x)


def standardized(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    return (h - h.mean(0)) / h.std(0) * m.second(x)


def centered_by_constant(m: Model, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x) * m.second(x))
    return h - h.mean(0).detach()


def rescaled(m: Model, x: Tensor) -> Tensor:
    h = m.first(x) * m.second(x)
    return h / h.abs().max().detach()


def divided(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * m.second(x) / len(x)


@pytest.mark.parametrize(
    "function", [normalized, standardized, centered_by_constant, rescaled, divided]
)
@pytest.mark.parametrize("kind", ["rows", "EF", "diagonal", "KFAC", "EKFAC"])
def test_samples_that_interact_without_a_trace_are_refused(kind: str, function: Callable):
    """One sample alone is no number, or gradients have no part in it."""
    model, x = Model(function), inputs("")
    data = [(x, torch.zeros(N, 2, dtype=torch.float64))]
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS[kind](model, nn.MSELoss(), list(model.parameters()), data)
    curvlinops.HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)


class Pairs(Model):
    """Compares each sample with each other, as contrastive models do."""

    def forward(self, x: Any) -> Tensor:
        return torch.tanh(self.first(x["images"])) @ torch.tanh(self.second(x["texts"])).T


@pytest.mark.parametrize("kind", ["rows", "EF", "diagonal", "KFAC", "EKFAC"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_outputs_for_pairs_of_samples_are_refused(kind: str, size: int):
    model, loss = Pairs(Model), nn.CrossEntropyLoss()
    x = [torch.randn(size, 3).double() for _ in range(2)]
    data = [({"images": x[0], "texts": x[1]}, torch.arange(size))]
    options = {"batch_size_fn": lambda X: len(X["texts"])}
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS[kind](model, loss, list(model.parameters()), data, **options)
    curvlinops.HessianLinearOperator(model, loss, list(model.parameters()), data, **options)


class Trimmed(Model):
    """Drops what is padding in all samples of a batch."""

    def forward(self, x: Any) -> Tensor:
        length = int((x.abs().sum(-1) > 0).sum(1).max())
        return self.head(torch.tanh(self.first(x[:, :length]))).mT


def test_lengths_that_depend_on_the_longest_sample_are_no_interaction():
    model, lengths = Trimmed(Model), [2, 1, 2, 4, 3]
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


class Cubed(torch.autograd.Function):
    """A function without forward mode, whose backward is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the third power."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Return the derivative, as a constant."""
        (x,) = ctx.saved_tensors
        return g * 3 * x.detach() ** 2


def late(function: Callable) -> Callable:
    """Return a model in which only the last samples meet a function of a layer."""

    def forward(m: Model, x: Tensor) -> Tensor:
        h, chosen = torch.tanh(m.first(x)), x[:, 0] > 0
        if not chosen.any():
            return h
        return torch.cat([h[~chosen], function(m, x[chosen])])

    return forward


def dense(model: Model, x: Tensor) -> Tensor:
    """Return the Gauss-Newton matrix of half the sum of squares."""
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True) for z in model(x).flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return J.T @ J


def test_late_operations_choose_the_mode():
    model, x = Model(late(lambda m, x: Cubed.apply(m.second(x)))), inputs("")
    arguments = model, nn.MSELoss(reduction="sum"), list(model.parameters()), [(x, model(x) - 1)]
    arguments[-1][0][1].detach_()
    ggn = curvlinops.GGNLinearOperator(*arguments, cache="none")
    found = torch.stack([ggn @ e for e in torch.eye(ggn.shape[0], dtype=torch.float64)])
    torch.testing.assert_close(found, 2 * dense(model, x))
    with pytest.raises(RuntimeError, match="not the derivative of the gradient"):
        curvlinops.HessianLinearOperator(*arguments) @ torch.ones(len(found)).double()


class Root(torch.autograd.Function):
    """The square root, which can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the root."""
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Return the derivative."""
        (x,) = ctx.saved_tensors
        return g / (2 * x.sqrt())


def test_custom_functions_behind_padding():
    """Its row is a constant for derivatives, but not for differences."""
    x, y = torch.tensor([[0, 1, 2], [3, 2, 0]]), torch.tensor([0, 2])
    found = []
    for root in (torch.sqrt, Root.apply):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 3)
        embedding.weight.data[0] = 0.5
        model = nn.ModuleList([embedding, head]).double()

        def forward(x: Tensor, parts: Any = model, root: Callable = root) -> Tensor:
            h = parts[0](x)
            return parts[1](root(1 + h**2 + h.sum(1, keepdim=True).exp()).mean(1))

        model.forward = forward
        H = curvlinops.HessianLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)]
        )
        found.append(H @ torch.eye(H.shape[0], dtype=torch.float64))
    torch.testing.assert_close(*found)


def test_late_operations_that_are_refused():
    hidden: list[nn.Parameter] = []
    model = Model(late(lambda m, x: m.second(x) * hidden[0]))
    model.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
    hidden.append(model.scale)
    data = [(inputs(""), torch.zeros(N, 2, dtype=torch.float64))]
    with pytest.raises(ValueError, match="not registered"):
        curvlinops.HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    checkpoint = torch.utils.checkpoint.checkpoint
    model = Model(
        late(lambda m, x: checkpoint(m.second, x.clone().requires_grad_(), use_reentrant=True))
    )
    with pytest.raises(ValueError, match="reentrant"):
        curvlinops.HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)


def test_late_terms_of_a_loss():
    """What a loss differentiates for the last samples only counts."""
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.linspace(-1, 1, N, dtype=torch.float64).unsqueeze(1)

    def residuals(output: Tensor, points: Tensor) -> Tensor:
        inner = points[:, 0] > 0
        loss = (output[~inner] ** 2).sum()
        if inner.any():
            points = points[inner].detach().requires_grad_()
            (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
            loss = loss + ((slope - 1) ** 2).sum()
        return loss

    params = list(net.parameters())
    H = curvlinops.HessianLinearOperator(net, residuals, params, [(x, x)], reduction="sum")
    gradient = torch.autograd.grad(residuals(net(x), x), params, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    rows = [torch.autograd.grad(g, params, retain_graph=True, materialize_grads=True) for g in flat]
    expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(H @ torch.eye(len(flat), dtype=torch.float64), expected)


class Movable(UserDict):
    """A mapping that moves itself to a device, as those of Hugging Face."""

    def to(self, device: torch.device) -> "Movable":
        return self


def test_what_is_cut():
    x, mask, scale = torch.randn(N, 5), torch.ones(N, 5, 5), torch.ones(3)
    X = Movable(x=x, nested=[{"mask": mask}], scale=scale, flag=True, empty=None)
    few = first_samples(Batch(3, X, torch.arange(N)), N)
    assert few.index == 3 and isinstance(few.X, Movable)
    torch.testing.assert_close(few.X["x"], x[:2])
    assert few.X["nested"][0]["mask"].shape == (2, 5, 5)
    assert few.X["scale"] is scale and few.X["flag"] is True and few.X["empty"] is None
    assert few.y.tolist() == [0, 1]
    assert X["x"] is x and X["nested"][0]["mask"] is mask


@pytest.mark.parametrize(
    ("X", "y"),
    [
        (torch.ones(3, 2), torch.ones(3)),  # few anyway
        ([torch.ones(5, N), torch.tensor(1.0)], torch.ones(N)),  # nothing of X
        (torch.ones(N, 5), torch.ones(N * 5)),  # targets of another length
        ({"x": torch.ones(N), "edges": torch.ones(2, 9, dtype=torch.int64)}, torch.ones(N)),
        ({"x": torch.ones(N)}, [torch.ones(N), torch.ones(2)]),
    ],
)
def test_what_cannot_be_cut(X: Any, y: Any):
    num_samples = 3 if isinstance(X, Tensor) and len(X) == 3 else N
    assert first_samples(Batch(0, X, y), num_samples) is None


class Shared(MutableMapping):
    """A mapping whose copies are views."""

    def __init__(self, **items: Tensor):
        self.items_ = items

    def __getitem__(self, key: str) -> Tensor:
        return self.items_[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def to(self, device: torch.device) -> "Shared":
        return self


def test_batches_of_the_user_stay_whole():
    X = Shared(x=torch.ones(N, 3))
    first_samples(Batch(0, X, None), N)
    assert X["x"].shape == (N, 3)
    layer = nn.Linear(3, 2)
    J = curvlinops.JacobianLinearOperator(
        lambda X: layer(X["x"]),
        list(layer.parameters()),
        [(X, None)],
        batch_size_fn=lambda X: len(X["x"]),
    )
    J @ torch.ones(8)
    assert J.shape == (2 * N, 8) and X["x"].shape == (N, 3)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_kinds_of_tensors():
    x = torch.ones(N, 2, requires_grad=True)
    few = first_samples(Batch(0, x, x), N)
    assert few.X is few.y and few.X.requires_grad and few.X.is_leaf
    model = nn.Linear(3, 1).double()
    for X in (inputs("").to_sparse(), inputs("").to_sparse_csr()):
        data = [(X, torch.zeros(N, 1, dtype=torch.float64))]
        arguments = model, nn.MSELoss(), list(model.parameters())
        found = curvlinops.HessianLinearOperator(*arguments, data, batch_size_fn=len)
        dense = curvlinops.HessianLinearOperator(*arguments, [(X.to_dense(), data[0][1])])
        eye = torch.eye(4, dtype=torch.float64)
        torch.testing.assert_close(found @ eye, dense @ eye)


def test_large_batches_are_tried_in_part():
    few = first_samples(Batch(0, torch.ones(256, 2), None), 256)
    assert len(few.X) == 16 and few.y is None
    assert few.X.untyped_storage().nbytes() == few.X.nbytes
