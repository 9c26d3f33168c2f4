"""Checks of test_parallel.py with models whose frozen parameters are sharded over the processes.

python sharded_checks.py RANK SIZE FOLDER
"""

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallel_checks
import torch
import torch.distributed as dist
from contract import ALL, CASES, error, matrix
from parallel_checks import assert_same_everywhere, fails, group, part, rank, vector
from problems import Problem
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import curvlinops
from curvlinops.integrations.transformers import problem

CHECKS: dict[int, dict[str, Callable[[], None]]] = {2: {}, 3: {}, 4: {}}

#: Whether there are language models to check.
try:
    import transformers
except ImportError:
    transformers = None


def check(*sizes: int) -> Callable:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        for size in sizes or (2,):
            CHECKS[size][function.__name__] = function
        return function

    return register


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


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are differentiated."""
    ends = (".down", ".up", "head.weight", "head.bias")
    return {name: x for name, x in model.named_parameters() if name.endswith(ends)}


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


def classifier(
    make: Callable[[], nn.Module] = Net, sizes: tuple[int, ...] = (4, 2, 3, 1)
) -> Problem:
    torch.manual_seed(0)
    model = make().double()
    data = [(torch.randn(n, 3).double(), torch.randint(3, (n,))) for n in sizes]
    return Problem(model, nn.CrossEntropyLoss(), adapters(model), data, mc=True)


def sharded(p: Problem, data: list | None = None, **options: Any) -> Problem:
    """The problem with a copy of the model, of which all but ``params`` is sharded."""
    model = copy.deepcopy(p.model)
    chosen = adapters(model)
    for child in model.modules():  # layers by themselves, as in a transformer
        if isinstance(child, LoRA):
            fully_shard(child, ignored_params=set(chosen.values()), **options)
    fully_shard(model, ignored_params=set(chosen.values()), **options)
    assert sum(isinstance(x, DTensor) for x in model.parameters()) > 0
    return replace(p, model=model, params=chosen, data=part(p.data) if data is None else data)


def compare(p: Problem, cases: Any = None, own: Problem | None = None) -> None:
    """Compare operators on a sharded model with those of one process."""
    own = own or sharded(p)
    for case in cases or (name for name, kind in CASES.items() if kind.square):
        together, alone = ALL[case].build(own, process_group=group()), ALL[case].build(p)
        found, v = matrix(together), vector(alone)
        expected = alone @ v
        assert error(found, matrix(alone)) <= 1e-10, case
        assert_same_everywhere(found)
        assert error(together @ v, expected) <= 1e-10, case
        with together.linearized():
            for _ in range(3):
                assert error(together @ v, expected) <= 1e-10, case
        for mine, its in zip(together.gradient_and_loss(), alone.gradient_and_loss(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


# --- numbers --------------------------------------------------------------------------------------


@check(2, 3)
def products() -> None:
    compare(classifier())


@check(2, 3)
def factors() -> None:
    compare(classifier(), ("kfac", "ekfac"))
    p = classifier()
    own = sharded(p)
    alone = ALL["ekfac"].build(p, fisher_type="empirical")
    folder = Path(sys.argv[3]) / "factors"
    for options in (
        {"factor_placement": "partition"},
        {"directory": folder, "module_partitions": 2},
        {"directory": folder},  # what was computed
    ):
        options |= {"process_group": group(), "fisher_type": "empirical"}
        together = ALL["ekfac"].build(own, **options)
        assert error(matrix(together.inverse(0.1)), matrix(alone.inverse(0.1))) <= 1e-10
    alone.load(folder)
    assert error(matrix(together), matrix(alone)) <= 1e-10
    together = ALL["kfac"].build(own, process_group=group(), fisher_type="empirical")
    together.update(p.data[rank()])
    alone = ALL["kfac"].build(p, fisher_type="empirical")
    for batch in p.data[: dist.get_world_size()]:
        alone.update(batch)
    assert error(together.trace(), alone.trace()) <= 1e-10


@check()
def losses_along_directions() -> None:
    p = classifier()
    together = ALL["hessian"].build(sharded(p), process_group=group())
    alone = ALL["hessian"].build(p)
    found, expected = (
        curvlinops.loss_along(H, vector(alone, 2), [0, 0.3]) for H in (together, alone)
    )
    torch.testing.assert_close(found, expected)


@check(2, 3)
def rows() -> None:
    """Each process has the rows of its own data; the processes only share the model."""
    p = classifier()
    own = sharded(p)
    for case in ("gradients", "jacobian", "transposed"):
        mine, alone = ALL[case].build(own), ALL[case].build(replace(p, data=own.data))
        assert error(matrix(mine), matrix(alone)) <= 1e-10
        v = vector(alone)
        assert error(mine @ v, alone @ v) <= 1e-10
        u = torch.ones(alone.shape[0]).double()
        with (mine if case != "transposed" else mine.operator).linearized():
            for _ in range(2):
                assert error(mine.T @ u, alone.T @ u) <= 1e-10
    for name in ("dense", "norms", "gram", "second_moment", "variance"):
        mine, alone = (ALL["gradients"].build(replace(x, data=own.data)) for x in (own, p))
        assert error(getattr(mine, name)(), getattr(alone, name)()) <= 1e-10
    torch.testing.assert_close(mine.gradient_and_loss(), alone.gradient_and_loss())
    P = vector(alone, 3)
    assert error(mine.scores(P), alone.scores(P)) <= 1e-10
    assert error(mine @ P, alone @ P) <= 1e-10
    mine, alone = (ALL["jacobian"].build(replace(x, data=own.data)) for x in (own, p))
    assert error(mine.gram(), alone.gram()) <= 1e-10


class WithoutRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.full((1, 1), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.kron(x, self.up).tanh()


@check()
def samples_one_by_one() -> None:
    p = classifier(lambda: Net(WithoutRule()))
    own = sharded(p)
    mine, alone = (ALL["gradients"].build(replace(x, data=own.data)) for x in (own, p))
    assert error(mine.dense(), alone.dense()) <= 1e-10
    assert list(mine.fallbacks) == ["act.up"]
    compare(p, ("fisher", "ggn-diagonal"), own)


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


@check()
def calls_that_are_replaced() -> None:
    p = classifier(Recurrent)
    names = ("lstm", "attention", "head")
    p = replace(p, params=curvlinops.select_parameters(p.model, *names))
    model = copy.deepcopy(p.model)
    chosen = curvlinops.select_parameters(model, *names)
    fully_shard(model, ignored_params=set(chosen.values()))
    own = replace(p, model=model, params=chosen, data=part(p.data))
    compare(p, ("hessian", "ggn", "fisher", "kfac", "ekfac"), own)
    mine, alone = (ALL["gradients"].build(replace(x, data=own.data)) for x in (own, p))
    assert error(mine.dense(), alone.dense()) <= 1e-10
    assert not mine.fallbacks


@check()
def checkpoints() -> None:
    p = classifier()
    p.model.uses_checkpoint = True
    compare(p, ("hessian", "ggn", "fisher", "kfac"))


@check(4)
def replicas_of_shards() -> None:
    """Two groups of two processes have one copy each."""
    p = classifier()
    own = sharded(p, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    compare(p, ("hessian", "ggn", "kfac"), own)
    mine, alone = (ALL["gradients"].build(replace(x, data=own.data)) for x in (own, p))
    assert error(mine.dense(), alone.dense()) <= 1e-10


def language_model(kind: str, adapted: bool = True) -> nn.Module:
    torch.manual_seed(0)
    if kind == "GPT2":
        options = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 6}
    else:
        options = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        options |= {"hidden_size": 8, "intermediate_size": 14, "vocab_size": 11}
    config = getattr(transformers, f"{kind}Config")(**options)
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{suffix}")(config).double().eval()
    for block in model.transformer.h if kind == "GPT2" else model.model.layers:
        if kind == "Llama":  # whose own norms compute in float32
            block.input_layernorm = nn.RMSNorm(8, dtype=torch.float64)
            block.post_attention_layernorm = nn.RMSNorm(8, dtype=torch.float64)
            model.model.norm = nn.RMSNorm(8, dtype=torch.float64)
        if adapted and kind == "GPT2":
            block.attn.c_attn = LoRA(block.attn.c_attn, 8, 24)
        elif adapted:
            block.self_attn.v_proj = LoRA(block.self_attn.v_proj, 8, 4)
    for name, x in model.named_parameters():
        x.requires_grad_(not adapted or name.endswith((".down", ".up")))
    return model


def language_models(kind: str) -> Callable[[], None]:
    def run() -> None:
        if transformers is None:
            return
        model = language_model(kind)
        texts = [{"input_ids": torch.randint(11, (2, 5))} for _ in range(3)]
        p = Problem(*problem(model, texts), mc=True)
        copied = sharded(replace(p, model=model), texts).model
        own = Problem(*problem(copied, part(texts)), mc=True)
        compare(p, ("hessian", "ggn", "fisher-samples", "kfac"), own)
        mine, alone = (ALL["gradients"].build(replace(x, data=own.data)) for x in (own, p))
        assert error(mine.dense(), alone.dense()) <= 1e-10

    return run


CHECKS[2] |= {f"language-models-{kind}": language_models(kind) for kind in ("GPT2", "Llama")}


# --- processes out of step ------------------------------------------------------------------------


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


@check()
def different_evaluations() -> None:
    """Other numbers of batches, columns at once, and kept graphs."""
    p = classifier(lambda: Net(Sine()), (4, 2, 3, 1, 2))
    few = sharded(p, p.data[:1] if rank() == 0 else p.data[1:])
    for case in ("hessian", "ggn", "fisher", "kfac"):
        cache = ("auto", "none")[rank()]
        options = {"fisher_type": "type-2"} if case == "kfac" else {"chunk_size": 3}
        together = ALL[case].build(few, process_group=group(), cache=cache, **options)
        alone = ALL[case].build(p, **options)
        V = vector(alone, 5)
        for _ in range(2):
            with together.linearized():
                for _ in range(2):
                    assert error(together @ V, alone @ V) <= 1e-10
    mine = ALL["gradients"].build(few)
    assert error(mine.dense(), ALL["gradients"].build(replace(p, data=few.data)).dense()) <= 1e-10


class Failing(nn.Module):
    """Raises an error on one process, when asked to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and rank() == 1:
            raise KeyError("here")
        return x.tanh()


