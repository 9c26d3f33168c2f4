"""Kronecker products that fit a block in other ways than KFAC, by passes over the data.

A block is ``F = c * sum vec(G) vec(G)^T``, with G the gradients of a weight, ``[O, I]``, of single
positions (the expand setting) or of samples (the reduce setting). Each fit ``B (x) A`` is found by
passes that add up ``c * sum G C G^T`` for B, or ``c * sum G^T C G`` for A, with C made of the other
factor. The first C is the identity. Factors that KFAC has as diagonals stay diagonal.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, KroneckerShape, moment, rotated
from curvlinops.operators.kfac.block_sums import BlockSum, matrices_of
from curvlinops.operators.kfac.blocks import FIT_INPUTS, FIT_OUTPUTS, Block, moment_factor
from curvlinops.operators.kfac.layout import with_matrices
from curvlinops.operators.kfac.options import FitType, Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.block_diagonal import about
from curvlinops.structured.factor import Factor
from curvlinops.structured.layout import ParameterView

#: The factors of a fit, B and A.
BOTH = (FIT_OUTPUTS, FIT_INPUTS)


@dataclass(frozen=True)
class Weighted:
    """The matrix C of one pass, for one factor of a block, see above.

    Attributes:
        matrix: C, ``[G, n, n]``, or its diagonal ``[G, n]``; ``None`` for the identity.
        diagonal: Whether only the diagonal of the factor is wanted.
    """

    matrix: Tensor | None
    diagonal: bool

    def of_positions(self, weighting: Tensor, rows: Tensor) -> Tensor:
        """Return ``sum (w^T C w) r r^T``, over rows ``w`` and ``r``, both ``[P, G, *]``."""
        # C is positive semidefinite up to rounding
        weights = (self._times(weighting) * weighting).sum(-1, keepdim=True).clamp(min=0)
        return moment(rows * weights.sqrt(), self.diagonal)

    def of_matrices(self, rows: Tensor) -> Tensor:
        """Return ``sum R C R^T``, over matrices ``[P, n, G, m]``, with C along the last axis."""
        times = self._times(rows)
        if self.diagonal:
            return (times * rows).sum((0, 3)).T
        return torch.einsum("pngm,pkgm->gnk", times, rows)

    def _times(self, x: Tensor) -> Tensor:
        is_diagonal = self.matrix is not None and self.matrix.ndim == 2
        return x * self.matrix if is_diagonal else rotated(x, self.matrix)


@dataclass(frozen=True)
class FitSum(BlockSum):
    """The sums of one pass for a block.

    Attributes:
        shape: See ``BlockSum``.
        has_bias: See ``BlockSum``.
        by_position: Whether G are gradients of positions, not of samples.
        factors: The wanted factors, by ``FIT_OUTPUTS`` and ``FIT_INPUTS``.
    """

    shape: KroneckerShape
    has_bias: bool
    by_position: bool
    factors: Mapping[str, Weighted]

    @property
    def needs_samples(self) -> bool:
        """Whether it must be known to which samples rows belong."""
        return not self.by_position

    def tensors(self) -> dict[str, Tensor]:
        """Return the matrices C."""
        return {k: x.matrix for k, x in self.factors.items() if x.matrix is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "FitSum":
        """Return the same with other matrices C."""
        factors = {k: replace(x, matrix=tensors.get(k)) for k, x in self.factors.items()}
        return replace(self, factors=factors)

    def of_gradients(self, gradients: Sequence[FactoredGradient]) -> dict[str, Tensor]:
        """Return the sums over a batch, given the gradients of all uses of the weight."""
        if self.by_position:
            parts = (part for x in gradients for part in self._of_positions(x))
        else:
            rows = matrices_of(gradients, self.shape, self.has_bias)
            parts = map(self.of_rows, rows)
        return _added(parts)

    def _of_positions(self, gradient: FactoredGradient) -> Iterator[dict[str, Tensor]]:
        for x, outputs in gradient.positions():
            x = x.flatten(0, 1)
            if self.has_bias:
                x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=2)
            for vector in outputs:
                g = vector.flatten(0, 1)
                pairs = {FIT_OUTPUTS: (x, g), FIT_INPUTS: (g, x)}
                yield {k: weighted.of_positions(*pairs[k]) for k, weighted in self.factors.items()}

    def of_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the sums over gradients of samples, ``[P, G, O, I]``."""
        orders = {FIT_OUTPUTS: "p g o i -> p o g i", FIT_INPUTS: "p g o i -> p i g o"}
        return {
            kind: weighted.of_matrices(rearrange(rows, orders[kind]))
            for kind, weighted in self.factors.items()
        }


