"""Checks of test_parallel.py with models whose parameters are sharded over the processes."""

import contextlib
import copy
import gc
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import problems
import torch
import torch.distributed as dist
from contract import ALL, CASES, error, matrix
from live_batches import WatchedBatches, check_batches_are_freed, saving_outputs
from models import InnerSteps
from problems import Problem
from processes import (
    LIMIT,
    Failing,
    FailingData,
    FailingLoss,
    assert_same_everywhere,
    check_callbacks,
    classifier,
    fails,
    group,
    part,
    rank,
    registry,
    vector,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import curvlinops
from curvlinops import ParameterSpace
from curvlinops.influence import preconditioned, self_scores, top_scores
from curvlinops.integrations.transformers import problem
from curvlinops.layers import recorded, rules
from curvlinops.support.torch_internals import shape_of_output
from curvlinops.team import shards
from curvlinops.team.messages import begin_gather
from curvlinops.team.shards import Kind, Request, Schedule, Shards

CHECKS, check = registry()
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

#: Whether there are language models to check.
try:
    import transformers
except ImportError:
    transformers = None

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


class Vectors(nn.Module):
    """A weight of one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.single = nn.Linear(3, 5), nn.Parameter(torch.randn(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh()
        return self.head(x * nn.functional.linear(x, self.single).unsqueeze(-1))


class Recurrent(nn.Module):
    """Layers whose calls are replaced by others when they are recorded, behind a sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.lstm, self.attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(x).unsqueeze(1).repeat(1, 2, 1))
        x = x.transpose(0, 1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(0))


class WithoutRule(nn.Module):
    """An operation that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((1, 1), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.linalg.solve_triangular(self.up, x.reshape(1, -1), upper=True).view_as(x)
        return x.tanh()


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


def kinds(make: Callable[[], nn.Module] = Net, *args: Any) -> Iterator[tuple[Problem, Problem]]:
    """Problems, and sharded ones: a frozen base with whole adapters, then all parameters."""
    p = small(make, *args, choose=adapters)
    yield p, sharded(p, whole=p.params)
    p = small(make, *args)
    yield p, sharded(p)


# --- vectors and comparisons ----------------------------------------------------------------------


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


def whole_matrix(own: Problem, A: Any) -> Tensor:
    """The matrix, from products with the unit vectors."""
    return joined(own, A @ spread(own, torch.eye(A.shape[1]).double()))


def flat_diagonal(own: Problem, A: Any) -> Tensor:
    return joined(own, A.diagonal()) if has_parts(own) else A.diagonal()


def compare(
    p: Problem, own: Problem, cases: Any = ("hessian", "ggn", "fisher"), **options: Any
) -> None:
    """Compare products with those of a whole model in one process."""
    for case in cases:
        together, alone = ALL[case].build(own, process_group=group(), **options), ALL[case].build(p)
        V = vector(alone, 3)
        for v in (V, V[:, 0]):
            product, mine = alone @ v, spread(own, v)
            assert error(joined(own, together @ mine), product) <= 1e-10, case
            with together.linearized():
                for _ in range(2):
                    found = together @ list(mine.values())
                    assert error(joined(own, found), product) <= 1e-10, case
        if not has_parts(own):
            found = matrix(together)
            assert error(found, matrix(alone)) <= 1e-10, case
            assert_same_everywhere(found)
        (gradient, loss), (its, its_loss) = (A.gradient_and_loss() for A in (together, alone))
        assert error(joined(own, gradient), ParameterSpace.of(p.params).join(its)) <= 1e-10
        torch.testing.assert_close(loss, its_loss)


def compare_rows(p: Problem, own: Problem, **options: Any) -> None:
    """Compare the rows of this process's data with those of a whole model."""
    ours = replace(p, data=own.data)
    for case in ("jacobian", "gradients"):
        its = options if case == "gradients" else {}
        mine, alone, everywhere = (ALL[case].build(x, **its) for x in (own, ours, p))
        V = vector(alone, 3)
        for v in (V, V[:, 0]):
            assert error(mine @ spread(own, v), alone @ v) <= 1e-10
            with mine.linearized():
                for _ in range(2):
                    assert error(mine @ spread(own, v), alone @ v) <= 1e-10
        # parts of vectors have the rows of all processes
        whose = everywhere if has_parts(own) else alone
        products = {
            "transposed": (
                mine.T @ [torch.ones(mine.codomain.shapes[""]).double()],
                whose.T @ torch.ones(whose.shape[0]).double(),
            ),
            "second moment": (
                (mine.T @ mine) @ spread(own, V[:, 0]),
                whose.T @ (whose @ V[:, 0]),
            ),
        }
        if case == "gradients":
            (gradient, loss), (its_gradient, its_loss) = (
                A.gradient_and_loss() for A in (mine, whose)
            )
            assert error(loss, its_loss) <= 1e-10
            products["gradient"] = gradient, ParameterSpace.of(p.params).join(its_gradient)
        for name, (found, expected) in products.items():
            assert error(joined(own, found), expected) <= 1e-10, (case, name)
            if has_parts(own):  # bit by bit, as copies of parts must be
                assert_same_everywhere(joined(own, found))
    for name in ("dense", "norms", "gram", "second_moment", "variance"):
        assert error(getattr(mine, name)(), getattr(alone, name)()) <= 1e-10, name
    assert not mine.fallbacks
    own_V = spread(own, V)
    low_rank = mine.low_rank(own_V, 1)
    assert error(mine.scores(low_rank), alone.scores(alone.low_rank(V, 1))) <= 1e-10
    folder = Path(f"scores of {rank()}")
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir()))}"
    for options in ({}, {"out": path}, {"out": path}):  # computed, then found
        found = mine.scores(own_V, **options)
        assert error(found, alone.scores(V)) <= 1e-10


def compare_factors(p: Problem, own: Problem, **options: Any) -> None:
    """Compare factors with those of one process."""
    options["process_group"] = group()
    for case in ("kfac", "ekfac"):
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
        assert error(flat_diagonal(own, together), alone.diagonal()) <= 1e-10
        damped = together.damped(0.1), alone.damped(0.1)
        for name in ("logdet", "trace", "frobenius_norm"):
            found, expected = (getattr(A, name)() for A in damped)
            assert error(found, expected) <= 1e-10, (case, name, options)
        alone = ALL[case].build(p, **options | {"process_group": None})
        assert error(together.trace(), alone.trace()) <= 1e-10, (case, options)


SETTINGS = (
    {"fisher_type": "empirical", "kfac_approx": "expand"},
    {"fisher_type": "empirical", "kfac_approx": "reduce", "separate_weight_and_bias": False},
    {"fisher_type": "mc", "mc_samples": 2},
    {"fisher_type": "type-2"},
)

# --- numbers --------------------------------------------------------------------------------------


@check(2, 3)
def products() -> None:
    others = ("kfac", "ekfac", "ggn-diagonal")
    cases = [c for c, kind in CASES.items() if kind.square and c not in others]
    for p, own in kinds():
        compare(p, own, cases)
        if not has_parts(own):
            compare(p, own, ["ggn-diagonal"])
    for make in (Vectors, Varied):
        p = small(make)
        compare(p, sharded(p), ("hessian", "ggn", "fisher-samples"))


@check(1)
def products_of_one_process() -> None:
    p = small()
    compare(p, sharded(p), ("hessian", "ggn"))


