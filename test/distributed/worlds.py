"""Worlds: how each process's problem is made of the whole one, and comparisons with that one.

A world is a row of `WORLDS`. A check with `in_worlds` runs in each of them, and gets a `Both`. All
that is compared are whole vectors.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contract import ALL, FACTORED, error, matrix
from models import Using
from problems import Problem
from processes import assert_same_everywhere, classifier, group, part, rank, vector
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import curvlinops
from curvlinops import ParameterSpace
from curvlinops.influence import top_scores

# --- models ---------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A layer with a low-rank adapter (Hu et al., LoRA, ICLR 2022)."""

    def __init__(self, layer: nn.Module, num_inputs: int, num_outputs: int, rank: int = 2):
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, num_inputs).double() / num_inputs**0.5)
        self.up = nn.Parameter(torch.randn(num_outputs, rank).double() / rank**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.down.T) @ self.up.T


class Net(nn.Module):
    """Two adapted layers, whose lengths no number of processes divides, and a head."""

    def __init__(self, act: nn.Module | None = None):
        super().__init__()
        self.first, self.second = LoRA(nn.Linear(3, 5), 3, 5), LoRA(nn.Linear(5, 7), 5, 7)
        self.act, self.head = act or nn.Tanh(), nn.Linear(7, 3)
        self.uses_checkpoint = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        if self.uses_checkpoint:
            return self.head(checkpoint(self.second, x, use_reentrant=False))
        return self.head(self.act(self.second(x)))


def varied() -> nn.Module:
    """Uses of parameters: position embeddings, functions, views, several uses, a class token."""

    def run(m: Using, x: Tensor) -> Tensor:
        x = m.embed(x.unsqueeze(1) * torch.linspace(0.5, 1, 4).double().unsqueeze(1))
        x = torch.cat([m.token.expand(len(x), -1, -1), x + m.positions.weight.mean()], 1)
        x = x + m.positions(torch.arange(5))
        x = m.normed(x).tanh() @ m.parts[:5].T + x @ m.parts[5:]
        x = m.norm(x) @ m.embed.weight
        return m.head(x @ m.embed.weight.T).mean(1)

    modules = {"embed": nn.Linear(3, 5), "positions": nn.Embedding(7, 5), "norm": nn.LayerNorm(5)}
    modules |= {"normed": nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))}
    token, parts = torch.randn(1, 1, 5), torch.randn(10, 5) / 2
    return Using(run, token=token, parts=parts, **modules, head=nn.Linear(5, 3))


def vectors() -> nn.Module:
    """A weight of one axis."""

    def run(m: Using, x: Tensor) -> Tensor:
        x = m.embed(x).tanh()
        return m.head(x * nn.functional.linear(x, m.single).unsqueeze(-1))

    return Using(run, embed=nn.Linear(3, 5), single=torch.randn(5), head=nn.Linear(5, 3))


def recurrent() -> nn.Module:
    """Layers whose calls are replaced by others when they are recorded, behind a sharded one."""

    def run(m: Using, x: Tensor) -> Tensor:
        x, _ = m.lstm(m.embed(x).unsqueeze(1).repeat(1, 2, 1))
        x = x.transpose(0, 1)
        return m.head(m.attention(x, x, x, need_weights=False)[0].mean(0))

    layers = {"embed": nn.Linear(3, 4), "head": nn.Linear(4, 3)}
    lstm, attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2)
    return Using(run, **layers, lstm=lstm, attention=attention)


