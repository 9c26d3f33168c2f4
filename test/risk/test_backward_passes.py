"""Backward passes that users change, and those that lose their graph: right, or refused."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from models import Using
from sample_gradients import loop
from tables import core
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import curvlinops as C

MSE = nn.MSELoss(reduction="sum")

#: What happens to gradients ``[N, 3]``, sample by sample: linear, and not.
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda g: g * g.new_tensor([1.0, -2.0, 0.5]),
    "mixed": lambda g: g.roll(1, 1) + g.sum(1, keepdim=True),
}
CLIPPED: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"clamped at {c}": lambda g, c=c: g.clamp(-c, c) for c in (0.01, 0.1, 1.0, 10.0, 100.0)},
    "norms of rows": lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1.0),
    "normalized rows": lambda g: g / (1e-12 + g.norm(dim=1, keepdim=True)),
    "small ones are left out": lambda g: g * (g.abs() > 1e-2),
    "positive": lambda g: g.clamp(min=0.0),
    "signs": torch.sign,
}
#: The same with samples that meet.
MEETING: dict[str, Callable[[Tensor], Tensor]] = {
    "centered": lambda g: g - g.mean(0),
    "normalized": lambda g: g / (1e-12 + g.norm()),
    "added": lambda g: g + g.sum(0),
    "rolled": lambda g: g.roll(1, 0),
}


def as_hook(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(f)
        return h

    return apply


def as_function(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    class Changing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return f(g)

    return Changing.apply


def as_hook_of_node(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.grad_fn.register_prehook(lambda gradients: tuple(map(f, gradients)))
        return h

    return apply


def as_hook_of_edge(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """PyTorch reads the node, and gives it to the user."""

    def apply(h: Tensor) -> Tensor:
        if h.requires_grad:
            get_gradient_edge(h).node.register_prehook(lambda gradients: tuple(map(f, gradients)))
        return h

    return apply


def in_checkpoint(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda h: checkpoint(lambda x: as_hook(f)(x * 1.0), h, use_reentrant=False)


def of_several(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A hook that the first evaluation does not show if it has one sample."""
    return lambda h: as_hook(f)(h) if len(h) > 1 else h


WAYS = {
    "hook": as_hook,
    "function": as_function,
    "node": as_hook_of_node,
    "edge": as_hook_of_edge,
    "checkpoint": in_checkpoint,
    "several": of_several,
}
APART = [way for way in WAYS if way != "several"]


def net(way: str, f: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    change = WAYS[way](f)
    parts = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 2)}
    return Using(lambda s, x: s.b(change(torch.tanh(s.a(x)))), **parts).to(dtype)


def data(sizes: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float64) -> list:
    generator = torch.Generator().manual_seed(1)
    X, y = (torch.randn(sum(sizes), n, generator=generator, dtype=dtype) for n in (3, 2))
    return list(zip(X.split(sizes), y.split(sizes), strict=True))


PRODUCTS = {
    "Hessian": C.HessianLinearOperator,
    "GGN": C.GGNLinearOperator,
    "Fisher": lambda *a, **o: C.GGNLinearOperator(*a, **o, mc_samples=2),
    "Jacobian": lambda m, _, p, d, **o: C.JacobianLinearOperator(m, p, d, **o),
}
SAMPLES: dict[str, Callable] = {
    "rows": lambda *a: C.PerSampleGradientLinearOperator(*a).dense(),
    "norms": lambda *a: C.PerSampleGradientLinearOperator(*a).norms().square(),
    "scores": lambda *a: C.PerSampleGradientLinearOperator(*a).scores(torch.eye(20).double()),
    "EF": lambda *a: C.EFLinearOperator(*a).to_dense(),
    "EKFAC": lambda *a: C.EKFACLinearOperator(*a, fisher_type="empirical").trace(),
    "products": lambda *a: (
        C.PerSampleGradientLinearOperator(*a)
        @ torch.eye(len(torch.cat([*map(torch.flatten, a[2])]))).to(a[2][0])
    ),
}


def expected(quantity: str, rows: Tensor) -> Tensor:
    square = rows.square()
    moment = rows.T @ rows
    found = {"norms": square.sum(1), "EF": moment, "EKFAC": square.sum()}
    return found.get(quantity, rows)


def build(kind: Callable, model: nn.Module, batches: list) -> Any:
    return kind(model, MSE, list(model.parameters()), batches)


DTYPES = torch.float64, torch.float32


