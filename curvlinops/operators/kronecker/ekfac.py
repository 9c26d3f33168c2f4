"""Eigenvalue-corrected Kronecker-factored approximate curvature."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.core.data import Batches
from curvlinops.core.risk import BatchRisk
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kronecker.base import KroneckerFactoredLinearOperator
from curvlinops.operators.kronecker.blocks import BlockFactors, Build, assemble, operator_of
from curvlinops.operators.kronecker.correction import Basis, bases
from curvlinops.operators.kronecker.estimate import by_block
from curvlinops.operators.kronecker.inverse import Damping
from curvlinops.operators.kronecker.options import FisherType
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factors import Dense, unit
from curvlinops.structured.kronecker import KroneckerProductLinearOperator


class EKFACLinearOperator(KroneckerFactoredLinearOperator):
    """Eigenvalue-corrected KFAC (EKFAC), block-diagonal with a block for each layer.

    KFAC's block ``B (x) A`` has the eigenvectors ``Q_B (x) Q_A``. They are kept, and the
    eigenvalues replaced by the diagonal of the exact block in this basis,
    ``c * sum (Q_B^T G Q_A)^2``, with G the matrices of single samples' gradients. No other
    eigenvalues are closer to the exact block in the Frobenius norm; the trace is exact. Costs a
    second pass over the data.

    George et al., Fast approximate natural gradient descent in a Kronecker-factored eigenbasis,
    NeurIPS 2018, arXiv:1806.03884.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self._options.fisher_type is FisherType.FORWARD_ONLY:
            raise ValueError(
                "EKFAC needs gradients; fisher_type='forward-only' exists for KFAC only."
            )
        self._bases: dict[int, Basis] = {}
        self._moments: dict[int, Tensor] = {}

    def compute_kronecker_factors(self) -> None:
        """Compute factors and eigenvalues from all data, anew if they are there already."""
        super().compute_kronecker_factors()
        self._bases, self._moments = bases(self._factors()), {}
        self._correct(None, 0, self._moments)

    def update(self, batch: tuple[Any, Any], decay: float = 1.0) -> None:
        """Add a batch to the data; the eigenvectors stay the same.

        Args:
            batch: A pair ``(X, y)`` like those in the data.
            decay: By what the sums over all data before are multiplied first.
        """
        super().update(batch, decay)
        for moment in self._moments.values():
            moment *= decay
        batches = Batches([batch], self.risk.batches.batch_size_fn)
        self._correct(batches, self._sums.num_batches - 1, self._moments)

    def merge(self, other: "EKFACLinearOperator") -> None:
        """Add the data of another operator; both pass over their data once more.

        Raises:
            ValueError: If the other one is of another kind, or has other parameters or options.
        """
        super().merge(other)
        self._bases, self._moments = bases(self._factors()), {}
        for operator in (self, other):
            operator._correct(None, 0, self._moments, self._bases)

    def _correct(
        self,
        batches: Batches | None,
        first: int,
        moments: dict[int, Tensor],
        found: dict[int, Basis] | None = None,
    ) -> None:
        """Add batches' second moments in the eigenbases, by default those of all data."""
        own_bases = self._bases if found is None else found

        def add(bound: BatchRisk, samples: SampleGradients) -> None:
            for u in self._passes.vectors(bound, samples):
                for number, parts in by_block(self._sums.blocks, samples.parts(u)).items():
                    moment = own_bases[number].second_moment(parts).to(self.torch_dtype)
                    moments[number] = moments[number] + moment if number in moments else moment

        self._passes.visit(self._run, add, batches, first)

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return factors, eigenvectors and eigenvalues as tensors by name, and metadata."""
        state = super().state_dict()
        for number, basis in self._bases.items():
            state[f"{number}.moment"] = self._moments[number]
            for name, factor in (("outputs", basis.outputs), ("inputs", basis.inputs)):
                if isinstance(factor, Dense):
                    state[f"{number}.basis.{name}"] = factor.tensor
        return state

    def _load_rest(self, tensors: dict[str, Tensor]) -> None:
        self._bases, self._moments = {}, {}
        for number, each in enumerate(self._factors()):
            if not each.products:
                continue
            self._moments[number] = tensors[f"{number}.moment"].clone()
            kind, like = each.products[0].kind, self._moments[number]
            factors = [
                Dense(tensors[key]) if key in tensors else unit(size, like)
                for key, size in (
                    (f"{number}.basis.outputs", kind.outputs),
                    (f"{number}.basis.inputs", like.shape[2]),
                )
            ]
            inputs = None if kind.shift else factors[1]
            self._bases[number] = Basis(kind, factors[0], inputs, each.block.scale)

    # --- the structured matrix

    def _builder(self) -> Build:
        scale = self.risk.scale(self._computed().terms)
        numbers = {block: number for number, block in enumerate(self._sums.blocks)}

        def build(factors: BlockFactors) -> StructuredLinearOperator:
            number = numbers[factors.block]
            if number not in self._bases:
                return operator_of(factors, self.space)
            basis, moment = self._bases[number], self._moments[number]
            vectors = [basis.outputs] + ([] if basis.inputs is None else [basis.inputs])
            if len({factor.groups for factor in vectors} - {1}) == 0 and basis.kind.groups > 1:
                vectors.insert(0, unit(basis.kind.groups, moment))
            return EighDecomposedLinearOperator(
                scale * moment.flatten(), KroneckerProductLinearOperator(*vectors)
            )

        return build

    def _inverse_blocks(self, damping: Damping) -> dict[str, StructuredLinearOperator]:
        damping.check_for_eigenvalues()
        build = self._builder()

        def invert(factors: BlockFactors) -> StructuredLinearOperator:
            retry = damping.retry_double_precision
            return build(factors).inverse(damping.values[1], retry_double_precision=retry)

        return assemble(self._factors(), self.space, invert)

    def to_device(self, device: torch.device | str) -> "EKFACLinearOperator":
        """Move the operator, and the user's module and loss, to another device."""
        super().to_device(device)
        self._bases = {number: basis.to(device) for number, basis in self._bases.items()}
        self._moments = {number: moment.to(device) for number, moment in self._moments.items()}
        return self
