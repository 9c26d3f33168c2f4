"""KFAC and EKFAC of models of all kinds, against the dense reference."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from models import EQUAL_LAYERS, Using
from problems import Problem
from recording import linear
from sample_gradients import loop
from tables import core, in_turns
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

L, C2, R = nn.Linear, nn.Conv2d, torch.randn
both = pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])


def build(cls: type, p: Problem, **options: Any) -> KFACLinearOperator:
    return p.build(cls, **({"fisher_type": "empirical"} | options))


# --- models as people write them


def two_towers(m: Using, x: Tensor) -> Tensor:
    """One encoder for twice as many rows."""
    one, two = torch.tanh(m.encoder(torch.cat(x.unbind(1)))).chunk(2)
    return m.head(one, two)


def vision_transformer(m: Using, x: Tensor) -> Tensor:
    """A class token and positions in front of the patches."""
    h = m.patch(x).flatten(2).mT
    h = torch.cat([m.token.expand(len(h), -1, -1), h], 1) + m.positions
    q, k, v = m.qkv(m.norm(h)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return m.head((h + m.out(attended))[:, 0])


def hypernetwork(m: Using, x: Tensor) -> Tensor:
    """A layer makes the weight of another one, for each sample."""
    weight = m.make(x[:, :2]).unflatten(1, (2, 3))
    return m.head(torch.tanh(torch.bmm(weight, m.base(x[:, 2:]).unsqueeze(2)).squeeze(2)))


def dynamic_convolution(m: Using, x: Tensor) -> Tensor:
    """All samples' own filters in one call, as groups."""
    filters = m.make(x.mean((2, 3))).reshape(-1, 2, 2, 2)
    h = F.conv2d(x.flatten(0, 1).unsqueeze(0), filters, groups=len(x))
    return m.head(torch.tanh(h).reshape(len(x), 2, -1).mean(2))


def message_passing(m: Using, x: Tensor) -> Tensor:
    """A graph on four nodes for each sample, all in one list of edges."""
    edges = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
    start, end = (edges.unsqueeze(1) + 4 * torch.arange(len(x))[:, None]).flatten(1)
    h = x.flatten(0, 1)
    messages = torch.tanh(m.message(torch.cat([h[start], h[end]], 1)))
    received = h.new_zeros(len(h), 4).index_add(0, end, messages)
    return m.head(torch.tanh(m.update(torch.cat([h, received], 1))).unflatten(0, (-1, 4)).sum(1))


def ragged(m: Using, x: Tensor) -> Tensor:
    """Some tokens are dropped, the others in one list."""
    kept = x[..., 0] > 0
    sample = torch.arange(len(x))[:, None].expand(x.shape[:2])[kept]
    return m.head(x.new_zeros(len(x), 4).index_add(0, sample, torch.tanh(m.layer(x[kept]))))


def mixer(m: Using, x: Tensor) -> Tensor:
    x = x + torch.tanh(m.tokens(x.mT)).mT
    return m.head((x + torch.tanh(m.channels(x))).mean(1))


def shared_weight() -> nn.Module:
    """Two layers with one weight, and biases of their own."""
    a, b = L(3, 3), L(3, 3)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


def convolution(kind: type, *sizes: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(*sizes, **options), nn.Tanh(), nn.Flatten())


