"""Numbers do not depend on PyTorch's ambient modes, the default device and other threads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import problems
import pytest
import torch
from contract import ALL, vectors
from models import Using
from quantities import ALGORITHMS, METHODS
from small import SQUARE, batches, build, mlp
from tables import core
from torch import Tensor, nn

import curvlinops as C

PROBLEM = "float32-mlp"


def half() -> torch.autocast:
    """Return an autocast under which float32 matrices would be multiplied in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


def meta() -> torch.device:
    """Return another default device; tensors that lie there by mistake have no values."""
    return torch.device("meta")


def spd(size: int, seed: int = 0) -> Tensor:
    """Return a well-conditioned symmetric matrix in float32."""
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return root @ root.T + size * torch.eye(size)


def same(found: Any, expected: Any) -> bool:
    """Return whether results are equal, dtypes included."""
    if isinstance(expected, Tensor):
        alike = found.dtype == expected.dtype and not found.is_inference()
        return alike and torch.equal(found, expected)
    if isinstance(expected, dict):
        return same(list(found.values()), list(expected.values()))
    if isinstance(expected, list | tuple):
        return all(same(one, two) for one, two in zip(found, expected, strict=True))
    return found == expected


MODES: dict[str, Callable] = {
    "no_grad": torch.no_grad,
    "autocast": half,
    "inference": torch.inference_mode,
    "default device": meta,
}


@pytest.mark.parametrize(
    "case, mode, problem",
    core(product(ALL, MODES, [PROBLEM]), product(ALL, MODES, ["tokens-bce-sum"])),
)
def test_products(case: str, mode: str, problem: str):
    p, mode = problems.make(problem), MODES[mode]
    operator = ALL[case].build(p)
    v, V = vectors(operator), vectors(operator, 3)
    expected = operator @ v, operator @ V
    assert not expected[0].requires_grad
    with mode():
        inside = ALL[case].build(p)
        assert same((inside @ v, inside @ V, operator @ v), (*expected, expected[0]))
    assert same(inside @ V, expected[1])
    with operator.linearized():
        kept = operator @ v, operator @ V
        with mode():
            assert same((operator @ v, operator @ V), kept)


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("mode", [half, meta])
@pytest.mark.parametrize("case", ALL)
def test_gradients_with_respect_to_vectors(case: str, mode: Callable, columns: tuple[int, ...]):
    operator = ALL[case].build(problems.make(PROBLEM))
    x, ones = vectors(operator, *columns).requires_grad_(), torch.ones(operator.shape[0], *columns)
    with mode():
        (operator @ x).sum().backward()
    assert torch.allclose(x.grad, operator.T @ ones, rtol=1e-4, atol=1e-5)


MADE, SPD = problems.make(PROBLEM), [spd(20, seed) for seed in (0, 1)]


def _kfac() -> C.KFACLinearOperator:
    return ALL["kfac"].build(MADE)


def _computed(case: str, options: dict, function: Callable) -> Any:
    return function(ALL[case].build(MADE, **options))


def _solved(compute: Callable) -> Any:
    return compute(ALL["ggn"].build(MADE).damped(1.0))


