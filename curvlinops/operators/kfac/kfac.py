"""Kronecker-factored approximate curvature: the base class of KFAC and EKFAC, and KFAC."""

import inspect
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from math import fsum
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from curvlinops.algorithms.sampling import Estimate
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.operator import PartLinearOperator, TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.block_sums import BlockSum, add_block_sums
from curvlinops.operators.kfac.blocks import BASES, WEIGHT, Block, Stack, Uses
from curvlinops.operators.kfac.captured import CapturedLayer, captured_layers
from curvlinops.operators.kfac.distance import distances, exact_products, relative
from curvlinops.operators.kfac.estimate import add_batch
from curvlinops.operators.kfac.fit import known_matrices, passes, sums_of_pass
from curvlinops.operators.kfac.inverse import (
    Damping,
    KFACInverseLinearOperator,
    inverses,
    note_undecided,
    warn_of_undecided,
)
from curvlinops.operators.kfac.layout import assemble, matrices
from curvlinops.operators.kfac.modules import (
    BlockReport,
    ModuleFactors,
    by_module,
    check_pairs,
    report,
)
from curvlinops.operators.kfac.options import (
    Fallback,
    FisherType,
    FitType,
    KFACType,
    Options,
    reduced_parameters,
)
from curvlinops.operators.kfac.partition import Placement
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.with_structure import StructuredDataLinearOperator, of_structure
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batch, Batches, is_pair
from curvlinops.risk.key import check_operator, key_of
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.support.arguments import check_choice, check_count, check_flag
from curvlinops.support.files import Saved, pack, read, read_parts, unpack, write
from curvlinops.support.rng import DEFAULT_SEED
from curvlinops.support.torch_internals import version_of
from curvlinops.support.torch_modes import in_default_modes

#: What to do about factors of another operator.
_OTHERS = (
    " Factors are read by an operator of the same options, model, loss and data. To use the matrix "
    "with others, save K.structure or an inverse, and read it by curvlinops.load(path)."
)

#: The options on which factors depend, beside the treatment of positions, and what is drawn.
_OPTIONS = (
    *("fisher_type", "exact", "separate_weight_and_bias", "max_factor_size", "fallback"),
    *("fit", "steps"),
)

P = ParamSpec("P")
Operator = TypeVar("Operator")


