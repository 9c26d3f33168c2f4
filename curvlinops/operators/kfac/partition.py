"""Which parameters' factors belong together, and the passes and processes that compute them."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import prod

from curvlinops.operators.kfac.blocks import Uses
from curvlinops.structured.layout import ParameterView, connected


def units(uses: Uses, names: Sequence[str]) -> list[list[str]]:
    """Return the parameters in groups whose blocks have no factor in common."""
    pairs = [{use.name, use.partner.name} for use in uses.known if use.partner is not None]
    together = [{use.name for use in shared} for shared in uses.inputs]
    groups = connected([*([name] for name in names), *pairs, *together])
    return [[names[i] for i in group if i < len(names)] for group in groups]


def num_entries(
    uses: Uses, names: Collection[str], shapes: Mapping[str, Sequence[int]], limit: int
) -> int:
    """Return about how many numbers parameters and factors have; above the limit, diagonals."""
    factors: dict[ParameterView, int] = {}
    for use in uses.known:
        shape = use.shape
        if use.name not in names or shape is None or (shape.is_bias and use.shares_gradients):
            continue
        sizes = [(shape.outputs, False)]
        sizes += [] if shape.is_bias else [(shape.inputs, shape.one_hot_inputs)]
        number = shape.groups * sum(
            size if is_diagonal or size > limit else size**2 for size, is_diagonal in sizes
        )
        # processes have the uses in different orders
        factors[use.view] = max(number, factors.get(use.view, 0))
    return sum(prod(shapes[name]) for name in names) + sum(factors.values())


def in_passes(groups: Sequence[list[str]], sizes: Sequence[int], num: int) -> list[list[str]]:
    """Divide groups of parameters into at most ``num`` parts of neighbors of about equal size."""
    total, parts = sum(sizes), dict[int, list[str]]()
    for group, size, end in zip(groups, sizes, accumulate(sizes), strict=True):
        middle = end - size / 2
        parts.setdefault(min(int(middle * num / max(total, 1)), num - 1), []).extend(group)
    return list(parts.values())


def among(sizes: Sequence[int], num: int) -> list[int]:
    """Assign tasks to processes, the largest ones first to the process that has least.

    The time to decompose factors is about the power 1.5 of their size, and counts as much as
    memory.
    """
    costs = [
        size / max(sum(sizes), 1) + size**1.5 / max(sum(x**1.5 for x in sizes), 1) for size in sizes
    ]
    loads, owners = [0.0] * num, [0] * len(sizes)
    for task in sorted(range(len(sizes)), key=lambda task: -costs[task]):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners
