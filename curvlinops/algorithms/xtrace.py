"""XTrace, XDiag and XNysTrace: traces and diagonals by leaving one random vector out.

All random vectors but one span a subspace, in which the trace or diagonal is computed exactly. The
vector that is left out samples the rest. The estimate is the mean over the vector that is left out
(Epperly, Tropp and Webber, XTrace: making the most of every sample in stochastic trace estimation,
SIAM Journal on Matrix Analysis and Applications 2024).

The standard error from K vectors is that of K independent terms (section 2.5 of the paper), times
``sqrt(2 D / (D - K + 1))``, since the terms share all vectors. In experiments it is between 0.6 and
1.7 times the actual error. It needs three vectors: the terms of two vectors of signs are equal for
every diagonal matrix.
"""

from collections.abc import Callable
from math import frexp, log10
from typing import Unpack

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.sampling import (
    Estimate,
    RunningMean,
    Sampler,
    SamplingOptions,
    estimator,
)

#: In fewer dimensions vectors of signs may be linearly dependent; then all terms are equally wrong.
_FEW_DIMENSIONS = 32


@estimator
def xtrace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the trace of a square matrix with XTrace.

    ``tr(A) = mean_i  tr(P_i A P_i) + x_i^T (I - P_i) A (I - P_i) x_i``, with P_i the projection on
    the range of A times all random vectors but x_i (equation 2.3 and Algorithm 2.1 of Epperly et
    al. 2024). Unbiased for every matrix; exact if the rank is below ``num_matvecs / 2``. For
    Gaussian and spherical vectors, ``(I - P_i) x_i`` is scaled to its expected length, which
    reduces the variance.

    Each random vector needs two products. All vectors and their products are held in memory. The
    arguments are those of ``hutchinson_trace``.
    """
    sampler = Sampler(Matrix(A, square=True), distribution, **options)
    sketch = _Sketch(sampler)

    def terms(new: Tensor) -> Tensor:
        sketch.extend(new)
        Q, R = sketch.Q, sketch.R.double()
        space, pairs = sampler.matrix.space, [(Q, sketch.Z), (Q, sketch.X), (sketch.Z, sketch.X)]
        H, W, T = (space.gram(M.T, N.T).double() for M, N in pairs)
        S = _left_out(R)
        inside = H.trace() - (S * (H @ S)).sum(0)
        V = W - S * (S * W).sum(0)  # P_i x_i = Q v_i
        outside = (W * R - T * V - V * R + V * (H @ V)).sum(0)
        lengths = space.dots(sketch.X.T, sketch.X.T)
        if sampler.distribution != "rademacher":
            outside = _rescaled(outside, lengths - V.square().sum(0), lengths, sampler)
        return inside + outside

    return _mean(sampler, num_matvecs, terms, sampler.quadratic_forms, cost=2)


@estimator
def xdiag(A: AnyMatrix, num_matvecs: int, **options: Unpack[SamplingOptions]) -> Tensor | Estimate:
    """Estimate the diagonal of a square matrix with XDiag, ``[D]``.

    ``diag(A) = mean_i  diag(P_i A) + x_i * ((I - P_i) A x_i)``, with Rademacher vectors x_i and P_i
    the projection on the range of A times all others (section 2.4 of Epperly et al. 2024). Unbiased
    for every matrix; exact if the rank is below ``num_matvecs / 2``.

    Each random vector needs two products, one of them with the transpose. The arguments are those
    of ``hutchinson_trace``.

    Raises:
        NotImplementedError: If ``A`` has no products with its transpose.
    """
    sampler = Sampler(Matrix(A, square=True), "rademacher", **options)
    sketch = _Sketch(sampler, adjoint=True)

    def terms(new: Tensor) -> Tensor:
        sketch.extend(new)
        S = _left_out(sketch.R)
        lengths = (S * sketch.R.double()).sum(0).to(sketch.Q.dtype)
        S = S.to(sketch.Q.dtype)
        inside = (sketch.Q * sketch.Z).sum(1, keepdim=True)
        return inside + sketch.Q @ S * (sketch.X * lengths - sketch.Z @ S)

    return _mean(sampler, num_matvecs, terms, torch.mul, cost=2)


@estimator
def xnystrace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the trace of a symmetric positive semi-definite matrix with XNysTrace.

    ``tr(A) = mean_i  tr(A_i) + x_i^T (A - A_i) x_i``, with A_i the Nyström approximation of A from
    all random vectors but x_i (equation 2.8 and Algorithm 2.2 of Epperly et al. 2024). Unbiased;
    exact if the rank is below ``num_matvecs``, twice that of ``xtrace``. Gaussian and spherical
    vectors are scaled as in ``xtrace``. In fewer than 32 dimensions, where vectors of signs may be
    linearly dependent, ``"rademacher"`` is the same as ``"sphere"``.

    Each random vector needs one product. The arguments are those of ``hutchinson_trace``.

    Raises:
        ValueError: If products show that the matrix is not symmetric, or not positive
            semi-definite.
    """
    matrix = Matrix(A, square=True)
    if distribution == "rademacher" and matrix.shape[0] < _FEW_DIMENSIONS:
        distribution = "sphere"
    sampler = Sampler(matrix, distribution, **options)
    X = AX = matrix.space.empty(0).T

    def terms(new: Tensor) -> Tensor:
        nonlocal X, AX
        X, AX = _append(X, new), _append(AX, sampler.multiply(new))
        return _nystrom_terms(sampler, X, AX)

    return _mean(sampler, num_matvecs, terms, sampler.quadratic_forms, cost=1)


