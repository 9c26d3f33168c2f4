"""Which rows of a layer's output belong to which sample?

Not axis 0, in general: layers see ``[N * T, d]``, ``[T, N, d]``, ``[T * N, d]``, packed sequences.
See ``curvlinops.layers.detection`` for how that is found out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Problem


class Layout(Protocol):
    """Sorts rows by samples."""

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
        if self.kind != "inner" and not self.axis:  # they are in front
            end = start + num_lead
            rows = prod(x.shape[start:end]) // num_samples
            return x.reshape(*x.shape[:start], num_samples, rows, *x.shape[end:])
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
    def anyhow(cls, lead: tuple[int, ...], num_samples: int, device: torch.device) -> "Scattered":
        """Return a layout of rows for which it does not matter."""
        return cls.of(torch.arange(prod(lead), device=device) % num_samples, num_samples)

    @classmethod
    def of(cls, samples: Tensor, num_samples: int) -> "Scattered":
        """Return the layout, given each row's sample ``[R]``."""
        counts = torch.bincount(samples, minlength=num_samples)
        order = samples.argsort(stable=True)
        place = torch.arange(int(counts.max()), device=samples.device).expand(num_samples, -1)
        valid = place < counts[:, None]
        starts = counts.cumsum(0) - counts
        return cls(order[(starts[:, None] + place).clamp(max=len(order) - 1)], valid)

    def by_sample(self, x: Tensor, start: int, num_lead: int, num_samples: int) -> Tensor:
        """Collect each sample's rows."""
        x = x.flatten(start, start + num_lead - 1)
        out = x.index_select(start, self.rows.flatten()).unflatten(start, self.rows.shape)
        return out * self.valid.reshape(self.valid.shape + (1,) * (out.ndim - start - 2))


@dataclass(frozen=True)
class Single:
    """All rows belong to the only sample."""

    def by_sample(self, x: Tensor, start: int, num_lead: int, num_samples: int) -> Tensor:
        """Make all leading axes one."""
        x = x.flatten(start, start + num_lead - 1) if num_lead else x.unsqueeze(start)
        return x.unsqueeze(start)


def regular(lead: tuple[int, ...], num_samples: int) -> Iterator[Along]:
    """Yield the regular layouts of rows with leading axes of some lengths, likely ones first."""
    for kind in ("alone", "outer", "inner"):
        for axis in range(len(lead)):
            layout = Along(axis, kind)
            if layout.fits(lead, num_samples):
                yield layout
    for kind in ("alone", "outer") if len(lead) > 1 else ():
        layout = Along(None, kind)
        if layout.fits(lead, num_samples):
            yield layout


def assignment(layout: Layout, lead: tuple[int, ...], num_samples: int) -> Tensor:
    """Return each row's sample, ``[R]``."""
    rows = torch.arange(prod(lead), device="cpu").reshape(lead)
    rows = layout.by_sample(rows, 0, len(lead), num_samples)
    out = torch.empty(prod(lead), dtype=torch.int64, device="cpu")
    out[rows.flatten()] = torch.arange(num_samples, device="cpu").repeat_interleave(rows.shape[1])
    return out


def by_samples(output: Tensor, num_samples: int | None) -> Tensor:
    """Give samples an axis of their own in front of their rows; ``None`` if each row is one.

    Raises:
        ValueError: If samples have unequal numbers of rows.
    """
    if num_samples is None:
        return output
    if len(output) == 0:
        return output.unsqueeze(1)
    if num_samples == 0 or len(output) % num_samples:
        raise ValueError(
            f"The model's output has {len(output)} rows for {num_samples} samples; those of an "
            "earlier batch had as many rows each. Give samples an axis in front of their rows, or "
            "say with batch_size_fn how many a batch has."
        )
    return output.unflatten(0, (num_samples, -1))


def samples_in(problem: Problem, output: Tensor) -> int:
    """Return the number of samples in a batch; that of the output's rows if it is not evident."""
    try:
        return problem.num_samples
    except ValueError:
        return len(output)


def has_parts(problem: Problem, output: Tensor) -> bool:
    """Return whether a batch has fewer samples than its output has rows, as many for each."""
    num_samples = samples_in(problem, output)
    return 0 < num_samples < len(output) and len(output) % num_samples == 0