class WithoutBatching(torch.autograd.Function):
    """The sine; refuses ``vmap``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * WithoutBatching.apply(x + torch.pi / 2)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return WithoutBatching.apply(x) if rank() == 0 else x.sin()


# --- problems -------------------------------------------------------------------------------------


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    ends = (".down", ".up", "head.weight", "head.bias")
    return {name: x for name, x in model.named_parameters() if name.endswith(ends)}


def every(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def small(
    make: Callable[[], nn.Module] = Net,
    sizes: tuple[int, ...] = (4, 2, 3, 1),
    choose: Callable = every,
) -> Problem:
    p = classifier(sizes, make)
    return replace(p, params=choose(p.model))


def sharded(
    p: Problem, data: list | None = None, by_layer: bool = True, whole: Any = (), **options: Any
) -> Problem:
    """The problem with a copy of the model, and a process's part of the data.

    All parameters of the copy are sharded but those that ``whole`` names.
    """
    model = copy.deepcopy(p.model)
    ignored = {x for name, x in model.named_parameters() if name in whole}
    for child in model.modules() if by_layer else ():  # by themselves, as in a transformer
        own = set(child.parameters())
        if isinstance(child, nn.Linear | nn.Embedding) and not own <= ignored:
            fully_shard(child, ignored_params=own & ignored, **options)
    fully_shard(model, ignored_params=ignored, **options)
    found = every(model)
    assert all(isinstance(x, DTensor) == (name not in whole) for name, x in found.items())
    params = {name: found[name] for name in p.params}
    return replace(p, model=model, params=params, data=part(p.data) if data is None else data)


# --- vectors --------------------------------------------------------------------------------------


def spread(own: Problem, flat: Tensor) -> dict[str, Tensor]:
    """Vectors with the parameters' placements: whole tensors, or DTensors."""
    parts = ParameterSpace({n: x.shape for n, x in own.params.items()}).split(flat)
    return {
        n: distribute_tensor(part, own.params[n].device_mesh, own.params[n].placements)
        if isinstance(own.params[n], DTensor)
        else part
        for n, part in parts.items()
    }


def joined(own: Problem, tensors: Any) -> Tensor:
    """The whole vectors of which processes have parts."""
    tensors = tensors if isinstance(tensors, dict) else dict(zip(own.params, tensors, strict=True))
    wholes = {}
    for name, x in own.params.items():
        wholes[name] = found = tensors[name]
        if isinstance(x, DTensor):
            assert found.placements == x.placements
            wholes[name] = found.full_tensor()
    return ParameterSpace({n: x.shape for n, x in own.params.items()}).join(wholes)


def has_parts(own: Problem) -> bool:
    """Whether processes have parts of the vectors."""
    return any(isinstance(x, DTensor) for x in own.params.values())


# --- worlds ---------------------------------------------------------------------------------------


def copied(p: Problem, data: list | None = None) -> Problem:
    return replace(p, data=part(p.data) if data is None else data)


def with_adapters(p: Problem, data: list | None = None, **options: Any) -> Problem:
    return sharded(p, data, whole=p.params, **options)


def few(model: nn.Module) -> dict[str, nn.Parameter]:
    """Two of three parameters; the others are constants."""
    return {name: x for i, (name, x) in enumerate(model.named_parameters()) if i % 3 != 1}