@check(2, 3)
def factors_and_rows() -> None:
    for p, own in kinds():
        for options in SETTINGS:
            compare_factors(p, own, **options)
        compare_rows(p, own)
        compare_rows(p, own, terms="term")


@check()
def sums_with_factors() -> None:
    """Blocks of several parameters, whose names have no order that all processes share."""
    p = small(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))))
    own = sharded(p)
    K = ALL["kfac"].build(
        own, process_group=group(), fisher_type="empirical", separate_weight_and_bias=False
    )
    G = ALL["ggn"].build(own, process_group=group())
    v = spread(own, vector(ALL["ggn"].build(p)))
    assert error(joined(own, (G + K) @ v), joined(own, G @ v) + joined(own, K @ v)) <= 1e-12


@check()
def uses() -> None:
    p = small(Varied)
    for by_layer in (True, False):
        own = sharded(p, by_layer=by_layer)
        some = ("positions.weight", "head.weight", "parts")  # the others are constants
        few, own_few = (replace(q, params={n: q.params[n] for n in some}) for q in (p, own))
        compare_rows(p, own)
        compare_rows(few, own_few)
        compare_factors(p, own, fisher_type="empirical")
        for pair in ((p, own), (few, own_few)):
            compare_factors(*pair, fisher_type="type-2")


@check()
def calls_that_are_recorded() -> None:
    """Calls that others take the place of, and checkpoints, which read parameters again."""
    whole = small(Recurrent)
    some = curvlinops.select_parameters(whole.model, "lstm", "attention", "head")
    few = replace(whole, params=some)
    lstm = [name for name in some if name.startswith("lstm")]
    for p, own in (
        (few, sharded(few, whole=some)),
        (whole, sharded(whole, by_layer=False, whole=lstm)),
    ):
        compare(p, own, ("hessian", "ggn", "fisher"))
        compare_rows(p, own)
        compare_factors(p, own, fisher_type="empirical")

    def with_checkpoints() -> nn.Module:
        net = Net()
        net.uses_checkpoint = True
        return net

    for p, own in kinds(with_checkpoints):
        compare(p, own)
        compare_rows(p, own)
        compare_factors(p, own, fisher_type="type-2")


#: Problems with convolutions, attention, tied weights, checkpoints, and derivatives in the loss.
NAMES = (
    *("cnn", "group-norm", "transformer-tied", "self-attention", "embedding-bag-mean"),
    *("weight-norm", "used-twice", "checkpoint", "pinn", "classes-ce-ignore-mean"),
)


@check()
def problems_of_the_suite() -> None:
    for name in NAMES:
        p = problems.make(name)
        names = {id(x): n for n, x in p.model.named_parameters()}
        given = p.params.values() if isinstance(p.params, dict) else p.params
        data = p.data * 2 if len(p.data) == 1 else p.data
        p = replace(p, params={names[id(x)]: x for x in given}, data=data)
        numbers = [n for n, x in p.model.named_parameters() if not x.ndim]
        compare(p, sharded(p, by_layer=False, whole=numbers), ("hessian", "ggn"))


def language_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "GPT2":
        options = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 6}
    else:
        options = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        options |= {"hidden_size": 8, "intermediate_size": 14, "vocab_size": 11}
    config = getattr(transformers, f"{kind}Config")(**options)
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{suffix}")(config).double().eval()
    for block in blocks(model) if kind == "Llama" else ():  # whose own norms compute in float32
        block.input_layernorm = nn.RMSNorm(8, dtype=torch.float64)
        block.post_attention_layernorm = nn.RMSNorm(8, dtype=torch.float64)
        model.model.norm = nn.RMSNorm(8, dtype=torch.float64)
    return model


def blocks(model: nn.Module) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def language_models(kind: str, is_adapted: bool) -> Callable[[], None]:
    def run() -> None:
        if transformers is None:
            return
        model = language_model(kind)
        for block in blocks(model) if is_adapted else ():
            if kind == "GPT2":
                block.attn.c_attn = LoRA(block.attn.c_attn, 8, 24)
            else:
                block.self_attn.v_proj = LoRA(block.self_attn.v_proj, 8, 4)
        for name, x in model.named_parameters():
            x.requires_grad_(not is_adapted or name.endswith((".down", ".up")))
        texts = [{"input_ids": torch.randint(11, (2, 5))} for _ in range(3)]
        copied, p = copy.deepcopy(model), Problem(*problem(model, texts), mc=True)
        ignored = set(adapters(copied).values()) if is_adapted else set()
        for layer in (*blocks(copied), copied):
            fully_shard(layer, ignored_params=ignored & {*layer.parameters()})
        own = Problem(*problem(copied, part(texts)), mc=True)
        assert has_parts(own) != is_adapted
        compare(p, own, ("hessian", "ggn", "fisher-samples"))
        compare_rows(p, own)
        for options in SETTINGS[:3]:
            compare_factors(p, own, **options)
        assert (kind == "GPT2") == (copied.lm_head.weight is copied.get_input_embeddings().weight)

    return run


for _kind, _is_adapted in itertools.product(("GPT2", "Llama"), (True, False)):
    _suffix = "-adapted" if _is_adapted else ""
    check(name=f"language-models-{_kind}{_suffix}")(language_models(_kind, _is_adapted))


def compile_blocks(model: nn.Module) -> None:
    for block in blocks(model):
        block.compile(backend="eager")


def wrap_blocks(model: nn.Module) -> None:
    for number, block in enumerate(blocks(model)):
        blocks(model)[number] = torch.compile(block, backend="eager")


def compile_all(model: nn.Module) -> None:
    model.compile(backend="eager")


def checkpoint_blocks(model: nn.Module) -> None:
    kind = type(blocks(model)[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))


def checkpoint_and_compile_blocks(model: nn.Module) -> None:
    checkpoint_blocks(model)
    wrap_blocks(model)


