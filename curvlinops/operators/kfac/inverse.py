"""Inverses of Kronecker-factored approximations, with damping."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from curvlinops.operators.kfac.blocks import Block, Term
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.factor import Factor, name_of_factor, small_inverses
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.structured.layout import ParameterView
from curvlinops.support.arguments import check_number
from curvlinops.support.files import recorded
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.support.warnings import warn


@dataclass
class Damping:
    """The numbers that are added to diagonals, checked; see ``KFACInverseLinearOperator``.

    ``of_inputs`` is added to A, ``of_gradients`` to B and to blocks without factors.
    """

    damping: float | tuple[float, float] = 0.0
    use_heuristic_damping: bool = False
    min_damping: float = 1e-8
    use_exact_damping: bool = False
    retry_double_precision: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        is_pair = isinstance(self.damping, tuple | list)
        values = tuple(self.damping) if is_pair else (self.damping,) * 2
        if len(values) != 2:
            raise ValueError(
                f"damping must be a finite number >= 0, or a pair of these, got {self.damping!r}."
            )
        numbers = tuple(check_number("damping", value, at_least=0.0) for value in values)
        self.min_damping = check_number("min_damping", self.min_damping, at_least=0.0)
        if self.use_heuristic_damping and self.use_exact_damping:
            raise ValueError("Damping is either heuristic or exact, not both.")
        if is_pair and (self.use_heuristic_damping or self.use_exact_damping):
            raise ValueError("Heuristic and exact damping need one number, not a pair.")
        self.of_inputs, self.of_gradients = numbers
        self.damping = numbers if is_pair else numbers[0]

    def of(self, term: Term, weight: Term | None) -> list[float | Tensor]:
        """Return the damping of a product's factors, B first; a bias's is that of its weight."""
        dampings: tuple[float | Tensor, float | Tensor] = self.of_gradients, self.of_inputs
        pair = weight if term.inputs is None else term
        if self.use_heuristic_damping and pair is not None:
            dampings = self._balanced(pair)
        return list(dampings[: len(term.factors)])

    def _balanced(self, term: Term) -> tuple[Tensor, Tensor]:
        """Divide the damping between B and A, ``[G, 1]`` each, by their average eigenvalues."""
        B, A = (f.diagonal().double().mean(-1, keepdim=True) for f in term.factors)
        ratio = (A / B).sqrt().where((A > 0) & (B > 0), 1.0)
        root = sqrt(self.of_inputs)
        least = self.min_damping
        return (root / ratio).clamp(min=least), (root * ratio).clamp(min=least)


def inverses(
    blocks: Sequence[Block], damping: Damping, undecided: dict[str, float]
) -> Callable[[Block], StructuredLinearOperator]:
    """Return a function from one of these blocks, or of their members, to its damped inverse.

    A bias shares the gradient factor of its weight, and its damping. Layers with the same inputs
    share the factor of these, and its inverse if that has the same damping.
    """
    weights: dict[tuple[ParameterView, int], Term] = {}
    if damping.use_heuristic_damping:
        for block in chain(blocks, *(block.parts for block in blocks if block.members)):
            if len(block.terms) == 1:
                weights[block.views[0], len(block.members)] = block.terms[0]
    shifted: dict[tuple[Factor, Term | None], tuple[Factor, float | Tensor]] = {}

    def keys_of(block: Block) -> list[tuple[Factor, Term | None]]:
        """Return keys of a product's factors, for which ``shifted`` then has what is inverted."""
        (term,) = block.terms
        weight = weights.get((block.weight, len(block.members)))
        balanced = (weight or term) if damping.use_heuristic_damping else None
        keys = [(factor, balanced) for factor in term.factors]
        if not shifted.keys() >= set(keys):
            pairs = map(_in_groups, term.factors, damping.of(term, weight))
            shifted.update(zip(keys, pairs, strict=True))
        return keys

    accurate = damping.retry_double_precision
    for block in blocks:
        if block.is_here and len(block.terms) == 1:
            keys_of(block)
    known = small_inverses(shifted, accurate)

    def inverse(block: Block) -> StructuredLinearOperator:
        if not block.terms:
            operator = block.operator()
            result = operator.inverse(damping.of_gradients, accurate)
            note_undecided(undecided, block, operator._as_factors(), [damping.of_gradients])
            return result
        if len(block.terms) > 1:
            damped = replace(block, terms=tuple(_damped(term, damping) for term in block.terms))
            result = damped.operator().inverse(retry_double_precision=accurate)
            for term in block.terms:
                note_undecided(undecided, block, term.factors, damping.of(term, None))
            return result
        keys = keys_of(block)
        if not known.keys() >= set(keys):
            factors, shifts = zip(*(shifted[key] for key in keys), strict=True)
            for i, key in enumerate(keys):
                if key not in known:
                    known[key] = factors[i].inverse(shifts[i], name_of_factor(i), accurate)
            note_undecided(undecided, block, factors, shifts)
        return KroneckerProductLinearOperator(*(known[key] for key in keys))

    return inverse


