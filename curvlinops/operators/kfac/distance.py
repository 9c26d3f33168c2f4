"""The distance of blocks to the exact ones, from products with random vectors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops.algorithms.sampling import Estimate
from curvlinops.layers.factors import FactoredGradient, KroneckerShape
from curvlinops.layers.outer import OuterProducts
from curvlinops.operators.kfac.block_sums import BlockSum, Views
from curvlinops.operators.kfac.blocks import PRODUCTS, Block
from curvlinops.support.rng import seeded


@dataclass(frozen=True)
class ExactProducts(BlockSum):
    """Products of the exact block with some vectors.

    Attributes:
        shape: See ``BlockSum``.
        has_bias: See ``BlockSum``.
        vectors: The vectors, as matrices ``[K, G, O, I]``.
    """

    shape: KroneckerShape
    has_bias: bool
    vectors: Tensor

    def of_factors(self, gradient: FactoredGradient) -> Iterable[dict[str, Tensor]] | None:
        """Return the products with gradients ``g x^T`` of single positions."""
        if not isinstance(gradient, OuterProducts) or gradient.num_positions > 1:
            return None
        return ({PRODUCTS: self._of_outer_products(x, g)} for x, g in self.positions(gradient))

    def _of_outer_products(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the products with ``g x^T``, of x ``[P, G, I]`` and g ``[V, P, G, O]``."""
        images = torch.einsum("kgoi,ngi->nkgo", self.vectors, x)
        products = torch.einsum("vngo,nkgo->vnk", g, images)
        return torch.einsum("vnk,vngo,ngi->kgoi", products, g, x)

    def of_matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return ``sum vec(G) vec(G)^T`` times the vectors, over gradients ``[P, G, O, I]``."""
        rows, vectors = rows.flatten(1), self.vectors.flatten(1)
        return {PRODUCTS: ((vectors @ rows.T) @ rows).reshape(self.vectors.shape)}


def exact_products(
    blocks: Iterable[Block], like: Tensor, num: int, seed: int
) -> dict[Views, ExactProducts]:
    """Return the products with random signs, or all unit vectors, that estimate the distances."""
    found, generator = {}, seeded(like.device, seed)
    for block in blocks:
        if not block.terms:
            continue
        shape, has_bias = block.terms[0].shape, len(block.views) > 1
        matrix = shape.groups, shape.outputs, shape.inputs + has_bias
        size = block.layout.size
        if size <= num:
            vectors = torch.eye(size, dtype=like.dtype, device=like.device)
        else:
            signs = torch.randint(2, (num, size), generator=generator, device=like.device)
            vectors = (2 * signs - 1).to(like.dtype)
        found[block.views] = ExactProducts(shape, has_bias, vectors.reshape(-1, *matrix))
    return found


def distances(
    blocks: Iterable[Block], wanted: Mapping[Views, ExactProducts], products: Mapping[Views, Tensor]
) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """Return squared norms of ``(K - F) z`` and of ``F z``, ``[vectors]``, by parameter.

    K are the blocks, and ``F z`` the products. Also whether the vectors z are all unit vectors.
    """
    found: dict[str, tuple[Tensor, Tensor, bool]] = {}
    for block in blocks:
        if block.views not in wanted:
            continue
        Z = wanted[block.views].vectors.flatten(1)
        exact = products.get(block.views, torch.zeros_like(Z)).reshape(Z.shape)
        apart = (block.operator() @ Z.T).T - exact
        squares = [x.double().square().sum(1).cpu() for x in (apart, exact)]
        is_exact = len(Z) == Z.shape[1]
        if is_exact:
            squares = [x.sum(0, keepdim=True) for x in squares]
        if (other := found.get(block.names[0])) is not None:
            squares = [x + y for x, y in zip(squares, other, strict=False)]
            is_exact = is_exact and other[2]
        found[block.names[0]] = (*squares, is_exact)
    return found


def relative(apart: Tensor, exact: Tensor, is_exact: bool) -> Estimate:
    """Return the relative error and its standard error, see ``distances``.

    Where both matrices are zero, as without any gradient, they are equal.
    """
    num, are_equal = len(apart), not bool(apart.any())
    squared = apart.sum() if are_equal else apart.sum() / exact.sum()
    error = squared.sqrt()
    if is_exact or are_equal or not bool(error.isfinite()):
        return Estimate(error, torch.zeros_like(error))
    # the error of a ratio of means, to first order
    spread = (apart - squared * exact).square().sum() / (num * (num - 1))
    return Estimate(error, spread.sqrt() / exact.mean() / (2 * error))