class OfTokens(nn.Module):
    """A wrapper as users write it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = torch.compile(model, backend="eager")

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        return self.model(**X, use_cache=False).logits[:, :-1].movedim(-1, 1)


@check()
def wrapped_blocks() -> None:
    """Compiled and checkpointed blocks, before and after they are sharded."""
    if transformers is None:
        return
    model = language_model("GPT2")
    texts = [{"input_ids": torch.randint(11, (2, 5))} for _ in range(3)]
    p, ours = (Problem(*problem(model, x), mc=True) for x in (texts, part(texts)))
    rows = ALL["gradients"].build(ours)
    V = vector(rows)
    cases = {"hessian": {}, "ggn": {}, "kfac": {"fisher_type": "empirical"}}
    expected = {case: ALL[case].build(p, **options) @ V for case, options in cases.items()}
    scores = rows.scores(V)
    ways = (compile_blocks, wrap_blocks, compile_all, checkpoint_blocks)
    for number, (wrap, is_first) in enumerate(
        itertools.product((*ways, checkpoint_and_compile_blocks), (True, False))
    ):
        copied = copy.deepcopy(model)
        if is_first:
            wrap(copied)
        for layer in (*blocks(copied), copied):
            fully_shard(layer)
        if not is_first:
            wrap(copied)
        own = Problem(*problem(copied, part(texts)), mc=True)
        if number % 2:
            net = OfTokens(copied)
            data = [(x, x["input_ids"][:, 1:]) for x in part(texts)]
            own = Problem(net, nn.CrossEntropyLoss(), every(net), data, mc=True)
        mine = spread(own, V)
        # each way with one more operator: all of them would take minutes
        for case in dict.fromkeys(("ggn", list(cases)[number % 3])):
            A = ALL[case].build(own, process_group=group(), **cases[case])
            assert error(joined(own, A @ mine), expected[case]) <= 1e-10, (wrap, case)
        if number % 3 == 1:
            assert error(ALL["gradients"].build(own).scores(mine), scores) <= 1e-10, wrap


@check()
def samples_one_by_one() -> None:
    """Operations without a rule, which only whole parameters may have."""
    p = small(lambda: Net(WithoutRule()), choose=adapters)
    own = sharded(p, whole=p.params)
    mine, alone = (ALL["gradients"].build(replace(x, data=own.data)) for x in (own, p))
    assert error(mine.dense(), alone.dense()) <= 1e-10
    assert list(mine.fallbacks) == ["act.up"]
    compare(p, own, ("fisher", "ggn-diagonal"))


@check(1, 2)
def queries_are_gathered_once_for_each_batch() -> None:
    p = small()
    own = sharded(p)
    rows, V = ALL["gradients"].build(own), vector(ALL["gradients"].build(p), 3)
    for queries in (V, V[:, 0]):
        mine = spread(own, queries)
        with mock.patch.object(
            Shards, "vectors", autospec=True, side_effect=Shards.vectors
        ) as gather:
            rows.scores(mine)
        assert gather.call_count == len(own.params) * len(own.data)
    for refused in (self_scores, top_scores, preconditioned):
        with fails(ValueError, "Gather the parameters, or call rows.scores"):
            refused(rows, V, 1)


@check(1, 2)
def some_parameters_are_whole() -> None:
    p = small(Varied)
    own = sharded(p, by_layer=False, whole=("head.weight", "head.bias"))
    names = ("parts", "head.weight", "head.bias", "embed.bias")  # the others are constants
    few, own = (replace(q, params={n: q.params[n] for n in names}) for q in (p, own))
    compare(few, own, ("hessian", "ggn"))
    compare_rows(few, own)
    compare_factors(few, own, fisher_type="empirical")
    H, M = ALL["hessian"].build(own, process_group=group()), matrix(ALL["hessian"].build(few))
    v = torch.ones(len(M)).double()
    J = ALL["jacobian"].build(own)
    products = J.T @ [torch.ones(J.codomain.shapes[""]).double()]
    local = curvlinops.SubmatrixLinearOperator(J.T, ["head.weight"], range(J.shape[0]))
    found = local @ torch.ones(J.shape[0]).double()
    torch.testing.assert_close(found, products[list(own.params).index("head.weight")].flatten())
    found = curvlinops.CGInverseLinearOperator(H @ H, damping=0.1, rtol=1e-12) @ spread(own, v)
    expected = torch.linalg.solve(M @ M + 0.1 * torch.eye(len(M)).double(), v)
    assert error(joined(own, found), expected) <= 1e-8
    pairs = curvlinops.eigsh(H, k=3, seed=0)
    V = joined(own, pairs.eigenvectors)
    assert error(M @ V, V * pairs.eigenvalues) <= 1e-8


@check()
def losses_along_directions() -> None:
    p = small(choose=adapters)
    own = sharded(p, whole=p.params)
    together, alone = ALL["hessian"].build(own, process_group=group()), ALL["hessian"].build(p)
    found, expected = (
        curvlinops.loss_along(H, vector(alone, 2), [0, 0.3]) for H in (together, alone)
    )
    torch.testing.assert_close(found, expected)


@check(4)
def replicas_of_shards() -> None:
    """Two groups of two processes have one copy each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    p = small(choose=adapters)
    own = sharded(p, whole=p.params, mesh=mesh)
    compare(p, own)
    compare_rows(p, own)
    compare_factors(p, own, fisher_type="empirical")
    p = small()
    own = sharded(p, mesh=mesh)
    compare(p, own, ("hessian",))
    compare_rows(p, own)
    compare_rows(p, own, terms="term")
    compare_factors(p, own, fisher_type="empirical")
    low = sharded(p, mesh=mesh, mp_policy=MixedPrecisionPolicy(F32))
    G, alone = ALL["ggn"].build(low, process_group=group()), ALL["ggn"].build(p)
    v = vector(alone)
    assert 1e-10 <= error(joined(low, G @ spread(low, v)), alone @ v) <= 1e-5
    failing = sharded(small(lambda: Net(Failing())), mesh=mesh)
    rows = ALL["gradients"].build(failing)
    failing.model.act.fails = True
    with fails(KeyError, "here", on=1):  # also in the processes with the other copy
        rows.norms()
    H = ALL["hessian"].build(own, process_group=group())
    v = spread(own, torch.ones(H.shape[1]).double())
    try:
        H @ {name: x * (1 + rank() // 2) for name, x in v.items()}  # others in each copy
    except (ValueError, RuntimeError) as raised:
        assert "Ranks multiply different vectors" in str(raised)
    else:
        raise AssertionError("The copies have different vectors.")
    with fails(ValueError, "4 processes.*sharded over 2, with 1 copies.*mesh of two axes"):
        ALL["hessian"].build(sharded(p, mesh=mesh["shard"]), process_group=group())


@check(4)
def replicas_in_a_part_of_all_processes() -> None:
    """Each half of the processes has a mesh of its own, for the same model and data."""
    names = ("half", "replicate", "shard")
    for shape in ((2, 2, 1), (2, 1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)["replicate", "shard"]
        p = small()
        compare_rows(p, sharded(p, p.data[rank() % 2 :: 2], mesh=mesh))


@check(1, 2)
def files_and_updates() -> None:
    for p, own in kinds():
        folder = Path(f"sharded factors {has_parts(own)}")
        alone = ALL["ekfac"].build(p, fisher_type="empirical")
        for options in ({}, {"factor_placement": "partition"}):
            options |= {"process_group": group(), "fisher_type": "empirical"}
            together = ALL["ekfac"].build(own, **options)
            found = whole_matrix(own, together.inverse(0.1))
            assert error(found, matrix(alone.inverse(0.1))) <= 1e-10
            assert error(together.trace(), alone.trace()) <= 1e-10
            for _ in range(2):  # computed, then found
                written = curvlinops.write_factors(together, folder, parts=2)
                assert error(matrix(written), matrix(alone)) <= 1e-10
            together.load(folder)
        alone.load(folder)
        assert error(whole_matrix(own, together), matrix(alone)) <= 1e-10
        together = ALL["kfac"].build(own, process_group=group(), fisher_type="empirical")
        together.update(p.data[rank()])
        alone = ALL["kfac"].build(p, fisher_type="empirical")
        for batch in p.data[: dist.get_world_size()]:
            alone.update(batch)
        assert error(together.trace(), alone.trace()) <= 1e-10


@check(3)
def solvers() -> None:
    net = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731
    p = small(net, (4, 3, 2))
    own = sharded(p, by_layer=False)
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
    for options in ({}, {"preconditioner": K}):
        interval = curvlinops.quadratic_form(G, mine, 0.1, rtol=1e-8, **options)
        assert interval.lower <= v @ expected <= interval.upper
        assert interval.upper - interval.lower <= 1e-7 * interval.upper
        assert_same_everywhere(torch.stack(interval[:2]))
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
    # no process has a whole unit vector, with D of which the trace would be exact
    assert error(curvlinops.hutchinson_trace(G, len(M), seed=1), M.trace()) <= 0.3
    found["logdet"] = curvlinops.lanczos_logdet(G.damped(0.1), ncv=15, num_repeats=2, seed=1)
    found["grid"], found["density"] = curvlinops.lanczos_approximate_spectrum(H, ncv=8, seed=1)
    for x in found.values():
        assert_same_everywhere(x)
    # random vectors do not depend on the number of processes
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "shard"))
    alone = sharded(p, p.data, by_layer=False, mesh=mesh["shard"])
    G = ALL["ggn"].build(alone, process_group=mesh["shard"].get_group())
    trace = curvlinops.hutchinson_trace(G, 24, seed=1)
    assert error(trace, found["hutchinson_trace"]) <= 1e-10


@check()
def callbacks() -> None:
    for _, own in kinds():
        G = ALL["ggn"].build(own, process_group=group()).damped(0.5)
        check_callbacks(G, spread(own, torch.ones(G.shape[1]).double()))
    K = ALL["kfac"].build(own, process_group=group()).inverse(1.0)
    blocks = curvlinops.SubmatrixLinearOperator(K, ["*"], ["*"])
    check_callbacks(blocks, spread(own, torch.ones(K.shape[1]).double()))


# --- mixed precision ------------------------------------------------------------------------------


def cast(dtype: torch.dtype | None, tree: Any) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def as_trained(model: nn.Module, policies: dict[str, MixedPrecisionPolicy]) -> nn.Module:
    """A whole model that casts as FSDP does.

    Args:
        model: The model, which is changed.
        policies: What is cast, by the names of modules, outer ones first.
    """
    dtypes: dict[str, torch.dtype] = {}
    for module_name, policy in policies.items():
        module = model.get_submodule(module_name)
        names = [f"{module_name}.{name}".strip(".") for name, _ in module.named_parameters()]
        dtypes |= dict.fromkeys(names, policy.param_dtype)
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        module.register_forward_pre_hook(
            lambda _, *given, dtype=inputs: cast(dtype, given), with_kwargs=True
        )
        module.register_forward_hook(lambda *args, dtype=policy.output_dtype: cast(dtype, args[-1]))
    for name, dtype in dtypes.items():
        module_name, _, name = name.rpartition(".")
        module = model.get_submodule(module_name)
        nn.utils.parametrize.register_parametrization(module, name, Cast(dtype), unsafe=True)
    return model


class Scale(nn.Module):
    """Inputs and outputs are in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(7))

    def forward(self, xs: list[Tensor], options: dict[str, Tensor]) -> dict[str, Tensor]:
        assert xs[0].dtype == options["x"].dtype
        return {"x": xs[0].tanh() * self.weight + options["x"]}


class Mixed(nn.Module):
    """Layers in high and low precision, one of them in a checkpoint, and one of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 6)
        self.third, self.scale, self.head = nn.Linear(6, 7), Scale(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.second, self.norm(self.first(x).tanh()), use_reentrant=False)
        x = self.third(x.tanh())
        return self.head(self.scale([x], options={"x": x})["x"])


