"""Second moments of gradients in the eigenbasis of a Kronecker product."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.embedding import Lookup
from curvlinops.layers.factors import Kind, relation
from curvlinops.layers.forms import Form, squared_sum
from curvlinops.layers.outer import IN_ORDER, Arrangement, Inputs, Outer, sum_of
from curvlinops.layers.parts import Part
from curvlinops.operators.kronecker.blocks import BlockFactors, Product, factors_of
from curvlinops.operators.kronecker.storage import take, take_squares
from curvlinops.risk.distributed import Ranks
from curvlinops.structured.factor import Factor, decompose, identity


@dataclass(frozen=True)
class Basis:
    """An orthogonal basis of a block's matrices ``[G, O, I]``.

    Attributes:
        kind: The shape of these matrices.
        outputs: The basis of their columns; the identity for the standard basis.
        inputs: The basis of their rows; ``None`` for biases.
        bias: The last entry of all inputs if the block has a bias.
    """

    kind: Kind
    outputs: Factor
    inputs: Factor | None
    bias: float | None

    def to(self, device: torch.device | str) -> "Basis":
        """Return the basis on another device."""
        moved = (
            None if factor is None else factor.to(torch.device(device), factor.tensor.dtype)
            for factor in (self.outputs, self.inputs)
        )
        return Basis(self.kind, *moved, self.bias)

    def shared(self, ranks: Ranks) -> "Basis":
        """Return the first rank's basis: eigenvectors are not unique."""
        if ranks.size == 1:
            return self
        same = (
            axis if _is_identity(axis) else Factor(ranks.first(axis.tensor), symmetric=False)
            for axis in (self.outputs, self.inputs)
        )
        return Basis(self.kind, *same, self.bias)

    def turned(self, kind: Kind) -> "Basis":
        """Return the basis of the transposed matrices, which are of another kind."""
        return Basis(kind, self.inputs, self.outputs, self.bias)

    def second_moment(self, parts: Sequence[Part]) -> Tensor:
        """Return the sum over samples of squared gradients in this basis, ``[G, O, I]``.

        Args:
            parts: All uses of the block's weight on a batch.
        """
        forms = [part.form.to(self.outputs.tensor.dtype) for part in parts]
        whole = sum_of(forms)
        if isinstance(whole, Outer):
            return self._of_matrices(whole)
        if all(isinstance(form, Lookup) for form in forms) and _is_identity(self.inputs):
            indices = torch.cat([form.indices for form in forms], dim=1)
            g = torch.cat([form.g for form in forms], dim=2).unsqueeze(3)
            g = _rotated(g, self.outputs).squeeze(3)
            shape = forms[0].num_rows, g.shape[-1]
            return Lookup(indices, g, shape).sum_of_squares().T.unsqueeze(0)
        return self._of_rows(whole, self.kind.arrangement)

    def _of_matrices(self, form: Outer) -> Tensor:
        """Square and add sums of outer products, rotating these or what they are made of."""
        positions, groups, inputs = form.x.shape[1:]
        outputs = form.g.shape[-1]
        of_parts = positions * (inputs**2 + outputs**2)
        of_rows = inputs * outputs * (inputs + outputs)
        basis = self.inputs if of_parts <= of_rows else None
        x = Rotated(form.x, basis, self.bias)
        shape = groups, outputs, x.shape[-1]
        if of_parts <= of_rows:
            return Outer(x, _rotated(form.g, self.outputs), shape).sum_of_squares()
        return self._of_rows(Outer(form.x if self.bias is None else x, form.g, shape), IN_ORDER)

    def _of_rows(self, form: Form, arrangement: Arrangement) -> Tensor:
        """Square and add gradients that are written down and then rotated."""
        total: Tensor | float = 0.0
        matrix = self.kind.groups, self.kind.outputs
        matrix = (*matrix, form.num_entries // prod(matrix))
        for some in form.parts():
            rows = form.rows(some).flatten(0, 1)
            total = total + self._squares(arrangement.undo(rows, 1).reshape(len(rows), *matrix))
        return total

    def _squares(self, rows: Tensor) -> Tensor:
        """Return the sum of squares of gradients ``[P, G, O, I]``, rotated, ``[G, O, I]``."""
        rows = _rotated(rows.permute(0, 2, 1, 3), self.inputs)
        rows = _rotated(rows.permute(0, 3, 2, 1), self.outputs)
        return squared_sum(rows.flatten(1)).reshape(rows.shape[1:]).permute(1, 2, 0)

    def second_moment_of_rows(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum of squared gradients in this basis, ``[G, O, I]``.

        Args:
            weight: Gradients of what a layer uses of the weight, ``[P, entries]``.
            bias: Those of its bias, ``None`` if the block has none.
        """
        dtype, matrix = self.outputs.diagonal().dtype, (self.kind.groups, self.kind.outputs)
        rows = self.kind.arrangement.undo(weight.to(dtype), 1).reshape(len(weight), *matrix, -1)
        if bias is not None:
            rows = torch.cat([rows, bias.to(dtype).reshape(len(bias), *matrix, 1)], 3)
        return self._squares(rows)


class Rotated:
    """Inputs in another basis, possibly with a constant as last entry before.

    Args:
        inputs: Inputs ``[N, S, G, I]``.
        basis: The basis, ``None`` for that in which they are.
        bias: The constant, ``None`` for none.
    """

    def __init__(self, inputs: Inputs, basis: Factor | None, bias: float | None):
        self._inputs, self._basis, self._bias = inputs, basis, bias
        width = inputs.shape[-1] + (bias is not None)
        self.shape = (*inputs.shape[:-1], width)

    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        """Make those of some samples."""
        x = self._inputs[samples]
        if self._bias is not None:
            # where a sample has fewer positions than others, output gradients are zero
            x = torch.cat([x, torch.full_like(x[..., :1], self._bias)], dim=-1)
        return _rotated(x, self._basis)


def bases(factors: Sequence[BlockFactors]) -> dict[int, Basis]:
    """Return the eigenbases of the blocks that are Kronecker products, by number.

    Of a block that is a sum of several, the first one's is taken, except that axes along which
    another one is diagonal keep the standard basis.
    """
    found = {n: each for n, each in enumerate(factors) if each.products}
    matrices = [m for each in found.values() for p in each.products for m in factors_of(p)]
    names = [
        f"A factor of '{each.block.names[0]}'"
        for each in found.values()
        for product in each.products
        for _ in factors_of(product)
    ]
    decompose(matrices, names, [False] * len(matrices))
    return {number: _basis(each) for number, each in found.items()}


def _axes_of(factors: BlockFactors) -> tuple[Factor, Factor | None]:
    """Return the factors of a block whose eigenvectors are its basis, of outputs and of inputs."""
    first: Product = factors.products[0]
    outputs, inputs = first.gradients, first.inputs
    for other in factors.products[1:]:
        is_diagonal = other.inputs is not None and other.inputs.is_diagonal
        if is_diagonal and not first.inputs.is_diagonal:
            # those of lookups are the outputs of a head with the same weight
            if relation(first.kind, other.kind) == "transposed":
                outputs = other.inputs
            else:
                inputs = other.inputs
    return outputs, inputs


def unpacked(prefix: str, factors: BlockFactors, rest: dict[str, Tensor]) -> tuple[Basis, Tensor]:
    """Return a block's basis and second moments from a saved state."""
    kind, scale, axes = factors.products[0].kind, factors.block.scale, _axes_of(factors)
    like = axes[0].tensor
    sizes = kind.outputs, kind.inputs + (scale is not None)
    shape = (kind.groups, *sizes)
    moment = take_squares(rest, f"{prefix}moment", shape, like.dtype, matrix=False)
    basis: list[Factor | None] = []
    for axis, size, name in zip(axes, sizes, ("outputs", "inputs"), strict=True):
        key = f"{prefix}basis.{name}"
        if axis is None:
            basis.append(None)
        elif not axis.is_diagonal or key in rest:  # more data may have made an axis diagonal
            shape = (kind.groups, size, size)
            basis.append(Factor(take(rest, key, shape, like.dtype), symmetric=False))
        else:
            basis.append(identity(size, like))
    return Basis(kind, *basis, scale), moment


def _basis(factors: BlockFactors) -> Basis:
    outputs, inputs = _axes_of(factors)
    return Basis(
        factors.products[0].kind,
        outputs.eigenvectors(),
        None if inputs is None else inputs.eigenvectors(),
        factors.block.scale,
    )


def _is_identity(factor: Factor | None) -> bool:
    return factor is None or factor.is_identity


def _rotated(x: Tensor, basis: Factor | None) -> Tensor:
    """Multiply ``[*, G, n]`` by the transposed basis of each group."""
    if _is_identity(basis):
        return x
    Q = basis.tensor
    if len(Q) == 1:
        return (x.reshape(-1, x.shape[-1]) @ Q[0]).view(x.shape)
    return torch.einsum("...gi,gij->...gj", x, Q)
