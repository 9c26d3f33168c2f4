"""Products with several vectors, and what they are made of."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.core.graph import footprint
from curvlinops.core.space import Columns, ParameterSpace

_LOGGER = logging.getLogger("curvlinops")

#: A batched pass needs about the graph's memory for each column. Several are faster while this
#: fits the caches, about, or while a pass is too short to occupy the device; see the benchmarks.
_BUDGETS = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}


def in_chunks(product: Callable[..., Columns], size: int | None) -> Callable[..., Columns]:
    """Return a function that applies a product to any number of columns.

    Args:
        product: Takes and returns columns. Several at once it computes by ``vmap``, which some
            operations do not support: then they are taken one by one.
        size: How many at once. Default: as many as have ``_BUDGETS`` bytes with the tensors in
            the product's closure.

    Returns:
        A function of columns, of the dtypes to which ``product`` needs them cast, and of further
        arguments of the product.
    """

    def apply(V: Columns, dtypes: Mapping[str, torch.dtype], *args: Any) -> Columns:
        nonlocal size
        some = next(iter(V.values()))
        if some.shape[0] > 1 and size is None:
            budget = _BUDGETS.get(some.device.type, _BUDGETS["cuda"])
            size = max(budget // max(footprint(product), 1), 1)
        while True:
            at_once = min(size, some.shape[0]) if some.shape[0] > 1 else 1
            try:
                return concatenate([product(v, *args) for v in _split(V, dtypes, at_once)])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if at_once == 1:
                    raise
                _LOGGER.info("Columns are multiplied one by one: %s", str(error).splitlines()[0])
                size = 1

    return apply


def _split(V: Columns, dtypes: Mapping[str, torch.dtype], size: int) -> Iterator[Columns]:
    num_columns = next(iter(V.values())).shape[0]
    for start in range(0, num_columns, size):
        yield {n: column[start : start + size].to(dtypes[n]) for n, column in V.items()}


def single_columns(V: Columns, dtypes: Mapping[str, torch.dtype]) -> Iterator[dict[str, Tensor]]:
    """Yield the columns one by one, cast to ``dtypes``, without their column axis."""
    for chunk in _split(V, dtypes, size=1):
        yield {name: column[0] for name, column in chunk.items()}


def stack(
    space: ParameterSpace, products: list[Mapping[str, Tensor | None]], names: Iterable[str]
) -> Columns:
    """Stack products of single vectors, in the dtype of ``space``; ``None`` is zero."""
    singles = [
        {
            name: space.zeros(1, [name])[name]
            if product[name] is None
            else product[name].detach().to(space.dtype).unsqueeze(0)
            for name in names
        }
        for product in products
    ]
    return concatenate(singles)


def concatenate(parts: list[Columns]) -> Columns:
    """Put columns side by side; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def add(total: Columns, part: Columns) -> None:
    """Add columns to a running total, which starts out empty.

    Not in place: autograd may return one tensor as the gradient of several parameters.
    """
    for name, column in part.items():
        total[name] = total[name] + column if name in total else column


def not_finite(columns: Columns) -> str | None:
    """Return the name of a tensor with NaN or infinite values, if there is one."""
    # sums are fast; only when one overflows or is NaN look at each value
    if bool(torch.stack([column.sum() for column in columns.values()]).isfinite().all()):
        return None
    return next((n for n, column in columns.items() if not bool(column.isfinite().all())), None)
