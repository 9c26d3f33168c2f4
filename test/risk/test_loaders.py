"""Loaders whose batches are read by processes of their own."""

import multiprocessing
from collections.abc import Callable

import pytest
import torch
from contract import ALL, error, vectors
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import curvlinops as C

NUM_DATA = 10


class Samples(Dataset):
    """Samples that are made from their indices, in the process that reads them."""

    def __len__(self) -> int:
        return NUM_DATA

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.arange(index, index + 3).sin(), index % 2


#: Solvers, which linearize, and products, which do not.
USES: dict[str, Callable[[C.TorchLinearOperator], Tensor]] = {
    "product": lambda A: A @ vectors(A),
    "eigsh": lambda A: C.eigsh(A, k=2).eigenvalues,
    "CG": lambda A: C.CGInverseLinearOperator(A.damped(1.0)) @ vectors(A),
}


@pytest.mark.parametrize("case", ["hessian", "ggn", "fisher", "gradients", "kfac"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers(persistent: bool, case: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def build(**options) -> C.TorchLinearOperator:
        data = DataLoader(Samples(), batch_size=4, **options)
        return ALL[case].operator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)

    # a worker that hangs is an error
    A = build(num_workers=2, persistent_workers=persistent, timeout=60)
    for use in USES.values() if ALL[case].square else [USES["product"]]:
        assert error(use(A), use(build())) <= 1e-5
    if not persistent:
        assert not multiprocessing.active_children()


def test_workers_of_a_pass_that_fails():
    """They are stopped, and the next pass has all data."""
    model = nn.Linear(3, 2)
    data = DataLoader(Samples(), batch_size=4, num_workers=2, timeout=60)
    A = C.HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    expected, seen = A @ vectors(A), []

    def fail(module: nn.Module, inputs: tuple) -> None:
        seen.append(inputs)
        if len(seen) == 2:
            raise ZeroDivisionError

    with model.register_forward_pre_hook(fail), pytest.raises(ZeroDivisionError):
        A @ vectors(A)
    assert torch.equal(A @ vectors(A), expected)
    assert not multiprocessing.active_children()
