"""A linear function that was prepared once for many vectors, and the memory that it keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Linear(NamedTuple):
    """A function that is linear in its vectors.

    Attributes:
        apply: The function.
        tensors: What it keeps in memory: tensors, each with the graph that computed it.
        num_rows: Of products with rows, such as the Jacobian's, the number of the batch's rows.
    """

    apply: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    num_rows: int = 0

    def __call__(self, *vectors: Any) -> Any:
        """Apply the function."""
        return self.apply(*vectors)
