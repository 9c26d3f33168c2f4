"""Warnings name the user's line, from wherever they are issued."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn

import curvlinops as C

DATA = [(torch.randn(6, 3), torch.randint(2, (6,)))]
CE, NLL = nn.CrossEntropyLoss(), nn.NLLLoss()
NORM = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
LOG = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))
LAYER = nn.Linear(3, 2)
MATRIX = np.diag(np.arange(1.0, 31.0))


def params(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def put_into_train_mode() -> C.HessianLinearOperator:
    H = C.HessianLinearOperator(NORM.eval(), CE, params(NORM), DATA)
    NORM.train()
    return H


class Sine(torch.autograd.Function):
    """A function that autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


def closure() -> C.HessianLinearOperator:
    """A closure cannot be evaluated at other parameters."""
    return C.HessianLinearOperator(lambda x: Sine.apply(LAYER(x)), CE, params(LAYER), DATA)


TRAIN, LINEAR = "BatchNorm in train mode", "NLLLoss is linear in the.*GGN is zero.*CrossEntropyLoss"
#: Programs of one line, and the warning that names this line.
PROGRAMS: list[tuple[Callable[[], object], str]] = [
    (lambda: C.HessianLinearOperator(NORM.train(), CE, params(NORM), DATA), TRAIN),
    (lambda: C.GGNLinearOperator(NORM.train(), CE, params(NORM), DATA), TRAIN),
    (lambda: C.JacobianLinearOperator(NORM.train(), params(NORM), DATA), TRAIN),
    (lambda: put_into_train_mode() @ np.ones(34), TRAIN),
    (lambda: aslinearoperator(np.eye(34)) @ put_into_train_mode() @ np.ones(34), TRAIN),
    (lambda: C.GGNLinearOperator(LOG, NLL, params(LOG), DATA), LINEAR),
    (lambda: closure() @ torch.ones(8), "cannot be compared with differences"),
    (lambda: C.eigsh(MATRIX, 3, ncv=5, maxiter=0), "not converged"),
    (lambda: C.hutchinson_trace(MATRIX, 9, rtol=1e-6, distribution="gaussian"), "standard error"),
    (lambda: C.CGInverseLinearOperator(MATRIX, maxiter=1) @ np.ones(30), "not solved"),
]


@pytest.mark.parametrize("program, match", PROGRAMS)
def test_warnings(program: Callable[[], object], match: str):
    with pytest.warns(UserWarning, match=match) as record:
        program()
    found = {(warning.filename, warning.lineno) for warning in record}
    assert found == {(__file__, program.__code__.co_firstlineno)}
