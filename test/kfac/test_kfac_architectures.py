"""KFAC and EKFAC of architectures whose layers see samples in unusual ways."""

from collections.abc import Callable
from typing import Any

import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from models import Using
from problems import Problem
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive


def experts(m: Using, x: Tensor) -> Tensor:
    """Each token goes to one expert, and is scaled by its gate."""
    h = x.flatten(0, 1)
    scale, choice = m.gate(h).softmax(1).max(1)
    for i, expert in enumerate(m.experts):
        own = (choice == i).nonzero()[:, 0]
        if len(own):
            h = h.index_add(0, own, scale[own, None] * expert(h[own]))
    return m.head(h.unflatten(0, x.shape[:2]).mean(1))


def gathered_experts(m: Using, x: Tensor) -> Tensor:
    """The same with one tensor of all experts' weights, of which each sample takes one."""
    choice = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return m.head(torch.tanh(torch.einsum("nd,ndo->no", x, m.weight[choice])))


def two_towers(m: Using, x: Tensor) -> Tensor:
    """One encoder for twice as many rows."""
    one, two = torch.tanh(m.encoder(torch.cat(x.unbind(1)))).chunk(2)
    return m.head(one, two)


def convnext(m: Using, x: Tensor) -> Tensor:
    x = m.stem(x)
    h = m.scale * m.out(F.gelu(m.wide(m.norm(m.depthwise(x).permute(0, 2, 3, 1)))))
    return m.head((x + h.permute(0, 3, 1, 2)).mean((2, 3)))


def squeeze_excite(m: Using, x: Tensor) -> Tensor:
    x = F.relu6(m.depthwise(F.hardswish(m.norm(m.expand(x)))))
    gate = F.hardsigmoid(m.excite(F.relu(m.squeeze(F.adaptive_avg_pool2d(x, 1)))))
    return m.head((x * gate).mean((2, 3)))


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


def film(m: Using, x: Tensor) -> Tensor:
    scale, shift = m.modulate(x.mean(2)).chunk(2, 1)
    return m.head((m.filter(x) * scale.unsqueeze(2) + shift.unsqueeze(2)).relu().amax(2))


def equilibrium(m: Using, x: Tensor) -> Tensor:
    """One layer, many times."""
    z = torch.zeros_like(x)
    for _ in range(4):
        z = torch.tanh(m.layer(z) + x)
    return m.head(z)


L, C2 = nn.Linear, nn.Conv2d
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "experts": (
        lambda: Using(
            experts, gate=L(3, 3), experts=nn.ModuleList([L(3, 3) for _ in range(3)]), head=L(3, 2)
        ),
        (3, 3),
    ),
    "two-towers": (
        lambda: Using(two_towers, encoder=L(3, 4), head=nn.Bilinear(4, 4, 2)), (2, 3)
    ),
    "convnext": (
        lambda: Using(
            convnext, stem=C2(2, 4, 2, 2), depthwise=C2(4, 4, 7, padding=3, groups=4),
            norm=nn.LayerNorm(4), wide=L(4, 6), out=L(6, 4), scale=torch.rand(4), head=L(4, 3),
        ),
        (2, 6, 6),
    ),
    "squeeze-excite": (
        lambda: Using(
            squeeze_excite, expand=C2(2, 4, 1, bias=False), norm=nn.BatchNorm2d(4).eval(),
            depthwise=C2(4, 4, 3, 2, 1, groups=4, bias=False), squeeze=C2(4, 2, 1),
            excite=C2(2, 4, 1), head=L(4, 2),
        ),
        (2, 5, 5),
    ),
    "vision-transformer": (
        lambda: Using(
            vision_transformer, patch=C2(2, 4, 2, 2), token=torch.randn(1, 1, 4),
            positions=torch.randn(1, 5, 4), norm=nn.LayerNorm(4), qkv=L(4, 12), out=L(4, 4),
            head=L(4, 3),
        ),
        (2, 4, 4),
    ),
    "hypernetwork": (
        lambda: Using(hypernetwork, make=L(2, 6), base=L(3, 3), head=L(2, 2)), (5,)
    ),
    "dynamic-convolution": (
        lambda: Using(dynamic_convolution, make=L(2, 16), head=L(2, 2)), (2, 3, 3)
    ),
    "message-passing": (
        lambda: Using(message_passing, message=L(6, 4), update=L(7, 3), head=L(3, 2)), (4, 3)
    ),
    "ragged": (lambda: Using(ragged, layer=L(3, 4), head=L(4, 2)), (4, 3)),
    "mixer": (lambda: Using(mixer, tokens=L(3, 3), channels=L(4, 4), head=L(4, 2)), (3, 4)),
    "film": (
        lambda: Using(film, filter=nn.Conv1d(2, 3, 1), modulate=L(2, 6), head=L(3, 2)), (2, 4)
    ),
    "equilibrium": (lambda: Using(equilibrium, layer=L(4, 4), head=L(4, 2)), (4,)),
}  # fmt: skip


