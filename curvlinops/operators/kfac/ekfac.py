"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from dataclasses import replace

import torch
from torch import Tensor

from curvlinops.operators.kfac.block_sums import everywhere
from curvlinops.operators.kfac.blocks import MOMENT, Block
from curvlinops.operators.kfac.eigenbasis import Basis, eigenbases
from curvlinops.operators.kfac.inverse import Damping
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.layout import with_matrices
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.stacks import stacked
from curvlinops.operators.kfac.sums import ChangedError, FactorSums
from curvlinops.risk.data import Batches
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.layout import ParameterView


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

    def __post_init__(self) -> None:
        """Check the options, too."""
        if self.fisher_type == FisherType.FORWARD_ONLY:
            raise ValueError(
                "EKFAC needs gradients; fisher_type='forward-only' exists for KFAC only."
            )
        super().__post_init__()

    def merge(self, other: KroneckerFactoredLinearOperator) -> None:
        """Refuse: eigenvalues in different eigenbases cannot be added.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "EKFAC operators cannot be merged, since their eigenvalues belong to different "
            "eigenvectors. Merge KFACLinearOperators, or build one operator on all data."
        )

    def _compute(
        self, sums: FactorSums, batches: Batches | None = None, known: FactorSums | None = None
    ) -> FactorSums:
        first, before = sums.num_batches, sums.bases
        sums = super()._compute(sums, batches, known)
        with sums.ranks.raise_on_all_ranks():  # which may know the bases of different blocks
            if lost := before.keys() - {block.views for block in sums.blocks if block.terms}:
                raise ChangedError(next(iter(lost))[0].name)
        bases = self._bases_everywhere(sums, before)
        moments = self._block_means("eigenvalues", sums, first, bases, batches)
        for block in with_matrices(sums):
            squares = moments.get((block.views, MOMENT))
            if block.is_here and squares is not None:
                _remove_rounding(squares, block, bases[block.views])
        sums.tensors |= moments
        return replace(sums, bases=bases).own()

    def _bases_everywhere(
        self, sums: FactorSums, known: dict[tuple[ParameterView, ...], Basis]
    ) -> dict[tuple[ParameterView, ...], Basis]:
        """Return the eigenbases of all blocks, those that are not known from the ranks' shares."""
        ranks, products = sums.ranks, [block for block in sums.blocks if block.terms]
        if not self._is_partitioned:  # all ranks have the same
            products = [block for block in products if block.views not in known]
        owners = sums.owners
        if ranks.size > 1 and not owners:
            owners = sums.distributed(sums.tensors).owners
        own = [block for block in products if owners.get(block.names[0], ranks.rank) == ranks.rank]
        with ranks.raise_on_all_ranks():
            new = [block for block in own if block.views not in known]
            bases = known | eigenbases(stacked(sums, with_matrices(sums, new)))
        if ranks.size == 1:
            return bases
        of_own = {block.views: bases[block.views] for block in own}
        bases |= everywhere(of_own, ranks, self.device)
        return {block.views: bases[block.views] for block in sums.blocks if block.terms}

    def _damped_inverse(self, damping: Damping) -> BlockDiagonalLinearOperator:
        if damping.use_heuristic_damping or damping.of_inputs != damping.of_gradients:
            raise ValueError(
                "Eigenvalue-corrected blocks have no factors to which damping could be added: pass "
                "one number, without use_heuristic_damping. It is added to the eigenvalues."
            )
        return self.structure.inverse(damping.of_gradients, damping.retry_double_precision)


def _remove_rounding(squares: Tensor, block: Block, basis: Basis) -> None:
    """Replace squares of rounding errors by zeros, in place.

    Gradients have rounding errors in the scale of their entries along the vectors of the basis. The
    factors tell these scales, so that a large input does not hide small ones.
    """
    if squares.numel() == 0:
        return
    operator = block.operator()
    scales = torch.zeros_like(squares)
    for product in getattr(operator, "_terms", [operator]):
        pairs = zip(product._factors, (basis.outputs, basis.inputs), strict=False)
        scales += product._outer([factor.scales(Q) for factor, Q in pairs]).view_as(squares)
    size = max(squares.shape[1:])
    squares[squares <= size * (8 * torch.finfo(squares.dtype).eps) ** 2 * scales] = 0.0
