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

from curvlinops.layers.factors import FactoredGradient, moment, rotated
from curvlinops.operators.kfac.block_sums import BlockSum
from curvlinops.operators.kfac.blocks import FIT_INPUTS, FIT_OUTPUTS, Block, Stack, moment_factor
from curvlinops.operators.kfac.options import FitType, Options
from curvlinops.operators.kfac.sums import FactorSums, moved
from curvlinops.structured.block_diagonal import about
from curvlinops.structured.factor import Factor

#: The factors of a fit, B and A.
BOTH = (FIT_OUTPUTS, FIT_INPUTS)


@dataclass(frozen=True)
class FitSum(BlockSum):
    """The sums of one pass for a block."""

    #: The wanted factors, by ``FIT_OUTPUTS`` and ``FIT_INPUTS``: only their diagonals?
    diagonal: Mapping[str, bool]
    #: The matrices C for B, ``[G, I, I]`` or ``[G, I]``, and for A; ``None``: the identity.
    inputs: Tensor | None
    outputs: Tensor | None
    by_position: bool = False

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


def fitted(sums: FactorSums) -> list[Block]:
    """Return the stacks of blocks that are one Kronecker product, which can be fitted."""
    stacks = (stack for stack in sums.structure.stacks if len(stack.terms) == 1)
    return [stack for stack in stacks if not stack.terms[0].shape.is_bias]


def known_matrices(
    sums: FactorSums, kinds: Sequence[str], known: FactorSums
) -> dict[Stack, Tensor]:
    """Return the matrices C that are made of known means for the wanted factors."""
    means, made = moved(known.tensors, sums.structure), dict[Stack, Tensor]()
    for stack in fitted(sums) if sums.options.fit in _MATRICES else ():
        for kind, other in zip(BOTH, reversed(BOTH), strict=True):
            key = stack.key(other)
            if kind in kinds and key in means:
                with about(stack.names):
                    made[key] = _MATRICES[sums.options.fit](moment_factor(means[key]))
    return made


def sums_of_pass(
    sums: FactorSums, kinds: Sequence[str], others: Mapping[Stack, Tensor]
) -> dict[Block, FitSum]:
    """Return the sums of a pass for the wanted factors, given the matrices C if any."""
    options, limit, found = sums.options, sums.options.max_factor_size, {}
    for stack in fitted(sums):
        pairs = zip(BOTH, stack.terms[0].shape.diagonal(limit), strict=True)
        diagonal = {kind: is_diagonal for kind, is_diagonal in pairs if kind in kinds}
        by_position = stack.names[0] not in options.reduced
        C = (others.get(stack.key(other)) for other in reversed(BOTH))
        found[stack] = FitSum.of_block(stack, diagonal, *C, by_position)
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


#: What C is made of the other factor, if not the identity.
_MATRICES: dict[FitType, Callable[[Factor], Tensor]] = {
    FitType.FROBENIUS: _frobenius,
    FitType.KL: _kullback_leibler,
}


def passes(options: Options, has_known: bool) -> list[Sequence[str]]:
    """Return the factors of each pass over the data; one, if those of earlier data are known."""
    if options.fit is FitType.KFAC:
        return []
    if options.fit is FitType.SHAMPOO or has_known:
        return [BOTH]
    return [(kind,) for _ in range(options.steps) for kind in BOTH]
