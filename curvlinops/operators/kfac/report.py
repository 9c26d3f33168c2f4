"""What the blocks of an approximation are, and their factors by module."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from curvlinops.operators.kfac.blocks import BlockFactors, Product, factors_of
from curvlinops.operators.kfac.options import FisherType
from curvlinops.structured.factor import Factor
from curvlinops.support.torch_internals import version_of
from curvlinops.support.torch_modes import in_default_modes

HOW_TO_DAMP = "Damp with inverse(damping=...), or with damped(delta)."


class BlockReport(NamedTuple):
    """What a diagonal block of an approximation is.

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
    """Return what all blocks are."""
    return [
        BlockReport(
            each.block.names,
            each.block.structure,
            tuple(tuple(f.tensor.shape) for p in each.products for f in factors_of(p))
            + (() if each.matrix is None else (tuple(each.matrix.shape),)),
            each.block.reason or _reason(each, fisher_type),
        )
        for each in factors
    ]


def _reason(factors: BlockFactors, fisher_type: FisherType) -> str:
    """Say which matrices of a Kronecker product are diagonal, and why."""
    reasons = []
    for product in factors.products:
        if product.inputs is not None and product.inputs.is_diagonal:
            why = "inputs are looked up" if product.kind.lookup else "it is too large"
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
        positions: Where the module's parameters are among all: ``{"weight": 0, "bias": 1}``.
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


def by_module(factors: Sequence[BlockFactors], names: Sequence[str]) -> dict[str, ModuleFactors]:
    """Return the factors of the modules whose weights are Kronecker products.

    Args:
        factors: What the blocks consist of.
        names: The names of all parameters.

    Returns:
        Factors by the name of the module; by the name of the parameter where a module has several
        weights, or where there is no module.
    """
    single = {
        each.block.names[0]: each.products[0]
        for each in factors
        if len(each.products) == 1 and each.block.places[0] is None
    }
    weights = {name: product for name, product in single.items() if product.inputs is not None}
    owners = [name.rpartition(".")[0] for name in weights]
    places = {name: place for place, name in enumerate(names)}
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
    factors: Sequence[BlockFactors],
    fisher_type: FisherType,
) -> None:
    """Check that each block is ``B (x) A`` for a module's weight, or B for its bias.

    Programs that read factors by module, and multiply them by parameters themselves, rely on it.

    Args:
        modules: The factors by module.
        factors: What the blocks consist of.
        fisher_type: Says whether B is the identity, which is kept as its diagonal.

    Raises:
        NotImplementedError: If a block is anything else, naming its parameters.
    """
    ndim = 1 if fisher_type is FisherType.FORWARD_ONLY else 2
    for block, products, _ in factors:
        module, _, own = block.names[0].rpartition(".")
        known = modules.get(module)
        is_plain = block.places[0] is None and not any(
            not kind.view.is_all(kind.view.size) or kind.groups > 1 for kind in block.kinds
        )
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
    """Matrices by module, read one at a time. They cannot be replaced.

    Args:
        matrices: The matrices, or their diagonals.
        read: Returns what is read of one, given the module's name and the matrix.
    """

    def __init__(self, matrices: Mapping[str, Tensor], read: Callable[[str, Tensor], Tensor]):
        self._matrices, self._read = matrices, read

    def __getitem__(self, name: str) -> Tensor:
        """Return the matrix of a module."""
        return self._read(name, self._matrices[name])

    def __setitem__(self, name: str, matrix: Tensor) -> None:
        """Refuse to replace a matrix."""
        raise TypeError(f"Factors are read-only. {HOW_TO_DAMP}")

    def __iter__(self) -> Iterator[str]:
        """Return the names."""
        return iter(self._matrices)

    def __len__(self) -> int:
        """Return the number of matrices."""
        return len(self._matrices)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


@in_default_modes
def copied(name: str, matrix: Tensor) -> Tensor:
    """Return a copy of a matrix."""
    return matrix.clone()


class Watched:
    """Factors that were read by programs which may write to them in place."""

    def __init__(self):
        self._known: dict[tuple[str, str], tuple[Tensor, int, int | None]] = {}

    def read(self, kind: str, name: str, matrix: Tensor) -> Tensor:
        """Return a dense matrix, the same tensor each time."""
        key = (kind, name)
        if key not in self._known:
            matrix = matrix.diag_embed() if matrix.ndim == 1 else matrix
            self._known[key] = matrix, id(matrix), version_of(matrix)
        return self._known[key][0]

    @property
    def written(self) -> bool:
        """Whether a matrix was changed in place since it was read."""
        # copies of an operator have other tensors, which nobody has read, with other versions
        return any(id(x) == i and version_of(x) != v for x, i, v in self._known.values())


def _single(factor: Factor) -> Tensor:
    """Return a factor without the axis of groups if there is one group only."""
    return factor.tensor[0] if factor.groups == 1 else factor.tensor
