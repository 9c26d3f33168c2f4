"""Reports of the blocks of an approximation, and factors by module."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.layout import BlockFactors, Product
from curvlinops.operators.kfac.options import FisherType
from curvlinops.structured.factor import Factor
from curvlinops.support.torch_modes import in_default_modes


class BlockReport(NamedTuple):
    """The structure of a diagonal block of an approximation.

    Attributes:
        names: Its parameters.
        structure: ``"kronecker"``, ``"dense"``, ``"diagonal"``, or ``"zero"``.
        factors: The shapes of its matrices: for each Kronecker product gradient and input factor,
            ``(G, O, O)`` and ``(G, I, I)``, where diagonals have one axis less.
        reason: Why it, or a matrix of it, has this structure; empty for two full factors.
    """

    names: tuple[str, ...]
    structure: str
    factors: tuple[tuple[int, ...], ...]
    reason: str


def report(factors: Iterable[BlockFactors], fisher_type: FisherType) -> list[BlockReport]:
    """Return the structure of each block."""
    reports = []
    for block, products, matrix in factors:
        matrices = [factor.tensor for product in products for factor in product.factors]
        if block.is_exact:
            matrices.append(matrix)
        shapes = tuple(tuple(x.shape) for x in matrices)
        reason = block.reason or _reason(products, fisher_type)
        reports.append(BlockReport(block.names, block.structure, shapes, reason))
    return reports


def _reason(products: Iterable[Product], fisher_type: FisherType) -> str:
    """Return the reasons why matrices of a Kronecker product are diagonal."""
    reasons = []
    for product in products:
        if product.inputs is not None and product.inputs.is_diagonal:
            why = "inputs are looked up" if product.kind.one_hot_inputs else "it is too large"
            reasons.append(f"input factor diagonal: {why}")
        if product.gradients.is_diagonal:
            is_identity = fisher_type is FisherType.FORWARD_ONLY
            why = "the identity by fisher_type" if is_identity else "it is too large"
            reasons.append(f"gradient factor diagonal: {why}")
    return "; ".join(reasons)


class ModuleFactors(NamedTuple):
    """The factors of a module's weight, or of its bias if its weight is no parameter.

    Attributes:
        product: The Kronecker product.
        positions: The places of the module's parameters among all: ``{"weight": 0, "bias": 1}``.
    """

    product: Product
    positions: dict[str, int]

    @property
    def inputs(self) -> Tensor | None:
        """A, ``[I, I]``, or ``[I]`` if it is diagonal; ``None`` for a bias.

        With several groups there is an axis of these in front.
        """
        return None if self.product.inputs is None else _single(self.product.inputs)

    @property
    def gradients(self) -> Tensor:
        """B, ``[O, O]``, likewise."""
        return _single(self.product.gradients)


def by_module(factors: Iterable[BlockFactors], space: ParameterSpace) -> dict[str, ModuleFactors]:
    """Return the factors of the modules whose weights are Kronecker products.

    Args:
        factors: The matrices of all blocks.
        space: All parameters.

    Returns:
        Factors by the name of the module; by the name of the parameter where a module has several
        weights, or where there is no module.
    """
    single = {
        view.name: each.products[0]
        for each in factors
        if (view := each.block.slices[0]).size == prod(space.shapes[view.name])
        and len(each.products) == 1
    }
    weights = {name: product for name, product in single.items() if product.inputs is not None}
    owners = [name.rpartition(".")[0] for name in weights]
    places = {name: place for place, name in enumerate(space.names)}
    found = {}
    for name, product in weights.items():
        module, _, own = name.rpartition(".")
        key, positions = name, {"weight": places[name]}
        if own == "weight" and owners.count(module) == 1:
            key, bias = module, name.removesuffix(own) + "bias"
            if bias in places:
                positions["bias"] = places[bias]
        found[key] = ModuleFactors(product, positions)
    for name, product in single.items():
        module, _, own = name.rpartition(".")
        weight = name.removesuffix(own) + "weight"
        if product.inputs is None and own == "bias" and weight not in places:
            found[module] = ModuleFactors(product, {"bias": places[name]})
    return found


def check_pairs(
    modules: Mapping[str, ModuleFactors],
    factors: Iterable[BlockFactors],
    space: ParameterSpace,
    fisher_type: FisherType,
) -> None:
    """Check that each block is ``B (x) A`` for a module's weight, or B for its bias.

    Programs that read factors by module, and multiply them by parameters themselves, rely on it.

    Args:
        modules: The factors by module.
        factors: The matrices of all blocks.
        space: All parameters.
        fisher_type: Says whether B is the identity, which is kept as its diagonal.

    Raises:
        NotImplementedError: If a block is anything else, naming its parameters.
    """
    ndim = 1 if fisher_type is FisherType.FORWARD_ONLY else 2
    for block, products, _ in factors:
        module, _, own = block.names[0].rpartition(".")
        known = modules.get(module)
        size = prod(space.shapes[block.names[0]])
        is_plain = all(kind.view.is_all(size) and kind.groups == 1 for kind in block.kinds)
        if known is not None and len(products) == 1 and is_plain:
            A, B = known.inputs, known.gradients
            is_bias = own == "bias" and (A is None or products[0].gradients is known[0].gradients)
            is_dense = B.ndim == ndim and (A is None or A.ndim == 2)
            if is_dense and (is_bias or (own == "weight" and A is not None)):
                continue
        raise NotImplementedError(
            f"The block of {', '.join(block.names)} is not one Kronecker product of two dense "
            "matrices for a module's weight. See report(), and read input_covariances and "
            "gradient_covariances, or leave these parameters out of params."
        )


class FactorsByModule(Mapping):
    """Matrices by module. A copy is made when one is read; they cannot be replaced.

    Args:
        matrices: The matrices, or their diagonals.
        dense: Whether diagonals are read as matrices.
    """

    def __init__(self, matrices: Mapping[str, Tensor], dense: bool):
        self._matrices, self._dense = matrices, dense

    @in_default_modes
    def __getitem__(self, name: str) -> Tensor:
        """Return a copy of the matrix of a module."""
        matrix = self._matrices[name]
        return matrix.diag_embed() if self._dense and matrix.ndim == 1 else matrix.clone()

    def __setitem__(self, name: str, matrix: Tensor) -> None:
        """Refuse to replace a matrix."""
        raise TypeError(
            "Factors are read-only. Damp with inverse(damping=...), or with damped(delta)."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


def _single(factor: Factor) -> Tensor:
    """Return a factor without the axis of groups if there is one group only."""
    return factor.tensor[0] if factor.groups == 1 else factor.tensor