def make(name: str) -> Problem:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().double()
    X = [torch.randn(n, *shape).double() for n in (4, 3)]
    data = [(x, torch.randint(model(x).shape[1], (len(x),))) for x in X]
    return Problem(model, nn.CrossEntropyLoss(), list(model.parameters()), data, mc=True)


#: Models with rows along no axis of samples: gradients take one pass for each sample, and the
#: reduce setting has nothing to average over.
IRREGULAR = {"experts", "ragged"}


@pytest.mark.parametrize("name", list(MODELS))
def test_architectures(name: str):
    p = make(name)
    arguments = (p.model, p.loss, p.params, p.data)
    for fisher, reduce, joint in [
        ("type-2", False, True),
        ("empirical", name not in IRREGULAR, False),
    ]:
        options = {
            "fisher_type": fisher,
            "kfac_approx": "reduce" if reduce else "expand",
            "separate_weight_and_bias": not joint,
            "check_deterministic": False,
        }
        expected = kfac_reference.kfac(p, fisher, reduce=reduce, joint=joint)
        assert error(matrix(KFACLinearOperator(*arguments, **options)), expected) <= 1e-9
        exact = kfac_reference.kfac(p, fisher, corrected=True).trace()
        corrected = EKFACLinearOperator(*arguments, **options)
        assert error(corrected.trace(), exact) <= 1e-9
    rows, expected = PerSampleGradientLinearOperator(*arguments), reference.per_sample_gradients(p)
    assert error(rows.dense(), expected) <= 1e-9
    assert error(rows.norms(), expected.norm(dim=1)) <= 1e-9
    assert error(rows.gram(), expected @ expected.T) <= 1e-9
    assert bool(rows.fallbacks) == (name in IRREGULAR)


def test_gathered_weights():
    """A tensor of matrices of which each sample takes one is a table of matrices."""
    torch.manual_seed(0)
    weight = torch.randn(3, 4, 3)
    model = Using(gathered_experts, weight=weight, head=nn.Linear(3, 2)).double()
    x, y = torch.randn(8, 4).double(), torch.randint(2, (8,))
    params = {"weight": model.weight}
    operator = KFACLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, y)])
    (block,) = operator.report()
    assert block.factors == ((1, 12, 12), (1, 3))
    choice = (x[:, :2] > 0).sum(1)
    frequency = torch.bincount(choice, minlength=3) / 8
    shares = operator.diagonal().reshape(3, 12).sum(1) / operator.trace()
    assert error(shares, frequency.double()) <= 1e-12


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("sizes", [(3, 3), (5, 1)])
def test_experts_numbered_by_tensors(cls: type, sizes: tuple[int, ...]):
    """How many samples choose an expert does not matter, nor what its number is."""

    def routed(number: Callable[[Tensor], Any]) -> Callable[[Using, Tensor], Tensor]:
        def run(m: Using, x: Tensor) -> Tensor:
            choice, h = x[:, 0].long(), x.new_zeros(len(x), 5)
            for e in choice.unique():
                own = (choice == e).nonzero()[:, 0]
                h = h.index_add(0, own, F.linear(x[own], m.weight[number(e)]))
            return m.head(h.tanh())

        return run

    torch.manual_seed(0)
    parts = {"weight": torch.randn(3, 5, 4).double(), "head": nn.Linear(5, 3).double()}
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    x[:, 0] = torch.tensor([0, 1, 2, 0, 1, 2])
    found = []
    for number, split in [(lambda e: e, sizes), (int, (6,))]:
        data = list(zip(x.split(split), y.split(split), strict=True))
        model = Using(routed(number), **parts)
        arguments = model, nn.CrossEntropyLoss(), list(model.parameters()), data
        operator = cls(*arguments, fisher_type="type-2")
        assert {block.structure for block in operator.report()} == {"kronecker"}
        found.append(matrix(operator))
    assert error(*found) <= 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_key_biases_of_attention_with_a_softmax_in_single_precision(seed: int):
    """Their gradient is zero up to the rounding of the softmax."""

    def attend(m: Using, x: Tensor) -> Tensor:
        q, k, v = m.q(x), m.k(x), m.v(x)
        weights = (q @ k.mT).softmax(-1, dtype=torch.float32).to(x)
        return m.head((weights @ v).mean(1))

    torch.manual_seed(seed)
    layers = {name: nn.Linear(4, 4) for name in "qkv"}
    model = Using(attend, **layers, head=nn.Linear(4, 3)).double()
    data = [(torch.randn(n, 5, 4).double(), torch.randint(3, (n,))) for n in (3, 2)]
    operator = KFACLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    assert {block.structure for block in operator.report()} == {"kronecker"}


