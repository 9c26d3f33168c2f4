"""Products of an input with a matrix."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers import rules
from curvlinops.layers.rules import Use, contraction, handles


@handles(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Use]:
    """``input @ weight.T + bias``."""
    equation = "... i, o i -> ... o" if weight.ndim == 2 else "... i, i -> ..."
    uses = {"weight": contraction(equation, input, weight.shape)}
    if bias is not None:
        uses["bias"] = rules.bias(bias.shape, [*input.shape[:-1], *weight.shape[:-1]])
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
        "input": rules.bias(input.shape, [mat1.shape[0], mat2.shape[1]], float(beta)),
        "mat1": _factor(mat2, mat1, left=True, scale=alpha),
        "mat2": _factor(mat1, mat2, left=False, scale=alpha),
    }


@handles(torch.addmv, Tensor.addmv)
def addmv(
    input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1
) -> dict[str, Use]:
    """``beta input + alpha mat @ vec``."""
    return {
        "input": rules.bias(input.shape, mat.shape[:1], float(beta)),
        "mat": _factor(vec, mat, left=True, scale=alpha),
        "vec": _factor(mat, vec, left=False, scale=alpha),
    }


@handles(torch.bilinear, F.bilinear)
def bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> dict[str, Use]:
    """``out_k = input1^T weight_k input2 + bias_k``."""

    def product() -> Tensor:
        return input1.unsqueeze(-1) * input2.unsqueeze(-2)

    shape = (*input1.shape, input2.shape[-1])
    equation = "... i j, o i j -> ... o"
    uses = {"weight": contraction(equation, product, weight.shape, x_shape=shape)}
    if bias is not None:
        uses["bias"] = rules.bias(bias.shape, [*input1.shape[:-1], weight.shape[0]])
    return uses


def _factor(x: Tensor, w: Tensor, left: bool, scale: float = 1) -> Use | None:
    """Return the use of ``w`` in ``w @ x`` or ``x @ w``, with PyTorch's rules for axes.

    A scale of the product multiplies gradients, which are there for a short time only.
    """
    to_product = (lambda g: g) if scale == 1 else (lambda g: g * scale)
    if x.ndim == 1 or w.ndim == 1:
        return _vector_factor(x, w, left, to_product)
    out = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    batch = [f"b{axis}" for axis in range(len(out))]
    aligned = zip(range(len(out) - (w.ndim - 2), len(out)), w.shape[:-2], strict=True)
    # an axis of length one is broadcast
    kept = [axis for axis, length in aligned if length != 1]
    of_x, of_w = " ".join(batch), " ".join(batch[axis] for axis in kept)
    if left:
        equation = f"{of_x} i rows, {of_w} o i -> {of_x} o rows"
    else:
        equation = f"{of_x} rows i, {of_w} i o -> {of_x} rows o"
    x_full, shape = x.expand(*out, *x.shape[-2:]), [*(out[axis] for axis in kept), *w.shape[-2:]]
    return contraction(equation, x_full, shape, to_product)


def _vector_factor(x: Tensor, w: Tensor, left: bool, to_product: Callable[[Tensor], Tensor]) -> Use:
    """Return the same if at least one of both is a vector, all of which is summed over."""
    matrix = x if w.ndim == 1 else w
    others = [f"a{axis}" for axis in range(matrix.ndim - 1)]
    # a vector on the left of a matrix contracts the axis before the last
    position = len(others) - 1 if left == (w.ndim == 1) else len(others)
    position = max(position, 0)
    of_matrix, out = " ".join([*others[:position], "i", *others[position:]]), " ".join(others)
    equation = f"{of_matrix}, i -> {out}" if w.ndim == 1 else f"i, {of_matrix} -> {out}"
    return contraction(equation, x, w.shape, to_product)
