"""Checks of test_parallel.py with models whose parameters are sharded over the processes."""

import contextlib
import copy
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from contract import ALL, error
from live_batches import WatchedBatches
from models import InnerSteps, Using
from problems import Problem
from processes import (
    LIMIT,
    fails,
    group,
    mlp,
    part,
    rank,
    refuses,
    registry,
    vector,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from worlds import (
    SETTINGS,
    Both,
    LoRA,
    Net,
    adapters,
    every,
    in_world,
    in_worlds,
    joined,
    recurrent,
    sharded,
    small,
    spread,
)

import curvlinops
from curvlinops import ParameterSpace
from curvlinops.influence import preconditioned, score_batches, self_scores
from curvlinops.integrations.transformers import problem
from curvlinops.layers import recorded, rules
from curvlinops.support.torch_internals import shape_of_output
from curvlinops.team import shards
from curvlinops.team.messages import begin_gather
from curvlinops.team.shards import Kind, Request, Schedule, Shards

CHECKS, check = registry()
worlds = partial(in_worlds, check)
EMPIRICAL = {"fisher_type": "empirical"}
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

#: Whether there are language models to check.
try:
    import transformers
except ImportError:
    transformers = None


def without_rule() -> nn.Module:
    """A net with an operation that no rule knows."""

    def run(m: Using, x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(m.up, x.reshape(1, -1), upper=True).view_as(x).tanh()

    return Net(Using(run, up=torch.full((1, 1), 0.7)))


# --- numbers --------------------------------------------------------------------------------------


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))


@worlds("shards", make=linears)
def sums_with_factors(w: Both) -> None:
    """Blocks of several parameters, whose names have no order that all processes share."""
    G, K = w.build("ggn"), w.build("kfac", **SETTINGS["reduce"])
    v = w.v(G)
    assert error(w.joined((G + K) @ v), w.joined(G @ v) + w.joined(K @ v)) <= 1e-12


@check()
def calls_that_are_replaced() -> None:
    """In layers that are recorded, whose parameters are whole."""
    p = small(recurrent)
    some = curvlinops.select_parameters(p.model, "lstm", "attention", "head")
    few = replace(p, params=some)
    lstm = [name for name in some if name.startswith("lstm")]
    for w in (Both(few, sharded(few, whole=some)), Both(p, sharded(p, by_layer=False, whole=lstm))):
        w.compare()
        w.compare_rows()
        w.compare_factors(fisher_type="empirical")


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


def texts(own: bool = False) -> list[dict[str, Tensor]]:
    """Three batches, or this process's part of them."""
    generator = torch.Generator().manual_seed(0)
    found = [{"input_ids": torch.randint(11, (2, 5), generator=generator)} for _ in range(3)]
    return part(found) if own else found


def sharded_blocks(model: nn.Module) -> nn.Module:
    """Shard what is frozen, or all."""
    chosen = {x for x in model.parameters() if x.requires_grad}
    whole = chosen if len(chosen) < len(list(model.parameters())) else set()
    for layer in (*blocks(model), model):
        fully_shard(layer, ignored_params=whole & {*layer.parameters()})
    return model


#: How the copy of a model is prepared; the names of the others are those of models.
PREPARED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "GPT2 copies": DistributedDataParallel,
    "GPT2 compiled copies": lambda x: torch.compile(DistributedDataParallel(x), backend="eager"),
    **dict.fromkeys(
        ("GPT2 shards", "Llama shards", "GPT2 adapters", "Llama adapters"), sharded_blocks
    ),
}