class RMSNorm(nn.Module):
    """Computes in a dtype of its own, as those of language models do."""

    def __init__(self, inner: torch.dtype):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(8)), inner

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.inner)
        return self.weight * (z * (z.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x)


class Block(nn.Module):
    def __init__(self, inner: torch.dtype):
        super().__init__()
        self.first, self.second, self.inner = RMSNorm(inner), RMSNorm(inner), inner
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT / 8**0.5).softmax(-1, dtype=self.inner).to(x) @ v)
        return x + self.down(F.silu(self.up(self.second(x))))


@pytest.mark.parametrize(
    "outer, inner, tolerance",
    [(torch.float64, torch.float32, 1e-5), (torch.float32, torch.bfloat16, 0.1)],
    ids=str,
)
def test_norms_and_softmax_in_another_precision(
    outer: torch.dtype, inner: torch.dtype, tolerance: float
):
    """Gradients of layers have the rounding errors of what the model computes in between."""
    loss = nn.CrossEntropyLoss()
    for seed in range(4):
        torch.manual_seed(seed)
        blocks = nn.Embedding(7, 8), Block(inner), Block(inner), RMSNorm(inner)
        model = nn.Sequential(*blocks, nn.Flatten(1), nn.Linear(48, 3)).to(outer)
        data = [(torch.randint(7, (n, 6)), torch.randint(3, (n,))) for n in (3, 2)]
        arguments = model, loss, list(model.parameters()), data
        rows = PerSampleGradientLinearOperator(*arguments)
        expected = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss(model(x), y), arguments[2])])
            for X, Y in data
            for x, y in zip(X.split(1), Y.split(1), strict=True)
        ]
        assert error(rows.dense(), torch.stack(expected)) <= tolerance, seed
        assert not rows.fallbacks, seed
        KFACLinearOperator(*arguments).trace()  # refuses what it cannot assign to samples


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_grouped_products_of_experts(cls: type):
    """One kernel for all experts, which PyTorch has in single precision only."""

    def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs=ends)

    def looped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        parts = x.tensor_split(ends[:-1].long())
        return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])

    def routed(multiply: Callable) -> Callable[[Using, Tensor], Tensor]:
        def run(m: Using, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            choice = (tokens[:, :2] > 0).sum(1)
            order, ends = choice.argsort(stable=True), choice.bincount(minlength=3).cumsum(0)
            rows = multiply(tokens[order], m.weight.mT, ends.int())
            h = rows[order.argsort()].tanh().unflatten(0, x.shape[:2])
            return m.head(h.mean(1))

        return run

    torch.manual_seed(0)
    parts = {"weight": torch.randn(3, 4, 8), "head": nn.Linear(4, 3)}
    data = [(torch.randn(n, 5, 8), torch.randint(3, (n,))) for n in (4, 3)]
    found = []
    for multiply in (grouped, looped):
        model = Using(routed(multiply), **parts)
        arguments = model, nn.CrossEntropyLoss(), list(model.parameters()), data
        operator = cls(*arguments, fisher_type="type-2")
        assert {block.structure for block in operator.report()} == {"kronecker"}
        found.append(matrix(operator))
    assert error(*found) <= 1e-5


# --- batches of one sample


def with_head(layer: Callable, width: int, **parts: Tensor) -> nn.Module:
    """Return a layer that uses a function of a parameter, and a head whose structure is known."""
    return Using(lambda m, x: m.head(torch.tanh(layer(m, x))), head=L(width, 2), **parts)


def masked(m: Using, x: Tensor) -> Tensor:
    return F.linear(x, m.weight * m.constant, m.bias)


def masked_convolution(m: Using, x: Tensor) -> Tensor:
    return F.conv1d(x, m.weight * m.constant).mean(2)


def filter_from_coordinates(m: Using, x: Tensor) -> Tensor:
    hidden = torch.tanh(m.constant @ m.first)
    return F.conv1d(x, (hidden @ m.second).T.unsqueeze(1)).mean(2)


def bias_of_distances(m: Using, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[1])
    bias = F.embedding(index[:, None] - index + len(index) - 1, m.table).squeeze(2)
    return ((x @ x.mT + bias).softmax(2) @ x).sum(1)


def one_by_one(m: Using, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(F.linear(one, m.weight, m.bias)).mean(0) for one in x])


