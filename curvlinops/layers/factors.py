"""Factors of Kronecker-factored curvature: second moments of inputs and of output gradients.

A use's gradient is ``sum_s g_s a_s^T``, with inputs a and output gradients g at S positions. The
*expand* setting treats positions like samples; the *reduce* setting treats a sample as one position
with the mean input and the sum of output gradients (Eschenhagen et al., Kronecker-factored
approximate curvature for modern neural network architectures, NeurIPS 2023, arXiv:2311.00636).
"""

from collections.abc import Iterable, Sequence
from functools import reduce as fold
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.covariance import input_covariance, second_moment
from curvlinops.layers.embedding import EmbeddingGradient
from curvlinops.layers.gradients import PerSampleGradient
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.patches import Patches, patch_sums
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import recorded


@recorded
class KroneckerShape(NamedTuple):
    """A Kronecker product for some entries of a parameter.

    Attributes:
        groups: G; the matrix is block-diagonal, with a block for each group.
        outputs: O, the size of a group's output gradients.
        inputs: I, the size of a group's inputs.
        view: The entries ``[G, O, I]``.
        one_hot_inputs: Whether inputs have a single one among zeros.
        is_bias: Whether inputs are ones, as those of biases are.
    """

    groups: int
    outputs: int
    inputs: int
    view: ParameterView
    one_hot_inputs: bool = False
    is_bias: bool = False

    @classmethod
    def of(cls, gradient: PerSampleGradient, is_bias: bool) -> "KroneckerShape | None":
        """Return the kind of a use's gradients, ``None`` if they are no sums of outer products."""
        if isinstance(gradient, OuterProducts):
            groups, inputs = gradient.x.shape[2:]
            return cls(groups, gradient.g.shape[-1], inputs, gradient.entries.view, is_bias=is_bias)
        if isinstance(gradient, EmbeddingGradient):
            rows, width = gradient.num_rows, gradient.g.shape[-1]
            view = gradient.entries.view.permuted((width, rows), (1, 0))
            return cls(1, width, rows, view, one_hot_inputs=True)
        return None


def relation(kind: KroneckerShape, other: KroneckerShape) -> str | None:
    """Return how the entries of two Kronecker products for one parameter are related.

    Returns:
        ``"same"``; ``"transposed"``, where the outputs of one are the inputs of the other; or
        ``None``.
    """
    if (kind.groups, kind.is_bias) != (other.groups, other.is_bias):
        return None
    groups, outputs, inputs = kind.groups, kind.outputs, kind.inputs
    if (outputs, inputs, kind.view) == (other.outputs, other.inputs, other.view):
        return "same"
    transposed = other.view.permuted((groups, outputs, inputs), (0, 2, 1))
    is_transposed = (outputs, inputs) == (other.inputs, other.outputs) and kind.view == transposed
    return "transposed" if is_transposed else None