def mixed(
    wide: torch.dtype, narrow: torch.dtype, output: torch.dtype | None, casts: bool
) -> tuple[Problem, Problem]:
    """A whole problem that casts as FSDP does, and a sharded one."""
    p = small(Mixed)
    p.model.to(wide)
    low = MixedPrecisionPolicy(param_dtype=narrow)
    policies = {
        "": replace(low, output_dtype=output),
        "first": low,
        "norm": MixedPrecisionPolicy(param_dtype=wide, output_dtype=narrow),
        "second": low,
        "scale": MixedPrecisionPolicy(param_dtype=wide, cast_forward_inputs=casts),
        "head": low,
    }
    whole, model = as_trained(copy.deepcopy(p.model), policies), copy.deepcopy(p.model)
    for name, policy in reversed(policies.items()):
        fully_shard(model.get_submodule(name), mp_policy=policy)
    p = replace(p, model=whole, params=every(whole), data=[(X.to(wide), y) for X, y in p.data])
    return p, replace(p, model=model, params=every(model), data=part(p.data))


@check(1, 2, 3)
def policies_of_mixed_precision() -> None:
    """What is computed is in the narrow dtype; vectors and sums are in that of the shards."""
    for wide, narrow, output, casts in (
        (F64, F32, None, True),
        (F64, F32, F64, False),
        (F32, BF16, None, False),
        (F32, BF16, F32, True),
    ):
        p, own = mixed(wide, narrow, output, casts)
        # products of whole models take other ways than those of sharded ones
        rounding, few = 4 * torch.finfo(narrow).eps, 50 * torch.finfo(wide).eps
        before = state(own.model)
        for case in ("hessian", "ggn", "fisher", "kfac"):
            options = {"fisher_type": "empirical"} if case == "kfac" else {}
            together = ALL[case].build(own, process_group=group(), **options)
            alone = ALL[case].build(p, **options)
            V = vector(alone, 3)
            for v in (V, V[:, 0]):
                expected = alone @ v
                found = joined(own, together @ spread(own, v))
                assert found.dtype == wide
                assert error(found, expected) <= (few if options else rounding), case
                with together.linearized():
                    for _ in range(2):
                        found = joined(own, together @ spread(own, v))
                        assert error(found, expected) <= rounding, case
            (gradient, loss), (its, its_loss) = (A.gradient_and_loss() for A in (together, alone))
            assert error(joined(own, gradient), ParameterSpace.of(p.params).join(its)) <= few
            torch.testing.assert_close(loss, its_loss)
        mine, rows = ALL["gradients"].build(own), ALL["gradients"].build(replace(p, data=own.data))
        for name in ("dense", "norms", "gram"):
            assert error(getattr(mine, name)(), getattr(rows, name)()) <= few
        assert error(mine.scores(spread(own, V)), rows.scores(V)) <= few
        assert not mine.fallbacks and state(own.model) == before
        X, y = p.data[0]
        found, expected = own.model(X), p.model(X)
        assert torch.equal(found, expected)  # of the model that is trained
        p.loss(found, y).backward()


@check()
def language_model_in_mixed_precision() -> None:
    """As Accelerate prepares it: sharded in low precision, with autocast in forward."""
    if transformers is None:
        return
    model = language_model("Llama").float()
    texts = [{"input_ids": torch.randint(11, (2, 5))} for _ in range(3)]
    low = MixedPrecisionPolicy(BF16, reduce_dtype=F32, output_dtype=BF16)
    policies = {"": low, "model.layers.0": low, "model.layers.1": low}
    whole, copied = as_trained(copy.deepcopy(model), policies), copy.deepcopy(model)
    for name, policy in reversed(policies.items()):
        fully_shard(copied.get_submodule(name), mp_policy=policy)
    for net in (whole, copied):
        net.forward = torch.autocast("cpu", dtype=BF16)(net.forward)
    p, own = (
        Problem(*problem(whole, texts), mc=True),
        Problem(*problem(copied, part(texts)), mc=True),
    )
    for case in ("hessian", "ggn"):
        together, alone = ALL[case].build(own, process_group=group()), ALL[case].build(p)
        v = vector(alone)
        assert error(joined(own, together @ spread(own, v)), alone @ v) <= 4e-2
        (gradient, loss), (its, its_loss) = (A.gradient_and_loss() for A in (together, alone))
        assert error(joined(own, gradient), ParameterSpace.of(p.params).join(its)) <= 1e-2
        torch.testing.assert_close(loss, its_loss)


