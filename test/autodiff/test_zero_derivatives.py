"""Points at which PyTorch lacks a derivative, such as norms at zero: right, or refused by name.

Some derivatives are smooth in mathematics, as that of ``x.norm() ** 2`` at zero, and some do not
exist. Hessians are compared with central differences of the gradient, which see both.
"""

import re
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from contract import CASES, error, matrix
from models import Using
from problems import Problem
from tables import core
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    PerSampleGradientLinearOperator,
    TorchLinearOperator,
)

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 1, 0])
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
precisions = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
ONE = next(iter(TOLERANCES))
#: Says of which parameter (products with outputs have none), and what helps.
REFUSED = r"is not finite( in parameter '{}')?, though.*does not exist.*x\.square\(\)\.sum\(\)"


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def differences(model: nn.Module, loss: Callable) -> Tensor:
    """Return the Hessian by central differences of the gradient."""
    params = trained(model)
    theta, eps = nn.utils.parameters_to_vector(params).detach(), 1e-5

    def gradient(step: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(theta + step, params)
        grads = torch.autograd.grad(loss(model(X), Y), params, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])

    steps = eps * torch.eye(len(theta), dtype=torch.float64)
    rows = [(gradient(step) - gradient(-step)) / (2 * eps) for step in steps]
    nn.utils.vector_to_parameters(theta, params)
    return torch.stack(rows)


def is_right(build: Callable, expected: Tensor, tolerance: float, name: str = r"[\w.]+") -> bool:
    """Return whether products are right; ``False`` if they are refused, naming a parameter.

    For single vectors, the GGN takes forward mode.
    """
    try:
        assert error(matrix(build()), expected) <= tolerance
        A = build()
        for v in torch.randn(3, A.shape[1], dtype=A.torch_dtype):
            assert error(A @ v, expected @ v.double()) <= tolerance
    except ValueError as refusal:
        assert re.search(REFUSED.format(name), str(refusal))
        return False
    return True


# --- penalties on parameters


