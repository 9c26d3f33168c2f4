"""What is tried on the first few samples of a batch must hold for all of them."""

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlinops
from curvlinops import PerSampleGradientLinearOperator
from curvlinops.core.data import Batch, first_samples
from curvlinops.core.risk import BatchRisk

N = 16


class Model(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.double()
        self._function = function

    def forward(self, x: Any) -> Tensor:
        return self.head(self._function(self, x))


def fixed_batch_size(m: Model, x: Tensor) -> Tensor:
    """Refuse any other number of samples."""
    return torch.tanh(m.first(x) * m.second(x).view(N, 4))


def late_expert(m: Model, x: Tensor) -> Tensor:
    """Use a layer for the last samples only."""
    late = x[:, 0] > 0
    out = m.first(x)
    out[late] = m.second(x[late])
    return torch.tanh(out)


def few_another_way(m: Model, x: Tensor) -> Tensor:
    """Call other functions, in another order, for few samples."""
    if len(x) < 8:
        second = torch.einsum("ni,oi->on", x, m.second.weight) + m.second.bias[:, None]
        return torch.tanh(second.T + m.first(x))
    return torch.tanh(F.linear(x, m.first.weight, m.first.bias) * m.second(x))


def late_gradients(m: Model, x: Tensor) -> Tensor:
    """Depend on a layer for the last samples only."""
    return m.first(x) + torch.relu(x[:, :1]) * torch.tanh(m.second(x))


def positions_first(m: Model, x: Tensor) -> Tensor:
    """Take a sequence as long as the batch, positions first."""
    return torch.tanh(m.first(x).cumsum(0) + m.second(x)).mean(0)


def inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(N) < N // 2, -1, 1)
    return torch.stack([x.roll(i, 0) for i in range(N)]) if name == "positions_first" else x


MODELS = {
    f.__name__: f
    for f in (fixed_batch_size, late_expert, few_another_way, late_gradients, positions_first)
}
OPERATORS = {
    "Hessian": curvlinops.HessianLinearOperator,
    "GGN": curvlinops.GGNLinearOperator,
    "EF": curvlinops.EFLinearOperator,
    "Jacobian": curvlinops.JacobianLinearOperator,
    "diagonal": curvlinops.GGNDiagonalLinearOperator,
    "rows": curvlinops.PerSampleGradientLinearOperator,
    "KFAC": curvlinops.KFACLinearOperator,
    "EKFAC": curvlinops.EKFACLinearOperator,
}


def matrix(kind: str, name: str, **options: Any) -> Tensor:
    """Return an operator as a matrix, for the sum of squares."""
    model = Model(MODELS[name])
    x = inputs(name)
    y = torch.zeros(N, 2, dtype=torch.float64)
    if name == "positions_first":
        options["batch_size_fn"] = lambda X: X.shape[1]
    if kind in ("KFAC", "EKFAC"):
        options["fisher_type"] = "type-2"
    loss = [] if kind == "Jacobian" else [nn.MSELoss(reduction="sum")]
    operator = OPERATORS[kind](model, *loss, list(model.parameters()), [(x, y)], **options)
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


@pytest.mark.parametrize("check_deterministic", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_nothing_else_is_computed(kind: str, name: str, check_deterministic: bool, monkeypatch):
    found = matrix(kind, name, check_deterministic=check_deterministic)
    monkeypatch.setattr(BatchRisk, "first_samples", lambda self: None)
    expected = matrix(kind, name)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10 * float(expected.norm()))


def test_samples_that_interact_are_refused():
    model = Model(lambda m, x: torch.tanh(m.first(x) - m.second(x).mean(0)))
    data = [(inputs(""), torch.zeros(N, 2, dtype=torch.float64))]
    operator = PerSampleGradientLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    with pytest.raises(ValueError, match="depends on the other samples"):
        operator.dense()


class Movable(UserDict):
    """A mapping that moves itself to a device, as those of Hugging Face."""

    def to(self, device: torch.device) -> "Movable":
        return self


def test_what_is_cut():
    x, mask, scale = torch.randn(N, 5), torch.ones(N, 5, 5), torch.ones(3)
    X = Movable(x=x, nested=[{"mask": mask}], scale=scale, flag=True, empty=None)
    few = first_samples(Batch(3, X, torch.arange(N)), N)
    assert few.index == 3 and isinstance(few.X, Movable)
    torch.testing.assert_close(few.X["x"], x[:2])
    assert few.X["nested"][0]["mask"].shape == (2, 5, 5)
    assert few.X["scale"] is scale and few.X["flag"] is True and few.X["empty"] is None
    assert few.y.tolist() == [0, 1]
    assert X["x"] is x and X["nested"][0]["mask"] is mask


@pytest.mark.parametrize(
    ("X", "y"),
    [
        (torch.ones(3, 2), torch.ones(3)),  # few anyway
        ([torch.ones(5, N), torch.tensor(1.0)], torch.ones(N)),  # nothing of X
        (torch.ones(N, 5), torch.ones(N * 5)),  # targets of another length
        ({"x": torch.ones(N)}, [torch.ones(N), torch.ones(2)]),
    ],
)
def test_what_cannot_be_cut(X: Any, y: Any):
    num_samples = 3 if isinstance(X, Tensor) and len(X) == 3 else N
    assert first_samples(Batch(0, X, y), num_samples) is None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_kinds_of_tensors():
    x = torch.ones(N, 2, requires_grad=True)
    few = first_samples(Batch(0, x, x), N)
    assert few.X is few.y and few.X.requires_grad and few.X.is_leaf
    model = nn.Linear(3, 1).double()
    for X in (inputs("").to_sparse(), inputs("").to_sparse_csr()):
        data = [(X, torch.zeros(N, 1, dtype=torch.float64))]
        arguments = model, nn.MSELoss(), list(model.parameters())
        found = curvlinops.HessianLinearOperator(*arguments, data, batch_size_fn=len)
        dense = curvlinops.HessianLinearOperator(*arguments, [(X.to_dense(), data[0][1])])
        eye = torch.eye(4, dtype=torch.float64)
        torch.testing.assert_close(found @ eye, dense @ eye)


def test_large_batches_are_tried_in_part():
    few = first_samples(Batch(0, torch.ones(256, 2), None), 256)
    assert len(few.X) == 32 and few.y is None
    assert few.X.untyped_storage().nbytes() == few.X.nbytes
