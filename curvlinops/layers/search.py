"""Searches for the layouts of a batch's uses, by a few backward passes."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvlinops.layers.check import weighted
from curvlinops.layers.detection import (
    Detection,
    digits,
    proofs,
    settle,
    sketch,
    tolerance_of,
    weights,
)
from curvlinops.layers.layout import Layout, Scattered
from curvlinops.layers.parts import Key
from curvlinops.layers.uses import Use
from curvlinops.support.norms import double_norm


class Search:
    """Finds layouts, regular ones first.

    Args:
        uses: The uses whose rows are to be sorted.
        backward: Turns what is backpropagated, ``[1, *output]``, into the gradients at the outputs
            of all uses, also others.
        u: Random numbers in the output's shape, samples first.
        dtype: The least precise one in which gradients are computed.

    Attributes:
        layouts: What was found.
        guessed: Uses whose gradients are zero, or but rounding, so that their layout is a guess.
        idle: Those of them that have no rows, and no layout.
        open: Uses with rows without a gradient, whose samples are guesses.
    """

    def __init__(
        self,
        uses: Mapping[Key, Use],
        backward: Callable[[Tensor], dict[Key, Tensor]],
        u: Tensor,
        dtype: torch.dtype,
    ):
        self._uses, self._backward, self._u, self._dtype = uses, backward, u, dtype
        self._num_samples = len(u)
        self.layouts: dict[Key, Layout] = {}
        self.guessed: set[Key] = set()
        self.idle: set[Key] = set()
        self.open: set[Key] = set()

    def run(self, gradients: dict[Key, Tensor]) -> None:
        """Search.

        Args:
            gradients: What ``backward`` returns for ``u``; it is freed.
        """
        r = weights(self._num_samples, self._u)
        plain = self._sketches(list(self._uses), gradients)
        others = self._backward(weighted(self._u, r)[None])
        shares = self._sketches(list(self._uses), others)
        detections = {
            key: Detection(plain.pop(key), len(use.lead), self._num_samples, self._dtype)
            for key, use in self._uses.items()
        }
        sizes = [*(found.size for found in detections.values()), *map(double_norm, others.values())]
        del others
        largest = float(max(sizes, default=0.0))
        doubtful = [key for key, found in detections.items() if found.is_doubtful(largest)]
        rest = self._of(doubtful, weighted(self._u, 1 - r)) if doubtful else {}
        for key in doubtful:
            detections[key].resolve(shares[key], rest.pop(key))
        candidates = {key: found.regular(shares[key], r) for key, found in detections.items()}
        self.guessed = {key for key, found in detections.items() if found.is_blank}
        leads = {key: use.lead for key, use in self._uses.items()}
        self.layouts, self.open = settle(candidates, leads, self.guessed)
        self._search_scattered({k: x for k, x in detections.items() if not candidates[k]})

    def _search_scattered(self, detections: Mapping[Key, Detection]) -> None:
        """Find layouts without a pattern."""
        keys = []
        for key in detections:
            lead = self._uses[key].lead
            if key not in self.guessed:
                keys += [key] if lead else []
            elif lead:
                self.layouts[key] = Scattered.anyhow(lead, self._num_samples, self._u.device)
            else:
                self.idle.add(key)
        tolerance = tolerance_of(self._dtype)
        numbers = digits(self._num_samples, tolerance, self._u)
        r = [*numbers, *proofs(self._num_samples, tolerance, self._u)] if keys else []
        passes = [self._of(keys, weighted(self._u, some)) for some in r]
        for key in keys:
            layout = detections[key].scattered([x.pop(key) for x in passes], r, len(numbers))
            self.layouts |= {} if layout is None else {key: layout}
        self.open |= {key for key, found in detections.items() if found.has_blanks}

    def _of(self, keys: list[Key], u: Tensor) -> dict[Key, Tensor]:
        return self._sketches(keys, self._backward(u[None]))

    def _sketches(self, keys: list[Key], gradients: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return the rows of the gradients at some uses' outputs, in short, and free those."""
        rows = {key: self._uses[key].split(gradients.pop(key))[0] for key in keys}
        return {key: sketch(rows.pop(key), len(self._uses[key].lead)) for key in keys}
