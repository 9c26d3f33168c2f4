"""Which rows of a layer's output belong to which sample?

Not axis 0, in general: layers see ``[N * T, d]``, ``[T, N, d]``, ``[T * N, d]``, packed sequences.
The answer is read off two backward passes: if the loss of sample n is weighted by r_n, so is the
gradient of each row that belongs to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

#: Relative error up to which two gradients agree that were computed in a dtype. A wrong layout is
#: off by about a third.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 2e-2}


#: How many numbers of each row are compared.
_SKETCHED = 4


class Layout(Protocol):
    """Sorts rows by samples."""

    def fits(self, lead: tuple[int, ...], num_samples: int) -> bool:
        """Return whether rows with leading axes of these lengths can have this layout."""

    def by_sample(self, x: Tensor, start: int, num_lead: int, num_samples: int) -> Tensor:
        """Turn ``[*, *lead, *features]`` into ``[*, N, S, *features]``.

        Samples with fewer rows than others are filled up with zeros.

        Args:
            x: Rows, behind ``start`` other axes, along ``num_lead`` axes.
            start: Number of other axes.
            num_lead: Number of axes that together number the rows.
            num_samples: N.
        """


@dataclass(frozen=True)
class Along:
    """Samples lie along one axis, alone or merged with an axis of positions.

    Attributes:
        axis: Which of the leading axes; ``None`` for all of them, merged to one (an output whose
            rows are the tokens of all sequences).
        kind: ``"alone"``; ``"outer"``, where position is the faster index; or ``"inner"``.
    """

    axis: int | None
    kind: str

    def fits(self, lead: tuple[int, ...], num_samples: int) -> bool:
        """Return whether the axis exists and can be divided among the samples."""
        if self.axis is not None and self.axis >= len(lead):
            return False
        length = prod(lead) if self.axis is None else lead[self.axis]
        return length == num_samples if self.kind == "alone" else length % num_samples == 0

    def by_sample(self, x: Tensor, start: int, num_lead: int, num_samples: int) -> Tensor:
        """Move samples to the front, all else behind."""
        if self.axis is None:
            x, num_lead = x.flatten(start, start + num_lead - 1), 1
        axis = start + (self.axis or 0)
        if self.kind == "inner":
            x = x.unflatten(axis, (-1, num_samples)).movedim(axis + 1, start)
        else:
            x = x.unflatten(axis, (num_samples, -1)).movedim(axis, start)
        # one axis became two
        return x.flatten(start + 1, start + num_lead)


@dataclass(frozen=True)
class Scattered:
    """Any assignment; samples with fewer rows are filled up with zeros.

    Attributes:
        rows: Which of the flattened rows belong to each sample, ``[N, S]``.
        valid: Whether there is such a row, ``[N, S]``.
    """

    rows: Tensor
    valid: Tensor

    @classmethod
    def of(cls, samples: Tensor, num_samples: int) -> "Scattered":
        """Return the layout, given each row's sample ``[R]``."""
        counts = torch.bincount(samples, minlength=num_samples)
        order = samples.argsort(stable=True)
        place = torch.arange(int(counts.max()), device=samples.device).expand(num_samples, -1)
        valid = place < counts[:, None]
        starts = counts.cumsum(0) - counts
        return cls(order[(starts[:, None] + place).clamp(max=len(order) - 1)], valid)

    def fits(self, lead: tuple[int, ...], num_samples: int) -> bool:
        """Return false: no other batch is like this one."""
        return False

    def by_sample(self, x: Tensor, start: int, num_lead: int, num_samples: int) -> Tensor:
        """Collect each sample's rows."""
        x = x.flatten(start, start + num_lead - 1)
        out = x.index_select(start, self.rows.flatten()).unflatten(start, self.rows.shape)
        return out * self.valid.reshape(self.valid.shape + (1,) * (out.ndim - start - 2))


