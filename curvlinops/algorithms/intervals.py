"""Intervals that contain quadratic forms of an inverse.

For a positive semidefinite matrix A and a damping ``d > 0``, every vector x gives a lower bound,
and every vector y an upper one:

    2 g^T x - x^T (A + d I) x  <=  g^T (A + d I)^-1 g  <=  |g - A y|^2 / d + y^T A y

Both are equal to the form at ``x = y = (A + d I)^-1 g``. Here x and y are the best vectors in the
span of some directions whose products with A are known. For the directions g, A g, A^2 g, ... the
bounds are the quadrature rules of Gauss, and of Gauss and Radau with the node d (Golub and Meurant,
Matrices, moments and quadrature with applications, 2010, chapters 6 and 7). A preconditioner P
gives better directions: P times residuals. The bounds hold for all directions, hence for any
preconditioner, and whether or not the directions lose their orthogonality.

Rounding. A product with a unit vector is assumed to have an error of norm ``noise`` at most, and
both bounds are widened by the effect of such errors. ``noise`` is ``32 eps`` of the products' dtype
times the largest norm of a product with a unit vector. If they are larger, it is four times the
largest asymmetry ``|z_i^T A z_j - z_j^T A z_i|`` of the directions, or four times the negative part
of the projected matrix ``Z A Z^T``: of a positive semidefinite matrix, rounding alone makes these.
So intervals become wider if a model rounds more inside (bfloat16, autocast, TF32).

With the residual ``r = g - (A + d I) x``, the error of ``y^T x`` is ``y^T (A + d I)^-1 r``. It is
at most ``|y| / sqrt(d)`` times the root of ``r^T (A + d I)^-1 r``, which has the upper bound above.
"""

from collections.abc import Callable
from functools import partial
from math import log, log1p
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix, Preconditioner, read_preconditioner
from curvlinops.algorithms.iteration import Callback, Iteration, check_callback, solves, stops
from curvlinops.algorithms.krylov import (
    ASYMMETRY,
    Systems,
    add_scaled,
    check_sizes,
    combined,
    orthonormalized,
    scaled,
)
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import check_choice, check_count, check_number

#: The assumed error of a product, in units of eps and of the matrix's norm.
_PRODUCT = 32
#: The assumed ratio of a product's error to the asymmetries and negative values that it causes.
_FROM_SIGNS = 4
#: Negative values of more times the error of a product are not taken for rounding.
_NEGATIVE = 100


class Interval(NamedTuple):
    """Numbers that lie between two bounds.

    Attributes:
        lower: The lower bound, a scalar, or ``[K]`` for K columns; float64.
        upper: The upper bound, of the same shape.
        num_products: The number of products with each vector. All columns are multiplied at once.
    """

    lower: Tensor
    upper: Tensor
    num_products: int


#: Takes the bounds of all rows; returns those that the user gets.
_Combine = Callable[[Interval], Interval]


