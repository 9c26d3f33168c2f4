"""Gradients of single samples with respect to groups of parameters."""

from collections.abc import Callable
from math import prod

from torch import Tensor

from curvlinops.layers.gradients import DenseGradient, Entries, PerSampleGradient
from curvlinops.linear_operator.space import Columns, ParameterSpace, add, flat

#: Gradients of several parameters: their names, and a form whose rows are flat and side by side if
#: there are several.
Group = tuple[list[str], PerSampleGradient]


def write_rows(
    groups: list[Group],
    space: ParameterSpace,
    out: Columns,
    place: Callable[[Tensor], Tensor] = lambda rows: rows.unsqueeze(0),
) -> None:
    """Write the gradients of all samples to ``{name: [M, *shape]}``.

    Args:
        groups: The gradients. They leave the list, so that their memory is given back on the way.
        space: The parameters.
        out: Where they are written.
        place: Returns the view ``[V, N, *]`` of rows ``[M, *]`` that is written to. Default: all
            rows, for the only vector.
    """
    while groups:
        names, form = groups.pop(0)
        for part in form.parts():
            if len(names) == 1:
                form.write(part, place(out[names[0]])[:, part])
                continue
            rows = form.rows(part)
            for name, piece in split(names, rows.flatten(0, 1), space).items():
                place(out[name])[:, part] = piece.unflatten(0, rows.shape[:2])


def add_sums(
    out: Columns,
    groups: list[Group],
    of: Callable[[PerSampleGradient], Tensor],
    space: ParameterSpace,
) -> None:
    """Add sums over samples, ``[K, *parameter]``, to ``{name: [K, *shape]}``."""
    for names, form in groups:
        add(out, slice(None), split(names, of(form), space))


def written(groups: list[Group], space: ParameterSpace) -> Columns:
    """Return the gradients for the only vector, ``{name: [N, entries]}``; it empties the list."""
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


def in_one_row(groups: list[Group], space: ParameterSpace) -> PerSampleGradient:
    """Write the gradients of all parameters in one row."""
    _, form = groups[0]

    def rows(samples: slice | Tensor) -> Tensor:
        columns: Columns = {}
        for names, one in groups:
            columns |= split(names, one.rows(samples).flatten(0, 1), space)
        return space.join(columns).unflatten(0, (form.num_vectors, -1))

    return DenseGradient(rows, form.num_vectors, form.num_samples, Entries.all([space.dim]))