def _mean(
    sampler: Sampler,
    num_matvecs: int,
    terms: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor, Tensor], Tensor],
    cost: int,
) -> Tensor | Estimate:
    """Average over the vector that is left out; see the module for the standard error.

    ``terms`` returns one term for each vector so far, along the last axis; ``exact`` those of unit
    vectors and their products, which add up to the exact result. A random vector costs some
    products.
    """
    num = sampler.num_vectors(num_matvecs, cost, error_needs=3)
    if num is None:
        return sampler.exact(exact)

    def update(new: Tensor) -> tuple[Tensor, Tensor]:
        samples = terms(new)
        mean, error = RunningMean().update(samples)
        return mean, (2 * sampler.dim / (sampler.dim - samples.shape[-1] + 1)) ** 0.5 * error

    return sampler.run(num, update, at_once=num)


class _Sketch:
    """Random vectors X, ``A X = Q R`` with orthonormal Q, and ``Z = A Q`` or ``A^T Q``."""

    def __init__(self, sampler: Sampler, adjoint: bool = False):
        self._sampler, self._adjoint = sampler, adjoint
        self.X = self.Q = self.Z = sampler.matrix.space.empty(0).T
        self.R = self.X.new_zeros(0, 0)

    def extend(self, new: Tensor) -> None:
        """Append random vectors to X, and new columns to Q, R and Z."""
        basis = self._orthonormalized(self._sampler.multiply(new))
        self.X, self.Q = _append(self.X, new), _append(self.Q, basis)
        # products with contiguous vectors are fastest
        product = self._sampler.multiply(basis.T.contiguous().T, self._adjoint)
        self.Z = _append(self.Z, product)

    def _orthonormalized(self, Y: Tensor) -> Tensor:
        """Return new columns of Q, given those of ``A X``, and append columns to R."""
        space, old = self._sampler.matrix.space, len(self.R)
        # by Householder's method, which is orthogonal to Q even if products lie in its span
        basis, coefficients = space.qr(_append(self.Q, Y).T)
        R = torch.nn.functional.pad(self.R, (0, Y.shape[1], 0, Y.shape[1]))
        R[:old, old:], R[old:, old:] = space.gram(self.Q.T, Y.T), coefficients[old:, old:]
        self.R = R
        return basis[old:].T


def _append(columns: Tensor, more: Tensor) -> Tensor:
    """Append columns to columns ``[D, K]``; each is contiguous."""
    return torch.cat([columns.T, more.T]).T if columns.shape[1] else more