def replicated(make: Callable, p: Problem, data: list | None = None) -> Problem:
    """Two groups of two processes have one copy each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return make(p, data, mesh=mesh)


@dataclass
class World:
    """What a process has.

    Attributes:
        own: Makes a process's problem of the whole one, and perhaps other data.
        choose: The parameters of a model.
        sizes: The numbers of processes.
        factors: Options of Kronecker-factored operators.
    """

    own: Callable[..., Problem]
    choose: Callable[[nn.Module], dict[str, nn.Parameter]] = every
    sizes: tuple[int, ...] = (2,)
    factors: dict[str, Any] = field(default_factory=dict)


WORLDS = {
    "alone": World(copied, sizes=(1,)),
    "one shard": World(sharded, sizes=(1,)),
    "copies": World(copied),
    "parts of factors": World(copied, factors={"factor_placement": "partition"}),
    "shards": World(sharded),
    "shards in one piece": World(partial(sharded, by_layer=False)),
    "some are whole": World(
        partial(sharded, by_layer=False, whole=("head.weight", "head.bias")), few
    ),
    "adapters": World(with_adapters, adapters),
    "replicas": World(partial(replicated, sharded), sizes=(4,)),
    "replicas, adapters": World(partial(replicated, with_adapters), adapters, (4,)),
}
ALONE = ("alone", "one shard")
SHARDED = ("shards", "shards in one piece", "some are whole", "adapters")
REPLICAS = ("replicas", "replicas, adapters")


@dataclass
class Both:
    """The whole problem `p`, a process's `own`, and options of Kronecker-factored operators."""

    p: Problem
    own: Problem
    factors: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0

    def __post_init__(self) -> None:
        if (
            not self.tolerance
        ):  # products of sharded models take other ways than those of whole ones
            self.tolerance = 1e-12 if self.own.model is self.p.model else 1e-10
        if self.p.tolerance > 1e-6:
            self.tolerance = 1e-5

    @property
    def has_parts(self) -> bool:
        return has_parts(self.own)

    def of(self, data: list, own: list | None = None) -> "Both":
        """The same models with other data."""
        own = part(data) if own is None else own
        return Both(replace(self.p, data=data), replace(self.own, data=own), self.factors)

    def build(self, case: str, own: Problem | None = None, **options: Any) -> Any:
        """This process's operator."""
        together = {"process_group": group()} if ALL[case].square else {}
        together |= self.factors if case in FACTORED else {}
        return ALL[case].build(own or self.own, **together | options)

    def both(self, case: str, **options: Any) -> tuple[Any, Any]:
        """This process's operator, and that of a process with all data."""
        return self.build(case, **options), ALL[case].build(self.p, **options)

    def v(self, A: Any, *shape: int) -> dict[str, Tensor]:
        return spread(self.own, vector(A, *shape))

    def joined(self, tensors: Any) -> Tensor:
        return tensors if isinstance(tensors, Tensor) else joined(self.own, tensors)

    def matrix(self, A: Any) -> Tensor:
        """The matrix, from products with the unit vectors."""
        return self.joined(A @ spread(self.own, torch.eye(A.shape[1], dtype=A.torch_dtype)))

    def same(self, found: Any, expected: Tensor, tolerance: float = 0) -> None:
        """Compare whole vectors, of which all processes have the same bits."""
        found = self.joined(found)
        assert error(found, expected) <= (tolerance or self.tolerance), error(found, expected)
        assert_same_everywhere(found)

    def compare(self, cases: Any = ("hessian", "ggn", "fisher"), **options: Any) -> None:
        for case in cases:
            self.compare_products(self.build(case, **options), ALL[case].build(self.p))

    def compare_products(self, together: Any, alone: Any) -> None:
        """Compare fresh and kept products, gradients and losses."""
        tolerance = self.tolerance
        for shape in ((3,), ()):
            product, mine = alone @ vector(alone, *shape), self.v(alone, *shape)
            self.same(together @ mine, product, tolerance)
            with together.linearized():
                for _ in range(2):
                    found = self.joined(together @ list(mine.values()))
                    assert error(found, product) <= tolerance
        if not self.has_parts:
            self.same(matrix(together), matrix(alone), tolerance)
        (gradient, loss), (its, its_loss) = (A.gradient_and_loss() for A in (together, alone))
        assert error(self.joined(gradient), ParameterSpace.of(self.p.params).join(its)) <= tolerance
        torch.testing.assert_close(loss, its_loss)

    def compare_rows(self, **options: Any) -> None:
        """Compare the rows of this process's data with those of a whole model."""
        ours = replace(self.p, data=self.own.data)
        for case in ("jacobian", "gradients"):
            its = options if case == "gradients" else {}
            mine, alone, all_rows = (ALL[case].build(x, **its) for x in (self.own, ours, self.p))
            V = vector(alone, 3)
            for v in (V, V[:, 0]):
                assert error(mine @ spread(self.own, v), alone @ v) <= 1e-10
                with mine.linearized():
                    for _ in range(2):
                        assert error(mine @ spread(self.own, v), alone @ v) <= 1e-10
            whose = all_rows if self.has_parts else alone  # parts of vectors have all rows
            v, u = V[:, 0], torch.ones(whose.shape[0]).double()
            own_u = [torch.ones(mine.codomain.shapes[""]).double()]
            products = [
                (mine.T @ own_u, whose.T @ u),
                ((mine.T @ mine) @ spread(self.own, v), whose.T @ (whose @ v)),
            ]
            if case == "gradients":
                (gradient, loss), (its, its_loss) = (A.gradient_and_loss() for A in (mine, whose))
                assert error(loss, its_loss) <= 1e-10
                products.append((gradient, ParameterSpace.of(self.p.params).join(its)))
            for found, expected in products:
                assert error(self.joined(found), expected) <= 1e-10, case
                if self.has_parts:  # bit by bit, as copies of parts must be
                    assert_same_everywhere(self.joined(found))
        for name in ("dense", "norms", "gram", "second_moment", "variance"):
            assert error(getattr(mine, name)(), getattr(alone, name)()) <= 1e-10, name
        assert not mine.fallbacks
        own_V = spread(self.own, V)
        low_rank = mine.low_rank(own_V, 1)
        assert error(mine.scores(low_rank), alone.scores(alone.low_rank(V, 1))) <= 1e-10
        for own_columns, columns in ((own_V, V), (low_rank, alone.low_rank(V, 1))):
            found, expected = top_scores(mine, own_columns, 1), alone.scores(columns).topk(1, 0)
            assert error(found.values, expected.values) <= 1e-10
            assert torch.equal(found.indices, expected.indices)
        folder = Path(f"scores of {rank()}")
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir()))}"
        for options in ({}, {"out": path}, {"out": path}):  # computed, then found
            assert error(mine.scores(own_V, **options), alone.scores(V)) <= 1e-10

    def compare_factors(self, cases: Any = ("kfac", "ekfac"), **options: Any) -> None:
        """Compare factors with those of one process."""
        for case in cases:
            together, alone = self.both(case, **options)
            tolerance = self.tolerance
            assert error(together.trace(), alone.trace()) <= tolerance, case
            assert {x.names for x in together.report()} == {x.names for x in alone.report()}
            if case == "ekfac":
                # eigenvectors of equal eigenvalues, as in null spaces, depend on the order of sums
                own = copied(self.p, self.own.data)
                alone = ALL[case].build(own, process_group=group(), **options)
            self.same(self.matrix(together), matrix(alone), tolerance)
            v = vector(alone)
            found = self.joined(together.inverse(0.1) @ spread(self.own, v))
            assert error(found, alone.inverse(0.1) @ v) <= max(tolerance, 1e-10), case
            assert error(self.joined(together.diagonal()), alone.diagonal()) <= tolerance, case
            damped = together.damped(0.1), alone.damped(0.1)
            for name in ("logdet", "trace", "frobenius_norm"):
                found, expected = (getattr(A, name)() for A in damped)
                assert error(found, expected) <= tolerance, (case, name)


