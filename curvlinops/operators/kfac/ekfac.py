"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from dataclasses import replace
from itertools import chain
from math import prod

import torch
from torch import Tensor

from curvlinops.operators.kfac.blocks import BASES, MOMENT, Block, Stack
from curvlinops.operators.kfac.eigenbasis import Basis, eigenbases
from curvlinops.operators.kfac.inverse import Damping
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.layout import matrices
from curvlinops.operators.kfac.sums import ChangedError, FactorSums, moved
from curvlinops.risk.data import Batches


class EKFACLinearOperator(KroneckerFactoredLinearOperator):
    """Eigenvalue-corrected KFAC (EKFAC), block-diagonal with a block for each layer.

    KFAC's block ``B (x) A`` has the eigenvectors ``Q_B (x) Q_A``. EKFAC keeps these, and replaces
    the eigenvalues by the diagonal of the exact block in this basis, ``c * sum (Q_B^T G Q_A)^2``,
    with G the matrices of single samples' gradients. No other eigenvalues are closer to the exact
    block in the Frobenius norm; the trace is exact. It takes a second pass over the data. In the
    reduce setting, factors may have null spaces in which gradients do not vanish. All numbers but
    the trace then depend on the basis that the eigendecomposition returns for the null space.
    Updates keep the eigenvectors; operators cannot be merged.

    George et al., Fast approximate natural gradient descent in a Kronecker-factored eigenbasis,
    NeurIPS 2018, arXiv:1806.03884.

    For arguments and errors see ``KroneckerFactoredLinearOperator``; ``fisher_type`` cannot be
    ``"forward-only"``.
    """

    _is_corrected = True

    def _compute(self, sums: FactorSums, batches: Batches | None = None) -> FactorSums:
        first = sums.num_batches
        kept = {stack: x for stack, x in sums.tensors.items() if stack.kind in BASES}
        before = {of for stack in sums.tensors if stack.kind == MOMENT for of in stack.of}
        sums = super()._compute(sums, batches)
        blocks = {block.views: block for block in sums.structure.blocks if block.terms}
        with self.risk.ranks.raise_on_all_ranks():  # which may know the bases of different blocks
            if lost := before - blocks.keys():
                raise ChangedError(next(iter(lost))[0].name)
        firsts = {views[0]: block.terms[0].shape for views, block in blocks.items()}
        sums = replace(sums, firsts=firsts)  # as the structure has them already
        if sums.scale is None:
            sums.normalize(self.risk.scale)
        stacks = matrices(sums)
        bases = self._bases(sums, stacks, kept, before)
        wanted = {
            stack: Basis.of_block(stack, *(bases.get(stack.key(kind)) for kind in BASES))
            for stack in sums.structure.stacks
            if stack.terms
        }
        moments = self._block_means("eigenvalues", sums, first, wanted, batches)
        for of_stack, stack in zip(sums.structure.stacks, stacks, strict=True):
            squares = moments.get(stack.key(MOMENT))
            if stack.is_here and squares is not None:
                _remove_rounding(squares, stack, wanted[of_stack])
        return replace(sums, tensors=sums.tensors | moments | bases).own()

    def _bases(
        self, sums: FactorSums, stacks: list[Block], kept: dict[Stack, Tensor], known: set[tuple]
    ) -> dict[Stack, Tensor]:
        """Return the eigenbases of all blocks, of which each process computes some."""
        ranks = self.risk.ranks
        products = {block.views for block in sums.structure.blocks if block.terms}
        if not sums.placement.is_divided and products <= known:  # all processes have the same
            return moved(kept, sums.structure)
        divided = sums.divided()
        with ranks.raise_on_all_ranks():
            if divided is not sums:
                stacks = matrices(divided.own())
            own = (stack for stack in stacks if stack.terms and stack.is_here)
            new = (eigenbases(stack, known) for stack in own)
            bases = kept | dict(chain.from_iterable(x.items() for x in new))
        return moved(ranks.exchange(bases, self.device), sums.structure)

    def _damped_inverse(self, damping: Damping) -> tuple:
        if damping.use_heuristic_damping or damping.of_inputs != damping.of_gradients:
            raise ValueError(
                "Eigenvalue-corrected blocks have no factors to which damping could be added: pass "
                "one number, without use_heuristic_damping. It is added to the eigenvalues."
            )
        return super()._damped_inverse(damping)


def _remove_rounding(squares: Tensor, block: Block, basis: Basis) -> None:
    """Replace squares of rounding errors by zeros, in place.

    Gradients have these in the scale of their entries along the vectors of the basis. Factors tell
    these scales, so that a large input does not hide small ones.
    """
    if squares.numel() == 0:
        return
    scales = torch.zeros_like(squares)
    for factors in block.products:
        axes = zip(factors, (basis.outputs, basis.inputs), (2, 1), strict=False)
        scales += prod(factor.scales(Q).unsqueeze(axis) for factor, Q, axis in axes)
    size = max(squares.shape[1:])
    squares[squares <= size * (8 * torch.finfo(squares.dtype).eps) ** 2 * scales] = 0.0
