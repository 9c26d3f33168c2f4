"""Memory of construction, products and gradients of samples, and errors for want of memory."""

import gc
from contextlib import nullcontext
from itertools import product
from typing import NamedTuple

import pytest
import torch
from contract import ALL, vectors
from live_batches import WatchedBatches, check_batches_are_freed, saving_outputs
from live_bytes import LiveBytes
from models import Using
from problems import Problem
from small import CE, MSE, batches
from tables import core
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import curvlinops
from curvlinops import TorchLinearOperator


def deep(batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Layers whose tangents are composed of many operations."""
    layers = [m for _ in range(6) for m in (nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(batch, 64), torch.randn(batch, 64)


def gradient_peak(model: nn.Module, X: Tensor, y: Tensor) -> int:
    """Return the memory that one gradient needs."""
    params = list(model.parameters())
    loss = nn.functional.mse_loss
    return LiveBytes().peaks(lambda: torch.autograd.grad(loss(model(X), y), params))[0]


def build(
    case: str, model: nn.Module, X: Tensor, y: Tensor, batches: int = 1, loss: nn.Module = MSE
) -> TorchLinearOperator:
    return ALL[case].build(Problem.of(model, loss, [(X, y)] * batches))


@pytest.mark.parametrize("case", ALL)
def test_construction_needs_one_gradient_of_one_batch(case: str):
    build(case, *deep(10))  # a process keeps some tables
    model, X, y = deep(1000)
    live = LiveBytes()
    peaks = live.peaks(lambda: build(case, model, X, y, batches=3))
    assert max(peaks) <= 1.3 * gradient_peak(model, X, y)
    assert live.now <= 1000


def in_checkpoints(batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The same in checkpoints of three layers each, with a small graph."""
    model, X, y = deep(batch)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for part in m.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x

    return Using(forward, parts=nn.ModuleList(model[i : i + 3] for i in range(0, 18, 3))), X, y


#: Older versions of PyTorch have no forward mode in checkpoints, and need the way with more memory.
TANGENTS = pytest.mark.skipif(
    hasattr(torch.utils.checkpoint, "_NoopSaveInputs"), reason="no forward mode in checkpoints"
)


@pytest.mark.parametrize("make", [deep, pytest.param(in_checkpoints, marks=TANGENTS)])
@pytest.mark.parametrize("case", ["ggn", "fisher"])
def test_single_products_need_little_more_than_a_gradient(case: str, make):
    model, X, y = make(10000)
    operator = build(case, model, X, y)
    v = vectors(operator)
    assert max(LiveBytes().peaks(lambda: operator @ v)) <= 1.5 * gradient_peak(model, X, y)


def images() -> tuple[nn.Module, Tensor]:
    """A network of convolutions with more entries than activations."""
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(64, 160, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(160, 5)), torch.randn(900, 3, 8, 8)


def sequences() -> tuple[nn.Module, Tensor]:
    """A transformer with more entries than activations."""
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(256, 5)).eval(), torch.randn(900, 4, 64)


OF_ROWS = ["norms", "gram", "second_moment"]


