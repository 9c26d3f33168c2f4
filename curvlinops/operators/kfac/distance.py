"""The distance of blocks to the exact ones, from products with random vectors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops.algorithms.sampling import Estimate
from curvlinops.layers.factors import FactoredGradient
from curvlinops.layers.outer import OuterProducts
from curvlinops.operators.kfac.block_sums import BlockSum
from curvlinops.operators.kfac.blocks import PRODUCTS, Block, Stack
from curvlinops.operators.kfac.structure import Structure
from curvlinops.support.rng import seeded


@dataclass(frozen=True)
class ExactProducts(BlockSum):
    """Products of the exact block with some vectors, matrices ``[L, K, G, O, I]`` for L blocks."""

    vectors: Tensor

    def of_factors(self, gradient: FactoredGradient) -> Iterable[dict[str, Tensor]] | None:
        """Return the products with gradients ``g x^T`` of single positions."""
        if not isinstance(gradient, OuterProducts) or gradient.num_positions > 1:
            return None
        return ({PRODUCTS: self._of_outer_products(x, g)} for x, g in self.positions(gradient))

    def _of_outer_products(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the products with ``g x^T``, of x ``[P, L G, I]`` and g ``[V, P, L G, O]``."""
        x, g = x.unflatten(1, (len(self.vectors), -1)), g.unflatten(2, (len(self.vectors), -1))
        images = torch.einsum("lkgoi,nlgi->nlkgo", self.vectors, x)
        products = torch.einsum("vnlgo,nlkgo->vnlk", g, images)
        return torch.einsum("vnlk,vnlgo,nlgi->lkgoi", products, g, x)

    def of_matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return ``sum vec(G) vec(G)^T`` times the vectors, over gradients ``[P, L G, O, I]``."""
        rows = rows.unflatten(1, (len(self.vectors), -1)).flatten(2).transpose(0, 1)
        products = (self.vectors.flatten(2) @ rows.mT) @ rows
        return {PRODUCTS: products.reshape(self.vectors.shape)}


def exact_products(
    structure: Structure, like: Tensor, num: int, seed: int
) -> dict[Block, ExactProducts]:
    """Return the products with random signs, or all unit vectors, that estimate the distances."""
    vectors, generator = dict[tuple, Tensor](), seeded(like.device, seed)
    for block in structure.blocks:
        if not block.terms:
            continue
        shape, size = block.terms[0].shape, block.layout.size
        if size <= num:
            some = torch.eye(size, dtype=like.dtype, device=like.device)
        else:
            signs = torch.randint(2, (num, size), generator=generator, device=like.device)
            some = (2 * signs - 1).to(like.dtype)
        inputs = shape.inputs + len(block.views) - 1
        vectors[block.views] = some.reshape(-1, shape.groups, shape.outputs, inputs)
    found = {}
    for stack in structure.stacks:
        if stack.terms:
            of_stack = torch.stack([vectors.pop(block.views) for block in stack.singles])
            found[stack] = ExactProducts.of_block(stack, of_stack)
    return found


def distances(
    stacks: Iterable[Block], wanted: Iterable[ExactProducts], products: Mapping[Stack, Tensor]
) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """Return squared norms of ``(K - F) z`` and of ``F z``, ``[vectors]``, by parameter.

    K are the stacks of blocks, ``F z`` the products. Also whether the z are all unit vectors.
    """
    found: dict[str, tuple[Tensor, Tensor, bool]] = {}
    for stack, of_stack in zip(stacks, wanted, strict=True):
        if not stack.is_here:
            continue
        Z = of_stack.vectors.flatten(2)
        exact = products.get(stack.key(PRODUCTS), torch.zeros_like(Z)).reshape(Z.shape)
        columns = stack.operator() @ Z.transpose(0, 1).flatten(1).T
        apart = columns.T.unflatten(1, (len(Z), -1)).transpose(0, 1) - exact
        of_blocks = zip(*(x.double().square().sum(2).cpu() for x in (apart, exact)), strict=True)
        for block, squares in zip(stack.singles, of_blocks, strict=True):
            is_exact = Z.shape[1] == Z.shape[2]
            if is_exact:
                squares = [x.sum(0, keepdim=True) for x in squares]
            if (other := found.get(block.names[0])) is not None:
                squares = [x + y for x, y in zip(squares, other, strict=False)]
                is_exact = is_exact and other[2]
            found[block.names[0]] = (*squares, is_exact)
    return found


def relative(apart: Tensor, exact: Tensor, is_exact: bool) -> Estimate:
    """Return the relative error and its standard error; zero if both matrices are."""
    num, are_equal = len(apart), not bool(apart.any())
    squared = apart.sum() if are_equal else apart.sum() / exact.sum()
    error = squared.sqrt()
    if is_exact or are_equal or not bool(error.isfinite()):
        return Estimate(error, torch.zeros_like(error))
    # the error of a ratio of means, to first order
    spread = (apart - squared * exact).square().sum() / (num * (num - 1))
    return Estimate(error, spread.sqrt() / exact.mean() / (2 * error))
