"""Where samples are is proved for what keeps them apart, and unknown for what may move them."""

import logging
from collections.abc import Callable, Iterator
from math import prod

import pytest
import torch
import torch.nn.functional as F
from contract import error
from models import Using
from sample_gradients import check_rows, rows_in_batches
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
)
from curvlinops import PerSampleGradientLinearOperator as PerSampleGradients
from curvlinops.layers import proof

N, T, D = 4, 3, 6  # samples, positions, features: 3 x 2 of 1 x 6 images
Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed(double):
    pass


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def layer() -> Function:
    """Return a layer without bias."""
    weight = random(D, D).requires_grad_()
    return lambda x: x @ weight


def check(layer: Function, function: Callable[[Function], Tensor]) -> bool:
    """Return whether the samples of the layer's outputs are proved, and check that this is right.

    If the gradient of sample n is weighted by r_n, so is that of each row that belongs to it.
    """
    seen: list[Tensor] = []
    output = function(lambda x: seen.append(layer(x)) or seen[-1])
    places = proof.find_places(output, N)
    u, r = torch.randn_like(output), torch.tensor([1.0, -2.0, 5.0, 11.0])
    weighted = u * r.repeat_interleave(len(u) // N).view(-1, *(1,) * (u.ndim - 1))
    plain, moved = (
        torch.autograd.grad(output, seen, x, retain_graph=True, materialize_grads=True)
        for x in (u, weighted)
    )
    proved = [places.get(h.grad_fn) for h in seen]
    for place, a, b in zip(proved, plain, moved, strict=True):
        if place is not None:
            a, b = (
                x.unflatten(place.axis, (place.before, N, place.after)).movedim(place.axis + 1, 0)
                for x in (a, b)
            )
            torch.testing.assert_close(b, a * r.view(-1, *(1,) * (a.ndim - 1)), equal_nan=True)
    assert bool(seen) and len({place is None for place in proved}) == 1
    return proved[0] is not None


def image(h: Tensor) -> Tensor:
    """``[N, T, D]`` as an image ``[N, T, 3, 2]``."""
    return h.unflatten(-1, (3, 2))


def norm(kind: Callable, *shape: int, train: bool = False) -> Function:
    torch.manual_seed(0)
    return kind(*shape).double().train(train)


def attention(h: Tensor) -> Tensor:
    q = h.unflatten(-1, (2, 3)).transpose(1, 2)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2)


def heads(h: Tensor) -> Tensor:
    """Attention by products of matrices, which merges samples and heads."""
    q = h.unflatten(-1, (2, 3)).transpose(1, 2).reshape(2 * N, T, 3)
    return (torch.baddbmm(random(1, T, T), q, q.mT).softmax(-1) @ q).unflatten(0, (N, 2))


def time_first(h: Tensor) -> Tensor:
    h = torch.tanh(h.transpose(0, 1).reshape(T * N, D)) @ random(D, D)
    return h.view(T, N, D).permute(1, 2, 0)


def recurrence(h: Tensor) -> Tensor:
    state = h.new_zeros(N, D)
    for x in h.unbind(1):
        state = torch.addmm(x, state, random(D, D)).tanh()
    return state