@dataclass(frozen=True)
class Single:
    """All rows belong to the only sample."""

    def fits(self, lead: tuple[int, ...], num_samples: int) -> bool:
        """Return false: the next batch may have more samples."""
        return False

    def by_sample(self, x: Tensor, start: int, num_lead: int, num_samples: int) -> Tensor:
        """Make all leading axes one."""
        x = x.flatten(start, start + num_lead - 1) if num_lead else x.unsqueeze(start)
        return x.unsqueeze(start)


def weights(num_samples: int, like: Tensor) -> Tensor:
    """Return distinct weights for the samples, in no order."""
    generator = torch.Generator().manual_seed(num_samples)
    order = torch.randperm(num_samples, generator=generator)
    return (1 + order.to(like) / num_samples).to(like.device)


def sketch(rows: Tensor, num_lead: int) -> Tensor:
    """Return what ``detect`` needs of rows ``[*lead, *features]``: ``[*lead, F]``, F small.

    These are random combinations of the features: one row is a multiple of another one if these
    are. In half precision, in which they might cancel, they are the features themselves.
    """
    width = prod(rows.shape[num_lead:])
    rows = rows.reshape(*rows.shape[:num_lead], width)
    if width <= _SKETCHED or rows.dtype.itemsize < 4:
        return rows
    generator = torch.Generator().manual_seed(width)
    mix = torch.randn(width, _SKETCHED, generator=generator) / _SKETCHED**0.5
    return rows @ mix.to(rows)


def detect(
    plain: Tensor, weighted: Tensor, num_lead: int, r: Tensor, tolerance: float
) -> Layout | None:
    """Find the layout that explains a layer's output gradients.

    Args:
        plain: Gradient of the sum of the samples' losses, ``[*lead, *features]``, or its sketch.
        weighted: Gradient of the sum weighted by ``r``.
        num_lead: Number of leading axes.
        r: The weights, ``[N]``.
        tolerance: Relative error of the gradients.

    Returns:
        The layout, or ``None`` if there is none, or the gradient is zero.
    """
    num_samples, lead = len(r), tuple(plain.shape[:num_lead])
    if num_samples == 1:
        return Single()
    size = float(plain.double().norm())
    if size == 0.0 or num_lead == 0:
        return None

    is_half = tolerance >= TOLERANCES[torch.float16]
    noise = 100 * torch.finfo(plain.dtype).eps * size

    def explains(layout: Layout) -> bool:
        rows, found = (layout.by_sample(g, 0, num_lead, num_samples) for g in (plain, weighted))
        rows, found = (g.double().reshape(*g.shape[:2], -1) for g in (rows, found))
        error = (found - r.double().reshape(-1, 1, 1) * rows).norm(dim=2)
        norms = rows.norm(dim=2)
        # rounding errors are relative to the largest numbers; in half precision, many of them
        # would hide a wrong layout
        allowed = 0.2 * tolerance * norms.max() if is_half else noise
        return bool((error <= tolerance * norms + allowed).all())

    for layout in _regular(lead, num_samples):
        if explains(layout):
            return layout
    if tolerance * num_samples > 0.1:
        return None  # neighboring weights cannot be told apart
    rows, found = (g.double().reshape(prod(lead), -1) for g in (plain, weighted))
    ratio = (rows * found).sum(1) / rows.square().sum(1).clamp(min=torch.finfo(torch.float64).tiny)
    scattered = Scattered.of((ratio[:, None] - r.double()).abs().argmin(1), num_samples)
    return scattered if explains(scattered) else None


def guess(lead: tuple[int, ...], num_samples: int) -> Layout | None:
    """Return the most likely layout of rows with leading axes of some lengths."""
    if num_samples == 1:
        return Single()
    return next(_regular(lead, num_samples), None)


def _regular(lead: tuple[int, ...], num_samples: int) -> Iterator[Along]:
    for kind in ("alone", "outer", "inner"):
        for axis in range(len(lead)):
            layout = Along(axis, kind)
            if layout.fits(lead, num_samples):
                yield layout
    for kind in ("alone", "outer") if len(lead) > 1 else ():
        layout = Along(None, kind)
        if layout.fits(lead, num_samples):
            yield layout
