"""Finds out which rows of a layer's output belong to which sample.

The answer is read off backward passes: if the loss of sample n is weighted by r_n, so is the
gradient of each row that belongs to it.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.layout import Layout, Scattered, Single, assignment, regular
from curvlinops.layers.parts import Key

#: Relative error up to which two gradients agree that were computed in a dtype. A wrong layout is
#: off by about a third.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 2e-2}

#: How many numbers of each row are compared.
_SKETCHED = 4

#: Gradients below so many rounding errors of the largest ones may be nothing else.
_SMALL = 1000

#: So large rounding errors, in those of the largest ones, are not surprising in others.
NOISE = 20

#: Of rounding errors, so much is not linear in what is backpropagated.
_NONLINEAR = 0.05


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative error up to which two gradients agree."""
    return TOLERANCES.get(dtype, 0.15)


def is_nonlinear(difference: float, size: float) -> bool:
    """Return whether a gradient is but rounding: two parts of it add up to something else."""
    return difference > _NONLINEAR * size


def rounding_of(dtype: torch.dtype) -> float:
    """Return the rounding error of what kernels compute, in float32 also for half precision."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def weights(num_samples: int, like: Tensor) -> Tensor:
    """Return distinct weights for the samples, in no order."""
    return (1 + _order(num_samples).to(like) / num_samples).to(like.device)


def digits(num_samples: int, tolerance: float, like: Tensor) -> list[Tensor]:
    """Return weights that tell samples apart though gradients have some relative error.

    Each of them, ``[N]``, is a digit of the samples' numbers in a system with few digits.
    """
    base = max(2, min(int(0.1 / tolerance), num_samples))  # levels as far apart as possible
    number, out = _order(num_samples), []
    while not out or base ** len(out) < num_samples:
        digit = number // base ** len(out) % base
        out.append((digit.to(like) / (base - 1)).to(like.device))
    return out


def proofs(num_samples: int, tolerance: float, like: Tensor) -> list[Tensor]:
    """Return weights that have nothing to do with the others.

    By these, a gradient to which several samples contribute shows, though the others happened to
    make it look like one sample's. In half precision a single one may agree by chance.
    """
    count = 1 if tolerance < TOLERANCES[torch.float16] else 3
    return [4 * unrelated(num_samples, i, like) - 2 for i in range(count)]


def unrelated(num_samples: int, stream: int, like: Tensor) -> Tensor:
    """Return numbers between 0 and 1, ``[N]``, by no means a linear function of other weights."""
    # seeds with which few samples do not look like it by chance, either
    generator = torch.Generator().manual_seed(171_000 + num_samples)
    numbers = torch.rand(stream + 1, num_samples, generator=generator, device="cpu")
    return numbers[stream].to(like).to(like.device)


def _order(num_samples: int) -> Tensor:
    return torch.randperm(
        num_samples, generator=torch.Generator().manual_seed(num_samples), device="cpu"
    )


def sketch(rows: Tensor, num_lead: int) -> Tensor:
    """Return what is needed of rows ``[*lead, *features]``: ``[*lead, F]``, F small.

    These are random combinations of the features: one row is a multiple of another one if these
    are. In half precision, in which they might cancel, they are the features themselves.
    """
    width = prod(rows.shape[num_lead:])
    rows = rows.reshape(*rows.shape[:num_lead], width)
    if width <= _SKETCHED or rows.dtype.itemsize < 4:
        return rows
    generator = torch.Generator().manual_seed(width)
    mix = torch.randn(width, _SKETCHED, generator=generator, device="cpu") / _SKETCHED**0.5
    return rows @ mix.to(rows)


class Detection:
    """What backward passes tell of the rows of a layer's output.

    Args:
        plain: Gradient of the sum of the samples' losses, ``[*lead, *features]``, or its sketch.
        num_lead: Number of leading axes.
        num_samples: N.
        dtype: The least precise one in which the gradient was computed, be it that of ``plain`` or
            one within the model.

    Attributes:
        size: The norm of the gradient.
        is_blank: Whether the gradient is zero, or but rounding, and tells nothing.
    """

    def __init__(self, plain: Tensor, num_lead: int, num_samples: int, dtype: torch.dtype):
        self._plain, self._lead = plain, tuple(plain.shape[:num_lead])
        self._num_samples, self._tolerance = num_samples, tolerance_of(dtype)
        self._eps = torch.finfo(dtype).eps
        self._rounding, self._noise = rounding_of(dtype), 0.0
        self._norms = self._rows(plain).norm(dim=1)
        self.size = float(self._norms.norm())
        self.is_blank = self.size == 0.0

    @property
    def has_blanks(self) -> bool:
        """Whether gradients of some rows are zero, up to rounding."""
        noise = self._noise / max(len(self._norms), 1) ** 0.5
        return bool((self._norms <= max(10 * self._rounding * self.size, noise)).any())

    def is_doubtful(self, largest: float) -> bool:
        """Return whether the gradient may be but the rounding errors of larger ones.

        Softmax over a single position leaves such, whose gradient is zero.

        Args:
            largest: The size of the largest gradient.
        """
        if self.size <= _SMALL * self._rounding * largest:
            return not self.is_blank
        self._noise = NOISE * self._rounding * largest
        return False

    def resolve(self, weighted: Tensor, rest: Tensor) -> None:
        """Take a doubtful gradient for zero if it is but rounding, not linear in the weights.

        Args:
            weighted: Gradient of the sum weighted by some numbers.
            rest: That of the sum weighted by one minus these.
        """
        difference = float((self._plain.double() - weighted.double() - rest.double()).norm())
        self.is_blank, self._noise = is_nonlinear(difference, self.size), 3 * difference

    def regular(self, weighted: Tensor, r: Tensor) -> list[Layout]:
        """Return the regular layouts that explain the gradients.

        Several ones differ in rows whose gradient is zero.

        Args:
            weighted: Gradient of the sum weighted by ``r``.
            r: The weights, ``[N]``.
        """
        if self._num_samples == 1:
            return [Single()]
        found: list[Layout] = []
        for layout in regular(self._lead, self._num_samples):
            if self.is_blank or self._explains(layout, weighted, r):
                found.append(layout)
                if not self.has_blanks:
                    break
        return self._different(found)

    def scattered(self, weighted: list[Tensor], r: list[Tensor], count: int) -> Scattered | None:
        """Return the layout that explains the gradients, whichever it is, or ``None``.

        Args:
            weighted: Gradients of sums with different weights.
            r: These, ``[N]`` each, the digits of the samples' numbers first.
            count: How many of them are digits.
        """
        like = {"dtype": torch.int64, "device": r[0].device}
        own = torch.zeros(self._num_samples, **like)
        rows = torch.zeros(prod(self._lead), **like)
        for found, values in zip(weighted[:count], r[:count], strict=True):
            levels = values.double().unique()
            between = (levels[1:] + levels[:-1]) / 2
            own = own * len(levels) + torch.bucketize(values.double(), between)
            rows = rows * len(levels) + torch.bucketize(self._ratio(found), between)
        order = own.argsort()
        place = torch.searchsorted(own[order], rows).clamp(max=self._num_samples - 1)
        layout = Scattered.of(order[place], self._num_samples)
        pairs = zip(weighted, r, strict=True)
        return layout if all(self._explains(layout, found, v) for found, v in pairs) else None

    def _different(self, layouts: list[Layout]) -> list[Layout]:
        """Return one of each group of layouts that are the same for rows of these lengths."""
        if len(layouts) < 2:
            return layouts
        each: dict[tuple[int, ...], Layout] = {}
        for layout in layouts:
            rows = assignment(layout, self._lead, self._num_samples)
            each.setdefault(tuple(rows.tolist()), layout)
        return list(each.values())

    def _rows(self, g: Tensor) -> Tensor:
        """Return a gradient as rows, ``[R, features]``."""
        return g.double().reshape(prod(self._lead), prod(g.shape[len(self._lead) :]))

    def _ratio(self, weighted: Tensor) -> Tensor:
        """Return how much larger gradients are with weights, for each row, ``[R]``."""
        rows, found = self._rows(self._plain), self._rows(weighted)
        tiny = torch.finfo(torch.float64).tiny
        return (rows * found).sum(1) / rows.square().sum(1).clamp(min=tiny)

    def _explains(self, layout: Layout, weighted: Tensor, r: Tensor) -> bool:
        """Return whether a layout explains what weights make of the gradients."""
        num_lead = len(self._lead)
        rows, found = (
            layout.by_sample(g, 0, num_lead, self._num_samples) for g in (self._plain, weighted)
        )
        rows, found = (g.double().reshape(*g.shape[:2], -1) for g in (rows, found))
        error = (found - r.double().reshape(-1, 1, 1) * rows).norm(dim=2)
        norms = rows.norm(dim=2)
        # rounding errors are relative to the largest numbers; in half precision, many of them
        # would hide a wrong layout
        is_half = self._tolerance >= TOLERANCES[torch.float16]
        noise = 100 * self._eps * self.size + self._noise
        allowed = 0.2 * self._tolerance * norms.max() if is_half else noise
        return bool((error <= self._tolerance * norms + allowed).all())


def settle(
    candidates: Mapping[Key, list[Layout]],
    leads: Mapping[Key, tuple[int, ...]],
    guessed: AbstractSet[Key],
) -> tuple[dict[Key, Layout], set[Key]]:
    """Choose layouts of uses; of several ones that which others with as many rows have.

    Args:
        candidates: The layouts that are possible.
        leads: The lengths of the axes that number the rows.
        guessed: Uses whose gradients are all zero.

    Returns:
        The layouts, and the uses for which another one may be right.
    """
    chosen = {key: found[0] for key, found in candidates.items() if found}
    several = {key for key, found in candidates.items() if len(found) > 1}
    known = {(leads[key], chosen[key]) for key in set(chosen) - several - guessed}
    for key in list(several):
        likely = [layout for layout in candidates[key] if (leads[key], layout) in known]
        if len(likely) == 1:
            chosen[key] = likely[0]
            several.remove(key)
    return chosen, several
