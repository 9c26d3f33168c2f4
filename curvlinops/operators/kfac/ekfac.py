"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

import torch
from torch import Tensor

from curvlinops.layers.recorded import Part
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import (
    BlockFactors,
    Blocks,
    assemble,
    normalized,
    operator_of,
)
from curvlinops.operators.kfac.eigenbasis import Basis, eigenbases
from curvlinops.operators.kfac.estimate import backpropagated, on_slice
from curvlinops.operators.kfac.inverse import Damping
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.plan import BlockSpec, Slice, group_by_use
from curvlinops.operators.kfac.sums import ChangedError, FactorSums
from curvlinops.operators.vectors import mark_last
from curvlinops.risk.data import Batches
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.structured.base import StructuredLinearOperator

_OTHER_USES = (
    "Layers use parameters in other ways in the pass for the eigenvalues than in that for the "
    "factors. Compute them once more, or use KFACLinearOperator, which needs one pass."
)


class EKFACLinearOperator(KroneckerFactoredLinearOperator):
    """Eigenvalue-corrected KFAC (EKFAC), block-diagonal with a block for each layer.

    KFAC's block ``B (x) A`` has the eigenvectors ``Q_B (x) Q_A``. They are kept, and the
    eigenvalues replaced by the diagonal of the exact block in this basis,
    ``c * sum (Q_B^T G Q_A)^2``, with G the matrices of single samples' gradients. No other
    eigenvalues are closer to the exact block in the Frobenius norm; the trace is exact. Costs a
    second pass over the data. In the reduce setting, all but the trace depends on which basis the
    eigendecomposition returns for null spaces of the factors, where gradients do not vanish.
    Updates keep the eigenvectors; operators cannot be merged.

    George et al., Fast approximate natural gradient descent in a Kronecker-factored eigenbasis,
    NeurIPS 2018, arXiv:1806.03884.

    For arguments and errors see ``KroneckerFactoredLinearOperator``; ``fisher_type`` cannot be
    ``"forward-only"``.
    """

    _needs_second_pass = True

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
        blocks = [block for block in sums.plan.blocks if block.structure == "kronecker"]
        if lost := known.keys() - {block.slices for block in blocks}:
            raise ChangedError([slices[0][0] for slices in lost], sums.plan.uses)
        factors = normalized(sums, 1.0, self.space, self._options, in_eigenbases=True)
        factors = [each for each in factors if each.products]
        # eigenvectors are not unique: all ranks take those of the first one
        bases = [basis.map(ranks.first) for basis in eigenbases(factors)]
        sums.bases = known | dict(zip([each.block.slices for each in factors], bases, strict=True))
        moments = FactorSums()

        def add(problem: BatchProblem, samples: SampleGradients) -> None:
            for u, last in mark_last(backpropagated(problem, samples, self._options)):
                groups = group_by_use(samples.parts(u, last), self._options.reduced)
                if not sums.plan.uses.includes(groups.keys(), samples.fallbacks):
                    raise ValueError(_OTHER_USES)
                by_slice: dict[Slice, list[Part]] = {block.slice: [] for block in blocks}
                for use in list(groups):
                    # what was added is not kept in memory
                    parts = groups.pop(use)
                    if (own := (use.name, use.place)) in by_slice:
                        by_slice[own] += [on_slice(part, self.torch_dtype) for part in parts]
                for block in blocks:
                    parts, basis = by_slice.pop(block.slice), sums.bases[block.slices]
                    if any(part.unsorted for part in parts):
                        moment = self._one_by_one(basis, block, samples, u)
                    elif parts:
                        moment = basis.second_moment(parts)
                    else:
                        continue
                    moments.add((block.slices, "moment"), moment)

        with self._synchronized("eigenvalues"):
            self._each_batch("eigenvalues", add, batches, first)
        sums.tensors |= ranks.add_all(moments.tensors, self.device)
        return sums

    def _one_by_one(
        self, basis: Basis, block: BlockSpec, samples: SampleGradients, u: Tensor
    ) -> Tensor:
        """Return the second moment of gradients that are computed sample by sample."""
        total: Tensor | float = 0.0
        for _, gradients in samples.one_by_one(u, block.names):
            of_names = {
                name: gradient.rows(slice(None)).flatten(0, 1)
                for name, gradient in gradients.items()
            }
            rows = [
                of_names[name].flatten(1) if view is None else view.gather(of_names)
                for name, view in zip(
                    block.names, (basis.kind.view, *block.places[1:]), strict=True
                )
            ]
            rows = [x.to(self.torch_dtype) for x in rows]
            total = total + basis.second_moment_of_rows(rows[0], rows[1] if rows[1:] else None)
        return total

    def _block(self, factors: BlockFactors) -> StructuredLinearOperator:
        key = factors.block.slices
        if key not in self._sums.bases:
            return operator_of(factors, self.space)
        eigenvalues = _without_rounding(self._sums.tensors[key, "moment"])
        scale = self.risk.scale(self._sums.terms)
        return self._sums.bases[key].diagonal(scale * eigenvalues)

    def _inverse_blocks(self, damping: Damping) -> Blocks:
        if damping.heuristic or damping.of_inputs != damping.of_gradients:
            raise ValueError(
                "Eigenvalue-corrected blocks have no factors to which damping could be added: pass "
                "one number, without use_heuristic_damping. It is added to the eigenvalues."
            )

        def invert(factors: BlockFactors) -> StructuredLinearOperator:
            block = self._block(factors)
            return block.inverse(damping.of_gradients, damping.retry_double_precision)

        return assemble(self._block_factors(), self.space, invert)


def _without_rounding(squares: Tensor) -> Tensor:
    """Return squares with zeros instead of what is but the square of rounding errors."""
    if squares.numel() == 0:
        return squares
    rounding = (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
    return squares.masked_fill(squares <= rounding, 0)
