"""Per-sample gradients by plain autograd, and a check of all that is computed from them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
)
from curvlinops import PerSampleGradientLinearOperator as PerSampleGradients

Data = list[tuple[Any, Tensor]]


def loop(model: nn.Module, params: list[Tensor], data: Data, loss: Callable) -> Tensor:
    """Return the gradients of the samples' losses, one sample at a time."""
    rows = []
    for X, y in data:
        for n in range(len(y)):
            one = tree_map(lambda x, n=n: x[n : n + 1], X)
            grads = torch.autograd.grad(
                loss(model(one), y[n : n + 1]), params, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def rows_in_batches(
    model: nn.Module, data: Data, loss: Callable, params: list[Tensor] | None = None
) -> Tensor:
    """Return the gradients of the samples' losses, through the graph of each batch."""
    params, rows = list(model.parameters()) if params is None else params, []
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for X, y in data:
        for z, target in zip(model(X), y, strict=True):
            grads = torch.autograd.grad(loss(z, target), params, **options)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def check(model: nn.Module, inputs: list[Any], covered: bool | None = True, **options: Any) -> None:
    """Compare everything that is computed of single gradients with the loop.

    Args:
        covered: Whether rules cover all parameters; either way if None.
    """
    model = model.double().eval()
    data = []
    for X in inputs:
        X = tree_map(lambda x: x.double() if x.is_floating_point() else x, X)
        with torch.no_grad():
            data.append((X, torch.randn_like(model(X))))
    rows = loop(model, list(model.parameters()), data, nn.MSELoss(reduction="sum"))
    compare(model, data, rows, covered, **options)


def compare(
    model: nn.Module, data: Data, rows: Tensor, covered: bool | None = True, **options: Any
) -> None:
    """Compare everything that is computed of single gradients with given ones."""
    params, loss = list(model.parameters()), nn.MSELoss(reduction="sum")
    operator = PerSampleGradients(model, loss, params, data, **options)
    close = {"rtol": 1e-8, "atol": 1e-10 * float(rows.norm())}
    torch.testing.assert_close(operator.dense(), rows, **close)
    assert covered in (None, not operator.fallbacks), operator.fallbacks
    torch.testing.assert_close(operator.norms(), rows.norm(dim=1), **close)
    torch.testing.assert_close(
        operator.gram(), rows @ rows.T, rtol=1e-8, atol=1e-10 * float(rows.norm()) ** 2
    )
    moment = rows.square().mean(0)
    torch.testing.assert_close(
        operator.second_moment(), moment, rtol=1e-8, atol=1e-10 * float(moment.norm())
    )
    v, u = torch.randn(rows.shape[1]).double(), torch.randn(rows.shape[0]).double()
    torch.testing.assert_close(operator @ v, rows @ v, rtol=1e-8, atol=1e-9 * float(rows.norm()))
    torch.testing.assert_close(
        operator.T @ u, rows.T @ u, rtol=1e-8, atol=1e-9 * float(rows.norm())
    )
    # where there is too little memory for rows, from inputs and output gradients
    fisher, V = rows.T @ rows, torch.randn(rows.shape[1], 2).double()
    for cache in ("auto", 1):
        E = EFLinearOperator(model, loss, params, data, terms="sample", cache=cache)
        close_to_fisher = {"rtol": 1e-8, "atol": 1e-9 * float(fisher.norm())}
        torch.testing.assert_close(E @ V, fisher @ V, **close_to_fisher)
        torch.testing.assert_close(E @ V[:, 0], fisher @ V[:, 0], **close_to_fisher)
    if data[0][1][0].numel() > 200:  # too many for a matrix of all outputs
        return
    J = JacobianLinearOperator(model, params, data)
    dense = J @ torch.eye(J.shape[1], dtype=torch.float64)
    size = float(dense.norm())
    torch.testing.assert_close(J.gram(), dense @ dense.T, rtol=1e-8, atol=1e-10 * size**2)
    diagonal = GGNDiagonalLinearOperator(model, loss, params, data).diagonal()
    expected = 2 * dense.square().sum(0)
    torch.testing.assert_close(diagonal, expected, rtol=1e-8, atol=1e-10 * size**2)


def images(dims: int, channels: int, length: int = 6) -> list[Tensor]:
    """Two batches of unequal size."""
    return [torch.randn(n, channels, *[length + i for i in range(dims)]) for n in (2, 3)]


def sequences(width: int = 4) -> list[Tensor]:
    """Batches of unequal size and length; the first has as many samples as positions."""
    return [torch.randn(3, 3, width), torch.randn(2, 5, width), torch.randn(4, 2, width)]


def check_factors(model: nn.Module, data: Data, rows: Tensor) -> None:
    """Compare sums of eigenvalues with given gradients, and the GGN's diagonal with the GGN."""
    arguments = model, nn.MSELoss(reduction="sum"), list(model.parameters()), data
    options = {"fisher_type": "empirical", "fallback": "dense"}
    ekfac, kfac = (cls(*arguments, **options) for cls in (EKFACLinearOperator, KFACLinearOperator))
    torch.testing.assert_close(ekfac.trace(), rows.square().sum())
    assert bool(torch.isfinite(kfac.trace()))
    ggn = GGNLinearOperator(*arguments).to_dense().diagonal()
    torch.testing.assert_close(GGNDiagonalLinearOperator(*arguments).diagonal(), ggn)
