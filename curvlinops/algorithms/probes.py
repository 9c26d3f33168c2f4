"""Random vectors, and averages over them with their errors."""

from collections.abc import Callable, Iterator
from math import inf
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.convergence import ConvergenceWarning
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, TorchMatrix
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.norms import double_norm
from curvlinops.support.rng import read_generator
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.support.warnings import warn

#: Bytes of random vectors that are multiplied at once. Larger blocks gain little.
_BLOCK = 64 * 2**20

#: Samples before an error is believed: that of two or three may be small by chance.
_FEWEST = 8

DISTRIBUTIONS = ("rademacher", "gaussian", "normal", "sphere")


P = ParamSpec("P")
#: A tensor, or what numpy has in its place: a number or an array.
Value = TypeVar("Value", covariant=True)


class Estimate(NamedTuple, Generic[Value]):
    """A random estimate, and its standard error (the estimated standard deviation).

    Attributes:
        estimate: A number or a vector.
        standard_error: Of the same shape.
    """

    estimate: Value
    standard_error: Value


class Estimator(Protocol[P, Value]):
    """The type of a function that estimates something of a matrix, with other arguments P.

    Of matrices that are not PyTorch's, the result is a ``Value`` of numpy's.
    """

    @overload
    def __call__(
        self, A: TorchMatrix, *args: Any, return_error: Literal[True], **options: Any
    ) -> Estimate[Tensor]: ...
    @overload
    def __call__(
        self, A: AnyMatrix, *args: Any, return_error: Literal[True], **options: Any
    ) -> Estimate[Value]: ...
    @overload
    def __call__(self, A: TorchMatrix, *args: P.args, **options: P.kwargs) -> Tensor: ...
    @overload
    def __call__(self, A: AnyMatrix, *args: P.args, **options: P.kwargs) -> Value: ...


def number_estimator(
    function: Callable[Concatenate[AnyMatrix, P], object],
) -> Estimator[P, np.floating]:
    """Return a function that estimates a number, free of modes, with its type."""
    return in_default_modes(function)


def vector_estimator(
    function: Callable[Concatenate[AnyMatrix, P], object],
) -> Estimator[P, np.ndarray]:
    """Return a function that estimates a vector, free of modes, with its type."""
    return in_default_modes(function)


