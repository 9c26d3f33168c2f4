"""What Kronecker-factored approximations share."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from curvlinops.operators.kronecker import storage
from curvlinops.operators.kronecker.blocks import BlockFactors, Blocks, Build, assemble, normalized
from curvlinops.operators.kronecker.inverse import Damping, KFACInverseLinearOperator
from curvlinops.operators.kronecker.options import (
    Fallback,
    FisherType,
    KFACType,
    Options,
    reduced_parameters,
)
from curvlinops.operators.kronecker.passes import Passes
from curvlinops.operators.kronecker.report import (
    HOW_TO_DAMP,
    BlockReport,
    FactorsByModule,
    ModuleFactors,
    Watched,
    by_module,
    check_pairs,
    copied,
    report,
)
from curvlinops.operators.kronecker.structured import StructuredDataLinearOperator
from curvlinops.operators.kronecker.sums import Sums
from curvlinops.risk.data import Batches
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.records import read_state, write_state
from curvlinops.support.torch_modes import in_default_modes

P = ParamSpec("P")
Operator = TypeVar("Operator")


@dataclass(eq=False, repr=False, kw_only=True)
class KroneckerFactoredLinearOperator(StructuredDataLinearOperator):
    """A block-diagonal approximation whose blocks are made of small matrices.

    The matrices are computed at the first use, and then kept: they do not follow changes of the
    model or of the data. ``compute_kronecker_factors`` computes them anew. With a ``process_group``
    all processes have to do so, or to use them for the first time, together.

    Args:
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

    Raises:
        ValueError: If an option is unknown, or does not go together with the others; when factors
            are computed, if a weight and a bias in one block have different settings.
        NotImplementedError: If the loss does not support the type of Fisher matrix; when factors
            are computed, if a parameter has no structure, and no fallback was chosen.
    """

    fisher_type: str = FisherType.MC
    mc_samples: int = 1
    kfac_approx: str | Mapping[str, str] = KFACType.EXPAND
    num_per_example_loss_terms: int | None = None
    separate_weight_and_bias: bool = True
    seed: int = 2147483647
    fallback: str = Fallback.ERROR
    exact: bool = False
    max_factor_size: int = 16384

    _per_sample = True

    def __post_init__(self) -> None:
        """Check the options, too."""
        # before any pass over the data
        fisher = check_choice("fisher_type", self.fisher_type, FisherType)
        mc_samples = check_count("mc_samples", self.mc_samples)
        seed = check_count("seed", self.seed, at_least=0)
        fallback = check_choice("fallback", self.fallback, Fallback)
        max_factor_size = check_count("max_factor_size", self.max_factor_size, at_least=0)
        terms = self.num_per_example_loss_terms
        terms = terms if terms is None else check_count("num_per_example_loss_terms", terms)
        super().__post_init__()
        self._options = Options(
            fisher,
            mc_samples,
            seed,
            self.exact,
            reduced_parameters(self.kfac_approx, self.space.names),
            not self.separate_weight_and_bias,
            fallback,
            max_factor_size,
        )
        self._options.check(self.risk.loss)
        if len(self._blocks) > 1:
            name = type(self).__name__
            raise ValueError(f"{name} has a block for each layer: block_sizes cannot be chosen.")
        kind = type(self).__name__, self.risk, self._options
        self._passes = Passes(*kind, terms)
        self._sums: Sums | None = None
        self._forget()

    def _arguments(self) -> dict[str, Any]:
        reduced, every = self._options.reduced, set(self.space.names)
        approx = "expand" if not reduced else "reduce" if reduced == every else "mixed"
        own = {"kfac_approx": approx, "separate_weight_and_bias": not self._options.joint}
        plain = {n: str(x) if isinstance(x, str) else x for n, x in vars(self._options).items()}
        return super()._arguments() | plain | own

    # --- factors

    @in_default_modes
    def compute_kronecker_factors(self) -> None:
        """Compute the factors from all data, anew if they are there already."""
        self._sums = self._passes.sum_over_all(self._batches)
        self._forget()

    @in_default_modes
    def update(self, batch: tuple[Any, Any], decay: float = 1.0) -> None:
        """Add a batch to the data from which the factors are computed.

        Args:
            batch: A pair ``(X, y)`` like those in the data.
            decay: By what the sums over all data before are multiplied first. Below one, factors
                are exponentially weighted means (sums for a loss with reduction ``"sum"``).

        Raises:
            ValueError: If ``decay`` is not between zero and one.
            RuntimeError: If a parameter is used in ways that do not go together with those before.
        """
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay}.")
        sums = self._computed()
        batches = Batches([batch], self.risk.data.batch_size_fn)
        more = self._passes.sum_over_more(self._batches, sums, batches)
        self._sums = sums.plus(more, self._passes.plan, decay)
        self._forget()

    @in_default_modes
    def merge(self, other: "KroneckerFactoredLinearOperator") -> None:
        """Add the data of another operator, such as one on another shard of the data.

        The result is the operator on both data sets, except for which labels are sampled: that
        depends on the operators' seeds, which may differ.

        Raises:
            ValueError: If the other one has another class, loss, parameters, or options.
            RuntimeError: If parameters are used in ways that do not go together.
        """
        storage.check_kind(self, other)
        self._sums = self._computed().plus(other._computed(), self._passes.plan)
        self._forget()

    def _computed(self) -> Sums:
        if self._sums is None:
            self.compute_kronecker_factors()
        if self._watched.written:
            self._modules, self._watched = None, Watched()
            raise RuntimeError(
                "Factors that were read from _input_covariances or _gradient_covariances were "
                "changed in place, which changes no product with the operator. "
                f"{HOW_TO_DAMP} The operator goes on with its own factors."
            )
        return self._sums

    def _forget(self) -> None:  # what was made of the sums
        self._structure: BlockDiagonalLinearOperator | None = None
        self._structure_factors: list[BlockFactors] = []
        self._modules: dict[str, ModuleFactors] | None = None
        self._watched = Watched()

    # --- what was computed

    @property
    def blocks(self) -> Blocks:
        """The diagonal blocks by the names of their parameters."""
        return self.structure.blocks

    def report(self) -> list[BlockReport]:
        """Return for each diagonal block which structure it has, and why."""
        return report(self._factors(self._computed()), self._options.fisher_type)

    @property
    @in_default_modes
    def input_covariances(self) -> Mapping[str, Tensor]:
        """A by module, for modules whose weight's block is one Kronecker product.

        ``[I, I]``; for embeddings its diagonal ``[I]``; for convolutions with several groups
        ``[G, I, I]``. A copy is made when a matrix is read.
        """
        return self._copies("inputs")

    @property
    @in_default_modes
    def gradient_covariances(self) -> Mapping[str, Tensor]:
        """B by module, ``[O, O]`` or ``[G, O, O]``; also for biases without weight.

        Its diagonal, ``[O]``, if the block is forward-only, or if it is too large for a matrix. A
        copy is made when a matrix is read.
        """
        return self._copies("gradients")

    @property
    def mapping(self) -> dict[str, dict[str, int]]:
        """Where the modules' weights and biases are among ``params``."""
        return {name: dict(found.positions) for name, found in self._by_module().items()}

    def _by_module(self) -> dict[str, ModuleFactors]:
        if self._modules is None:
            self._modules = by_module(self._factors(self._computed()), self.space.names)
        return self._modules

    def _parts(self, kind: str) -> dict[str, Tensor]:
        found = {name: getattr(each, kind) for name, each in self._by_module().items()}
        return {name: matrix for name, matrix in found.items() if matrix is not None}

    def _copies(self, kind: str) -> FactorsByModule:
        self._computed()
        return FactorsByModule(self._parts(kind), copied)

    # names that published programs read, which rely on one dense pair for each weight. They get
    # no copies, and may scale what they have read, but not use the operator after that

    def _dense_pairs(self, kind: str) -> FactorsByModule:
        modules = self._by_module()
        check_pairs(self._sums.blocks, modules, self._options.fisher_type)
        return FactorsByModule(self._parts(kind), partial(self._watched.read, kind))

    _input_covariances = property(lambda self: self._dense_pairs("inputs"))
    _gradient_covariances = property(lambda self: self._dense_pairs("gradients"))

    @property
    def _mapping(self) -> dict[str, dict[str, int]]:
        self._dense_pairs("gradients")
        return self.mapping

    # --- saving

    @in_default_modes
    def state_dict(self) -> dict[str, Any]:
        """Return the factors as tensors by name, and metadata as a string.

        They are sums, so that more data can be added after loading. Do not write to them: like a
        module's, they are the operator's own.
        """
        return storage.pack(self._computed(), self._fingerprint())

    @in_default_modes
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the factors by saved ones.

        Raises:
            ValueError: If these are of other parameters, options, or another loss.
        """
        self._load(*storage.unpack(state_dict, self._fingerprint(), self.space, self._options))

    def _fingerprint(self) -> dict[str, Any]:
        return storage.fingerprint(self.space, self._options, self.risk.loss)

    def _load(self, sums: Sums, rest: dict[str, Tensor]) -> None:
        """Replace the sums; a subclass also what it has added to the state."""
        self._sums = sums
        self._forget()

    @classmethod
    def from_state_dict(
        cls: Callable[P, Operator], state_dict: Mapping[str, Any], *args: P.args, **kwargs: P.kwargs
    ) -> Operator:
        """Build an operator from saved factors and its arguments, without a pass over the data."""
        operator = cls(*args, **{"check_deterministic": False, **kwargs})
        operator.load_state_dict(state_dict)
        return operator

    def save(self, path: str | Path) -> None:
        """Write the factors to a safetensors file."""
        write_state(self.state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Replace the factors by those in a file, which are moved to the operator's device.

        Raises:
            ValueError: If these are of other parameters or options, or the file has none.
        """
        self.load_state_dict(read_state(path))

    # --- the structured matrix

    @property
    @in_default_modes
    def structure(self) -> BlockDiagonalLinearOperator:
        """The approximation as a block-diagonal operator."""
        self._computed()
        if self._structure is None:
            self._structure_factors = self._unbuilt()
            blocks = assemble(self._structure_factors, self.space, self._builder())
            self._structure = BlockDiagonalLinearOperator(blocks, self.space)
        return self._structure

    @abstractmethod
    def _builder(self) -> Build:
        """Return what makes a block from its factors."""

    @abstractmethod
    def _inverse_blocks(self, damping: Damping) -> Blocks:
        """Return the damped inverses of all blocks."""

    def _unbuilt(self) -> list[BlockFactors]:  # of what structure and inverses are built
        sums = self._computed()
        return self._structure_factors or self._factors(sums)

    def _factors(self, sums: Sums, without: Collection[int] = ()) -> list[BlockFactors]:
        return normalized(sums, self.risk.scale(sums.terms), self._options, without)

    @in_default_modes
    def inverse(
        self,
        damping: float | tuple[float, float] = 0.0,
        use_heuristic_damping: bool = False,
        min_damping: float = 1e-8,
        use_exact_damping: bool = False,
        retry_double_precision: bool = True,
    ) -> KFACInverseLinearOperator:
        """Return the damped inverse, see ``KFACInverseLinearOperator``."""
        damped = damping, use_heuristic_damping, min_damping, use_exact_damping
        return KFACInverseLinearOperator(self, *damped, retry_double_precision)

    def to_device(self, device: torch.device | str) -> "KroneckerFactoredLinearOperator":
        """Move the operator, and the user's module and loss, to another device."""
        super().to_device(device)
        self._reconsider()
        self._forget()
        if self._sums is not None:
            self._sums.to(self.space.device)
        return self