@check()
def errors() -> None:
    p = classifier(lambda: Net(Failing()))
    own = sharded(p)
    act = own.model.act
    for case in ("hessian", "ggn", "ggn-diagonal", "kfac", "gradients", "jacobian"):
        options = {"process_group": group()} if ALL[case].square else {}
        act.fails = False
        together = ALL[case].build(own, **options)
        alone = ALL[case].build(replace(p, data=own.data) if not options else p)
        v = vector(alone)
        act.fails = True
        with fails(KeyError, "here", on=1):
            together @ v
        with fails(KeyError, "here", on=1):
            ALL[case].build(own, **options)
        if case != "jacobian":
            with fails(KeyError, "here", on=1):
                together.gradient_and_loss()
        act.fails = False
        assert error(together @ v, alone @ v) <= 1e-10
    data = own.data
    if rank() == 1:
        X, y = data[0]
        data = [(X * torch.nan, y)]
    with fails(ValueError, "batch 0", on=1):
        ALL["gradients"].build(replace(own, data=data), check_deterministic=False).dense()


# --- what is kept, and what stays -----------------------------------------------------------------


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

    p = classifier(wide)
    own = sharded(p)
    data = Counting(own.data)
    for case in ("hessian", "ggn"):
        # activations of all batches fit, but not the weight of one layer
        A = ALL[case].build(replace(own, data=data), process_group=group(), cache=8 * num**2)
        with A.linearized():
            A @ vector(A)
            data.passes = 0
            A @ vector(A)
            assert data.passes == 0