@check()
def what_is_gathered_in_low_precision() -> None:
    layers = [nn.Linear(40, 40, bias=False) for _ in range(8)]
    p = small(lambda: nn.Sequential(nn.Linear(3, 40), *layers), (4, 2, 3))
    gathered: list[int] = []

    def gather(out: Tensor, *args: Any) -> Any:
        gathered.append(out.nbytes)
        return begin_gather(out, *args)

    for case in ("hessian", "ggn"):
        totals = []
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16)):
            own = sharded(p, mp_policy=policy)
            A = ALL[case].build(own, process_group=group())
            v = spread(own, torch.ones(A.shape[1]).double())
            for num_bytes in {8, (policy.param_dtype or F64).itemsize}:
                with FullTensors(40 * 40 * num_bytes) as full:
                    A @ v
                assert 0 < full.most <= 4 and full.alive == 0, (case, policy)
            gathered.clear()
            with mock.patch.object(shards, "begin_gather", gather):
                A.gradient_and_loss()
            totals.append(sum(gathered))
        assert totals[0] == 4 * totals[1] > 0


@check()
def shards_of_two_models() -> None:
    """A second model evaluates the same shards without casts."""
    _, own = mixed(F32, BF16, F32, True)
    with torch.device("meta"):
        model = Mixed()
    for name in ("first", "norm", "second", "scale", "head", ""):
        fully_shard(model.get_submodule(name))
    model.load_state_dict(own.model.state_dict(), assign=True)
    other = replace(own, model=model, params=every(model))
    for x, y in zip(own.params.values(), other.params.values(), strict=True):
        if len(x) % 2 == 0:  # FSDP pads others
            assert x.to_local().data_ptr() == y.to_local().data_ptr()
    p = small(Mixed)
    p.model.float()
    p = replace(p, params=every(p.model), data=[(X.float(), y) for X, y in p.data])
    for case in ("hessian", "ggn"):
        together, alone = ALL[case].build(other, process_group=group()), ALL[case].build(p)
        v = vector(alone)
        found = joined(other, together @ spread(other, v))
        assert error(found, alone @ v) <= 1e-5
        low = ALL[case].build(own, process_group=group())
        assert 1e-4 <= error(joined(own, low @ spread(own, v)), found) <= 0.1


# --- processes out of step ------------------------------------------------------------------------


@check(3)
def unequal_data() -> None:
    p = small(sizes=(4, 2, 3, 1, 2))
    X, y = p.data[0]
    own = sharded(p, p.data if rank() == 0 else [(X[:0], y[:0])])
    compare(p, own)
    compare_factors(p, own, fisher_type="empirical")
    mine = ALL["gradients"].build(own)
    assert mine.dense().shape == (12 if rank() == 0 else 0, mine.shape[1])
    others = p.data[rank() :: dist.get_world_size() - 1]
    compare_rows(p, sharded(p, p.data[:1] if rank() == 0 else others))


@check()
def different_evaluations() -> None:
    """Other numbers of batches, columns at once, and kept graphs."""

    def net() -> Net:
        return Net(Sine())

    for p in (small(net, (4, 2, 3, 1, 2), adapters), small(net, (4, 2, 3, 1, 2))):
        whole = p.params if len(p.params) < len(every(p.model)) else ()
        own = sharded(p, p.data[:1] if rank() == 0 else p.data[1:], whole=whole)
        cache, chunk_size = ("auto", "none")[rank()], 2 if whole else 1
        with warnings.catch_warnings():  # on one process
            warnings.filterwarnings("ignore", ".*(not|cannot be) compared")
            compare(p, own, ("hessian", "ggn", "fisher"), cache=cache, chunk_size=chunk_size)
            compare_rows(p, own)
            compare_factors(p, own, fisher_type="type-2", cache=cache)
            if whole:
                continue
            G = ALL["ggn"].build(own, process_group=group())
            with fails(RuntimeError, "product of several vectors failed.*chunk_size=1", on=0):
                G @ spread(own, torch.ones(G.shape[0], 3).double())


@check()
def errors() -> None:
    """An error in the model, the loss or the data of one process is raised in all."""
    for _, own in kinds(lambda: Net(Failing())):
        own = replace(own, data=FailingData(own.data), loss=FailingLoss())
        culprits = own.model.act, own.data, own.loss
        for case in ("kfac", "hessian", "ggn", "fisher", "gradients", "jacobian"):
            options = {"process_group": group()} if ALL[case].square else {}
            options |= {"fisher_type": "empirical"} if case == "kfac" else {}
            for culprit in culprits[:2] if case == "jacobian" else culprits:
                together = ALL[case].build(own, **options)
                v = spread(own, torch.ones(together.shape[1]).double())
                uses = [lambda A=together, v=v: A @ v]
                if culprit is own.model.act:
                    uses.append(lambda c=case, own=own, o=options: ALL[c].build(own, **o))
                    uses += [together.gradient_and_loss] if case != "jacobian" else []
                if not ALL[case].square:
                    u = [torch.ones(together.codomain.shapes[""]).double()]
                    uses.append(lambda A=together, u=u: A.T @ u)
                culprit.fails = True
                for use in uses:
                    with fails(KeyError, "here", on=1):
                        use()
                culprit.fails = False
                together @ v
        data = list(own.data)
        if rank() == 1:
            X, y = data[0]
            data = [(X * torch.nan, y)]
        with fails(ValueError, "loss on batch 0 is nan|output on batch 0 has NaN", on=1):
            ALL["gradients"].build(replace(own, data=data), check_deterministic=False).dense()


@check()
def errors_before_communication() -> None:
    """Wrong arguments, files and memory of one process: the other ones do not wait for it."""
    for _, own in kinds():
        J = ALL["jacobian"].build(own)
        u = [torch.ones(J.codomain.shapes[""]).double()]
        if rank() == 1:
            u[0][0] = torch.nan
        with fails(ValueError, "NaN or infinite", on=1):
            J.T @ u
        with fails(ValueError, "indices from 0 to 100", on=1):
            ALL["gradients"].build(own, subsampling=[0, 100 if rank() == 1 else 1])
        with fails(ValueError, "one-shot iterator", on=1):
            ALL["jacobian"].build(replace(own, data=iter(own.data) if rank() == 1 else own.data))

        rows = ALL["gradients"].build(own)
        v = spread(own, torch.ones(rows.shape[1]).double())
        path = Path(f"other scores {has_parts(own)} {rank()}")
        if rank() == 1:
            path.write_text("something else")
        with fails(ValueError, "is a file, expected a directory", on=1):
            rows.scores(v, out=path)
        missing = dict(list(v.items())[1:]) if rank() == 1 else v
        for use in (rows.scores, rows.__matmul__):
            with fails(ValueError, "names are not those", on=1):
                use(missing)


@check()
def errors_of_memory() -> None:
    """A process without memory for what it gathers, or adds to a sum."""
    own = sharded(small())
    G = ALL["ggn"].build(own, process_group=group())
    v = spread(own, torch.ones(G.shape[1]).double())
    expected = joined(own, G @ v)
    allocate = Shards._memory
    for kind in (Kind.PARAMETER, Kind.VECTORS, Kind.SUM):

        def fail_once(self: Shards, request: Request, kind: Kind = kind) -> Tensor:
            if rank() == 1 and request.kind == kind:
                Shards._memory = allocate
                raise MemoryError("no memory")
            return allocate(self, request)

        Shards._memory = fail_once
        with fails(MemoryError, "no memory", on=1):
            G @ v
        Shards._memory = allocate
        assert error(joined(own, G @ v), expected) <= 1e-15