def _left_out(R: Tensor) -> Tensor:
    """Return unit columns ``s_i``, orthogonal to the columns of R except for the i-th, in float64.

    If a column depends on the others, any direction orthogonal to all of them will do: a diagonal
    entry of zero is replaced by a negligible one.
    """
    R = R.double()
    R = R / (R.abs().max() + (R == 0).all())  # whose squares are neither too large nor too small
    tiny, diagonal = torch.finfo(torch.float64).eps, R.diagonal()
    diagonal.copy_(torch.where(diagonal.abs() < tiny, tiny, diagonal))
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    S = torch.linalg.solve_triangular(R.T, eye, upper=False)
    return S / S.norm(dim=0)


def _rescaled(forms: Tensor, squares: Tensor, lengths: Tensor, sampler: Sampler) -> Tensor:
    """Scale quadratic forms of residuals to the expected squared length of the residuals.

    A residual is the part of a random vector that is orthogonal to a subspace. If directions of
    the vectors are uniformly distributed, so are those of the residuals, whatever their lengths.
    ``squares`` are squared lengths of the residuals, ``lengths`` those of the vectors, ``[K]``.
    """
    is_nonzero = squares > torch.finfo(sampler.matrix.dtype).eps * lengths
    return torch.where(is_nonzero, forms * (sampler.dim - len(forms) + 1) / squares, 0.0)


def _nystrom_terms(sampler: Sampler, X: Tensor, AX: Tensor) -> Tensor:
    """Return XNysTrace's estimates ``[K]``, each of which leaves one random vector out.

    With ``H = X^T A X``, the Nyström approximation without ``x_i`` lacks ``G_ii / (H^-1)_ii`` of
    the trace of that from all vectors, ``G = H^-1 X^T A A X H^-1``, and ``x_i^T (A - A_i) x_i`` is
    ``1 / (H^-1)_ii``. To keep H positive definite, a multiple of the identity about as large as
    rounding errors is added to A.
    """
    space = sampler.matrix.space
    largest = space.largest(AX)
    if largest == 0:  # nor would there be a shift
        return torch.zeros(X.shape[1], dtype=torch.float64, device=X.device)
    # a power of two rounds nothing, and squares are neither too large nor too small
    unit = 2.0 ** (frexp(largest)[1] - 1)
    AX = AX / unit
    gram = space.gram(X.T, X.T).double()
    L, shift = _shifted_cholesky(sampler, X, AX, gram)
    R = space.qr((AX + shift * X).T)[1].double()
    trace = torch.linalg.solve_triangular(L, R.T, upper=False).square().sum() - shift * sampler.dim
    inverse = torch.cholesky_inverse(L)
    diagonal = inverse.diagonal()
    forms = 1 / diagonal
    if sampler.distribution != "rademacher":  # vectors of signs may be linearly dependent
        squares = 1 / torch.linalg.inv(gram).diagonal()
        forms = _rescaled(forms, squares, gram.diagonal(), sampler)
    return unit * (trace - (R @ inverse).square().sum(0) / diagonal + forms)


def _shifted_cholesky(
    sampler: Sampler, X: Tensor, AX: Tensor, gram: Tensor
) -> tuple[Tensor, float]:
    """Return the Cholesky factor of ``X^T (A + shift I) X``, and the shift."""
    space = sampler.matrix.space
    H = space.gram(X.T, AX.T).double()
    eps, matrix = torch.finfo(X.dtype).eps, sampler.matrix
    if not matrix.operator.self_adjoint and (H - H.T).norm() > eps**0.5 * H.norm():
        raise ValueError(
            "xnystrace needs a symmetric matrix; this one is not symmetric. Use xtrace."
        )
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    scale = float(space.norms(AX.T).norm()) / sampler.dim**0.5
    for power in range(int(-log10(eps) / 2) + 1):  # up to the root of eps
        shift = eps * scale * 10**power
        # vectors may be almost linearly dependent, hence a multiple of the identity
        shifted = (H + H.T) / 2 + shift * (gram + 0.01 * sampler.dim * eye)
        L, info = torch.linalg.cholesky_ex(shifted)
        if not bool(info):
            return L, shift
    raise ValueError(
        "xnystrace needs a positive semi-definite matrix; this one is not positive semi-definite. "
        "Use xtrace."
    )
