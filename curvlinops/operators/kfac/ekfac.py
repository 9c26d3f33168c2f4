"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import MOMENT, group_by_use
from curvlinops.operators.kfac.eigenbasis import Basis, eigenbases
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.inverse import Damping
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.layout import with_matrices
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.stacks import stacked
from curvlinops.operators.kfac.sums import ChangedError, FactorSums
from curvlinops.operators.vectors import mark_last
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batches
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
        first, known = sums.num_batches, sums.bases
        sums = super()._compute(sums, batches)
        with sums.ranks.raise_on_all_ranks():  # which may know the bases of different blocks
            if lost := known.keys() - {block.views for block in sums.blocks if block.terms}:
                raise ChangedError(next(iter(lost))[0].name)
        moments = replace(
            sums, tensors={}, num_batches=first, bases=self._bases_everywhere(sums, known)
        )
        with self._on_all_ranks("eigenvalues"), self._batches("eigenvalues", batches) as problems:
            for problem, samples in self._forward_passes(problems, moments):
                self._add_moments(moments, problem, samples)
        moments = moments.over_ranks(self._is_partitioned)
        for key, squares in moments.tensors.items():
            sums.tensors[key] = _without_rounding(squares).mul_(sums.scale)
        return replace(sums, bases=moments.bases).own()

    def _bases_everywhere(
        self, sums: FactorSums, known: dict[tuple[ParameterView, ...], Basis]
    ) -> dict[tuple[ParameterView, ...], Basis]:
        """Return the eigenbases of all blocks. Each rank decomposes the factors of some blocks.

        Args:
            sums: The means.
            known: The bases that this rank has already.
        """
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
        axes = ("outputs", "inputs")
        of_own = {
            (block.views, axis): x
            for block in own
            for axis in axes
            if (x := getattr(bases[block.views], axis)) is not None
        }
        tensors = ranks.exchange(of_own, self.device)
        plain = [
            (block.views, replace(bases[block.views], outputs=None, inputs=None)) for block in own
        ]
        for views, basis in chain.from_iterable(ranks.gather_objects(plain)):
            bases[views] = replace(basis, **{axis: tensors.get((views, axis)) for axis in axes})
        return {block.views: bases[block.views] for block in sums.blocks if block.terms}

    def _add_moments(
        self, sums: FactorSums, problem: BatchProblem, samples: SampleGradients
    ) -> None:
        """Add a batch's squared gradients in the eigenbases of blocks."""
        for u, last in mark_last(backpropagated(problem, samples, self._options)):
            groups = group_by_use(
                samples.by_use(u, last), self._options.reduced, samples.conclusions
            )
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
            if unassigned:
                samples.refuse_interaction()
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

    def _damped_inverse(self, damping: Damping) -> BlockDiagonalLinearOperator:
        if damping.use_heuristic_damping or damping.of_inputs != damping.of_gradients:
            raise ValueError(
                "Eigenvalue-corrected blocks have no factors to which damping could be added: pass "
                "one number, without use_heuristic_damping. It is added to the eigenvalues."
            )
        return self.structure.inverse(damping.of_gradients, damping.retry_double_precision)


def _without_rounding(squares: Tensor) -> Tensor:
    """Replace squares of rounding errors by zeros, in place."""
    if squares.numel() == 0:
        return squares
    rounding = (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
    return squares.masked_fill_(squares <= rounding, 0)
