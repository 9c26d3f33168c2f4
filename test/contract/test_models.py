"""Models of all kinds: against central differences, and against plain descriptions of the same."""

import copy
import functools
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import error, matrix
from models import Using, resnet, unet, vit
from small import MSE, SQUARE, batches, build, dense, mlp
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

# --- architectures as people use them


@pytest.mark.parametrize("make", [resnet, vit, unet])
def test_hessian_and_ggn(make):
    torch.manual_seed(0)
    model, X, y = make()
    model, X = model.double().eval(), X.double()
    params = list(model.parameters())
    loss = nn.CrossEntropyLoss()
    data = [(X[:1], y[:1]), (X[1:], y[1:])]
    H = HessianLinearOperator(model, loss, params, data)
    V = torch.randn(H.shape[1], 3, dtype=torch.float64)
    v, theta = V[:, 0], nn.utils.parameters_to_vector(params).detach()

    def gradient(at: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at, params)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss(model(X), y), params))

    eps = 1e-5
    slope = (gradient(theta + eps * v) - gradient(theta - eps * v)) / (2 * eps)
    nn.utils.vector_to_parameters(theta, params)
    assert (H @ v - slope).norm() <= 1e-6 * slope.norm()
    with H.linearized():
        for _ in range(2):
            torch.testing.assert_close((H @ V)[:, 0], H @ v, rtol=1e-8, atol=1e-10)

    G = GGNLinearOperator(model, loss, params, data)
    expected = torch.stack([G @ u for u in V.T], 1)  # by forward mode
    assert (G @ V - expected).norm() <= 1e-9 * expected.norm()


@pytest.fixture
def _process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "distributed": nn.parallel.DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "data-parallel": nn.DataParallel,
}