@pytest.mark.parametrize(
    "kind, f, way, dtype",
    core(
        [
            *product(["GGN", "Jacobian"], CLIPPED, ["hook"], DTYPES),
            *product(["Fisher", "GGN"], ["clamped at 1.0", "signs"], APART, DTYPES[:1]),
        ],
        product(["Fisher", "Jacobian"], CLIPPED, APART, DTYPES[:1]),
    ),
)  # a Hessian is of one gradient
def test_backward_passes_that_are_not_linear(kind: str, f: str, way: str, dtype: torch.dtype):
    """Products would be wrong for some sizes of vectors, whatever the first one is."""
    model, batches = net(way, CLIPPED[f], dtype), data(dtype=dtype)
    A = build(PRODUCTS[kind], model, batches)
    v = torch.ones(20, dtype=dtype)
    for size in (1e-4, 1.0):
        with pytest.raises((NotImplementedError, RuntimeError), match="hook|Changing"):
            A @ (size * v)


@pytest.mark.parametrize("sizes", [(1, 5), (2, 4)])
@pytest.mark.parametrize("kind", ["GGN", "Jacobian"])
def test_hooks_of_some_batches(kind: str, sizes: tuple[int, ...]):
    with pytest.raises((NotImplementedError, ValueError), match="hook"):
        A = build(PRODUCTS[kind], net("several", CLIPPED["clamped at 0.1"]), data(sizes))
        A @ torch.ones(20).double()


@pytest.mark.parametrize("way", APART)
@pytest.mark.parametrize("f", LINEAR)
@pytest.mark.parametrize("kind", ["GGN", "Fisher", "Jacobian"])
def test_linear_backward_passes(kind: str, f: str, way: str):
    A = build(PRODUCTS[kind], net(way, LINEAR[f]), data((2, 4)))
    v = torch.ones(20).double()
    torch.testing.assert_close(A @ (1e3 * v) / 1e3, A @ v)
    torch.testing.assert_close(A @ v, A.to_dense() @ v)


#: What happens to each gradient by itself; of the bounds of clamps, one.
BY_ITSELF = {n: f for n, f in (LINEAR | CLIPPED).items() if "clamped" not in n or "0.1" in n}


@pytest.mark.parametrize(
    "quantity, f, way, sizes",
    core(
        [
            *product(SAMPLES, BY_ITSELF, ["hook"], [(2, 1, 3)]),
            *product(SAMPLES, ["mixed", "normalized rows"], ["function"], [(1,) * 6, (1, 5)]),
        ],
        product(SAMPLES, BY_ITSELF, APART, [(6,)]),
    ),
)
def test_samples_apart(quantity: str, f: str, way: str, sizes: tuple[int, ...]):
    """What happens to each sample's gradient by itself is the same in all splits."""
    model, batches = net(way, BY_ITSELF[f]), data(sizes)
    rows = loop(model, list(model.parameters()), batches, MSE)
    found = build(SAMPLES[quantity], model, batches)
    torch.testing.assert_close(found, expected(quantity, rows))


@pytest.mark.parametrize(
    "quantity, f, way, sizes",
    core(
        [
            *product(SAMPLES, MEETING, ["hook"], [(1, 5)]),
            *product(SAMPLES, ["normalized", "rolled"], ["function", "several"], [(6,), (2, 4)]),
        ],
        product(SAMPLES, MEETING, WAYS, [(6,)]),
    ),
)
def test_samples_that_meet(quantity: str, f: str, way: str, sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match="depends on the other samples.*(hook|Changing)"):
        build(SAMPLES[quantity], net(way, MEETING[f]), data(sizes))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", ["centered", "added", "rolled"])
def test_samples_that_meet_in_one_batch(f: str, way: str):
    """All data as one batch has a Jacobian, the transpose of what the backward pass does."""
    model, [(X, y)] = net(way, MEETING[f]), data()
    J = C.JacobianLinearOperator(model, list(model.parameters()), [(X, y)])
    z, params = model(X), list(model.parameters())
    grads = [torch.autograd.grad(x, params, retain_graph=True) for x in z.flatten()]
    rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])
    torch.testing.assert_close(J.to_dense(), rows)
    torch.testing.assert_close(J @ torch.eye(20).double(), rows)


# --- backward passes that lose their graph

_EDGES = torch.tensor([[0, 1, 2], [1, 0, 3]])


