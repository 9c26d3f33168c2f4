"""Autograd functions and hooks of the user's, in models and losses: right, or refused by name."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from contract import CASES, Case, error, matrix, vectors
from models import Using
from problems import Problem
from small import CE, batches
from tables import core, in_turns
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from curvlinops import HessianLinearOperator

SECOND_ORDER = ["hessian", "ggn", "jacobian"]
FIRST_ORDER = ["fisher", "fisher-samples", "gradients"]


def net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return two layers, and a function between them."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 4), nn.Linear(4, 3)
    return Using(between(function), first=first, second=second).double()


def between(function: Callable[[Tensor], Tensor]) -> Callable[[Using, Tensor], Tensor]:
    return lambda s, x: s.second(function(s.first(x)))


DATA = batches(4, 2)


def problem(model: nn.Module, data: list = DATA, loss: Any = CE, **options: Any) -> Problem:
    dtype = next(model.parameters()).dtype
    data = [(X.to(dtype), y) for X, y in data]
    return Problem.of(model, loss, data, **options)


def agrees(case: Case, found: Problem, expected: Tensor, tolerance: float, **options: Any) -> None:
    """Compare all columns at once, and single ones, for which forward mode is tried first."""
    A = case.build(found, **options)
    eye = torch.eye(A.shape[1], dtype=A.torch_dtype)
    assert error(matrix(A), expected) <= tolerance
    for column in (0, A.shape[1] - 1):
        scale = max(1.0, float(expected.norm()) / (float(expected[:, column].norm()) or 1.0))
        assert error(A @ eye[column], expected[:, column]) <= scale * tolerance


# --- functions that are right


class Custom(torch.autograd.Function):
    """A sine, with a backward that is differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor | None:
        return g * ctx.saved_tensors[0].cos()


class Tanh(Custom):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Square(torch.autograd.Function):
    """Written for ``torch.func``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class Tangent(Custom):
    """Has a derivative of forward mode, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_forward(x)
        return Custom.forward(ctx, x)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return t * ctx.saved_tensors[0].cos()


class WrongTangent(Tangent):
    """Reverse mode does not need it."""

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 2 * t


class Pair(torch.autograd.Function):
    """Two outputs, whose gradients may be missing, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power, x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        parts = [] if g is None else [g * ctx.power * x ** (ctx.power - 1)]
        parts += [] if h is None else [h * x.cos()]
        return sum(parts) if parts else None, None


#: A function, and the same by PyTorch.
RIGHT: dict[str, tuple[Callable, Callable]] = {
    "saves its input": (Custom.apply, torch.sin),
    "saves its output": (Tanh.apply, torch.tanh),
    "has a rule for vmap": (Square.apply, torch.square),
    "has a tangent": (Tangent.apply, torch.sin),
    "has a wrong tangent": (WrongTangent.apply, torch.sin),
    "two outputs": (lambda x: sum(Pair.apply(x, 3)), lambda x: x**3 + x.sin()),
    "two outputs, one used": (lambda x: Pair.apply(x, 2)[0], lambda x: x**2),
}


DTYPES = torch.float64, torch.float32
PRECISE, ROUNDED = (torch.float64, 1e-12), (torch.float32, 1e-5)


@pytest.mark.parametrize(
    "name, dtype, tolerance",
    core(
        [*((name, *PRECISE) for name in RIGHT), ("saves its input", *ROUNDED)],
        ((name, *ROUNDED) for name in RIGHT),
    ),
)
def test_right_functions(name: str, dtype: torch.dtype, tolerance: float):
    function, twin = RIGHT[name]
    found, plain = (problem(net(f).to(dtype)) for f in (function, twin))
    for case in map(CASES.get, (*SECOND_ORDER, *FIRST_ORDER)):
        agrees(case, found, case.dense(plain), tolerance)


# --- functions whose backward cannot be differentiated


class Forgetful(Custom):
    """Keeps a tensor outside of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.cos = x.detach().cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.cos


class Detaching(Custom):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.detach() * ctx.saved_tensors[0].cos()


class Leaving(Custom):
    """Computes with NumPy."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, g = ctx.saved_tensors[0].detach().numpy(), g.detach().numpy()
        return torch.from_numpy(g * torch.from_numpy(x).cos().numpy())


class Inner(Custom):
    """Differentiates without a graph."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, g)[0]


class Once(Custom):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


