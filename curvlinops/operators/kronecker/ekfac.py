"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from collections.abc import Sequence
from functools import reduce
from math import isclose
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.factors import relation
from curvlinops.layers.gradients import SampleGradients
from curvlinops.layers.groups import split
from curvlinops.operators.kronecker.base import KroneckerFactoredLinearOperator
from curvlinops.operators.kronecker.blocks import BlockFactors, Blocks, Build, assemble, operator_of
from curvlinops.operators.kronecker.correction import Basis, bases, unpacked
from curvlinops.operators.kronecker.estimate import by_block
from curvlinops.operators.kronecker.inverse import Damping
from curvlinops.operators.kronecker.options import FisherType
from curvlinops.operators.kronecker.plan import Block
from curvlinops.operators.kronecker.storage import check_kind
from curvlinops.operators.kronecker.sums import Sums, successors
from curvlinops.operators.kronecker.usage import Uses
from curvlinops.operators.vectors import mark_last
from curvlinops.risk.data import Batches
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import identity
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.support.torch_modes import in_default_modes

_NOT_PRESENT = (
    "The factors are not those of the operator's data, and of what was merged, at the present "
    "state of the model, so that no second pass can correct their eigenvalues: it was updated, or "
    "loaded with other data, or the model, its parameters or the data changed. Merge before the "
    "first update, build one operator on all data, or merge KFACLinearOperators."
)

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
        self._bases: dict[int, Basis] = {}
        self._moments: dict[int, Tensor] = {}
        self._merged: list[EKFACLinearOperator] = []

    @in_default_modes
    def compute_kronecker_factors(self) -> None:
        """Compute factors and eigenvalues from all data, anew if they are there already."""
        sums = self._passes.sum_over_all(self._batches)
        found = self._bases_of(self._factors(sums))
        moments = self._correct(sums, found, None)
        self._replace(sums, found, moments)

    @in_default_modes
    def update(self, batch: tuple[Any, Any], decay: float = 1.0) -> None:
        """Add a batch to the data; the eigenvectors stay the same.

        Args:
            batch: A pair ``(X, y)`` like those in the data.
            decay: By what the sums over all data before are multiplied first.
        """
        before = self._computed()
        super().update(batch, decay)
        batches = Batches([batch], self.risk.data.batch_size_fn)
        after, self._sums = self._sums, before  # should the second pass fail
        found, old = self._adopted(after)
        more = self._correct(after, found, batches, before.num_batches)
        self._replace(after, found, _added({n: decay * x for n, x in old.items()}, more))

    @in_default_modes
    def merge(self, other: "EKFACLinearOperator") -> None:
        """Add the data of another operator; both pass over their data twice more.

        So do all that were merged before, which are kept for that.

        Raises:
            ValueError: If the other one is of another kind, or has other parameters or options; if
                the factors of one are not those of its data, and of what was merged, and the model
                as it is now, because it was updated or loaded from elsewhere, or model or data
                changed.
        """
        before = self._computed()
        check_kind(self, other)
        shards = [shard for operator in (self, other) for shard in operator._present()]
        super().merge(other)
        after, self._sums = self._sums, before  # should a further pass fail
        found, moments = self._bases_of(self._factors(after)), {}
        for shard, sums in shards:
            more = shard._correct(sums, found, None, blocks=after.blocks)
            moments = _added(moments, more)
        self._replace(after, found, moments)
        self._merged = [shard for shard, _ in shards[1:]]

    def _present(self) -> "list[tuple[EKFACLinearOperator, Sums]]":
        """Return whose data the factors are sums over, with each one's sums, computed anew.

        Raises:
            ValueError: If the factors are others.
        """
        sums, plan = self._computed(), self._passes.plan
        shards = [(one, one._passes.sum_over_all(one._batches)) for one in (self, *self._merged)]
        if not sums.agrees(reduce(lambda a, b: a.plus(b, plan), [own for _, own in shards])):
            raise ValueError(_NOT_PRESENT)
        return shards

    def _adopted(self, after: Sums) -> tuple[dict[int, Basis], dict[int, Tensor]]:
        """Return bases and moments for the blocks of more data, with new bases for new blocks."""
        factors = self._factors(after)
        numbers = successors(self._sums.blocks, after.blocks, after.uses)
        found, moments = {}, {}
        for old, basis in self._bases.items():
            number, moment = numbers[old], self._moments[old]
            kind = after.blocks[number].kinds[0]
            turned = relation(kind, basis.kind) == "transposed"
            found[number] = basis.turned(kind) if turned else basis
            moments[number] = moment.mT if turned else moment
        new = [BlockFactors(f.block) if n in found else f for n, f in enumerate(factors)]
        return found | self._bases_of(new), moments

    def _bases_of(self, factors: Sequence[BlockFactors]) -> dict[int, Basis]:
        """Return the eigenbases of blocks, which all ranks have from the first one."""
        ranks = self.risk.ranks
        return {number: basis.shared(ranks) for number, basis in bases(factors).items()}

    def _replace(self, sums: Sums, found: dict[int, Basis], moments: dict[int, Tensor]) -> None:
        self._sums, self._bases, self._moments, self._merged = sums, found, moments, []
        self._forget()

    def _correct(
        self,
        sums: Sums,
        found: dict[int, Basis],
        batches: Batches | None,
        first: int = 0,
        blocks: list[Block] | None = None,
    ) -> dict[int, Tensor]:
        """Return batches' second moments in some eigenbases.

        Args:
            sums: The sums over the data.
            found: The eigenbases.
            batches: The batches; ``None`` for all data.
            first: The number of the first one.
            blocks: The blocks that have these bases; by default those of the sums.

        Raises:
            ValueError: If these are the operator's data, but not those of the sums.
        """
        moments: dict[int, Tensor] = {}
        terms: Tensor | float = 0.0
        blocks = sums.blocks if blocks is None else blocks

        def add(problem: BatchProblem, samples: SampleGradients) -> None:
            nonlocal moments, terms
            terms = terms + problem.terms(samples.output)
            for u, last in mark_last(self._passes.vectors(problem, samples)):
                parts = list(samples.parts(u, last))
                if not sums.uses.include(Uses.of(parts, samples.fallbacks)):
                    raise ValueError(_OTHER_USES)
                for number, own in by_block(blocks, parts).items():
                    if any(part.unsorted for part in own):
                        moment = self._one_by_one(found[number], blocks[number], samples, u)
                    else:
                        moment = found[number].second_moment(own)
                    moments = _added(moments, {number: moment.to(self.torch_dtype)})

        ranks = self.risk.ranks
        with self._passes.synchronized("eigenvalues"):
            num_batches = self._passes.visit(self._batches, "eigenvalues", add, batches, first)
        num_batches, terms = ranks.largest(num_batches), ranks.total(terms)
        moments = ranks.add_all(moments, self.device)
        same = num_batches == sums.num_batches
        same = same and isclose(float(terms), float(sums.terms), rel_tol=1e-5)
        if batches is None and not same:
            raise ValueError(_NOT_PRESENT)
        return moments

    def _one_by_one(
        self, basis: Basis, block: Block, samples: SampleGradients, u: Tensor
    ) -> Tensor:
        """Return the second moment of gradients that are computed sample by sample."""
        ((names, form),) = samples.one_by_one(u, block.names)
        total: Tensor | float = 0.0
        for some in form.parts():
            found = split(names, form.rows(some).flatten(0, 1), self.space)
            rows = [
                found[name].flatten(1)[:, slice(None) if p is None else p.entries(u.device)]
                for name, p in zip(block.names, block.places, strict=True)
            ]
            total = total + basis.second_moment_of_rows(rows[0], rows[1] if rows[1:] else None)
        return total

    # --- saving

    @in_default_modes
    def state_dict(self) -> dict[str, Any]:
        """Return factors, eigenvectors and eigenvalues as tensors by name, and metadata."""
        state = super().state_dict()
        for number, basis in self._bases.items():
            state[f"{number}.moment"] = self._moments[number]
            for name, factor in (("outputs", basis.outputs), ("inputs", basis.inputs)):
                if factor is not None and not factor.is_diagonal:
                    state[f"{number}.basis.{name}"] = factor.tensor
        return state

    def _load(self, sums: Sums, rest: dict[str, Tensor]) -> None:
        found: dict[int, Basis] = {}
        moments: dict[int, Tensor] = {}
        factors = [(n, each) for n, each in enumerate(self._factors(sums)) if each.products]
        if factors and not any(name.endswith(".moment") for name in rest):
            raise ValueError(
                "The saved state has no eigenvalues: it is that of a KFACLinearOperator."
            )
        for number, each in factors:
            found[number], moments[number] = unpacked(f"{number}.", each, rest)
        self._replace(sums, found, moments)

    # --- the structured matrix

    def _unbuilt(self) -> list[BlockFactors]:
        sums = self._computed()
        return self._factors(sums, without=self._bases)

    def _builder(self) -> Build:
        scale = self.risk.scale(self._computed().terms)
        numbers = {block: number for number, block in enumerate(self._sums.blocks)}

        def build(factors: BlockFactors) -> StructuredLinearOperator:
            number = numbers.get(factors.block)
            if number not in self._bases:
                return operator_of(factors, self.space)
            basis, moment = self._bases[number], self._moments[number]
            vectors = [basis.outputs] + ([] if basis.inputs is None else [basis.inputs])
            if len({factor.groups for factor in vectors} - {1}) == 0 and basis.kind.groups > 1:
                vectors.insert(0, identity(basis.kind.groups, moment))
            return EighDecomposedLinearOperator(
                scale * _without_rounding(moment.flatten()),
                KroneckerProductLinearOperator(*vectors),
            )

        return build

    def _inverse_blocks(self, damping: Damping) -> Blocks:
        damping.check_for_eigenvalues()
        build = self._builder()

        def invert(factors: BlockFactors) -> StructuredLinearOperator:
            return build(factors).inverse(damping.values[1], damping.retry_double_precision)

        return assemble(self._unbuilt(), self.space, invert)

    def to_device(self, device: torch.device | str) -> "EKFACLinearOperator":
        """Move the operator, and the user's module and loss, to another device."""
        super().to_device(device)
        self._bases = {number: basis.to(device) for number, basis in self._bases.items()}
        self._moments = {number: moment.to(device) for number, moment in self._moments.items()}
        for shard in self._merged:
            if shard.device != self.device:
                shard.to_device(device)
        return self


def _without_rounding(squares: Tensor) -> Tensor:
    """Return squares with zeros instead of what is but the square of rounding errors."""
    if squares.numel() == 0:
        return squares
    rounding = (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
    return squares.masked_fill(squares <= rounding, 0)


def _added(one: dict[int, Tensor], two: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the sums of moments, of which either may be missing."""
    return one | {n: one[n] + moment if n in one else moment for n, moment in two.items()}