@pytest.mark.parametrize(
    "case, keeps",
    core([("hessian", True), ("ggn", False)], product(["hessian", "ggn"], [False, True])),
)
def test_attention_takes_memory_linear_in_the_length(case: str, keeps: bool):
    def causal(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = m.layer(x).unsqueeze(1).chunk(3, -1)
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.head(z[:, 0, -1])

    model = Using(causal, layer=nn.Linear(4, 12), head=nn.Linear(4, 2))

    def peak(length: int) -> int:
        operator = build(case, model, torch.randn(1, length, 4), torch.randn(1, 2))
        with operator.linearized() if keeps else nullcontext():
            return max(LiveBytes().peaks(lambda: operator @ vectors(operator)))

    short, long = peak(1024), peak(3072)
    assert long <= 3.3 * short
    assert long <= 4 * 3072**2 / 4  # all weights take four times as much


@pytest.mark.parametrize(
    "make, quantity",
    core(
        [*product([images], OF_ROWS), (sequences, "norms")],
        product([images, sequences], OF_ROWS),
    ),
)
def test_no_memory_for_rows(make, quantity: str):
    model, X = make()
    params, y = list(model.parameters()), torch.randint(5, (len(X),))
    rows = curvlinops.PerSampleGradientLinearOperator(
        model, nn.CrossEntropyLoss(), params, [(X, y)], check_deterministic=False
    )
    _, peak = LiveBytes().peaks(getattr(rows, quantity))
    # temporary tensors are bounded, whatever N is; pairs of batches of rows need several
    most = 0.95 if quantity == "gram" else 0.6
    assert peak <= most * 4 * rows.shape[0] * rows.shape[1]


@pytest.mark.parametrize("cls", [curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator])
@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_products_with_factors_copy_none_of_them(fisher: str, cls: type):
    model = nn.Sequential(nn.Linear(400, 10), nn.Tanh(), nn.Linear(10, 400))
    data = [(torch.randn(8, 400), torch.randint(400, (8,))) for _ in range(2)]
    operator = cls(model, nn.CrossEntropyLoss(), list(model.parameters()), data, fisher_type=fisher)
    operator.compute_kronecker_factors()
    factors = sum(x.nbytes for x in operator.state_dict().values() if isinstance(x, Tensor))
    v, live = vectors(operator), LiveBytes()
    first, _ = live.peaks(lambda: operator @ v)
    assert first <= 5 * v.nbytes < factors / 2
    assert live.now <= 1000


@pytest.mark.parametrize("cls", [curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator])
def test_equal_layers_are_in_memory_once(cls: type):
    """Their factors become parts of stacks, a few at a time. Layers with one input share it."""
    layers = [nn.ModuleList([nn.Linear(200, 50), nn.Linear(200, 200)]) for _ in range(60)]

    def shared_inputs(m: nn.Module, x: Tensor) -> Tensor:
        for gate, layer in m.layers:
            x = torch.tanh(layer(x)) * torch.tanh(gate(x)).repeat(1, 4)
        return x

    model = Using(shared_inputs, layers=nn.ModuleList(layers))
    data = [(torch.randn(8, 200), torch.randn(8, 200))]
    operator = cls(model, nn.MSELoss(), list(model.parameters()), data, fisher_type="empirical")
    live = LiveBytes()
    live.peaks(operator.compute_kronecker_factors)
    before = live.now
    added, _ = live.peaks(lambda: operator.structure)
    assert added <= 4.2 * 2**20 < before / 3  # a stack
    assert live.now <= before + 1000


def in_linearized(G: TorchLinearOperator, v: Tensor) -> None:
    with G.linearized():
        G @ v
        G @ v


#: How many vectors are in memory at once: those of the algorithm, the result and the gradients of a
#: product, and what a backward pass holds on its way. No kept graph has gradients.
VECTORS = {
    "kept Hessian": ("hessian", in_linearized, 2.6),
    "kept GGN": ("ggn", in_linearized, 2.1),
    "CG": ("ggn", lambda G, v: curvlinops.CGInverseLinearOperator(G.damped(0.1)) @ v, 5.1),
    "XTrace, Hessian": ("hessian", lambda G, v: curvlinops.xtrace(G, 20), 45.1),
    "XTrace, GGN": ("ggn", lambda G, v: curvlinops.xtrace(G, 20), 40.1),
}


@pytest.mark.parametrize("case, run, most", VECTORS.values(), ids=VECTORS)
def test_few_vectors_at_once(case: str, run, most: float):
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400))
    G = build(case, model, torch.randn(2, 400), torch.randn(2, 400))
    v = vectors(G)
    assert max(LiveBytes().peaks(lambda: run(G, v))) <= most * v.nbytes


class Rows(NamedTuple):
    """A container that PyTorch opens, as the outputs of Hugging Face are."""

    rows: Tensor


def linearized(A: TorchLinearOperator) -> None:
    with A.linearized():
        A @ vectors(A)


def factors(A: TorchLinearOperator) -> None:
    A.compute_kronecker_factors()
    A.update(*A.data, 0.9)
    for options in ({}, {"use_exact_damping": True}):
        A.inverse(0.1, **options) @ vectors(A)
    A.damped(0.1).logdet()


USES = {"product": lambda A: A @ vectors(A), "linearized": linearized, "factors": factors}


@pytest.mark.parametrize(
    "case, run",
    core(
        [("ggn", "product"), ("hessian", "linearized"), ("kfac", "factors")],
        [(case, run) for case, run in product(ALL, USES) if run != "factors" or "kfac" in case],
    ),
)
def test_nothing_waits_for_the_garbage_collector(case: str, run: str):
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    model = Using(lambda m, X: m.body(X.rows), body=nn.Sequential(*layers))
    operator = build(case, model, Rows(torch.randn(5, 3)), torch.randn(5, 2))
    live, kept = LiveBytes(), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with live:
                USES[run](operator)
            kept.append(live.now)
        assert kept[1] == kept[2]  # the first use may fill caches
        gc.collect()
        assert live.now == kept[2]
    finally:
        gc.enable()


def test_batches_are_freed():
    torch.manual_seed(0)
    model, data = saving_outputs().double(), batches(4, 2)

    def build(case: str, data: WatchedBatches) -> TorchLinearOperator:
        return ALL[case].build(Problem(model, CE, dict(model.named_parameters()), data, mc=True))

    check_batches_are_freed(build, data)


# --- errors for want of memory


