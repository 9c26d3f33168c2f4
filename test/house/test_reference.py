"""The references themselves: differences, PyTorch's own loss values, closed forms."""

from dataclasses import replace

import problems
import pytest
import reference
import torch
from problems import NAMES, Problem, make
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

EXACT = [name for name in NAMES if "low-precision" not in make(name).tags]
ROUNDED = [name for name in NAMES if name not in EXACT]
each_exact = pytest.mark.parametrize("name", EXACT)
#: Means have the derivatives of sums, times a factor that other tests compare.
SLOPES = [name for name in EXACT if name in problems.MODEL_NAMES or not name.endswith("-mean")]
each_slope = pytest.mark.parametrize("name", SLOPES)
STEP = 1e-5


def shifted(p: Problem, vector: Tensor) -> Problem:
    """The problem with a vector added to its parameters."""
    named = p.named_params()
    parts = vector.split([v.numel() for v in named.values()])
    values = {k: v.detach() + d.view_as(v) for (k, v), d in zip(named.items(), parts, strict=True)}
    return replace(p, params=values)


def directions(p: Problem, count: int) -> Tensor:
    """Random directions `[count, D]` that avoid coordinates used as constants."""
    D = sum(v.numel() for v in p.named_params().values())
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(count, D, generator=generator, dtype=torch.float64)
    v[:, list(p.constant)] = 0.0
    return v


def slope(function, p: Problem, v: Tensor):
    """Central difference along v."""
    return (function(shifted(p, STEP * v)) - function(shifted(p, -STEP * v))) / (2 * STEP)


def outputs(p: Problem) -> Tensor:
    with reference.evaluation(p) as (_, forward):
        return torch.cat([forward(x).flatten() for x, _ in reference.samples(p)]).detach()


def close_per_parameter(p: Problem, found: Tensor, truth: Tensor, tolerance: float) -> None:
    """Each parameter's part is right on its own scale, up to a floor on the common one."""
    sizes = [v.numel() for v in p.named_params().values()]
    for key, a, b in zip(p.named_params(), found.split(sizes), truth.split(sizes), strict=True):
        assert (a - b).norm() <= tolerance * (b.norm() + 1e-3 * truth.norm()) + 1e-9, key


@pytest.mark.extensive
@each_slope
def test_hessian_is_slope_of_gradient(name):
    p = make(name)
    H = reference.hessian(p)
    torch.testing.assert_close(H, H.T, rtol=1e-10, atol=1e-12)
    for v in directions(p, 3):
        close_per_parameter(p, H @ v, slope(reference.gradient, p, v), 1e-5)


@pytest.mark.extensive
@pytest.mark.parametrize("name", [name for name in SLOPES if name in problems.MODEL_NAMES])
def test_jacobian_is_slope_of_outputs(name):
    p = make(name)
    J = reference.jacobian(p)
    for v in directions(p, 2):
        torch.testing.assert_close(J @ v, slope(outputs, p, v), rtol=1e-6, atol=1e-8)


@pytest.mark.extensive
@each_slope
def test_ggn_is_curvature_of_linearized_model(name):
    """Second difference of the loss along the linearized outputs, with the loss by PyTorch."""
    p = make(name)
    G, J = reference.ggn(p), reference.jacobian(p)
    step = 1e-3  # the fourth derivative's part, step^2, balances rounding, 1e-16 / step^2
    z = [o.detach() for o in whole_outputs(p)]
    for v in directions(p, 3):
        v = v / (J @ v).norm()
        dz = (J @ v).split([o.numel() for o in z])

        def risk(t: float, dz=dz) -> Tensor:
            return torch_loss(p, [o + t * d.view_as(o) for o, d in zip(z, dz, strict=True)])

        truth = (risk(step) - 2 * risk(0.0) + risk(-step)) / step**2
        torch.testing.assert_close(v @ G @ v, truth, rtol=1e-5, atol=1e-7)


def whole_outputs(p: Problem) -> list[Tensor]:
    """Outputs batch by batch, as a user computes them."""
    with reference.evaluation(p) as (_, forward):
        return [forward(tree_map(to_double, X)) for X, _ in p.data]


