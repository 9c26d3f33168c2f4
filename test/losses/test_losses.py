"""Losses against automatic differentiation of PyTorch's own values, term by term."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import CASES, error, matrix
from problems import Problem
from small import CE, build, mlp
from torch import Tensor, nn

from curvlinops import (
    FisherMCLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
)
from curvlinops.kfac_utils import loss_hessian_matrix_sqrt
from curvlinops.losses import KNOWN_LOSSES, wrap_loss

N, C = 4, 3
W = torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)
SHAPES = [(N, C), (N, C, 2, 3)]


def logits(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def indices(z: Tensor) -> Tensor:
    return torch.arange(z.numel() // z.shape[1]).reshape(z.shape[0], *z.shape[2:]) % C


def soft(z: Tensor) -> Tensor:
    return (2 * logits(tuple(z.shape)).flip(0)).softmax(1)


def bits(z: Tensor) -> Tensor:
    return (logits(tuple(z.shape)).flip(0) > 0).double()


LOSSES = {
    "mse": (nn.MSELoss, torch.sin),
    "ce": (nn.CrossEntropyLoss, indices),
    "ce-weight": (partial(nn.CrossEntropyLoss, weight=W), indices),
    "ce-ignore": (partial(nn.CrossEntropyLoss, ignore_index=1), indices),
    "ce-smooth": (partial(nn.CrossEntropyLoss, label_smoothing=0.2), indices),
    "ce-all": (
        partial(nn.CrossEntropyLoss, weight=W, ignore_index=0, label_smoothing=0.2),
        indices,
    ),
    "ce-soft": (nn.CrossEntropyLoss, soft),
    "ce-soft-all": (partial(nn.CrossEntropyLoss, weight=W, label_smoothing=0.2), soft),
    "bce": (nn.BCEWithLogitsLoss, bits),
    "bce-soft": (nn.BCEWithLogitsLoss, soft),
    "bce-weight": (partial(nn.BCEWithLogitsLoss, weight=torch.tensor([2.0])), bits),
    "bce-pos": (partial(nn.BCEWithLogitsLoss, pos_weight=torch.tensor([3.0])), bits),
    "bce-probs": (nn.BCELoss, bits),
    "bce-probs-soft": (nn.BCELoss, soft),
    "bce-probs-weight": (partial(nn.BCELoss, weight=W[:1]), soft),
    "nll": (partial(nn.NLLLoss, weight=W, ignore_index=2), indices),
    "huber": (partial(nn.HuberLoss, delta=0.6), torch.sin),
    "smooth-l1": (partial(nn.SmoothL1Loss, beta=0.3), torch.sin),
    "smooth-l1-0": (partial(nn.SmoothL1Loss, beta=0.0), torch.cos),
    "poisson": (nn.PoissonNLLLoss, lambda z: z.exp().round()),
    "poisson-full": (partial(nn.PoissonNLLLoss, full=True), lambda z: (z + 3).round()),
    "poisson-rate": (partial(nn.PoissonNLLLoss, log_input=False, eps=0.1), torch.round),
    "l1": (nn.L1Loss, torch.cos),
}
CLOSED = [name for name in LOSSES if name not in ("nll", "l1")]


def outputs(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return outputs of a model for a loss: logits, rates, or probabilities."""
    z = logits(shape)
    return z.exp() if name == "poisson-rate" else z.sigmoid() if "probs" in name else z


