"""Random vectors, averages over them with standard errors, and when to stop."""

from collections.abc import Callable, Iterable, Iterator
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

import torch
from torch import Tensor

from curvlinops.algorithms.convergence import ConvergenceWarning
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, TorchMatrix
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.norms import double_norm
from curvlinops.support.progress import solves
from curvlinops.support.rng import read_generator
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.support.warnings import warn

#: Bytes of random vectors that are multiplied at once. Larger blocks gain little.
_BLOCK = 64 * 2**20

#: Number of samples before ``rtol`` is consulted: the error of two or three may be small by chance.
_MIN_SAMPLES = 8

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

    For matrices that are not PyTorch's, it returns a ``Value`` of numpy.
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


def estimator(
    name: str, value: type[Value]
) -> Callable[[Callable[Concatenate[AnyMatrix, P], Any]], Estimator[P, Value]]:
    """Return a decorator that makes a function an estimator.

    Args:
        name: Shown by the progress bar.
        value: What the function returns for matrices of numpy, for type checkers.
    """
    return lambda function: in_default_modes(solves(name)(function))


class Probes:
    """Random vectors x with ``E[x x^T] = I``.

    Args:
        matrix: The matrix that they are multiplied with.
        distribution: ``"rademacher"`` (entries are signs), ``"gaussian"`` or ``"normal"``
            (standard normal), or ``"sphere"`` (uniform on the sphere of radius ``sqrt(D)``).
        chunk_size: How many vectors are multiplied at once. Default: as many as need 64 MiB.
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
        check_choice("distribution", distribution, ("rademacher", "gaussian", "normal", "sphere"))
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

    def multiply(self, X: Tensor, adjoint: bool = False) -> Tensor:
        """Multiply any number of vectors ``[D, K]`` by the matrix, or its transpose."""
        product = self.matrix.adjoint_matmul if adjoint else self.matrix.__matmul__
        return torch.cat([product(chunk) for chunk in X.split(self.chunk_size, dim=1)], dim=1)

    def unit_vectors(self) -> Iterator[Tensor]:
        """Yield the columns of the identity, a chunk at a time."""
        for start in range(0, max(self.dim, 1), self.chunk_size):
            num = min(self.chunk_size, self.dim - start)
            rows = torch.zeros(num, self.dim, dtype=self.matrix.dtype, device=self.matrix.device)
            rows.diagonal(start).fill_(1.0)
            yield rows.T


class Average:
    """The running average of samples, and its standard error (Chan et al. 1979)."""

    def __init__(self):
        self._count = 0
        self._mean: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0

    def update(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Add samples along the last axis.

        Returns:
            The average of all samples, and its standard error; NaN for a single sample.
        """
        num, mean = samples.shape[-1], samples.mean(-1)
        count = self._count + num
        delta = mean - self._mean
        # in double precision, which has room for squares
        squares = double_norm(samples - mean.unsqueeze(-1), -1).square()
        between = delta.double().square() * (self._count * num / count)
        self._squares = self._squares + squares + between
        self._mean, self._count = self._mean + delta * (num / count), count
        if count < 2:
            return self._mean, torch.full_like(self._mean, torch.nan)
        return self._mean, (self._squares / (count * (count - 1))).sqrt().to(self._mean.dtype)


class StoppingRule:
    """How accurate an estimate has to be, and whether its error is returned.

    Args:
        rtol: Sampling stops when the standard error is at most ``rtol`` times the estimate, both
            in the Euclidean norm. ``None``: never.
        return_error: Whether to return the error, too.
    """

    def __init__(self, rtol: float | None, return_error: bool):
        if rtol is not None and not 0 < rtol < 1:
            raise ValueError(f"rtol must lie between 0 and 1, got {rtol!r}.")
        self.rtol, self.return_error = rtol, return_error

    def split(self, num_matvecs: Any, dim: int, cost: int, error_needs: int) -> tuple[int, bool]:
        """Return how many random vectors to draw, and whether D products with unit vectors follow.

        Args:
            num_matvecs: The largest number of products.
            dim: The dimension D.
            cost: How many products each random vector needs.
            error_needs: How many random vectors a standard error needs.

        Raises:
            ValueError: If ``num_matvecs`` is too small for an estimate.
        """
        fewest = error_needs if self.return_error else 1
        num = check_count("num_matvecs", num_matvecs, at_least=max(min(cost * fewest, dim), 1))
        if num < dim:
            return num // cost, False
        beyond = 0 if self.rtol is None else min(num - dim, dim) // cost
        return (beyond if beyond >= _MIN_SAMPLES else 0), True

    def chunks(self, num: int, chunk_size: int) -> list[int]:
        """Return the numbers of samples between looks at the error of independent samples."""
        size = chunk_size if self.rtol is None else min(chunk_size, _MIN_SAMPLES)
        return [min(size, num - start) for start in range(0, num, size)]

    def doublings(self, num: int) -> list[int]:
        """Return the numbers of samples between looks at an error that takes long to compute."""
        if self.rtol is None or num < 2 * _MIN_SAMPLES:
            return [num] if num else []
        return [*self.doublings(num // 2), num - num // 2]

    def run(
        self,
        probes: Probes,
        sizes: Iterable[int],
        update: Callable[[Tensor], tuple[Tensor, Tensor]],
        exact: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Any:
        """Draw random vectors until the standard error is small enough.

        Args:
            probes: The random vectors.
            sizes: How many to draw at a time.
            update: Takes new vectors ``[D, K]``, returns the estimate from all so far, and its
                standard error.
            exact: Takes vectors ``[D, K]`` and their products, and returns terms along the last
                axis, whose sum over all unit vectors is the exact result. ``None`` if the
                estimate is to be returned though its error is too large.

        Returns:
            The estimate, or an ``Estimate``.
        """
        matrix, count = probes.matrix, 0
        for size in sizes:
            estimate, error = update(probes.draw(size))
            count += size
            if self.rtol and count >= _MIN_SAMPLES and _relative(estimate, error) <= self.rtol:
                break
        else:
            if exact is not None:
                estimate = sum(exact(X, matrix @ X).sum(-1) for X in probes.unit_vectors())
                error = torch.zeros_like(estimate)
            elif self.rtol and not (ratio := _relative(estimate, error)) <= self.rtol:
                warn(
                    f"The standard error is {ratio:.1e} of the estimate, more than "
                    f"rtol={self.rtol}, after all products that were allowed. Allow more.",
                    ConvergenceWarning,
                )
        results = [matrix.write(x.to(matrix.dtype))[()] for x in (estimate, error)]
        return Estimate(*results) if self.return_error else results[0]


def _relative(estimate: Tensor, error: Tensor) -> float:
    """Return the norm of an error relative to that of the estimate; NaN if it is not known."""
    size, scale = (float(double_norm(x)) for x in (error, estimate))
    return size / scale if scale else size and inf


def quadratic_forms(X: Tensor, AX: Tensor) -> Tensor:
    """Return ``x^T A x`` for each vector, ``[K]``: samples of the trace."""
    return (X * AX).sum(0)