def net() -> nn.Module:
    """A network whose biases are zero, that of LayerNorm, too."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)]
    model = nn.Sequential(*layers).double()
    for layer in (model[0], model[3]):
        nn.init.zeros_(layer.bias)
    return model


def adapted() -> nn.Module:
    """A frozen layer with an adapter of low rank before its first step."""
    torch.manual_seed(0)
    parts = {"frozen": nn.Linear(3, 2).requires_grad_(False), "A": torch.randn(3, 2)}
    return Using(lambda s, x: s.frozen(x) + x @ s.A @ s.B, B=torch.zeros(2, 2), **parts).double()


#: A model, and its first parameter that is zero.
PENALIZED = {"biases": (net, "0.bias"), "adapters": (adapted, "B")}
ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda p: p.norm() ** 2,
    "norm, named": lambda p: torch.norm(p, p="fro").pow(2),
    "vector_norm": lambda p: torch.linalg.vector_norm(p) ** 2,
    "matrix_norm": lambda p: torch.linalg.matrix_norm(p.reshape(len(p), -1)) ** 2,
    "norms of rows": lambda p: p.reshape(len(p), -1).norm(dim=1).square().sum(),
    "dist": lambda p: torch.dist(p, torch.zeros_like(p)) ** 2,
    "pairwise_distance": lambda p: F.pairwise_distance(p[None], 0 * p[None], eps=0).square().sum(),
    "sqrt": lambda p: p.square().sum().sqrt() ** 2,
    "std": lambda p: p.std() ** 2,
}
SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda p: p.square().sum(),
    "power": lambda p: (p**2).sum(),
    "product": lambda p: p.flatten() @ p.flatten(),
    "mse_loss": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "norm to the fourth": lambda p: p.norm(4) ** 4,
    "variance": lambda p: p.var(),
}


FORMS = ROOTS | SQUARES


@pytest.mark.parametrize(
    "form, place, dtype",
    core(
        [*product(FORMS, ["biases"], [ONE]), *product(["norm", "square"], PENALIZED, TOLERANCES)],
        product(FORMS, PENALIZED, TOLERANCES),
    ),
)
def test_penalties(form: str, place: str, dtype: torch.dtype):
    make, name = PENALIZED[place]
    model = make()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + 0.1 * sum(map(FORMS[form], trained(model)))

    expected = differences(model, loss)
    model.to(dtype)
    data = [(X[:4].to(dtype), Y[:4]), (X[4:].to(dtype), Y[4:])]

    def build() -> TorchLinearOperator:
        return HessianLinearOperator(model, loss, trained(model), data, reduction="mean")

    assert is_right(build, expected, TOLERANCES[dtype], name) == (form in SQUARES)


# --- functions of outputs


@precisions
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("form", ["norm", "square"])
def test_losses_of_outputs_that_are_zero(form: str, kind: type, dtype: torch.dtype):
    """A head of zeros, whose squared output is penalized; the model is linear."""
    model = nn.Linear(3, 2).double()
    for param in model.parameters():
        nn.init.zeros_(param)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        squares = z.norm(dim=1) ** 2 if form == "norm" else z.square().sum(1)
        return F.cross_entropy(z, y) + squares.mean()

    expected = differences(model, loss)
    model.to(dtype)

    def build() -> TorchLinearOperator:
        return kind(model, loss, trained(model), [(X.to(dtype), Y)], reduction="mean")

    assert is_right(build, expected, TOLERANCES[dtype]) == (form == "square")


# --- functions inside of a model


def features(function: Callable[[Tensor], Tensor], values: list[float]) -> nn.Module:
    """Return a layer, a function of it, and another layer.

    Args:
        function: Of features ``[N, 4]``; returns ``[N, C]``.
        values: The features, which are those of all samples.
    """
    torch.manual_seed(0)
    first = nn.Linear(3, 4)
    nn.init.zeros_(first.weight)
    first.bias = nn.Parameter(torch.tensor(values))
    second = nn.Linear(function(first(torch.ones(2, 3))).shape[1], 2)
    return Using(lambda s, x: s.second(function(s.first(x))), first=first, second=second).double()


def distances(h: Tensor) -> Tensor:
    """Return the squared distances of four points on a line to each other."""
    return (torch.cdist(h.unsqueeze(2), h.unsqueeze(2)) ** 2).sum(2)


def square(h: Tensor) -> Tensor:
    return h.unflatten(1, (2, 2))


ZEROS, EQUAL, SPREAD = [0.0] * 4, [0.5] * 4, [0.5, -1.0, 2.0, 1.5]
#: A function, the features, and whether its Hessian is right.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], bool]] = {
    "norm": (lambda h: h.norm(dim=1, keepdim=True), ZEROS, False),
    "square of the norm": (lambda h: h.norm(dim=1, keepdim=True) ** 2, ZEROS, False),
    "sum of squares": (lambda h: h.square().sum(1, keepdim=True), ZEROS, True),
    "std": (lambda h: h.std(1, keepdim=True) ** 2, EQUAL, False),
    "variance": (lambda h: h.var(1, keepdim=True), EQUAL, True),
    "normalize": (lambda h: F.normalize(h, dim=1), SPREAD, True),
    "normalize zero": (lambda h: F.normalize(h, dim=1, eps=0.1), ZEROS, False),
    "layer_norm": (lambda h: F.layer_norm(h, (4,), eps=0.1), EQUAL, True),
    "cdist": (distances, SPREAD, False),
    "cdist of equal points": (distances, EQUAL, False),
    "pairwise_distance": (
        lambda h: F.pairwise_distance(h[:, :2], h[:, 2:], eps=0)[:, None] ** 2,
        EQUAL,
        False,
    ),
    "cosine_similarity": (
        lambda h: F.cosine_similarity(h[:, :2], h[:, 2:])[:, None],
        EQUAL,
        True,
    ),
    "hypot": (lambda h: torch.hypot(h[:, :2], h[:, 2:]) ** 2, ZEROS, False),
    **{
        f"{name} with {n} zeros": (function, [0.0] * n + SPREAD[n:], True)
        for name, function in {
            "prod": lambda h: h.prod(1, keepdim=True),
            "cumprod": lambda h: h.cumprod(1),
        }.items()
        for n in range(4)
    },
    "slogdet": (lambda h: torch.linalg.slogdet(square(h))[1][:, None], SPREAD, True),
    "logdet": (lambda h: torch.logdet(square(h) @ square(h).mT)[:, None], SPREAD, True),
    "det": (lambda h: torch.linalg.det(square(h))[:, None], SPREAD, True),
    "det of zeros": (lambda h: torch.linalg.det(square(h))[:, None], ZEROS, False),
    "logsumexp": (lambda h: h.logsumexp(1, keepdim=True), EQUAL, True),
}


@pytest.mark.parametrize(
    "name, dtype",
    core(
        [*product(FUNCTIONS, [ONE]), *product(["norm", "prod with 1 zeros"], TOLERANCES)],
        product(FUNCTIONS, TOLERANCES),
    ),
)
def test_functions(name: str, dtype: torch.dtype):
    function, values, is_smooth = FUNCTIONS[name]
    loss, tolerance = nn.CrossEntropyLoss(), TOLERANCES[dtype]
    exact, found = (
        Problem.of(model, loss, [(X.to(precision), Y)])
        for precision in (torch.float64, dtype)
        for model in [features(function, values).to(precision)]
    )
    hessian = differences(exact.model, loss)
    assert is_right(lambda: CASES["hessian"].build(found), hessian, tolerance) == is_smooth
    for case in map(CASES.get, ("ggn", "fisher", "jacobian", "gradients")):
        right = is_right(partial(case.build, found), case.dense(exact), tolerance)
        assert right or not is_smooth


def normalized(h: Tensor) -> Tensor:
    """Divide by the standard deviation, which is zero in a row where all units are dead."""
    h = torch.cat([h.relu()[:-1], 0 * h[-1:]])
    return (h - h.mean(1, keepdim=True)) / (h.std(1, keepdim=True) + 1e-3)


def angle(h: Tensor) -> Tensor:
    """Is not differentiable in forward mode at zero, where reverse mode gives zero."""
    return torch.atan2(h[:, :2], torch.cat([h[:, 2:3], h[:, 2:3] ** 2], 1))


@pytest.mark.parametrize("case", ["ggn", "jacobian"])
@pytest.mark.parametrize("function", [normalized, angle])
def test_jacobians_are_those_of_backward_passes(function: Callable, case: str):
    """They agree with the gradient that training uses, also where that is zero by definition."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4, bias=False), "last": nn.LazyLinear(2)}
    model = Using(lambda s, x: s.last(function(s.first(x))), **layers).double()
    X = torch.randn(5, 3).double()
    X[2] = 0
    outputs, params = model(X).flatten(), list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True) for z in outputs]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    data = [(X, torch.zeros(5, 2).double())]
    p = Problem(model, nn.MSELoss(reduction="sum"), params, data, mc=True)
    A, expected = CASES[case].build(p), 2 * J.T @ J if case == "ggn" else J
    v = torch.ones(A.shape[1]).double()
    torch.testing.assert_close(A @ v, expected @ v)
    torch.testing.assert_close(A.to_dense(), expected)
    with A.linearized():
        torch.testing.assert_close(A @ v, expected @ v)


