"""Inverses of Kronecker-factored approximations, with damping."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Protocol

from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import (
    BlockFactors,
    Blocks,
    Build,
    Product,
    factors_of,
    operator_of,
    summed,
)
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.factor import Factor, decompose, invert
from curvlinops.structured.kronecker import KroneckerProductLinearOperator, name_of_factor
from curvlinops.support.arguments import check_number, without_graph
from curvlinops.support.records import recorded
from curvlinops.support.torch_modes import in_default_modes


@dataclass(frozen=True)
class Damping:
    """What is added to which diagonal, checked; see ``KFACInverseLinearOperator``.

    Attributes:
        of_inputs: What is added to A.
        of_gradients: What is added to B, and to blocks without factors.
        heuristic: Whether A and B share one number according to their eigenvalues.
        minimum: The smallest share.
        exact: Whether the number is added to ``B (x) A``.
        retry_double_precision: Whether factors that need it are factorized in float64.
    """

    of_inputs: float
    of_gradients: float
    heuristic: bool
    minimum: float
    exact: bool
    retry_double_precision: bool

    def of(self, product: Product, weight: Product | None) -> list[float | Tensor]:
        """Return the damping of a product's factors, B first.

        Args:
            product: The product.
            weight: For a bias: the product of the weight to whose products it is added.
        """
        both: tuple[float | Tensor, float | Tensor] = self.of_gradients, self.of_inputs
        pair = weight if product.inputs is None else product
        if self.heuristic and pair is not None:
            both = self._balanced(pair)
        return list(both[: len(factors_of(product))])

    def _balanced(self, product: Product) -> tuple[Tensor, Tensor]:
        """Divide the damping between B and A, ``[G, 1]`` each, by their average eigenvalues."""
        factors = product.gradients, product.inputs
        B, A = (factor.diagonal().double().mean(-1, keepdim=True) for factor in factors)
        ratio = (A / B).sqrt().where((A > 0) & (B > 0), 1.0)
        root = sqrt(self.of_inputs)
        return (root / ratio).clamp(min=self.minimum), (root * ratio).clamp(min=self.minimum)


def check_damping(
    damping: float | tuple[float, float],
    heuristic: bool,
    minimum: float,
    exact: bool,
    retry_double_precision: bool,
) -> Damping:
    """Check the options of an inverse.

    Raises:
        ValueError: If they do not go together.
    """
    is_pair = isinstance(damping, tuple | list)
    values = tuple(damping) if is_pair else (damping,) * 2
    without_graph([*values, minimum], "The damping")
    numbers = [_non_negative(value) for value in values]
    if len(values) != 2 or None in numbers:
        raise ValueError(
            f"damping must be a non-negative number, or a pair of these, got {damping!r}."
        )
    least = _non_negative(minimum)
    if least is None:
        raise ValueError(f"min_damping must be a non-negative number, got {minimum!r}.")
    if heuristic and exact:
        raise ValueError("Damping is either heuristic or exact, not both.")
    if is_pair and (heuristic or exact):
        raise ValueError("Heuristic and exact damping need one number, not a pair.")
    return Damping(*numbers, heuristic, least, exact, retry_double_precision)


def inverse_builder(
    blocks: Sequence[BlockFactors], damping: Damping, space: ParameterSpace
) -> Build:
    """Return what makes the inverse of each of some blocks, on its entries.

    Factors are inverted now, small ones all together. A bias and its weight add the same to a
    gradient factor that they have in common.

    Args:
        blocks: All blocks.
        damping: What is added to their factors.
        space: All parameters.
    """
    retry = damping.retry_double_precision
    single = {each.block.slice: each for each in blocks if len(each.products) == 1}
    names: dict[Factor, str] = {}
    dampings: list[float | Tensor] = []
    for each in single.values():
        weight = single.get(each.block.weight)
        product = each.products[0]
        both = damping.of(product, None if weight is None else weight.products[0])
        for i, factor in enumerate(factors_of(product)):
            if factor not in names:
                names[factor] = f"Block {', '.join(each.block.names)!r}: {name_of_factor(i)}"
                dampings.append(both[i])
    inverses = dict(
        zip(names, _invert(list(names), dampings, list(names.values()), retry), strict=True)
    )

    def build(one: BlockFactors) -> StructuredLinearOperator:
        if not one.products:
            return operator_of(one, space).inverse(damping.of_gradients, retry)
        if len(one.products) == 1:
            return KroneckerProductLinearOperator(
                *(inverses[factor] for factor in factors_of(one.products[0]))
            )
        terms = [_damped(product, damping) for product in one.products]
        return summed(terms).inverse(retry_double_precision=retry)

    return build


def _damped(product: Product, damping: Damping) -> Product:
    """Add damping to the factors of one of several products."""
    factors = factors_of(product)
    names = [name_of_factor(i) for i in range(len(factors))]
    decompose(factors, names, [damping.retry_double_precision] * len(factors))
    both = zip(factors, damping.of(product, None), strict=True)
    return Product(product.kind, *(factor.shifted(number) for factor, number in both))


def _invert(
    factors: Sequence[Factor], dampings: Sequence[float | Tensor], names: Sequence[str], retry: bool
) -> list[Factor]:
    """Return the inverses of damped factors, equal sizes together.

    Args:
        factors: The factors.
        dampings: One number each, or one for each group, ``[G, 1]``. The groups of a bias's weight
            are equal parts of the bias, which has a single factor B. With the diagonal matrix D of
            their dampings, ``(B + D)^-1`` is ``D^-1/2 (D^-1/2 B D^-1/2 + I)^-1 D^-1/2``.
        names: What the factors are called in messages.
        retry: Whether float64 is used where float32 does not suffice.
    """
    factors, shifts = list(factors), list(dampings)
    scales: dict[int, Tensor] = {}
    for i, (factor, damping) in enumerate(zip(factors, dampings, strict=True)):
        if isinstance(damping, Tensor) and len(damping) > factor.groups:
            entries = damping.expand(-1, factor.rows // len(damping)).reshape(1, -1)
            if bool(entries.all()):
                scales[i], shifts[i] = entries.rsqrt(), 1.0
                factors[i] = _rescaled(factor, scales[i])
            else:  # the damping is zero
                shifts[i] = 0.0
    inverses = invert(factors, shifts, names, retry)
    return [_rescaled(f, scales[i]) if i in scales else f for i, f in enumerate(inverses)]


def _rescaled(factor: Factor, scales: Tensor) -> Factor:
    """Return ``diag(scales) F diag(scales)`` for scales ``[1, n]``."""
    scales = scales.to(factor.tensor)
    if factor.is_diagonal:
        return Factor(factor.tensor * scales**2, psd=True)
    matrix = factor.tensor * scales.unsqueeze(-1) * scales.unsqueeze(-2)
    return Factor(matrix, symmetric=True, psd=True)


def _non_negative(value: Any) -> float | None:
    """Return a finite number that is not negative, ``None`` if it is none."""
    try:
        number = check_number("damping", value, at_least=0.0)
    except ValueError:
        return None
    return number if isfinite(number) else None


class Invertible(Protocol):
    """A Kronecker-factored approximation."""

    @property
    def space(self) -> ParameterSpace:
        """The space of the vectors."""

    def _inverse_blocks(self, damping: Damping) -> Blocks:
        """Return the damped inverses of all blocks."""


class KFACInverseLinearOperator(BlockDiagonalLinearOperator):
    """The damped inverse of a ``KFACLinearOperator`` or an ``EKFACLinearOperator``.

    A block ``B (x) A`` becomes ``(B + b I)^-1 (x) (A + a I)^-1``, with a = b by default, whose
    eigenvalues are at most ``1 / (a b)``. That is not the inverse of ``B (x) A + a I``, with
    eigenvalues of at most ``1 / a``, which is what ``use_exact_damping`` computes, by
    eigendecompositions, which ``A`` keeps for other dampings. Of a sum of Kronecker products (an
    embedding's and a head's), the factors of each are damped, and the sum is inverted. Blocks
    without factors, and all of EKFAC's, have exact damping in any case, with b given a pair. The
    inverse does not follow later changes of ``A``.

    Args:
        A: The operator to invert.
        damping: a = b, or the pair ``(a, b)``.
        use_heuristic_damping: Whether a and b are ``pi sqrt(damping)`` and ``sqrt(damping) / pi``,
            with ``pi^2`` the ratio of average eigenvalues of A and B (Martens and Grosse,
            Optimizing neural networks with Kronecker-factored approximate curvature, ICML 2015,
            section 6.3), for each group of a convolution. Biases with a block of their own have
            the damping of their weight's gradient factor, each entry that of its group; those
            without such a weight get the number itself.
        min_damping: The smallest value of these two.
        use_exact_damping: See above.
        retry_double_precision: Whether factors that cannot be factorized in float32 are factorized
            in float64.
        cache: Refused: an inverse always keeps what it computes.

    Raises:
        TypeError: If ``cache`` is given.
        ValueError: If options do not go together; if a factor is singular to working precision or
            not finite, naming its block; if a sum is too large for exact damping.
    """

    @in_default_modes
    def __init__(
        self,
        A: Invertible,
        damping: float | tuple[float, float] = 0.0,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        use_exact_damping: bool = False,
        retry_double_precision: bool = True,
        *,
        cache: bool | None = None,
    ):
        if cache is not None:
            raise TypeError(
                "KFACInverseLinearOperator has no option cache: it always keeps what it computes. "
                "Leave the argument out."
            )
        if not hasattr(A, "_inverse_blocks"):
            raise ValueError(
                f"Only KFAC and EKFAC operators have such inverses, not {type(A).__name__}. "
                "Structured operators have a method inverse()."
            )
        self._damping = check_damping(
            damping, use_heuristic_damping, min_damping, use_exact_damping, retry_double_precision
        )
        super().__init__(A._inverse_blocks(self._damping), A.space)

    def _arguments(self) -> dict[str, Any]:
        used = self._damping
        inputs, gradients = used.of_inputs, used.of_gradients
        return {
            "damping": inputs if inputs == gradients else (inputs, gradients),
            "use_heuristic_damping": used.heuristic,
            "min_damping": used.minimum,
            "use_exact_damping": used.exact,
            "retry_double_precision": used.retry_double_precision,
        }


recorded(KFACInverseLinearOperator, "BlockDiagonalLinearOperator")