def dense(output: Tensor, matrix) -> Tensor:
    """Form a matrix on outputs."""
    eye = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape)
    return matrix(eye).flatten(1)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives(name: str, shape: tuple[int, ...], reduction: str):
    kind, target = LOSSES[name]
    module, z = kind(reduction=reduction), outputs(name, shape)
    y, loss = target(z), wrap_loss(module)
    loss.check(z, y)
    loss.check_values(z, y)
    # scaled as documented, this is PyTorch's value
    scale = float(loss.denominator(z, y)) if reduction == "mean" else 1.0

    def value(z: Tensor) -> Tensor:
        return module(z, y) * scale

    torch.testing.assert_close(loss.sum(z, y), value(z))
    gradient = torch.func.grad(value)(z)
    torch.testing.assert_close(loss.gradient(z, y), gradient)
    # per element, since the loss's own double backward is what generic losses use
    eps = 1e-6
    differences = torch.stack(
        [
            (torch.func.grad(value)(z + eps * e) - torch.func.grad(value)(z - eps * e)) / (2 * eps)
            for e in torch.eye(z.numel(), dtype=z.dtype).reshape(-1, *z.shape)
        ]
    ).flatten(1)
    found = dense(z, loss.hessian(z, y))
    torch.testing.assert_close(found, differences, atol=1e-7, rtol=1e-5)
    if name in CLOSED:
        root = loss.to_terms(loss.hessian_sqrt(z, y))
        in_terms = torch.einsum("vtc,vtd->tcd", root, root)
        rows = loss.to_terms(loss.hessian(z, y)(torch.ones_like(z).unsqueeze(0)))[0]
        torch.testing.assert_close(in_terms.sum(-1), rows)
        assert root.shape[0] == root.shape[2]
        small = loss.to_terms(loss.hessian_sqrt(z, y, minimal=True))
        torch.testing.assert_close(torch.einsum("vtc,vtd->tcd", small, small), in_terms)
        assert len(small) == len(root) - name.startswith("ce")
        columns = [slice(first, first + 2) for first in range(0, root.shape[2], 2)]
        for every, minimal in ((root, False), (small, True)):
            some = [loss.hessian_sqrt(z, y, minimal, column) for column in columns]
            torch.testing.assert_close(loss.to_terms(torch.cat(some)), every)
        hessian, Q = loss.factored_hessian(z, y), torch.randn(in_terms.shape[1:], dtype=z.dtype)
        torch.testing.assert_close(hessian.sum(), in_terms.sum(0))
        torch.testing.assert_close(hessian.along(None), in_terms.diagonal(dim1=1, dim2=2))
        along = torch.einsum("ck,tcd,dk->tk", Q, in_terms, Q)
        torch.testing.assert_close(hessian.along(Q), along)
        products = torch.cat(list(hessian.times(Q, 2)))
        torch.testing.assert_close(products, root @ Q)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", CLOSED)
def test_square_roots_and_samples(name: str, reduction: str):
    kind, target = LOSSES[name]
    module, z = kind(reduction=reduction), outputs(name, (N, C))
    y, loss, generator = target(z), wrap_loss(module), torch.Generator().manual_seed(0)
    hessian = dense(z, loss.hessian(z, y)).reshape(N, C, N, C)
    expected = torch.stack([hessian[n, :, n] for n in range(N)])
    for n in range(N):
        root = loss_hessian_matrix_sqrt(z[n : n + 1], y[n : n + 1], module)
        assert root.shape == (C, C)
        torch.testing.assert_close(root @ root.T, expected[n])
    if name in ("huber", "smooth-l1", "smooth-l1-0", "poisson-rate"):
        with pytest.raises(NotImplementedError, match="whose labels could be sampled. Supported"):
            loss.sample(z, y, 2, generator)
        return
    if name.startswith("bce-probs") and name != "bce-pos":  # the Fisher information of p
        w = 1.0 if module.weight is None else module.weight
        k = 1 / C if reduction == "mean" else 1.0
        expected = (k * w / (z * (1 - z))).diag_embed()
    draws = loss.sample(z, y, 20_000, generator)
    products = torch.einsum("vna,vnb->vnab", draws, draws)
    spread = products.std(0) / len(draws) ** 0.5
    assert ((products.mean(0) - expected).abs() <= 4.5 * spread + 1e-12).all()


def test_messages_name_the_losses_with_a_likelihood():
    heads = {kind: [nn.Linear(1, 1)] * kind.has_parameters for kind in KNOWN_LOSSES.values()}
    losses = [kind(module(*heads[kind]), "sum") for module, kind in KNOWN_LOSSES.items()]
    with pytest.raises(NotImplementedError) as error:
        wrap_loss(nn.L1Loss()).check_can_sample()
    refused, *named = re.findall(r"\w+Loss", str(error.value))
    assert refused == "L1Loss"
    assert named[:-2] == [loss.name for loss in losses if loss.can_sample]
    assert named[-2:] == ["HuberLoss", "SmoothL1Loss"]


Z1 = logits((1, C))


