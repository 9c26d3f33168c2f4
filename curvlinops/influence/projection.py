"""Projections of gradients, one matrix at a time: ``P_B^T G P_A``, with few columns P_B and P_A."""

from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod

import torch
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape
from curvlinops.layers.gradients import PerSampleGradient, total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.sample_rows import SampleRows
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator, about
from curvlinops.structured.eigh import DenseMatrix
from curvlinops.structured.factor import Factor
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.structured.layout import Layout, ParameterView
from curvlinops.support.rng import seeded
from curvlinops.support.serialization import recorded


@recorded
@dataclass(frozen=True)
class Projection:
    """A projection of a block's gradients, matrices ``[G, O, I]`` of one or several views.

    Attributes:
        views: The matrices' sides, such as weight and bias, from left to right.
        shape: G, O and I.
        outputs: P_B, orthonormal columns ``[G, O, p]``; ``None`` for the identity.
        inputs: P_A, ``[G, I, q]``; ``None`` for the identity.
        eigenvalues: The curvature's eigenvalues, ``[G, p, q]``, if columns are eigenvectors.
    """

    views: tuple[ParameterView, ...]
    shape: tuple[int, int, int]
    outputs: Tensor | None
    inputs: Tensor | None
    eigenvalues: Tensor | None = None

    @cached_property
    def size(self) -> int:
        """The number of entries of a projected gradient."""
        groups, *sizes = self.shape
        kept = (n if P is None else P.shape[2] for n, P in zip(sizes, self.columns, strict=True))
        return groups * prod(kept)

    @property
    def columns(self) -> tuple[Tensor | None, Tensor | None]:
        """P_B and P_A."""
        return self.outputs, self.inputs

    def of(self, name: str, gradient: PerSampleGradient) -> Tensor:
        """Return the contribution of a parameter to projected gradients, ``[V, N, size]``."""
        groups, num_outputs, _ = self.shape
        sizes = [view.size // (groups * num_outputs) for view in self.views]
        pieces = [self.inputs] if self.inputs is None else self.inputs.split(sizes, dim=1)
        return total(
            gradient.projected(
                KroneckerShape(groups, num_outputs, size, view), self.outputs, inputs
            ).flatten(2)
            for view, size, inputs in zip(self.views, sizes, pieces, strict=True)
            if view.name == name
        )


Projections = tuple[Projection, ...]


def project(rows: SampleRows, projections: Projections, like: Tensor) -> Tensor:
    """Return the projected rows of a batch, and their squared norms as the last column.

    Args:
        rows: The rows.
        projections: The projections, of which the columns of the result are in order.
        like: A tensor of the result's dtype and device.
    """
    sizes = [projection.size for projection in projections]
    out = like.new_zeros(rows.num_rows, sum(sizes) + 1)
    for pieces, view in rows.gradients:
        for samples, gradients in pieces:
            for name in list(gradients):  # they are freed on the way
                gradient = gradients.pop(name).to(like.dtype)
                *columns, squares = view(out)[:, samples].split([*sizes, 1], dim=2)
                squares += gradient.squared_norms().unsqueeze(2)
                for projection, part in zip(projections, columns, strict=True):
                    if any(x.name == name for x in projection.views):
                        part += projection.of(name, gradient)
    return out


def random_projections(space: ParameterSpace, rank: int, seed: int) -> Projections:
    """Return projections of each parameter to random subspaces.

    Those of ``[out, *in]`` have ``rank`` dimensions along both axes. Vectors of more than
    ``rank ** 2`` entries are projected as matrices that are as square as their length allows.
    """
    generator, found = seeded("cpu", seed), []

    def columns(size: int, number: int) -> Tensor | None:
        if size <= number:
            return None
        normal = torch.randn(size, number, generator=generator, dtype=torch.float64, device="cpu")
        return torch.linalg.qr(normal).Q.to(space.device, space.dtype).unsqueeze(0)

    for name, shape in space.shapes.items():
        outputs, inputs = shape[0] if shape else 1, prod(shape[1:])
        if len(shape) < 2:
            widths = (n for n in range(1, isqrt(outputs) + 1) if outputs % n == 0)
            inputs = max(widths, default=1) if outputs > rank**2 else 1
            outputs //= inputs
        P = columns(outputs, rank if inputs > 1 else rank**2), columns(inputs, rank)
        view = ParameterView.whole(name, shape)
        found.append(Projection((view,), (1, outputs, inputs), *P))
    return tuple(found)


def eigen_projections(structure: BlockDiagonalLinearOperator, rank: int) -> Projections:
    """Return projections of each block to the leading eigenvectors of its factors.

    Eigenvectors of a factor are ordered by the mean eigenvalue of the block's eigenvectors that are
    made of them. Blocks of one factor, of which there is no second one, keep ``rank ** 2``.
    """
    pairs = zip(structure, structure.layouts, strict=True)
    return tuple(_of_block(block, layout, rank) for block, layout in pairs)


def _of_block(block: object, layout: Layout, rank: int) -> Projection:
    with about(sorted(layout.names)):
        decomposed = block.eigh()
        B, A = _factors(decomposed.eigenvectors)
    groups = max(B.groups, 1 if A is None else A.groups)
    shape = groups, B.rows, 1 if A is None else A.rows
    values = decomposed.eigenvalues.reshape(shape)
    number = rank if A is not None else max(rank**2 // groups, 1)
    outputs, order = _leading(B, values.mean(2), number)
    kept = values.take_along_dim(order.unsqueeze(2), 1)
    if A is None:
        return Projection(layout.views, shape, outputs, None, kept)
    inputs, order = _leading(A, values.mean(1), rank)
    if len(layout.views) > 1 and inputs is None:
        inputs = torch.eye(shape[2], dtype=values.dtype, device=values.device).unsqueeze(0)
    return Projection(
        layout.views, shape, outputs, inputs, kept.take_along_dim(order.unsqueeze(1), 2)
    )


def _leading(vectors: Factor, values: Tensor, number: int) -> tuple[Tensor | None, Tensor]:
    """Return columns of a factor's eigenvectors with the largest values ``[G, n]``, and which."""
    number = min(number, values.shape[1])
    order = values.topk(number, dim=1).indices
    if vectors.is_diagonal:
        if number == values.shape[1]:
            order = torch.arange(number, device=values.device).expand(len(values), -1)
            return None, order
        one_hot = torch.nn.functional.one_hot(order, values.shape[1])
        return one_hot.mT.to(values.dtype).contiguous(), order
    return vectors.tensor.take_along_dim(order.unsqueeze(1), 2), order


def _factors(vectors: object) -> tuple[Factor, Factor | None]:
    """Return the factors of a block's eigenvectors."""
    if isinstance(vectors, KroneckerProductLinearOperator):
        return (*vectors._factors, None)[:2]
    if isinstance(vectors, DenseMatrix):
        return Factor(vectors.matrix.unsqueeze(0), symmetric=False), None
    raise ValueError("Its eigenvectors are no Kronecker product: leave it out of params.")