@solves
def quadratic_form(
    A: AnyMatrix,
    g: Vectors,
    damping: float,
    num_products: int = 50,
    rtol: float = 1e-2,
    *,
    preconditioner: Preconditioner = None,
    callback: Callback = None,
    function: str = "inverse",
) -> Interval:
    """Enclose ``g^T (A + damping I)^-1 g`` for a positive semidefinite matrix A.

    Such forms are self-influences of samples, and variances of predictions. The bounds hold for any
    number of products, and account for rounding. The error of a product is assumed to be at most 32
    times the machine precision times the norm of A, or more if asymmetries of products show that.
    The bounds need a positive semidefinite matrix. A matrix with a negative eigenvalue is refused
    if the products show it, but they may not show it.

    Operators with structure that have an inverse, such as KFAC and EKFAC, give its exact form, up
    to rounding, as both bounds.

    Args:
        A: A positive semidefinite operator or matrix of any kind, ``[D, D]``, such as
            ``GGNLinearOperator``.
        g: One or several vectors, of any kind that operators multiply.
        damping: The positive number that is added to the diagonal of A.
        num_products: The largest number of products for each vector, at least two. Two vectors are
            held in memory for each product.
        rtol: The width of the interval, relative to the upper bound, with which a vector takes no
            more products. A vector also takes no more if rounding makes up half of the width.
        preconditioner: An operator that approximates ``(A + damping I)^-1``, such as EKFAC's
            inverse. The bounds hold for any; with a good one, they take fewer products.
        callback: A function that is called with an ``Iteration`` after each product but
            the first. ``values`` are lower and upper bounds, ``[2]`` or ``[2, K]``. If it returns
            ``True``, these are the result.
        function: ``"inverse"``; or ``"log"`` for ``g^T log(A + damping I) g``, whose mean over
            random vectors g estimates a log-determinant. Then ``rtol`` is relative to ``g^T g``,
            and there is no preconditioner.

    Returns:
        The interval, a named tuple of ``lower``, ``upper`` and ``num_products``.

    Raises:
        ValueError: If products show that A is not symmetric or not positive semidefinite, or an
            argument is out of range.

    Example:
        >>> import torch
        >>> from curvlinops import quadratic_form
        >>> A, g = torch.diag(torch.arange(5.0).double()), torch.ones(5).double()
        >>> interval = quadratic_form(A, g, damping=1.0, num_products=3)
        >>> bool(interval.lower <= 1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5 <= interval.upper)
        True
    """
    matrix = Matrix(A, square=True)
    rows, is_single, _ = matrix.read(g)

    def combine(forms: Interval) -> Interval:
        return _first(forms) if is_single else forms

    rounded, options = matrix.space.norms(rows), (num_products, rtol, preconditioner, callback)
    is_log = check_choice("function", function, ("inverse", "log")) == "log"
    if is_log and preconditioner is not None:
        raise ValueError("function='log' takes no preconditioner.")
    return _enclose(matrix, rows, rounded, damping, *options, combine, is_log)


@solves
def bilinear_form(
    A: AnyMatrix,
    g: Vectors,
    h: Vectors,
    damping: float,
    num_products: int = 50,
    rtol: float = 1e-2,
    *,
    preconditioner: Preconditioner = None,
    callback: Callback = None,
) -> Interval:
    """Enclose ``g^T (A + damping I)^-1 h`` for a positive semidefinite matrix A.

    It is a quarter of the difference of the quadratic forms of ``g + h`` and ``g - h``, with g and
    h scaled to about equal norms. Such forms are influence scores, and covariances of predictions.

    Args:
        A: See ``quadratic_form``.
        g: One or several vectors.
        h: One vector, or one for each column of ``g``.
        damping: See ``quadratic_form``.
        num_products: See ``quadratic_form``. Each pair of vectors takes twice as many.
        rtol: The width of the interval, relative to the mean of the quadratic forms of g and h,
            scaled likewise. It is not relative to the bilinear form, which may be zero.
        preconditioner: See ``quadratic_form``.
        callback: See ``quadratic_form``. Its values are the bounds of the bilinear form.

    Returns:
        The interval, as ``quadratic_form``.

    Raises:
        ValueError: See ``quadratic_form``; or if the numbers of vectors do not fit.
    """
    matrix = Matrix(A, square=True)
    G, H = matrix.read(g), matrix.read(h)
    is_single, G, H = G.is_single and H.is_single, G.columns, H.columns
    num = max(len(G), len(H))
    if not {len(G), len(H)} <= {1, num}:
        raise ValueError(f"g has {len(G)} columns, h has {len(H)}: pass equally many, or one.")
    # a power of two, which rounds nothing; zero if a vector is zero
    ratios = check_sizes(matrix.space, H) / check_sizes(matrix.space, G)
    ratios = ratios.log2().div(2).round().exp2().nan_to_num(posinf=0.0)
    G, H = scaled(ratios, G), scaled((1 / ratios).nan_to_num(posinf=0.0), H)

    def combine(forms: Interval) -> Interval:
        low, high = forms.lower.view(2, num), forms.upper.view(2, num)
        pairs = Interval((low[0] - high[1]) / 4, (high[0] - low[1]) / 4, forms.num_products)
        return _first(pairs) if is_single else pairs

    rounded = (matrix.space.norms(G) + matrix.space.norms(H)).repeat(2)
    rows = torch.cat([G + H, G - H])
    return _enclose(
        matrix, rows, rounded, damping, num_products, rtol, preconditioner, callback, combine
    )


