"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import MOMENT, Block, Term, group_by_use
from curvlinops.operators.kfac.eigenbasis import Basis, eigenbases
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.inverse import Damping
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.layout import assemble, with_matrices
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.sums import ChangedError, FactorSums
from curvlinops.operators.vectors import mark_last
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batches
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.layout import ParameterView

_OTHER_USES = (
    "Layers use parameters in other ways in the pass for the eigenvalues than in that for the "
    "factors. Compute them once more, or use KFACLinearOperator, which needs one pass."
)


class EKFACLinearOperator(KroneckerFactoredLinearOperator):
    """Eigenvalue-corrected KFAC (EKFAC), block-diagonal with a block for each layer.

    KFAC's block ``B (x) A`` has the eigenvectors ``Q_B (x) Q_A``. They are kept, and the
    eigenvalues replaced by the diagonal of the exact block in this basis,
    ``c * sum (Q_B^T G Q_A)^2``, with G the matrices of single samples' gradients. No other
    eigenvalues are closer to the exact block in the Frobenius norm; the trace is exact. It takes a
    second pass over the data. In the reduce setting, factors may have null spaces in which
    gradients do not vanish. All numbers but the trace then depend on the basis that the
    eigendecomposition returns for these. Updates keep the eigenvectors; operators cannot be merged.

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

    def _compute(self, sums: FactorSums, batches: Batches | None = None) -> FactorSums:
        ranks, first, known = self.risk.ranks, sums.num_batches, sums.bases
        sums = super()._compute(sums, batches)
        if lost := known.keys() - {block.views for block in sums.blocks if block.terms}:
            raise ChangedError(next(iter(lost))[0].name)
        sums.bases = known | self._new_bases(sums)
        moments = replace(sums, tensors={}, num_batches=first)
        with self._on_all_ranks("eigenvalues"), self._batches("eigenvalues", batches) as problems:
            for problem, samples in self._forward_passes(problems, moments, lambda uses: uses):
                self._add_moments(moments, problem, samples)
        for key, squares in ranks.add_all(moments.tensors, self.device).items():
            sums.tensors[key] = _without_rounding(squares).mul_(sums.scale)
        return sums

    def _new_bases(self, sums: FactorSums) -> dict[tuple[ParameterView, ...], Basis]:
        """Return the eigenbases of blocks that have none yet."""
        new = (block for block in sums.blocks if block.terms and block.views not in sums.bases)
        blocks = with_matrices(sums, new)
        # eigenvectors are not unique: all ranks take those of the first one
        bases = (basis.map(self.risk.ranks.first) for basis in eigenbases(blocks))
        return dict(zip([block.views for block in blocks], bases, strict=True))

    def _add_moments(
        self, sums: FactorSums, problem: BatchProblem, samples: SampleGradients
    ) -> None:
        """Add a batch's squared gradients in the eigenbases of blocks."""
        for u, last in mark_last(backpropagated(problem, samples, self._options)):
            groups = group_by_use(samples.by_use(u, last), self._options.reduced)
            if not sums.uses.includes(groups.keys(), samples.fallbacks):
                raise ValueError(_OTHER_USES)
            by_view: dict[ParameterView, list[FactoredGradient]] = {
                views[0]: [] for views in sums.bases
            }
            unassigned: set[ParameterView] = set()
            for use in list(groups):
                contributions = groups.pop(use)
                if use.view in by_view:
                    by_view[use.view] += [x.gradient.to(self.torch_dtype) for x in contributions]
                    unassigned |= (
                        {use.view} if any(x.is_unassigned for x in contributions) else set()
                    )
            for views, basis in sums.bases.items():
                # memory of gradients that were added is given back at once
                gradients = by_view.pop(views[0])
                if views[0] in unassigned:
                    moment = self._one_by_one(basis, views, samples, u)
                elif gradients:
                    moment = basis.second_moment(gradients)
                else:
                    continue
                sums.add((views, MOMENT), moment)

    def _one_by_one(
        self, basis: Basis, views: tuple[ParameterView, ...], samples: SampleGradients, u: Tensor
    ) -> Tensor:
        """Return the second moment of gradients that are computed sample by sample."""
        total: Tensor | float = 0.0
        for _, gradients in samples.one_by_one(u, [view.name for view in views]):
            of_names = {name: x.rows(slice(None)).flatten(0, 1) for name, x in gradients.items()}
            weight, *bias = (
                view.gather(of_names).to(self.torch_dtype)
                for view in (basis.shape.view, *views[1:])
            )
            total = total + basis.second_moment_of_rows(weight, bias[0] if bias else None)
        return total

    def _block_diagonal(self) -> BlockDiagonalLinearOperator:
        return self._assembled(lambda block: block)

    def _assembled(
        self, function: Callable[[StructuredLinearOperator], StructuredLinearOperator]
    ) -> BlockDiagonalLinearOperator:
        """Return the matrix whose blocks are a function of this one's blocks."""
        sums = self._factor_sums()

        def build(block: Block) -> StructuredLinearOperator:
            if block.views not in sums.bases:
                return function(block.operator())
            eigenvalues = sums.tensors[block.views, MOMENT]
            return function(sums.bases[block.views].diagonal(eigenvalues))

        blocks = list(self._made_blocks())
        for i, block in enumerate(blocks):
            if block.views in sums.bases:  # entries are in the order of the basis
                blocks[i] = replace(block, terms=(Term(sums.bases[block.views].shape),))
        return assemble(blocks, self.space, build)

    def _damped_inverse(self, damping: Damping) -> BlockDiagonalLinearOperator:
        if damping.use_heuristic_damping or damping.of_inputs != damping.of_gradients:
            raise ValueError(
                "Eigenvalue-corrected blocks have no factors to which damping could be added: pass "
                "one number, without use_heuristic_damping. It is added to the eigenvalues."
            )
        arguments = damping.of_gradients, damping.retry_double_precision
        return self._assembled(lambda block: block.inverse(*arguments))


def _without_rounding(squares: Tensor) -> Tensor:
    """Replace squares of rounding errors by zeros, in place."""
    if squares.numel() == 0:
        return squares
    rounding = (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
    return squares.masked_fill_(squares <= rounding, 0)