class Watching(nn.Linear):
    """Counts its weights that are in memory."""

    alive = 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        Watching.alive += 1
        weakref.finalize(weight.untyped_storage(), Watching.forget)
        Watching.most = max(Watching.most, Watching.alive)
        return nn.functional.linear(x, weight, self.bias)

    most = 0

    @classmethod
    def forget(cls) -> None:
        cls.alive -= 1


@check()
def few_parameters_are_in_memory() -> None:
    def deep() -> nn.Module:
        layers = (nn.Sequential(LoRA(Watching(3, 3), 3, 3), nn.Tanh()) for _ in range(8))
        return nn.Sequential(*layers)

    p = classifier(deep)
    own = sharded(p)
    Watching.most = Watching.alive = 0
    for case in ("hessian", "ggn", "fisher", "kfac"):
        A = ALL[case].build(own, process_group=group())
        A @ vector(A)
        A @ vector(A, 2)
    assert 0 < Watching.most <= 2
    assert Watching.alive == 0


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


@check()
def training() -> None:
    p = classifier()
    own, other = sharded(p), sharded(p)
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
    compare(p, ("ggn",), own)


@check()
def parameters_that_are_whole_for_a_while() -> None:
    """FSDP keeps the root's parameters whole from a forward pass to the next backward pass."""
    p = classifier()
    model = copy.deepcopy(p.model)
    own = replace(p, model=model, params=adapters(model), data=part(p.data))
    fully_shard(model, ignored_params=set(own.params.values()))
    X, y = p.data[0]
    loss = p.loss(model(X), y)
    assert not any(isinstance(x, DTensor) for x in model.parameters())
    compare(p, ("hessian", "kfac"), own)
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