INDEX = torch.tensor([2, 0, 1])
#: Functions of ``[N, T, D]`` that keep samples apart.
PROVED: dict[str, Function] = {
    "elementwise": lambda h: torch.where(h > 0, h.sin() * random(T, 1), h**2 - 1).clamp(max=3),
    "broadcast": lambda h: h - h.mean((1, 2), keepdim=True) + h[:, :1] / (1 + h.square()),
    "copies": lambda h: h.float().clone().double().contiguous(),
    "dropout": lambda h: F.dropout(h, 0.5),
    "linear": lambda h: F.linear(h, random(2, D), random(2)),
    "linear, features first": lambda h: (random(2, D) @ h.mT).mT,
    "vector": lambda h: h @ random(D),
    "vectors": lambda h: torch.addmv(random(N), h.flatten(1), random(T * D)),
    "transposed": lambda h: h.flatten(1).t().sin().t(),
    "three factors": lambda h: h.addcmul(h, h.sin()).addcdiv(h, 2 + h.cos()).lerp(h, h.sin()),
    "masked": lambda h: h.masked_fill(h > 0, 0.0).triu() + F.threshold(h, 0.1, 2.0),
    "complex": lambda h: torch.polar(h, h).abs() + torch.complex(h, h.sin()).conj().angle(),
    "matrices": lambda h: torch.einsum("ntd,td->nt", h, random(T, D)),
    "einsum of data": lambda h: torch.einsum("ntd,nsd->nts", h, h.sin()),
    "bilinear": lambda h: F.bilinear(h, h.cos(), random(2, D, D), random(2)),
    "distances": lambda h: torch.cdist(h, h + 1),
    "attention": attention,
    "heads": heads,
    "time first": time_first,
    "recurrence": recurrence,
    "flattened": lambda h: torch.tanh(h.flatten(0, 1)).unflatten(0, (N, T)).sum(1),
    "flattened output": lambda h: h.sin().flatten(0, 1),
    "squeezed": lambda h: h[:, :, :1].squeeze(2).unsqueeze(1).squeeze(),
    "expanded": lambda h: h.unsqueeze(1).expand(N, 2, T, D).repeat(1, 2, 1, 1),
    "parts": lambda h: torch.cat([x * i for i, x in enumerate(h.split([1, 2], 1))], -2),
    "halves": lambda h: torch.stack([x.sin() for x in h.chunk(2, -1)], 1),
    "stacked in front": lambda h: torch.stack([h, h.sin()]).sum(0),
    "slices": lambda h: h[:, 1:, ::2] + h[:, :1, 1:4],
    "select": lambda h: h[:, -1] + h.select(-1, 0).sum(1, keepdim=True),
    "reduced": lambda h: h.amax(1) + h.logsumexp(1) + h.norm(dim=1) + h.max(1)[0] + h.prod(1),
    "extremes": lambda h: h.amin(1) + h.min(1)[0] + h.median(1)[0] + h.nansum(1) + h.std(1),
    "moments": lambda h: sum(torch.var_mean(h, (1, 2))) + sum(torch.std_mean(h, (1, 2))),
    "along positions": lambda h: h.softmax(1) + h.cumsum(1) + h.log_softmax(-1) + h.cumprod(1),
    "extremes so far": lambda h: h.cummax(1)[0] + h.cummin(1)[0] + h.logcumsumexp(1),
    "largest": lambda h: h.topk(2, 1)[0] + h.topk(2, 1, largest=False)[0],
    "order of positions": lambda h: h.flip(1) + h.roll((1, 2), (1, 2)) + h.sort(1)[0],
    "indexed positions": lambda h: h.index_select(1, INDEX) + h.gather(
        1, INDEX.view(1, T, 1).expand(N, T, D)
    ),
    "added positions": lambda h: h.index_add(1, INDEX, h).scatter_add(
        1, INDEX.view(1, T, 1).expand(N, T, D), h
    ),
    "gated": lambda h: F.glu(h) + F.normalize(h[..., :3], dim=-1),
    "triangle": lambda h: h.tril(),
    "layer norm": norm(nn.LayerNorm, D),
    "RMS norm": norm(nn.RMSNorm, D),
    "group norm": norm(nn.GroupNorm, 3, T),
    "batch norm": norm(nn.BatchNorm1d, T),
    "instance norm": norm(nn.InstanceNorm1d, T),
    "convolution": norm(nn.Conv1d, T, 4, 2),
    "transposed convolution": lambda h: norm(nn.ConvTranspose2d, T, 2, 2)(image(h)),
    "pools": lambda h: F.max_pool2d(image(h), 2) + F.avg_pool2d(image(h), 2),
    "pools of volumes": lambda h: (
        F.max_pool3d(image(h).unsqueeze(2), (1, 2, 2))
        + F.avg_pool3d(image(h).unsqueeze(2), (1, 2, 2))
        + F.adaptive_max_pool3d(image(h).unsqueeze(2), (1, 2, 1))
    ),
    "pools along a line": lambda h: F.max_pool1d(h, 2) + F.adaptive_avg_pool1d(h, 3),
    "pool of all": lambda h: F.adaptive_avg_pool2d(image(h), 1),
    "channels last": lambda h: F.adaptive_avg_pool2d(
        image(h).to(memory_format=torch.channels_last), 1
    ).flatten(1),
    "padded": lambda h: F.pad(image(h), (1, 1)) + F.pad(image(h), (1, 1, 0, 0), "replicate"),
    "mirrored": lambda h: F.pad(h, (2, 1), "reflect") + F.pad(h, (1, 2), "replicate"),
    "interpolated": lambda h: sum(
        F.interpolate(image(h), scale_factor=2, mode=mode)
        for mode in ("bilinear", "bicubic", "nearest", "nearest-exact")
    ),
    "interpolated lines": lambda h: (
        F.interpolate(h, 4, mode="linear") + F.interpolate(h, 4, mode="nearest")
    ),
    "patches": lambda h: F.fold(F.unfold(image(h), 2), (3, 2), 2),
    "pixels": lambda h: F.pixel_shuffle(h.unflatten(1, (1, T)).expand(N, 4, T, D), 2),
    "grid": lambda h: F.grid_sample(image(h), h.reshape(N, 3, 3, 2), align_corners=False),
}  # fmt: skip
UNARY = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor frac lgamma "
    "log log10 log1p log2 neg reciprocal round rsqrt sigmoid sign sin sinc sinh sqrt square tan "
    "tanh trunc nan_to_num logit"
)
ACTIVATIONS = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 "
    "selu silu softplus softshrink softsign tanhshrink"
)
BINARY = (
    "maximum minimum fmax fmin atan2 hypot copysign logaddexp logaddexp2 remainder fmod xlogy rsub"
)
PROVED |= {name: getattr(torch, name) for name in UNARY.split()}
PROVED |= {name: lambda h, name=name: getattr(torch, name)(h, h.cos()) for name in BINARY.split()}
PROVED |= {name: getattr(F, name) for name in ACTIVATIONS.split()}