# --- schedules ------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Two experts, each of which is evaluated if a sample needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            is_its = (x[:, :1] > 0) == number
            if is_its.any():
                out = out + expert(x).tanh() * is_its
        return self.head(out)


class Checkpointed(Routed):
    """Gathers parameters again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Repeated(nn.Module):
    """A process evaluates it another number of times, on one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.routed = Routed()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(rank() == 1 and len(x) == 3)):
            self.routed(x)
        return self.routed(x)


def routed(*experts: str, sizes: Any = (2,)) -> list:
    """Batches of this process, given which expert each takes: on all processes, or on each."""
    own, generator = experts[rank() % len(experts)], torch.Generator().manual_seed(rank())
    data = []
    for expert, size in zip(own, itertools.cycle(sizes), strict=False):
        X = torch.randn(size, 3, generator=generator).double()
        X[:, 0] = int(expert) - 0.5
        data.append((X, torch.randint(3, (size,), generator=generator)))
    return data


#: Models, data, and options of this process. Schedules are followed from the third batch.
SCHEDULES: dict[str, Callable[[], tuple]] = {
    "the same": lambda: (Routed, routed("00000")),
    "checkpoints": lambda: (Checkpointed, routed("00000")),
    "more batches": lambda: (Routed, routed("000", "00000")),
    "one without data": lambda: (Routed, routed("00000", "00", sizes=(2 if rank() else 0,))),
    "other experts on some batches": lambda: (Routed, routed("00010001100")),
    "other experts on one process": lambda: (Routed, routed("00000000", "00010001")),
    "other experts by process": lambda: (Routed, routed("00000", "11111")),
    "other evaluations": lambda: (Repeated, routed("000000", sizes=(2, 2, 2, 3))),
    "other columns": lambda: (Routed, routed("00000"), {"chunk_size": 1 + rank()}),
    "other graphs are kept": lambda: (Routed, routed("00000"), {"cache": ("auto", "none")[rank()]}),
}


@contextmanager
def changed(**changes: Callable) -> Iterator[None]:
    """Call functions before methods of shards."""

    def both(before: Callable, method: Callable) -> Callable:
        def call(self: Shards, *args: Any) -> Any:
            before(*args)
            return method(self, *args)

        return call

    replacements = {name: both(f, getattr(Shards, name)) for name, f in changes.items()}
    with mock.patch.multiple(Shards, **replacements):
        yield


def in_rounds() -> Any:
    """Let nothing be expected."""
    return mock.patch.object(Schedule, "next", lambda self, request: ())


def results(A: Any, v: dict[str, Tensor]) -> list[Tensor]:
    """The parts of the gradient and of products that a process has, fresh and of kept graphs."""
    found = [A @ v, A.gradient_and_loss()[0], A @ v]
    with A.linearized():
        found += [A @ v for _ in range(3)]
    return [torch.cat([x.to_local().flatten() for x in tree_leaves(x)]) for x in found]


@check()
def schedules() -> None:
    """They have the numbers of rounds, also where processes depart from them, or are late."""
    for name, make in SCHEDULES.items():
        model, data, *options = make()
        own = sharded(small(model), data)
        A = ALL["hessian"].build(own, process_group=group(), **dict(*options))
        v = spread(own, vector(A, 2))
        with in_rounds():
            expected = results(A, v)
        times = itertools.cycle([0.001, *[0] * (3 + rank())])
        with changed(_ask=lambda *_, times=times: time.sleep(next(times))):
            found = results(A, v)
        # sums of processes that are not in step are added in another order
        tolerance = 0 if name in ("the same", "checkpoints", "more batches") else 1e-14
        for x, y in zip(found, expected, strict=True):
            assert error(x, y) <= tolerance, name


@check(2, 3)
def rounds_of_schedules() -> None:
    """One for each batch from the third one, and those in which processes wait for each other."""
    own, num_batches = sharded(small(Routed), routed("0000")), 4
    rounds: list = []
    for case in ("hessian", "ggn"):
        A = ALL[case].build(own, process_group=group())
        v = spread(own, torch.ones(A.shape[1]).double())
        for use in (lambda A=A, v=v: A @ v, A.gradient_and_loss):
            for number in range(3):
                rounds.clear()
                with changed(_round=lambda own, *_: rounds.append(own)):
                    use()
                requests = [x for x in rounds if x.kind != Kind.NOTHING]
                assert (len(requests) == num_batches) == (number > 0), (case, len(requests))
                assert number == 0 or len(rounds) <= num_batches + 2


@check()
def errors_at_every_request() -> None:
    """Of one process, in rounds and while all follow a schedule: the others do not wait for it."""
    own = sharded(small(Checkpointed), routed("00"))
    requests, kind = itertools.count(), KeyError

    def fail_once(*_: Any) -> None:
        if next(requests) == 0 and rank() == 1:
            raise kind("here")

    for case, is_kept in (("ggn", False), ("hessian", True)):
        A = ALL[case].build(own, process_group=group())
        v = spread(own, torch.ones(A.shape[1]).double())
        with A.linearized() if is_kept else contextlib.nullcontext():
            expected = [joined(own, A @ v) for _ in range(2)][-1]
            requests = itertools.count(1)
            with changed(_ask=fail_once):
                A @ v
            for failing in range(next(requests) - 1):
                kind = (KeyError, KeyboardInterrupt)[failing % 2]
                requests = itertools.count(-failing)
                with changed(_ask=fail_once), fails(kind, "here", on=1):
                    A @ v
                # in rounds, after which there is a schedule
                assert error(joined(own, A @ v), expected) <= 1e-14, (case, failing)


class Ending(nn.Module):
    """Ends one process, when asked to."""

    ends = False

    def forward(self, x: Tensor) -> Tensor:
        if self.ends and rank() == 1:
            os._exit(1)
        return x.tanh()


