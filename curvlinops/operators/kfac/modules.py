"""Reports of the blocks of an approximation, and factors by module."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import Block, Term
from curvlinops.operators.kfac.options import FisherType
from curvlinops.structured.factor import Factor

#: The reason of a block whose factors are not shown.
_ELSEWHERE = "on another process"


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


def report(blocks: Iterable[Block], fisher_type: FisherType) -> list[BlockReport]:
    """Return the structure of each block."""
    reports = []
    for block in blocks:
        matrices = [factor.tensor for term in block.terms for factor in term.factors]
        if block.is_exact and block.is_here:
            matrices.append(block.matrix)
        shapes = tuple(tuple(x.shape) for x in matrices)
        why = _reason(block.terms, fisher_type) if block.is_here else _ELSEWHERE
        reports.append(BlockReport(block.names, block.structure, shapes, block.reason or why))
    return reports


def _reason(terms: Iterable[Term], fisher_type: FisherType) -> str:
    """Return the reasons why matrices of a Kronecker product are diagonal."""
    reasons = []
    for term in terms:
        if term.inputs is not None and term.inputs.is_diagonal:
            why = "inputs are looked up" if term.shape.one_hot_inputs else "it is too large"
            reasons.append(f"input factor diagonal: {why}")
        if term.gradients.is_diagonal:
            is_identity = fisher_type is FisherType.FORWARD_ONLY
            why = "the identity by fisher_type" if is_identity else "it is too large"
            reasons.append(f"gradient factor diagonal: {why}")
    return "; ".join(reasons)


class ModuleFactors(NamedTuple):
    """The factors of a module's weight, or of its bias if its weight is no parameter."""

    term: Term
    #: The module's parameters among all parameters, as in ``{"weight": 0, "bias": 1}``.
    positions: dict[str, int]

    @property
    def inputs(self) -> Tensor | None:
        """A, ``[I, I]``, or ``[I]`` if it is diagonal, perhaps by group; ``None`` for a bias."""
        return None if self.term.inputs is None else _single(self.term.inputs)

    @property
    def gradients(self) -> Tensor:
        """B, ``[O, O]``, likewise."""
        return _single(self.term.gradients)


def by_module(blocks: Iterable[Block], space: ParameterSpace) -> dict[str, ModuleFactors]:
    """Return the factors by module, or by weight where a module has several, or there is none."""
    single = {
        view.name: block.terms[0]
        for block in blocks
        if (view := block.views[0]).size == prod(space.shapes[view.name]) and len(block.terms) == 1
    }
    weights = {name: term for name, term in single.items() if term.inputs is not None}
    owners = [name.rpartition(".")[0] for name in weights]
    index_of = {name: index for index, name in enumerate(space.names)}
    modules = {}
    for name, term in weights.items():
        module, _, attribute = name.rpartition(".")
        key, positions = name, {"weight": index_of[name]}
        if attribute == "weight" and owners.count(module) == 1:
            key, bias = module, name.removesuffix(attribute) + "bias"
            if bias in index_of:
                positions["bias"] = index_of[bias]
        modules[key] = ModuleFactors(term, positions)
    for name, term in single.items():
        module, _, attribute = name.rpartition(".")
        weight = name.removesuffix(attribute) + "weight"
        if term.inputs is None and attribute == "bias" and weight not in index_of:
            modules[module] = ModuleFactors(term, {"bias": index_of[name]})
    return modules


def check_pairs(
    modules: Mapping[str, ModuleFactors],
    blocks: Iterable[Block],
    space: ParameterSpace,
    fisher_type: FisherType,
) -> None:
    """Refuse, by name, blocks that are not ``B (x) A`` for a module's weight, or B for its bias.

    Programs that read factors by module, and multiply them by parameters themselves, rely on it.
    """
    ndim = 1 if fisher_type is FisherType.FORWARD_ONLY else 2
    for block in blocks:
        module, _, attribute = block.names[0].rpartition(".")
        known = modules.get(module)
        size = prod(space.shapes[block.names[0]])
        is_plain = all(
            term.shape.view.is_all(size) and term.shape.groups == 1 for term in block.terms
        )
        if known is not None and len(block.terms) == 1 and is_plain:
            A, B = known.inputs, known.gradients
            is_bias = attribute == "bias" and (
                A is None or block.terms[0].gradients is known.term.gradients
            )
            is_dense = B.ndim == ndim and (A is None or A.ndim == 2)
            if is_dense and (is_bias or (attribute == "weight" and A is not None)):
                continue
        raise NotImplementedError(
            f"The block of {', '.join(block.names)} is not one Kronecker product of two dense "
            "matrices for a module's weight. See report(), and read input_covariances and "
            "gradient_covariances, or leave these parameters out of params."
        )


def _single(factor: Factor) -> Tensor:
    """Return a factor without the axis of groups if there is one group only."""
    return factor.tensor[0] if factor.groups == 1 else factor.tensor