@pytest.mark.filterwarnings("ignore:.*does not support pickle:UserWarning")
@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_wrapped(kind: type, wrapper: str):
    torch.manual_seed(0)
    plain, X, y = unet()
    plain, X, loss = plain.double(), X.double(), nn.CrossEntropyLoss()
    model = WRAPPERS[wrapper](plain)
    A = kind(model, loss, list(model.parameters()), [(X, y)])
    B = kind(plain, loss, list(plain.parameters()), [(X, y)])
    V = torch.randn(A.shape[1], 2, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(A @ V, B @ V)
        torch.testing.assert_close(A @ V[:, 0], B @ V[:, 0])
        # the wrapper still trains, also between products
        loss(model(X), y).backward()
        expected = torch.autograd.grad(loss(plain(X), y), list(plain.parameters()))
        for param, grad in zip(plain.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad)
            param.grad = None
            param.data -= 0.1 * grad


# --- twins: two descriptions of one function

#: The arguments of ``build`` after the kind, by name: a special one, and a plain one.
TWINS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {}


def twins(function: Callable) -> Callable:
    TWINS[function.__name__] = function
    return function


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("name", TWINS, ids=str)
def test_twins(name: str, kind: type):
    """Many columns, and single ones, for which forward mode is tried first."""
    special, plain = TWINS[name]()
    expected = dense(kind, **plain)
    v = torch.arange(len(expected), dtype=torch.float64).cos()
    operator = build(kind, **special)
    with operator.linearized():
        kept = operator @ v
    assert error(kept, expected @ v) <= 1e-12
    assert error(operator @ v, expected @ v) <= 1e-12
    assert error(matrix(operator), expected) <= 1e-12
    assert not (operator @ v).requires_grad


def same(*models: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"model": models[0]}, {"model": models[1]}


def seeded(**models: Callable[[], nn.Module]) -> tuple[dict, dict]:
    """Return a special and a plain model with the same parameters."""
    made = []
    for make in models.values():
        torch.manual_seed(0)
        made.append(make().double())
    return same(*made)


def checkpointed(inner: nn.Module, active: bool = True) -> nn.Module:
    """Return a layer between two others, which is computed again in the backward pass."""

    def function(s: Using, x: Tensor) -> Tensor:
        x = s.stem(x)
        return s.head(checkpoint(s.inner, x, use_reentrant=False) if active else s.inner(x))

    return Using(function, stem=nn.Linear(3, 3), inner=inner, head=nn.Linear(3, 3))


def lstm() -> nn.Module:
    return Using(lambda s, x: s.cell(x.unsqueeze(1))[0][:, 0], cell=nn.LSTM(3, 3, batch_first=True))


def lookup() -> nn.Module:
    table = nn.Embedding(4, 3, padding_idx=0)
    return Using(lambda s, x: x * s.table((x[:, 0] > 0).long()), table=table)


#: Layers whose calls the package replaces in the forward pass, also when a checkpoint repeats it.
RECOMPUTED: dict[str, Callable[[bool], nn.Module]] = {
    "lstm": lambda _: lstm(),
    "embedding": lambda _: lookup(),
    "checkpoint": lambda active: checkpointed(nn.Tanh(), active),
}
TWINS |= {
    f"checkpointed {name}": lambda make=make: seeded(
        special=lambda: checkpointed(make(True)),
        plain=lambda: checkpointed(make(False), active=False),
    )
    for name, make in RECOMPUTED.items()
}


def steps(s: Using, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A step of a recurrence that uses a parameter, a replaced call, and operands."""
    carry = torch.sigmoid(s.a) * carry + F.gelu(x) * x
    return carry, carry.clone()


def repeated(s: Using, x: Tensor) -> Tensor:
    """The same with Python's loops: a recurrence over entries."""
    carry, outputs = torch.zeros_like(x[:, :1]), []
    for entry in x.split(1, 1):
        carry, out = steps(s, carry, entry)
        outputs.append(out)
    return torch.cat(outputs, 1)


def scanned(s: Using, x: Tensor) -> Tensor:
    x = x.T.unsqueeze(2)
    return scan(functools.partial(steps, s), torch.zeros_like(x[0]), x)[1][:, :, 0].T


#: PyTorch's operators that call functions, which use parameters, and the same in Python.
OF_FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "cond": (
        lambda s, x: torch.cond(x.sum() < 9e9, lambda x: x * s.a.sin(), lambda x: x * s.a, (x,)),
        lambda s, x: x * s.a.sin(),
    ),
    "map": (
        lambda s, x: torch_map(lambda column: s.a.tanh() * F.gelu(column), x.T).T,
        lambda s, x: s.a.tanh() * F.gelu(x),
    ),
    "scan": (scanned, repeated),
    "while_loop": (
        lambda s, x: while_loop(
            lambda n, x: n < 3, lambda n, x: (n + 1, s.a * x.sin()), (torch.tensor(0), x)
        )[1],
        lambda s, x: s.a * (s.a * (s.a * x.sin()).sin()).sin(),
    ),
    "associative_scan": (
        lambda s, x: associative_scan(torch.mul, s.a * x, 1, combine_mode="generic"),
        lambda s, x: (s.a * x).cumprod(1),
    ),
}


def around(function: Callable) -> nn.Module:
    inner = Using(function, a=torch.ones(1))
    return Using(
        lambda s, x: s.head(s.inner(s.stem(x))),
        stem=nn.Linear(3, 3),
        inner=inner,
        head=nn.Linear(3, 3),
    )


TWINS |= {
    f"{name} with a parameter": lambda pair=pair: seeded(
        special=lambda: around(pair[0]), plain=lambda: around(pair[1])
    )
    for name, pair in OF_FUNCTIONS.items()
}


class Ensemble(nn.Module):
    """PyTorch's recipe for ensembles, whose base has no numbers of its own."""

    def __init__(self, device: str):
        super().__init__()
        nets = [mlp() for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(nets)
        self.params = nn.ParameterList(nn.Parameter(x.detach()) for x in stacked.values())
        self.names, vars(self)["base"] = [*stacked], copy.deepcopy(nets[0]).to(device)

    def forward(self, x: Tensor) -> Tensor:
        def one(params: dict) -> Tensor:
            return torch.func.functional_call(self.base, params, x)

        params = dict(zip(self.names, self.params, strict=True))
        return torch.vmap(one)(params).square().sum(0)


@twins
def ensembles_on_the_meta_device() -> tuple[dict, dict]:
    return seeded(special=lambda: Ensemble("meta"), plain=lambda: Ensemble("cpu"))


@twins
def kernels_that_are_differentiable_once_only() -> tuple[dict, dict]:
    model, twin = mlp(nn.Hardsigmoid()), mlp(nn.Identity())
    twin[1].forward = lambda x: ((x + 3).clamp(0, 6)) / 6
    return same(model, twin)


@twins
def hooks_on_parameters_of_closures() -> tuple[dict, dict]:
    model = mlp()
    params = list(model.parameters())
    params[0].register_hook(lambda gradient: 7 * gradient)
    return {"model": lambda X: model(X), "params": params}, {"model": mlp()}


@twins
def empty_batches() -> tuple[dict, dict]:
    return {"model": mlp(), "data": batches(4, 0, 2)}, {"model": mlp()}


@twins
def data_made_in_inference_mode() -> tuple[dict, dict]:
    with torch.inference_mode():
        data = batches(4, 2)
    return {"model": mlp(), "data": data}, {"model": mlp()}


@twins
def data_with_a_history() -> tuple[dict, dict]:
    """It may begin at the model's own parameters."""
    model, other = mlp(), nn.Linear(3, 3).double()
    data = [(X, model(X) + 1 + X) for X in (other(X) for X, _ in batches(4, 2))]
    values = [(X.detach(), y.detach()) for X, y in data]
    plain = {"model": model, "loss": MSE, "data": values}
    return plain | {"data": data}, plain


@twins
def closures_with_a_graph_from_outside() -> tuple[dict, dict]:
    weight, head = mlp()[0].weight, mlp()[2].weight
    made = torch.tanh(weight)

    def model(X: Tensor, made: Tensor | None = made) -> Tensor:
        return torch.tanh(X @ (torch.tanh(weight) if made is None else made).T) @ head.T

    params = [weight, head]
    plain = functools.partial(model, made=None)
    return {"model": model, "params": params}, {"model": plain, "params": params}


@twins
def parameters_in_a_parameter_dict() -> tuple[dict, dict]:
    params = nn.ParameterDict(mlp()[0].named_parameters())
    special = {"model": lambda p, x: F.linear(x, **p), "params": params}
    return special, special | {"params": dict(params)}


@twins
def parameters_in_a_parameter_list() -> tuple[dict, dict]:
    params = list(mlp()[0].parameters())
    plain = {"model": lambda x: F.linear(x, *params), "params": params}
    return plain | {"params": nn.ParameterList(params)}, plain


@twins
def targets_in_other_containers() -> tuple[dict, dict]:
    def loss(z: Tensor, target: UserDict) -> Tensor:
        return F.cross_entropy(z, target["labels"])

    data = [(X, UserDict(labels=y)) for X, y in batches(4, 2)]
    special = {"model": mlp(), "data": data, "loss": loss, "reduction": "mean"}
    return special, {"model": mlp()}


def losses(special: Callable, plain: Callable, data: list | None = None) -> tuple[dict, dict]:
    """Return a sum and the same of the usual batches."""
    problem = {"model": mlp(), "loss": plain, "reduction": "sum"}
    return problem | {"loss": special, "data": data}, problem


@twins
def losses_that_overwrite_the_output() -> tuple[dict, dict]:
    def loss(z: Tensor, y: Tensor, write: Callable = Tensor.mul_) -> Tensor:
        return write(z, y[:, None] + 1.0).tanh().square().sum()

    return losses(loss, functools.partial(loss, write=torch.mul))


@twins
def losses_with_a_scripted_module() -> tuple[dict, dict]:
    def loss(teacher: Callable, z: Tensor, y: Tensor) -> Tensor:
        return (z - teacher(y.double()[:, None])).square().sum()

    teacher = nn.Linear(1, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(teacher, torch.ones(2, 1).double())
    return losses(functools.partial(loss, traced), functools.partial(loss, teacher))


@twins
def weights_of_classes_in_the_target() -> tuple[dict, dict]:
    def loss(z: Tensor, target: dict) -> Tensor:
        terms = F.cross_entropy(z, target["labels"], reduction="none")
        return (terms * target["weight"][target["labels"]]).sum()

    weight = torch.tensor([0.3, 2.0, 1.1]).double()
    data = [(X, {"labels": y, "weight": weight}) for X, y in batches(4, 2)]
    return losses(loss, functools.partial(F.cross_entropy, weight=weight, reduction="sum"), data)


@twins
def batches_that_functions_take_things_out_of() -> tuple[dict, dict]:
    def model(s: Using, X: dict) -> Tensor:
        assert X.keys() == {"inputs"}
        X["seen"] = 1
        return s.net(X.pop("inputs")[0])

    def loss(z: Tensor, target: dict) -> Tensor:
        return F.cross_entropy(z, target["of"].pop("labels"), reduction="sum")

    plain = {
        "model": Using(lambda s, X: s.net(X), net=mlp()),
        "loss": nn.CrossEntropyLoss(reduction="sum"),
    }
    data = [({"inputs": [x]}, {"of": {"labels": y}}) for x, y in batches(4, 2)]
    options = {"reduction": "sum", "batch_size_fn": lambda X: len(X["inputs"][0])}
    return {"model": Using(model, net=mlp()), "loss": loss, "data": data, **options}, plain


def tangent(by_hand: bool) -> nn.Module:
    """A convolution pushed forward by the user's own ``torch.func.jvp``, or by hand."""

    def function(s: Using, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        if by_hand:
            out, along = s.conv(x), F.conv1d(x.sin(), s.conv.weight)
        else:
            out, along = torch.func.jvp(s.conv, (x,), (x.sin(),))
        return (out.tanh() * along)[..., 0]

    return Using(function, conv=nn.Conv1d(1, 3, 3))


@twins
def functional_transforms_inside_the_model() -> tuple[dict, dict]:
    return seeded(special=lambda: tangent(False), plain=lambda: tangent(True))


def observed(register: Callable[[Tensor, nn.Module], Any]) -> nn.Module:
    """Return two layers, of which hooks observe the gradients."""

    def function(s: Using, x: Tensor) -> Tensor:
        x = s.stem(x).tanh()
        register(x, s.head)
        return s.head(x)

    return Using(function, stem=nn.Linear(3, 4), head=nn.Linear(4, 3))


#: Hooks that observe gradients.
OBSERVE: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "one": lambda x, _: x.register_hook(lambda gradient: None),
    "module": lambda _, m: m.register_full_backward_hook(lambda m, inputs, outputs: None),
}
TWINS |= {
    f"hooks that observe, {name}": lambda hook=hook: seeded(
        special=lambda: observed(hook), plain=lambda: observed(lambda x, m: None)
    )
    for name, hook in OBSERVE.items()
}


@twins
def parameters_with_one_gradient_tensor() -> tuple[dict, dict]:
    """Autograd returns the very same tensor for both: scaling it in place would count twice."""
    torch.manual_seed(0)
    params = {name: torch.randn(3, 3, dtype=torch.float64) for name in ("first", "second")}
    return (
        {"model": lambda p, X: X @ (p["first"] + p["second"]), "params": params},
        {"model": lambda p, X: X @ p["first"] + X @ p["second"], "params": params},
    )


# --- what is easily got wrong


def test_products_own_their_memory():
    H = build(HessianLinearOperator, mlp())
    v = torch.ones(H.shape[1], dtype=torch.float64)
    (H**0 @ v).add_(1)
    params, data = {"w": torch.randn(5)}, [(torch.zeros(1, 1), None)]
    J = build(JacobianLinearOperator, lambda p, X: p["w"].view(1, -1), data, params=params)
    u = torch.ones(5)
    (J.T @ u).add_(1), (J @ u).add_(1)
    assert bool((v == 1).all()) and bool((u == 1).all())


def test_deep_copies_of_closures():
    model = mlp()
    H = build(HessianLinearOperator, lambda X: model(X), params=list(model.parameters()))
    v = torch.ones(H.shape[1])
    assert torch.equal(copy.deepcopy(H) @ v, H @ v)


def test_cross_entropy_of_one_class():
    """It is constant: zero curvature, of which the square root has no columns."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.PReLU(4), nn.Flatten(), nn.LayerNorm(16)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    data = [(torch.randn(4, 2, 4, 4), torch.zeros(4, dtype=torch.long))]
    for options in ({"fisher_type": "type-2"}, {}):
        diagonal = build(GGNDiagonalLinearOperator, model, data, mc_samples=0 if options else 1)
        assert diagonal.trace() == 0 and not matrix(diagonal).any()
        for kind in (KFACLinearOperator, EKFACLinearOperator):
            found = build(kind, model, data, fallback="diagonal", **options)
            assert not found.structure.diagonal().gt(1e-12).any()
            inverse = found.inverse(0.1, use_exact_damping=True)
            assert error(matrix(inverse), 10 * torch.eye(found.shape[0])) <= 1e-5


def beside(empty: nn.Module) -> nn.Module:
    """Return a layer beside something that has no entries."""

    def function(s: Using, x: Tensor) -> Tensor:
        if isinstance(s.empty, nn.ParameterList):
            return s.own(x) + s.empty[0].sum()
        return s.own(x) + s.empty(x[:, : s.empty.in_features]).sum(1, keepdim=True)

    return Using(function, empty=empty, own=nn.Linear(3, 2))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(), (0, 2)])
@pytest.mark.parametrize(
    "kind, options",
    [(kind, {}) for kind in (*SQUARE, PerSampleGradientLinearOperator, GGNDiagonalLinearOperator)]
    + [
        (kind, {"separate_weight_and_bias": apart, "fisher_type": "type-2"})
        for kind in (KFACLinearOperator, EKFACLinearOperator)
        for apart in (True, False)
    ],
)
def test_parameters_without_elements(kind: type, options: dict, sizes: tuple[int, ...]):
    torch.manual_seed(0)
    empty = nn.Linear(*sizes) if sizes else nn.ParameterList([nn.Parameter(torch.empty(0, 3))])
    model, data = beside(empty), [(torch.randn(4, 3), torch.randn(4, 2))]
    every = list(model.parameters())
    found, expected = (
        build(kind, model, data, MSE, params=params, **options)
        for params in (every, [p for p in every if p.numel()])
    )
    assert error(matrix(found), matrix(expected)) <= 1e-6
    if kind is PerSampleGradientLinearOperator:
        rows = [row.flatten(1) for row in found.gradients()]
        assert [len(row) for row in rows] == [4] * len(every)
        assert error(torch.cat(rows, 1), matrix(expected)) <= 1e-6
    for damping in [{}, {"use_heuristic_damping": kind is KFACLinearOperator}] if options else []:
        inverses = [A.inverse(0.1, **damping) for A in (found, expected)]
        assert error(*map(matrix, inverses)) <= 1e-5