def masked_one_by_one(m: Using, x: Tensor) -> Tensor:
    weight = m.other * m.constant
    return F.linear(one_by_one(m, x), weight)


R = torch.randn
#: Models whose layers use functions of parameters, and the shape of an input.
FUNCTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "masked": (
        lambda: with_head(
            masked, 3, constant=nn.Buffer(torch.tensor([[1.0], [0.0], [1.0]])), weight=R(3, 4),
            bias=R(3),
        ),
        (4,),
    ),
    "masked-convolution": (
        lambda: with_head(
            masked_convolution, 3, constant=nn.Buffer(torch.tensor([1.0, 1.0, 0.0])),
            weight=R(3, 2, 3),
        ),
        (2, 5),
    ),
    "coordinates": (
        lambda: with_head(
            filter_from_coordinates, 3, constant=nn.Buffer(R(3, 2)), first=R(2, 4), second=R(4, 3)
        ),
        (1, 5),
    ),
    "distances": (lambda: with_head(bias_of_distances, 3, table=R(7, 1)), (4, 3)),
}  # fmt: skip
#: Models that call a layer for each sample.
LOOPS = {
    "loop": (lambda: with_head(one_by_one, 3, weight=R(3, 4), bias=R(3)), (5, 4)),
    "loop-masked": (
        lambda: with_head(
            masked_one_by_one, 3, constant=nn.Buffer(R(3, 3)), weight=R(3, 4), bias=R(3),
            other=R(3, 3),
        ),
        (5, 4),
    ),
}  # fmt: skip


def in_batches(name: str, size: int) -> Problem:
    torch.manual_seed(0)
    build, shape = (FUNCTIONS | LOOPS)[name]
    model = build().double()
    data = [(R(5, *shape).double(), R(5, 2).double())]
    p = Problem(model, nn.MSELoss(), dict(model.named_parameters()), data, mc=True)
    return problems.rebatched(p, size)


def build(cls: type, p: Problem, **options: Any) -> KFACLinearOperator:
    options = {"fisher_type": "empirical", "fallback": "dense"} | options
    return cls(p.model, p.loss, p.params, p.data, **options)


def structures(operator: KFACLinearOperator) -> list[tuple]:
    return [(b.names, b.structure, b.factors, b.reason) for b in operator.report()]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_blocks_do_not_depend_on_the_batches(name: str, cls: type):
    """Parameters have their exact block if layers use a function of them."""
    p, corrected = in_batches(name, 1), cls is EKFACLinearOperator
    expected = kfac_reference.kfac(p, "empirical", corrected=corrected)
    for options in ({}, {"kfac_approx": "reduce"}):
        alone, together = build(cls, p, **options), build(cls, in_batches(name, 5), **options)
        assert error(matrix(alone), expected) <= 1e-9
        assert structures(alone) == structures(together)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_loops_over_samples(name: str, cls: type):
    """A layer of a loop sees one sample in each call."""
    alone, together = build(cls, in_batches(name, 1)), build(cls, in_batches(name, 5))
    assert error(matrix(alone), matrix(together)) <= 1e-9
    assert structures(alone) == structures(together)
    kinds = {names[0]: structure for names, structure, *_ in structures(alone)}
    assert kinds["weight"] == "kronecker"