def sparse(values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(_EDGES, values, (3, 5), check_invariants=False)


LOSING: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "to_dense": lambda s, x: x @ sparse(s.v).to_dense().T,
    "mm": lambda s, x: torch.sparse.mm(sparse(s.v), x.T).T,
    "@": lambda s, x: (sparse(s.v) @ x.T).T,
    "coalesce": lambda s, x: x @ sparse(s.v).coalesce().to_dense().T,
    "function of values": lambda s, x: x @ sparse(s.v.tanh()).to_dense().T,
    "beside others": lambda s, x: torch.tanh(x @ sparse(s.v * s.w).to_dense().T) * s.w,
}


def dense(v: Tensor) -> Tensor:
    return torch.zeros(3, 5, dtype=v.dtype).index_put((_EDGES[0], _EDGES[1]), v)


TWINS: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "function of values": lambda s, x: x @ dense(s.v.tanh()).T,
    "beside others": lambda s, x: torch.tanh(x @ dense(s.v * s.w).T) * s.w,
}


def losing(function: Callable) -> nn.Module:
    torch.manual_seed(0)
    return Using(function, v=torch.randn(3).double(), w=torch.rand(3).double())


def values(way: str, twin: bool) -> tuple[nn.Module, list[Tensor], list]:
    model = losing(TWINS.get(way, lambda s, x: x @ dense(s.v).T) if twin else LOSING[way])
    params = [model.v, model.w] if way == "beside others" else [model.v]
    generator = torch.Generator().manual_seed(1)
    X, y = (torch.randn(4, n, generator=generator).double() for n in (5, 3))
    return model, params, [(X[:2], y[:2]), (X[2:], y[2:])]


@pytest.mark.parametrize("way", LOSING)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_lost_graphs(kind: str, way: str):
    """Right by another way, or refused by the name of the operation."""
    found = []
    for twin in (True, False):
        model, params, batches = values(way, twin)
        A = PRODUCTS[kind](model, MSE, params, batches)
        v = torch.ones(A.shape[1]).double()
        try:
            found.append(A @ v)
        except NotImplementedError as error:
            assert not twin and "Sparse" in str(error)
            return
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("way", LOSING)
@pytest.mark.parametrize("quantity", ["rows", "norms", "EF", "products"])
def test_first_derivatives_where_graphs_are_lost(quantity: str, way: str):
    found = []
    for twin in (True, False):
        model, params, batches = values(way, twin)
        found.append(SAMPLES[quantity](model, MSE, params, batches))
    torch.testing.assert_close(found[1], found[0])


def attention(is_sparse: bool) -> nn.Module:
    """Attention along the edges of a graph; its matrix is sparse, or dense."""
    torch.manual_seed(0)
    i, j = torch.tensor([[0, 0, 1, 1, 2, 3, 3, 4], [1, 2, 0, 3, 2, 0, 4, 1]])

    def forward(s: Using, x: Tensor) -> Tensor:
        h = s.w(x)
        a = torch.tanh(s.a(torch.cat([h[i], h[j]], 1)))[:, 0].exp()
        if is_sparse:
            weights = torch.sparse_coo_tensor(
                torch.stack([i, j]), a, (5, 5), check_invariants=False
            )
            return s.o(torch.tanh(torch.sparse.mm(weights, h)))
        return s.o(torch.tanh(a.new_zeros(5, 5).index_put((i, j), a) @ h))

    return Using(forward, w=nn.Linear(3, 4), a=nn.Linear(8, 1), o=nn.Linear(4, 2)).double()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_sparse_attention(kind: str, check: bool):
    """Second derivatives are refused, first ones are right."""
    torch.manual_seed(0)
    loss, data = nn.CrossEntropyLoss(), [(torch.randn(5, 3).double(), torch.randint(2, (5,)))]

    def operator(is_sparse: bool) -> Any:
        model = attention(is_sparse)
        return PRODUCTS[kind](
            model, loss, list(model.parameters()), data, check_deterministic=check
        )

    sparse, dense = operator(True), operator(False)
    with pytest.raises(NotImplementedError, match="Sparse"):
        sparse @ torch.ones(sparse.shape[1]).double()
    if kind == "Jacobian":
        u = torch.ones(10).double()
        torch.testing.assert_close(sparse.T @ u, dense.T @ u)
    else:
        found, truth = (A.gradient_and_loss()[0] for A in (sparse, dense))
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("gate", [0.0, 0.3])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_lost_graphs_behind_a_gate(kind: str, gate: float):
    """A gradient that is zero before the first step has a derivative."""
    way = "function of values"
    twins = [losing(lambda s, x, f=f: f[way](s, x) * s.w + x[:, :3]) for f in (LOSING, TWINS)]
    X, y = torch.randn(4, 5).double(), torch.randn(4, 3).double()
    for m in twins:
        nn.init.constant_(m.w, gate)
    A, B = (PRODUCTS[kind](m, MSE, [m.v, m.w], [(X, y)]) for m in twins)
    try:
        found = A @ torch.ones(6).double()
    except NotImplementedError as error:
        assert "Sparse" in str(error)
        return
    torch.testing.assert_close(found, B @ torch.ones(6).double())


