"""Random networks, losses, nested batches and their cuts, against plain autograd in float64."""

from itertools import pairwise
from typing import Any

import reference
import torch
from contract import error, matrix
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import Using
from problems import Problem, bits, ignored, indices, probabilities
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import curvlinops as C

COLUMNS, CLASSES = 3, 3
# repeatable, and without minutes for simpler examples of a failure
SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])


def residual(width: int, times: int) -> nn.Module:
    """Return a layer that is used as often as asked, each time beside its input."""

    def function(s: Using, x: Tensor) -> Tensor:
        for _ in range(times):
            x = x + torch.tanh(s.layer(x))
        return x

    return Using(function, layer=nn.Linear(width, width))


@st.composite
def networks(draw: Any) -> nn.Module:
    """Draw a network ``[..., COLUMNS] -> [..., CLASSES]``."""
    layers: list[nn.Module] = []
    width = COLUMNS
    for _ in range(draw(st.integers(0, 2))):
        out = draw(st.integers(1, 3))
        layers.append(nn.Linear(width, out, bias=draw(st.booleans())))
        width = out
        kinds = [nn.Tanh, nn.Sigmoid, nn.GELU, nn.ReLU, nn.Softplus]
        layers.append(draw(st.sampled_from(kinds))())
        # of one or two numbers, the normalized ones do not depend on them
        middle = draw(st.sampled_from(["none", "residual", *["norm"] * (width == 3)]))
        if middle == "norm":
            layers.append(nn.LayerNorm(width))
        if middle == "residual":
            layers.append(residual(width, draw(st.integers(1, 2))))
    return nn.Sequential(*layers, nn.Linear(width, CLASSES, bias=draw(st.booleans())))


@st.composite
def losses(draw: Any, reduction: str) -> tuple[nn.Module, Any]:
    """Draw a loss with its options, and how its targets are made from outputs."""
    kind = draw(st.sampled_from(["mse", "ce", "ce-prob", "bce"]))
    positive = st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=CLASSES, max_size=CLASSES)
    weight = draw(st.none() | positive.map(torch.tensor))
    if kind == "mse":
        return nn.MSELoss(reduction=reduction), torch.randn_like
    if kind == "bce":
        other = draw(st.none() | positive.map(torch.tensor))
        return nn.BCEWithLogitsLoss(weight, reduction=reduction, pos_weight=other), bits
    smoothing = draw(st.sampled_from([0.0, 0.2]))
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if kind == "ce-prob":
        return nn.CrossEntropyLoss(weight, **options), probabilities
    ignore = draw(st.sampled_from([None, -100, 1]))
    if ignore is None:
        return nn.CrossEntropyLoss(weight, **options), indices
    loss = nn.CrossEntropyLoss(weight, ignore_index=ignore, **options)
    return loss, lambda z: ignored(ignore, z)


def batches(draw: Any, X: Any, y: Tensor) -> list[tuple[Any, Tensor]]:
    """Cut samples into batches."""
    cuts = draw(st.lists(st.integers(1, len(y) - 1), unique=True, max_size=2))
    ends = [0, *sorted(cuts), len(y)]
    return [tree_map(lambda t, i=i, j=j: t[i:j], (X, y)) for i, j in pairwise(ends)]


@st.composite
def problems(draw: Any) -> Problem:
    """Draw a network, a loss, data, and some parameters in any order."""
    torch.manual_seed(draw(st.integers(0, 99)))
    net = draw(networks())
    positions = draw(st.sampled_from([(), (2,)]))
    loss, target = draw(losses(draw(st.sampled_from(["mean", "sum"]))))
    # where there are positions, cross-entropy wants the classes on axis 1, the others last
    moved = Using(lambda s, x: s.net(x).movedim(-1, 1), net=net)
    model = (moved if isinstance(loss, nn.CrossEntropyLoss) else net).double()
    X = torch.randn(draw(st.integers(2, 4)), *positions, COLUMNS).double()
    y = target(model(X).detach())
    if draw(st.booleans()):
        other = torch.randn_like(X)
        model = Using(lambda s, X: s.net(sum(tree_leaves(X))), net=model)
        X = {"first": X - other, "others": [(other,)]}
    data = batches(draw, X, y)
    names = draw(st.permutations([name for name, _ in model.named_parameters()]))
    names = names[: draw(st.integers(1, len(names)))]
    params = [model.get_parameter(name) for name in names]
    return Problem(model, loss.double(), params, data, mc=True)


#: The operators and their references.
OPERATORS = {
    C.HessianLinearOperator: reference.hessian,
    C.GGNLinearOperator: reference.ggn,
    C.EFLinearOperator: reference.empirical_fisher,
    C.PerSampleGradientLinearOperator: reference.per_sample_gradients,
    C.GGNDiagonalLinearOperator: lambda p: reference.ggn(p).diagonal().diag(),
}


@SETTINGS
@given(problems(), st.sampled_from([None, 1, 2]), st.booleans())
def test_matrices(p: Problem, chunk_size: int | None, by_rows: bool):
    for cls, truth in OPERATORS.items():
        A, expected = p.build(cls, chunk_size=chunk_size), truth(p)
        found = A.T.to_dense().T if by_rows else A.to_dense()
        assert error(found, expected) <= 1e-9, cls
    gradient, value = A.gradient_and_loss()
    flat = torch.cat([x.flatten() for x in gradient])
    assert error(flat, reference.gradient(p)) <= 1e-9
    assert abs(float(value) - (expected := reference.loss_value(p))) <= 1e-9 * abs(expected)


@SETTINGS
@given(st.data())
def test_factors_of_one_layer(data: st.DataObject):
    """A is the mean of ``a a^T``, B is ``c`` times the sum of the loss's Hessians (type-2)."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    model = nn.Linear(COLUMNS, CLASSES, bias=False).double()
    reduction = draw(st.sampled_from(["mean", "sum"]))
    loss, target = draw(losses(reduction))
    X = torch.randn(draw(st.integers(2, 5)), COLUMNS).double()
    pairs = batches(draw, X, target(model(X).detach()))
    p = Problem(model, loss.double(), [model.weight], pairs, mc=True)
    c = reference.normalization(p)
    B = torch.zeros(CLASSES, CLASSES).double()
    for x, y in reference.samples(p):
        B += c * torch.autograd.functional.hessian(
            lambda z, y=y: sum(reference._terms(p, z, y)[0], 0 * z.sum()), model(x).detach()
        ).reshape(CLASSES, CLASSES)
    expected = torch.kron(B, X.T @ X / len(X))
    K = C.KFACLinearOperator(model, loss, p.params, pairs, fisher_type="type-2", exact=True)
    assert error(matrix(K), expected) <= 1e-9
