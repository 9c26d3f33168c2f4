"""Rows belong to samples of the data: loaders that change their order after a pass are refused."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import curvlinops as C
from curvlinops.influence import GradientStore, score_batches, top_scores

N, D = 12, 15


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(3, (N,), generator=generator)


class SeededByPasses(Sampler):
    """Takes another order after each finished pass, as accelerate's sampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(N, generator=generator).tolist()
        self.epoch += 1


class SeededByStarts(SeededByPasses):
    """Takes another order after its first three starts, whether passes are finished or not."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        generator = torch.Generator().manual_seed(max(self.epoch, 4))
        yield from torch.randperm(N, generator=generator).tolist()


class FirstBatchStays(SeededByPasses):
    """Takes another order of all batches but the first, as that of the longest sequences."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        yield from [*range(4), *(i for i in order if i >= 4)]


class Own:
    """An own loader, with an order that it changes itself."""

    def __init__(self) -> None:
        self._X, self._y = samples()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self._X.split(4), self._y.split(4), strict=True)
        self._X, self._y = self._X.roll(1, 0), self._y.roll(1, 0)


def loader(sampler: Sampler | None = None) -> DataLoader:
    return DataLoader(TensorDataset(*samples()), 4, sampler=sampler)


CHANGING: dict[str, Callable[[], Any]] = {
    "sampler seeded by passes": lambda: loader(SeededByPasses()),
    "sampler seeded by starts": lambda: loader(SeededByStarts()),
    "the first batch stays": lambda: loader(FirstBatchStays()),
    "own": Own,
}
CONSTANT: dict[str, Callable[[], Any]] = {
    "list": lambda: list(loader()),
    "loader": loader,
    "workers": lambda: DataLoader(TensorDataset(*samples()), 4, num_workers=1),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def rows(data: Any, **options: Any) -> C.PerSampleGradientLinearOperator:
    model = net()
    params = list(model.parameters())
    return C.PerSampleGradientLinearOperator(model, nn.CrossEntropyLoss(), params, data, **options)


def jacobian(data: Any) -> C.JacobianLinearOperator:
    model = net()
    return C.JacobianLinearOperator(model, list(model.parameters()), data)


RESULTS: dict[str, tuple[Callable, Callable]] = {
    "norms": (rows, lambda A: A.norms()),
    "scores": (rows, lambda A: A.scores(torch.ones(D))),
    "scores in a file": (rows, lambda A: A.scores(torch.ones(D), out="scores")),
    "leading scores": (rows, lambda A: top_scores(A, torch.ones(D), 3).values),
    "scores by batch": (rows, lambda A: torch.cat([x for _, x in score_batches(A, torch.ones(D))])),
    "store": (rows, lambda A: GradientStore.write(A, "store", rank=1).scores(A)),
    "gradients": (rows, lambda A: A.gradients()[0]),
    "dense": (rows, lambda A: A.to_dense()),
    "gram": (rows, lambda A: A.gram()),
    "product": (rows, lambda A: A @ torch.ones(D)),
    "transposed product": (rows, lambda A: A.T @ torch.ones(A.shape[0])),
    "subsampled": (lambda d: rows(d, subsampling=[1, 5]), lambda A: A.norms()),
    "Jacobian": (jacobian, lambda A: A @ torch.ones(D)),
    "transposed Jacobian": (jacobian, lambda A: A.T @ torch.ones(A.shape[0])),
    "dense Jacobian": (jacobian, lambda A: A.to_dense()),
}


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("result", RESULTS)
def test_loaders_that_change_their_order(result: str, kind: str, tmp_path: Any, monkeypatch: Any):
    """The error names the remedy; it comes before numbers of other samples do."""
    monkeypatch.chdir(tmp_path)
    build, of = RESULTS[result]
    with pytest.raises(RuntimeError, match="shuffl"):
        A = build(CHANGING[kind]())
        of(A)
        of(A)


@pytest.mark.parametrize(
    "result, kind",
    [
        *product(RESULTS, ["loader"]),
        *product(["norms", "product", "Jacobian"], ["list", "workers"]),
    ],
)
def test_loaders_that_keep_their_order(result: str, kind: str, tmp_path: Any, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    build, of = RESULTS[result]
    first, second = (of(A) for A in [build(CONSTANT[kind]())] * 2)
    torch.testing.assert_close(first, second)


def test_sums_need_no_order():
    """Of sums over data, nobody asks for the order."""
    model, loss = net(), nn.CrossEntropyLoss()
    found = [
        C.HessianLinearOperator(model, loss, list(model.parameters()), data) @ torch.ones(D)
        for data in (loader(SeededByPasses()), loader())
    ]
    torch.testing.assert_close(*found)


def test_kept_products_read_no_data():
    J = jacobian(loader())
    v = torch.ones(D)
    with J.linearized():
        torch.testing.assert_close(J @ v, J @ v)


def test_without_checks():
    A = rows(loader(SeededByPasses()), check_deterministic=False)
    torch.testing.assert_close(A.norms().sort().values, A.norms().sort().values)
