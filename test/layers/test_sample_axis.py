"""The axis of samples that the graph proves: a wrong one would have gradients of other samples."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import problems
import pytest
import torch
import torch.nn.functional as F
from models import Using
from test_moved_rows import MOVED, ORDER, POOLED, sets
from test_rules import CALLS, EINSUMS, LAYERS, calling
from test_rules import sequences as two_batches
from test_uses import MODELS, ORDERS
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvlinops.layers import sample_axis
from curvlinops.layers.sample_axis import CONSTANT, TABLE, Constant, SampleAxis, sample_axes
from curvlinops.support.torch_internals import gradients_of_inputs

Edge = tuple[Any, int]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def nodes_of(output: Tensor) -> list[Any]:
    """Return all nodes of a graph, inputs first."""
    order: dict[Any, None] = {}
    stack = [(get_gradient_edge(output).node, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order[node] = None
        elif node not in order:
            stack.append((node, True))
            stack += [(x, False) for x, _ in node.next_functions if x is not None]
    return list(order)


def edges_of(nodes: list[Any], output: Tensor) -> list[Edge]:
    """Return the outputs of nodes that are used; those of leaves are not among them."""
    edge = get_gradient_edge(output)
    used = {(edge.node, edge.output_nr): None}
    used |= {x: None for node in nodes for x in node.next_functions if x[0] is not None}
    return [(node, number) for node, number in used if node.next_functions]


def claims_of(output: Tensor, N: int) -> dict[Edge, Any]:
    """Return what is claimed of all edges of a graph, after a comparison with gradients."""
    nodes = nodes_of(output)
    edges = edges_of(nodes, output)
    found = sample_axes(get_gradient_edge(output), output.shape, N, nodes)
    assert set(found) <= set(edges)
    proved = [edge for edge, claim in found.items() if isinstance(claim, SampleAxis)]
    samples = output.detach().unflatten(0, (N, -1))
    for n in range(N):  # random combinations of the outputs of one sample
        g = torch.zeros_like(samples)
        g[n] = torch.randn_like(g[n])
        inputs = [GradientEdge(*edge) for edge in proved]
        gradients = torch.autograd.grad(
            output, inputs, g.flatten(0, 1), retain_graph=True, allow_unused=True
        )
        for edge, gradient in zip(proved, gradients, strict=True):
            if gradient is not None:
                axis, before, after = found[edge]
                parts = gradient.unflatten(axis, (before, N, after)).movedim(axis + 1, 0)
                others = torch.cat([parts[:n], parts[n + 1 :]])
                assert not bool(others.any()), (edge[0].name(), found[edge], n)
    return {edge: found.get(edge) for edge in edges}


def claim_of(output: Tensor, N: int, layer: nn.Linear) -> Any:
    """Return what is claimed of the output of a layer that is used once.

    All axes but the last count as one.
    """
    claims = claims_of(output, N)
    bias = get_gradient_edge(layer.bias).node
    (found,) = {edge for edge in claims if (bias, 0) in edge[0].next_functions}
    claim, shape = claims[found], torch.Size(found[0]._input_metadata[0].shape)
    if not isinstance(claim, SampleAxis) or claim.axis == len(shape) - 1:
        return claim
    before, after = shape[: claim.axis].numel(), shape[claim.axis + 1 : -1].numel()
    return SampleAxis(0, before * claim.before, claim.after * after)


def unproved(model: nn.Module, x: Any, N: int) -> set[str]:
    """Return the names of nodes of which nothing is known."""
    model, x = model.double().eval(), in_double(x)
    with pytest.MonkeyPatch.context() as patch:  # recurrent layers as their cells
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        output = model(x)
    output = getattr(output, "logits", output)
    return {node.name() for (node, _), claim in claims_of(output, N).items() if claim is None}


def in_double(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: in_double(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map(in_double, x))
    return x.double() if x.is_floating_point() else x


# --- layouts: a layer sees the samples in many places

N, d = 3, 3
Layer = Callable[[Tensor], Tensor]


def towers(a: Layer, x: Tensor) -> Tensor:
    first, second = a(torch.cat([x, x.flip(1)])).chunk(2)
    return first * second


def unbound_towers(a: Layer, x: Tensor) -> Tensor:
    first, second = a(torch.stack([x, x.flip(1)])).unbind()
    return first * second


def joined_towers(a: Layer, x: Tensor) -> Tensor:
    h = torch.cat([a(x), x]).tanh()  # more on the axis of samples
    return h[: len(x)] * h[len(x) :]


def beams(a: Layer, x: Tensor) -> Tensor:
    return a(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).sum(1)


def copies(a: Layer, x: Tensor) -> Tensor:
    return a(x).repeat(2, 1, 1)[: len(x)]


def all_pairs(a: Layer, x: Tensor) -> Tensor:
    h = a(x)
    return (h.unsqueeze(1) * h.unsqueeze(2)).sum(2)


def attention(a: Layer, x: Tensor) -> Tensor:
    h = a(x).unflatten(-1, (3, 1)).transpose(1, 2)
    return F.scaled_dot_product_attention(h, h.sin(), h, is_causal=True).transpose(1, 2).flatten(2)


def swapped_attention(a: Layer, x: Tensor) -> Tensor:
    """Samples are heads."""
    h = a(x)[None]
    return F.scaled_dot_product_attention(h, h, h)[0]


def queries(a: Layer, x: Tensor) -> Tensor:
    """Samples are queries that read a table."""
    table = torch.randn(1, 1, 7, 3).double()
    h = a(x.flatten(0, 1))[None, None]
    return F.scaled_dot_product_attention(h, table, table)[0, 0].unflatten(0, x.shape[:2])


def as_groups(a: Layer, x: Tensor) -> Tensor:
    """One convolution with a filter for each sample."""
    filters = a(x)[:, :2]
    images = x.mT.flatten(0, 1)[None, :, :, None]  # [1, N d, T, 1]
    h = F.conv2d(images, filters.flatten(0, 1)[:, :, None, None], groups=len(x))  # [1, N 2, T, 1]
    return h[0, :, :, 0].unflatten(0, (len(x), 2)).transpose(1, 2)


def through_groups(transposed: bool, a: Layer, x: Tensor) -> Tensor:
    images = a(x).mT.flatten(0, 1)[None]  # [1, N d, T]
    weight = torch.randn(len(x) * 3, 2, 1) if transposed else torch.randn(len(x) * 2, 3, 1)
    convolve = F.conv_transpose1d if transposed else F.conv1d
    h = convolve(images, weight.double(), groups=len(x))
    return h[0].unflatten(0, (len(x), 2)).mT


def instance_norm(a: Layer, x: Tensor) -> Tensor:
    return F.instance_norm(a(x).mT, weight=torch.rand(3).double()).mT


def written(a: Layer, x: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:2], 4)
    out[..., 1:] = a(x)
    out[:, 0] += 1.0
    return out.mul_(2.0)


def written_time_first(a: Layer, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[1], len(x), 3)
    for t, one in enumerate(a(x).unbind(1)):
        out[t] = one.sin()
    return out.transpose(0, 1)


def view_in_place(a: Layer, x: Tensor) -> Tensor:
    h = a(x)
    h.view(-1).mul_(2.0).sin_()
    return F.relu(h, inplace=True)


def loop(a: Layer, x: Tensor) -> Tensor:
    """The other layer takes one sample at a time."""
    return torch.stack([h[1:].cumsum(0).sum(1) * h[0].sum() for h in a(x)])


def loop_by_slices(a: Layer, x: Tensor) -> Tensor:
    h = a(x)
    return torch.cat([(h[n : n + 1].std() * h.split(1)[n]).cumsum(1) for n in range(len(x))])


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, 3 * ctx.scale * x**2 * g


class Centered(torch.autograd.Function):
    """Couples the samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class Infinite(torch.autograd.Function):
    """Couples the samples by gradients that are the same whatever their factors are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.abs().sum(0).expand_as(g) * float("inf")


def several_indices(a: Layer, x: Tensor) -> Tensor:
    """The entries of all samples, one of each step, another order of features."""
    rows = torch.arange(len(x))
    h = a(x)
    h = h[rows, torch.tensor([1, 0, 2, 1])[: len(x)]][:, torch.tensor([2, 0, 1])]
    return h[:, None] * x


def shorter_time(a: Layer, x: Tensor) -> Tensor:
    h = a(x)
    order = h.detach().argsort(1)
    h = h.gather(1, order).sort(1)[0].roll(-1, 1).flip(1)
    top = h.topk(2, 1)[0].mean(1, keepdim=True) + h.amax((1, 2), keepdim=True)
    return h.cumsum(1) * top * h.softmax(1) * F.pad(h, (0, 0, 1, 0))[:, 1:]


def graph_layer(a: Layer, x: Tensor) -> Tensor:
    """Messages along edges, of all samples in one list."""
    start = (torch.tensor([0, 1, 2, 0]) + x.shape[1] * torch.arange(len(x))[:, None]).flatten()
    end = (torch.tensor([1, 2, 0, 2]) + x.shape[1] * torch.arange(len(x))[:, None]).flatten()
    h = a(x).flatten(0, 1)
    return torch.zeros_like(h).index_add(0, end, h[start].tanh()).unflatten(0, x.shape[:2])


def routed(a: Layer, x: Tensor) -> Tensor:
    """Rows are sorted by value, cut into unequal parts, and put together again."""
    h = a(x).flatten(0, 1)
    order = h.detach()[:, 0].argsort()
    first, second = h[order].split([2, len(h) - 2])
    return torch.cat([first.sin(), second.cos()])[order.argsort()].unflatten(0, x.shape[:2])


def masked(a: Layer, x: Tensor) -> Tensor:
    h, out = a(x), x.clone()
    out[x > 0] = 1.0
    h = torch.where(x > 0, h, h.flip(1)).masked_fill(x < -1, 0.5)
    return torch.index_put(out, (torch.arange(len(x)), torch.tensor(0)), h[:, 1])


def complex_numbers(a: Layer, x: Tensor) -> Tensor:
    h = torch.view_as_complex(torch.stack([a(x), x], -1)) * torch.exp(1j * x)
    return torch.view_as_real(torch.fft.fft(h, dim=1)).sum(-1).abs() + h.real


def linear_algebra(a: Layer, x: Tensor) -> Tensor:
    h = a(x)
    h = h @ h.mT + torch.eye(x.shape[1])
    L = torch.linalg.cholesky(h)
    values, _ = torch.linalg.eigh(h)
    return (
        torch.linalg.solve(h, x)[..., :1]
        + L.tril()[..., :1] * torch.linalg.det(h)[:, None, None]
        + values[:, None, :1] * torch.linalg.inv(h)[..., :1]
        + torch.cdist(h, x @ x.mT)[..., :1]
    )


def images(a: Layer, x: Tensor) -> Tensor:
    """Pools, pads, windows, and grids of images of the steps."""
    h = a(x)[:, None]  # [N, 1, T, d]
    h = F.pad(F.pad(h, (1, 1, 1, 1), mode="reflect"), (1, 0, 0, 0), mode="replicate")
    h = F.max_pool2d(h, 2, 1) + F.avg_pool2d(h, 2, 1)
    h = F.interpolate(h, size=(6, 6), mode="bilinear") + F.interpolate(h, size=(6, 6))
    h = F.fold(F.unfold(h, 3), (6, 6), 3) + F.pixel_shuffle(h.expand(-1, 4, 6, 6), 2)[..., :6, :6]
    grid = F.affine_grid(torch.randn(len(x), 2, 3).double(), [len(x), 1, 3, 3], align_corners=True)
    return F.grid_sample(h, grid, align_corners=True)[:, 0, : x.shape[1]] + h[:, 0, :1, :3]


IS_OLD = torch.__version__.startswith("2.10.")


def several_outputs(a: Layer, x: Tensor) -> Tensor:
    h = a(x)
    variance, mean = torch.var_mean(h, 1, keepdim=True)
    low, high = h.amin(2, keepdim=True), h.amax(2, keepdim=True)
    if not IS_OLD:  # there, the node cannot be called with the gradient of one output alone
        low, high = torch.aminmax(h, dim=2, keepdim=True)
    return (h - mean) / variance.sqrt() + low * high + h.norm(dim=1, keepdim=True)


def derivative_of_windows(a: Layer, x: Tensor) -> Tensor:
    h = a(x).transpose(0, 1)
    total = h.unfold(0, 2, 1).prod(-1).sin().sum()
    return torch.autograd.grad(total, h, create_graph=True)[0].transpose(0, 1)


def trilinear(a: Layer, x: Tensor) -> Tensor:
    return F.bilinear(a(x), x, torch.randn(3, 3, 3).double())


def outer_products(a: Layer, x: Tensor) -> Tensor:
    h = a(x).flatten(0, 1)
    v = torch.ones(3).double()
    rows = (
        torch.addr(x.new_zeros(len(h), 3), torch.mv(h, v), v) + torch.addmv(h[:, 0], h, v)[:, None]
    )
    return rows.unflatten(0, x.shape[:2])


#: A function of a layer and of a batch ``[N, T, d]`` that returns ``[N, T, *]``, and the place of
#: the samples in the layer's output, which has all axes but the last in one, for T = 3 and T = 5.
ROWS = {3: SampleAxis(0, 1, 3), 5: SampleAxis(0, 1, 5)}
TIME_FIRST = {3: SampleAxis(0, 3, 1), 5: SampleAxis(0, 5, 1)}
LAYOUTS: dict[str, tuple[Callable[[Layer, Tensor], Tensor], dict[int, SampleAxis]]] = {
    **{name: (ORDERS[name][0], ROWS) for name in ("samples first", "flattened")},
    **{name: (ORDERS[name][0], TIME_FIRST) for name in ("time first", "time first, flattened")},
    "steps": (
        lambda a, x: a(torch.cat(x.split(1, 1), 0).squeeze(1)).view(-1, len(x), 3).permute(1, 0, 2),
        TIME_FIRST,
    ),
    "samples last": (
        lambda a, x: a(x.permute(1, 0, 2)).permute(2, 0, 1).movedim(2, 0).mT, TIME_FIRST
    ),
    "towers": (towers, {3: SampleAxis(0, 2, 3), 5: SampleAxis(0, 2, 5)}),
    "unbound towers": (unbound_towers, {3: SampleAxis(0, 2, 3), 5: SampleAxis(0, 2, 5)}),
    "joined towers": (joined_towers, ROWS),
    "beams": (beams, {3: SampleAxis(0, 1, 6), 5: SampleAxis(0, 1, 10)}),
    "copies": (copies, ROWS),
    "all pairs": (all_pairs, ROWS),
    "attention": (attention, ROWS),
    "samples are heads": (swapped_attention, ROWS),
    "samples are queries": (queries, ROWS),
    "samples are filters": (as_groups, ROWS),
    "samples are groups": (partial(through_groups, False), ROWS),
    "samples are transposed groups": (partial(through_groups, True), ROWS),
    "instance norm": (instance_norm, ROWS),
    "written": (written, ROWS),
    "written, time first": (written_time_first, ROWS),
    "a view in place": (view_in_place, ROWS),
    "loop": (loop, ROWS),
    "loop by slices": (loop_by_slices, ROWS),
    "function of the user": (lambda a, x: Cubed.apply(2.0, a(x)), ROWS),
    "several indices": (several_indices, ROWS),
    "time is shuffled": (shorter_time, ROWS),
    "graphs": (graph_layer, ROWS),
    "routed": (routed, ROWS),
    "masked": (masked, ROWS),
    "complex numbers": (complex_numbers, ROWS),
    "linear algebra": (linear_algebra, ROWS),
    "images": (images, ROWS),
    "several outputs": (several_outputs, ROWS),
    "derivative of windows": (derivative_of_windows, ROWS),
    "trilinear": (trilinear, ROWS),
    "outer products": (outer_products, ROWS),
}  # fmt: skip


@pytest.mark.parametrize("T", [3, 5])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, size: int, T: int):
    function, expected = LAYOUTS[name]
    a, b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    x = torch.randn(size, T, 3).double()
    assert claim_of(function(a, x).tanh(), size, a) == expected[T]
    # and of a layer before
    assert claim_of(function(a, b(x).tanh()), size, b) == SampleAxis(0, 1, T)


def test_tables():
    """What all samples use has no axis of samples, even where it has as many rows."""
    a, x = nn.Linear(3, 3).double(), torch.randn(3, 3, 3).double()
    h = a(torch.randn(3, 3).double()).sin()
    index = torch.tensor([[0, 1], [0, 2], [1, 2]])
    for out in (x + h, torch.hypot(x, h), x + h.repeat(3, 1, 1)):
        assert claim_of(out.tanh(), 3, a) is CONSTANT
    for out in (x @ h, h @ x, F.embedding(index, h), h[index]):
        assert claim_of(out.tanh(), 3, a) is TABLE
    assert claim_of(x + h[:, None], 3, a) == SampleAxis(0, 1, 1)  # one row for each sample
    assert claim_of(x + h[:, None] + h, 3, a) is None


def test_windows():
    """Image windows are shifted and cut into parts, as in Swin transformers."""
    a, x = nn.Linear(3, 3).double(), torch.randn(4, 4, 4, 3).double()
    h = x.roll((-1, 1), (1, 2)).view(4, 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3)
    h = a(h).view(4, 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(4, 4, 4, 3).roll(1, 1)
    assert claim_of(h, 4, a) == SampleAxis(0, 1, 16)


# --- what moves rows: the layer's rows are in another order, or in unequal parts

BACK, ODD = ORDER.argsort(), torch.tensor([True, False, True, True])[:, None]
#: The same that are no orders of which numbers tell.
MOVES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    **MOVED,
    "flip": (lambda h, order: h.flip(0), True),
    "roll": (lambda h, order: h.roll(-1, 0), True),
    "cat of slices": (lambda h, order: torch.cat([h[1:], h[:1]]), True),
    "slice of copies": (lambda h, order: torch.cat([h, h])[1:5], True),
    "sort": (lambda h, order: h.sort(0)[0], False),
    "topk": (lambda h, order: h.topk(4, 0)[0], False),
    "masked_scatter": (lambda h, order: torch.zeros_like(h).masked_scatter(ODD, h), False),
}


@pytest.mark.parametrize("name", MOVES)
def test_moved_rows(name: str):
    """Nothing is claimed of rows in another order, and of those before what is true."""
    move, says_where = MOVES[name]
    move = partial(move, order=ORDER)
    a, b, c = (nn.Linear(4, 4).double() for _ in "abc")
    x = torch.randn(4, 4).double()
    assert not isinstance(claim_of(c(move(torch.tanh(a(x)))), 4, a), SampleAxis)
    moved = move(torch.tanh(b(torch.tanh(a(x)))[BACK]))
    if says_where:
        moved = move(torch.tanh(b(move(torch.tanh(a(x))))))
        order = move(torch.arange(4.0).double()[:, None].expand(4, 4))[:, 0].long()
        back = c(torch.tanh(moved[order[order].argsort()]))
        assert claim_of(back, 4, a) == SampleAxis(0, 1, 1)
        assert claim_of(back, 4, b) is None
    claims_of(moved, 4)


@pytest.mark.parametrize("move", [lambda h: h.T, lambda h: h.as_strided((4, 4), (1, 4))])
def test_features_are_samples(move: Callable[[Tensor], Tensor]):
    a, x = nn.Linear(4, 4).double(), torch.randn(4, 4).double()
    assert claim_of(move(torch.tanh(a(x))), 4, a) == SampleAxis(1, 1, 1)


SIZES = {"equal": [3, 3, 3, 3], "unequal": [2, 4, 1, 5]}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", POOLED)
def test_sets(name: str, sizes: str):
    reduce, is_proved = POOLED[name]
    _, owner, pool = sets(SIZES[sizes])
    a, b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    out = b(reduce(torch.tanh(a(torch.randn(12, 4).double())), owner, pool))
    expected = SampleAxis(0, 1, 3) if is_proved and sizes == "equal" else None
    claim = claim_of(out, 4, a)
    assert claim == expected or (isinstance(claim, Constant) and not is_proved)


# --- samples that interact: nothing is claimed


def _rows_as_time(h: Tensor) -> Tensor:
    return nn.GRU(4, 4).double()(h[:, None])[0][:, 0]


def _in_place(h: Tensor) -> Tensor:
    h = h.clone()
    h[1:] += h[:-1].sin()
    return h


#: Functions of ``[4, 4]`` in which samples interact.
COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "standardized": lambda h: (h - h.mean(0)) / h.std(0),
    "norm": lambda h: h / h.norm(),
    "maximum": lambda h: h / h.abs().amax(0),
    "batch norm in training": lambda h: F.batch_norm(h, None, None, training=True),
    "batch norm of steps": lambda h: F.batch_norm(h[..., None], None, None, training=True)[..., 0],
    "layer norm of all": lambda h: F.layer_norm(h, (4, 4)),
    "rms norm of all": lambda h: F.rms_norm(h, (4, 4)),
    "group norm of samples": lambda h: F.group_norm(h[None], 2)[0],
    "softmax": lambda h: h.softmax(0),
    "log softmax": lambda h: h.log_softmax(0),
    "softmax of all": lambda h: h.flatten().softmax(0).view(4, 4),
    "logsumexp": lambda h: h - h.logsumexp(0),
    "cumsum": lambda h: h.cumsum(0),
    "cumprod": lambda h: h.cumprod(0),
    "cumulative, in place": _in_place,
    "product": lambda h: h @ h.T,
    "transposed product": lambda h: h.T @ h,
    "symmetric product": lambda h: h @ h.T @ h,
    "attention": lambda h: (h @ h.T).softmax(1) @ h,
    "fused attention": lambda h: F.scaled_dot_product_attention(
        h[None, None], h[None, None], h[None, None]
    )[0, 0],
    "distances": lambda h: torch.cdist(h, h.sin()),
    "differences": lambda h: (h[:, None] - h).abs().sum(1),
    "einsum": lambda h: torch.einsum("id,jd->ij", h, h.sin()),
    "outer": lambda h: torch.outer(h[:, 0], h[:, 0].sin()),
    "convolution over samples": lambda h: (
        F.conv1d(h.T[None], torch.ones(4, 4, 3).double(), padding=1)[0].T
    ),
    "pool over samples": lambda h: F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
    "neighbours": lambda h: h + h.roll(1, 0).sin() * h,
    "mirrored": lambda h: h * h.flip(0),
    "sorted": lambda h: h.sort(0)[0] * h,
    "fourier": lambda h: torch.fft.fft(h, dim=0).abs(),
    "recurrent": _rows_as_time,
    "windows": lambda h: F.pad(h, (0, 0, 1, 1)).unfold(0, 3, 1).prod(-1),
    "inverse": lambda h: torch.linalg.inv(h @ h.T + torch.eye(4)),
    "solve": lambda h: torch.linalg.solve(h @ h.T + torch.eye(4), torch.eye(4).double()),
    "one for all": lambda h: h * h[0],
    "transposed and back": lambda h: h + h.T,
    "two orders": lambda h: h * h[ORDER].sin(),
    "reshaped": lambda h: h + h.reshape(2, 8).T.reshape(4, 4),
    "function of the user": Centered.apply,
    "infinite gradients": Infinite.apply,
    "prototypes": lambda h: torch.cdist(h, h.view(2, 2, 4).mean(1)).repeat(1, 2),
    "labels of neighbours": lambda h: h.index_add(0, ORDER, h.sin()),
    "glu over samples": lambda h: F.glu(torch.cat([h, h.sin().flip(0)]), 0),
    "one scale": lambda h: h * h.detach().abs().max() * h.mean(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_interacting_samples(name: str):
    a, b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    h = torch.tanh(a(torch.randn(4, 4).double()))
    assert claim_of(b(COUPLED[name](h)), 4, a) is None


# --- models of which everything is proved


def batch_sizes(x: Any) -> int:
    while not isinstance(x, Tensor):
        x = next(iter(x.values())) if isinstance(x, dict) else x[0]
    return len(x)


def layers() -> Iterator[tuple[str, Callable[[], nn.Module], Any]]:
    for name, (build, inputs, *forward) in LAYERS.items():
        made = build
        if forward:
            made = lambda build=build, f=forward[0]: Using(  # noqa: E731
                lambda s, X: f(s.layer, X), layer=build()
            )
        yield name, made, inputs
    for name, (inputs, function, *shapes) in CALLS.items():
        yield name, partial(calling, function, *shapes), inputs
    for equation, shapes in EINSUMS.items():
        place = shapes.index(None)

        def call(x: Tensor, *w: Tensor, equation: str = equation, place: int = place) -> Tensor:
            return torch.einsum(equation, [*w[:place], x, *w[place:]])

        yield equation, partial(calling, call, *filter(None, shapes)), two_batches


ROWS_OF_LAYERS = {name: row for name, *row in layers()}
#: Loops over samples: each use has the rows of one sample.
LOOPS = {"torch.mv", "torch.dot", "torch.outer", "F.linear, of vectors"}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", ROWS_OF_LAYERS)
def test_layers_are_proved(name: str):
    build, inputs = ROWS_OF_LAYERS[name]
    for x in inputs():
        assert batch_sizes(x) == 1 or bool(unproved(build(), x, batch_sizes(x))) == (name in LOOPS)


def conv_pinn(m: Using, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    u = m.net(x)
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0].flatten(1)


def forward_mode(m: Using, x: Tensor) -> Tensor:
    _, du = torch.func.jvp(m.net, (x,), (torch.ones_like(x),))
    return du


def laplacian(m: Using, x: Tensor) -> Tensor:
    def trace(one: Tensor) -> Tensor:
        return torch.func.hessian(lambda z: m.net(z).sum())(one).trace()

    return torch.func.vmap(trace)(x)


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


SMOOTH = nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.Softplus, nn.ELU, nn.Mish, nn.LogSigmoid
KINKED = nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Softshrink, nn.PReLU
L = nn.Linear
#: Models and a batch, beside those of the problems.
PROVED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "residual": (lambda: models.resnet()[0], lambda: torch.randn(3, 3, 8, 8)),
    "vit": (lambda: models.vit()[0], lambda: torch.randn(3, 3, 8, 8)),
    "u-net": (lambda: models.unet()[0], lambda: torch.randn(3, 2, 4, 4)),
    "forward-mode derivative": (
        lambda: Using(forward_mode, net=net(L(2, 4), nn.Tanh(), L(4, 2))),
        lambda: torch.randn(3, 2),
    ),
    "laplacian": (
        lambda: Using(laplacian, net=net(L(2, 4), nn.Tanh(), L(4, 1))), lambda: torch.randn(3, 2)
    ),
    "derivative of a cnn": (
        lambda: Using(
            conv_pinn, net=net(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.AvgPool2d(2), nn.Conv2d(4, 1, 1)),
        ),
        lambda: torch.randn(3, 2, 4, 4),
    ),
    "derivative with a layer norm": (
        lambda: Using(conv_pinn, net=net(L(2, 4), nn.LayerNorm(4), nn.SiLU(), L(4, 1))),
        lambda: torch.randn(4, 2),
    ),
}  # fmt: skip
for _kind in SMOOTH + KINKED:
    PROVED[f"residual of an equation, {_kind.__name__}"] = (
        lambda kind=_kind: models.pinn(net(L(2, 4), kind(), L(4, 4), kind(), L(4, 1))),
        lambda: torch.randn(3, 2),
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("name", PROVED)
def test_models_are_proved(name: str):
    build, batch = PROVED[name]
    x = batch()
    assert not unproved(build(), x, batch_sizes(x))


#: Problems of which a batch has one sample, or a loop over samples, or packs them by length.
OPEN = {"inner-steps", "lstm-packed"}


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("name", problems.MODEL_NAMES)
def test_problems_are_proved(name: str, monkeypatch: pytest.MonkeyPatch):
    """No node is called for that, but a diagonal."""
    called: set[str] = set()

    def call(node: Any, *args: Any) -> list[Tensor | None]:
        called.add(node.name())
        return gradients_of_inputs(node, *args)

    monkeypatch.setattr(sample_axis, "gradients_of_inputs", call)
    p = problems.make(name)
    if not isinstance(p.model, nn.Module):
        return
    for X, _ in p.data:
        N = batch_sizes(X)
        assert N == 1 or bool(unproved(p.model, X, N)) == (name in OPEN)
    assert name in OPEN or called <= {"DiagonalBackward0"}


def imported(path: str) -> ModuleType:
    """Import a test of another room, for its tables."""
    file = Path(__file__).parents[1] / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(file.stem)
    if module is None:
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.extensive
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_tables_of_others_are_proved(double: None):
    kfac = imported("kfac/test_kfac_architectures.py")
    for name, row in MODELS.items():
        if name == "gradients_that_end":  # none reaches the first layer: nothing is claimed of it
            continue
        torch.manual_seed(0)
        for x in row.inputs():
            if row.covered is not None and batch_sizes(x) > 1:
                assert not unproved(row.build(), x, batch_sizes(x)), name
    for name, (build, shape) in (kfac.MODELS | kfac.SINGLE).items():
        for n in (3, 4):
            is_open = bool(unproved(build(), torch.randn(n, *shape), n))
            if name != "ragged":  # open, unless all samples happen to keep as many tokens
                assert is_open == name.startswith("loop"), name


@pytest.mark.extensive
@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_language_models_are_proved(attention: str, monkeypatch: pytest.MonkeyPatch):
    hugging = imported("integrations/test_huggingface.py")
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for name in hugging.CLASSES:
        try:
            model = hugging.make(name, attn_implementation=attention)
        except (ImportError, ValueError):  # no such kernel for this model
            continue
        for batch in hugging.batches(name):
            if "ConditionalGeneration" not in name:
                del batch["labels"]
            one = Using(lambda s, X: s.inner(**X), inner=model)
            assert not unproved(one, batch, len(batch["input_ids"])), name


# --- other outputs


def test_other_outputs():
    a, x = nn.Linear(3, 4).double(), torch.randn(6, 3).double()
    out = a(x).tanh()
    for n, expected in ((2, SampleAxis(0, 1, 3)), (3, SampleAxis(0, 1, 2)), (4, None), (1, None)):
        nodes = nodes_of(out)
        found = sample_axes(get_gradient_edge(out), out.shape, n, nodes)
        assert found.get((nodes[-1], 0)) == expected
    assert not sample_axes(get_gradient_edge(out.sum()), (), 2, nodes_of(out.sum()))
    second = out.unbind(1)[2]  # an output that is not the first of its node
    assert claim_of(second, 6, a) == SampleAxis(0, 1, 1)


def test_other_graphs_are_left_out():
    """Who uses a layer outside of the model does not count, what is overwritten is unknown."""
    a, x = nn.Linear(3, 3).double(), torch.randn(4, 3).double()
    h = a(x)
    out, index = h.tanh(), torch.tensor([1, 0, 3, 2])
    nodes = dict.fromkeys([*nodes_of(h.sum(0)), *nodes_of(out)])
    found = sample_axes(get_gradient_edge(out), out.shape, 4, list(nodes))
    assert found[get_gradient_edge(h).node, 0] == SampleAxis(0, 1, 1)
    out = h.tanh()[index]
    index.zero_()  # saved by the node
    found = sample_axes(get_gradient_edge(out), out.shape, 4, nodes_of(out))
    assert len(found) == 1


def test_many_samples():
    """More than the factors by which nodes are asked."""
    for dtype in (torch.float64, torch.bfloat16):
        a, x = nn.Linear(3, 3).to(dtype), torch.randn(1100, 2, 3).to(dtype)
        out = written(a, x)
        nodes = nodes_of(out)
        found = sample_axes(get_gradient_edge(out), out.shape, 1100, nodes)
        assert set(found) == set(edges_of(nodes, out))


def test_names_of_nodes():
    """Rules are for nodes that PyTorch has."""
    known = {sample_axis._kind(name) for name in dir(torch._C._functions)}
    assert set(sample_axis._RULES) | sample_axis._PARTS | sample_axis._SEVERAL <= known