def language_models(name: str) -> None:
    if transformers is None:
        return
    kind, is_adapted = name.split()[0], "adapters" in name
    model = language_model(kind)
    for block in blocks(model) if is_adapted else ():
        if kind == "GPT2":
            block.attn.c_attn = LoRA(block.attn.c_attn, 8, 24)
        else:
            block.self_attn.v_proj = LoRA(block.self_attn.v_proj, 8, 4)
    for parameter, x in model.named_parameters():
        x.requires_grad_(not is_adapted or parameter.endswith((".down", ".up")))
    net = PREPARED[name](copied := copy.deepcopy(model))
    w = Both(*(Problem(*problem(*x), mc=True) for x in ((model, texts()), (net, texts(True)))))
    assert list(w.own.params) == list(w.p.params) and w.has_parts == ("shards" in name)
    w.compare(("hessian", "ggn", "fisher-samples"))
    if "copies" not in name:
        w.compare_rows()
    for options in ("empirical", "reduce", "mc"):
        w.compare_factors(**SETTINGS[options])
    assert (kind == "GPT2") == (copied.lm_head.weight is copied.get_input_embeddings().weight)


for _name in PREPARED:
    check(name=f"language models {_name}")(partial(language_models, _name))


def wrap_blocks(model: nn.Module) -> None:
    for number, block in enumerate(blocks(model)):
        blocks(model)[number] = torch.compile(block, backend="eager")


def checkpoint_blocks(model: nn.Module) -> None:
    kind = type(blocks(model)[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))


#: Ways to compile and checkpoint blocks.
WRAPPED: tuple[Callable[[nn.Module], Any], ...] = (
    lambda model: [block.compile(backend="eager") for block in blocks(model)],
    wrap_blocks,
    lambda model: model.compile(backend="eager"),
    checkpoint_blocks,
    lambda model: (checkpoint_blocks(model), wrap_blocks(model)),
)


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
    p, ours = (Problem(*problem(model, texts(x)), mc=True) for x in (False, True))
    rows = ALL["gradients"].build(ours)
    V = vector(rows)
    cases = {"hessian": {}, "ggn": {}, "kfac": EMPIRICAL}
    expected = {case: ALL[case].build(p, **options) @ V for case, options in cases.items()}
    for number, (wrap, is_first) in enumerate(itertools.product(WRAPPED, (True, False))):
        copied = copy.deepcopy(model)
        for prepare in (wrap, sharded_blocks) if is_first else (sharded_blocks, wrap):
            prepare(copied)
        w = Both(p, Problem(*problem(copied, texts(True)), mc=True))
        if number % 2:
            net = OfTokens(copied)
            data = [(x, x["input_ids"][:, 1:]) for x in texts(True)]
            w.own = Problem(net, nn.CrossEntropyLoss(), every(net), data, mc=True)
        mine = spread(w.own, V)
        # each way with one more operator: all of them would take minutes
        for case in dict.fromkeys(("ggn", list(cases)[number % 3])):
            found = w.joined(w.build(case, **cases[case]) @ mine)
            assert error(found, expected[case]) <= 1e-10, (number, case)
        if number % 3 == 1:
            assert error(w.build("gradients").scores(mine), rows.scores(V)) <= 1e-10, number


@worlds("adapters", make=without_rule)
def samples_one_by_one(w: Both) -> None:
    """Operations without a rule, which only whole parameters may have."""
    mine, alone = (ALL["gradients"].build(replace(x, data=w.own.data)) for x in (w.own, w.p))
    assert error(mine.dense(), alone.dense()) <= 1e-10
    assert list(mine.fallbacks) == ["act.up"]
    w.compare(("fisher", "ggn-diagonal"))


@worlds("shards", sizes=(1,))
def queries_are_gathered_once_for_each_batch(w: Both) -> None:
    rows, V = w.both("gradients")
    V = vector(V, 3)
    for queries in (V, V[:, 0]):
        mine = spread(w.own, queries)
        with mock.patch.object(
            Shards, "vectors", autospec=True, side_effect=Shards.vectors
        ) as gather:
            rows.scores(mine)
        assert gather.call_count == len(w.own.params) * len(w.own.data)
    for use in (self_scores, score_batches, preconditioned):
        refuses(ValueError, "Gather the parameters, or call rows.scores", use, rows, V, 1)


