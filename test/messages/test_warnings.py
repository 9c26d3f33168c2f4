"""Warnings name the user's line, from wherever they are issued."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import currentframe
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn

import curvlinops

X, Y = torch.randn(6, 3), torch.randint(2, (6,))


@contextmanager
def warned_at(line: int, match: str) -> Iterator[None]:
    """Expect one warning, at a line of this file."""
    with pytest.warns(UserWarning, match=match) as record:
        yield
    (found,) = {(warning.filename, warning.lineno) for warning in record}
    assert found == (__file__, line)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [curvlinops.HessianLinearOperator, curvlinops.GGNLinearOperator])
def test_construction(kind: Callable):
    model = normalized()
    arguments = model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, Y)]
    with warned_at(currentframe().f_lineno + 1, "BatchNorm in train mode"):
        kind(*arguments)


def test_jacobians():
    model = normalized()
    with warned_at(currentframe().f_lineno + 1, "BatchNorm in train mode"):
        curvlinops.JacobianLinearOperator(model, list(model.parameters()), [(X, Y)])


@pytest.mark.parametrize("wrap", [lambda H: H, lambda H: aslinearoperator(np.eye(34)) @ H])
def test_products(wrap: Callable):
    model = normalized().eval()
    H = curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, Y)]
    )
    model.train()
    A, v = wrap(H), np.ones(H.shape[1])
    with warned_at(currentframe().f_lineno + 1, "BatchNorm in train mode"):
        A @ v


def test_linear_losses():
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))
    arguments = model, nn.NLLLoss(), list(model.parameters()), [(X, Y)]
    with warned_at(currentframe().f_lineno + 1, "is linear in the model's output"):
        curvlinops.GGNLinearOperator(*arguments)


class Sine(torch.autograd.Function):
    """A function that autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


def test_custom_functions():
    """A closure cannot be evaluated at other parameters."""
    layer = nn.Linear(3, 2)
    H = curvlinops.HessianLinearOperator(
        lambda x: Sine.apply(layer(x)), nn.CrossEntropyLoss(), list(layer.parameters()), [(X, Y)]
    )
    with warned_at(currentframe().f_lineno + 1, "cannot be compared with differences"):
        H @ torch.ones(8)


SOLVERS = {
    "eigsh": lambda A: curvlinops.eigsh(A, 3, ncv=5, maxiter=0),
    "trace": lambda A: curvlinops.hutchinson_trace(A, 10, rtol=1e-6, distribution="gaussian"),
    "inverse": lambda A: curvlinops.CGInverseLinearOperator(A, maxiter=1) @ np.ones(30),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers(name: str):
    A = np.diag(np.arange(1.0, 31.0))
    solve = SOLVERS[name]
    with warned_at(solve.__code__.co_firstlineno, "not converged|standard error|not solved"):
        solve(A)
