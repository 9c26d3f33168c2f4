"""Closed forms for the last layer of models with many outputs equal what all vectors give."""

from collections.abc import Callable

import pytest
import torch
from contract import error, matrix
from torch import Tensor, nn
from torch.nn.functional import linear

from curvlinops import EKFACLinearOperator, GGNDiagonalLinearOperator, KFACLinearOperator
from curvlinops.operators import vectors

D, H, C, T = 3, 4, 5, 2


class Tied(nn.Module):
    """A head with the weight of an embedding, on samples of one or several tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(C, H), nn.Linear(H, H)
        self.head = nn.Linear(H, C, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.table(x)).tanh())


class Twice(nn.Module):
    """A head that is an earlier layer, too."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(D, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.head(self.first(x)).tanh())


class Sometimes(nn.Module):
    """A head whose weight scales an earlier layer for some inputs, so that its block is exact."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(D, H), nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).tanh()
        return self.head(z * self.head.weight.square().sum(0) if (x > 0).all() else z)


class Hooked(nn.Module):
    """Doubles the gradient at its output."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        z = self.layers(x)
        if z.requires_grad:
            z.register_hook(lambda g: 2 * g)
        return z


class Transposed(nn.Module):
    """A head whose weight is ``[in, out]``."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(D, H), nn.Parameter(torch.randn(H, C))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() @ self.weight


class Biased(nn.Module):
    """A head whose bias is a function of its weight, or of another parameter."""

    def __init__(self, bias: Callable[[nn.Module], Tensor]):
        super().__init__()
        self.first, self.head, self.bias = nn.Linear(D, H), nn.Linear(H, C), bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.first(x).tanh(), self.head.weight, self.bias(self.head))


def net(bias: bool = True, outputs: int = C, *last: nn.Module) -> nn.Module:
    norm = nn.LayerNorm(H)
    return nn.Sequential(nn.Linear(D, H), norm, nn.Tanh(), nn.Linear(H, outputs, bias), *last)


def classes(*size: int) -> Tensor:
    return torch.randint(C, size)


CE = nn.CrossEntropyLoss
WEIGHTED = {"weight": torch.linspace(0.5, 2, C).double()}
#: The model, the loss, inputs and targets of n samples, and whether there is a closed form.
CASES: dict[str, tuple[Callable[[], nn.Module], nn.Module, Callable, Callable, bool]] = {
    "classes": (net, CE(), lambda n: torch.randn(n, D), classes, True),
    "sum": (net, CE(reduction="sum"), lambda n: torch.randn(n, D), classes, True),
    "no bias": (lambda: net(False), CE(), lambda n: torch.randn(n, D), classes, True),
    "head alone": (lambda: nn.Linear(D, C), CE(), lambda n: torch.randn(n, D), classes, True),
    "transposed": (Transposed, CE(), lambda n: torch.randn(n, D), classes, True),
    "options": (
        net, CE(ignore_index=1, label_smoothing=0.1, **WEIGHTED), lambda n: torch.randn(n, D),
        classes, True,
    ),
    "probabilities": (
        net, CE(**WEIGHTED), lambda n: torch.randn(n, D), lambda n: torch.rand(n, C), True,
    ),
    "scalars": (
        lambda: net(True, 1, nn.Flatten(0)), nn.BCEWithLogitsLoss(), lambda n: torch.randn(n, D),
        torch.rand, True,
    ),
    "squares": (net, nn.MSELoss(), lambda n: torch.randn(n, D), lambda n: torch.rand(n, C), True),
    "labels": (
        net, nn.BCEWithLogitsLoss(**WEIGHTED), lambda n: torch.randn(n, D),
        lambda n: torch.rand(n, C), True,
    ),
    "counts": (
        net, nn.PoissonNLLLoss(reduction="sum"), lambda n: torch.randn(n, D),
        lambda n: torch.rand(n, C), True,
    ),
    "positions": (
        net, nn.MSELoss(), lambda n: torch.randn(n, T, D), lambda n: torch.rand(n, T, C), True,
    ),
    "flat positions": (
        lambda: net(True, C, nn.Flatten(0, 1)), CE(), lambda n: torch.randn(n, T, D),
        lambda n: classes(n * T), True,
    ),
    "classes first": (
        lambda: net(True, C, nn.Unflatten(-1, (C, 1)), nn.Flatten(2)), CE(),
        lambda n: torch.randn(n, T, D), lambda n: torch.randint(T, (n, C)), False,
    ),
    "tied": (Tied, CE(), classes, classes, True),
    "tied tokens": (
        Tied, nn.MSELoss(), lambda n: classes(n, T), lambda n: torch.rand(n, T, C), True,
    ),
    "sometimes used twice": (
        Sometimes, CE(), lambda n: torch.rand(n, D) * (1 if n > 3 else -1), classes, True,
    ),
    "hooks": (Hooked, CE(), lambda n: torch.randn(n, D), classes, False),
    "used twice": (Twice, CE(), lambda n: torch.randn(n, D), classes, False),
    "matrix and bias": (
        lambda: Biased(lambda head: head.weight[:, 0]), CE(), lambda n: torch.randn(n, D), classes,
        False,
    ),
    "function as bias": (
        lambda: Biased(lambda head: head.bias.exp()), CE(), lambda n: torch.randn(n, D), classes,
        False,
    ),
}  # fmt: skip


def double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("name", CASES)
def test_closed_forms(name: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    make, loss, inputs, targets, has_closed_form = CASES[name]
    model = make().double()
    params = dict(model.named_parameters())
    data = [(double(inputs(n)), double(targets(n))) for n in (6, 3)]
    arguments, heads, head_of = (model, loss, params, data), [], vectors.head_of

    def noted(*args: object, **kwargs: object) -> vectors.Head | None:
        heads.append(head_of(*args, **kwargs))
        return heads[-1]

    for place in ("ggn_diagonal", "kfac.estimate", "kfac.block_sums"):
        monkeypatch.setattr(f"curvlinops.operators.{place}.head_of", noted)

    def results() -> list[Tensor]:
        diagonal = GGNDiagonalLinearOperator(*arguments, batch_size_fn=len)
        found, joint = [matrix(diagonal), diagonal.trace()], {"separate_weight_and_bias": False}
        for cls in (KFACLinearOperator, EKFACLinearOperator):
            # random signs of different roots differ
            exact = {"fisher_type": "type-2", "exact": name == "flat positions"}
            reduce = {"fisher_type": "type-2", "exact": True, "kfac_approx": "reduce", **joint}
            for options in (exact, reduce):
                options |= {"fallback": "diagonal", "batch_size_fn": len}
                found.append(matrix(cls(*arguments, **options)))
        return found

    monkeypatch.setattr(vectors, "FEW_OUTPUTS", 10**9)
    expected = results()
    assert not any(heads)
    monkeypatch.setattr(vectors, "FEW_OUTPUTS", 0)
    found = results()
    assert any(heads) == has_closed_form
    for x, y in zip(found, expected, strict=True):
        assert error(x, y) <= 1e-12
