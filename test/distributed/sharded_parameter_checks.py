"""Checks of test_parallel.py with models whose parameters in ``params`` are sharded, too.

python sharded_parameter_checks.py RANK SIZE FOLDER
"""

import copy
import datetime
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel_checks
import torch
import torch.distributed as dist
from contract import ALL, error, matrix
from models import InnerSteps
from parallel_checks import assert_same_everywhere, fails, group, part, rank, vector
from problems import Problem, make
from sharded_checks import (
    Failing,
    Net,
    Recurrent,
    Sine,
    WithoutRule,
    classifier,
    language_model,
    transformers,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import curvlinops
from curvlinops import ParameterSpace
from curvlinops.integrations.transformers import problem
from curvlinops.layers import rules

CHECKS: dict[int, dict[str, Callable[[], None]]] = {2: {}, 3: {}, 4: {}}


def check(*sizes: int) -> Callable:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        for size in sizes or (2,):
            CHECKS[size][function.__name__] = function
        return function

    return register


# --- models ---------------------------------------------------------------------------------------


class Varied(nn.Module):
    """Uses of parameters: position embeddings, functions, views, several uses, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(3, 5), nn.Embedding(7, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
        self.token = nn.Parameter(torch.randn(1, 1, 5))
        self.parts = nn.Parameter(torch.randn(10, 5) / 2)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(1) * torch.linspace(0.5, 1, 4).double().unsqueeze(1))
        x = torch.cat([self.token.expand(len(x), -1, -1), x + self.positions.weight.mean()], 1)
        x = x + self.positions(torch.arange(5))
        x = self.normed(x).tanh() @ self.parts[:5].T + x @ self.parts[5:]
        x = self.norm(x) @ self.embed.weight
        return self.head(x @ self.embed.weight.T).mean(1)


def whole_in_params(make: Callable[[], nn.Module], **options: Any) -> Problem:
    """A problem with all parameters of a model."""
    p = classifier(make, **options)
    return replace(p, params=dict(p.model.named_parameters()))


def sharded_params(
    p: Problem, data: list | None = None, by_layer: bool = True, **options: Any
) -> Problem:
    """The problem with a copy of the model, of which all is sharded."""
    model = copy.deepcopy(p.model)
    for child in model.modules() if by_layer else ():
        if isinstance(child, nn.Linear | nn.Embedding):
            fully_shard(child, **options)
    fully_shard(model, **options)
    names = {id(x): name for name, x in p.model.named_parameters()}
    found = dict(model.named_parameters())
    params = {names[id(x)]: found[names[id(x)]] for x in p.params.values()}
    assert all(isinstance(x, DTensor) for x in params.values())
    return replace(p, model=model, params=params, data=part(p.data) if data is None else data)


def spread(own: Problem, flat: Tensor) -> dict[str, Tensor]:
    """Vectors of all processes, as DTensors with the parameters' placements."""
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


def whole_matrix(own: Problem, A: Any) -> Tensor:
    """The matrix, from products with the unit vectors."""
    return joined(own, A @ spread(own, torch.eye(A.shape[1]).double()))


def compare_factors(p: Problem, own: Problem | None = None, **options: Any) -> None:
    """Compare factors of a model with sharded parameters with those of one process."""
    own = own or sharded_params(p)
    for case in ("kfac", "ekfac"):
        options["process_group"] = group()
        together = ALL[case].build(own, **options)
        # eigenvectors of equal eigenvalues, as in null spaces, depend on the order of sums
        same = {"data": own.data} if case == "ekfac" else {}
        ours = options if same else options | {"process_group": None}
        alone = ALL[case].build(replace(p, **same), **ours)
        found = whole_matrix(own, together)
        assert error(found, matrix(alone)) <= 1e-10, (case, options)
        assert_same_everywhere(found)
        v = vector(alone)
        product = joined(own, together.inverse(0.1) @ spread(own, v))
        assert error(product, alone.inverse(0.1) @ v) <= 1e-10, (case, options)
        assert error(joined(own, together.diagonal()), alone.diagonal()) <= 1e-10
        damped = together.damped(0.1), alone.damped(0.1)
        for name in ("logdet", "trace", "frobenius_norm"):
            found, expected = (getattr(A, name)() for A in damped)
            assert error(found, expected) <= 1e-10, (case, name, options)
        alone = ALL[case].build(p, **options | {"process_group": None})
        assert error(together.trace(), alone.trace()) <= 1e-10, (case, options)


def compare_rows(p: Problem, own: Problem | None = None, **options: Any) -> None:
    """Compare gradients of samples of this process's data with those of a whole model."""
    own = own or sharded_params(p)
    mine = ALL["gradients"].build(own, **options)
    alone = ALL["gradients"].build(replace(p, data=own.data), **options)
    for name in ("dense", "norms", "gram", "second_moment", "variance"):
        assert error(getattr(mine, name)(), getattr(alone, name)()) <= 1e-10, name
    assert not mine.fallbacks
    P, everywhere = vector(alone, 3), ALL["gradients"].build(p, **options)
    own_P = spread(own, P)
    assert error(mine.scores(own_P), alone.scores(P)) <= 1e-10
    low_rank = mine.low_rank(own_P, 1)
    assert error(mine.scores(low_rank), alone.scores(alone.low_rank(P, 1))) <= 1e-10
    for V in (P, P[:, 0]):
        assert error(mine @ spread(own, V), alone @ V) <= 1e-10
        with mine.linearized():
            for _ in range(2):
                assert error(mine @ spread(own, V), alone @ V) <= 1e-10
    # the rows of all processes
    product = joined(own, mine.T @ [torch.ones(mine.codomain.shapes[""]).double()])
    assert error(product, everywhere.T @ torch.ones(everywhere.shape[0]).double()) <= 1e-10
    folder = Path(sys.argv[3]) / f"scores of {rank()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    for _ in range(2):
        found = torch.from_numpy(mine.scores(own_P, out=path).copy())
        assert error(found, alone.scores(P)) <= 1e-10


def compare(
    p: Problem, own: Problem | None = None, cases: Any = None, rows: bool = True, **options: Any
) -> None:
    """Compare products with those of a whole model in one process."""
    own = own or sharded_params(p)
    for case in cases or ("hessian", "ggn", "fisher", "fisher-samples"):
        together = ALL[case].build(own, process_group=group(), **options)
        alone = ALL[case].build(p)
        V = vector(alone, 3)
        for v in (V, V[:, 0]):
            product, mine = alone @ v, spread(own, v)
            assert error(joined(own, together @ mine), product) <= 1e-10, case
            with together.linearized():
                for _ in range(2):
                    found = together @ list(mine.values())
                    assert error(joined(own, found), product) <= 1e-10, case
        (gradient, loss), (its, its_loss) = (A.gradient_and_loss() for A in (together, alone))
        assert error(joined(own, gradient), ParameterSpace.of(p.params).join(its)) <= 1e-10
        torch.testing.assert_close(loss, its_loss)
    if not rows:
        return
    mine, alone = ALL["jacobian"].build(own), ALL["jacobian"].build(replace(p, data=own.data))
    v, everywhere = vector(alone), ALL["jacobian"].build(p)
    assert error(mine @ spread(own, v), alone @ v) <= 1e-10
    product = joined(own, mine.T @ [torch.ones(mine.codomain.shapes[""]).double()])
    assert error(product, everywhere.T @ torch.ones(everywhere.shape[0]).double()) <= 1e-10


SETTINGS = (
    {"fisher_type": "empirical", "kfac_approx": "expand"},
    {"fisher_type": "empirical", "kfac_approx": "reduce", "separate_weight_and_bias": False},
    {"fisher_type": "mc", "mc_samples": 2},
    {"fisher_type": "type-2"},
)


@check(2, 3)
def factors() -> None:
    p = whole_in_params(Net)
    own = sharded_params(p)
    for options in SETTINGS:
        compare_factors(p, own, **options)
    compare_rows(p, own)
    compare_rows(p, own, terms="term")


class Vectors(nn.Module):
    """A weight of one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.single = nn.Linear(3, 5), nn.Parameter(torch.randn(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh()
        return self.head(x * nn.functional.linear(x, self.single).unsqueeze(-1))


@check(2, 3)
def products() -> None:
    compare(whole_in_params(Net))
    compare(whole_in_params(Vectors), cases=("hessian", "ggn"))
    compare(whole_in_params(Varied))


#: Problems with convolutions, attention, tied weights, checkpoints, and derivatives in the loss.
NAMES = (
    *("cnn", "group-norm", "transformer-tied", "self-attention", "embedding-bag-mean"),
    *("weight-norm", "used-twice", "checkpoint", "pinn", "classes-ce-ignore-mean"),
)


@check()
def problems_of_the_suite() -> None:
    for name in NAMES:
        p = make(name)
        names = {id(x): n for n, x in p.model.named_parameters()}
        given = p.params.values() if isinstance(p.params, dict) else p.params
        p = replace(p, params={names[id(x)]: x for x in given})
        model = copy.deepcopy(p.model)
        fully_shard(model, ignored_params={x for x in model.parameters() if not x.ndim})
        found = dict(model.named_parameters())
        p = replace(p, data=p.data * 2 if len(p.data) == 1 else p.data)
        params = {n: found[n] for n in p.params}
        own = replace(p, model=model, params=params, data=part(p.data))
        compare(p, own, ("hessian", "ggn"), rows=False)


@check(2)
def some_parameters_are_whole() -> None:
    p = whole_in_params(Varied)
    model = copy.deepcopy(p.model)
    fully_shard(model, ignored_params=set(model.head.parameters()))
    names = ("parts", "head.weight", "head.bias", "embed.bias")  # the others are constants
    params = curvlinops.select_parameters(model, *names)
    few = replace(p, params={n: p.params[n] for n in params})
    own = replace(p, model=model, params=params, data=part(p.data))
    compare(few, own, ("hessian", "ggn"))
    compare_factors(few, own, fisher_type="empirical")
    H, M = ALL["hessian"].build(own, process_group=group()), matrix(ALL["hessian"].build(few))
    v = torch.ones(len(M)).double()
    J = ALL["jacobian"].build(own)
    every = J.T @ [torch.ones(J.codomain.shapes[""]).double()]
    local = curvlinops.SubmatrixLinearOperator(J.T, ["head.weight"], range(J.shape[0]))
    found = local @ torch.ones(J.shape[0]).double()
    torch.testing.assert_close(found, every[list(params).index("head.weight")].flatten())
    found = curvlinops.CGInverseLinearOperator(H @ H, damping=0.1, rtol=1e-12) @ spread(own, v)
    expected = torch.linalg.solve(M @ M + 0.1 * torch.eye(len(M)).double(), v)
    assert error(joined(own, found), expected) <= 1e-8
    pairs = curvlinops.eigsh(H, k=3, block_size=2, seed=0)
    V = joined(own, pairs.eigenvectors)
    assert error(M @ V, V * pairs.eigenvalues) <= 1e-8


@check(3)
def solvers() -> None:
    net = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731
    p = whole_in_params(net, sizes=(4, 3, 2))
    own = sharded_params(p, by_layer=False)
    G, H = (ALL[case].build(own, process_group=group()) for case in ("ggn", "hessian"))
    M, N = (matrix(ALL[case].build(p)) for case in ("ggn", "hessian"))
    eye, v = torch.eye(len(M)).double(), vector(ALL["ggn"].build(p))
    mine, expected = spread(own, v), torch.linalg.solve(M + 0.1 * eye, v)
    K = ALL["kfac"].build(own, process_group=group()).inverse(0.1)
    for solver, options in (
        (curvlinops.CGInverseLinearOperator, {}),
        (curvlinops.CGInverseLinearOperator, {"preconditioner": K}),
        (curvlinops.MINRESInverseLinearOperator, {}),
    ):
        found = solver(G, damping=0.1, rtol=1e-12, **options) @ mine
        assert error(joined(own, found), expected) <= 1e-10
    series = curvlinops.NeumannInverseLinearOperator(G.damped(0.5), num_terms=100, scale=0.5)
    assert error(joined(own, series @ mine), torch.linalg.solve(M + 0.5 * eye, v)) <= 1e-8
    for which in ("LM", "SA"):
        pairs = curvlinops.eigsh(H, k=3, which=which, seed=0)
        values, V = pairs.eigenvalues, joined(own, pairs.eigenvectors)
        assert error(N @ V, V * values) <= 1e-8
        assert error(V.T @ V, torch.eye(3).double()) <= 1e-10
        expected = torch.linalg.eigvalsh(N)
        if which == "LM":
            expected = expected[expected.abs().argsort(descending=True)]
        assert error(values, expected[:3].sort().values) <= 1e-8
    found = {
        name: getattr(curvlinops, name)(G, 24, seed=1)
        for name in ("hutchinson_trace", "hutchpp_trace", "xtrace", "xnystrace", "xdiag")
    }
    for name in ("hutchpp_trace", "xtrace", "xnystrace"):
        assert error(found[name], M.trace()) <= 1e-2
    found["xdiag"] = joined(own, found["xdiag"])
    assert error(found["xdiag"], M.diagonal()) <= 0.1
    found["logdet"] = curvlinops.lanczos_logdet(G.damped(0.1), ncv=15, num_repeats=2, seed=1)
    found["grid"], found["density"] = curvlinops.lanczos_approximate_spectrum(H, ncv=8, seed=1)
    for x in found.values():
        assert_same_everywhere(x)
    # random vectors do not depend on the number of processes
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "shard"))
    alone = sharded_params(p, p.data, by_layer=False, mesh=mesh["shard"])
    G = ALL["ggn"].build(alone, process_group=mesh["shard"].get_group())
    trace = curvlinops.hutchinson_trace(G, 24, seed=1)
    assert error(trace, found["hutchinson_trace"]) <= 1e-10


@check(2)
def uses() -> None:
    p = whole_in_params(Varied)
    for by_layer in (True, False):
        own = sharded_params(p, by_layer=by_layer)
        compare_rows(p, own)
        compare_factors(p, own, fisher_type="empirical")
        compare_factors(p, own, fisher_type="type-2")
        # some are constants
        some = ("positions.weight", "head.weight", "parts")
        few = replace(p, params={name: p.params[name] for name in some})
        own = replace(own, params={name: own.params[name] for name in some})
        compare_rows(few, own)
        compare_factors(few, own, fisher_type="type-2")


@check(2)
def files() -> None:
    p = whole_in_params(Net)
    own, folder = sharded_params(p), Path(sys.argv[3]) / "sharded factors"
    alone = ALL["ekfac"].build(p, fisher_type="empirical")
    for options in (
        {"factor_placement": "partition"},
        {"module_partitions": 3},
        {"directory": folder, "module_partitions": 2},
        {"directory": folder, "factor_placement": "partition"},  # what was computed
    ):
        options |= {"process_group": group(), "fisher_type": "empirical"}
        together = ALL["ekfac"].build(own, **options)
        found = whole_matrix(own, together.inverse(0.1))
        assert error(found, matrix(alone.inverse(0.1))) <= 1e-10
        assert error(together.trace(), alone.trace()) <= 1e-10
    alone.load(folder)
    assert error(whole_matrix(own, together), matrix(alone)) <= 1e-10
    together = ALL["kfac"].build(own, process_group=group(), fisher_type="empirical")
    together.update(p.data[rank()])
    alone = ALL["kfac"].build(p, fisher_type="empirical")
    for batch in p.data[: dist.get_world_size()]:
        alone.update(batch)
    assert error(together.trace(), alone.trace()) <= 1e-10


@check(3)
def unequal_data() -> None:
    p = whole_in_params(Net, sizes=(4, 2, 3, 1, 2))
    X, y = p.data[0]
    nothing = [(X[:0], y[:0])]
    own = sharded_params(p, p.data if rank() == 0 else nothing)
    compare(p, own, ("hessian", "ggn", "fisher"), rows=False)
    compare_factors(p, own, fisher_type="empirical")
    others = p.data[rank() :: dist.get_world_size() - 1]
    compare_rows(p, sharded_params(p, p.data[:1] if rank() == 0 else others))
    mine = ALL["gradients"].build(own)
    assert mine.dense().shape == (12 if rank() == 0 else 0, mine.shape[1])


def whole_language_model(kind: str) -> Callable[[], None]:
    def run() -> None:
        if transformers is None:
            return
        model = language_model(kind, adapted=False)
        texts = [{"input_ids": torch.randint(11, (2, 5))} for _ in range(3)]
        p = Problem(*problem(model, texts), mc=True)
        copied = copy.deepcopy(model)
        for block in copied.transformer.h if kind == "GPT2" else copied.model.layers:
            fully_shard(block)
        fully_shard(copied)
        own = Problem(*problem(copied, part(texts)), mc=True)
        compare(p, own, ("hessian", "ggn", "fisher"))
        assert (kind == "GPT2") == (copied.lm_head.weight is copied.get_input_embeddings().weight)
        compare_rows(p, own)
        for options in SETTINGS[:3]:
            compare_factors(p, own, **options)

    return run


@check()
def recorded_calls() -> None:
    """Calls that others take the place of, and checkpoints, which read parameters again."""
    p = whole_in_params(Recurrent)
    model = copy.deepcopy(p.model)
    fully_shard(model.attention)
    ignored = set(model.lstm.parameters())
    fully_shard(model, ignored_params=ignored)
    own = replace(p, model=model, params=dict(model.named_parameters()), data=part(p.data))
    compare_rows(p, own)
    compare_factors(p, own, fisher_type="empirical")
    p = whole_in_params(Net)
    p.model.uses_checkpoint = True
    compare_rows(p)
    compare_factors(p, fisher_type="type-2")


CHECKS[2] |= {f"language-models-{k}": whole_language_model(k) for k in ("GPT2", "Llama")}


# --- processes out of step ------------------------------------------------------------------------


@check()
def different_evaluations() -> None:
    p = whole_in_params(lambda: Net(Sine()), sizes=(4, 2, 3, 1, 2))
    own = sharded_params(p, p.data[:1] if rank() == 0 else p.data[1:])
    compare_factors(p, own, fisher_type="type-2")
    compare_rows(p, own)
    with warnings.catch_warnings():  # on one process
        warnings.filterwarnings("ignore", "Products with the Jacobian are not compared")
        compare(p, own, ("ggn", "fisher"), chunk_size=1)
        G = ALL["ggn"].build(own, process_group=group())
        with fails(RuntimeError, "product of several vectors failed.*chunk_size=1", on=0):
            G @ spread(own, torch.ones(G.shape[0], 3).double())


class FailingData(list):
    """Raises an error in the loader of one process, when asked to."""

    fails = False

    def __iter__(self) -> Iterator:
        for number, batch in enumerate(super().__iter__()):
            if self.fails and rank() == 1 and number == 1:
                raise KeyError("here")
            yield batch


class FailingLoss(nn.CrossEntropyLoss):
    """Raises an error in the loss of one process, when asked to."""

    fails = False

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        if self.fails and rank() == 1:
            raise KeyError("here")
        return super().forward(output, y)


@check()
def errors() -> None:
    """An error in the model, the loss or the data of one process is raised in all."""
    p = whole_in_params(lambda: Net(Failing()), sizes=(4, 2, 3, 1))
    own = sharded_params(p)
    own = replace(own, data=FailingData(own.data), loss=FailingLoss())
    for case in ("kfac", "hessian", "ggn", "gradients", "jacobian"):
        options = {"process_group": group()} if ALL[case].square else {}
        options |= {"fisher_type": "empirical"} if case == "kfac" else {}
        for culprit in (own.model.act, own.data, *([] if case == "jacobian" else [own.loss])):
            together = ALL[case].build(own, **options)
            v = spread(own, torch.ones(together.shape[1]).double())
            culprit.fails = True
            with fails(KeyError, "here", on=1):
                together @ v
            culprit.fails = False
            together @ v


class Ending(nn.Module):
    """Ends one process, when asked to."""

    ends = False

    def forward(self, x: Tensor) -> Tensor:
        if self.ends and rank() == 1:
            os._exit(1)
        return x.tanh()


def ended_process(rank: int, folder: Path) -> None:
    """The other process has an error, and does not wait for ever."""
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{folder / 'rendezvous'}", limit, 2, rank)
    own = sharded_params(whole_in_params(lambda: Net(Ending())))
    H = ALL["hessian"].build(own, process_group=group())
    own.model.act.ends = True
    try:
        H @ spread(own, torch.ones(H.shape[1]).double())
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
    os._exit(0)  # there is nobody to say goodbye to


@check(4)
def replicas_of_shards() -> None:
    """Two groups of two processes have one copy each."""
    p = whole_in_params(Net)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = sharded_params(p, mesh=mesh)
    compare_factors(p, own, fisher_type="empirical")
    compare(p, own, ("hessian",), rows=False)  # each group has rows of its own
    with fails(ValueError, "4 processes.*sharded over 2, with 1 copies.*mesh of two axes"):
        ALL["hessian"].build(sharded_params(p, mesh=mesh["shard"]), process_group=group())


# --- memory ---------------------------------------------------------------------------------------


class FullTensors(TorchDispatchMode):
    """Counts the tensors of a size that operations made and that are still alive."""

    def __init__(self, num_bytes: int):
        super().__init__()
        self.num_bytes, self.alive, self.most = num_bytes, 0, 0
        self._seen: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, DTensor) and x.device.type == "cpu":
                self._see(x.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        is_full = self.num_bytes <= storage.nbytes() < 2 * self.num_bytes
        if is_full and storage not in self._seen:
            self._seen.add(storage)
            self.alive += 1
            weakref.finalize(storage, self._forget)
            if self.alive > self.most:
                time.sleep(0.01)  # another thread frees what was communicated
            self.most = max(self.most, self.alive)

    def _forget(self) -> None:
        self.alive -= 1


class Deep(nn.Module):
    """Layers that use their weights directly, transposed, and as tables of positions."""

    def __init__(self, size: int = 40):
        super().__init__()
        self.first = nn.Linear(3, size)
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(6))
        self.tables = nn.ModuleList(nn.Embedding(size, size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, table in zip(self.layers[:3], self.tables, strict=True):
            x = torch.tanh(layer(x) + table(torch.arange(4)).sum(0))
        for layer in self.layers[3:]:
            x = torch.tanh(x @ layer.weight.T + layer.bias)
        return x


@check(2)
def three_full_parameters_are_in_memory() -> None:
    p = whole_in_params(Deep, sizes=(4, 2, 3, 3))  # gradients of one sample would count
    own, num_bytes = sharded_params(p), 40 * 40 * 8
    options = {"process_group": group(), "max_factor_size": 8, "fallback": "diagonal"}
    # without factors of this size, except for the blocks of the tables
    for case, own_options, num_kept in (("kfac", options, 3), ("gradients", {}, 0)):
        with FullTensors(num_bytes) as full:
            A = ALL[case].build(own, **own_options)
            assert 0 < full.most <= 3
            A.compute_kronecker_factors() if case == "kfac" else A.norms()
        assert full.most <= 3 + num_kept
        assert full.alive == num_kept


@check(2)
def four_full_layers_are_in_memory() -> None:
    """Beside parts of parameters, vectors and products."""
    layers = [x for _ in range(8) for x in (nn.Linear(40, 40, bias=False), nn.Tanh())]
    p = whole_in_params(lambda: nn.Sequential(nn.Linear(3, 40), *layers), sizes=(4, 2, 3))
    own = sharded_params(p)
    for case in ("hessian", "ggn", "fisher"):
        A = ALL[case].build(own, process_group=group())
        v = spread(own, torch.ones(A.shape[1]).double())
        for product in (lambda A=A, v=v: A @ v, A.gradient_and_loss):
            with FullTensors(40 * 40 * 8) as full:
                product()
            assert 0 < full.most <= 4, (case, full.most)


# --- what is refused ------------------------------------------------------------------------------


class WithKron(Net):
    """Has a parameter that is used by a call without a rule."""

    def __init__(self) -> None:
        super().__init__(WithoutRule())


@check()
def refused() -> None:
    p = whole_in_params(Net)
    own = sharded_params(p)
    with fails(TypeError, "GGNDiagonalLinearOperator cannot have sharded.*hutchinson_diag"):
        ALL["ggn-diagonal"].build(own, process_group=group())
    G = ALL["ggn"].build(own, process_group=group())
    flat = torch.ones(G.shape[0]).double()
    for v in (flat, flat.numpy()):
        with fails(TypeError, "sharded.*flat.*Pass a list or dictionary of DTensors"):
            G @ v
    v = spread(own, flat)
    with fails(TypeError, "'head.bias' is a whole tensor, but.*sharded.*randn_like"):
        G @ (v | {"head.bias": torch.ones(3).double()})
    with fails(ValueError, "'head.bias' has the placements.*redistribute"):
        G @ (v | {"head.bias": v["head.bias"].redistribute(placements=[Replicate()])})
    with fails(TypeError, "no process has a whole matrix"):
        G.to_dense()
    with fails(TypeError, "runs on whole vectors"):
        curvlinops.LSMRInverseLinearOperator(G)
    with fails(TypeError, "cannot move sharded parameters"):
        curvlinops.loss_along(G, v, [0.0])
    K = ALL["kfac"].build(own, process_group=group())
    for use in (
        lambda: K.eigvalsh(),
        lambda: curvlinops.DiagonalLinearOperator(K.gradient_and_loss()[0]),
        lambda: curvlinops.DiagonalLinearOperator(flat, K.space),
        lambda: K.space.split(flat),
    ):
        with fails(TypeError, "no process has (all eigenvalues|a whole diagonal|a flat vector)"):
            use()
    J = ALL["jacobian"].build(own)
    with fails(TypeError, "rows of other processes.*gram"):
        J @ J.T
    for A in (J, J.T):
        with fails(TypeError, "belong to single processes.*parameters are sharded"):
            curvlinops.hutchinson_squared_fro(A, 2)
    unequal = {  # from parts, since a tensor that is distributed is that of the first process
        n: DTensor.from_local(
            torch.ones(*x.to_local().shape, 1 + rank()).double(),
            x.device_mesh, x.placements, shape=(*x.shape, 1 + rank()),
            stride=torch.empty(*x.shape, 1 + rank()).stride(),
        )
        for n, x in v.items()
    }  # fmt: skip
    with fails(ValueError, r"different numbers of vectors at once: \[1, 2\]"):
        J @ unequal
    if rank() == 1:
        v["head.bias"].to_local()[0] = torch.nan
    with fails(ValueError, "NaN or infinite values"):
        G @ v
    with fails(ValueError, "sharded over the processes \\[0, 1\\].*process_group"):
        ALL["kfac"].build(own)
    with fails(TypeError, "head.bias'\\] are DTensors"):
        other = {"head.bias": fully_shard(nn.Linear(3, 3).double()).bias}
        ALL["kfac"].build(replace(own, params=own.params | other), process_group=group())

    class Root(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.head.bias * 0).sum().sqrt()

    for options in ({}, {"process_group": group()}):
        with fails(ValueError, "gradient on batch 0 is not finite in parameter 'head.bias'"):
            own = sharded_params(whole_in_params(Root))
            ALL["kfac" if options else "gradients"].build(own, **options)

    with fails(NotImplementedError, "differentiates with respect to a sharded parameter itself"):
        own = whole_in_params(InnerSteps)
        fully_shard(own.model, ignored_params={own.model.size})
        own = replace(own, params=dict(own.model.named_parameters()))
        ALL["gradients"].build(own)

    own = sharded_params(whole_in_params(WithKron))
    with fails(NotImplementedError, "'act.up' is sharded.*a call that no rule knows.*write a rule"):
        ALL["gradients"].build(own).norms()
    with fails(NotImplementedError, "'act.up'.*no Kronecker.*a call that no rule knows"):
        ALL["kfac"].build(own, process_group=group(), fallback="error").trace()
    with fails(NotImplementedError, "'act.up' is sharded.*a call that no rule knows"):
        ALL["kfac"].build(own, process_group=group(), fallback="diagonal").trace()
    others = {name: x for name, x in own.params.items() if name != "act.up"}
    ALL["gradients"].build(replace(own, params=others)).norms()

    def wrong(a: Tensor, b: Tensor) -> dict[str, Any]:
        return {"b": rules.broadcast((), a.shape, 1.0 + rank())}  # right for no process

    rules.handles(torch.kron)(wrong)
    try:
        own = sharded_params(whole_in_params(WithKron))
        with fails(NotImplementedError, "'act.up' is sharded.*does not agree with autograd"):
            ALL["gradients"].build(own).norms()
    finally:
        del rules.RULES[torch.kron]

    def penalized(output: Tensor, y: Tensor) -> Tensor:
        (x,) = (x for x in own.model.parameters() if x.shape == (3,))
        return nn.functional.cross_entropy(output, y, reduction="sum") + len(y) * x.square().sum()

    own = sharded_params(whole_in_params(lambda: nn.Sequential(nn.Linear(3, 3))))
    with fails(NotImplementedError, "'0.weight' is sharded.*uses the parameters itself"):
        ALL["gradients"].build(replace(own, loss=penalized, reduction="sum")).norms()


if __name__ == "__main__":
    parallel_checks.main(CHECKS, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