def _first(interval: Interval) -> Interval:
    """Return the interval of a single vector."""
    return Interval(interval.lower[0], interval.upper[0], interval.num_products)


def _enclose(
    matrix: Matrix,
    rows: Tensor,
    rounded: Tensor,
    damping: float,
    num_products: int,
    rtol: float,
    preconditioner: Preconditioner,
    callback: Callback,
    combine: _Combine,
    is_log: bool = False,
) -> Interval:
    """Enclose the quadratic forms of rows ``[K, D]``, and combine them to the result.

    The norms ``rounded`` of what the rows were computed from tell how accurate they are.
    """
    damping, rtol = check_damping(damping), check_number("rtol", rtol, 0)
    num_products = min(check_count("num_products", num_products, 2), matrix.shape[0])
    check_callback(callback)
    approximate = read_preconditioner(preconditioner, matrix)
    operator = matrix.operator
    operator.domain.check_compatible(operator.codomain)
    directions, iteration = Directions(matrix, rows, rounded, damping, is_log), 0
    squares = directions.sizes.square()
    if not is_log and (values := _exact(operator, rows, damping)) is not None:
        return combine(Interval(values, values.clone(), 0))
    found = Interval(torch.zeros_like(squares), squares / damping, 0)
    while len(directions.s.index) and directions.m < num_products:
        directions.extend(approximate)
        if directions.m == 1 < num_products:
            continue  # the first product may not show the norm of the matrix
        low, high, rounding = directions.bounds_of_log() if is_log else directions.bounds()
        index, iteration = directions.s.index.to(squares.device), iteration + 1
        lower, upper = (
            bound.index_copy(0, index, x.to(squares) * squares[index])
            for bound, x in zip(found[:2], (low, high), strict=True)
        )
        found = Interval(lower, upper, directions.m)
        state = partial(
            Iteration,
            iteration=iteration,
            num_products=matrix.num_products,
            values=torch.stack(combine(found)[:2]),
        )
        if stops(callback, operator._team, state):
            break
        goal = rtol * (torch.ones_like(high) if is_log else high)
        directions.s.keep(high - low > goal.maximum(2 * rounding))
    return combine(found)


def check_damping(damping: float) -> float:
    """Return a damping that the upper bound can be computed with."""
    damping = check_number("damping", damping)
    if damping <= 0:
        raise ValueError(f"damping must be positive, got {damping}. The upper bound needs that.")
    return damping


def _exact(operator: TorchLinearOperator, rows: Tensor, damping: float) -> Tensor | None:
    """Return the quadratic forms of an operator whose structure has an inverse."""
    if not operator._has_structure:
        return None
    try:
        inverse = operator.damped(damping).inverse()
    except NotImplementedError:
        return None
    return operator.domain.dots(rows, inverse._multiply_columns(rows))