@pytest.mark.parametrize(
    "output, target, loss, error, match",
    [
        (logits((2, C)), torch.zeros(2).long(), nn.CrossEntropyLoss(), ValueError, "one datum"),
        (Z1, Z1, nn.L1Loss(), NotImplementedError, "L1Loss has no closed-form"),
        (Z1, Z1, lambda z, y: z.sum(), NotImplementedError, "closed form"),
        (Z1, torch.tensor([0]), nn.NLLLoss(), NotImplementedError, "NLLLoss"),
        (Z1, 2 + bits(Z1), nn.BCEWithLogitsLoss(), ValueError, "outside"),
        (Z1, Z1[0], nn.MSELoss(), ValueError, "output's shape"),
        (Z1, torch.tensor([0]), nn.CrossEntropyLoss(weight=-W), ValueError, "negative"),
        (-Z1, bits(Z1), nn.BCELoss(), ValueError, "from 0 to 1, .* For logits use BCEWithLogits"),
        (Z1 * torch.nan, bits(Z1), nn.BCELoss(), ValueError, "from nan to nan"),
        (Z1 * 0, bits(Z1), nn.BCELoss(), ValueError, "BCELoss has no second .* Use BCEWithLogits"),
        (Z1 * torch.nan, bits(Z1), nn.BCEWithLogitsLoss(), ValueError, "not finite"),
    ],
)
def test_hessian_sqrt_refuses(output, target, loss, error, match):
    with pytest.raises(error, match=match):
        loss_hessian_matrix_sqrt(output, target, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("p", [0.0, 1e-20, 1e-14, 1e-10, 0.4, 1.0])
def test_probabilities_near_zero_and_one(p: float, label: float, dtype: torch.dtype):
    z, y = torch.full((1, 1), p, dtype=dtype), torch.full((1, 1), label, dtype=dtype)
    module, loss, generator = nn.BCELoss(), wrap_loss(nn.BCELoss()), torch.Generator()
    leaf = z.clone().requires_grad_()
    value = module(leaf, y)
    torch.testing.assert_close(loss.sum(z, y), value.detach())
    torch.testing.assert_close(loss.gradient(z, y), torch.autograd.grad(value, leaf)[0])
    assert loss.sample(z, y, 5, generator.manual_seed(0)).isfinite().all()
    labels = [(p, label), (1 - p, 1 - label)]
    if any(q < 1e-12 and weight for q, weight in labels):
        with pytest.raises(ValueError, match="no second derivative"):
            loss.hessian(z, y)
        return
    expected = torch.tensor([[sum(weight / q**2 for q, weight in labels if weight)]], dtype=dtype)
    torch.testing.assert_close(loss.hessian(z, y)(torch.ones(1, 1, 1).to(z))[0], expected)


def test_operators_of_probabilities():
    """Sampled labels have the Fisher information, the exact matrices depend on the target."""
    torch.manual_seed(0)
    linear, x, y = nn.Linear(2, 2).double(), torch.randn(1, 2).double(), torch.rand(1, 2).double()
    model, params, p = nn.Sequential(linear, nn.Sigmoid()), list(linear.parameters()), linear(x)
    p = p.sigmoid()[0].detach()
    slope = p * (1 - p)
    J = torch.cat([torch.kron(slope.diag(), x), slope.diag()], 1)
    curvature = y[0] / p**2 + (1 - y[0]) / (1 - p) ** 2
    exact, fisher = J.T @ curvature.diag() @ J, J.T @ (1 / slope).diag() @ J
    problem = model, nn.BCELoss(reduction="sum"), params, [(x, y)]
    together = {"separate_weight_and_bias": False}
    for operator, expected in (
        (GGNLinearOperator(*problem), exact),
        (GGNDiagonalLinearOperator(*problem), exact.diag().diag()),
        (KFACLinearOperator(*problem, fisher_type="type-2", **together), exact),
    ):
        torch.testing.assert_close(operator.to_dense(), expected)
    many = {"mc_samples": 40_000}
    for operator, expected in (
        (FisherMCLinearOperator(*problem, **many), fisher),
        (GGNDiagonalLinearOperator(*problem, **many), fisher.diag().diag()),
        (KFACLinearOperator(*problem, **many, **together), fisher),
    ):
        assert (operator.to_dense() - expected).norm() < 0.02 * expected.norm()


KNOWN = [
    (F.cross_entropy, nn.CrossEntropyLoss()),
    (F.mse_loss, nn.MSELoss()),
    (F.nll_loss, nn.NLLLoss()),
    (F.binary_cross_entropy, nn.BCELoss()),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()),
    (F.poisson_nll_loss, nn.PoissonNLLLoss()),
    (partial(F.huber_loss, delta=0.5), nn.HuberLoss(delta=0.5)),
    (partial(F.smooth_l1_loss, beta=0.5), nn.SmoothL1Loss(beta=0.5)),
    (partial(F.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)),
    (partial(F.mse_loss, reduction="sum"), nn.MSELoss(reduction="sum")),
]


