"""Factors of Kronecker-factored curvature: second moments of inputs and of output gradients.

A use's gradient is ``sum_s g_s a_s^T``, with inputs a and output gradients g at S positions. The
*expand* setting treats positions like samples; the *reduce* setting treats a sample as one position
with the mean input and the sum of output gradients (Eschenhagen et al., Kronecker-factored
approximate curvature for modern neural network architectures, NeurIPS 2023, arXiv:2311.00636).
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.covariance import second_moment
from curvlinops.layers.factors import FactoredGradient, moment
from curvlinops.layers.gradients import total

#: Gradients, and the inputs that count, ``[N, S]``.
Masked = tuple[FactoredGradient, Tensor | None]


def input_factor(
    gradients: Sequence[FactoredGradient],
    masks: Sequence[Tensor | None],
    reduce: bool,
    bias: bool,
    diagonal: bool,
) -> tuple[Tensor, int | Tensor]:
    """Return the sum of inputs' outer products, ``[G, I, I]`` or ``[G, I]``, and their number.

    Masks ``[N, S]`` say which inputs count. If wanted, a sample's inputs are averaged first
    (``reduce``), and get a one as last entry (``bias``), and only the ``diagonal`` is computed.
    """
    masked = list(zip(gradients, masks, strict=True))
    if reduce:
        return _reduced_inputs(masked, bias, diagonal)
    moments, counts = zip(*(x.input_moment(diagonal, mask) for x, mask in masked), strict=True)
    matrix, count = total(moments), sum(counts)
    return _with_bias(matrix, masked, count) if bias else matrix, count


def _with_bias(matrix: Tensor, masked: Sequence[Masked], count: int) -> Tensor:
    """Return the moment of inputs that have one more entry, a one."""
    corner = matrix.new_full((len(matrix), 1), count)
    if matrix.ndim == 2:
        return torch.cat([matrix, corner], dim=1)
    size = matrix.shape[1]
    out = matrix.new_empty(len(matrix), size + 1, size + 1)
    out[:, :size, :size] = matrix
    out[:, size, :size] = out[:, :size, size] = total(
        x.input_sums(mask)[0].sum(0) for x, mask in masked
    )
    out[:, size, size:] = corner
    return out


def _reduced_inputs(masked: Sequence[Masked], bias: bool, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of outer products of the samples' mean inputs, and how many there are."""
    sums, numbers = zip(*(x.input_sums(mask) for x, mask in masked), strict=True)
    numbers = total(numbers)
    has_inputs = numbers > 0
    means = total(sums) / rearrange(numbers.clamp(min=1), "n -> n 1 1")
    if bias:
        ones = has_inputs.to(means).view(-1, 1, 1).expand(-1, means.shape[1], 1)
        means = torch.cat([means, ones], dim=2)
    return moment(means, diagonal), has_inputs.sum()


def gradient_factor(gradients: Sequence[FactoredGradient], reduce: bool, diagonal: bool) -> Tensor:
    """Return the sum of output gradients' outer products, ``[G, O, O]`` or ``[G, O]``."""
    outputs = [gradient.output_gradients() for gradient in gradients]
    if reduce:
        return moment(total(g.sum(2) for g in outputs).flatten(0, 1), diagonal)
    return total(_expanded_gradients(g, diagonal) for g in outputs)


def _expanded_gradients(g: Tensor, diagonal: bool) -> Tensor:
    """Return the sum of outer products of ``[V, N, S, G, O]``, or its diagonal.

    Positions of convolutions are last in memory: rows without a copy take half the time, or less.
    """
    positions, groups, outputs = g.shape[2:]
    if diagonal or outputs == 1:
        squares = g.square().sum((0, 1, 2))
        return squares if diagonal else squares.unsqueeze(2)
    if groups > 1:
        return second_moment(rearrange(g, "v n s g o -> g o (v n s)").mT)
    if g.stride(2) == 1 and positions > outputs:
        rows = rearrange(g, "v n s 1 o -> (v n) o s")
        return second_moment(rows.mT).sum(0, keepdim=True)
    return moment(g.flatten(0, 2), diagonal=False)
