"""What callbacks of solvers and estimators are given."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The state of a solver or an estimator after an iteration.

    Tensors are on the device of the matrix. They are not changed later, so that a callback may keep
    them.

    Attributes:
        iteration: The number of iterations so far, from one.
        num_products: The number of products with the matrix so far, counted in vectors.
        residuals: Residual norms of all K columns as the recursion computes them, ``[K]``, float64.
        iterate: The solutions so far, ``[D, K]``.
        values: Ritz values, or the estimate so far.
    """

    iteration: int
    num_products: int
    residuals: Tensor | None = None
    iterate: Tensor | None = None
    values: Tensor | None = None


#: A function that is called after each iteration; it stops the iteration if it returns ``True``.
Callback = Callable[[Iteration], bool | None] | None
