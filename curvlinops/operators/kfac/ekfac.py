"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from curvlinops.layers.recorded import UseGradient
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import group_by_use
from curvlinops.operators.kfac.eigenbasis import Basis, eigenbases
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.inverse import Damping
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.kfac.layout import BlockFactors, assemble, normalize
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
    eigenvalues are closer to the exact block in the Frobenius norm; the trace is exact. Costs a
    second pass over the data. In the reduce setting, all but the trace depends on which basis the
    eigendecomposition returns for null spaces of the factors, where gradients do not vanish.
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

    def _compute(self, sums: FactorSums, batches: Batches | None = None) -> FactorSums:
        ranks, first, known = self.risk.ranks, sums.num_batches, sums.bases
        sums = super()._compute(sums, batches)
        if lost := known.keys() - {block.slices for block in sums.blocks if block.kinds}:
            raise ChangedError(next(iter(lost))[0].name)
        sums.bases = known | self._new_bases(sums)
        moments = replace(sums, tensors={}, num_batches=first)
        with self._synchronized("eigenvalues"), self._batches("eigenvalues", batches) as problems:
            for problem, samples in self._captured(problems, moments, by_sample=True):
                self._add_moments(moments, problem, samples)
        sums.tensors |= ranks.add_all(moments.tensors, self.device)
        return sums

    def _new_bases(self, sums: FactorSums) -> dict[tuple[ParameterView, ...], Basis]:
        """Return the eigenbases of blocks that have none yet."""
        factors = [each for each in normalize(sums, 1.0, without=sums.bases) if each.products]
        # eigenvectors are not unique: all ranks take those of the first one
        bases = (basis.map(self.risk.ranks.first) for basis in eigenbases(factors))
        return dict(zip([each.block.slices for each in factors], bases, strict=True))

    def _add_moments(
        self, sums: FactorSums, problem: BatchProblem, samples: SampleGradients
    ) -> None:
        """Add a batch's squared gradients in the eigenbases of blocks."""
        for u, last in mark_last(backpropagated(problem, samples, self._options)):
            groups = group_by_use(samples.by_use(u, last), self._options.reduced)
            if not sums.uses.includes(groups.keys(), samples.fallbacks):
                raise ValueError(_OTHER_USES)
            by_slice: dict[ParameterView, list[UseGradient]] = {
                slices[0]: [] for slices in sums.bases
            }
            for use in list(groups):
                parts = groups.pop(use)
                if use.slice in by_slice:
                    in_dtype = (p._replace(gradient=p.gradient.to(self.torch_dtype)) for p in parts)
                    by_slice[use.slice].extend(in_dtype)
            for slices, basis in sums.bases.items():
                # memory of gradients that were added is given back at once
                parts = by_slice.pop(slices[0])
                if any(part.unsorted for part in parts):
                    moment = self._one_by_one(basis, slices, samples, u)
                elif parts:
                    moment = basis.second_moment(parts)
                else:
                    continue
                sums.add((slices, "moment"), moment)

    def _one_by_one(
        self, basis: Basis, slices: tuple[ParameterView, ...], samples: SampleGradients, u: Tensor
    ) -> Tensor:
        """Return the second moment of gradients that are computed sample by sample."""
        total: Tensor | float = 0.0
        views = basis.kind.view, *slices[1:]
        for _, gradients in samples.one_by_one(u, [view.name for view in slices]):
            of_names = {name: x.rows(slice(None)).flatten(0, 1) for name, x in gradients.items()}
            rows = [view.gather(of_names).to(self.torch_dtype) for view in views]
            total = total + basis.second_moment_of_rows(rows[0], rows[1] if rows[1:] else None)
        return total

    def _block_diagonal(self) -> BlockDiagonalLinearOperator:
        return self._assembled(lambda block: block)

    def _assembled(
        self, function: Callable[[StructuredLinearOperator], StructuredLinearOperator]
    ) -> BlockDiagonalLinearOperator:
        """Return the matrix whose blocks are a function of this one's blocks."""
        sums = self._factor_sums()
        scale = self.risk.scale(sums.weight)

        def build(factors: BlockFactors) -> StructuredLinearOperator:
            key = factors.block.slices
            if key not in sums.bases:
                return function(factors.operator())
            eigenvalues = scale * _without_rounding(sums.tensors[key, "moment"])
            return function(sums.bases[key].diagonal(eigenvalues))

        factors = normalize(sums, scale, without=sums.bases)
        for i, (block, _, _) in enumerate(factors):
            if block.slices in sums.bases:  # entries are in the order of the basis
                block = replace(block, kinds=(sums.bases[block.slices].kind,))
                factors[i] = factors[i]._replace(block=block)
        return assemble(factors, self.space, build)

    def _damped_inverse(self, damping: Damping) -> BlockDiagonalLinearOperator:
        if damping.use_heuristic_damping or damping.of_inputs != damping.of_gradients:
            raise ValueError(
                "Eigenvalue-corrected blocks have no factors to which damping could be added: pass "
                "one number, without use_heuristic_damping. It is added to the eigenvalues."
            )
        arguments = damping.of_gradients, damping.retry_double_precision
        return self._assembled(lambda block: block.inverse(*arguments))


def _without_rounding(squares: Tensor) -> Tensor:
    """Return squares with zeros instead of what is but the square of rounding errors."""
    if squares.numel() == 0:
        return squares
    rounding = (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
    return squares.masked_fill(squares <= rounding, 0)