@worlds("some are whole", sizes=(1,))
def products_with_whole_parameters(w: Both) -> None:
    """A part of a Jacobian's rows, of this process's data."""
    J = w.build("jacobian")
    product = J.T @ [torch.ones(J.codomain.shapes[""]).double()]
    local = curvlinops.SubmatrixLinearOperator(J.T, ["head.weight"], range(J.shape[0]))
    found = local @ torch.ones(J.shape[0]).double()
    torch.testing.assert_close(found, product[list(w.p.params).index("head.weight")].flatten())
    refuses(TypeError, "no process has functional", curvlinops.functional_variance, J, J.T @ J)


@worlds("replicas")
def replicas_of_shards(w: Both) -> None:
    """Two groups of two processes have one copy each."""
    H, alone = w.build("hessian"), ALL["ggn"].build(w.p)
    mesh = w.own.params["head.bias"].device_mesh
    low = sharded(w.p, mesh=mesh, mp_policy=MixedPrecisionPolicy(F32))
    found = joined(low, w.build("ggn", low) @ spread(low, vector(alone)))
    assert 1e-10 <= error(found, alone @ vector(alone)) <= 1e-5
    try:
        H @ {name: x * (1 + rank() // 2) for name, x in w.v(H).items()}  # others in each copy
    except (ValueError, RuntimeError) as raised:
        assert "Ranks multiply different vectors" in str(raised)
    else:
        raise AssertionError("The copies have different vectors.")
    match = "4 processes.*sharded over 2, with 1 copies.*mesh of two axes"
    refuses(ValueError, match, w.build, "hessian", sharded(w.p, mesh=mesh["shard"]))


@check(4)
def replicas_in_a_part_of_all_processes() -> None:
    """Each half of the processes has a mesh of its own, for the same model and data."""
    names = ("half", "replicate", "shard")
    for shape in ((2, 2, 1), (2, 1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)["replicate", "shard"]
        p = small()
        Both(p, sharded(p, p.data[rank() % 2 :: 2], mesh=mesh)).compare_rows()


@check(3)
def random_vectors_of_any_number_of_processes() -> None:
    p = small()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "shard"))
    alone, own = sharded(p, p.data, mesh=mesh["shard"]), sharded(p)
    traces = (
        curvlinops.hutchinson_trace(ALL["ggn"].build(x, process_group=processes), 24, seed=1)
        for x, processes in ((own, group()), (alone, mesh["shard"].get_group()))
    )
    assert error(*traces) <= 1e-10


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
        w, before = Both(p, own, tolerance=rounding), state(own.model)
        for case in ("hessian", "ggn", "fisher", "kfac"):
            together, alone = w.both(case, **(EMPIRICAL if case == "kfac" else {}))
            w.compare_products(together, alone)
            found, expected = w.joined(together @ w.v(alone)), alone @ vector(alone)
            assert found.dtype == wide
            assert error(found, expected) <= (few if case == "kfac" else rounding), case
            gradient, expected = (A.gradient_and_loss()[0] for A in (together, alone))
            assert error(w.joined(gradient), ParameterSpace.of(p.params).join(expected)) <= few
        mine, rows = w.build("gradients"), ALL["gradients"].build(replace(p, data=own.data))
        for name in ("dense", "norms", "gram"):
            assert error(getattr(mine, name)(), getattr(rows, name)()) <= few
        assert error(mine.scores(w.v(rows, 3)), rows.scores(vector(rows, 3))) <= few
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
    low = MixedPrecisionPolicy(BF16, reduce_dtype=F32, output_dtype=BF16)
    policies = dict.fromkeys(("", "model.layers.0", "model.layers.1"), low)
    whole, copied = as_trained(copy.deepcopy(model), policies), copy.deepcopy(model)
    for name, policy in reversed(policies.items()):
        fully_shard(copied.get_submodule(name), mp_policy=policy)
    for net in (whole, copied):
        net.forward = torch.autocast("cpu", dtype=BF16)(net.forward)
    p, own = (Problem(*problem(*x), mc=True) for x in ((whole, texts()), (copied, texts(True))))
    w = Both(p, own, tolerance=4e-2)
    for case in ("hessian", "ggn"):
        together, alone = w.both(case)
        w.compare_products(together, alone)
        gradient, expected = (A.gradient_and_loss()[0] for A in (together, alone))
        assert error(w.joined(gradient), ParameterSpace.of(p.params).join(expected)) <= 1e-2


def wide(size: int, *between: nn.Module, wrap: Callable = lambda x: x) -> nn.Module:
    """Eight layers of one size, and another one before them."""
    layers = [wrap(nn.Linear(size, size, bias=False)) for _ in range(8)]
    return nn.Sequential(nn.Linear(3, size), *(x for y in layers for x in (y, *between)))


@check()
def what_is_gathered_in_low_precision() -> None:
    p, gathered = small(lambda: wide(40), (4, 2, 3)), []

    def gather(out: Tensor, *args: Any) -> Any:
        gathered.append(out.nbytes)
        return begin_gather(out, *args)

    for case in ("hessian", "ggn"):
        totals = []
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16)):
            w = Both(p, sharded(p, mp_policy=policy))
            A = w.build(case)
            v = w.v(A)
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
    w = Both(p, other)
    for case in ("hessian", "ggn"):
        together, alone = w.both(case)
        v = w.v(alone)
        found = w.joined(together @ v)
        assert error(found, alone @ vector(alone)) <= 1e-5
        assert 1e-4 <= error(joined(own, w.build(case, own) @ v), found) <= 0.1