# --- rows that are selected


class Selecting(nn.Module):
    """The outputs of those tokens that a mask selects."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.a, self.first = nn.Linear(3, 4), first

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, mask = batch["x"], batch["mask"]
        return self.a(x[mask]) if self.first else self.a(x)[mask]


SELECTED: dict[str, Callable] = {
    "EF": lambda *a, **o: C.EFLinearOperator(*a, **o, terms="sample").to_dense(),
    "EF @ v": lambda *a, **o: C.EFLinearOperator(*a, **o, terms="sample") @ torch.ones(16).double(),
    "rows": lambda *a, **o: C.PerSampleGradientLinearOperator(*a, **o).dense(),
    "rows @ v": lambda *a, **o: (
        C.PerSampleGradientLinearOperator(*a, **o) @ torch.ones(16).double()
    ),
    "diagonal": lambda *a, **o: C.GGNDiagonalLinearOperator(*a, **o).diagonal(),
    "KFAC": lambda *a, **o: C.KFACLinearOperator(*a, **o).trace(),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_size_fn": lambda b: len(b["x"])}], ids=len)
@pytest.mark.parametrize("lengths", [(2, 1, 3, 2), (1, 3, 2, 2), (2, 2, 2, 2), (1, 1, 3)])
def test_selected_rows(lengths: tuple[int, ...], options: dict, first: bool):
    """Nobody knows which rows are whose, whatever their number is."""
    model, loss = Selecting(first).double(), nn.CrossEntropyLoss(reduction="sum")
    mask = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
    X = {"x": torch.randn(len(lengths), 4, 3).double(), "mask": mask}
    y, params = torch.randint(4, (sum(lengths),)), list(model.parameters())
    for quantity in SELECTED.values():
        with pytest.raises(ValueError, match=r"samples first.*mask in the loss.*batch_size_fn"):
            quantity(model, loss, params, [(X, y)], **options)
    # sums over all rows do not ask
    H = C.HessianLinearOperator(model, loss, params, [(X, y)], **options).to_dense()
    J = C.JacobianLinearOperator(model, params, [(X, y)], **options)
    B = torch.block_diag(*(p.diag() - p.outer(p) for p in model(X).detach().softmax(1)))
    torch.testing.assert_close(J.to_dense().T @ B @ J.to_dense(), H)
    torch.testing.assert_close(J.gram(), J.to_dense() @ J.to_dense().T)
    E = C.EFLinearOperator(model, loss, params, [(X, y)], **options)  # rows are terms
    rows = [torch.autograd.grad(loss(model(X)[i], y[i]), params) for i in range(len(y))]
    D = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    torch.testing.assert_close(E.to_dense(), D.T @ D)


def mixing(x: Tensor) -> Tensor:
    return torch.tanh(x) + torch.tanh(x).cumsum(1)


@pytest.mark.parametrize("quantity", SELECTED)
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 1, 1)])
def test_rows_of_all_places(sizes: tuple[int, ...], is_alone: bool, quantity: str):
    """Flattened outputs have a row for each place; ``batch_size_fn`` says what a sample is."""
    torch.manual_seed(0)
    loss, found = nn.CrossEntropyLoss(reduction="sum"), []
    x, y = torch.randn(4, 5, 3).double(), torch.randint(4, (4, 5))
    for is_flat in (False, True):
        torch.manual_seed(1)
        model = Using(
            lambda s, X, f=is_flat: (
                s.a(mixing(X["x"])).flatten(0, 1) if f else s.a(mixing(X["x"])).mT
            ),
            a=nn.Linear(3, 4),
        ).double()
        data = [
            (
                {"x": X, "all": torch.ones(1, 5)} if is_alone else {"x": X},
                t.flatten() if is_flat else t,
            )
            for X, t in zip(x.split(sizes), y.split(sizes), strict=True)
        ]
        options = {"batch_size_fn": lambda X: len(X["x"])}
        found.append(SELECTED[quantity](model, loss, list(model.parameters()), data, **options))
    torch.testing.assert_close(found[1], found[0])