def _added(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for part in parts:
        for kind, x in part.items():
            sums[kind] = sums[kind].add_(x) if kind in sums else x
    return sums


def fits(block: Block) -> bool:
    """Return whether a block is one Kronecker product that can be fitted."""
    return len(block.terms) == 1 and not block.terms[0].shape.is_bias


def sums_of_pass(
    sums: FactorSums, kinds: Sequence[str], known: FactorSums | None = None
) -> dict[tuple[ParameterView, ...], FitSum]:
    """Return the sums of a pass for the blocks of this process, by their views.

    Args:
        sums: The means so far.
        kinds: The wanted factors.
        known: Means of earlier data, whose factors are used where they have any. Default: none.
    """
    options, found = sums.options, {}
    for block in with_matrices(sums, filter(fits, sums.blocks)):
        if not block.is_here:
            continue
        (term,) = block.terms
        is_diagonal = {k: x.is_diagonal for k, x in zip(BOTH, term.factors, strict=True)}
        wanted = {}
        for kind, other in zip(BOTH, reversed(BOTH), strict=True):
            tensor = (sums if known is None else known).tensors.get((block.views, other))
            if kind in kinds:
                with about(block.names):
                    C = None if tensor is None else _MATRICES[options.fit](moment_factor(tensor))
                wanted[kind] = Weighted(C, is_diagonal[kind])
        by_position = block.names[0] not in options.reduced
        found[block.views] = FitSum(term.shape, len(block.views) > 1, by_position, wanted)
    return found


def _frobenius(other: Factor) -> Tensor:
    """Return ``A / |A|^2``: then B is the closest one in the Frobenius norm."""
    matrix = other.tensor
    squares = matrix.square().flatten(1).sum(1)
    squares = squares.masked_fill(squares == 0, 1.0)
    return matrix / squares.reshape(-1, *(1,) * (matrix.ndim - 1))


def _kullback_leibler(other: Factor) -> Tensor:
    """Return ``A^+ / rank(A)``: then B is the most likely one, on the range of A."""
    if other.is_diagonal:
        values = other.tensor
    else:
        values, factor = other.eigh()
    is_positive = values > 0
    inverse = torch.where(is_positive, 1 / values.masked_fill(~is_positive, 1.0), 0.0)
    inverse = inverse / is_positive.sum(1, keepdim=True).clamp(min=1)
    if other.is_diagonal:
        return inverse
    vectors = factor.tensor
    return (vectors * inverse.unsqueeze(1).to(vectors)) @ vectors.mT


#: What C is made of the other factor.
_MATRICES: dict[FitType, Callable[[Factor], Tensor | None]] = {
    FitType.SHAMPOO: lambda other: None,
    FitType.FROBENIUS: _frobenius,
    FitType.KL: _kullback_leibler,
}


def passes(options: Options, has_known: bool = False) -> list[Sequence[str]]:
    """Return the factors that are computed in each pass over the data.

    Args:
        options: The options of the approximation.
        has_known: Whether the factors of earlier data are known.
    """
    if options.fit is FitType.KFAC:
        return []
    if options.fit is FitType.SHAMPOO or has_known:
        return [BOTH]
    return [(kind,) for _ in range(options.steps) for kind in BOTH]
