"""A problem whose model, loss and data can be changed in every way."""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from contract import ALL, error, vectors
from problems import Problem
from torch import Tensor, nn

from curvlinops import TorchLinearOperator

SCALE = 1.0


def _scale() -> float:
    return SCALE


class Changeable(nn.Module):
    """Depends on everything that a module can depend on."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.rand(5) + 0.5, requires_grad=False)
        self.act, self.gain, self.plain, self.array = nn.Tanh(), 1.0, torch.ones(5), np.ones(1)
        self.config, self.read = {"nested": [0.0]}, _scale
        nn.init.uniform_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x))) * self.frozen * self.plain
        x = self.gain * self.factor * x * float(self.array[0]) + self.config["nested"][0]
        return self.last(self.read() * x)


class World:
    """A problem that can be changed in every way."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Changeable().double().eval()
        self.data = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (4, 2)]
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double())
        self.params = [p for p in self.model.parameters() if p.requires_grad]

    @property
    def problem(self) -> Problem:
        """The problem as it is now."""
        return Problem(self.model, self.loss, self.params, self.data, mc=True)

    def build(self, case: str) -> TorchLinearOperator:
        """Return an operator, without warnings of BatchNorm in train mode."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return ALL[case].build(self.problem)

    def follows(self, case: str, change: Callable[[], object]) -> float:
        """Check that an operator is what a new one is, after a change; return the difference."""
        A = self.build(case)
        V = vectors(A, 2)
        with A.linearized():
            before = A @ V
        change()
        fresh = self.build(case)
        for columns in (V[:, 0], V):
            assert error(A @ columns, fresh @ columns) <= 1e-10
        with A.linearized():
            assert error(A @ V, fresh @ V) <= 1e-10
        torch.testing.assert_close(A.gradient_and_loss(), fresh.gradient_and_loss())
        return error(A @ V, before)
