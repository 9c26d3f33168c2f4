"""What a sample of a batch is, and which rows of the model's output belong to it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from curvlinops.support.arguments import check_count
from curvlinops.support.pytree import leaves


class Samples:
    """The rule by which a data set's batches, and outputs on them, consist of samples.

    Args:
        batch_size_fn: Number of samples of an ``X``. Default: the length of the first axis,
            on which all tensors in ``X`` must agree.
    """

    def __init__(self, batch_size_fn: Callable[[Any], int] | None = None):
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise TypeError(
                "batch_size_fn must be a function from X to the number of samples, got "
                f"{type(batch_size_fn).__name__}."
            )
        self.batch_size_fn = batch_size_fn
        # whether a sample has several rows of the output; a batch of one sample shows that for
        # itself, and not whether others have as many: one of several samples decides
        self._groups_rows: bool | None = None
        self._is_decided = False

    def count(self, X: Any, index: int) -> int:
        """Return the number of samples in the batch of this index.

        Raises:
            ValueError: If it is not evident and ``batch_size_fn`` is not given, or returns no
                number of samples.
        """
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

    def check_rows(self, X: Any, y: Any, num_rows: int) -> None:
        """Refuse an output with fewer rows than targets, such as the mean over all samples.

        Nothing is said if the targets disagree on their number, or if the batch has as many samples
        as the output has rows.

        Raises:
            ValueError: If there are fewer.
        """
        sizes = _first_axes(y)
        if len(sizes) != 1 or num_rows >= min(sizes):
            return
        with suppress(ValueError):
            if self.count(X, 0) == num_rows:
                return
        raise ValueError(
            f"the model's output has a first axis of length {num_rows}, its target one of length "
            f"{sizes.pop()}. Let the model return a row for each sample, such as its logits, and "
            "not its loss or another mean. If the batch has only as many samples as the output has "
            "rows, say so with batch_size_fn."
        )

    def of_output(self, problem: Any, output: Tensor) -> int:
        """Return the number of samples that an output of a ``BatchProblem`` belongs to.

        It is the batch's number of samples, if all have equally many neighboring rows of the
        output, such as tokens. Otherwise each row is a sample.

        Raises:
            ValueError: If samples have equally many rows on another batch or on this one only.
        """
        num_rows, num_samples = len(output), problem.evident_samples
        if not num_samples or num_rows <= num_samples:
            return num_rows
        groups_rows = self._groups_rows
        if groups_rows is None or (num_samples > 1 and not self._is_decided):
            groups_rows = num_rows % num_samples == 0 and self._are_grouped(problem, num_rows)
        is_other = self._groups_rows not in (None, groups_rows)
        if is_other or (groups_rows and num_rows % num_samples):
            raise ValueError(
                f"The model's output has {num_rows} rows for {num_samples} samples, and of this "
                "batch and an earlier one only one has equally many rows for each sample. Give "
                "samples an axis in front of their rows, or say with batch_size_fn how many a "
                "batch has; or put a batch of several samples first, which then decides."
            )
        self._groups_rows, self._is_decided = groups_rows, self._is_decided or num_samples > 1
        return num_samples if groups_rows else num_rows

    def _are_grouped(self, problem: Any, num_rows: int) -> bool:
        """Return whether a number of rows are equally many neighboring ones for each sample.

        The caller has said so by ``batch_size_fn``; otherwise the first and the last sample alone
        must have as many, and one sample twice as many if it is taken twice.
        """
        if isinstance(problem.batch.X, PackedSequence):  # rows are ordered by time
            return False
        if self.batch_size_fn is not None:
            return True
        num_samples = problem.num_samples
        if num_samples == 1:
            parts: list[tuple[slice | list[int], int]] = [([0, 0], 2)]
        else:
            parts = [(slice(1), 1), (slice(num_samples - 1, num_samples), 1)]
        outputs = [(problem.output_alone(part, num_samples), number) for part, number in parts]
        return all(
            output is not None and len(output) * num_samples == number * num_rows
            for output, number in outputs
        )


def _first_axes(tree: Any) -> set[int]:
    return {int(leaf.shape[0]) for leaf in leaves(tree) if leaf.ndim > 0}