class Directions:
    """m directions z of K vectors g that are scaled to norm one, their products, what they give.

    Vectors that are zero are left out. ``noise`` is the largest error that a product with a unit
    vector is assumed to have, ``norm`` the largest norm of one. Of the state ``s``, ``keep`` keeps
    some vectors. ``index`` has their numbers, ``Z`` and ``V`` are orthonormal bases of the
    directions and of their products, ``[K, m, D]``, ``residual`` is ``g - (A + d I) x``, and
    ``rest`` is the part of g outside of the span of V, ``[K, D]``. On the CPU are ``S = Z A Z^T``,
    its ``values`` and ``vectors``, ``R = V A Z^T`` and, for logarithms, ``P = V Z^T``,
    ``[K, m, m]``, ``b = Z g``, ``t = V g`` and the coefficients ``x``, ``[K, m]``, and ``unit``,
    the error of g, ``[K]``.
    """

    def __init__(
        self,
        matrix: Matrix,
        rows: Tensor,
        rounded: Tensor,
        damping: float,
        is_log: bool = False,
    ):
        self.matrix, self.space, self.damping, self._is_log = matrix, matrix.space, damping, is_log
        self.sizes = check_sizes(self.space, rows)
        index = self.sizes.nonzero().squeeze(1)
        rows, rounded = scaled(1 / self.sizes[index], rows[index]), (rounded / self.sizes)[index]
        #: The assumed error of a product, relative to the largest norm of one.
        self.relative, self.m = _PRODUCT * torch.finfo(matrix.dtype).eps, 0
        self.norm = self.noise = self._asymmetry = 0.0
        none = rows.new_empty(len(rows), 0, rows.shape[1])
        empty = torch.zeros(len(rows), 0, 0, dtype=torch.float64, device="cpu")
        self.s = Systems(index=index.cpu(), unit=self.relative * rounded.cpu())
        vars(self.s).update(g=rows, residual=rows, rest=rows, Z=none, V=none)
        vars(self.s).update(S=empty, R=empty, P=empty, b=empty.sum(2), t=empty.sum(2))

    def extend(self, preconditioner: TorchLinearOperator | None) -> None:
        """Multiply the next direction of each vector, and find the best x in their span."""
        s, m, space = self.s, self.m, self.space
        # after the product with a product, the norm of the matrix is known
        z = s.V[:, 0] if m == 1 else s.residual
        if preconditioner is not None and m != 1:
            z = preconditioner._multiply_columns(z).to(z)
        z, _, _ = orthonormalized(space, z, s.Z)
        s.S, s.R, s.P = (torch.nn.functional.pad(x, (0, 1, 0, 1)) for x in (s.S, s.R, s.P))
        s.b, s.t = (torch.nn.functional.pad(x, (0, 1)) for x in (s.b, s.t))
        s.b[:, m] = space.dots(z, s.g).cpu()
        of_earlier = space.overlaps(s.V, z).double().cpu().unsqueeze(1)
        s.S[:, m:, :m] = of_earlier @ s.R[:, :m, :m]
        s.Z = torch.cat([s.Z, z.unsqueeze(1)], 1)
        w = (self.matrix @ z.T).T.contiguous()
        s.S[:, :, m] = space.overlaps(s.Z, w).double().cpu()
        v, overlaps, size = orthonormalized(space, w, s.V)
        s.R[:, :m, m], s.R[:, m, m] = overlaps.cpu(), size.cpu()
        s.V = torch.cat([s.V, v.unsqueeze(1)], 1)
        if self._is_log:
            s.P[:, :m, m], s.P[:, m] = of_earlier[:, 0], space.overlaps(s.Z, v).double().cpu()
        t = space.dots(v, s.rest)
        s.t[:, m], s.rest = t.cpu(), add_scaled(s.rest, -t, v)
        self.m = m + 1
        self._solve()

    def _solve(self) -> None:
        """Find the best x, its residual, and how large the errors of products are."""
        s, d = self.s, self.damping
        noise = self._noise(s.R, s.S)
        s.values, s.vectors = torch.linalg.eigh((s.S + s.S.mT) / 2)
        negative = -float(s.values.min())
        # smaller ones may be rounding, and widen the interval
        if negative > _NEGATIVE * noise and self.m >= min(2, self.matrix.shape[0]):
            raise ValueError(
                f"The matrix is not positive semidefinite: it has an eigenvalue of {-negative:.1e} "
                "or less. Without that, there are no bounds. Take a Gauss-Newton matrix instead of "
                "a Hessian."
            )
        self.noise, s.values = max(noise, _FROM_SIGNS * negative), s.values.clamp(min=0.0)
        s.x = _multiply(s.vectors, _multiply(s.vectors.mT, s.b) / (s.values + d))
        s.residual = s.g - combined(s.V, _multiply(s.R, s.x)) - combined(s.Z, d * s.x)

    def solutions(self) -> Tensor:
        """Return the best x, ``[K, D]``."""
        return combined(self.s.Z, self.s.x)

    def errors(self) -> tuple[Tensor, Tensor]:
        """Return bounds of ``|y^T (A + d I)^-1 g - y^T x|`` for vectors y of norm one, ``[K]``.

        Also how much rounding adds. Products with y are as accurate as those with A.
        """
        s, root, size = self.s, self.damping**0.5, self.s.x.norm(dim=1)
        overlaps = self.space.overlaps(s.V, s.residual)
        rest = s.residual - combined(s.V, overlaps)
        form, rounding = self._bound(overlaps.double().cpu(), rest, 0.0)
        relative = max(self.noise / (self.norm or 1.0), self.relative)
        of_x = (self.noise * size + s.unit) / self.damping + relative * size
        without = (form - rounding).sqrt() / root
        bound = (1 + relative) * (form.sqrt() / root + of_x)
        return bound, bound - without

    def bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return lower and upper bounds, and how much rounding widens each interval, ``[K]``."""
        s, d, size = self.s, self.damping, self.s.x.norm(dim=1)
        lower = 2 * _dots(s.b, s.x) - _dots(s.x, _multiply(s.S, s.x)) - d * size**2
        doubt = self.noise * size**2 + s.unit * size * (1 + d * size)
        upper, rounding = self._bound(s.t, s.rest, s.unit)
        return (lower - doubt).clamp(min=0.0), upper, doubt + rounding

    def _bound(self, t: Tensor, rest: Tensor, error: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return upper bounds of the forms of vectors, and how much rounding adds, ``[K]``.

        The vectors have overlaps t with V, ``[K, m]``, parts outside of its span, and errors.
        """
        s, d, noise = self.s, self.damping, self.noise
        # any y gives a bound; this is the best, given what rounding adds
        roots = ((s.values + noise) * d).sqrt().unsqueeze(2) * s.vectors.mT
        stacked = torch.cat([s.R, roots], 1), torch.cat([t, torch.zeros_like(t)], 1).unsqueeze(2)
        y = torch.linalg.lstsq(*stacked, driver="gelsd").solution.squeeze(2)
        size, energy = y.norm(dim=1), _dots(y, _multiply(s.S, y))
        outside = torch.hypot(self.space.norms(rest).cpu(), (t - _multiply(s.R, y)).norm(dim=1))
        form = (outside + noise * size + error) ** 2 / d + energy + noise * size**2
        return form, form - outside**2 / d - energy

    def bounds_of_log(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return bounds of the forms of ``log(A + d I)``, and the widths of rounding, ``[K]``.

        The logarithm is concave, so that a form is at most that of the projected matrix (Jensen's
        inequality for operators). It is monotone, so that a form is at least that of a matrix below
        A: of Nystrom's approximation ``W S^-1 W^T`` from the products ``W = A Z^T``.
        """
        s, m, d = self.s, self.m, self.damping
        R, P, values, vectors, noise = s.R, s.P, s.values, s.vectors, self.noise
        upper = _dots(vectors[:, 0] ** 2, (values + d).log())  # the first direction is g
        # of A + shift I, whose projection stays positive; in the span of V, and of Z outside
        shift = max(noise, torch.finfo(torch.float64).tiny)
        outside = torch.linalg.eigh(torch.eye(m, dtype=P.dtype, device="cpu") - P.mT @ P)
        root = outside.eigenvectors * outside.eigenvalues.clamp(min=0.0).sqrt().unsqueeze(1)
        root = root @ outside.eigenvectors.mT
        W = torch.cat([R + shift * P, shift * root], 1) @ vectors
        U, sizes, _ = torch.linalg.svd(
            W / (values + shift).sqrt().unsqueeze(1), full_matrices=False
        )
        g = torch.cat([P[:, :, 0], root[:, :, 0]], 1)
        lower = log(d) + _dots(_multiply(U.mT, g) ** 2, (sizes.square() / d).log1p())
        unit = s.unit * (1 + max(abs(log(d)), abs(log(d + self.norm))))
        doubt = log1p(_FROM_SIGNS * noise / d) + unit
        return (lower - doubt).maximum(log(d) - unit), upper + doubt, 2 * doubt

    def _noise(self, R: Tensor, S: Tensor) -> float:
        """Return the largest error that a product with a unit vector is assumed to have."""
        self.norm = max(self.norm, float(R.norm(dim=1).max()))
        self._asymmetry = max(self._asymmetry, float((S - S.mT).abs().max()))
        if not self.matrix.operator.self_adjoint and self._asymmetry > ASYMMETRY * self.norm:
            raise ValueError(
                "Quadratic forms need a symmetric matrix, and this one is not symmetric. Take the "
                "symmetric part (A + A.T) / 2."
            )
        return max(self.relative * self.norm, _FROM_SIGNS * self._asymmetry)


def _multiply(matrices: Tensor, x: Tensor) -> Tensor:
    return (matrices @ x.unsqueeze(2)).squeeze(2)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(1)
