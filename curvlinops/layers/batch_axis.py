"""Finds the axis of a layer's rows that numbers the samples, as a pattern of einops.

Layers see ``[N, T, d]``, ``[N * T, d]``, ``[T, N, d]`` or ``[T * N, d]``. A shape leaves a few
candidates, and two backward passes decide between them: if the loss of sample n is weighted by
r_n, so is the gradient of each row that belongs to it.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.check import NOISE, rounding_of, tolerance_of

#: The number of entries of each row that are compared.
_SKETCHED = 4

#: Arguments of operations that say which axes of an input are those of an output.
ROW_ARGUMENTS = ("dim", "dims", "dim0", "dim1", "index", "start", "shifts")
ROW_ARGUMENTS += ("split_size", "split_sizes")


#: A function, and the number of its earlier calls with a parameter.
Call = tuple[Callable, int]


class UseKey(NamedTuple):
    """Identifies a use from one batch to the next.

    Attributes:
        call: The call.
        argument: The position or the name of the argument.
        names: The parameters of which the argument is a function.
    """

    call: Call
    argument: int | str
    names: tuple[str, ...]


#: All axes of the rows merged, samples in front; a single axis of samples likewise.
ALL_ROWS = "(n s)"

#: The names of axes of rows that number no samples.
_OTHERS = "abcdefghijklm"


def fits(pattern: str, row_shape: tuple[int, ...], num_samples: int) -> bool:
    """Return whether rows have the axes of a pattern, divisible among the samples.

    Args:
        pattern: The axes of the rows, as einops writes them: ``n`` numbers the samples. ``"n a"``
            and ``"a n"`` have an axis of samples alone; in ``"(n s) a"`` and ``"(s n) a"`` it is
            merged with positions, as its slower or its faster index. ``"(n s)"`` also merges any
            number of axes.
        row_shape: Their lengths.
        num_samples: N.
    """
    if pattern == ALL_ROWS:
        return prod(row_shape) % num_samples == 0
    axes = pattern.replace("n s", "ns").replace("s n", "sn").split()
    if len(axes) != len(row_shape):
        return False
    (length, axis), *_ = [(k, axis) for k, axis in zip(row_shape, axes, strict=True) if "n" in axis]
    # an axis of samples alone may be merged with positions on another batch
    return length == num_samples if axis == "n" else length % num_samples == 0


def to_front(
    x: Tensor, pattern: str, num_samples: int, num_row_axes: int, start: int = 0
) -> Tensor:
    """Turn ``[*, *row_shape, *features]`` into ``[*, N, S, *features]``.

    Args:
        x: Rows. The first ``start`` axes do not number them, the next ``num_row_axes`` do.
        pattern: The axes of the rows, see ``fits``.
        num_samples: N.
        num_row_axes: Number of axes that together number the rows.
        start: Number of axes in front of these.
    """
    if pattern.startswith(("n", "(n")):  # reshape takes a tenth of the time of rearrange
        shape, end = x.shape, start + num_row_axes
        rows = prod(shape[start:end]) // num_samples
        return x.reshape(*shape[:start], num_samples, rows, *shape[end:])
    others = " ".join(axis for axis in re.findall("[a-z]", pattern) if axis != "n")
    lead = "v " * start  # there is at most one axis of vectors
    return rearrange(x, f"{lead}{pattern} ... -> {lead}n ({others}) ...", n=num_samples)


@lru_cache(maxsize=1024)
def candidates(row_shape: tuple[int, ...], num_samples: int) -> tuple[str, ...]:
    """Return the patterns that rows along some axes may have, likely ones first; see ``fits``."""
    if num_samples == 1:
        return (ALL_ROWS,)
    others = _OTHERS[: len(row_shape)]

    def pattern(axis: int, name: str) -> str:
        return " ".join([*others[:axis], name, *others[axis + 1 :]])

    axes = range(len(row_shape))
    alone = [pattern(axis, "n") for axis in axes if row_shape[axis] == num_samples]
    merged = [
        pattern(axis, name)
        for name in ("(n s)", "(s n)")
        for axis in axes
        if row_shape[axis] != num_samples
    ]
    patterns = dict.fromkeys((*alone, *merged, *([ALL_ROWS] if len(row_shape) > 1 else [])))
    return tuple(x for x in patterns if fits(x, row_shape, num_samples))


def _samples(pattern: str, row_shape: tuple[int, ...], num_samples: int) -> tuple[int, ...]:
    """Return the sample of each row."""
    rows = torch.arange(prod(row_shape), device="cpu").reshape(row_shape)
    rows = to_front(rows, pattern, num_samples, len(row_shape))
    out = torch.empty(prod(row_shape), dtype=torch.int64, device="cpu")
    out[rows.flatten()] = torch.arange(num_samples, device="cpu").repeat_interleave(rows.shape[1])
    return tuple(out.tolist())


def sketch(rows: Tensor, num_row_axes: int) -> Tensor:
    """Return a short sketch ``[*row_shape, F]`` of each row of ``[*row_shape, *features]``.

    A sketch has random combinations of the features. A row is a multiple of another one if their
    sketches are. In half precision, the combinations might cancel: the sketch is the row itself.
    """
    rows = rows.reshape(*rows.shape[:num_row_axes], prod(rows.shape[num_row_axes:]))
    width = rows.shape[-1]
    if width <= _SKETCHED or rows.dtype.itemsize < 4:
        return rows
    generator = torch.Generator().manual_seed(width)
    mix = torch.randn(width, _SKETCHED, generator=generator, device="cpu") / _SKETCHED**0.5
    return rows @ mix.to(rows)


class Rows(NamedTuple):
    """The gradients of a use's rows in two backward passes.

    Attributes:
        row_shape: Lengths of the axes that number them.
        plain: Sketches of the gradients of the sum of the samples' losses.
        weighted: Sketches of the gradients of the sum weighted by r.
    """

    row_shape: tuple[int, ...]
    plain: Tensor
    weighted: Tensor


class Assignment(NamedTuple):
    """The pattern of a use's rows that two backward passes have shown.

    Attributes:
        pattern: The pattern.
        possible: All patterns that are possible, if there are others. They differ in rows without a
            gradient.
    """

    pattern: str
    possible: tuple[str, ...] = ()


def decide(rows: Mapping[UseKey, Rows], r: Tensor, dtype: torch.dtype) -> dict[UseKey, Assignment]:
    """Find the pattern of the rows of each use, where there is one.

    Args:
        rows: The gradients.
        r: The samples' weights, ``[N]``.
        dtype: The least precise dtype in which the gradients were computed.
    """
    largest = max((float(x.plain.double().norm()) for x in rows.values()), default=0.0)
    decided: dict[UseKey, Assignment] = {}
    for key, sketches in rows.items():
        patterns = candidates(sketches.row_shape, len(r))
        possible = [x for x in patterns if _explains(x, sketches, r, dtype)]
        if not possible:  # the gradients may be rounding errors of larger ones
            noise = NOISE * rounding_of(dtype) * largest
            possible = [x for x in patterns if _explains(x, sketches, r, dtype, noise)]
        if not possible:
            continue
        # patterns may mean the same
        if len({_samples(x, sketches.row_shape, len(r)) for x in possible}) == 1:
            decided[key] = Assignment(possible[0])
        else:
            decided[key] = Assignment(possible[0], tuple(possible))
    return decided


def _explains(pattern: str, rows: Rows, r: Tensor, dtype: torch.dtype, noise: float = 0.0) -> bool:
    """Return whether the weighted gradients are those of samples along an axis."""
    plain, weighted = (
        to_front(x.double(), pattern, len(r), len(rows.row_shape))
        for x in (rows.plain, rows.weighted)
    )
    norms, tolerance = plain.norm(dim=2), tolerance_of(dtype)
    error = (weighted - r.double().reshape(-1, 1, 1) * plain).norm(dim=2)
    # rounding errors are relative to the largest numbers
    noise += 100 * torch.finfo(dtype).eps * float(norms.norm())
    if torch.finfo(dtype).bits == 16:
        noise = 0.2 * tolerance * float(norms.max()) if norms.numel() else 0.0
    return bool((error <= tolerance * norms + noise).all())
