"""Random vectors, and averages over them with standard errors."""

from collections.abc import Callable
from functools import cached_property, partial
from math import inf
from typing import (
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    overload,
)

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.iteration import (
    Callback,
    ConvergenceWarning,
    Iteration,
    check_callback,
    solves,
    stops,
)
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.norms import double_norm
from curvlinops.support.rng import check_source, read_generator
from curvlinops.support.warnings import warn

#: Bytes of random vectors that are multiplied at once. Larger blocks gain little.
_BLOCK = 64 * 2**20

#: Number of samples before ``rtol`` is checked: the error of two or three may be small by chance.
_MIN_SAMPLES = 8

P = ParamSpec("P")
Plain = TypeVar("Plain", covariant=True)
WithError = TypeVar("WithError", covariant=True)


class Estimate(NamedTuple):
    """A random estimate, and its standard error (the estimated standard deviation).

    Attributes:
        estimate: A scalar, or a vector ``[D]``.
        standard_error: Of the same shape.
    """

    estimate: Tensor
    standard_error: Tensor


class RandomOptions(TypedDict, total=False):
    """Options of all algorithms with random vectors; ``hutchinson_trace`` explains them."""

    chunk_size: int | None
    seed: int | None
    generator: torch.Generator | None
    callback: Callback


class SamplingOptions(RandomOptions, total=False):
    """Options of all estimators; ``hutchinson_trace`` explains them."""

    rtol: float | None
    return_error: bool


class Estimator(Protocol[P, Plain, WithError]):
    """The type of an estimator, with and without ``return_error``; P are its arguments after A."""

    @overload
    def __call__(
        self, A: AnyMatrix, *args: Any, return_error: Literal[True], **options: Any
    ) -> WithError: ...
    @overload
    def __call__(self, A: AnyMatrix, *args: P.args, **options: P.kwargs) -> Plain: ...


def estimator(
    function: Callable[Concatenate[AnyMatrix, P], Tensor | Estimate],
) -> Estimator[P, Tensor, Estimate]:
    """Decorate an estimator: it runs as a solver."""
    return solves(function)


