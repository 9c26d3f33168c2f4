"""Projections of gradients, one matrix at a time: sums of ``P_B^T G P_A`` with few columns."""

from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import isqrt, prod

import torch
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape
from curvlinops.layers.gradients import PerSampleGradient, total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.sample_rows import SampleRows
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator, about
from curvlinops.structured.factor import Factor
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.structured.layout import Layout, ParameterView
from curvlinops.support.files import recorded
from curvlinops.support.rng import seeded

#: The root of a damped inverse is a sum of so many Kronecker products.
_TERMS = 8


@recorded
@dataclass(frozen=True)
class Projection:
    """A projection of a block's gradients, matrices ``[G, O, I]``, by a sum of K terms."""

    views: tuple[ParameterView, ...]  # their sides, such as weight and bias, from left to right
    shape: tuple[int, int, int]  # G, O and I
    outputs: Tensor | None  # P_B, [K, G, O, p]; None for the identity
    inputs: Tensor | None  # P_A, [K, G, I, q]; None for the identity

    @cached_property
    def size(self) -> int:
        """The number of entries of a projected gradient."""
        groups, *sizes = self.shape
        ends = (n if P is None else P.shape[3] for n, P in zip(sizes, self.columns, strict=True))
        return groups * prod(ends)

    @property
    def columns(self) -> tuple[Tensor | None, Tensor | None]:
        """P_B and P_A."""
        return self.outputs, self.inputs

    def of(self, name: str, gradient: PerSampleGradient) -> Tensor:
        """Return the contribution of a parameter to projected gradients, ``[V, N, size]``."""
        groups, num_outputs, _ = self.shape
        sizes = [view.size // (groups * num_outputs) for view in self.views]
        pieces = [None] if self.inputs is None else self.inputs.split(sizes, dim=2)
        return total(
            gradient.projected(
                KroneckerShape(groups, num_outputs, size, view),
                list(zip_longest(*([None] if P is None else P for P in (self.outputs, inputs)))),
            ).flatten(2)
            for view, size, inputs in zip(self.views, sizes, pieces, strict=True)
            if view.name == name
        )


Projections = tuple[Projection, ...]


def project(rows: SampleRows, projections: Projections, like: Tensor) -> Tensor:
    """Return the projected rows of a batch, of one projection after the other."""
    sizes = [projection.size for projection in projections]
    out = like.new_zeros(rows.num_rows, sum(sizes))
    for pieces, view in rows.gradients:
        for samples, gradients in pieces:
            for name in list(gradients):  # they are freed on the way
                gradient = gradients.pop(name).to(like.dtype)
                parts = view(out)[:, samples].split(sizes, dim=2)
                for projection, part in zip(projections, parts, strict=True):
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
        P = _orthonormal(size, number, generator)
        return P.to(space.device, space.dtype).view(1, 1, size, number)

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


def preconditioned_projections(
    structure: BlockDiagonalLinearOperator, rank: int, damping: float, seed: int
) -> Projections:
    """Return random projections of each block's ``(F + damping I)^(-1/2) G``.

    The root is a sum of a few Kronecker products. The mean of inner products over the seeds is that
    of this sum, which is close to ``(F + damping I)^-1``. Blocks of one factor, of which there is
    no second one, keep ``rank ** 2`` numbers.
    """
    pairs, generator = zip(structure, structure.layouts, strict=True), seeded("cpu", seed)
    return tuple(_of_block(block, layout, rank, damping, generator) for block, layout in pairs)


def _of_block(
    block: object, layout: Layout, rank: int, damping: float, generator: torch.Generator
) -> Projection:
    with about(sorted(layout.names)):
        decomposed = block.eigh()
        vectors = decomposed.eigenvectors
        if not isinstance(vectors, KroneckerProductLinearOperator):
            raise ValueError("Its eigenvectors are no Kronecker product: leave it out of params.")
        B, A = (*vectors._factors, None)[:2]
        values = decomposed.eigenvalues.double() + damping
        if not bool((values > 0).all()):
            raise ValueError("Its eigenvalues are not positive: choose a larger relative_damping.")
    groups = max(B.groups, 1 if A is None else A.groups)
    shape = groups, B.rows, 1 if A is None else A.rows
    limits = (max(rank**2 // groups, 1), 1) if A is None else (rank, rank)
    is_whole = shape[1] <= limits[0] and shape[2] <= limits[1]
    number = min(shape[1:]) if is_whole else _TERMS
    left, right = _terms(values.rsqrt().reshape(shape), number)
    outputs = _columns(B, left, limits[0], generator)
    inputs = None if A is None else _columns(A, right, limits[1], generator)
    return Projection(layout.views, shape, outputs, inputs)


def _terms(matrices: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return a and b, ``[K, G, O]`` and ``[K, G, I]``, with outer products that add up to matrices.

    There are at most ``number``: the leading singular vectors, by the smaller Gram matrix.
    """
    is_wide = matrices.shape[1] < matrices.shape[2]
    tall = matrices.mT if is_wide else matrices
    short = torch.linalg.eigh(tall.mT @ tall).eigenvectors[..., -number:]
    both = (tall @ short).movedim(2, 0), short.movedim(2, 0)
    return both[::-1] if is_wide else both


def _columns(vectors: Factor, scales: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Return scaled eigenvectors, or ``number`` random columns of their span, ``[K, G, n, p]``."""
    size, like = scales.shape[2], vectors.tensor
    if size <= number:
        mixed = torch.eye(size, dtype=torch.float64, device=scales.device)
    else:
        mixed = _orthonormal(size, number, generator).to(scales.device) * (size / number) ** 0.5
    columns = (scales.unsqueeze(3) * mixed).to(like.dtype)
    return columns if vectors.is_diagonal else like @ columns


def _orthonormal(size: int, number: int, generator: torch.Generator) -> Tensor:
    """Return random orthonormal columns, ``[size, number]``."""
    normal = torch.randn(size, number, generator=generator, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(normal).Q
