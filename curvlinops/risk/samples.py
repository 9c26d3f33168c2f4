"""What a sample of a batch is, and which rows of the model's output belong to it."""

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from operator import mul
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from curvlinops.support.arguments import check_count
from curvlinops.support.pytree import has_length, leaves


class Samples:
    """The rule by which a data set's batches, and outputs on them, consist of samples.

    ``batch_size_fn`` is described in ``DataLinearOperator``.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int] | None = None):
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise TypeError(
                "batch_size_fn must be a function from X to the number of samples, got "
                f"{type(batch_size_fn).__name__}."
            )
        self.batch_size_fn = batch_size_fn

    def count(self, X: Any, index: int) -> int:
        """Return the number of samples in a batch; refuse one that is not evident."""
        if self.batch_size_fn is not None:
            return check_count("batch_size_fn(X)", self.batch_size_fn(X), at_least=0)
        if isinstance(X, PackedSequence):
            return int(X.batch_sizes[0])
        sizes = _first_axes(X)
        if len(sizes) != 1:
            axes = f"tensors with first axes of lengths {sorted(sizes)}" if sizes else "no tensor"
            raise ValueError(
                f"The number of samples in batch {index} is not evident: its X has {axes}. "
                "Pass batch_size_fn, a function from X to the number of samples."
            )
        return sizes.pop()

    def evident(self, X: Any, index: int) -> int | None:
        """Return the number of samples in the batch of this index, ``None`` if it is not known."""
        with suppress(ValueError):
            return self.count(X, index)
        return None

    def check_rows(self, X: Any, y: Any, num_rows: int) -> None:
        """Refuse an output with fewer rows than targets, such as the mean over all samples.

        Nothing is said if the targets disagree on their number, or if the batch has as many samples
        as the output has rows.
        """
        sizes = _first_axes(y)
        if len(sizes) != 1 or num_rows >= min(sizes) or self.evident(X, 0) == num_rows:
            return
        raise ValueError(
            f"the model's output has a first axis of length {num_rows}, its target one of length "
            f"{sizes.pop()}. Let the model return a row for each sample, such as its logits, and "
            "not its loss or another mean. If the batch has only as many samples as the output has "
            "rows, say so with batch_size_fn."
        )

    def of_output(self, X: Any, index: int, num_rows: int) -> int:
        """Return the number of samples to which the rows of an output belong, if it is known.

        Each row is a sample, but for outputs with more rows than the batch has samples: of N
        samples by ``batch_size_fn``, an output with N * T rows has T neighboring ones for each
        where the tensors in X have as many places, ``[N, T, ...]``. So no place was left out.
        """
        num_samples = self.evident(X, index)
        if not num_samples or num_rows <= num_samples:
            return num_rows
        shapes = [x.shape for x in leaves(X) if has_length(x, num_samples) and x.ndim > 1]
        has_places = shapes and all(num_rows in accumulate(shape, mul) for shape in shapes)
        if self.batch_size_fn is not None and has_places:
            return num_samples
        raise ValueError(
            f"The model's output has {num_rows} rows for the {num_samples} samples of batch "
            f"{index}, and it is not known which rows are whose. Let the model return samples "
            "first, as [N, C] or [N, T, C] (for CrossEntropyLoss [N, C, T]), and mask in the loss "
            "what does not count (ignore_index). An output [N * T, C] with a row for each place "
            "of the tensors [N, T, ...] in X needs batch_size_fn, a function from X to N, such as "
            "batch_size_fn=len; so does an X whose first axis numbers no samples."
        )


def _first_axes(tree: Any) -> set[int]:
    return {int(leaf.shape[0]) for leaf in leaves(tree) if leaf.ndim > 0}