@torch.library.custom_op("curvlinops_test::times", mutates_args=())
def times(x: Tensor, y: Tensor) -> Tensor:
    """An opaque kernel: PyTorch knows no derivative."""
    return x * y


class Opaque(Custom):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return times(g, ctx.saved_tensors[0].cos())


class Writing(Custom):
    """Writes to its own memory, as fused losses do."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].detach()
        return torch.mul(g, x.cos(), out=torch.empty_like(x))


#: The functions, all of them sines, and the operators that differentiate their backward pass.
WRONG: dict[type[torch.autograd.Function], list[str]] = {
    Forgetful: ["hessian"],  # as a function of the gradient it is right
    **dict.fromkeys((Detaching, Leaving, Inner, Once, Opaque, Writing), SECOND_ORDER),
}
REFUSED = r"custom autograd\.Function"


def refused(case: str, p: Problem, match: str = REFUSED, **options: Any) -> None:
    for columns in ((), (2,)):  # forward mode is tried for one column
        A = CASES[case].build(p, **options)
        with pytest.raises(RuntimeError, match=match):
            A @ vectors(A, *columns)


@pytest.mark.parametrize("function", WRONG)
def test_wrong_functions(function: type[torch.autograd.Function]):
    found, plain = problem(net(function.apply)), problem(net(torch.sin))
    for case in SECOND_ORDER:
        if case in WRONG[function]:
            refused(case, found, f"{REFUSED}.*{function.__name__}")
        else:
            agrees(CASES[case], found, CASES[case].dense(plain), 1e-12)


@pytest.mark.parametrize("function", WRONG)
def test_first_order_needs_no_second_derivative(function: type[torch.autograd.Function]):
    data = batches(0, 4, 2)
    found, plain = problem(net(function.apply), data), problem(net(torch.sin))
    for case in map(CASES.get, FIRST_ORDER):
        agrees(case, found, case.dense(plain), 1e-12)
    rows = CASES["gradients"].build(found)
    expected = reference.per_sample_gradients(plain)
    assert error(rows.dense(), expected) <= 1e-12
    assert error(rows.norms(), expected.norm(dim=1)) <= 1e-12
    with rows.linearized():
        for _ in range(2):
            assert error(matrix(rows), expected) <= 1e-12


@pytest.mark.parametrize("function", WRONG)
def test_wrong_functions_that_are_hard_to_see(function: type[torch.autograd.Function]):
    def on_later_batches(h: Tensor) -> Tensor:
        return function.apply(h) if len(h) == 2 else h.sin()

    def on_one_unit(h: Tensor) -> Tensor:
        return torch.cat([function.apply(h[:, :1]), h[:, 1:].sin()], 1)

    def barely(h: Tensor) -> Tensor:
        return 0.01 * function.apply(h) + 0.99 * h.sin()

    for place in (on_later_batches, on_one_unit, barely):
        for case in WRONG[function]:
            refused(case, problem(net(place)))


# --- functions in a small part of the model


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = x.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return p * (g - (g * p).sum(-1, keepdim=True))


def gated(f: Callable, share: float) -> tuple[Callable, dict[str, nn.Module]]:
    """Add a share of a layer to a network."""
    layers = {"one": nn.Linear(3, 8), "two": nn.Linear(8, 3), "side": nn.Linear(3, 3)}
    return lambda s, x: s.two(s.one(x).tanh()) + share * f(s.side(x)), layers


def adapted(f: Callable, share: float) -> tuple[Callable, dict[str, nn.Module]]:
    """Add a share of an adapter to a layer; it is behind another layer, as in a residual."""
    layers = {"one": nn.Linear(3, 8), "side": nn.Linear(8, 8), "two": nn.Linear(8, 3)}

    def forward(s: Using, x: Tensor) -> Tensor:
        h = s.one(x).tanh()
        return s.two(h + share * f(s.side(h)))

    return forward, layers


def attending(f: Callable, share: float) -> tuple[Callable, dict[str, nn.Module]]:
    """Attend to three inputs; the gradient of the keys' bias is zero but for rounding."""
    layers = {name: nn.Linear(4, 4) for name in ("q", "k", "v")} | {"last": nn.Linear(4, 3)}

    def forward(s: Using, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1) * x.new_ones(4).cumsum(0)
        p = Softmax.apply(s.q(x) @ s.k(x).mT)
        h = p @ s.v(x)
        return s.last((h + share * f(h)).mean(1))

    return forward, layers


