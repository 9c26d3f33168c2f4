"""The distance of blocks to the exact ones, from products with random vectors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlinops.algorithms.sampling import Estimate
from curvlinops.layers.factors import FactoredGradient, KroneckerShape
from curvlinops.layers.gradients import sum_of, total
from curvlinops.layers.outer import OuterProducts
from curvlinops.operators.kfac.block_sums import BlockSum, Views, matrices_of
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

    def tensors(self) -> dict[str, Tensor]:
        """Return the vectors."""
        return {"vectors": self.vectors}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "ExactProducts":
        """Return the same with other vectors."""
        return replace(self, **tensors)

    def of_gradients(self, gradients: Sequence[FactoredGradient]) -> dict[str, Tensor]:
        """Return the products over a batch, given the gradients of all uses of the weight."""
        whole = sum_of(list(gradients))
        is_alike = KroneckerShape.of(whole, self.shape.is_bias) == self.shape
        if is_alike and isinstance(whole, OuterProducts) and whole.num_positions == 1:
            return {PRODUCTS: total(self._of_position(*some) for some in whole.positions())}
        rows = matrices_of(gradients, self.shape, self.has_bias)
        return {PRODUCTS: total(self.of_rows(some)[PRODUCTS] for some in rows)}

    def _of_position(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the products for gradients ``g x^T``, which are not formed.

        Args:
            x: Inputs ``[n, 1, G, I]``.
            g: Output gradients ``[V, n, 1, G, O]``.
        """
        x, g = x.squeeze(1), g.squeeze(2)
        if self.has_bias:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=2)
        images = torch.einsum("kgoi,ngi->nkgo", self.vectors, x)
        products = torch.einsum("vngo,nkgo->vnk", g, images)
        return torch.einsum("vnk,vngo,ngi->kgoi", products, g, x)

    def of_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return ``sum vec(G) vec(G)^T`` times the vectors, over gradients ``[P, G, O, I]``."""
        rows, vectors = rows.flatten(1), self.vectors.flatten(1)
        return {PRODUCTS: ((vectors @ rows.T) @ rows).reshape(self.vectors.shape)}


def exact_products(
    blocks: Iterable[Block], like: Tensor, num: int, seed: int
) -> dict[Views, ExactProducts]:
    """Return the products with random signs that estimate the distance of Kronecker products.

    With at most as many entries as vectors, these are the unit vectors.

    Args:
        blocks: The blocks. Those that are no Kronecker products are left out.
        like: A tensor of the vectors' dtype and device.
        num: The number of vectors.
        seed: Seeds the signs.
    """
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
    """Return squared norms of ``(K - F) z`` and of ``F z`` for each vector z, by parameter.

    Args:
        blocks: The blocks K.
        wanted: The vectors.
        products: The products of the exact blocks F with them.

    Returns:
        The norms ``[K]`` each, and whether the vectors were all unit vectors.
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