def ended_process(rank: int, folder: str) -> None:
    """The other process has an error, and does not wait for ever."""
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", LIMIT, 2, rank)
    own = sharded(small(lambda: Net(Ending())))
    H = ALL["hessian"].build(own, process_group=group())
    own.model.act.ends = True
    try:
        H @ spread(own, torch.ones(H.shape[1]).double())
    except RuntimeError as error:
        Path(folder, "error").write_text(str(error))
    os._exit(0)  # there is nobody to say goodbye to


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
            has_memory = isinstance(x, Tensor) and not isinstance(x, DTensor)
            if has_memory and x.device.type == "cpu" and not x._is_zerotensor():
                self._see(x.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        # sketches of vectors, which processes compare, have another size
        if storage.nbytes() == self.num_bytes and storage not in self._seen:
            self._seen.add(storage)
            self.alive += 1
            weakref.finalize(storage, self._forget)
            if self.alive > self.most:
                time.sleep(0.01)  # another thread frees what was communicated
            self.most = max(self.most, self.alive)

    def _forget(self) -> None:
        self.alive -= 1

    def left(self) -> int:
        """The number of tensors that are alive, once the other thread has freed its own."""
        for _ in range(500):
            if self.alive:
                time.sleep(0.01)
        return self.alive


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


@check()
def few_parameters_are_in_memory() -> None:
    """Of full size: beside parts of parameters, vectors and products."""

    def deep(is_adapted: bool) -> nn.Module:
        layers = [nn.Linear(40, 40, bias=False) for _ in range(8)]
        layers = [LoRA(layer, 40, 40) if is_adapted else layer for layer in layers]
        return nn.Sequential(nn.Linear(3, 40), *(x for y in layers for x in (y, nn.Tanh())))

    for make, choose, limit in (
        (lambda: deep(False), every, 4),
        (lambda: deep(True), adapters, 2),
    ):
        p = small(make, (4, 2, 3), choose)
        own = sharded(p, whole=p.params if choose is adapters else ())
        for case in ("hessian", "ggn", "fisher"):
            A = ALL[case].build(own, process_group=group())
            v = spread(own, torch.ones(A.shape[1]).double())
            for product in (lambda A=A, v=v: A @ v, A.gradient_and_loss):
                for _ in range(3):  # in the end by a schedule
                    with FullTensors(40 * 40 * 8) as full:
                        product()
                    assert 0 < full.most <= limit, (case, full.most)
                    assert full.left() == 0
    p = small(Deep, (4, 2, 3, 3))  # gradients of one sample would count
    own = sharded(p)
    options = {"process_group": group(), "max_factor_size": 8, "fallback": "diagonal"}
    # without factors of this size: the blocks of the tables lie in one tensor
    for case, own_options in (("kfac", options), ("gradients", {})):
        # equal layers are computed together up to a budget, which one layer exceeds here
        with mock.patch.object(recorded, "_COPIED", 1), FullTensors(40 * 40 * 8) as full:
            A = ALL[case].build(own, **own_options)
            assert 0 < full.most <= 3
            A.compute_kronecker_factors() if case == "kfac" else A.norms()
        assert full.most <= 3, (case, full.most)
        assert full.alive == 0


class Counting(list):
    """Counts passes over the data."""

    passes = 0

    def __iter__(self) -> Iterator:
        self.passes += 1
        return super().__iter__()


@check()
def kept_graphs_have_no_gathered_parameters() -> None:
    num = 300

    def wide() -> nn.Module:
        first, middle = LoRA(nn.Linear(3, num), 3, num), nn.Linear(num, num)
        return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), nn.Linear(num, 3))

    p = small(wide, choose=adapters)
    own = sharded(p, whole=p.params)
    data = Counting(own.data)
    for case in ("hessian", "ggn"):
        # activations of all batches fit, but not the weight of one layer
        A = ALL[case].build(replace(own, data=data), process_group=group(), cache=8 * num**2)
        with A.linearized():
            A @ vector(A)
            data.passes = 0
            A @ vector(A)
            assert data.passes == 0


@check(1, 2)
def batches_are_freed() -> None:
    p = small(saving_outputs)
    own = sharded(p)

    def build(case: str, data: WatchedBatches) -> Any:
        options = {"process_group": group()} if ALL[case].square else {}
        return ALL[case].build(replace(own, data=data), **options)

    check_batches_are_freed(build, own.data, without="LSMR")


# --- what stays -----------------------------------------------------------------------------------


def state(model: nn.Module) -> list:
    found: list = [
        (id(m), m.training, list(map(id, m._forward_hooks.values()))) for m in model.modules()
    ]
    found += [(id(m._parameters), type(m._parameters)) for m in model.modules()]
    return found + [
        (n, id(x), type(x), x.requires_grad, x.grad is None) for n, x in model.named_parameters()
    ]


def train(p: Problem, between: Callable[[], None], steps: int = 3) -> list[Tensor]:
    """Train what is sharded; return losses, and the last values."""
    optimizer = torch.optim.AdamW(p.model.parameters(), 0.1)
    losses = []
    for X, y in p.data[:1] * steps:
        between()
        loss = p.loss(p.model(X), y)
        loss.backward()
        for x in p.params.values():
            dist.all_reduce(x.grad)
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + [x.full_tensor() if isinstance(x, DTensor) else x for x in p.model.parameters()]


@check(1, 2)
def training() -> None:
    p = small(choose=adapters)
    own, other = (sharded(p, whole=p.params) for _ in range(2))
    operators: list = []

    def between() -> None:
        before = state(own.model)
        operators.extend(ALL[case].build(own, process_group=group()) for case in ("ggn", "kfac"))
        for A in operators:
            A @ vector(A)
        ALL["gradients"].build(own).dense()
        assert state(own.model) == before

    for found, expected in zip(train(own, between), train(other, lambda: None), strict=True):
        assert torch.equal(found, expected)
    with torch.no_grad():
        for mine, its in zip(own.model.parameters(), p.model.parameters(), strict=True):
            its.copy_(mine.full_tensor() if isinstance(mine, DTensor) else mine)
    A, expected = operators[0], ALL["ggn"].build(p)
    assert error(A @ vector(A), expected @ vector(A)) <= 1e-10  # of the model as it is now
    with A.linearized():
        A @ vector(A)
        with torch.no_grad():
            own.model.first.layer.weight.mul_(2)
        with fails(RuntimeError, "'first.layer.weight' was overwritten"):
            A @ vector(A)
    own.model(p.data[0][0])  # leaves parameters of the root whole
    p.model.first.layer.weight.data.mul_(2)
    compare(p, own, ["ggn"])


@check()
def parameters_that_are_whole_for_a_while() -> None:
    """FSDP keeps the root's parameters whole from a forward pass to the next backward pass."""
    p = small(choose=adapters)
    own = sharded(p, by_layer=False, whole=p.params)
    X, y = p.data[0]
    model = own.model
    loss = p.loss(model(X), y)
    assert not any(isinstance(x, DTensor) for x in model.parameters())
    compare(p, own, ["hessian"])
    compare_factors(p, own)
    A = ALL["ggn"].build(own, process_group=group())
    loss.backward()
    assert isinstance(model.first.layer.weight, DTensor)
    expected = torch.autograd.grad(p.loss(p.model(X), y), p.model.first.layer.weight)
    torch.testing.assert_close(model.first.layer.weight.grad.full_tensor(), *expected)
    B = ALL["ggn"].build(p)
    expected = B @ vector(B)
    with A.linearized():
        for _ in range(3):
            assert error(A @ vector(A), expected) <= 1e-10
            with torch.no_grad():
                model(X)


@check(1, 2)
def what_linearized_keeps_has_a_size() -> None:
    """Rows are computed layer by layer of the data, which counts."""
    p = small(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (50, 50, 50))
    own, kept = sharded(p), 50 * (3 + 1) * 8
    for num in (0, 2):
        alive: list = []

        class Data:
            def __iter__(self, alive: list = alive) -> Iterator:
                for X, y in own.data:
                    X = X.clone()
                    alive.append(weakref.ref(X))
                    yield X, y

        data = replace(own, data=Data())
        A = ALL["gradients"].build(data, cache=int((num + 0.5) * kept), check_deterministic=False)
        v = spread(own, torch.ones(A.shape[1]).double())
        alive.clear()
        with A.linearized():
            A @ v
            gc.collect()
            assert sum(x() is not None for x in alive) == min(num, len(alive))


# --- what is refused ------------------------------------------------------------------------------


