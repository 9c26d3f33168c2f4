"""Products of an input with a matrix."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers.uses import Use, contraction, handles, shift


@handles(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Use]:
    """``input @ weight.T + bias``."""
    lead = list(range(input.ndim - 1))
    outputs = list(weight.shape[:-1])
    uses = {
        "weight": contraction(
            input,
            [*lead, "in"],
            ["out", "in"][-weight.ndim :],
            [*lead, "out"][: len(lead) + weight.ndim - 1],
            weight.shape,
        )
    }
    if bias is not None:
        uses["bias"] = shift(bias.shape, [*input.shape[:-1], *outputs])
    return uses


@handles(
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul),
    *(torch.mm, Tensor.mm, torch.bmm, Tensor.bmm),
    *(torch.mv, Tensor.mv, torch.dot, Tensor.dot, torch.vdot, Tensor.vdot),
)
def matmul(input: Tensor, other: Tensor) -> dict[str, Use]:
    """``input @ other``; either may be the parameter."""
    return {
        "input": _factor(other, input, left=True),
        "other": _factor(input, other, left=False),
    }


@handles(Tensor.__rmatmul__)
def reversed_matmul(input: Tensor, other: Tensor) -> dict[str, Use]:
    """``other @ input``."""
    names = {"input": "other", "other": "input"}
    return {names[name]: use for name, use in matmul(other, input).items()}


@handles(torch.addmm, Tensor.addmm)
def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> dict[str, Use]:
    """``beta input + alpha mat1 @ mat2``."""
    return {
        "input": shift(input.shape, [mat1.shape[0], mat2.shape[1]], float(beta)),
        "mat1": _factor(mat2, mat1, left=True, scale=alpha),
        "mat2": _factor(mat1, mat2, left=False, scale=alpha),
    }


@handles(torch.addmv, Tensor.addmv)
def addmv(
    input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1
) -> dict[str, Use]:
    """``beta input + alpha mat @ vec``."""
    return {
        "input": shift(input.shape, mat.shape[:1], float(beta)),
        "mat": _factor(vec, mat, left=True, scale=alpha),
        "vec": _factor(mat, vec, left=False, scale=alpha),
    }


@handles(torch.bilinear, F.bilinear)
def bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> dict[str, Use]:
    """``out_k = input1^T weight_k input2 + bias_k``."""
    lead = list(range(input1.ndim - 1))

    def product() -> Tensor:
        return input1.unsqueeze(-1) * input2.unsqueeze(-2)

    uses = {
        "weight": contraction(
            product,
            [*lead, "in1", "in2"],
            ["out", "in1", "in2"],
            [*lead, "out"],
            weight.shape,
            x_shape=(*input1.shape, input2.shape[-1]),
        )
    }
    if bias is not None:
        uses["bias"] = shift(bias.shape, [*input1.shape[:-1], weight.shape[0]])
    return uses


def _factor(x: Tensor, w: Tensor, left: bool, scale: float = 1) -> Use | None:
    """Return the use of ``w`` in ``w @ x`` or ``x @ w``, with PyTorch's rules for axes.

    A scale of the product multiplies gradients, which are there for a short time only.
    """
    split = (lambda g: g) if scale == 1 else (lambda g: g * scale)
    if x.ndim == 1 or w.ndim == 1:
        return _vector_factor(x, w, left, split)
    out = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    batch = list(range(len(out)))
    x_full = x.expand(*out, *x.shape[-2:])
    aligned = zip(batch[len(batch) - (w.ndim - 2) :], w.shape[:-2], strict=True)
    # an axis of length one is the same for all that it meets
    w_batch = [axis for axis, length in aligned if length != 1]
    if left:
        labels = (["in", "rows"], ["out", "in"], ["out", "rows"])
    else:
        labels = (["rows", "in"], ["in", "out"], ["rows", "out"])
    x_labels, w_labels, out_labels = labels
    use = contraction(
        x_full,
        [*batch, *x_labels],
        [*w_batch, *w_labels],
        [*batch, *out_labels],
        [*(out[axis] for axis in w_batch), *w.shape[-2:]],
        split,
    )
    return use if use is None else use.reshaped(w.shape)


def _vector_factor(x: Tensor, w: Tensor, left: bool, split: Callable[[Tensor], Tensor]) -> Use:
    """Return the same if at least one of both is a vector, all of which is summed over."""
    if w.ndim == 1:
        # with a vector on its left, a matrix is summed over the axis before the last
        others = list(range(x.ndim - 1))
        place = max(x.ndim - 2, 0) if left else x.ndim - 1
        x_labels = [*others[:place], "in", *others[place:]]
        return contraction(x, x_labels, ["in"], others, w.shape, split)
    others = list(range(w.ndim - 1))
    place = w.ndim - 1 if left else w.ndim - 2
    w_labels = [*others[:place], "in", *others[place:]]
    return contraction(x, ["in"], w_labels, others, w.shape, split)