class Exhausted(nn.Module):
    """A model with an evaluation for which there is no memory."""

    def __init__(self, error: Exception, at: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.error, self.at = error, at

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(len(x))
        if len(RUNS) == self.at:
            raise self.error
        return self.layers(x)


RUNS: list[int] = []
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("case", ["hessian", "fisher", "gradients", "kfac"])
def test_want_of_memory_is_no_reason_to_do_something_else(case: str, error: Exception):
    data = torch.randn(40, 3).double(), torch.randint(2, (40,))

    def run(at: int) -> None:
        RUNS.clear()
        operator = build(case, Exhausted(error, at), *data, loss=CE)
        operator @ vectors(operator)
        if case == "gradients":
            operator.norms()

    run(0)
    for at in range(1, len(RUNS) + 1):
        with pytest.raises(type(error)) as raised:
            run(at)
        assert raised.value is error


class Scarce(TorchDispatchMode):
    """Has memory for tensors with so many entries."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.largest, self.failures = most, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        size = max((x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)), default=0)
        if size > self.most:
            self.failures += 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.largest = max(self.largest, size)
        return out


def test_fewer_columns_where_memory_is_scarce(caplog):
    """Each column needs 1000 numbers for each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    data = [(torch.randn(100, 2).double(), torch.randn(100, 1).double())]
    p = Problem.of(model, MSE, data)
    H, single = (ALL["hessian"].build(p, chunk_size=size) for size in (None, 1))
    V = torch.randn(H.shape[1], 16).double()
    expected = single @ V
    with H.linearized(), Scarce(5000) as memory:
        torch.testing.assert_close(H @ V, expected)
        assert memory.failures and memory.largest > 3000
        memory.failures = 0
        torch.testing.assert_close(H @ V, expected)
        assert not memory.failures
    assert "No memory for so many columns" in caplog.text


# --- what `linearized()` keeps


class Sine(torch.autograd.Function):
    """Saves a tensor, and keeps another one."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kept = [x.exp()]
        return x.sin()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class Shifted(nn.Module):
    """Has a large buffer, of which contexts of the user's code have copies."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.rand(600, 60))

    def forward(self, x: Tensor) -> Tensor:
        return Sine.apply(x + self.shift.mean(0))


def mlp() -> nn.Module:
    layers = nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 60), nn.GELU(), nn.Linear(60, 20)
    return nn.Sequential(*layers)


def frozen() -> nn.Module:
    """Weights that take no gradients are saved for those of others, and are the user's own."""
    model = nn.Sequential(mlp(), nn.Linear(20, 2000), nn.Tanh(), nn.Linear(2000, 20))
    return model.requires_grad_(False)


def powers(z: Tensor, y: Tensor) -> Tensor:
    return CE(z, y) + z.pow(4).mean()


def attending() -> nn.Module:
    """With so many samples that attention is computed in tiles."""
    layer = nn.TransformerEncoderLayer(10, 1, 20, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(50, 650), nn.Unflatten(1, (65, 10)), layer, nn.Flatten(), nn.Linear(650, 20)
    )


#: A model, the parameters that are differentiated, and a loss that keeps something else.
KEPT = {
    "mlp": (mlp, slice(None), CE),
    "loss of the user": (mlp, slice(None), powers),
    "user's code": (lambda: nn.Sequential(nn.Linear(50, 60), Shifted(), mlp()[4]), slice(None), CE),
    "normalization": (lambda: mlp().insert(1, nn.BatchNorm1d(60)).eval(), slice(None), CE),
    "frozen layers": (frozen, slice(2), CE),
    "attention": (attending, slice(None), CE),
}


@pytest.mark.parametrize(
    "kind, case",
    [
        *product(KEPT, ["hessian", "gradients"]),
        *product(["mlp", "frozen layers"], ["ggn", "mc", "fisher-samples", "ggn-diagonal"]),
    ],
)
def test_what_is_kept_counts_with_all_its_memory(kind: str, case: str, caplog):
    make, some, loss = KEPT[kind]
    if loss is powers and ALL[case].needs_root:
        return
    model, data = make(), [(torch.randn(300, 50), torch.randint(20, (300,))) for _ in range(2)]
    p = Problem(model, loss, list(model.parameters())[some], data, mc=True, reduction="mean")
    A = ALL[case].build(p)
    caplog.set_level("INFO", "curvlinops")
    for operator in [A] if ALL[case].square else [A, A.T]:
        v, live = vectors(operator), LiveBytes()
        operator @ v
        caplog.clear()
        with operator.linearized():
            with live:
                operator @ v
            gc.collect()
            inside = live.now
        gc.collect()
        messages = [record.args for record in caplog.records if "a batch takes" in record.msg]
        assert [fate for _, _, fate, _ in messages] == ["kept", "kept"]
        # data that the user has in memory may count, or not
        own = sum(x.nbytes for batch in data for x in batch)
        said, kept = 2**20 * sum(size for _, size, _, _ in messages), inside - live.now
        assert 0.99 * kept <= said <= 1.01 * (kept + own)