class Probes:
    """Random vectors x with ``E[x x^T] = I``.

    Args:
        matrix: What they are multiplied with.
        distribution: ``"rademacher"`` (entries are signs), ``"gaussian"`` or ``"normal"``
            (standard normal), or ``"sphere"`` (uniform on the sphere of radius ``sqrt(D)``).
        chunk_size: How many are multiplied at once. Default: as many as need 64 MiB.
        seed: Seeds the generator.
        generator: Where random numbers come from.
        held: How many vectors an algorithm holds in memory for each of them.

    Raises:
        ValueError: If one of the arguments is not among the choices.
    """

    def __init__(
        self,
        matrix: Matrix,
        distribution: str,
        chunk_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        held: int = 1,
    ):
        check_choice("distribution", distribution, DISTRIBUTIONS)
        self.matrix, self.distribution = matrix, distribution
        self.dim = matrix.shape[1]
        if chunk_size is None:
            chunk_size = max(_BLOCK // max(held * self.dim * matrix.dtype.itemsize, 1), 1)
        self.chunk_size = check_count("chunk_size", chunk_size)
        self.generator = read_generator(matrix.device, seed, generator)

    def draw(self, num: int) -> Tensor:
        """Draw random vectors ``[D, num]``, each contiguous."""
        X = torch.empty(num, self.dim, dtype=self.matrix.dtype, device=self.matrix.device)
        # one by one: what a generator fills at once depends on its size
        if self.distribution == "rademacher":
            for row in X:
                row.bernoulli_(0.5, generator=self.generator)
            return X.mul_(2).sub_(1).T
        for row in X:
            row.normal_(generator=self.generator)
        if self.distribution == "sphere":
            X *= self.dim**0.5 / X.norm(dim=1, keepdim=True)
        return X.T

    def chunks(self, num: int, often: bool = False) -> Iterator[Tensor]:
        """Yield ``num`` random vectors, some at a time; few if somebody looks at them often."""
        size = min(self.chunk_size, _FEWEST) if often else self.chunk_size
        for start in range(0, num, size):
            yield self.draw(min(size, num - start))

    def multiply(self, X: Tensor, adjoint: bool = False) -> Tensor:
        """Multiply any number of vectors ``[D, K]`` by the matrix, or its transpose."""
        product = self.matrix.adjoint_matmul if adjoint else self.matrix.__matmul__
        parts = [product(part) for part in X.split(self.chunk_size, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Average:
    """The running average of samples, and its standard error (Chan et al. 1979)."""

    def __init__(self):
        self.count = 0
        self.mean: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0

    def update(self, samples: Tensor) -> None:
        """Take in samples, along the last axis."""
        num, mean = samples.shape[-1], samples.mean(-1)
        total = self.count + num
        delta = mean - self.mean
        # in double precision, which has room for squares
        spread = double_norm(samples - mean.unsqueeze(-1), -1)
        between = delta.double().square() * (self.count * num / total)
        self._squares = self._squares + spread.square() + between
        self.mean = self.mean + delta * (num / total)
        self.count = total

    @property
    def standard_error(self) -> Tensor:
        """The average's estimated standard deviation; NaN for a single sample."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.count * (self.count - 1))).sqrt().to(self.mean.dtype)


class Goal:
    """What a caller wants: how accurate an estimate, and whether with its error.

    Args:
        rtol: Sampling stops when the standard error is at most ``rtol`` times the estimate, both
            in the Euclidean norm. ``None``: never.
        return_error: Whether to return the error, too.
    """

    def __init__(self, rtol: float | None, return_error: bool):
        if rtol is not None and not 0 < rtol < 1:
            raise ValueError(f"rtol must lie between 0 and 1, got {rtol!r}.")
        self.rtol, self.return_error = rtol, return_error

    def check_count(self, name: str, value: Any) -> int:
        """Return a number of samples, of which an error needs two."""
        return check_count(name, value, at_least=1 + self.return_error)

    def reached(self, estimate: Tensor, error: Tensor, count: int) -> bool:
        """Return whether an estimate from ``count`` samples is accurate enough."""
        if self.rtol is None or count < _FEWEST:
            return False
        return _relative(estimate, error) <= self.rtol

    def steps(self, num: int) -> list[int]:
        """Return after how many of ``num`` samples to look at the error."""
        counts = [num]
        while self.rtol is not None and counts[0] >= 2 * _FEWEST:
            counts.insert(0, counts[0] // 2)
        return counts

    def report_exact(self, matrix: Matrix, value: Tensor) -> Any:
        """Return what the caller wants of a value without error."""
        return self.report(matrix, value, torch.zeros_like(value))

    def report(self, matrix: Matrix, estimate: Tensor, error: Tensor) -> Any:
        """Return what the caller wants, with a warning if it is not as accurate."""
        if self.rtol is not None and not (found := _relative(estimate, error)) <= self.rtol:
            warn(
                f"The standard error is {found:.1e} of the estimate, more than rtol={self.rtol}, "
                "after all products that were allowed. Allow more.",
                ConvergenceWarning,
            )
        results = [matrix.write(x.to(matrix.dtype))[()] for x in (estimate, error)]
        return Estimate(*results) if self.return_error else results[0]


def _relative(estimate: Tensor, error: Tensor) -> float:
    """Return the norm of an error relative to that of the estimate; NaN if it is not known."""
    size, scale = (float(double_norm(x)) for x in (error, estimate))
    return size / scale if scale else size and inf


def split(num_matvecs: Any, parts: int, dim: int, fewest: int, goal: Goal) -> tuple[int, bool]:
    """Return how many random vectors to draw, and whether the exact result may follow.

    The exact result takes D products. With ``rtol``, random vectors come first, as many as the
    products beyond D allow.

    Args:
        num_matvecs: The largest number of products.
        parts: How many products each random vector needs. A remainder is left over.
        dim: The number of the matrix's columns, D.
        fewest: How many random vectors an estimate needs.
        goal: When to stop.

    Raises:
        ValueError: If ``num_matvecs`` is too small for an estimate.
    """
    num = check_count("num_matvecs", num_matvecs, at_least=max(min(parts * fewest, dim), 1))
    if num < dim:
        return num // parts, False
    extra = 0 if goal.rtol is None else min(num - dim, dim) // parts
    return (extra if extra >= _FEWEST else 0), True


#: Takes vectors ``[D, K]`` and their products, returns samples along the last axis.
Sample = Callable[[Tensor, Tensor], Tensor]


def quadratic_forms(X: Tensor, AX: Tensor) -> Tensor:
    """Return ``x^T A x`` for each vector, ``[K]``: samples of the trace."""
    return (X * AX).sum(0)


def sum_over_unit_vectors(probes: Probes, sample: Sample) -> Tensor:
    """Return what random vectors estimate: the outer products of unit vectors are the identity."""
    total, dim = 0.0, probes.dim
    for start in range(0, max(dim, 1), probes.chunk_size):
        num = min(probes.chunk_size, dim - start)
        rows = torch.zeros(num, dim, dtype=probes.matrix.dtype, device=probes.matrix.device)
        rows.diagonal(start).fill_(1.0)
        total = total + sample(rows.T, probes.matrix @ rows.T).sum(-1)
    return total


def average(
    probes: Probes,
    num: int,
    goal: Goal,
    sample: Callable[[Tensor], Tensor],
    known: Tensor | float = 0.0,
    exact: Sample | None = None,
) -> Any:
    """Average a function of random vectors.

    Args:
        probes: The random vectors.
        num: How many of them; fewer if the goal is reached earlier.
        goal: When to stop, and what to return.
        sample: Takes vectors ``[D, K]``, returns samples along the last axis.
        known: The part of the result that is not random.
        exact: What gives the exact result for unit vectors, if that may follow, see ``split``.
    """
    total = Average()
    for X in probes.chunks(num, often=goal.rtol is not None):
        total.update(sample(X))
        if goal.reached(known + total.mean, total.standard_error, total.count):
            break
    else:
        if exact is not None:
            return goal.report_exact(probes.matrix, sum_over_unit_vectors(probes, exact))
    return goal.report(probes.matrix, known + total.mean, total.standard_error)


def grow(
    probes: Probes,
    num_matvecs: int,
    parts: int,
    goal: Goal,
    estimate: Callable[[int], tuple[Tensor, Tensor]],
    exact: Sample,
) -> Any:
    """Estimate with more and more vectors, until the error is as small as wanted.

    Args:
        probes: The random vectors.
        num_matvecs: The number of products.
        parts: How many products each vector needs.
        goal: When to stop, and what to return.
        estimate: Takes the number of vectors, returns the estimate and its standard error.
        exact: What gives the exact result for unit vectors.
    """
    # the terms of two signs are equal for every diagonal matrix
    fewest = 1 + 2 * goal.return_error
    num, may_be_exact = split(num_matvecs, parts, probes.dim, fewest, goal)
    for count in goal.steps(num) if num else ():
        mean, error = estimate(count)
        if goal.reached(mean, error, count):
            break
    else:
        if may_be_exact:
            return goal.report_exact(probes.matrix, sum_over_unit_vectors(probes, exact))
    return goal.report(probes.matrix, mean, error)


def append(columns: Tensor, more: Tensor) -> Tensor:
    """Return columns ``[D, K]`` and more of them, each contiguous."""
    return torch.cat([columns.T, more.T]).T


def rescale(forms: Tensor, left: Tensor, lengths: Tensor, probes: Probes, num: int) -> Tensor:
    """Scale quadratic forms of what is left out of vectors to the expected length of that.

    Its direction is uniformly distributed if the vector's is, and independent of its length.

    Args:
        forms: The quadratic forms, ``[K]``.
        left: The squared lengths of what is left out.
        lengths: The squared lengths of the whole vectors.
        probes: Where the vectors come from.
        num: Number of vectors; all others span what is not left out.
    """
    if probes.distribution == "rademacher":
        return forms
    some = left > torch.finfo(probes.matrix.dtype).eps * lengths
    return torch.where(some, forms * (probes.dim - num + 1) / left, 0.0)
