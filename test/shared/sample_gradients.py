"""Per-sample gradients by plain autograd, and a check of all that is computed from them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from contract import error, vectors
from models import Using
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
)
from curvlinops import PerSampleGradientLinearOperator as PerSampleGradients

Data = list[tuple[Any, Tensor]]
LOSS = nn.MSELoss(reduction="sum")


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


def check(
    model: nn.Module,
    inputs: list[Any],
    covered: bool | None = True,
    tolerance: float = 1e-10,
    blocks: str | None = None,
    **options: Any,
) -> None:
    """Compare everything that is computed of single gradients with the loop.

    Args:
        model: Of any outputs ``[N, *]``, which are bounded and flattened here.
        covered: Whether rules cover all parameters; either way if None.
        blocks: Compares factors, too: see `check_blocks`.
    """
    model = Using(lambda s, X: bounded(s.inner(X)), inner=model).double().eval()
    data = []
    for X in inputs:
        X = tree_map(lambda x: x.double() if x.is_floating_point() else x, X)
        data.append((X, torch.randn_like(model(X)).detach()))
    rows = loop(model, list(model.parameters()), data, LOSS)
    compare(model, data, rows, covered, tolerance, **options)
    if blocks is not None:
        # where rows follow no axis, those of a batch of one sample do
        some = ("expand",) if covered is None else ("expand", "reduce")
        check_blocks(model, data, rows, blocks, 10 * tolerance, some)


def bounded(out: Tensor) -> Tensor:
    """Return a matrix ``[N, C]``."""
    return torch.tanh(out).reshape(len(out), -1)


def check_rows(
    A: PerSampleGradients, rows: Tensor, tolerance: float = 1e-10, covered: bool | None = None
) -> None:
    """Compare an operator, and all that it computes of single gradients, with given ones."""
    rows = rows.double()
    gradients = A.gradients()
    parts = gradients.values() if isinstance(gradients, dict) else gradients
    V, U = vectors(A, 2), vectors(A, 2, rows=True)
    quantities = {
        "dense": (A.dense(), rows),
        "gradients": (torch.cat([part.reshape(len(rows), -1) for part in parts], 1), rows),
        "norms": (A.norms(), rows.norm(dim=1)),
        "gram": (A.gram(), rows @ rows.T),
        "second_moment": (A.second_moment(), rows.square().mean(0)),
        "products": (A @ V, rows @ V.double()),
        "product": (A @ V[:, 0], rows @ V[:, 0].double()),
        "adjoint": (A.T @ U, rows.T @ U.double()),
        "scores": (A.scores(V), rows @ V.double()),
        "score": (A.scores(V[:, 0]), rows @ V[:, 0].double()),
    }
    for name, (found, expected) in quantities.items():
        assert error(found, expected) <= tolerance, name
    assert covered in (None, not A.fallbacks), A.fallbacks


def compare(
    model: nn.Module,
    data: Data,
    rows: Tensor,
    covered: bool | None = True,
    tolerance: float = 1e-10,
    **options: Any,
) -> None:
    """Compare everything that is computed of single gradients with given ones."""
    arguments = model, LOSS, list(model.parameters()), data
    check_rows(PerSampleGradients(*arguments, **options), rows, tolerance, covered)
    # where there is too little memory for rows, from inputs and output gradients
    fisher, V = rows.T @ rows, torch.randn(rows.shape[1], 2).double()
    for cache in ("auto", 1):
        E = EFLinearOperator(*arguments, terms="sample", cache=cache)
        assert error(E @ V, fisher @ V) <= 10 * tolerance
        assert error(E @ V[:, 0], fisher @ V[:, 0]) <= 10 * tolerance
    if data[0][1][0].numel() > 200:  # too many for a matrix of all outputs
        return
    J = JacobianLinearOperator(model, arguments[2], data)
    dense = J @ torch.eye(J.shape[1], dtype=torch.float64)
    assert error(J.gram(), dense @ dense.T) <= tolerance
    diagonal = GGNDiagonalLinearOperator(*arguments).diagonal()
    assert error(diagonal, 2 * dense.square().sum(0)) <= tolerance


def check_blocks(
    model: nn.Module,
    data: Data,
    rows: Tensor,
    blocks: str,
    tolerance: float,
    approximations: tuple[str, ...] = ("expand", "reduce"),
) -> None:
    """Compare EKFAC's trace with given gradients, and KFAC with that of samples in batches alone.

    Args:
        blocks: The structure of all blocks, or why KFAC refuses the model; neither if it is empty.
    """
    arguments = model, LOSS, list(model.parameters())
    options = {"fisher_type": "empirical", "check_deterministic": False}
    if blocks:
        K = KFACLinearOperator(*arguments, data, **options)
        if blocks == "kronecker":
            assert {block.structure for block in K.report()} == {blocks}
        else:
            with pytest.raises(NotImplementedError, match=blocks):
                K.trace()
    options["fallback"] = "dense"
    E = EKFACLinearOperator(*arguments, data, **options)
    assert error(E.trace(), rows.square().sum()) <= tolerance
    for approx in approximations:
        alone = [
            (tree_map(lambda x, n=n: x[n : n + 1], X), y[n : n + 1])
            for X, y in data
            for n in range(len(y))
        ]
        found = [
            KFACLinearOperator(*arguments, some, kfac_approx=approx, **options).to_dense()
            for some in (data, alone)
        ]
        assert error(*found) <= tolerance


def images(dims: int, channels: int, length: int = 6) -> list[Tensor]:
    """Two batches of unequal size."""
    return [torch.randn(n, channels, *[length + i for i in range(dims)]) for n in (2, 3)]


def sequences(width: int = 4) -> list[Tensor]:
    """Batches of unequal size and length; the first has as many samples as positions."""
    return [torch.randn(3, 3, width), torch.randn(2, 5, width), torch.randn(4, 2, width)]


# --- tables of models


def weight(*shape: int) -> nn.Parameter:
    """Return a random parameter."""
    return nn.Parameter(torch.randn(shape) / 2)


def linear(*sizes: int, bias: bool = True) -> Callable[[], nn.Module]:
    return partial(nn.Linear, *sizes, bias=bias)


def batches(*shape: int, sizes: tuple[int, ...] = (4, 3)) -> Callable[[], list[Tensor]]:
    """Return what draws batches of samples of a shape."""
    return lambda: [torch.randn(n, *shape) for n in sizes]


class Row(NamedTuple):
    """A function of parts and an input.

    Attributes:
        parts: Each is built, or a weight of some shape.
        covered: Whether rules cover all parameters.
        kfac: The structure of all blocks, or why KFAC refuses the model; not said if it is empty.
        core: Whether the row is tested each time.
    """

    function: Callable[[Using, Any], Tensor]
    parts: dict[str, Any]
    inputs: Callable[[], list]
    covered: bool = True
    kfac: str = ""
    tolerance: float = 1e-10
    core: bool = False

    def build(self) -> Using:
        built = {n: weight(*p) if isinstance(p, tuple) else p() for n, p in self.parts.items()}
        return Using(self.function, **built)

    def check(self) -> None:
        check(self.build(), self.inputs(), self.covered, self.tolerance, self.kfac)


def core(rows: dict[str, Row]) -> list[Any]:
    """Return the names of a table, of which some are tested each time."""
    some = pytest.mark.extensive
    return [n if row.core else pytest.param(n, marks=some) for n, row in rows.items()]
