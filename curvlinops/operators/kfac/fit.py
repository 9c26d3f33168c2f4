"""Kronecker products that fit a block in other ways than KFAC, by passes over the data.

A block is ``F = c * sum vec(G) vec(G)^T``, with G the gradients of a weight, ``[O, I]``, of single
positions (the expand setting) or of samples (the reduce setting). Each fit ``B (x) A`` is found by
passes that add up ``c * sum G C G^T`` for B, or ``c * sum G^T C G`` for A, with C made of the other
factor. The first C is the identity. Factors that KFAC has as diagonals stay diagonal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, KroneckerShape, moment, rotated
from curvlinops.operators.kfac.block_sums import BlockSum
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
class FitSum(BlockSum):
    """The sums of one pass for a block.

    Attributes:
        shape: See ``BlockSum``.
        has_bias: See ``BlockSum``.
        diagonal: The wanted factors, by ``FIT_OUTPUTS`` and ``FIT_INPUTS``, and whether only their
            diagonals are.
        by_position: See ``BlockSum``.
        inputs: The matrix C for B, see above: ``[G, I, I]``, or its diagonal ``[G, I]``; ``None``
            for the identity.
        outputs: That for A, ``[G, O, O]`` or ``[G, O]``.
    """

    shape: KroneckerShape
    has_bias: bool
    diagonal: Mapping[str, bool]
    by_position: bool = False
    inputs: Tensor | None = None
    outputs: Tensor | None = None

    def of_factors(self, gradient: FactoredGradient) -> Iterator[dict[str, Tensor]] | None:
        """Return the sums over gradients ``g x^T`` of positions."""
        return self._of_outer_products(gradient) if self.by_position else None

    def _of_outer_products(self, gradient: FactoredGradient) -> Iterator[dict[str, Tensor]]:
        for x, outputs in self.positions(gradient):
            for g in outputs:
                pairs = {FIT_OUTPUTS: (g, x, self.inputs), FIT_INPUTS: (x, g, self.outputs)}
                yield {kind: _of_rows(*pairs[kind], d) for kind, d in self.diagonal.items()}

    def of_matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the sums over gradients of samples, ``[P, G, O, I]``."""
        orders = {
            FIT_OUTPUTS: ("p g o i -> p o g i", self.inputs),
            FIT_INPUTS: ("p g o i -> p i g o", self.outputs),
        }
        sums = {}
        for kind, is_diagonal in self.diagonal.items():
            order, C = orders[kind]
            R = rearrange(rows, order)
            products = _times(R, C)
            if is_diagonal:
                sums[kind] = (products * R).sum((0, 3)).T
            else:
                sums[kind] = torch.einsum("pngm,pkgm->gnk", products, R)
        return sums


def _of_rows(rows: Tensor, weighting: Tensor, C: Tensor | None, diagonal: bool) -> Tensor:
    """Return ``sum (w^T C w) r r^T``, or its diagonal, over rows r and w, both ``[P, G, *]``."""
    # C is positive semidefinite up to rounding
    weights = (_times(weighting, C) * weighting).sum(-1, keepdim=True).clamp(min=0)
    return moment(rows * weights.sqrt(), diagonal)


def _times(x: Tensor, C: Tensor | None) -> Tensor:
    """Return ``x C`` for ``[*, G, n]``, with C as in ``FitSum``."""
    return x * C if C is not None and C.ndim == 2 else rotated(x, C)


def fits(block: Block) -> bool:
    """Return whether a block is one Kronecker product that can be fitted."""
    return len(block.terms) == 1 and not block.terms[0].shape.is_bias


def sums_of_pass(
    sums: FactorSums, kinds: Sequence[str], known: FactorSums | None = None
) -> dict[tuple[ParameterView, ...], FitSum]:
    """Return the sums of a pass for the wanted factors, with the factors of known means if any."""
    options, found = sums.options, {}
    for block in with_matrices(sums, filter(fits, sums.blocks)):
        if not block.is_here:
            continue
        (term,) = block.terms
        factors = dict(zip(BOTH, term.factors, strict=True))
        by_position = block.names[0] not in options.reduced
        matrices = []
        for kind, other in zip(BOTH, reversed(BOTH), strict=True):
            tensor = (sums if known is None else known).tensors.get((block.views, other))
            with about(block.names):
                is_used = tensor is not None and kind in kinds
                matrices.append(_MATRICES[options.fit](moment_factor(tensor)) if is_used else None)
        diagonal = {kind: factors[kind].is_diagonal for kind in kinds}
        has_bias = len(block.views) > 1
        found[block.views] = FitSum(term.shape, has_bias, diagonal, by_position, *matrices)
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
    """Return the factors of each pass over the data; one, if those of earlier data are known."""
    if options.fit is FitType.KFAC:
        return []
    if options.fit is FitType.SHAMPOO or has_known:
        return [BOTH]
    return [(kind,) for _ in range(options.steps) for kind in BOTH]
