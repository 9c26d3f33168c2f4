"""What Kronecker-factored approximations share."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.core.data import Batch, Batches
from curvlinops.core.risk import BatchRisk
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.operators.kronecker.blocks import BlockFactors, Build, assemble, normalized
from curvlinops.operators.kronecker.estimate import ChangedError, Estimator, Sums
from curvlinops.operators.kronecker.inverse import Damping, KFACInverseLinearOperator
from curvlinops.operators.kronecker.options import (
    Fallback,
    FisherType,
    KFACType,
    Options,
    check_choice,
    reduced_parameters,
)
from curvlinops.operators.structured import StructuredDataLinearOperator
from curvlinops.operators.vectors import (
    check_sampling,
    hessian_roots,
    signed_hessian_roots,
    would_be_gradients,
)
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator


class KroneckerFactoredLinearOperator(StructuredDataLinearOperator):
    """A block-diagonal approximation whose blocks are made of small matrices.

    The matrices are computed at the first use, and then kept: they do not follow changes of the
    model or of the data. ``compute_kronecker_factors`` computes them anew.

    Args:
        *args: Shared arguments, see ``DataLinearOperator``.
        fisher_type: What is backpropagated, see ``FisherType``.
        mc_samples: How many would-be gradients are sampled for each term (``"mc"``), or how often
            random signs are drawn (``"type-2"``, if samples have several terms).
        kfac_approx: How positions that share a weight are treated, see ``KFACType``: one setting
            for all, or a mapping from names of modules or parameters, the others being expanded.
        num_per_example_loss_terms: The number of a sample's terms, which is checked. Default: as
            many as there are.
        separate_weight_and_bias: Whether biases have their own blocks, or form one with the weight.
        seed: Seeds the samples, together with the index of the batch.
        fallback: What parameters get that enter the model in a way without Kronecker
            structure: ``"error"``; the ``"diagonal"``, or all (``"dense"``) of their exact block.
        exact: Whether ``"type-2"`` backpropagates each term on its own. That is exact also where
            terms of one sample interact in the model, with a backward pass for each position.
        max_factor_size: Above this size, only the diagonal of a matrix is computed.
        **kwargs: Shared arguments, see ``DataLinearOperator``.

    Raises:
        ValueError: If an option is unknown, or does not go together with the others.
        NotImplementedError: If the loss does not support the type of Fisher matrix; when factors
            are computed, if a parameter has no structure, and no fallback was chosen.
    """

    _per_sample = True

    def __init__(
        self,
        *args: Any,
        fisher_type: str = FisherType.MC,
        mc_samples: int = 1,
        kfac_approx: str | Mapping[str, str] = KFACType.EXPAND,
        num_per_example_loss_terms: int | None = None,
        separate_weight_and_bias: bool = True,
        seed: int = 2147483647,
        fallback: str = Fallback.ERROR,
        exact: bool = False,
        max_factor_size: int = 16384,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._options = Options(
            check_choice(FisherType, "fisher_type", fisher_type),
            mc_samples,
            seed,
            exact,
            reduced_parameters(kfac_approx, self.space.names),
            not separate_weight_and_bias,
            check_choice(Fallback, "fallback", fallback),
            max_factor_size,
        )
        self._check_options()
        self._terms_per_sample = num_per_example_loss_terms
        self._samples = SampleBackward(type(self).__name__, trusting=True)
        self._estimator = Estimator(self.space, self._options)
        self._sums: Sums | None = None
        self._num_batches = 0
        self._structure: BlockDiagonalLinearOperator | None = None

    def _check_options(self) -> None:
        options, fisher = self._options, self._options.fisher_type
        sampled = options.mc_samples if fisher is FisherType.MC else 0
        check_sampling(self.risk.loss, options.mc_samples, options.seed, at_least=1)
        if not sampled and options.mc_samples != 1 and fisher is not FisherType.TYPE2:
            raise ValueError(
                f"mc_samples has no meaning for fisher_type='{fisher}': leave it at 1, got "
                f"{options.mc_samples}."
            )
        if options.exact and fisher is not FisherType.TYPE2:
            raise ValueError(f"exact=True is a variant of fisher_type='type-2', not of '{fisher}'.")
        if len(self._blocks) > 1:
            raise ValueError(
                f"{type(self).__name__} has its own diagonal blocks, one for each layer; "
                "block_sizes cannot be chosen."
            )

    # --- factors

    def compute_kronecker_factors(self) -> None:
        """Compute the factors from all data, anew if they are there already."""
        self._structure = None
        while True:
            self._num_batches = 0
            try:
                self._sums = self._sum_over(None, None)
                return
            except ChangedError:  # once more, with other structure
                continue

    def update(self, batch: tuple[Any, Any], decay: float = 1.0) -> None:
        """Add a batch to the data from which the factors are computed.

        Args:
            batch: A pair ``(X, y)`` like those in the data.
            decay: By what the sums over all data before are multiplied first. Below one, factors
                are exponentially weighted means (sums for a loss with reduction ``"sum"``).

        Raises:
            ValueError: If ``decay`` is not between zero and one.
            ChangedError: If layers use parameters in ways that the data before did not show.
        """
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay}.")
        self._computed().scale(decay)
        batches = Batches([batch], self.risk.batches.batch_size_fn)
        self._sums = self._sum_over(batches, self._sums)
        self._structure = None

    def merge(self, other: "KroneckerFactoredLinearOperator") -> None:
        """Add the data of another operator, such as one on another shard of the data.

        The result is the operator on both data sets, except for which labels are sampled.

        Raises:
            ValueError: If the other one is of another kind, or has other parameters or options.
        """
        if type(other) is not type(self) or other._options != self._options:
            raise ValueError("Only operators of one class with equal options can be merged.")
        self.space.check_compatible(other.space)
        self._computed().add(other._computed())
        self._num_batches += other._num_batches
        self._structure = None

    def _computed(self) -> Sums:
        if self._sums is None:
            self.compute_kronecker_factors()
        return self._sums

    def _sum_over(self, batches: Batches | None, sums: Sums | None) -> Sums:
        """Add batches, by default all of the data, to sums."""

        def add(own: BatchRisk, samples: SampleGradients) -> None:
            nonlocal sums
            vectors = self._vectors(own, samples)
            sums = self._estimator.add(sums, samples, vectors, self._samples.fallbacks)
            sums.terms = sums.terms + own.terms(samples.output)

        self._num_batches = self._visit(add, batches, self._num_batches)
        if sums is None:
            raise ValueError("The data has no sample.")
        return sums

    def _visit(
        self,
        use: Callable[[BatchRisk, SampleGradients], None],
        batches: Batches | None,
        first: int = 0,
    ) -> int:
        """Call a function on each batch; number these from ``first``, and return the next."""
        number = first

        def step(bound: BatchRisk) -> None:
            nonlocal number
            own = bound.on(Batch(number, bound.batch.X, bound.batch.y))
            samples = self._capture(own)
            if samples.num_samples:
                use(own, samples)
            number += 1

        self._run(step, batches)
        return number

    def _capture(self, bound: BatchRisk) -> SampleGradients:
        """Run the model on a batch; check the number of terms."""
        samples = self._samples.capture(bound)
        expected, loss = self._terms_per_sample, self.risk.loss
        found = loss.to_terms(samples.output.unsqueeze(0)).shape[1]
        if expected is not None and found != expected * samples.num_samples:
            raise ValueError(
                f"num_per_example_loss_terms is {expected}, but batch {bound.batch.index} has "
                f"{found} terms for {samples.num_samples} samples."
            )
        return samples

    def _vectors(self, bound: BatchRisk, samples: SampleGradients) -> Iterator[Tensor]:
        """Yield what is backpropagated, ``[V, *output]``, as many at once as the memory allows."""
        options, output = self._options, samples.output
        if options.fisher_type is FisherType.FORWARD_ONLY:
            yield output.new_zeros(0, *output.shape)
            return
        if options.fisher_type is FisherType.EMPIRICAL:
            found = [bound.loss.gradient(output, bound.batch.y).unsqueeze(0)]
        elif options.fisher_type is FisherType.MC:
            draws = would_be_gradients(bound, output, options.mc_samples, options.seed)
            found = [draws / options.mc_samples**0.5]
        elif options.exact:
            found = hessian_roots(bound, output)
        else:
            found = signed_hessian_roots(bound, output, options.mc_samples, options.seed)
        for vectors in found:
            yield from vectors.split(samples.vectors_at_once)

    def _reconsider(self) -> None:
        super()._reconsider()
        self._samples = SampleBackward(type(self).__name__, trusting=True)
        self._estimator = Estimator(self.space, self._options)

    # --- the structured matrix

    @property
    def structure(self) -> BlockDiagonalLinearOperator:
        """The approximation as a block-diagonal operator."""
        if self._structure is None:
            factors = self._factors()
            blocks = assemble(factors, self.space, self._builder())
            self._structure = BlockDiagonalLinearOperator(blocks, self.space)
        return self._structure

    @abstractmethod
    def _builder(self) -> Build:
        """Return what makes a block from its factors."""

    @abstractmethod
    def _inverse_blocks(self, damping: Damping) -> dict[str, StructuredLinearOperator]:
        """Return the damped inverses of all blocks."""

    def _factors(self) -> list[BlockFactors]:
        sums = self._computed()
        return normalized(sums, self.risk.scale(sums.terms), self._options)

    def inverse(
        self,
        damping: float | tuple[float, float] = 0.0,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        use_exact_damping: bool = False,
        retry_double_precision: bool = True,
    ) -> KFACInverseLinearOperator:
        """Return the damped inverse, see ``KFACInverseLinearOperator``."""
        return KFACInverseLinearOperator(
            self,
            damping,
            use_heuristic_damping,
            min_damping,
            use_exact_damping,
            retry_double_precision,
        )

    def to_device(self, device: torch.device | str) -> "KroneckerFactoredLinearOperator":
        """Move the operator, and the user's module and loss, to another device."""
        super().to_device(device)
        self._reconsider()
        self._structure = None
        if self._sums is not None:
            self._sums.to(device)
        return self