def input_factor(
    gradients: Sequence[PerSampleGradient], reduce: bool, bias: bool, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum of inputs' outer products, and the number of summands.

    Args:
        gradients: The gradients of a parameter's uses on a batch, of one kind.
        reduce: Whether a sample's inputs are averaged first.
        bias: Whether the inputs get a one as last entry.
        diagonal: Whether only the diagonal is wanted.

    Returns:
        The sum, ``[G, I, I]`` or ``[G, I]``, and a scalar.
    """
    if reduce:
        return _reduced_inputs(gradients, bias, diagonal)
    summed = [_expanded_inputs(gradient, bias, diagonal) for gradient in gradients]
    return total(found for found, _ in summed), total(count for _, count in summed)


def gradient_factor(gradients: Sequence[PerSampleGradient], reduce: bool, diagonal: bool) -> Tensor:
    """Return the sum of output gradients' outer products, ``[G, O, O]`` or ``[G, O]``."""
    found = [_gradients(gradient) for gradient in gradients]
    if reduce:
        return moment(total(g.sum(2) for g in found).flatten(0, 1), diagonal)
    return total(_expanded_gradients(g, diagonal) for g in found)


def _expanded_gradients(g: Tensor, diagonal: bool) -> Tensor:
    """Return the sum of outer products of ``[V, N, S, G, O]``, or its diagonal.

    Positions of convolutions are last in memory. Products of rows as they lie there take down to
    half the time of those of copies, with several groups down to a tenth.
    """
    positions, groups, outputs = g.shape[2:]
    if diagonal or outputs == 1:
        squares = g.square().sum((0, 1, 2))
        return squares if diagonal else squares.unsqueeze(2)
    if groups > 1:
        return second_moment(g.permute(3, 4, 0, 1, 2).reshape(groups, outputs, -1).mT)
    if g.stride(2) == 1 and positions > outputs:
        rows = g.squeeze(3).mT.flatten(0, 1)
        return (rows @ rows.mT).sum(0, keepdim=True)
    return moment(g.flatten(0, 2), diagonal=False)


def _gradients(gradient: PerSampleGradient) -> Tensor:
    """Return output gradients, ``[V, N, S, G, O]``."""
    return gradient.g.unsqueeze(3) if isinstance(gradient, EmbeddingGradient) else gradient.g


def _expanded_inputs(
    gradient: PerSampleGradient, bias: bool, diagonal: bool
) -> tuple[Tensor, Tensor]:
    if isinstance(gradient, EmbeddingGradient):
        found = gradient.indices[gradient.indices != gradient.padding]
        counts = torch.bincount(found, minlength=gradient.num_rows).to(gradient.g).unsqueeze(0)
        return counts, counts.sum()
    if isinstance(gradient.x, Patches) and not diagonal:
        found = input_covariance(gradient.x.images.flatten(0, 1), gradient.x.window)
    else:
        some = (gradient.x[some].flatten(0, 1) for some in gradient.slices(gradient.num_inputs))
        found = total(moment(x, diagonal) for x in some)
    count = _count(gradient.num_samples * gradient.num_positions, found)
    return _with_bias(found, _totals(gradient).sum(0), count) if bias else found, count


def _with_bias(found: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """Return the moment of inputs that have one more entry, a one."""
    size = found.shape[1]
    corner = count.to(found).expand(len(found), 1)
    if found.ndim == 2:
        return torch.cat([found, corner], dim=1)
    out = found.new_empty(len(found), size + 1, size + 1)
    out[:, :size, :size] = found
    out[:, size, :size] = out[:, :size, size] = total
    out[:, size, size:] = corner
    return out


def _reduced_inputs(
    gradients: Sequence[PerSampleGradient], bias: bool, diagonal: bool
) -> tuple[Tensor, Tensor]:
    if isinstance(gradients[0], EmbeddingGradient):
        counts = total(map(_lookups, gradients))
        positions = counts.sum(-1, keepdim=True)
        return (counts / positions.clamp(min=1.0)).square().sum(0), (positions > 0).sum()
    positions = sum(gradient.num_positions for gradient in gradients)
    means = total(map(_totals, gradients)) / max(positions, 1)
    if bias:
        means = torch.cat([means, means.new_full((*means.shape[:2], 1), float(positions > 0))], 2)
    return moment(means, diagonal), _count(len(means) * (positions > 0), means)


def _count(number: int, like: Tensor) -> Tensor:
    return torch.tensor(number, dtype=torch.float64, device=like.device)


def _totals(gradient: OuterProducts) -> Tensor:
    """Return the sums of the samples' inputs, ``[N, G, I]``."""
    if isinstance(gradient.x, Patches):
        sums = patch_sums(gradient.x.images.flatten(0, 1), gradient.x.window)
        return sums.unflatten(0, gradient.x.images.shape[:2]).sum(1)
    return torch.cat([gradient.x[some].sum(1) for some in gradient.slices(gradient.num_inputs)])


def _lookups(gradient: EmbeddingGradient) -> Tensor:
    """Return the number of each sample's lookups of each row, ``[N, 1, I]``, without padding."""
    counts = gradient.g.new_zeros(gradient.num_samples, gradient.num_rows)
    is_lookup = (gradient.indices != gradient.padding).to(counts)
    return counts.scatter_add_(1, gradient.indices, is_lookup).unsqueeze(1)


def moment(rows: Tensor, diagonal: bool) -> Tensor:
    """Return the sum of outer products of ``[P, G, I]``, or its diagonal."""
    if diagonal:
        return rows.square().sum(0)
    if rows.shape[1] == 1:
        return second_moment(rows[:, 0]).unsqueeze(0)
    return second_moment(rows.transpose(0, 1))


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Return a sum of tensors; of one, itself."""
    return fold(torch.add, tensors)