#: Models, and the shape of a sample.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one-output": (lambda: nn.Sequential(L(3, 2), nn.Tanh(), L(2, 1)), (3,)),
    "one-input": (lambda: nn.Sequential(L(1, 2), nn.Tanh(), L(2, 2)), (1,)),
    "shared-weight": (shared_weight, (3,)),
    "prelu": (lambda: nn.Sequential(L(3, 4), nn.PReLU(4), L(4, 2)), (3,)),
    "rms-norm": (lambda: nn.Sequential(L(3, 4), nn.RMSNorm(4)), (2, 3)),
    "log-scale": (
        lambda: Using(lambda m, x: m.layer(x) * m.log.exp(), layer=L(3, 2), log=R(2)), (3,)
    ),
    "unused": (lambda: Using(lambda m, x: (m.b(x), m.a(x))[1], a=L(3, 2), b=L(3, 2)), (3,)),
    "1d-even-same": (convolution(nn.Conv1d, 2, 3, 4, padding="same"), (2, 5)),
    "1d-grouped": (convolution(nn.Conv1d, 4, 2, 2, stride=2, groups=2, bias=False), (4, 5)),
    "2d-grouped": (convolution(C2, 4, 6, (2, 3), groups=2, padding=(1, 0)), (4, 4, 5)),
    "2d-replicate": (convolution(C2, 2, 2, 3, padding=1, padding_mode="replicate"), (2, 4, 4)),
    "3d": (convolution(nn.Conv3d, 2, 2, 2, stride=(1, 2, 1), padding=1), (2, 2, 3, 2)),
    "transposed-1d-grouped": (convolution(nn.ConvTranspose1d, 4, 6, 3, groups=2), (4, 3)),
    "transposed-2d": (
        convolution(nn.ConvTranspose2d, 2, 3, 3, stride=2, padding=1, output_padding=1), (2, 2, 3)
    ),
    # the bias is also added where the filters write nothing
    "transposed-gaps": (convolution(nn.ConvTranspose2d, 2, 2, 1, stride=2), (2, 3, 2)),
    "transposed-cut": (convolution(nn.ConvTranspose2d, 2, 2, 1, padding=1), (2, 3, 3)),
    "two-towers": (lambda: Using(two_towers, encoder=L(3, 4), head=nn.Bilinear(4, 4, 2)), (2, 3)),
    "vision-transformer": (
        lambda: Using(
            vision_transformer, patch=C2(2, 4, 2, 2), token=R(1, 1, 4), positions=R(1, 5, 4),
            norm=nn.LayerNorm(4), qkv=L(4, 12), out=L(4, 4), head=L(4, 3),
        ),
        (2, 4, 4),
    ),
    "hypernetwork": (lambda: Using(hypernetwork, make=L(2, 6), base=L(3, 3), head=L(2, 2)), (5,)),
    "dynamic-convolution": (
        lambda: Using(dynamic_convolution, make=L(2, 16), head=L(2, 2)), (2, 3, 3)
    ),
    "message-passing": (
        lambda: Using(message_passing, message=L(6, 4), update=L(7, 3), head=L(3, 2)), (4, 3)
    ),
    "ragged": (lambda: Using(ragged, layer=L(3, 4), head=L(4, 2)), (4, 3)),
    **EQUAL_LAYERS,
    "mixer": (lambda: Using(mixer, tokens=L(3, 3), channels=L(4, 4), head=L(4, 2)), (3, 4)),
}  # fmt: skip