@worlds("shards")
def errors_of_memory(w: Both) -> None:
    """A process without memory for what it gathers, or adds to a sum."""
    G = w.build("ggn")
    v, allocate = w.v(G), Shards._memory
    expected = w.joined(G @ v)
    for kind in (Kind.PARAMETER, Kind.VECTORS, Kind.SUM):

        def fail_once(self: Shards, request: Request, kind: Kind = kind) -> Tensor:
            if rank() == 1 and request.kind == kind:
                Shards._memory = allocate
                raise MemoryError("no memory")
            return allocate(self, request)

        Shards._memory = fail_once
        refuses(MemoryError, "no memory", G.__matmul__, v, on=1)
        Shards._memory = allocate
        assert error(w.joined(G @ v), expected) <= 1e-15


# --- forward mode --------------------------------------------------------------------------------


class Wrong(torch.autograd.Function):
    """Twice its input, with a wrong derivative in forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 3 * tangent

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Missing(Wrong):
    """It has none."""

    jvp = torch.autograd.Function.jvp


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def lost(x: Tensor) -> Tensor:
    """Shows the derivative to reverse mode only."""
    return 2 * (x if forward_ad.unpack_dual(x).tangent is None else x.detach())


#: Ways to double a tensor on the second process and on the first one; passes over the data in a
#: first product and in a second one.
TANGENTS: dict[str, tuple] = {
    "right": (doubled, doubled, [1, 1]),
    "wrong": (Wrong.apply, Wrong.apply, [2, 1]),
    "wrong on one process": (Wrong.apply, doubled, [2, 1]),
    "missing": (Missing.apply, Missing.apply, [1, 1]),
    "missing on one process": (Missing.apply, doubled, [1, 1]),
    "lost": (lost, lost, [1, 1]),
    "lost on one process": (lost, doubled, [1, 1]),
}


class Doubling(Net):
    twice: Callable = staticmethod(doubled)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(super().forward(x))


@check()
def tangents_are_compared() -> None:
    """Of all processes, at the end of a product, which otherwise takes backward passes."""
    for world, case in (("shards", "ggn"), ("some are whole", "fisher")):
        for name, (second, first, passes) in TANGENTS.items():
            w = in_world(world, Doubling, (3, 2))
            w = w.of(w.p.data, Counting(w.own.data))
            G, alone = w.both(case, check_deterministic=False)
            expected = alone @ vector(alone)
            G.gradient_and_loss()  # a first evaluation would notice custom functions
            for number in passes:
                w.own.data.passes = 0
                with mock.patch.object(Doubling, "twice", staticmethod((first, second)[rank()])):
                    found = w.joined(G @ w.v(G))
                assert error(found, expected) <= 1e-10, (name, case)
                assert w.own.data.passes == number, (name, case)


@worlds("shards", make=mlp, batches=(50, 50))
def tangents_beside_kept_graphs(w: Both) -> None:
    """One process keeps its graph, the other one takes forward mode in each product."""
    w = w.of(w.p.data, Counting(w.own.data))
    G, alone = w.both("ggn", cache=("auto", "none")[rank()])
    w.own.data.passes = 0
    with G.linearized():
        for _ in range(3):
            assert error(w.joined(G @ w.v(G)), alone @ vector(alone)) <= 1e-10
    assert w.own.data.passes == (1, 3)[rank()]


@check()
def single_products_have_the_graph_of_a_gradient() -> None:
    w = in_world("shards", lambda: wide(40, nn.Tanh()), (64, 64))
    for case in ("ggn", "fisher"):
        A, most = w.build(case), []
        for use in (A.gradient_and_loss, partial(A.__matmul__, w.v(A))):
            with FullTensors(64 * 40 * 8) as full:
                use()
            most.append(full.most)
        assert 8 <= most[0] <= most[1] <= most[0] + 4, most


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


def repeated() -> nn.Module:
    """A process evaluates it another number of times, on one batch."""

    def run(m: Using, x: Tensor) -> Tensor:
        for _ in range(int(rank() == 1 and len(x) == 3)):
            m.routed(x)
        return m.routed(x)

    return Using(run, routed=Routed())


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
    "other evaluations": lambda: (repeated, routed("000000", sizes=(2, 2, 2, 3))),
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
        p = small(model)
        w = Both(p, sharded(p, data))
        A = w.build("hessian", **dict(*options))
        v = w.v(A, 2)
        with in_rounds():
            expected = results(A, v)
        times = itertools.cycle([0.001, *[0] * (3 + rank())])
        with changed(_ask=lambda *_, times=times: time.sleep(next(times))):
            found = results(A, v)
        # sums of processes that are not in step are added in another order
        tolerance = 0 if name in ("the same", "checkpoints", "more batches") else 1e-14
        for x, y in zip(found, expected, strict=True):
            assert error(x, y) <= tolerance, name


@worlds("shards", make=Routed, sizes=(3,))
def rounds_of_schedules(w: Both) -> None:
    """One for each batch from the third one, and those in which processes wait for each other."""
    w, num_batches, rounds = w.of(w.p.data, routed("0000")), 4, []
    for case in ("hessian", "ggn"):
        A = w.build(case)
        for use in (partial(A.__matmul__, w.v(A)), A.gradient_and_loss):
            for number in range(3):
                rounds.clear()
                with changed(_round=lambda own, *_: rounds.append(own)):
                    use()
                requests = [x for x in rounds if x.kind != Kind.NOTHING]
                assert (len(requests) == num_batches) == (number > 0), (case, len(requests))
                assert number == 0 or len(rounds) <= num_batches + 2


@worlds("shards", make=Checkpointed)
def errors_at_every_request(w: Both) -> None:
    """Of one process, in rounds and while all follow a schedule: the others do not wait for it."""
    w = w.of(w.p.data, routed("00"))
    requests, kind = itertools.count(), KeyError

    def fail_once(*_: Any) -> None:
        if next(requests) == 0 and rank() == 1:
            raise kind("here")

    for case, is_kept in (("ggn", False), ("hessian", True)):
        A = w.build(case)
        v = w.v(A)
        with A.linearized() if is_kept else contextlib.nullcontext():
            expected = [w.joined(A @ v) for _ in range(2)][-1]
            requests = itertools.count(1)
            with changed(_ask=fail_once):
                A @ v
            for failing in range(next(requests) - 1):
                kind = (KeyError, KeyboardInterrupt)[failing % 2]
                requests = itertools.count(-failing)
                with changed(_ask=fail_once), fails(kind, "here", on=1):
                    A @ v
                # in rounds, after which there is a schedule
                assert error(w.joined(A @ v), expected) <= 1e-14, (case, failing)


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
    adapted = partial(LoRA, num_inputs=40, num_outputs=40)
    for make, world, limit in (
        (lambda: wide(40, nn.Tanh()), "shards", 4),
        (lambda: wide(40, nn.Tanh(), wrap=adapted), "adapters", 2),
    ):
        w = in_world(world, make, (4, 2, 3))
        for case in ("hessian", "ggn", "fisher"):
            A = w.build(case)
            for product in (partial(A.__matmul__, w.v(A)), A.gradient_and_loss):
                for _ in range(3):  # in the end by a schedule
                    with FullTensors(40 * 40 * 8) as full:
                        product()
                    assert 0 < full.most <= limit, (case, full.most)
                    assert full.left() == 0
    w = in_world("shards", Deep, (4, 2, 3, 3))  # gradients of one sample would count
    # without factors of this size: the blocks of the tables lie in one tensor
    for case, options in (
        ("kfac", {"max_factor_size": 8, "fallback": "diagonal"}),
        ("gradients", {}),
    ):
        # equal layers are computed together up to a budget, which one layer exceeds here
        with mock.patch.object(recorded, "_COPIED", 1), FullTensors(40 * 40 * 8) as full:
            A = w.build(case, **options)
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


def wide_in_the_middle() -> nn.Module:
    first, middle = LoRA(nn.Linear(3, 300), 3, 300), nn.Linear(300, 300)
    return nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), nn.Linear(300, 3))


@worlds("adapters", make=wide_in_the_middle)
def kept_graphs_have_no_gathered_parameters(w: Both) -> None:
    w = w.of(w.p.data, Counting(w.own.data))
    for case in ("hessian", "ggn"):
        # activations of all batches fit, but not the weight of one layer
        A = w.build(case, cache=8 * 300**2)
        with A.linearized():
            A @ vector(A)
            w.own.data.passes = 0
            A @ vector(A)
            assert w.own.data.passes == 0


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


@worlds("adapters", sizes=(1,))
def training(w: Both) -> None:
    p, own, other = w.p, w.own, sharded(w.p, whole=w.p.params)
    operators: list = []

    def between() -> None:
        before = state(own.model)
        operators.extend(w.build(case) for case in ("ggn", "kfac"))
        for A in operators:
            A @ vector(A)
        w.build("gradients").dense()
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
        match = "'first.layer.weight' was overwritten"
        refuses(RuntimeError, match, A.__matmul__, vector(A))
    own.model(p.data[0][0])  # leaves parameters of the root whole
    p.model.first.layer.weight.data.mul_(2)
    w.compare(["ggn"])


@check()
def parameters_that_are_whole_for_a_while() -> None:
    """FSDP keeps the root's parameters whole from a forward pass to the next backward pass."""
    p = small(choose=adapters)
    w = Both(p, sharded(p, by_layer=False, whole=p.params))
    (X, y), model = p.data[0], w.own.model
    loss = p.loss(model(X), y)
    assert not any(isinstance(x, DTensor) for x in model.parameters())
    w.compare(["hessian"])
    w.compare_factors()
    A, B = w.both("ggn")
    loss.backward()
    assert isinstance(model.first.layer.weight, DTensor)
    expected = torch.autograd.grad(p.loss(p.model(X), y), p.model.first.layer.weight)
    torch.testing.assert_close(model.first.layer.weight.grad.full_tensor(), *expected)
    expected = B @ vector(B)
    with A.linearized():
        for _ in range(3):
            assert error(A @ vector(A), expected) <= 1e-10
            with torch.no_grad():
                model(X)