PARTS = {"gate": gated, "adapter": adapted, "attention": attending}
SHARES_OF_PARTS = [1.0, 1e-1, 1e-2, 1e-3, 1e-5, 1e-8]
FEW_SHARES = [1.0, 1e-3, 1e-8]


def with_part(part: str, f: Callable, share: float, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    forward, layers = PARTS[part](f, share)
    return problem(Using(forward, **layers).to(dtype), batches(20, 20))


@pytest.mark.parametrize(
    "part, function, share, dtype",
    core(
        [
            *in_turns(product(["gate"], [Detaching], FEW_SHARES), DTYPES),
            *product(["adapter"], [Detaching, Forgetful], FEW_SHARES, DTYPES[:1]),
        ],
        product(["gate", "adapter"], [Detaching, Forgetful], SHARES_OF_PARTS, DTYPES),
    ),
)
def test_wrong_functions_in_small_parts(
    part: str, function: type[torch.autograd.Function], share: float, dtype: torch.dtype
):
    """Total norms hide them, though a block is wrong entirely."""
    for case in WRONG[function]:
        # rounding errors of gradients are larger than what smaller parts change in float32
        if case != "hessian" or dtype == torch.float64 or share >= 1e-3:
            refused(case, with_part(part, function.apply, share, dtype), function.__name__)


@pytest.mark.parametrize(
    "part, share, dtype",
    core(in_turns(product(PARTS, FEW_SHARES), DTYPES), product(PARTS, SHARES_OF_PARTS, DTYPES)),
)
def test_right_functions_in_small_parts(part: str, share: float, dtype: torch.dtype):
    """They are compared without a warning, also where a true gradient is zero."""
    found, plain = (with_part(part, f, share, dtype) for f in (Custom.apply, torch.sin))
    for case in map(CASES.get, ("hessian", "ggn")):
        A, B = case.build(found), case.build(plain)
        v = vectors(A)
        assert error(A @ v, B @ v) <= 1e3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case, function", [(c, f) for f, cases in WRONG.items() for c in cases])
def test_functions_without_an_effect_at_first(case: str, function: type[torch.autograd.Function]):
    """A head of zeros hides them, as a model's often does before its first training step."""
    model, plain = net(function.apply), net(torch.sin)
    for part in (model, plain):
        nn.init.zeros_(part.second.weight)
    A, expected = CASES[case].build(problem(model)), CASES[case].dense(problem(plain))
    v = vectors(A)
    with pytest.raises(RuntimeError, match=REFUSED):
        assert error(A @ v, expected @ v) <= 1e-12
        nn.init.normal_(model.second.weight)
        A @ v


@pytest.mark.parametrize("function", [Custom, Detaching])
@pytest.mark.parametrize("case", SECOND_ORDER)
def test_functions_in_checkpoints(case: str, function: type[torch.autograd.Function]):
    """The comparison recomputes them, with calls that the package replaces."""

    def inner(h: Tensor) -> Tensor:
        x = h[:, None, :, None]
        return function.apply(F.scaled_dot_product_attention(x, x, x)[:, 0, :, 0])

    found = problem(net(lambda h: checkpoint(inner, h, use_reentrant=False)))
    if function is Detaching:
        refused(case, found, REFUSED)
        return

    def plain(h: Tensor) -> Tensor:
        return (h.unsqueeze(2) * h.unsqueeze(1)).softmax(-1).matmul(h.unsqueeze(2)).squeeze(2).sin()

    A, B = (CASES[case].build(p) for p in (found, problem(net(plain))))
    assert error(matrix(A), matrix(B)) <= 1e-12


def test_functions_that_come_later():
    model = net(Custom.apply)
    H = CASES["hessian"].build(problem(model))
    v = vectors(H)
    H @ v
    model._function = between(Forgetful.apply)
    with pytest.raises(RuntimeError, match="Forgetful"):
        H @ v


def test_functions_in_functions_of_parameters():
    params, (X, y) = {"w": torch.randn(3, 3)}, (torch.randn(4, 3), torch.randn(4, 3))
    model = lambda p, X: Forgetful.apply(X @ p["w"])  # noqa: E731
    H = HessianLinearOperator(model, nn.MSELoss(), params, [(X, y)])
    with pytest.raises(RuntimeError, match="Forgetful"):
        H @ vectors(H)


@pytest.mark.parametrize("case", SECOND_ORDER)
def test_a_graph_is_compared_once(case: str):
    """Later products evaluate the model once on each batch."""
    calls = []
    model = net(lambda h: calls.append(len(h)) or Custom.apply(h))
    model.unused = nn.Linear(2, 2).double()
    A = CASES[case].build(problem(model))
    for number in range(3):
        calls.clear()
        A @ vectors(A, 2)
        assert calls == [4, 2] or not number


# --- derivatives that are meant to be others


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (2 * x).round() / 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reverse(torch.autograd.Function):
    """Reverses gradients, as adversarial training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def hooked(x: Tensor) -> Tensor:
    x = x.sin()
    x.register_hook(lambda g: 3 * g)
    return x


def scaled(x: Tensor) -> Tensor:
    """Scales the gradient by a hook of a module."""
    inner = nn.Tanh()
    inner.register_full_backward_hook(lambda m, inputs, outputs: (3 * inputs[0],))
    return inner(x)


def instead(value: Tensor, gradient: Tensor) -> Tensor:
    """Return a tensor with the gradient of another one."""
    return value.detach() + gradient - gradient.detach()


#: A function, the same by ``detach``, and its name in messages.
MEANT: dict[str, tuple[Callable, Callable, str]] = {
    "straight through": (Round.apply, lambda x: instead((2 * x).round() / 2, x), "Round"),
    "reversed": (Reverse.apply, lambda x: instead(x, -x), "Reverse"),
    "hook": (hooked, lambda x: instead(x.sin(), 3 * x.sin()), "hook"),
    "hook of a module": (scaled, lambda x: instead(x.tanh(), 3 * x.tanh()), "BackwardHook"),
}


@pytest.mark.parametrize("name", MEANT)
def test_gradients_that_are_meant(name: str):
    function, twin, word = MEANT[name]
    found, plain = problem(net(function)), problem(net(twin))
    refused("hessian", found, f"hook that changes gradients.*{word}.*check_deterministic=False")
    # products are backward passes through autograd's gradient, whose derivative is not symmetric
    expected = reference.hessian(found).T
    agrees(CASES["hessian"], found, expected, 1e-12, check_deterministic=False)
    for case in map(CASES.get, ("ggn", "jacobian", *FIRST_ORDER)):
        for check in (True, False):
            agrees(case, found, case.dense(plain), 1e-12, check_deterministic=check)


def test_unchecked_functions_are_used_as_they_are():
    """By request: what lacks is taken for zero."""
    A = CASES["hessian"].build(problem(net(Forgetful.apply)), check_deterministic=False)
    plain = net(lambda x: instead(x.sin(), x * x.detach().cos()))
    assert error(matrix(A), reference.hessian(problem(plain)).T) <= 1e-12


# --- losses


class Saved(torch.autograd.Function):
    """Cross-entropy that computes its gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward((z.softmax(1) - F.one_hot(y, z.shape[1])) / len(y))
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


class Kept(Saved):
    """Keeps it in an attribute."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.p, ctx.y = z.softmax(1), y
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * (ctx.p - F.one_hot(ctx.y, ctx.p.shape[1])) / len(ctx.y), None


class Differentiating(Saved):
    """Calls autograd in its backward pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(z, y)
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        z, y = ctx.saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            return g * torch.autograd.grad(F.cross_entropy(z, y), z)[0], None


class Recomputed(Differentiating):
    """Recomputes the softmax, differentiably."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        z, y = ctx.saved_tensors
        return g * (z.softmax(1) - F.one_hot(y, z.shape[1])) / len(y), None


def mixed(function: type[torch.autograd.Function], share: float) -> Callable:
    """Return a cross-entropy, a share of it by a function."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return share * function.apply(z, y) + (1 - share) * F.cross_entropy(z, y)

    return loss


FUSED = [Saved, Kept, Differentiating]


@pytest.mark.parametrize(
    "function, share, dtype",
    core(
        in_turns(product(FUSED, [1.0, 0.05]), [*DTYPES, *DTYPES[::-1]]),
        product(FUSED, [1.0, 0.5, 0.2, 0.1, 0.05], DTYPES),
    ),
)
def test_fused_losses(function: type[torch.autograd.Function], share: float, dtype: torch.dtype):
    for case in ("hessian", "ggn"):
        found = problem(net(torch.tanh).to(dtype), loss=mixed(function, share), reduction="mean")
        refused(case, found, f"{REFUSED}.*{function.__name__}")


@pytest.mark.parametrize("function", FUSED)
def test_first_derivatives_of_fused_losses(function: type[torch.autograd.Function]):
    """The empirical Fisher and gradients of samples need the gradient only."""
    found = problem(net(Once.apply), loss=mixed(function, 0.5), reduction="mean")
    for case in map(CASES.get, ("fisher", "gradients")):
        agrees(case, found, case.dense(problem(net(torch.sin))), 1e-12)


@pytest.mark.parametrize("function, twin", [(torch.tanh, torch.tanh), (Custom.apply, torch.sin)])
def test_losses_with_right_functions(function: Callable, twin: Callable):
    found = problem(net(function), loss=mixed(Recomputed, 0.5), reduction="mean")
    for case in map(CASES.get, ("hessian", "ggn", "fisher", "gradients")):
        agrees(case, found, case.dense(problem(net(twin))), 1e-12)


class Power(torch.autograd.Function):
    """The sum of fourth powers."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.pow(4).sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 4 * g * ctx.saved_tensors[0].pow(3)


class WrongPower(Power):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Power.backward(ctx, g).detach()


def of_last(function: Callable, share: float) -> Callable:
    """Return a squared error, and a share of a function of the last output."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return z[:, :2].square().sum() + share * function(z[:, 2])

    return loss


@pytest.mark.parametrize(
    "sizes, share, dtype",
    core(
        [*product([(4, 2)], FEW_SHARES, DTYPES), *product([(1,)], FEW_SHARES, DTYPES[:1])],
        product([(4, 2), (1,)], SHARES_OF_PARTS, DTYPES),
    ),
)
def test_functions_of_one_output_in_losses(sizes: tuple, share: float, dtype: torch.dtype):
    def found(function: Callable) -> Problem:
        options = {"loss": of_last(function, share), "reduction": "sum"}
        return problem(net(torch.tanh).to(dtype), batches(*sizes), **options)

    for case in ("hessian", "ggn"):
        if dtype == torch.float64 or share >= 1e-3:  # others vanish in rounding errors
            refused(case, found(WrongPower.apply), f"{REFUSED}.*WrongPower")
        right, plain = (CASES[case].build(found(f)) for f in (Power.apply, lambda z: (z**4).sum()))
        v = vectors(right)
        assert error(right @ v, plain @ v) <= 1e3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_with_kinks_and_confident_outputs(dtype: torch.dtype, scale: float):
    """Differences tell little there; a right function is no error."""

    class Clipped(Power):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            ctx.save_for_backward(z)
            return F.huber_loss(z, torch.zeros_like(z), reduction="sum")

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0].clamp(-1, 1)

    losses = [
        (lambda z, y: Clipped.apply(z), lambda z, y: F.huber_loss(z, 0 * z, reduction="sum")),
        (lambda z, y: Recomputed.apply(z, y) * len(y), lambda z, y: len(y) * F.cross_entropy(z, y)),
    ]
    for size in (1, 40):
        model = nn.Linear(3, 50).to(dtype)
        nn.init.normal_(model.weight, std=scale)
        X, y = torch.randn(size, 3, dtype=dtype), torch.randint(50, (size,))
        for pair in losses:
            options = {"reduction": "sum", "mc": False}
            params = list(model.parameters())
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*differences are too inaccurate")
                A, B = (
                    CASES["ggn"].build(Problem(model, loss, params, [(X, y)], **options))
                    for loss in pair
                )
                v = vectors(A)
                assert float((A @ v - B @ v).norm()) <= 1e-4 * max(1.0, float((B @ v).norm()))


@pytest.mark.parametrize("check", [True, False])
def test_losses_are_compared_in_any_case(check: bool):
    """A GGN without curvature is never what is meant."""
    p = problem(net(torch.tanh), loss=mixed(Saved, 1.0), reduction="mean")
    refused("ggn", p, f"{REFUSED}.*Saved", check_deterministic=check)


@pytest.mark.parametrize("case", ["ggn", "jacobian"])
def test_precision_inside_of_the_model_counts(case: str):
    def half(function: Callable) -> nn.Module:
        model = net(function).float()

        def forward(s: Using, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return between(function)(s, x).float()

        model._function = forward
        return model

    A, B = (CASES[case].build(problem(half(f))) for f in (Custom.apply, torch.sin))
    v = vectors(A)
    assert error(A @ v, B @ v) <= 5e-2  # eight bits of mantissa