def make(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Problem:
    """Return a problem with batches of three and two samples."""
    torch.manual_seed(0)
    model = build().double()
    X = [R(n, *shape).double() for n in (3, 2)]
    data = [(x, torch.randn_like(model(x))) for x in X]
    return Problem(model, nn.MSELoss(), dict(model.named_parameters()), data, mc=True)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(
    "name, joint", core(in_turns(MODELS, [False, True]), product(MODELS, [False, True]))
)
def test_models(name: str, joint: bool):
    p = make(*MODELS[name])
    for fisher, reduce in (("type-2", joint), ("empirical", not joint)):
        if name == "ragged" and reduce:  # rows along no axis of samples
            continue
        options = {"fisher_type": fisher, "kfac_approx": "reduce" if reduce else "expand"}
        options |= {"separate_weight_and_bias": not joint, "exact": fisher == "type-2"}
        expected = kfac_reference.kfac(p, fisher, reduce=reduce, joint=joint)
        assert error(matrix(build(KFACLinearOperator, p, **options)), expected) <= 1e-9
    rows = p.build(PerSampleGradientLinearOperator)
    expected = reference.per_sample_gradients(p)
    assert error(rows.dense(), expected) <= 1e-9
    assert error(rows.norms(), expected.norm(dim=1)) <= 1e-9
    assert error(rows.gram(), expected @ expected.T) <= 1e-9
    assert bool(rows.fallbacks) == (name == "ragged")
    corrected = build(EKFACLinearOperator, p, separate_weight_and_bias=not joint)
    exact = expected.square().sum() * reference.normalization(p)
    assert error(corrected.trace(), exact) <= 1e-9


# --- theory


def blocks_of(dense: Tensor, params: list[Tensor], joint: bool = False) -> Tensor:
    """Keep the diagonal blocks, of one or of two parameters each."""
    sizes = [p.numel() for p in params]
    if joint:
        sizes = [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    blocks = [torch.ones(size, size, dtype=dense.dtype) for size in sizes]
    return dense * torch.block_diag(*blocks)


def pooled(*layers: nn.Module, channels: int = 1) -> nn.Module:
    """Return a net whose output is averaged over positions, `[N, *, C]` or `[N, C, *]`."""
    return Using(
        lambda m, x: m.net(x).movedim(channels, -1).flatten(1, -2).mean(1),
        net=nn.Sequential(*layers),
    )


CIRCULAR = {"padding": 1, "padding_mode": "circular"}
DEEP_LINEAR = {
    "expand": (lambda: nn.Sequential(L(3, 2), L(2, 3), L(3, 2)), (4, 3)),
    "reduce": (lambda: pooled(L(3, 2), L(2, 2), channels=-1), (4, 3)),
    "reduce-conv2d": (lambda: pooled(C2(2, 2, 3, **CIRCULAR), C2(2, 3, (1, 2))), (2, 3, 4)),
    "reduce-strided": (lambda: pooled(C2(2, 3, 2, stride=2, dilation=2)), (2, 5, 4)),
    "reduce-transposed": (lambda: pooled(nn.ConvTranspose2d(2, 2, 2, stride=3)), (2, 2, 3)),
}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", DEEP_LINEAR)
def test_exact_for_deep_linear_nets(name: str, reduction: str, joint: bool):
    """Eschenhagen et al. 2023, propositions 1 and 2."""
    p = make(*DEEP_LINEAR[name])
    # of two convolutions, the second sees borders: its own block is exact, only
    params = list(p.params.values())[2 * (name == "reduce-conv2d") :]
    joint = joint and "transposed" not in name  # its bias has other positions
    p = replace(p, params=params, loss=nn.MSELoss(reduction=reduction))
    options = {"kfac_approx": name.partition("-")[0], "separate_weight_and_bias": not joint}
    found = build(KFACLinearOperator, p, fisher_type="type-2", exact=True, **options)
    assert error(matrix(found), blocks_of(reference.ggn(p), params, joint)) <= 1e-10


# --- parts of parameters


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_a_slice_that_is_used_twice_and_transposed(approx: str):
    """Its block is that of a parameter that has the slice alone."""
    w, X = torch.randn(5, 4).double(), torch.randn(7, 4).double()

    def block(w: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        def model(params: dict[str, Tensor], X: Tensor) -> Tensor:
            own = part(params["w"])
            return torch.tanh(X @ own.T) @ own

        options = {"fisher_type": "type-2", "kfac_approx": approx}
        K = KFACLinearOperator(model, nn.MSELoss(), {"w": w}, [(X, X.cos())], **options)
        return K @ torch.eye(K.shape[1]).double()

    found = block(w, lambda w: w[1:4])
    torch.testing.assert_close(found[4:16, 4:16], block(w[1:4].clone(), lambda w: w))
    assert torch.count_nonzero(found[[*range(4), *range(16, 20)]]) == 0


#: Parts ``[I, O]`` of a parameter ``[4, 6]``.
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w[1:3],
    "transposed rows": lambda w: w[:1].T,
    "columns": lambda w: w[:, 1:3],
    "steps": lambda w: w[::2, ::3],
    "other steps": lambda w: w[1::2, 1::3],
    "an entry": lambda w: w[3:, 4:5],
    "first row": lambda w: w.flatten()[:6].view(2, 3),
}


@pytest.mark.parametrize(("first", "second"), list(combinations(PARTS, 2)))
def test_two_parts_of_a_parameter(double: None, first: str, second: str):
    """Two that have no entry in common have the blocks of two parameters."""
    torch.manual_seed(0)
    parts, w, X = (PARTS[first], PARTS[second]), R(4, 6), R(7, 6)
    places = [part(torch.arange(24).view(4, 6)).flatten() for part in parts]

    def kfac(model: Callable, params: dict[str, Tensor]) -> KFACLinearOperator:
        y = torch.zeros_like(model(params, X))
        return KFACLinearOperator(model, nn.MSELoss(), params, [(X, y)], fisher_type="type-2")

    def apply(*parts: Tensor) -> Tensor:
        return torch.cat([torch.tanh(X[:, : len(part)] @ part) for part in parts], 1)

    K = kfac(lambda p, X: apply(*(part(p["w"]) for part in parts)), {"w": w})
    if bool(torch.isin(*places).any()):
        with pytest.raises(NotImplementedError, match="layers use it"):
            K.report()
        return
    apart = {str(i): part(w).clone() for i, part in enumerate(parts)}
    index, expected = torch.cat(places), torch.zeros(24, 24)
    expected[index[:, None], index] = matrix(kfac(lambda p, X: apply(*p.values()), apart))
    assert error(matrix(K), expected) <= 1e-12


# --- derivatives as outputs


def plain_forward_mode(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Value and derivative are positions of the same layers; biases see the value alone."""
    w, b, v, c = params.values()
    z, dz = linear(x, w, b), linear(torch.ones_like(x), w)
    h = torch.tanh(z)
    return torch.cat([linear(h, v, c), linear((1 - h.square()) * dz, v)], 1)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_values_and_derivatives_are_positions(reduce: bool, joint: bool):
    def function(m: Using, x: Tensor) -> Tensor:
        return torch.cat(torch.func.jvp(m.net, (x,), (torch.ones_like(x),)), 1)

    p = make(lambda: Using(function, net=nn.Sequential(L(2, 4), nn.Tanh(), L(4, 2))), (2,))
    p = replace(p, reference_model=plain_forward_mode)
    options = {"fisher_type": "type-2", "kfac_approx": "reduce" if reduce else "expand"}
    options["separate_weight_and_bias"] = not joint
    K = build(KFACLinearOperator, p, **options)
    assert error(matrix(K), kfac_reference.kfac(p, "type-2", reduce=reduce, joint=joint)) <= 1e-9
    E = build(EKFACLinearOperator, p, **options)
    assert error(E.trace(), reference.ggn(p).trace()) <= 1e-9


# --- tables of matrices


def gathered(m: Using, x: Tensor) -> Tensor:
    choice = (x[:, 2] > 0).long() + (x[:, 3] > 0).long()
    return m.head(torch.tanh(torch.einsum("nd,ndo->no", x, m.weight[choice])))


@pytest.mark.extensive
def test_gathered_weights():
    """A tensor of matrices of which each sample takes one is a table of matrices."""
    p = make(lambda: Using(gathered, weight=R(3, 4, 3), head=L(3, 2)), (4,))
    p = replace(p, params={"weight": p.params["weight"]})
    operator = build(KFACLinearOperator, p)
    (block,) = operator.report()
    assert block.factors == ((1, 12, 12), (1, 3))
    choice = (torch.cat([x for x, _ in p.data])[:, 2:] > 0).sum(1)
    frequency = torch.bincount(choice, minlength=3).double() / 5
    assert bool(frequency.all())
    shares = operator.diagonal().reshape(3, 12).sum(1) / operator.trace()
    assert error(shares, frequency) <= 1e-12


def routed(number: Callable[[Tensor], Any], m: Using, x: Tensor) -> Tensor:
    """The experts of samples, whose numbers are tensors or not."""
    choice, h = x[:, 0].long(), x.new_zeros(len(x), 4)
    for e in choice.unique():
        own = (choice == e).nonzero()[:, 0]
        h = h.index_add(0, own, F.linear(x[own], m.weight[number(e)]))
    return m.head(h.tanh())


def sorted_tokens(multiply: Callable, m: Using, x: Tensor) -> Tensor:
    """The experts of tokens, which are sorted by experts."""
    tokens = x.flatten(0, 1)
    choice = (tokens[:, :2] > 0).sum(1)
    order, ends = choice.argsort(stable=True), choice.bincount(minlength=3).cumsum(0)
    rows = multiply(tokens[order], m.weight.mT, ends.int())
    return m.head(rows[order.argsort()].tanh().unflatten(0, x.shape[:2]).mean(1))


def one_kernel(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight, offs=ends)


def looped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    parts = x.tensor_split(ends[:-1].long())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


#: Two descriptions of one function, and its precision: PyTorch has the kernel in float32 only.
EXPERTS = {
    "numbers": (partial(routed, lambda e: e), partial(routed, int), torch.float64, 1e-9),
    "kernel": (
        partial(sorted_tokens, one_kernel), partial(sorted_tokens, looped), torch.float32, 1e-5
    ),
}  # fmt: skip


@pytest.mark.extensive
@both
@pytest.mark.parametrize("sizes", [(3, 3), (5, 1)])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: str, sizes: tuple[int, ...], cls: type):
    """How many samples choose an expert does not matter, nor how the choice is written."""
    special, plain, dtype, tolerance = EXPERTS[name]
    torch.manual_seed(0)
    weight, head = R(3, 4, 8, dtype=dtype), L(4, 3, dtype=dtype)
    x, y = R(6, *(() if name == "numbers" else (5,)), 8, dtype=dtype), torch.randint(3, (6,))
    x.view(6, -1)[:, 0] = torch.arange(6) % 3
    found = []
    for function, split in ((special, sizes), (plain, (6,))):
        model = Using(function, weight=weight, head=head)
        data, params = zip(x.split(split), y.split(split), strict=True), list(model.parameters())
        operator = cls(model, nn.CrossEntropyLoss(), params, list(data), fisher_type="type-2")
        assert {block.structure for block in operator.report()} == {"kronecker"}
        found.append(matrix(operator))
    assert error(*found) <= tolerance


# --- norms and attention in another precision


def rms_norm(inner: torch.dtype, x: Tensor, weight: Tensor) -> Tensor:
    z = x.to(inner)
    return weight * (z * (z.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x)


def language_block(inner: torch.dtype) -> nn.Module:
    """Return a block as in language models, which computes in a dtype of its own in between."""

    def function(m: Using, x: Tensor) -> Tensor:
        q, k, v = m.qkv(rms_norm(inner, x, m.first)).chunk(3, -1)
        x = x + m.out((q @ k.mT / 8**0.5).softmax(-1, dtype=inner).to(x) @ v)
        return x + m.down(F.silu(m.up(rms_norm(inner, x, m.second))))

    layers = {"qkv": L(8, 24), "out": L(8, 8), "up": L(8, 16), "down": L(16, 8)}
    return Using(function, first=torch.ones(8), second=torch.ones(8), **layers)


@pytest.mark.extensive
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "outer, inner, tolerance",
    [(torch.float64, torch.float32, 1e-5), (torch.float32, torch.bfloat16, 0.1)],
    ids=str,
)
def test_norms_and_softmax_in_another_precision(
    outer: torch.dtype, inner: torch.dtype, tolerance: float, seed: int
):
    """Gradients of layers have the rounding errors of what the model computes in between."""
    torch.manual_seed(seed)
    last = Using(lambda m, x: rms_norm(inner, x, m.weight), weight=torch.ones(8))
    layers = nn.Embedding(7, 8), language_block(inner), language_block(inner), last
    model, loss = nn.Sequential(*layers, nn.Flatten(1), L(48, 3)).to(outer), nn.CrossEntropyLoss()
    data = [(torch.randint(7, (n, 6)), torch.randint(3, (n,))) for n in (3, 2)]
    params = list(model.parameters())
    rows = PerSampleGradientLinearOperator(model, loss, params, data)
    assert error(rows.dense(), loop(model, params, data, loss)) <= tolerance
    assert not rows.fallbacks
    K = KFACLinearOperator(model, loss, params, data)  # refuses what it cannot assign to samples
    assert {block.structure for block in K.report()} == {"kronecker", "dense"}


# --- batches of one sample


def with_head(layer: Callable, **parts: Tensor) -> Callable[[], nn.Module]:
    """Return a layer that uses a function of a parameter, and a head whose structure is known."""
    return lambda: Using(lambda m, x: m.head(torch.tanh(layer(m, x))), head=L(3, 2), **parts)


MASK, COORDINATES, CONSTANT = torch.eye(3)[:, :1], R(3, 2), R(3, 3)


def coordinates(m: Using, x: Tensor) -> Tensor:
    hidden = torch.tanh(COORDINATES.to(x) @ m.first)
    return F.conv1d(x, (hidden @ m.second).T.unsqueeze(1)).mean(2)


def distances(m: Using, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[1])
    bias = F.embedding(index[:, None] - index + len(index) - 1, m.table).squeeze(2)
    return ((x @ x.mT + bias).softmax(2) @ x).sum(1)


def one_by_one(m: Using, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(F.linear(one, m.weight, m.bias)).mean(0) for one in x])


#: Models whose layers use functions of parameters, or that call a layer for each sample.
SINGLE = {
    "masked": (
        with_head(
            lambda m, x: F.linear(x, m.weight * MASK.to(x), m.bias), weight=R(3, 4), bias=R(3)
        ), (4,),
    ),
    "masked-convolution": (
        with_head(lambda m, x: F.conv1d(x, m.weight * MASK.T.to(x)).mean(2), weight=R(3, 2, 3)),
        (2, 5),
    ),
    "coordinates": (with_head(coordinates, first=R(2, 4), second=R(4, 3)), (1, 5)),
    "distances": (with_head(distances, table=R(7, 1)), (4, 3)),
    "loop": (with_head(one_by_one, weight=R(3, 4), bias=R(3)), (5, 4)),
    "loop-masked": (
        with_head(
            lambda m, x: F.linear(one_by_one(m, x), m.other * CONSTANT.to(x)), weight=R(3, 4),
            bias=R(3), other=R(3, 3),
        ), (5, 4),
    ),
}  # fmt: skip


@pytest.mark.extensive
@both
@pytest.mark.parametrize("name", SINGLE)
def test_blocks_do_not_depend_on_the_batches(name: str, cls: type):
    """Parameters of which layers use a function have their exact block, also in single samples."""
    p, is_loop = make(*SINGLE[name]), name.startswith("loop")
    expected = kfac_reference.kfac(p, "empirical", corrected=cls is EKFACLinearOperator)
    for approx in ("expand",) if is_loop else ("expand", "reduce"):
        alone, together = (
            build(cls, problems.rebatched(p, size), fallback="dense", kfac_approx=approx)
            for size in (1, 5)
        )
        assert error(matrix(together), matrix(alone)) <= 1e-9
        assert together.report() == alone.report()
        assert is_loop or error(matrix(alone), expected) <= 1e-9
    if is_loop:  # a layer sees one sample in each call
        assert {b.structure for b in alone.report() if "weight" in b.names} == {"kronecker"}