@worlds("shards", make=mlp, batches=(50, 50, 50), sizes=(1,))
def what_linearized_keeps_has_a_size(w: Both) -> None:
    """Rows are computed layer by layer of the data, which counts."""
    kept, watched = 50 * (3 + 1) * 8, WatchedBatches(w.own.data)
    w = w.of(w.p.data, watched)
    for num in (0, 2):
        A = w.build("gradients", cache=int((num + 0.5) * kept), check_deterministic=False)
        v = w.v(A)
        with A.linearized():
            A @ v
            assert watched.alive() == min(num, len(watched))


# --- what is refused ------------------------------------------------------------------------------


class WithShardedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = fully_shard(nn.Linear(3, 3).double())

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(output), y)


@worlds("adapters")
def models_that_are_refused(w: Both) -> None:
    own, hessian = w.own, partial(w.build, "hessian")
    refused, mesh = partial(refuses, TypeError), init_device_mesh("cpu", (2,))
    match = "sharded over the processes \\[0, 1\\].*process_group"
    for case in ("hessian", "kfac"):
        refuses(ValueError, match, w.build, case, process_group=None)
    closure = replace(own, model=lambda x: own.model(x), params=list(own.params.values()))
    refused("layer.weight.*are DTensors.*of a Module", hessian, closure)
    refused("are DTensors", hessian, replace(own, loss=WithShardedLoss(), reduction="mean"))
    half = sharded(w.p, whole=w.p.params, mp_policy=MixedPrecisionPolicy(torch.float16))
    refused("The model is sharded with MixedPrecisionPolicy.*float16.*bfloat16", hessian, half)
    make = lambda: nn.Sequential(LoRA(nn.Linear(3, 4), 3, 4), LoRA(nn.Linear(4, 3), 4, 3))  # noqa: E731
    even = small(make, choose=adapters)
    placed = {"shard_placement_fn": lambda x: Shard(x.shape[1:].count(4))}
    columns = sharded(even, whole=even.params, **placed)
    refused("'1.layer.weight' has the placements.*first axis", hessian, columns)
    copies = sharded(small(), by_layer=False, whole=("head.weight",))
    weight = distribute_tensor(copies.model.head.weight.detach(), mesh, [Replicate()])
    copies.model.head.weight = nn.Parameter(weight)
    copies = replace(copies, params=every(copies.model))
    match = r"'head.weight' has the placements \[Replicate\(\)\].*Give each process"
    refused(match, hessian, copies)
    refused(r"'lstm' \(LSTM\)", hessian, sharded(small(recurrent)))
    synchronized = sharded(small(lambda: Net(nn.SyncBatchNorm(5))))
    refuses(ValueError, "'act' .*SyncBatchNorm in train mode", hessian, synchronized)
    tensor_parallel = small(choose=adapters)
    layer = parallelize_module(tensor_parallel.model.head, mesh, ColwiseParallel())
    chosen = {n: x for n, x in tensor_parallel.params.items() if not n.startswith("head")}
    assert isinstance(layer.weight, DTensor)
    refused("'head' is parallelized", hessian, replace(tensor_parallel, params=chosen))
    later = small(choose=adapters)
    A = hessian(replace(later, data=own.data))
    fully_shard(later.model, ignored_params=set(later.params.values()))
    refuses(ValueError, "sharded since the operator was built", A.__matmul__, vector(A))


