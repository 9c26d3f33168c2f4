"""Which batches are in memory after they were used."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from quantities import ALGORITHMS, ones
from torch import Tensor, nn

from curvlinops import TorchLinearOperator


class WatchedBatches:
    """Batches that each pass makes anew, and knows by weak references."""

    def __init__(self, data: list[tuple[Tensor, Any]]):
        self._data, self._made = data, []

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for X, y in self._data:
            own = X.clone()
            self._made.append(weakref.ref(own.untyped_storage()))
            yield own, y

    def alive(self) -> int:
        """The number of batches that are in memory."""
        gc.collect()
        return sum(ref() is not None for ref in self._made)

    def check(self, what: str) -> None:
        """Check that batches were made since the last check, and are gone."""
        alive = self.alive()
        assert self._made, f"{what}: no batch was read"
        assert not alive, f"{what}: {alive} of {len(self._made)} batches are in memory"
        self._made.clear()


def saving_outputs() -> nn.Module:
    """A model of operations that save outputs, inputs and parameters for their backward passes."""
    layers = nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Softmax(1), nn.Linear(4, 3)
    return nn.Sequential(*layers, nn.Sigmoid())


def in_context(A: TorchLinearOperator) -> None:
    with A.linearized():
        for shape in ((), (2,), ()):
            A @ ones(A, *shape)


def transposed(A: TorchLinearOperator) -> None:
    A.T @ [torch.ones(A.codomain.shapes[""], dtype=A.torch_dtype)]


Uses = dict[str, Callable[[Any], Any]]

PRODUCTS: Uses = {
    "product": lambda A: A @ ones(A),
    "product of columns": lambda A: A @ ones(A, 2),
    "context": in_context,
}
LOSSES: Uses = {"gradient": lambda A: A.gradient_and_loss()}
ROWS: Uses = {"transposed product": transposed, "gram": lambda A: A.gram()}
GRADIENTS: Uses = {
    "norms": lambda A: A.norms(),
    "moments": lambda A: A.second_moment(),
    "scores": lambda A: A.scores(ones(A, 2)),
}
FACTORS: Uses = {
    "factors, inverse": lambda A: A.inverse(0.1) @ ones(A),
    "new factors": lambda A: A.compute_kronecker_factors(),
}
#: What is computed with operators of ``contract.ALL``.
USES = {
    **dict.fromkeys(("hessian", "ggn", "mc", "fisher", "fisher-samples"), PRODUCTS | LOSSES),
    "jacobian": PRODUCTS | ROWS,
    "gradients": PRODUCTS | LOSSES | ROWS | GRADIENTS,
    "kfac": FACTORS,
    "ekfac": FACTORS,
}


def check_batches_are_freed(
    build: Callable[[str, WatchedBatches], TorchLinearOperator],
    data: list[tuple[Tensor, Any]],
    without: str | tuple[str, ...] = (),
) -> None:
    """Check that nothing holds a batch after constructions, products, factors and algorithms.

    Args:
        build: Builds an operator of ``contract.ALL``, of ``saving_outputs``.
        data: The batches.
        without: The beginnings of the names of algorithms that are left out.
    """
    watched = WatchedBatches(data)
    for case, uses in USES.items():
        A = build(case, watched)
        watched.check(f"construction of {case}")
        for name, use in uses.items():
            use(A)
            watched.check(f"{name} of {case}")
    G = build("ggn", watched).damped(0.5)
    for name, compute in ALGORITHMS.items():
        if not name.startswith(without):
            compute(G)
            watched.check(name)
