"""Products with several vectors, and what they are made of."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import ceil, isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns
from curvlinops.support.autograd_graph import footprint
from curvlinops.support.memory import lacks_memory
from curvlinops.support.norms import double_dot, double_norm
from curvlinops.support.torch_internals import without_torch_function
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")

Item = TypeVar("Item")

#: A batched pass needs about the graph's memory for each column. Several are faster while this
#: fits the caches, about, or while a pass is too short to occupy the device; see the benchmarks.
_BUDGETS = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}


def room_for(num_columns: int, graph_bytes: int, device: torch.device) -> bool:
    """Return whether several times a graph's memory is still little enough to be fast."""
    return num_columns * graph_bytes <= _BUDGETS.get(device.type, _BUDGETS["cuda"])


def in_chunks(
    product: Callable[..., Columns], size: int | None
) -> Callable[..., Iterator[tuple[slice, Columns]]]:
    """Return a function that applies a product to any number of columns.

    Args:
        product: Takes and returns columns. Several at once it computes by ``vmap``, which some
            operations do not support: then they are taken one by one.
        size: How many at once, fewer if there is no memory for so many. Default: as many as have
            ``_BUDGETS`` bytes with the tensors in the product's closure.

    Returns:
        A function of columns, of the dtypes to which ``product`` needs them cast, and of further
        arguments of the product. It yields which columns it has multiplied, and their product.
    """

    def chunks(
        V: Columns, dtypes: Mapping[str, torch.dtype], *args: Any
    ) -> Iterator[tuple[slice, Columns]]:
        nonlocal size
        some = next(iter(V.values()))
        num_columns, start = some.shape[0], 0
        if num_columns > 1 and size is None:
            budget = _BUDGETS.get(some.device.type, _BUDGETS["cuda"])
            size = max(budget // max(footprint(product), 1), 1)
        failure = None
        while start < num_columns:
            rest = 1 if failure else num_columns - start
            # in equal parts
            rows = slice(start, start + (1 if rest == 1 else ceil(rest / ceil(rest / size))))
            try:
                part = product(_take(V, rows, dtypes), *args)
            except Exception as error:  # a user's own backward may raise anything
                if rows.stop == start + 1:
                    raise
                if lacks_memory(error):
                    size = (rows.stop - start) // 2
                    _LOGGER.warning("No memory for so many columns at once, now %d.", size)
                else:
                    failure = first_line(error)
                continue
            if failure:  # what one column can do, vmap cannot
                _LOGGER.info("Columns are multiplied one by one: %s", failure)
                size, failure = 1, None
            yield rows, part
            start = rows.stop

    return chunks


def single_columns(V: Columns, dtypes: Mapping[str, torch.dtype]) -> Iterator[dict[str, Tensor]]:
    """Yield the columns one by one, cast to ``dtypes``, without their column axis."""
    for index in range(next(iter(V.values())).shape[0]):
        column = _take(V, slice(index, index + 1), dtypes)
        yield {name: value[0] for name, value in column.items()}


def _take(V: Columns, rows: slice, dtypes: Mapping[str, torch.dtype]) -> Columns:
    with without_torch_function():  # an evaluation watches what the model calls
        # contiguous: the columns of a matrix are far apart in its memory
        return {name: column[rows].to(dtypes[name]).contiguous() for name, column in V.items()}


def add(total: Columns, rows: slice | int, part: Mapping[str, Tensor | None]) -> None:
    """Add products of some columns to a total, in place; ``None`` is zero."""
    names = [name for name, product in part.items() if product is not None]
    if not names:
        return
    with without_torch_function():
        torch._foreach_add_(
            [total[name][rows] for name in names], [part[name].detach() for name in names]
        )


def mark_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield items, each when the next one is known, and whether there is none."""
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, False
            item = following
        yield item, True


def total(first: Columns, second: Columns) -> Columns:
    """Return the sum of columns."""
    return {name: first[name] + second[name] for name in first}


def multiple(columns: Columns, scalar: float) -> Columns:
    """Return a multiple of columns."""
    return {name: scalar * column for name, column in columns.items()}


def dot(first: Columns, second: Columns) -> float:
    """Return the inner product of columns, summed in float64."""
    return float(sum(double_dot(first[name], second[name]) for name in first))


def norm(columns: Columns) -> float:
    """Return the root of the sum of all squares, summed in float64."""
    return float(sum(double_norm(column) ** 2 for column in columns.values())) ** 0.5


def not_finite(columns: Columns, together: Iterable[Tensor] = ()) -> str | None:
    """Return the name of a tensor with NaN or infinite values, if there is one.

    Args:
        columns: Tensors by name.
        together: The same numbers in fewer tensors, if there are such: faster to check.
    """
    # sums are fast; only when one overflows or is NaN look at each value
    sums = [tensor.detach().sum() for tensor in together or columns.values()]
    if isfinite(float(sums[0] if len(sums) == 1 else torch.stack(sums).sum())):
        return None
    return next((n for n, column in columns.items() if not bool(column.isfinite().all())), None)


def apart(columns: Columns, others: Columns) -> Columns:
    """Return columns, copied where they have memory in common with others."""
    taken = {column.untyped_storage().data_ptr() for column in others.values()}
    return {
        name: column.clone() if column.untyped_storage().data_ptr() in taken else column
        for name, column in columns.items()
    }