COMPUTED: dict[str, Callable[[], Any]] = {
    **{name: partial(_computed, *method) for name, method in METHODS.items()},
    **{name: partial(_solved, compute) for name, compute in ALGORITHMS.items()},
    "matrices": lambda: C.CGInverseLinearOperator(SPD[0], preconditioner=SPD[1]).to_dense(),
    "dottest": lambda: C.dottest(SPD[0], seed=0),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_methods_and_algorithms(kind: str):
    expected = COMPUTED[kind]()
    for mode in MODES.values():
        with mode():
            found = COMPUTED[kind]()
        assert same(found, expected), mode


def test_autocast_inside_the_model_stays():
    def inner(s: Using, X: Tensor) -> Tensor:
        with half():
            return s.inner(X).float()

    model, X, y = Using(inner, inner=nn.Linear(4, 3)), torch.randn(6, 4), torch.randint(3, (6,))
    loss = nn.CrossEntropyLoss()
    arguments = (loss, list(model.parameters()), [(X, y)])
    G, full = (C.GGNLinearOperator(m, *arguments) for m in (model, model.inner))
    v = vectors(G)
    inside = G @ v
    assert not torch.allclose(inside, full @ v, rtol=1e-4)
    with half():
        assert torch.equal(G @ v, inside)


# --- inference mode


@pytest.mark.parametrize("case", ALL)
def test_made_in_inference_mode(case: str):
    """An operator made in inference mode works in the training that follows."""
    p = problems.make("mlp-ce-all-mean")
    v = vectors(ALL[case].build(p)).requires_grad_()
    (expected,) = torch.autograd.grad((ALL[case].build(p) @ v).sum(), v)
    with torch.inference_mode():
        operator = ALL[case].build(p)
    for context in (nullcontext, operator.linearized):
        with context():
            with torch.inference_mode():
                assert not (operator @ v).requires_grad
            (found,) = torch.autograd.grad((operator @ v).sum(), v)
        torch.testing.assert_close(found, expected)


def test_gradients_are_not_recorded_where_inference_is_all():
    scale = torch.tensor(0.1, requires_grad=True)
    with torch.inference_mode():
        assert _kfac().inverse(damping=scale).shape == _kfac().shape


# --- compiled functions that use operators


COMPILED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "hessian": lambda A, v: 2 * (A @ v),
    "kfac": lambda A, v: 2 * A.matvec(v) + A.rmatvec(A.matmat(v[:, None]))[:, 0].sum(),
}


@pytest.mark.extensive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's, at any graph break
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # nor in the test itself
@pytest.mark.parametrize("kind", COMPUTED)
def test_methods_and_algorithms_inside_of_compiled_functions(kind: str):
    torch._dynamo.reset()
    found = torch.compile(lambda: COMPUTED[kind](), backend="eager")()
    assert same(found, COMPUTED[kind]())


@pytest.mark.extensive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's, at any graph break
@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case: str):
    function = partial(COMPILED[case], ALL[case].build(problems.make("mlp-ce-all-mean")))
    x, y = (torch.ones(27, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = function(x)
    torch._dynamo.reset()
    found = torch.compile(function, backend="eager")(y)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward(), expected.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)


# --- threads


def slow(s: Using, X: Tensor) -> Tensor:
    time.sleep(1e-3)  # other threads have their turn
    return s.net(X)


@pytest.mark.parametrize("kind", [*SQUARE, C.KFACLinearOperator])
def test_several_threads_use_one_model(kind: type):
    model = Using(slow, net=mlp())
    params = [
        {name: scale * p.detach() for name, p in model.named_parameters()} for scale in (1.0, 2.0)
    ]
    operators = [build(kind, model, params=scaled) for scaled in params]
    v = torch.arange(31.0).cos().double()
    expected = [operator @ v for operator in operators]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda operator: operator @ v, 5 * operators))
    torch.testing.assert_close(found, 5 * expected)


def test_the_lock_is_released_after_an_error():
    data = batches(4)
    operator = build(C.GGNLinearOperator, mlp(), data)
    v = torch.ones(31)
    expected, pair = operator @ v, data[0]
    data[0] = (pair[0] * torch.nan, pair[1])
    with pytest.raises(ValueError, match="NaN"):
        operator @ v
    data[0] = pair
    with ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(lambda: operator @ v).result(20), expected)


class Stopping(nn.Linear):
    """Stops once, at most half a second, for another thread to get into its way."""

    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.events = SimpleNamespace(armed=False, reached=threading.Event())
        self.done = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.events.armed and not self.events.reached.is_set():
            self.events.reached.set()
            assert not self.done.wait(0.5)
        return super().forward(x)


def test_threads_change_nothing_inside_of_products():
    model = Stopping()
    operator = build(C.HessianLinearOperator, model)
    v = torch.arange(operator.shape[1], dtype=torch.float64)
    expected = operator @ v

    def other() -> None:
        model.events.reached.wait()
        operator.gradient_and_loss()
        model.done.set()

    model.events.armed = True
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(other)
        assert torch.equal(operator @ v, expected)
        done.result()
    assert model.done.is_set()