SETTINGS = {
    "empirical": {"fisher_type": "empirical", "kfac_approx": "expand"},
    "reduce": {
        "fisher_type": "empirical",
        "kfac_approx": "reduce",
        "separate_weight_and_bias": False,
    },
    "mc": {"fisher_type": "mc", "mc_samples": 2},
    "type-2": {"fisher_type": "type-2"},
}


def uses_of(A: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Calls with several communications each."""

    def context() -> None:
        with A.linearized():
            for _ in range(2):
                A @ v

    return {
        "product": lambda: A @ v,
        "product of products": lambda: (A @ A + A) @ v,
        "context": context,
        "gradient": lambda: A.gradient_and_loss(),
        "CG": lambda: curvlinops.CGInverseLinearOperator(A, damping=1.0) @ v,
        "eigsh": lambda: curvlinops.eigsh(A, 2, seed=0),
        "trace": lambda: curvlinops.hutchinson_trace(A, 2, seed=0),
    }


Row = tuple[Any, ...]


def in_world(name: str, make: Callable = Net, batches: tuple[int, ...] = (4, 2, 3, 1)) -> Both:
    world = WORLDS[name]
    p = small(make, batches, world.choose)
    return Both(p, world.own(p), world.factors)


def in_worlds(
    check: Callable,
    *names: str,
    make: Callable[[], nn.Module] = Net,
    batches: tuple[int, ...] = (4, 2, 3, 1),
    sizes: tuple[int, ...] = (),
    each: Iterable | dict[str, Row] = ("",),
) -> Callable:
    """Register a check for each of some worlds, and for each row of a table.

    Args:
        check: Registers a function, as `processes.registry` returns.
        names: The worlds; all by default.
        make: Makes the model.
        batches: The sizes of the batches.
        sizes: More numbers of processes, in worlds of two.
        each: Further arguments by name; or single arguments.
    """
    rows = each if isinstance(each, dict) else {str(x): (x,) if x else () for x in each}

    def register(run: Callable) -> Callable:
        for name in names or WORLDS:
            for row, arguments in rows.items():

                def call(name: str = name, arguments: Row = arguments) -> None:
                    run(in_world(name, make, batches), *arguments)

                numbers = {*WORLDS[name].sizes, *(sizes if 2 in WORLDS[name].sizes else ())}
                check(*numbers, name=" ".join(filter(None, (run.__name__, row, name))))(call)
        return run

    return register