@pytest.mark.parametrize("loss, module", KNOWN)
def test_functional_losses_are_known(loss: Any, module: nn.Module):
    one, two = wrap_loss(loss), wrap_loss(module)
    assert type(one) is type(two) is KNOWN_LOSSES[type(module)]
    assert one.reduction == two.reduction
    z = logits((N, C)).sigmoid()
    y = indices(z) if isinstance(module, nn.CrossEntropyLoss | nn.NLLLoss) else bits(z)
    torch.testing.assert_close(one.sum(z, y), two.sum(z, y))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_losses_are_known():
    loss = wrap_loss(torch.compile(nn.CrossEntropyLoss(label_smoothing=0.1)))
    assert type(loss) is KNOWN_LOSSES[nn.CrossEntropyLoss] and loss.module.label_smoothing == 0.1


def test_half_precision_is_treated_in_float32():
    z = logits((N, C)).bfloat16()
    loss = wrap_loss(nn.CrossEntropyLoss())
    assert loss.sum(z, indices(z)).dtype == torch.float32
    assert loss.gradient(z, indices(z)).dtype == torch.bfloat16


# --- cotangents that losses make, whose strides kernels of PyTorch read

LAST = {
    "BatchNorm": (nn.BatchNorm2d(3), nn.Linear(2, 2), nn.BatchNorm2d(3)),
    "InstanceNorm": (nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3, affine=True)),
    "GroupNorm": (nn.Conv2d(3, 3, 1), nn.GroupNorm(3, 3)),
}


@pytest.mark.parametrize("name", LAST)
def test_one_sample_with_several_positions_behind_a_normalization(name: str):
    """``native_batch_norm_backward`` is wrong for some strides of an axis of length one."""
    torch.manual_seed(0)
    model = nn.Sequential(*LAST[name]).double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    data = [(torch.randn(1, 3, 4, 2).double(), torch.randint(3, (1, 4, 2)))]
    loss, params = nn.CrossEntropyLoss(reduction="sum"), list(model.parameters())
    problem = Problem(model, loss, params, data, mc=True)
    for case in map(CASES.get, ("hessian", "ggn", "gradients")):
        A, expected = case.build(problem), case.dense(problem)
        columns = torch.stack([A @ e for e in torch.eye(A.shape[1]).double()], 1)
        assert error(matrix(A), expected) <= 1e-10 and error(columns, expected) <= 1e-10


# --- losses of users, which are refused, or need care


def test_losses_without_a_gradient_have_a_warning():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) != target).double().sum()

    with pytest.warns(UserWarning, match="no gradient with respect to the model's output"):
        build(HessianLinearOperator, mlp(), loss=loss, reduction="sum")


@pytest.mark.parametrize("inner, outer", [("bfloat16", "float32"), ("float64", "float32")])
def test_losses_that_return_another_precision(inner: str, outer: str):
    torch.manual_seed(0)
    output, target = torch.randn(50, 3).to(getattr(torch, inner)), torch.randint(3, (50,))

    def loss(z: Tensor, t: Tensor, power: int) -> Tensor:
        return F.cross_entropy(z, t).to(getattr(torch, outer)) ** power

    wrap_loss(partial(loss, power=1), "mean").check_values(output, target)
    with pytest.raises(ValueError, match="is not the mean"):
        wrap_loss(partial(loss, power=2), "mean").check_values(output, target)


@pytest.mark.parametrize("scale", [1.0, 15.0, 30.0])
@pytest.mark.parametrize(
    "loss, y",
    [
        (CE, torch.tensor([0, 1, 0])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([0, 1, 0])),
        (nn.BCEWithLogitsLoss(), torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 0, 1]])),
    ],
)
def test_closed_forms_of_confident_models(loss: nn.Module, y: Tensor, scale: float):
    """In float32 nothing cancels where probabilities are close to zero and one."""
    z = scale * torch.tensor([[1.0, -0.3, -0.5], [-0.6, 1.0, -0.2], [-0.4, -0.7, 1.0]])
    v = torch.tensor([[[0.3, 1.0, -0.5], [1.0, 0.2, 0.4], [0.7, -0.8, 0.1]]])
    known = wrap_loss(loss)
    wide = z.double(), y.double() if y.is_floating_point() else y
    for function in (
        lambda z, y: known.gradient(z, y),
        lambda z, y: known.hessian(z, y)(v.to(z.dtype)),
        lambda z, y: known.factored_hessian(z, y).sum(),
        lambda z, y: known.factored_hessian(z, y).along(None),
        lambda z, y: known.factored_hessian(z, y).along(torch.eye(3).to(z)),
        lambda z, y: known.hessian_sqrt(z, y),
        lambda z, y: known.hessian_sqrt(z, y, minimal=True),
    ):
        found, expected = function(z, y), function(*wide)
        # entry by entry, relative to the entry
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-30)
