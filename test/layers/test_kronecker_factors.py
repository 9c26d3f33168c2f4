"""A user's rule with a class of gradients of its own: everything follows from these methods."""

from typing import Any

import pytest
import torch
from contract import error, matrix
from models import Using
from sample_gradients import check_rows, rows_in_batches
from torch import Tensor, nn
from torch.nn.functional import linear

from curvlinops import EKFACLinearOperator, KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.layers.factors import FactoredGradient, KroneckerShape
from curvlinops.layers.gradients import Entries
from curvlinops.layers.rules import RULES, Matrices, Use

LOSS = nn.MSELoss(reduction="sum")


class Pairs(FactoredGradient):
    """Sums over pairs of inputs ``[N, S, I]`` and output gradients ``[V, N, S, O]``."""

    def __init__(self, x: Tensor, g: Tensor, entries: Entries):
        self.x, self.g, self.entries = x, g, entries
        self.num_vectors, self.num_samples = g.shape[:2]

    @property
    def kronecker_shape(self) -> KroneckerShape:
        return KroneckerShape(1, *self.entries.shape, self.entries.view)

    def values(self, samples: slice) -> Tensor:
        return torch.einsum("vnso,nsi->vnoi", self.g[:, samples], self.x[samples])

    def to(self, dtype: torch.dtype) -> "Pairs":
        return Pairs(self.x.to(dtype), self.g.to(dtype), self.entries)

    def output_gradients(self) -> Tensor:
        return self.g.unsqueeze(3)

    def inputs(self) -> Tensor:
        return self.x.unsqueeze(2)


class Repeated(torch.autograd.Function):
    """The product of ``[N, I]`` and ``[O, I]`` at three positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w.T).unsqueeze(1).repeat(1, 3, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g.sum(1) @ w, g.sum(1).T @ x


def repeated(node: Any, position: int) -> Use | None:
    x, w = node.saved_tensors
    return Use(
        row_shape=(len(x), 3),
        row_axes=(0, 1),
        to_rows=lambda g: g,
        gradient=Pairs,
        other=x.unsqueeze(1).expand(-1, 3, -1),
        matrices=Matrices(1, *w.shape),
    )


def plain(x: Tensor, w: Tensor) -> Tensor:
    return linear(x.unsqueeze(1).expand(-1, 3, -1), w)


#: How the weights are used, where the function is that of the user, or the same in plain words.
MODELS = {
    "once": lambda f, s, x: torch.tanh(f(x, s.w) * s.places).flatten(1),
    "twice": lambda f, s, x: torch.tanh(f(torch.tanh(f(x, s.w)[:, 0]), s.w) * s.places).flatten(1),
    "beside a product": lambda f, s, x: torch.tanh(f(torch.sin(x @ s.w.T), s.w) * s.places).sum(1),
}


@pytest.mark.parametrize("name", MODELS)
def test_classes_of_users(name: str, double: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, "RepeatedBackward", repeated)
    torch.manual_seed(0)
    places = nn.Buffer(torch.randn(3, 1))
    own, other = (
        Using(lambda s, x, f=f: MODELS[name](f, s, x), w=w, places=places)
        for w in [torch.randn(4, 4)]
        for f in (Repeated.apply, plain)
    )
    data = [(x, torch.randn_like(own(x)).detach()) for x in (torch.randn(5, 4), torch.randn(2, 4))]
    J = PerSampleGradientLinearOperator(own, LOSS, [own.w], data)
    check_rows(J, rows_in_batches(other, data, LOSS), covered=True)
    for cls in (KFACLinearOperator, EKFACLinearOperator):
        for options in (
            {"fisher_type": "type-2"},
            {"kfac_approx": "reduce", "fisher_type": "empirical"},
            {"max_factor_size": 3, "fisher_type": "empirical"},
            {"fisher_type": "empirical", "fit": "frobenius"},
        ):
            found = [cls(model, LOSS, [model.w], data, **options) for model in (own, other)]
            assert error(*map(matrix, found)) <= 1e-9, (cls, options)
            assert found[0].report() == found[1].report()