def note_undecided(
    undecided: dict[str, float],
    block: Block,
    factors: Sequence[Factor] | None,
    shifts: Sequence[float | Tensor],
    is_exact: bool = False,
) -> None:
    """Note from which damping on an inverted block, or the blocks of a stack, would be decided.

    Shifts were added to each of the factors; to their product if ``is_exact``.
    """
    for factor, shift in zip(factors or (), shifts, strict=False):
        others = [other for other in factors if is_exact and other is not factor]
        limits = factor.undecided(shift, others)
        if limits is None or not bool(limits.any()):
            continue
        members = block.singles
        for member, limit in zip(members, limits.tensor_split(len(members)), strict=True):
            name, least = ", ".join(member.names), float(limit.max())
            if least > undecided.get(name, 0.0):
                undecided[name] = least


def warn_of_undecided(undecided: Mapping[str, float], dtype: torch.dtype) -> None:
    """Warn once if there are blocks whose damping is below the rounding errors of their factors."""
    if not undecided:
        return
    name, limit = max(undecided.items(), key=lambda item: item[1])
    others = f" (one of {len(undecided)})" if len(undecided) > 1 else ""
    remedy = "" if dtype == torch.float64 else ", or compute in float64"
    warn(
        f"Block {name!r}{others}: the damping lies below the rounding errors of a factor. Small "
        "eigenvalues are lost in these, and count as zero, or they are hardly known. From "
        f"{limit:.1e} on, the factor decides the inverse. Add more damping{remedy}."
    )


def _in_groups(factor: Factor, shift: float | Tensor) -> tuple[Factor, float | Tensor]:
    """Return a factor, and a shift that has no more groups."""
    if not isinstance(shift, Tensor) or len(shift) <= factor.groups:
        return factor, shift
    # the bias of a convolution with groups has one factor for all of them
    shifts = shift.expand(-1, factor.groups * factor.rows // len(shift)).to(factor.tensor)
    shifts = shifts.reshape(factor.groups, factor.rows)
    tensor = factor.tensor + (shifts if factor.is_diagonal else torch.diag_embed(shifts))
    ranks = tensor.new_zeros(factor.groups)  # nothing tells which eigenvalues are the shifts alone
    return Factor(tensor, symmetric=True, psd=True, ranks=ranks), 0.0


def _damped(term: Term, damping: Damping) -> Term:
    """Add damping to the factors of one of several Kronecker products."""
    pairs = zip(term.factors, damping.of(term, None), strict=True)
    in_float64 = damping.retry_double_precision
    factors = (
        factor.shifted(shift, name_of_factor(i), in_float64)
        for i, (factor, shift) in enumerate(pairs)
    )
    return term._replace(**dict(zip(("gradients", "inputs"), factors, strict=False)))


class KFACInverseLinearOperator(BlockDiagonalLinearOperator):
    """The damped inverse of a ``KFACLinearOperator`` or an ``EKFACLinearOperator``.

    A block ``B (x) A`` becomes ``(B + b I)^-1 (x) (A + a I)^-1``, with a = b by default. Its
    eigenvalues are at most ``1 / (a b)``. With ``use_exact_damping`` it becomes
    ``(B (x) A + a I)^-1``, with eigenvalues of at most ``1 / a``.

    - In a sum of Kronecker products (an embedding tied to the head), the factors of each product
      are damped, and the sum is inverted.
    - Blocks without factors, and all blocks of EKFAC, have exact damping (b, if a pair is given).

    The inverse does not follow later changes of ``A``.

    Args:
        A: The operator to invert.
        damping: a = b, or the pair ``(a, b)``.
        use_heuristic_damping: Whether a = ``pi sqrt(damping)`` and b = ``sqrt(damping) / pi``, for
            each group of a convolution. ``pi^2`` is the ratio of the average eigenvalues of A and B
            (Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
            curvature, ICML 2015, section 6.3). A bias with a block of its own has the b of its
            weight; without such a weight it has ``damping``.
        min_damping: The smallest value of a and b with ``use_heuristic_damping``.
        use_exact_damping: See above. ``A`` keeps the eigendecompositions for other dampings.
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
        A: Any,
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
        if not hasattr(A, "_damped_inverse"):
            raise ValueError(
                f"Only KFAC and EKFAC operators have such inverses, not {type(A).__name__}. "
                "Structured operators have a method inverse()."
            )
        self._damping = Damping(
            damping, use_heuristic_damping, min_damping, use_exact_damping, retry_double_precision
        )
        super().__init__(*A._damped_inverse(self._damping))

    def _arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self._damping, field.name) for field in fields(Damping)}


recorded(KFACInverseLinearOperator, "BlockDiagonalLinearOperator")