@dataclass(eq=False, repr=False, kw_only=True)
class KroneckerFactoredLinearOperator(StructuredDataLinearOperator):
    """A block-diagonal approximation by Kronecker products of small matrices, the factors.

    Factors are computed at the first use and then kept: they do not follow changes of the model or
    of the data. ``compute_kronecker_factors`` computes them again. ``linearized()`` and ``cache``
    have no effect. With a ``process_group``, all processes compute the factors together.

    Averages over inputs leave padding out if the model has a method ``attention_masks(X)``. It
    returns a list of masks ``[N, T]``, zero at padding. A layer's positions do not count where a
    mask of their shape is zero and the backpropagated vectors are zero. A mask that is zero where a
    vector is not zero belongs to other sequences.

    Args:
        fisher_type: The backpropagated vectors, see ``FisherType``.
        mc_samples: Number of would-be gradients for each term (``"mc"``), or of draws of random
            signs (``"type-2"``, if samples have several terms).
        kfac_approx: The treatment of positions that share a weight, see ``KFACType``: one for all
            layers, or a mapping from names of modules or parameters; the other layers use the
            expand setting.
        num_per_example_loss_terms: The number of terms of a sample, which is checked. Default: no
            check.
        separate_weight_and_bias: Whether biases have their own blocks, or share the weight's.
        seed: Seeds the samples, together with the index of the batch.
        fallback: The block of parameters whose use in the model has no Kronecker structure:
            ``"error"``, the ``"diagonal"`` of their exact block, or the whole block (``"dense"``).
        fit: How the factors of layers are fitted, see ``FitType``. All but ``"kfac"`` take further
            passes over the data, and cannot be merged. Blocks that are sums of several products, as
            for an embedding tied to the head, keep the factors of KFAC.
        steps: How often both factors are computed in turn, B first (``"frobenius"`` and ``"kl"``).
            Each step takes two passes.
        exact: Whether ``"type-2"`` backpropagates each term on its own, which is exact also if the
            terms of a sample interact in the model. It takes a backward pass for each position.
        max_factor_size: The largest size of a factor. Only the diagonal of larger ones is computed.
        factor_placement: With a ``process_group``: ``"replicate"``, so that each process has all
            factors; or ``"partition"``, so that it has the factors of some blocks. Then all
            processes together call products, inverses and other quantities.

    Raises:
        ValueError: If an option is unknown, or does not fit the others; when factors are computed,
            if a weight and a bias in one block have different settings.
        NotImplementedError: If the loss does not support the type of Fisher matrix; when factors
            are computed, if a parameter has no structure, and no fallback was chosen.
    """

    fisher_type: str = FisherType.MC
    mc_samples: int = 1
    kfac_approx: str | Mapping[str, str] = KFACType.EXPAND
    num_per_example_loss_terms: int | None = None
    separate_weight_and_bias: bool = True
    seed: int = DEFAULT_SEED
    fallback: str = Fallback.ERROR
    fit: str = FitType.KFAC
    steps: int = 1
    exact: bool = False
    max_factor_size: int = 16384
    factor_placement: str = "replicate"

    _per_sample = True
    #: Whether eigenvalues in the factors' eigenbasis are those of the data.
    _is_corrected = False

    def __post_init__(self) -> None:
        """Begin without factors."""
        super().__post_init__()
        self._set_sums(None)

    def _check_options(self) -> None:
        kinds = {"fisher_type": FisherType, "fallback": Fallback, "fit": FitType}
        chosen = {name: check_choice(name, getattr(self, name), x) for name, x in kinds.items()}
        least = {"mc_samples": 1, "seed": 0, "steps": 1, "max_factor_size": 0}
        counts = {name: check_count(name, getattr(self, name), x) for name, x in least.items()}
        vars(self).update({name: str(x) for name, x in chosen.items()} | counts)
        check_choice("factor_placement", self.factor_placement, ("replicate", "partition"))
        check_flag("separate_weight_and_bias", self.separate_weight_and_bias)
        check_flag("exact", self.exact)
        if self.num_per_example_loss_terms is not None:
            self.num_per_example_loss_terms = check_count(
                "num_per_example_loss_terms", self.num_per_example_loss_terms
            )
        reduced = reduced_parameters(self.kfac_approx, self.risk.space.names)
        joint = not self.separate_weight_and_bias
        self._options = Options(exact=self.exact, reduced=reduced, joint=joint, **chosen, **counts)
        self._options.check(self.risk.loss)
        if self._is_corrected and self._options.fisher_type is FisherType.FORWARD_ONLY:
            raise ValueError(
                "EKFAC needs gradients; fisher_type='forward-only' exists for KFAC only."
            )
        is_divided = self.factor_placement == "partition" and self.risk.ranks.size > 1
        self._placement = Placement(self.risk.ranks, {} if is_divided else None)
        if len(self._blocks) > 1:
            name = type(self).__name__
            raise ValueError(f"{name} has a block for each layer: block_sizes cannot be chosen.")

    # products need the factors alone
    linearized = TorchLinearOperator.linearized

    def _arguments(self) -> dict[str, Any]:
        reduced, every = self._options.reduced, set(self.space.names)
        approx = "expand" if not reduced else "reduce" if reduced == every else "mixed"
        return super()._arguments() | {"kfac_approx": approx}

    # --- sums over the data

    @in_default_modes
    def compute_kronecker_factors(self) -> None:
        """Compute the factors from all data, again if they exist already."""
        sums = self._compute(self._no_sums(self.space.names))
        self._set_sums(sums)

    def _no_sums(self, names: list[str]) -> FactorSums:
        """Return empty sums for some parameters."""
        space = self.space.restricted(names)
        return FactorSums(space, self._options, placement=self._placement)

    @property
    def _team(self) -> Any:
        """The processes that multiply together: each alone if it has all factors and vectors."""
        return self.risk.ranks.in_step if self._placement.is_divided else self.domain.team

    @in_default_modes
    def update(self, batch: tuple[Any, Any], decay: float = 1.0) -> None:
        """Add a batch to the data from which the factors are computed.

        Args:
            batch: A pair ``(X, y)`` like those in the data.
            decay: The factor of the sums over all earlier data. Below one, factors
                are exponentially weighted means (sums for a loss with reduction ``"sum"``).

        Raises:
            ValueError: If ``batch`` is no pair, or ``decay`` not between zero and one.
            RuntimeError: If a parameter is used in ways that do not go together with those before.
        """
        with self.risk.ranks.raise_on_all_ranks():
            if not is_pair(batch):
                raise ValueError(
                    f"update() takes a batch, as in K.update((X, y)), got {type(batch).__name__}."
                )
            if not 0.0 <= decay <= 1.0:
                raise ValueError(f"decay must be between 0 and 1, got {decay}.")
        sums = self._factor_sums()
        batches = Batches([batch], self.batch_size_fn)
        self._add(sums, self._compute(sums, batches), decay)

    @in_default_modes
    def merge(self, other: "KroneckerFactoredLinearOperator") -> None:
        """Add the data of another operator, such as one on another shard of the data.

        The result is the operator on both data sets, except for which labels are sampled: that
        depends on the operators' seeds, which may differ.

        Raises:
            ValueError: If the other one has another class, model, loss or parameters, or other
                options; for EKFAC.
            RuntimeError: If parameters are used in ways that do not go together.
        """
        if self._is_corrected:
            raise ValueError(
                "EKFAC operators cannot be merged, since their eigenvalues belong to different "
                "eigenvectors. Merge KFACLinearOperators, or build one operator on all data."
            )
        if self._placement.is_divided:
            raise ValueError("Operators with factor_placement='partition' cannot be merged.")
        if self._options.fit is not FitType.KFAC:
            raise ValueError(
                f"Operators with fit='{self.fit}' cannot be merged, since each factor was fitted "
                "together with the other. Build one operator on all data."
            )
        if type(other) is not type(self):
            raise ValueError("Only operators of one class can be merged.")
        if other.risk.ranks.group is not self.risk.ranks.group:
            raise ValueError("Only operators with the same process_group can be merged.")
        self.space.check_compatible(other.space)
        # both are evaluated on the other one's first batch
        key, data = key_of(other, other._key_options(drawn=False)), other.risk.data
        check_operator("other operator", key, self, self._key_options(drawn=False), data=data)
        sums, more = self._factor_sums(), other._factor_sums()
        uses = sums.uses.union(more.uses)
        more = more.with_uses(uses)
        copies = {stack: x.clone() for stack, x in more.tensors.items()}
        self._add(sums.with_uses(uses), replace(more, tensors=copies))

    def _factor_sums(self) -> FactorSums:
        if self._sums is None:
            self.compute_kronecker_factors()
        if written := [x for x, version in self._shown if version_of(x) != version]:
            self._check_written(written)
            self._set_sums(self._sums)
        return self._sums

    def _add(self, sums: FactorSums, more: FactorSums, decay: float = 1.0) -> None:
        """Keep the means of earlier data, times a decay, and of more, whose memory is taken."""
        sums = sums.plus(more, decay)
        sums.normalize(self.risk.scale)
        self._set_sums(sums)

    def _check_written(self, factors: Iterable[Tensor]) -> None:
        """Refuse writes to factors that are no sums over data, or of which others were computed."""
        sums = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in self._sums.tensors.values()]
        if all(any(a <= x.data_ptr() < b for a, b in sums) for x in factors):
            if all(stack.kind not in BASES for stack in self._sums.tensors):
                return
            why = "its eigenvalues are those of the data in the factors' eigenbasis"
        else:
            why = "some are the identity, or were put together from several sums over the data"
        raise RuntimeError(
            f"The factors of this {type(self).__name__} were written to, but {why}. Call "
            "compute_kronecker_factors(), and damp by inverse(damping) or damped(delta)."
        )

    def _set_sums(self, sums: FactorSums | None) -> None:
        """Replace the sums, and drop their matrices."""
        self._sums = sums
        self._structure: BlockDiagonalLinearOperator | None = None
        self._made: list[Block] | None = None
        self._shown: list[tuple[Tensor, int]] = []  # factors that users have, and their versions

    def _compute(self, sums: FactorSums, batches: Batches | None = None) -> FactorSums:
        """Return the means over all data, or the sums over batches that follow known sums."""
        new, ranks, first = sums.emptied(), self.risk.ranks, sums.num_batches
        task = "factors" if batches is None else "update"
        with self._on_all_ranks(task), self._batches("factors", batches) as problems:
            for problem, samples in self._forward_passes(problems, new):
                add_batch(new, problem, samples)
            new.check_finite()
        uses = reduce(Uses.union, ranks.gather_objects(new.uses))
        with ranks.raise_on_all_ranks():
            new = new.with_uses(uses)
        new = new.over_ranks()
        if batches is None:
            if WEIGHT not in new.tensors:
                raise ValueError("The data has no sample.")
            self.risk.scale(new.weight)  # raises if there is no term
            new.num_samples = self._num_samples
            new.normalize(self.risk.scale)
        new.num_batches -= first
        for kinds in passes(self._options, batches is not None):
            with ranks.raise_on_all_ranks():
                others = known_matrices(new, kinds, new if batches is None else sums)
            others = new.placement.team.exchange(others, self.device)
            wanted = sums_of_pass(new, kinds, others)
            new.tensors |= self._block_means("fit", new, first, wanted, batches)
        return new

    def _block_means(
        self,
        task: str,
        sums: FactorSums,
        first: int,
        wanted: Mapping[Block, BlockSum],
        batches: Batches | None,
    ) -> dict[Stack, Tensor]:
        """Return the sums of a pass over batches, or all data; means if other sums are means."""
        part = replace(sums.emptied(), num_batches=first)
        with self._on_all_ranks(task), self._batches(task, batches) as problems:
            for problem, samples in self._forward_passes(problems, part):
                add_block_sums(part, problem, samples, wanted)
        part = part.over_ranks()
        if sums.scale is not None:
            part.normalize(self.risk.scale)
        return {stack: x for stack, x in part.tensors.items() if stack != WEIGHT}

    def _forward_passes(
        self, problems: Iterable[BatchProblem], sums: FactorSums
    ) -> Iterator[tuple[BatchProblem, SampleGradients]]:
        """Yield batches that have samples with their forward passes, and count all batches."""
        for problem in problems:
            batch = problem.batch
            numbered = problem.on(Batch(sums.num_batches, batch.X, batch.y), sums.space)
            backward = numbered.rules(SampleBackward, type(self).__name__, True, True)
            samples = backward.capture(numbered)
            self._check_terms(numbered, samples)
            sums.num_batches += 1
            if samples.num_samples:
                yield numbered, samples

    def _check_terms(self, problem: BatchProblem, samples: SampleGradients) -> None:
        expected = self.num_per_example_loss_terms
        if expected is None:
            return
        num_terms = problem.loss.to_terms(samples.output.unsqueeze(0)).shape[1]
        if num_terms != expected * samples.num_samples:
            raise ValueError(
                f"num_per_example_loss_terms is {expected}, but batch {problem.batch.index} has "
                f"{num_terms} terms for {samples.num_samples} samples."
            )

    def _on_all_ranks(self, task: str) -> AbstractContextManager[Any]:
        """Return a context in which all ranks pass over their data, see ``Team``."""
        return self._together(task, reduced=sorted(self._options.reduced))

    @in_default_modes
    def visit_layers(self, visit: Callable[[CapturedLayer], None]) -> float:
        """Show a function the inputs and output gradients of each layer, which make up the factors.

        With c the number that is returned, ``c * sum vec(G) vec(G)^T`` over all vectors, samples
        and batches is the block of the weight that its factors approximate, with G the
        ``weight_gradients()`` of a ``CapturedLayer``. Layers that use a weight several times are
        shown once for each use, and their G have to be added up first. Uses in no product with a
        matrix are not shown.

        Args:
            visit: Is called for each use of a weight on each batch, with a ``CapturedLayer``.

        Returns:
            The normalization c of the empirical risk.

        Raises:
            ValueError: If it is not known which positions of a layer belong to which sample.
        """
        sums, weight = self._no_sums(self.space.names), 0.0
        with self._on_all_ranks("layers"), self._batches("layers") as problems:
            for problem, samples in self._forward_passes(problems, sums):
                for layer in captured_layers(problem, samples, self._options):
                    visit(layer)
                weight = weight + samples.weight
        return self.risk.scale(fsum(self.risk.ranks.gather_objects(float(weight))))

    @in_default_modes
    def distance(self, num_vectors: int = 10, seed: int = 0) -> dict[str, Estimate]:
        """Return how far the blocks are from the exact ones: ``|K - F| / |F|``, Frobenius norms.

        F is the block of the matrix that the operator approximates, with the model and the data as
        they are now: the GGN, the Fisher matrix of the same sampled labels (``"mc"``), or the
        empirical Fisher matrix, which adds up the terms of a sample first. Products with random
        signs estimate both norms, in one pass over the data. With ten vectors it takes one to two
        times as long as the factors for layers with many positions, and up to eight times for
        others.

        Args:
            num_vectors: The number of random vectors. A block of at most so many entries is
                compared exactly.
            seed: Seeds the vectors.

        Returns:
            The distance and its standard error, by the first parameter of a block. Blocks that
            are no Kronecker products are left out. It is zero where both are zero, as without any
            gradient. ``plot_by_layer`` draws the distances.

        Raises:
            ValueError: If ``num_vectors`` is below two; with ``fisher_type="forward-only"``; if
                samples interact.
        """
        num_vectors = check_count("num_vectors", num_vectors, at_least=2)
        seed = check_count("seed", seed, at_least=0)
        if self._options.fisher_type is FisherType.FORWARD_ONLY:
            raise ValueError(
                "distance() needs gradients; with fisher_type='forward-only' there are none."
            )
        sums = self._factor_sums()
        like = torch.empty(0, dtype=sums.space.dtype, device=sums.space.device)
        wanted = exact_products(sums.structure, like, num_vectors, seed)
        products = self._block_means("distance", sums, 0, wanted, None)
        with self.risk.ranks.raise_on_all_ranks():
            stacks = [stack for stack in self._stacks() if stack.terms]
            own = distances(stacks, wanted.values(), products)
        every = ChainMap(*sums.placement.team.gather_objects(own))
        return {name: relative(*every[name]) for name in self.space.names if name in every}

    # --- what was computed

    @property
    def blocks(self) -> dict[tuple[str, ...], StructuredLinearOperator]:
        """The diagonal blocks by the names of their parameters."""
        return self.structure.blocks

    def report(self) -> list[BlockReport]:
        """Return the structure of each diagonal block, and the reason for it."""
        return report(self._made_blocks(), self._options.fisher_type)

    @property
    @in_default_modes
    def input_covariances(self) -> dict[str, Tensor]:
        """A by module, for modules whose weight's block is one Kronecker product.

        ``[I, I]``; for embeddings its diagonal ``[I]``; for convolutions with several groups
        ``[G, I, I]``. They are the operator's own: what is written to them counts. EKFAC refuses
        it, since its eigenvalues belong to the factors of the data.
        """
        return self._by_module("inputs")

    @property
    @in_default_modes
    def gradient_covariances(self) -> dict[str, Tensor]:
        """B by module, ``[O, O]`` or ``[G, O, O]``; also for biases without weight.

        Its diagonal, ``[O]``, if the block is forward-only, or if it is too large for a matrix.
        For writing see ``input_covariances``.
        """
        return self._by_module("gradients")

    @property
    def mapping(self) -> dict[str, dict[str, int]]:
        """The positions of the modules' weights and biases in ``params``."""
        return {name: dict(module.positions) for name, module in self._modules().items()}

    def _modules(self) -> dict[str, ModuleFactors]:
        return by_module(self._own_blocks(), self.space)

    def _by_module(self, factor: str) -> dict[str, Tensor]:
        """Return factors by module, and remember their versions."""
        found = {name: getattr(module, factor) for name, module in self._modules().items()}
        factors = {name: x for name, x in found.items() if x is not None}
        self._shown += [(x, version_of(x)) for x in factors.values()]
        return factors

    def _dense_by_module(self, factor: str) -> dict[str, Tensor]:
        self._check_pairs()
        factors = self._by_module(factor).items()
        return {name: x.diag_embed() if x.ndim == 1 else x for name, x in factors}

    # names that published programs read, which rely on one dense pair for each weight

    def _check_pairs(self) -> None:
        fisher_type = self._options.fisher_type
        check_pairs(self._modules(), self._own_blocks(), self.space, fisher_type)

    @property
    def _input_covariances(self) -> dict[str, Tensor]:
        return self._dense_by_module("inputs")

    @property
    def _gradient_covariances(self) -> dict[str, Tensor]:
        return self._dense_by_module("gradients")

    @property
    def _mapping(self) -> dict[str, dict[str, int]]:
        self._check_pairs()
        return self.mapping

    # --- saving

    def _key_options(self, drawn: bool = True) -> dict[str, Any]:
        """Return the options on which factors depend, perhaps without those of what is drawn."""
        names = list(_OPTIONS)
        if drawn and self.fisher_type in (FisherType.MC, FisherType.TYPE2):
            names += ["mc_samples", "seed"]
        options = {name: getattr(self, name) for name in names}
        return options | {"reduced": sorted(self._options.reduced)}

    @in_default_modes
    def state_dict(self) -> dict[str, Any]:
        """Return the factors as tensors by name, and metadata as a string.

        They belong to the options, the model, the loss and the data of the operator. After
        ``update`` or ``merge``, they come from other data and perhaps from an earlier model, and
        belong to options, loss and shapes only.

        Their weights are among them, so that more data can be added after loading. Do not write to
        them: they share memory with the operator.
        """
        if self._placement.is_divided:
            raise ValueError(
                "Each process has a part of the factors, because of factor_placement='partition'. "
                "To write them to files, call curvlinops.write_factors."
            )
        sums = self._factor_sums()
        key = key_of(self, self._key_options(), with_numbers=not sums.is_updated)
        return pack(sums, key)

    @in_default_modes
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the factors by a copy of saved ones.

        Raises:
            ValueError: If these are of other parameters, options, or another loss.
        """
        copies = {n: x.clone() if isinstance(x, Tensor) else x for n, x in state_dict.items()}
        self._load([unpack(copies, FactorSums, self.device)])

    def _load(self, parts: Iterable[Saved], directory: Path | None = None) -> None:
        with self.risk.ranks.sending():
            parts = list(parts)
            source = f"directory {directory}" if directory else parts[0].source
            key = parts[0].key if parts else {}
        if parts:
            check_operator(parts[0].source, key, self, self._key_options(), _OTHERS)
        number, values = self._num_samples, (x.value for x in parts)
        sums = FactorSums.joined(source, values, self.space, self._options, number)
        sums = replace(sums, placement=self._placement)
        self._set_sums(sums.divided().own() if sums.placement.is_divided else sums)

    @property
    def _num_samples(self) -> int | None:
        """The number of samples in the data of all processes, which call it together, if known."""
        numbers = self.risk.ranks.gather_objects(self.risk.data.num_samples)
        return None if None in numbers else sum(numbers)

    @classmethod
    def from_state_dict(
        cls: Callable[P, Operator], state_dict: Mapping[str, Any], *args: P.args, **kwargs: P.kwargs
    ) -> Operator:
        """Build an operator from saved factors and its arguments, without a pass over the data."""
        try:
            inspect.signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                "from_state_dict() takes the state, model_func, loss_func, params and data, in "
                f"this order: {error}."
            ) from error
        operator = cls(*args, **{"check_deterministic": False, **kwargs})
        operator.load_state_dict(state_dict)
        return operator

    def save(self, path: str | Path) -> None:
        """Write the factors to a safetensors file."""
        write(self.state_dict(), path)

    @in_default_modes
    def load(self, path: str | Path) -> None:
        """Replace the factors by those in a file, which are moved to the operator's device.

        The path may also be a directory of ``write_factors``. On the CPU files are mapped to
        memory: they must not be written to afterwards. ``save`` replaces files, and does not write
        to them.

        Raises:
            ValueError: If there are no factors, or they belong to another model or loss, other data
                or options.
        """
        path = Path(path)
        if path.is_dir():
            self._load(read_parts(path, FactorSums, self.device), directory=path)
        else:
            self._load([read(path, FactorSums, self.device)])

    # --- the structured matrix

    @property
    @in_default_modes
    def structure(self) -> BlockDiagonalLinearOperator:
        """The approximation as a block-diagonal operator."""
        stacks = self._stacks()
        if self._structure is None:
            self._structure = BlockDiagonalLinearOperator(*assemble(stacks, self._sums))
        return self._structure

    def _damped_inverse(self, damping: Damping) -> tuple:
        """Return the arguments of the damped inverse, as of a block-diagonal operator."""
        # the structure keeps the eigendecompositions for other dampings
        arguments = damping.of_gradients, damping.retry_double_precision
        stacks = self.structure._each(lambda block: block.inverse(*arguments))
        return self.structure._arguments_with(stacks, self.space)

    def _stacks(self) -> list[Block]:
        """Return all blocks with their matrices, equal ones as stacks."""
        sums = self._factor_sums()
        if self._made is None:
            self._made = matrices(sums)
        return self._made

    def _made_blocks(self) -> list[Block]:
        """Return all blocks with their matrices, one by one."""
        made = {block.views: block for stack in self._stacks() for block in stack.parts}
        return [made[block.views] for block in self._factor_sums().structure.blocks]

    def _own_blocks(self) -> list[Block]:
        """Return the blocks whose matrices this process has."""
        return [block for block in self._made_blocks() if block.is_here]

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
        self._set_sums(None if self._sums is None else self._sums.to(self.space))
        return self

    _apply = of_structure(StructuredLinearOperator._apply)

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        return _PartOfStructure(self, rows, columns)


class _PartOfStructure(PartLinearOperator):
    """The rows and columns of some tensors, by blocks of the structure at each moment."""

    def _apply(self, columns: Tensor) -> Tensor:
        part = self.operator.structure._part(self.codomain, self.domain)
        return part._checked_apply(columns)


class KFACLinearOperator(KroneckerFactoredLinearOperator):
    """Kronecker-factored approximate curvature (KFAC), block-diagonal with a block for each layer.

    The GGN's block of a weight ``[out, in]`` is approximated by ``B (x) A``, with the second
    moments of the layer's inputs a and output gradients g (those of l_t, without c) over positions
    that share the weight: ``A = mean a a^T`` and ``B = c * sum g g^T`` in the expand setting,
    see ``KFACType`` for the reduce setting. Biases have A = 1. A weight that is
    used several times has one pair of moments over all its uses. Embeddings have a diagonal A.
    Convolutions with several groups have a pair of factors for each group. Normalization layers and
    other parameters that are added, or multiplied elementwise, have their exact block. Those with
    several axes and more than 4096 entries, such as position embeddings, have one block for each
    vector along the last axis.

    Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
    ICML 2015; Grosse and Martens, A Kronecker-factored approximate Fisher matrix for convolution
    layers, ICML 2016; Eschenhagen et al., Kronecker-factored approximate curvature for modern
    neural network architectures, NeurIPS 2023.

    For arguments and errors see ``KroneckerFactoredLinearOperator``.
    """

    def _damped_inverse(self, damping: Damping) -> tuple:
        undecided, stacks = dict[str, float](), self._stacks()
        if not damping.use_exact_damping:
            build = inverses(stacks, damping, undecided)
            inverse = assemble(stacks, self._factor_sums(), build)
            warn_of_undecided(undecided, self.torch_dtype)
            return inverse
        with self.structure.ranks.raise_on_all_ranks():
            for block in self._made_blocks():
                is_sum = damping.of_gradients and len(block.terms) > 1
                if is_sum and block.is_here and not block.operator().can_be_written:
                    raise ValueError(
                        f"Block {', '.join(block.names)!r} is a sum of Kronecker products, too "
                        "large for exact damping. Use inverse(damping), which damps the factors of "
                        "each of them; or leave the parameter out of params; or choose a smaller "
                        "max_factor_size, above which factors are diagonal."
                    )
        inverse = super()._damped_inverse(damping)
        for block, operator in zip(stacks, self.structure._stacks, strict=False):
            factors, shifts = operator._as_factors(), [damping.of_gradients] * 2
            note_undecided(undecided, block, factors, shifts, is_exact=True)
        warn_of_undecided(undecided, self.torch_dtype)
        return inverse