@pytest.mark.parametrize("name", PROVED)
def test_samples_that_stay_apart(name: str):
    X = random(N, T, D)
    assert check(layer(), lambda layer: PROVED[name](layer(X)))


def sets(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements of sets, to which sample they belong, and a matrix that sums over each."""
    owner = torch.arange(N).repeat_interleave(torch.tensor(sizes))
    return random(len(owner), D), owner, (owner == torch.arange(N)[:, None]).double()


ORDER = torch.tensor([2, 0, 3, 1])


def permutation(order: Tensor) -> Tensor:
    return torch.eye(N, dtype=torch.float64)[order]


def at(order: Tensor, h: Tensor) -> Tensor:
    """Return an order as an index of all entries."""
    return order[:, None].expand(h.shape)


def attention_to_one(h: Tensor, order: Tensor) -> Tensor:
    mask = permutation(order)[None] > 0
    return F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask)[0]


#: What permutes samples ``[N, D]`` by values.
MOVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda h, order: h[order],
    "gather": lambda h, order: h.gather(0, at(order, h)),
    "index select": lambda h, order: h.index_select(0, order),
    "take along an axis": lambda h, order: torch.take_along_dim(h, order[:, None], 0),
    "embedding": lambda h, order: F.embedding(order, h),
    "embedding bag": lambda h, order: F.embedding_bag(order, h, torch.arange(N), mode="sum"),
    "matrix": lambda h, order: permutation(order) @ h,
    "matrix behind": lambda h, order: (h.T @ permutation(order).T).T,
    "einsum": lambda h, order: torch.einsum("ij,jd->id", permutation(order), h),
    "einsum, other order": lambda h, order: torch.einsum("jd,ij->id", h, permutation(order)),
    "batched": lambda h, order: torch.bmm(permutation(order)[None], h[None])[0],
    "sparse": lambda h, order: torch.sparse.mm(permutation(order).to_sparse(), h),
    "mask and sum": lambda h, order: (permutation(order)[..., None] * h).sum(1),
    "mask and sum, in front": lambda h, order: (
        permutation(order).T[..., None] * h[:, None]
    ).sum(0),
    "mask and maximum": lambda h, order: torch.where(
        permutation(order)[..., None] > 0, h, -torch.inf
    ).amax(1),
    "masked fill": lambda h, order: h.expand(N, *h.shape).masked_fill(
        permutation(order)[..., None] == 0, 0
    ).sum(1),
    "where": lambda h, order: torch.where((order == torch.arange(N))[:, None], h, h.flip(0)),
    "index add": lambda h, order: h.new_zeros(N, h.shape[1]).index_add(0, order, h),
    "scatter": lambda h, order: h.new_zeros(N, h.shape[1]).scatter_add(0, at(order, h), h),
    "assigned": lambda h, order: h.new_zeros(N, h.shape[1]).index_put((order,), h),
    "attention": attention_to_one,
}  # fmt: skip
#: What else may permute samples ``[N, D]``, or lets them interact.
MIXED: dict[str, Function] = {
    "sorted": lambda h: h.sort(0)[0],
    "largest": lambda h: h.topk(N, 0)[0],
    "rolled": lambda h: h.roll(1, 0),
    "rolled flat": lambda h: h.roll(D),
    "shifted": lambda h: torch.cat([h[1:], h[:1]]),
    "transposed": lambda h: h.T.reshape(N, D),
    "diagonal": lambda h: torch.diagonal(h[None].expand(N, N, D), dim1=0, dim2=1).T,
    "strided": lambda h: h.as_strided((N, D), (1, N)),
    "mean over samples": lambda h: h - h.mean(0),
    "softmax over samples": lambda h: h.softmax(0),
    "sum over samples": lambda h: h.cumsum(0),
    "batch norm": norm(nn.BatchNorm1d, D, train=True),
    "layer norm": lambda h: F.layer_norm(h, (N, D)),
    "Gram matrix": lambda h: h @ h.T,
    "similarities": lambda h: (h @ h.T).softmax(-1) @ h,
    "weights by data": lambda h: F.linear(random(N, D), h.T @ h),
    "filters by data": lambda h: F.conv1d(random(N, D, 3), h.view(2, D, 2)),
    "two readers": lambda h: h + h[ORDER],
    "samples on two axes": lambda h: h.reshape(2, N // 2 * D).sin().reshape(N, D),
    "halves of samples": lambda h: torch.cat([h[: N // 2].sin(), h[N // 2 :]]),
}
MIXED |= {f"moved by {name}": lambda h, f=f: f(h, ORDER) for name, f in MOVED.items()}


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_may_be_moved(name: str):
    X = random(N, D)
    assert not check(layer(), lambda layer: MIXED[name](layer(X)))


def packed_attention(h: Tensor, owner: Tensor, pool: Tensor) -> Tensor:
    same = owner[:, None] == owner
    h = F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=same[None])[0]
    return (pool[..., None] * h).sum(1)


def bag(h: Tensor, owner: Tensor, pool: Tensor) -> Tensor:
    starts = torch.searchsorted(owner, torch.arange(N))
    return F.embedding_bag(torch.arange(len(h)), h, starts, mode="sum")


#: What sums elements ``[total, D]`` over sets of any sizes.
POOLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda h, owner, pool: pool @ h,
    "transposed product": lambda h, owner, pool: (h.T @ pool.T).T,
    "einsum": lambda h, owner, pool: torch.einsum("nt,td->nd", pool, h),
    "einsum, other order": lambda h, owner, pool: torch.einsum("td,nt->nd", h, pool),
    "sparse product": lambda h, owner, pool: torch.sparse.mm(pool.to_sparse(), h),
    "mask and sum": lambda h, owner, pool: (pool[..., None] * h).sum(1),
    "where": lambda h, owner, pool: torch.where(pool[..., None] > 0, h, 0.0).sum(1),
    "index add": lambda h, owner, pool: h.new_zeros(N, h.shape[1]).index_add(0, owner, h),
    "gather": lambda h, owner, pool: pool @ h.gather(
        0, torch.arange(len(h))[:, None].expand(h.shape)
    ),
    "index": lambda h, owner, pool: torch.stack([h[owner == n].sum(0) for n in range(N)]),
    "parts": lambda h, owner, pool: torch.stack(
        [part.sum(0) for part in h.split(pool.sum(1).long().tolist())]
    ),
    "embedding": lambda h, owner, pool: pool @ F.embedding(torch.arange(len(h)), h),
    "embedding bag": bag,
    "packed attention": packed_attention,
}  # fmt: skip


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [2, 4, 1, 5]], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", POOLED)
def test_elements_of_sets(name: str, sizes: list[int]):
    """Equal sizes look like an axis, but values say so, and others on the next batch."""
    X, owner, pool = sets(sizes)
    assert not check(layer(), lambda layer: POOLED[name](layer(X), owner, pool))


# --- operators, whose first batch looks as if samples were on an axis

SUM = nn.MSELoss(reduction="sum")


def compare(function: Callable, inputs: list[dict[str, Tensor]], all_of_it: bool) -> None:
    """Compare what operators compute on batches of equal shapes with plain autograd."""
    parts = {"layer": nn.Linear(D, 3), "head": nn.Linear(3, 2)}
    model = Using(lambda s, X: s.head(function(torch.tanh(s.layer(X["x"])), X)), **parts)
    data, params = [(X, random(N, 2)) for X in inputs], list(model.parameters())
    rows = rows_in_batches(model, data, SUM)
    arguments, options = (model, SUM, params, data), {"batch_size_fn": lambda X: N}
    A = PerSampleGradients(*arguments, **options)
    if all_of_it:
        check_rows(A, rows)
    assert error(A.dense(), rows) <= 1e-12
    E = EKFACLinearOperator(*arguments, fisher_type="empirical", **options)
    assert error(E.trace(), rows.square().sum()) <= 1e-12
    squares = [
        torch.cat([g.flatten() for g in torch.autograd.grad(z, params, retain_graph=True)]).square()
        for X, _ in data
        for z in model(X).flatten()
    ]
    diagonal = GGNDiagonalLinearOperator(*arguments, **options).diagonal()
    assert error(diagonal, 2 * sum(squares)) <= 1e-12
    # averages over the positions of samples are refused
    options |= {"fisher_type": "empirical", "kfac_approx": "reduce"}
    with pytest.raises(NotImplementedError, match="not known to which samples"):
        KFACLinearOperator(*arguments, **options).trace()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "curvlinops")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", POOLED)
def test_sets_of_other_sizes_on_later_batches(name: str):
    inputs = []
    for sizes in ([3, 3, 3, 3], [2, 4, 1, 5], [3, 3, 4, 2]):
        x, owner, pool = sets(sizes)
        inputs.append({"x": x, "owner": owner, "pool": pool})
    compare(lambda h, X: POOLED[name](h, X["owner"], X["pool"]), inputs, all_of_it=True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", MOVED)
def test_other_permutations_on_later_batches(name: str):
    orders = torch.arange(N), ORDER, torch.tensor([1, 0, 2, 3])
    inputs = [{"x": random(N, D), "order": order} for order in orders]
    try:
        compare(lambda h, X: MOVED[name](h, X["order"]), inputs, all_of_it=False)
    except ValueError as refusal:  # a sample alone is another one
        assert "depends on the other samples" in str(refusal)


class Own(torch.autograd.Function):
    """Named like an operation of PyTorch."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x[ORDER]

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return torch.zeros_like(g).index_put((ORDER,), g)


@pytest.mark.parametrize("name", ["Mul", "Mul0", "MulBackward0", "View"])
def test_functions_of_the_user(name: str):
    function = type(name, (Own,), {})
    X = random(N, D)
    assert not check(layer(), lambda layer: function.apply(layer(X)))


def _splits(length: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (length,)
        return
    for first in range(1, length + 1):
        if length % first == 0:
            yield from ((first, *rest) for rest in _splits(length // first, parts - 1))


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_all_views(first: int, last: int):
    """Samples on a middle axis are found in each shape in which they are on one axis."""
    shape = (first, N, last)
    X = random(*shape).requires_grad_()
    for parts in (1, 2, 3, 4):
        for other in _splits(prod(shape), parts):
            is_proved = check(
                lambda x: 2.0 * x,
                lambda layer, other=other: layer(X.reshape(other)).reshape(shape).movedim(1, 0),
            )
            # the step from one sample to the next is a multiple of an axis' step, in this axis
            steps = [prod(other[i + 1 :]) for i in range(parts)]
            fits = any(
                last % step == 0 and length * step % (N * last) == 0
                for length, step in zip(other, steps, strict=True)
            )
            assert is_proved == fits, other