class Sampler:
    """Draws random vectors x with ``E[x x^T] = I``, until an estimate is accurate enough.

    Entries are signs (``"rademacher"``), or standard normal; ``"sphere"`` is uniform on the sphere
    of radius ``sqrt(D)``. The algorithm holds ``held`` vectors in memory for each random one. For
    other options see ``hutchinson_trace``.
    """

    def __init__(
        self,
        matrix: Matrix,
        distribution: str,
        held: int = 1,
        *,
        rtol: float | None = None,
        return_error: bool = False,
        chunk_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        callback: Callback = None,
    ):
        check_choice("distribution", distribution, ("rademacher", "gaussian", "normal", "sphere"))
        if rtol is not None and not 0 < rtol < 1:
            raise ValueError(f"rtol must lie between 0 and 1, got {rtol!r}.")
        self.matrix, self.distribution, self.dim = matrix, distribution, matrix.shape[1]
        self.rtol, self.return_error = rtol, return_error
        self.callback = check_callback(callback)
        if chunk_size is None:
            chunk_size = max(_BLOCK // max(held * self.dim * matrix.dtype.itemsize, 1), 1)
        self.chunk_size = check_count("chunk_size", chunk_size)
        check_source(seed, generator)
        self._source = seed, generator

    @cached_property
    def generator(self) -> torch.Generator:
        """The source of random numbers; the first use may draw its seed from the global one."""
        return read_generator(self.matrix.device, *self._source)

    def draw(self, num: int) -> Tensor:
        """Draw random vectors ``[D, num]``, each of which is contiguous."""
        space, generator = self.matrix.space, self.generator
        if self.distribution == "rademacher":
            X = space.draw(num, lambda x: x.bernoulli_(0.5, generator=generator))
            return X.mul_(2).sub_(1).T
        X = space.draw(num, lambda x: x.normal_(generator=generator))
        if self.distribution == "sphere":
            X *= self.dim**0.5 / space.norms(X).to(X).unsqueeze(1)
        return X.T

    def quadratic_forms(self, X: Tensor, AX: Tensor) -> Tensor:
        """Return ``x^T A x`` for each vector, ``[K]``: samples of the trace."""
        return self.matrix.space.sums((X * AX).T)

    def multiply(self, X: Tensor, adjoint: bool = False) -> Tensor:
        """Multiply any number of vectors ``[D, K]`` by the matrix, or its transpose, in chunks."""
        product = self.matrix.adjoint_matmul if adjoint else self.matrix.__matmul__
        products = [product(chunk).T for chunk in X.split(self.chunk_size, dim=1)]
        return (products[0] if len(products) == 1 else torch.cat(products)).T

    def num_vectors(self, num_matvecs: int, cost: int = 1, error_needs: int = 2) -> int | None:
        """Return the number of random vectors, or ``None`` if D products are allowed.

        Each costs some products. A standard error needs at least some vectors.
        """
        fewest = error_needs if self.return_error else 1
        at_least = max(min(cost * fewest, self.dim), 1)
        num = check_count("num_matvecs", num_matvecs, at_least)
        if self.matrix.space.in_parts:  # no process has a whole unit vector
            num = min(num, self.dim - 1)
        is_exact = num >= self.dim
        return None if is_exact else num // cost

    def stops(self, iteration: int, values: Tensor) -> bool:
        """Call the callback after a block of random vectors; return whether it stops."""
        products = self.matrix.num_products
        state = partial(Iteration, iteration=iteration, num_products=products, values=values)
        return stops(self.callback, self.matrix.operator._team, state)

    def mean(
        self, num_matvecs: int, terms: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | Estimate:
        """Average ``terms(X, A X)`` over random vectors X; add up over unit vectors if allowed.

        Terms of ``[D, K]`` are ``[..., K]``.
        """
        num, mean = self.num_vectors(num_matvecs), RunningMean()
        if num is None:
            return self.exact(terms)
        return self.run(num, lambda X: mean.update(terms(X, self.matrix @ X)))

    def exact(self, terms: Callable[[Tensor, Tensor], Tensor]) -> Tensor | Estimate:
        """Add up ``terms(X, A X)``, ``[..., K]``, over all unit vectors ``[D, K]``."""
        options = {"dtype": self.matrix.dtype, "device": self.matrix.device}
        total = torch.zeros((), **options)
        for start in range(0, self.dim, self.chunk_size):
            units = torch.zeros(min(self.chunk_size, self.dim - start), self.dim, **options)
            units.diagonal(start).fill_(1.0)
            total = total + terms(units.T, self.matrix @ units.T).sum(-1)
        self.stops(1, total)  # sums over some of the unit vectors are no estimates
        return self._result(total, torch.zeros_like(total))

    def run(
        self,
        num: int,
        update: Callable[[Tensor], tuple[Tensor, Tensor]],
        at_once: int | None = None,
    ) -> Tensor | Estimate:
        """Draw up to ``num`` random vectors, until the standard error is small enough.

        ``update`` takes new vectors ``[D, K]``; it returns the estimate from all vectors so far,
        and its standard error. By default ``chunk_size`` are drawn at once; with ``rtol``, at most
        eight.
        """
        size = self.chunk_size if at_once is None else at_once
        size = size if self.rtol is None else min(size, _MIN_SAMPLES)
        ratio = inf
        for iteration, start in enumerate(range(0, num, size), 1):
            stop = min(start + size, num)
            estimate, error = update(self.draw(stop - start))
            if self.stops(iteration, estimate.to(self.matrix.dtype)):
                return self._result(estimate, error)
            if self.rtol is not None and stop >= min(_MIN_SAMPLES, num):
                ratio = self._relative(estimate, error)
                if ratio <= self.rtol:
                    break
        if self.rtol is not None and not ratio <= self.rtol:
            warn(
                f"The standard error is {ratio:.1e} of the estimate, more than rtol={self.rtol}, "
                "after the largest allowed number of products. Allow more.",
                ConvergenceWarning,
            )
        return self._result(estimate, error)

    def _result(self, estimate: Tensor, error: Tensor) -> Tensor | Estimate:
        estimate, error = estimate.to(self.matrix.dtype), error.to(self.matrix.dtype)
        is_wrong = not bool(estimate.isfinite().all()) or bool(error.isinf().any())
        if self.matrix.space.any(is_wrong):
            raise ValueError(
                "The products with the matrix are finite, but the estimate, or its standard error, "
                f"is too large for {estimate.dtype}. Scale the matrix."
            )
        if estimate.ndim:
            estimate, error = map(self.matrix.space.vectors, (estimate, error))
        return Estimate(estimate, error) if self.return_error else estimate

    def _relative(self, estimate: Tensor, error: Tensor) -> float:
        """Return the norm of an error relative to the norm of the estimate."""
        if self.matrix.space.in_parts and estimate.ndim:
            norms = self.matrix.space.norms
            size, scale = (float(norms(x.unsqueeze(0))) for x in (error, estimate))
        else:
            size, scale = (float(_safe_norm(x.reshape(-1))) for x in (error, estimate))
        return size / scale if scale else size and inf


class RunningMean:
    """The mean of samples so far, and its standard error (Chan et al. 1979)."""

    def __init__(self):
        self._count = 0
        self._mean: Tensor | float = 0.0
        #: The root of the sum of squared deviations.
        self._spread = torch.zeros((), dtype=torch.float64, device="cpu")

    def update(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Add samples, which lie along the last axis; return mean and standard error so far."""
        num, mean = samples.shape[-1], samples.mean(-1)
        count = self._count + num
        delta = mean - self._mean
        within = _safe_norm(samples - mean.unsqueeze(-1))
        between = delta.double() * (self._count * num / count) ** 0.5
        self._spread = torch.hypot(torch.hypot(self._spread, within), between)
        self._mean, self._count = self._mean + delta * (num / count), count
        if count < 2:
            return self._mean, torch.full_like(self._mean, torch.nan)
        error = self._spread / (count * (count - 1)) ** 0.5
        return self._mean, error.to(self._mean.dtype)


def _safe_norm(x: Tensor) -> Tensor:
    """Return Euclidean norms along the last axis in float64, without over- or underflow."""
    largest = x.abs().amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    return double_norm(x / unit, -1) * unit.squeeze(-1).double()
