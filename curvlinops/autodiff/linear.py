"""A linear function that was prepared once for many vectors, and the memory that it keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

from curvlinops.support.autograd_graph import Output


class Linear(NamedTuple):
    """A function that is linear in its vectors, and the tensors that it keeps, with their graphs.

    Of gradients that are differentiated again, it keeps the graph only.
    ``num_rows`` is the number of the batch's rows for products with rows, as the Jacobian's.
    """

    apply: Callable[..., Any]
    tensors: tuple[Output, ...]
    num_rows: int = 0

    def __call__(self, *vectors: Any) -> Any:
        """Apply the function."""
        return self.apply(*vectors)
