"""float16, whose range is narrow: vectors, losses and batches of any size; and its precision."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from curvlinops import (
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    PerSampleGradientLinearOperator,
)

NUM_SAMPLES = 12


class Casting(nn.Module):
    """Wide parameters; the layers, or the activation, compute in half precision."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype = torch.float16):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.inner(x).float()


class Within(nn.Module):
    """An activation in half precision."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).tanh().to(x.dtype)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).half()


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(NUM_SAMPLES, 6, generator=generator).half()
    return X.to(dtype), torch.randint(3, (NUM_SAMPLES,), generator=generator)


def plain() -> tuple[nn.Module, Tensor, Tensor]:
    return net(), *data(torch.float16)


def autocast() -> tuple[nn.Module, Tensor, Tensor]:
    return Casting(net().float()), *data(torch.float32)


def matrices() -> dict[str, Tensor]:
    """The matrices of the rounded model in float64, by PyTorch."""
    model, (X, y) = net().double(), data(torch.float64)
    params = dict(model.named_parameters())

    def output(values: Tensor) -> Tensor:
        parts = values.split([p.numel() for p in params.values()])
        named = {n: v.view_as(p) for (n, p), v in zip(params.items(), parts, strict=True)}
        return functional_call(model, named, X)

    theta = torch.cat([p.detach().flatten() for p in params.values()])
    J = jacrev(output)(theta)  # [N, C, D]
    p = output(theta).detach().softmax(1)
    g = torch.einsum("ncd,nc->nd", J, p - F.one_hot(y, 3))
    B = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    flat = J.flatten(0, 1)
    hessian = torch.autograd.functional.hessian(lambda t: F.cross_entropy(output(t), y), theta)
    return {
        "hessian": hessian,
        "ggn": torch.einsum("ncd,nce,nef->df", J, B, J) / NUM_SAMPLES,
        "fisher": g.T @ g / NUM_SAMPLES,
        "jacobian": flat,
        "transpose": flat.T,
        "rows": g,
        "columns": g.T,
    }


KINDS: dict[str, Callable] = {
    "hessian": HessianLinearOperator,
    "ggn": GGNLinearOperator,
    "fisher": EFLinearOperator,
    "jacobian": lambda m, _, p, d, **k: JacobianLinearOperator(m, p, d, **k),
    "transpose": lambda m, _, p, d, **k: JacobianLinearOperator(m, p, d, **k).T,
    "rows": PerSampleGradientLinearOperator,
    "columns": lambda *a, **k: PerSampleGradientLinearOperator(*a, **k).T,
}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("make", [plain, autocast])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_any_size(kind: str, make: Callable, mode: str):
    model, X, y = make()
    loss, params = nn.CrossEntropyLoss(), list(model.parameters())
    A, expected = KINDS[kind](model, loss, params, [(X, y)], autodiff=mode), matrices()[kind]
    V = torch.randn(A.shape[1], 3, generator=torch.Generator().manual_seed(2))
    # each column on its own, also beside others of another size
    V = V * torch.tensor([1e-9, 1.0, 1e9])
    for scale in (1.0, 1e-4, 1e4):
        products = A @ (scale * V)
        for k in range(3):
            truth = expected @ (scale * V[:, k]).double()
            assert relative(products[:, k], truth) < 3e-3
            assert relative(A @ (scale * V[:, k]), truth) < 3e-3


@pytest.mark.parametrize("make", [plain, autocast])
def test_sampled_fisher_is_homogeneous(make: Callable):
    model, X, y = make()
    F = FisherMCLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, y)])
    v = torch.randn(F.shape[1], generator=torch.Generator().manual_seed(2))
    expected = F @ v
    for scale in (1e-9, 1e-6, 1e4, 1e9):
        assert relative(F @ (scale * v), scale * expected) < 2e-3


@pytest.mark.parametrize("terms", ["term", "sample"])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("scale, tolerance", [(30.0, 2e-3), (40.0, 1e-2)])
def test_empirical_fisher_of_confident_models(scale, tolerance, cast, terms):
    """Compared with one sample at a time, whose gradients have rounding errors themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    X = torch.randn(32, 4)
    best = model(X).sort(1).values
    X = X[best[:, -1] - best[:, -2] > 0.25]
    y = model(X).argmax(1)
    for p in model[2].parameters():
        p.data *= scale
    model, X = (Casting(model), X) if cast else (model.half(), X.half())
    params, loss = list(model.parameters()), nn.CrossEntropyLoss()

    def gradient(n: int) -> Tensor:
        value = loss(model(X[n : n + 1]).float(), y[n : n + 1])
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, params)]).double()

    g = torch.stack([gradient(n) for n in range(len(X))])
    E = EFLinearOperator(model, loss, params, [(X, y)], terms=terms)
    v = torch.randn(E.shape[0], generator=torch.Generator().manual_seed(1))
    v /= v.norm()
    expected = g.T @ (g @ v.double()) / len(X)
    assert 0 < float(expected.norm()) < 1e-6
    for _ in range(3):  # later ones may use what was kept
        assert relative(E @ v, expected) < tolerance
    assert relative(E @ (1e-6 * v), 1e-6 * expected) < tolerance


def averages(num_samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of which a sum over the samples overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).half()
    X = torch.randn(num_samples, 6) * 10 + 10
    y = torch.randn(num_samples, 1) * 10 + 40
    return model, X.half(), y.half()


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_means_over_many_rows(mode: str):
    model, X, y = averages(4096)
    twin, loss = deepcopy(model).double(), nn.MSELoss()
    params, wide = list(model.parameters()), list(twin.parameters())
    grads = torch.autograd.grad(loss(twin(X.double()), y.double()), wide, create_graph=True)
    g = torch.cat([x.flatten() for x in grads])
    v = torch.randn(len(g), generator=torch.Generator().manual_seed(1)).double()
    Hv = torch.cat([x.flatten() for x in torch.autograd.grad(g @ v, wide)])
    H = HessianLinearOperator(model, loss, params, [(X, y)], autodiff=mode)
    assert relative(H @ v.float(), Hv) < 2e-3
    gradient, _ = H.gradient_and_loss()
    assert relative(torch.cat([x.flatten() for x in gradient]), g.detach()) < 2e-3
    residual = (twin(X.double()) - y.double()).detach()
    # the rows J_n of the Jacobian, with B = 2 and g_n = 2 r_n J_n
    rows = torch.func.vmap(
        torch.func.grad(lambda p, x: functional_call(twin, p, x).sum()), in_dims=(None, 0)
    )(dict(twin.named_parameters()), X.double())
    J = torch.cat([rows[n].flatten(1) for n, _ in twin.named_parameters()], 1).detach()
    for kind, weights in ((GGNLinearOperator, 2.0), (EFLinearOperator, 4 * residual[:, 0] ** 2)):
        operator = kind(model, loss, params, [(X, y)], autodiff=mode)
        assert relative(operator @ v.float(), J.T @ (weights * (J @ v)) / len(X)) < 2e-3


def test_message_names_the_range():
    X, y = torch.full((4, 1), 6e4).half(), torch.zeros(4, 1).half()
    model = nn.Linear(1, 1, bias=False).half()
    model.weight.data.fill_(0.5)
    with pytest.raises(ValueError, match="exceeds 65504, where float16 ends"):
        HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), [(X, y)])


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("kind", ["hessian", "ggn", "fisher"])
def test_functions_as_losses(kind: str, mode: str):
    model, X, y = plain()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.float(), y)

    params, options = list(model.parameters()), {"autodiff": mode, "reduction": "mean"}
    A, expected = KINDS[kind](model, loss, params, [(X, y)], **options), matrices()[kind]
    v = torch.randn(A.shape[1], generator=torch.Generator().manual_seed(2))
    for scale in (1e-9, 1.0, 1e9):
        assert relative(A @ (scale * v), expected @ (scale * v).double()) < 3e-3


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["within", "output"])
def test_wide_models_with_a_part_in_half_precision(kind: type, dtype: torch.dtype, place: str):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), Within(dtype), nn.Linear(5, 3)]
    layers = [*layers, Within(dtype)] if place == "output" else layers
    model, X = nn.Sequential(*layers).double(), torch.randn(7, 4).double()
    exact = nn.Sequential(*(nn.Tanh() if isinstance(m, Within) else m for m in layers))
    y, loss = torch.randint(3, (7,)), nn.CrossEntropyLoss()
    v = torch.ones(sum(p.numel() for p in model.parameters())).double()
    found = kind(model, loss, list(model.parameters()), [(X, y)]) @ v
    expected = kind(exact, loss, list(exact.parameters()), [(X, y)]) @ v
    assert relative(found, expected) < (0.05 if dtype == torch.bfloat16 else 5e-3)


class Sometimes(nn.Module):
    """Computes in half precision if there are many samples."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=len(x) > 4):
            return self.inner(x).float()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("size", [1e-8, 1.0, 1e5])
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator])
def test_batches_of_different_precision(kind: type, size: float, order: int):
    X, y = data(torch.float32)
    batches = [(X[:3], y[:3]), (X[3:], y[3:])][::order]
    model, loss = net().float(), nn.CrossEntropyLoss()
    # which would find that the precision of a sample depends on the others
    options = {"check_deterministic": False}
    operator = kind(Sometimes(model), loss, list(model.parameters()), batches, **options)
    twin, double = deepcopy(model).double(), [(X.double(), y) for X, y in batches]
    exact = kind(twin, loss, list(twin.parameters()), double)
    v = size * torch.randn(exact.shape[1], generator=torch.Generator().manual_seed(2))
    expected = exact @ v.double()
    assert (operator @ v - expected).norm() <= 3e-3 * expected.norm()
