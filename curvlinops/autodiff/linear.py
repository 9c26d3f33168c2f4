"""A linear function that was prepared once for many vectors, and the memory that it keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Linear(NamedTuple):
    """A function that is linear in its vectors, and the tensors that it keeps, with their graphs.

    ``num_rows`` is the number of the batch's rows for products with rows, as the Jacobian's.
    """

    apply: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    num_rows: int = 0

    def __call__(self, *vectors: Any) -> Any:
        """Apply the function."""
        return self.apply(*vectors)