def attending(h: Tensor) -> Tensor:
    """Attends to nothing in a row of zeros, as padding does, where 0 / 0 is made zero."""
    return h * torch.softmax(h.masked_fill(h == 0, -torch.inf), 1).nan_to_num(0.0)


#: Operators made of gradients, their options, and how they are made.
OF_GRADIENTS: dict[type, tuple[dict, Callable[[Tensor], Tensor]]] = {
    EFLinearOperator: ({}, lambda rows: rows.T @ rows / len(rows)),
    PerSampleGradientLinearOperator: ({"terms": "sample"}, lambda rows: rows),
}


@pytest.mark.parametrize("kind", [*OF_GRADIENTS, GGNLinearOperator])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_gradients_are_finite_where_products_with_graphs_are_not(chunk_size: int, kind: type):
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4, bias=False), "last": nn.Linear(4, 2)}
    model = Using(lambda s, x: s.last(attending(s.first(x))), **layers).double()
    X, y, params = torch.randn(5, 3).double(), torch.ones(5).long(), list(model.parameters())
    X[4] = 0
    rows = [torch.autograd.grad(F.cross_entropy(model(x[None]), y[:1]), params) for x in X]
    options, made_of = OF_GRADIENTS.get(kind, ({}, lambda rows: rows.T @ rows))
    expected = made_of(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))
    data = [(X[:3], y[:3]), (X[3:], y[3:])]

    def build() -> TorchLinearOperator:
        chunks = {"chunk_size": chunk_size}
        return kind(model, nn.CrossEntropyLoss(), params, data, **chunks, **options)

    one, A = torch.eye(expected.shape[1]).double(), build()
    if kind not in OF_GRADIENTS:
        with pytest.raises(ValueError, match="is not finite in parameter 'first.weight'"):
            A @ one
        return
    torch.testing.assert_close(A @ one, expected)
    torch.testing.assert_close(A @ one[0], expected[:, 0])
    B = build()
    with B.linearized():
        for v in (one[-1], one[0], one):  # the first one does not meet the zeros
            torch.testing.assert_close(B @ v, expected @ v)
