"""Gradients of single samples with respect to groups of parameters."""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.forms import Direct, Form
from curvlinops.linear_operator.space import Columns, ParameterSpace, add, flat

#: Gradients of several parameters: their names, and a form whose rows are flat and side by side if
#: there are several.
Group = tuple[list[str], Form]


def in_turns(
    at: Callable[[int], list[Group]], rows: Tensor, count: int, space: ParameterSpace
) -> Group:
    """Compute gradients one after the other of which each sample has several.

    Args:
        at: Returns gradients of all samples, given the place among a sample's own.
        rows: The numbers of those wanted, sample by sample; best in the order of these places.
        count: How many each sample has.
        space: The parameters.
    """

    def compute(part: slice | Tensor) -> Tensor:
        wanted = rows[part]
        out = space.empty(len(wanted))
        for turn in (wanted % count).unique().tolist():
            mine = wanted % count == turn
            out[mine] = in_one_row(at(turn), space).rows(wanted[mine] // count)[0]
        return out.unsqueeze(0)

    return space.names, Direct(compute, 1, len(rows), (space.dim,))


def write_rows(
    groups: list[Group], space: ParameterSpace, out: Columns, place: slice = slice(None)
) -> None:
    """Write the gradients of all samples, for the only vector, to ``{name: [M, *shape]}``.

    Args:
        groups: The gradients. They leave the list, so that their memory is given back on the way.
        space: The parameters.
        out: Where they are written.
        place: To which rows.
    """
    while groups:
        names, form = groups.pop(0)
        for part in form.parts():
            if len(names) == 1:
                rows = out[names[0]][place][part]
                form.write(part, rows.view(len(rows), prod(rows.shape[1:])))
                continue
            for name, rows in split(names, form.rows(part)[0], space).items():
                out[name][place][part] = rows


class Bounds:
    """Tells which gradients are certainly finite, by what they are made of."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tensor | None]] = {}

    def add(self, groups: list[Group]) -> None:
        """Look at the gradients of some samples."""
        for names, form in groups:
            bound = form.bound()
            for name in names:
                self._found.setdefault(name, []).append(bound)

    def others(self, rows: Columns) -> Columns:
        """Return the rows, ``{name: [N, *shape]}``, that may not be finite."""
        found = self._found.items()
        known = {name: all_of for name, all_of in found if all(x is not None for x in all_of)}
        if not known:
            return rows
        largest = torch.stack([torch.stack(all_of).amax() for all_of in known.values()]).tolist()
        # twice: sums are rounded
        limits = [torch.finfo(rows[name].dtype).max / 2 for name in known]
        safe = {n for n, x, limit in zip(known, largest, limits, strict=True) if x < limit}
        return {name: x for name, x in rows.items() if name not in safe}


def add_sums(
    out: Columns, groups: list[Group], of: Callable[[Form], Tensor], space: ParameterSpace
) -> None:
    """Add sums over samples, ``[K, *parameter]``, to ``{name: [K, *shape]}``."""
    for names, form in groups:
        add(out, slice(None), split(names, of(form), space))


def written(groups: list[Group], space: ParameterSpace) -> Columns:
    """Return what ``write_rows`` writes, ``{name: [N, entries]}``; it empties the list, too."""
    rows = space.lazy_empty(groups[0][1].num_samples)
    write_rows(groups, space, rows)
    return {name: flat(x) for name, x in rows.items()}


def split(names: list[str], rows: Tensor, space: ParameterSpace) -> Columns:
    """Turn rows of a group, ``[n, *]``, into ``{name: [n, *shape]}``."""
    sizes = [prod(space.shapes[name]) for name in names]
    parts = rows.reshape(rows.shape[0], sum(sizes)).split(sizes, dim=1)
    return {
        name: part.reshape(len(rows), *space.shapes[name])
        for name, part in zip(names, parts, strict=True)
    }


def in_one_row(groups: list[Group], space: ParameterSpace) -> Form:
    """Write the gradients of all parameters in one row."""
    _, form = groups[0]

    def rows(samples: slice | Tensor) -> Tensor:
        columns: Columns = {}
        for names, one in groups:
            columns |= split(names, one.rows(samples).flatten(0, 1), space)
        return space.join(columns).unflatten(0, (form.num_vectors, -1))

    return Direct(rows, form.num_vectors, form.num_samples, (space.dim,))