def to_double(x):
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def torch_loss(p: Problem, z: list[Tensor]) -> Tensor:
    """PyTorch's own loss on all data at once; terms of unequal lengths laid out in a row."""
    y = [target for _, target in p.data]
    if isinstance(p.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        # [N, C, ...] -> [terms, C]
        z = [o.movedim(1, -1).reshape(-1, o.shape[1]) for o in z]
        y = [t.movedim(1, -1).reshape(-1, t.shape[1]) if t.is_floating_point() else t for t in y]
        y = [t if t.is_floating_point() else t.flatten() for t in y]
    elif not isinstance(p.loss, nn.L1Loss | nn.KLDivLoss) and isinstance(p.loss, nn.Module):
        # [N, ..., C] -> [terms, C]; [N] stays
        z = [o if o.ndim == 1 else o.reshape(-1, o.shape[-1]) for o in z]
        y = [t if t.ndim == 1 else t.reshape(-1, t.shape[-1]) for t in y]
    return p.loss(torch.cat(z), None if y[0] is None else torch.cat(y))


@each_exact
def test_loss_is_pytorchs_on_all_data_at_once(name):
    p = make(name)
    assert reference.loss_value(p) == pytest.approx(torch_loss(p, whole_outputs(p)).item())


@each_exact
def test_gradient_is_pytorchs_on_all_data_at_once(name):
    p = make(name)
    with reference.evaluation(p) as (leaves, forward):
        loss = torch_loss(p, [forward(tree_map(to_double, X)) for X, _ in p.data])
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    truth = torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(reference.gradient(p), truth, rtol=1e-8, atol=1e-10)
    c = reference.normalization(p)
    torch.testing.assert_close(c * reference.per_sample_gradients(p).sum(0), truth)


@pytest.mark.parametrize("name", [n for n in EXACT if make(n).reference_model is not None])
def test_reference_model_is_the_model(name):
    """Same outputs, same first derivative: only the second one is PyTorch's trouble."""
    p = make(name)
    z = [p.model(X) for X, _ in p.data]
    for found, truth in zip(whole_outputs(p), z, strict=True):
        torch.testing.assert_close(found, truth)
    grads = torch.autograd.grad(torch_loss(p, z), list(p.named_params().values()))
    torch.testing.assert_close(reference.gradient(p), torch.cat([g.flatten() for g in grads]))


@pytest.mark.extensive
@pytest.mark.parametrize("name", ROUNDED)
def test_tolerance_of_low_precision_is_meant(name):
    """Gradient and Hessian in the model's own dtype, by plain double backward."""
    p = make(name)
    one = problems.merged(p)
    batches = p.data if one is None else one.data
    params = list(p.named_params().values())
    with sdpa_kernel(SDPBackend.MATH):
        z = [p.model(X) for X, _ in batches]
        loss = torch_loss(replace(p, data=batches), z)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        g = torch.cat([g.flatten().double() for g in grads])
        rows = [torch.autograd.grad(entry, params, retain_graph=True) for entry in g]
    H = torch.stack([torch.cat([r.flatten().double() for r in row]) for row in rows])
    for found, truth in [(g, reference.gradient(p)), (H, reference.hessian(p))]:
        error = ((found - truth).norm() / truth.norm()).item()
        assert error <= p.tolerance / 2
        assert error > 1e-9, "not in low precision at all"


def test_logistic_regression():
    p = make("logistic")
    X, y = torch.cat([x for x, _ in p.data]), torch.cat([t for _, t in p.data])
    P = p.model(X).softmax(1).detach()
    E = P - nn.functional.one_hot(y, 3)
    Z = torch.cat([X, torch.ones(len(X), 1).to(X)], dim=1)  # the bias as a last input
    S = torch.diag_embed(P) - P[:, :, None] * P[:, None, :]
    order = [5 * c + i for c in range(3) for i in range(4)] + [5 * c + 4 for c in range(3)]
    curvature = sum(torch.kron(s, torch.outer(z, z)) for s, z in zip(S, Z, strict=True)) / len(X)
    rows = torch.stack([torch.kron(e, z) for e, z in zip(E, Z, strict=True)])[:, order]
    curvature = curvature[order][:, order]
    torch.testing.assert_close(reference.hessian(p), curvature)
    torch.testing.assert_close(reference.ggn(p), curvature)
    torch.testing.assert_close(reference.gradient(p), rows.mean(0))
    torch.testing.assert_close(reference.per_sample_gradients(p), rows)
    for terms in ("term", "sample"):  # one term per sample
        F = reference.empirical_fisher(p, terms)
        torch.testing.assert_close(F, rows.T @ rows / len(X))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_empirical_fisher_of_tokens(reduction):
    """Ignored targets, class weights: outer products of PyTorch's gradients of single targets."""
    p = make(f"classes-ce-all-{reduction}")
    weight, parameters = p.loss.weight, list(p.model.parameters())
    token, sample, total, count = 0.0, 0.0, 0.0, 0
    single = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2, reduction="none")
    for X, y in p.data:
        for x, targets in zip(X, y, strict=True):
            z = p.model(x[None])[0].T  # [T, C]
            summed = 0.0
            for output, target in zip(z, targets, strict=True):
                if target == p.loss.ignore_index:
                    continue
                value = single(output, target)
                grads = torch.autograd.grad(value, parameters, retain_graph=True)
                g = torch.cat([g.flatten() for g in grads])
                token, summed = token + torch.outer(g, g), summed + g
                total, count = total + weight[target].item(), count + 1
            sample = sample + (torch.outer(summed, summed) if torch.is_tensor(summed) else 0.0)
    c = 1.0 if reduction == "sum" else 1 / total
    assert reference.denominator(p)[0] == count
    assert reference.normalization(p) == pytest.approx(c)
    torch.testing.assert_close(reference.empirical_fisher(p, "term"), c * token)
    torch.testing.assert_close(reference.empirical_fisher(p, "sample"), c * sample)


def test_pad_rows_are_constant():
    p = make("padding-idx")
    for M in [reference.hessian(p), reference.ggn(p), reference.empirical_fisher(p)]:
        assert M[list(p.constant)].abs().max() == 0 == M[:, list(p.constant)].abs().max()