@worlds("shards")
def vectors_that_are_refused(w: Both) -> None:
    G, K, J = (w.build(case) for case in ("ggn", "kfac", "jacobian"))
    flat, refused = torch.ones(G.shape[0]).double(), partial(refuses, TypeError)
    v = spread(w.own, flat)
    for vectors in (flat, flat.numpy()):
        refused("sharded.*flat.*Pass a list or dictionary of DTensors", G.__matmul__, vectors)
    whole = v | {"head.bias": torch.ones(3).double()}
    refused("'head.bias' is a whole tensor, but.*sharded.*randn_like", G.__matmul__, whole)
    placed = v | {"head.bias": v["head.bias"].redistribute(placements=[Replicate()])}
    refuses(ValueError, "'head.bias' has the placements.*redistribute", G.__matmul__, placed)
    refused("no process has a whole matrix", G.to_dense)
    refused("whole vectors that LSMR", curvlinops.LSMRInverseLinearOperator, G)
    refused("loss_along moves", curvlinops.loss_along, G, v, [0.0])
    match = "no process has (all eigenvalues|a whole diagonal|a flat vector)"
    for use, *args in (
        (K.eigvalsh,),
        (curvlinops.DiagonalLinearOperator, K.gradient_and_loss()[0]),
        (curvlinops.DiagonalLinearOperator, flat, K.space),
        (K.space.split, flat),
    ):
        refused(match, use, *args)
    refused("rows of other processes.*gram", J.__matmul__, J.T)
    for A in (J, J.T):
        match = "belong to single processes.*parameters are sharded"
        refused(match, curvlinops.hutchinson_squared_fro, A, 2)
    for number in (0, 1):  # on the first process
        unequal = {  # from parts, since a tensor that is distributed is that of the first process
            n: DTensor.from_local(
                torch.ones(*x.to_local().shape, number + rank()).double(),
                x.device_mesh, x.placements, shape=(*x.shape, number + rank()),
                stride=torch.empty(*x.shape, number + rank()).stride(),
            )
            for n, x in v.items()
        }  # fmt: skip
        match = rf"different numbers of vectors at once: \[{number}, "
        refuses(ValueError, match, J.__matmul__, unequal)
    other = w.own.params | {"head.bias": fully_shard(nn.Linear(3, 3).double()).bias}
    refused("head.bias'\\] are DTensors", w.build, "kfac", replace(w.own, params=other))