# --- what is refused ------------------------------------------------------------------------------


@check()
def refused() -> None:
    p = classifier()
    own = sharded(p)
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
    with fails(TypeError, "The model is sharded with a MixedPrecisionPolicy"):
        half = sharded(p, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        ALL["hessian"].build(half, process_group=group())
    even = classifier(
        lambda: nn.Sequential(LoRA(nn.Linear(3, 4), 3, 4), LoRA(nn.Linear(4, 3), 4, 3))
    )
    with fails(TypeError, "'1.layer.weight' has the placements.*first axis"):
        columns = sharded(even, shard_placement_fn=lambda x: Shard(x.shape[1:].count(4)))
        ALL["hessian"].build(columns, process_group=group())

    with fails(TypeError, r"'lstm' \(LSTM\)"):
        ALL["hessian"].build(sharded(classifier(Recurrent)), process_group=group())
    with fails(ValueError, "'act' .*SyncBatchNorm in train mode"):
        synchronized = classifier(lambda: Net(nn.SyncBatchNorm(5)))
        ALL["hessian"].build(sharded(synchronized), process_group=group())
    tensor_parallel = classifier()
    layer = parallelize_module(
        tensor_parallel.model.head, init_device_mesh("cpu", (2,)), ColwiseParallel()
    )
    chosen = {n: x for n, x in tensor_parallel.params.items() if not n.startswith("head")}
    assert isinstance(layer.weight, DTensor)
    with fails(TypeError, "'head' is parallelized"):
        ALL["hessian"].build(replace(tensor_parallel, params=chosen), process_group=group())
    later = classifier()
    A = ALL["hessian"].build(replace(later, data=part(p.data)), process_group=group())
    fully_shard(later.model, ignored_params=set(later.params.values()))
    with fails(ValueError, "sharded since the operator was built"):
        A @ vector(A)


if __name__ == "__main__":
    parallel_checks.main(CHECKS, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