@check()
def models_that_are_refused() -> None:
    p = small(choose=adapters)
    own = sharded(p, whole=p.params)
    with fails(ValueError, "sharded over the processes \\[0, 1\\].*process_group"):
        ALL["hessian"].build(own)
    with fails(TypeError, "layer.weight.*are DTensors.*of a Module"):
        closure = replace(own, model=lambda x: own.model(x), params=list(own.params.values()))
        ALL["hessian"].build(closure, process_group=group())
    with fails(TypeError, "are DTensors"):

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = fully_shard(nn.Linear(3, 3).double())

            def forward(self, output: Tensor, y: Tensor) -> Tensor:
                return nn.functional.cross_entropy(self.layer(output), y)

        ALL["hessian"].build(replace(own, loss=Loss(), reduction="mean"), process_group=group())
    with fails(TypeError, "The model is sharded with MixedPrecisionPolicy.*float16.*bfloat16"):
        half = sharded(p, whole=p.params, mp_policy=MixedPrecisionPolicy(torch.float16))
        ALL["hessian"].build(half, process_group=group())
    even = small(lambda: nn.Sequential(LoRA(nn.Linear(3, 4), 3, 4), LoRA(nn.Linear(4, 3), 4, 3)))
    even = replace(even, params=adapters(even.model))
    with fails(TypeError, "'1.layer.weight' has the placements.*first axis"):
        placed = {"shard_placement_fn": lambda x: Shard(x.shape[1:].count(4))}
        columns = sharded(even, whole=even.params, **placed)
        ALL["hessian"].build(columns, process_group=group())

    with fails(TypeError, r"'head.weight' has the placements \[Replicate\(\)\].*Give each process"):
        copies = sharded(small(lambda: Net()), by_layer=False, whole=("head.weight",))
        weight, mesh = copies.model.head.weight.detach(), init_device_mesh("cpu", (2,))
        copies.model.head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
        ALL["hessian"].build(replace(copies, params=every(copies.model)), process_group=group())
    with fails(TypeError, r"'lstm' \(LSTM\)"):
        ALL["hessian"].build(sharded(small(Recurrent)), process_group=group())
    with fails(ValueError, "'act' .*SyncBatchNorm in train mode"):
        synchronized = small(lambda: Net(nn.SyncBatchNorm(5)))
        ALL["hessian"].build(sharded(synchronized), process_group=group())
    tensor_parallel = small(choose=adapters)
    layer = parallelize_module(
        tensor_parallel.model.head, init_device_mesh("cpu", (2,)), ColwiseParallel()
    )
    chosen = {n: x for n, x in tensor_parallel.params.items() if not n.startswith("head")}
    assert isinstance(layer.weight, DTensor)
    with fails(TypeError, "'head' is parallelized"):
        ALL["hessian"].build(replace(tensor_parallel, params=chosen), process_group=group())
    later = small(choose=adapters)
    A = ALL["hessian"].build(replace(later, data=part(p.data)), process_group=group())
    fully_shard(later.model, ignored_params=set(later.params.values()))
    with fails(ValueError, "sharded since the operator was built"):
        A @ vector(A)


class Decaying(Net):
    """Writes to its weights, each of which is gathered only for a while."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.layer.weight.data.mul_(0.5)
        with torch.no_grad():
            self.head.weight[0].zero_()
        return super().forward(x)


@check(1, 2)
def writes_to_parameters() -> None:
    for _, own in kinds(Decaying):
        before = [getattr(x, "_local_tensor", x).tolist() for x in own.model.parameters()]
        for build in (ALL["hessian"].build, ALL["kfac"].build):
            with fails(ValueError, "writes to parameter 'second.layer.weight'"):
                build(own, process_group=group())
        after = [getattr(x, "_local_tensor", x).tolist() for x in own.model.parameters()]
        assert after == before


class Overwriting(Net):
    """Writes to the output of a layer that needs it, or of one that does not."""

    needs_output = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.tanh_() if self.needs_output else x.sin()
        return self.head(self.second(x.mul_(2)).relu_())


@check(1, 2)
def writes_to_what_is_saved() -> None:
    p = small(Overwriting)
    own = sharded(p)
    for case in ("hessian", "ggn", "fisher", "gradients", "kfac"):
        options = {"process_group": group()} if ALL[case].square else {}
        for q, theirs in ((own, options), (p, {})):
            with fails(RuntimeError, "modified by an inplace operation"):
                A = ALL[case].build(q, check_deterministic=False, **theirs)
                A @ (spread(q, torch.ones(A.shape[1]).double()))
    p.model.needs_output = own.model.needs_output = False
    compare(p, own)
    compare_rows(p, own)


@check()
def uses_that_are_refused() -> None:
    p = small()
    own = sharded(p)
    with fails(TypeError, "GGNDiagonalLinearOperator.*hutchinson_diag"):
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
    with fails(TypeError, "whole vectors that LSMR"):
        curvlinops.LSMRInverseLinearOperator(G)
    with fails(TypeError, "loss_along moves"):
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
    for number in (0, 1):  # on the first process
        unequal = {  # from parts, since a tensor that is distributed is that of the first process
            n: DTensor.from_local(
                torch.ones(*x.to_local().shape, number + rank()).double(),
                x.device_mesh, x.placements, shape=(*x.shape, number + rank()),
                stride=torch.empty(*x.shape, number + rank()).stride(),
            )
            for n, x in v.items()
        }  # fmt: skip
        with fails(ValueError, rf"different numbers of vectors at once: \[{number}, "):
            J @ unequal
    if rank() == 1:
        v["head.bias"].to_local()[0] = torch.nan
    with fails(ValueError, "NaN or infinite values", on=1):
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
        own = sharded(small(Root))
        A = ALL["kfac" if options else "gradients"].build(own, **options)
        with fails(ValueError, "gradient on batch 0 is not finite in parameter 'head.bias'"):
            A.trace() if options else A.norms()

    with fails(NotImplementedError, "differentiates with respect to a sharded parameter itself"):
        ALL["gradients"].build(sharded(small(InnerSteps), by_layer=False, whole=["size"]))

    own = sharded(small(lambda: Net(WithoutRule())))
    with fails(NotImplementedError, "'act.up' is sharded.*no rule knows.*write a rule"):
        ALL["gradients"].build(own).norms()
    with fails(NotImplementedError, "'act.up'.*no Kronecker.*an operation that no rule knows"):
        ALL["kfac"].build(own, process_group=group(), fallback="error").trace()
    with fails(NotImplementedError, "'act.up' is sharded.*an operation that no rule knows"):
        ALL["kfac"].build(own, process_group=group(), fallback="diagonal").trace()
    others = {name: x for name, x in own.params.items() if name != "act.up"}
    ALL["gradients"].build(replace(own, params=others)).norms()

    def wrong(node: Any, position: int) -> rules.Use:
        shape = shape_of_output(node)
        return rules.broadcast((1, 1), shape, 1.0 + rank())  # right for no process

    name = "LinalgSolveTriangularBackward0"
    rules.reads(name)(wrong)
    try:
        own = sharded(small(lambda: Net(WithoutRule())))
        with fails(NotImplementedError, "'act.up' is sharded.*does not agree with autograd"):
            ALL["gradients"].build(own).norms()
    finally:
        del rules.RULES[name]

    def penalized(output: Tensor, y: Tensor) -> Tensor:
        (x,) = (x for x in own.model.parameters() if x.shape == (3,))
        return nn.functional.cross_entropy(output, y, reduction="sum") + len(y) * x.square().sum()

    own = sharded(small(lambda: nn.Sequential(nn.Linear(3, 3))))
    with fails(NotImplementedError, "'0.weight' is sharded.*uses the parameters itself"):
        ALL["gradients"].build(replace(own, loss=penalized, reduction="sum")).norms()