class Root(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.head.bias * 0).sum().sqrt()


@check()
def gradients_that_are_refused() -> None:
    own = sharded(small(Root))
    for case, name in (("gradients", "norms"), ("kfac", "trace")):
        match = "gradient on batch 0 is not finite in parameter 'head.bias'"
        refuses(ValueError, match, getattr(Both(own, own).build(case), name))
    refused = partial(refuses, NotImplementedError)
    inner = sharded(small(InnerSteps), by_layer=False, whole=["size"])
    match = "differentiates with respect to a sharded parameter itself"
    refused(match, ALL["gradients"].build, inner)

    w = in_world("shards", without_rule)
    match = "'act.up' is sharded.*no rule knows.*write a rule"
    refused(match, w.build("gradients").norms)
    match = "'act.up'.*no Kronecker.*an operation that no rule knows"
    refused(match, lambda: w.build("kfac", fallback="error").trace())
    match = "'act.up' is sharded.*an operation that no rule knows"
    refused(match, lambda: w.build("kfac", fallback="diagonal").trace())
    others = {name: x for name, x in w.own.params.items() if name != "act.up"}
    w.build("gradients", replace(w.own, params=others)).norms()

    def wrong(node: Any, position: int) -> rules.Use:
        return rules.broadcast((1, 1), shape_of_output(node), 1.0 + rank())  # right for no process

    with mock.patch.dict(rules.RULES):
        rules.reads("LinalgSolveTriangularBackward0")(wrong)
        w = in_world("shards", without_rule)
        match = "'act.up' is sharded.*does not agree with autograd"
        refused(match, w.build("gradients").norms)

    def penalized(output: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, y, reduction="sum")
        return loss + len(y) * own.model[0].bias.square().sum()

    own = sharded(small(lambda: nn.Sequential(nn.Linear(3, 3))))
    rows = ALL["gradients"].build(replace(own, loss=penalized, reduction="sum"))
    refused("'0.weight' is sharded.*uses the parameters itself", rows.norms)
