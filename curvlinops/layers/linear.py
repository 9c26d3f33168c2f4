"""Products of an input with a matrix."""

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


@handles(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def matmul(input: Tensor, other: Tensor) -> dict[str, Use]:
    """``input @ other``; either may be the parameter."""
    return {
        name: use
        for name, use in (
            ("input", _factor(other, input, left=True)),
            ("other", _factor(input, other, left=False)),
        )
        if use is not None
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
    uses = {
        "input": shift(input.shape, [mat1.shape[0], mat2.shape[1]], float(beta)),
        "mat1": _factor(mat2 * alpha, mat1, left=True),
        "mat2": _factor(mat1 * alpha, mat2, left=False),
    }
    return uses


@handles(torch.einsum)
def einsum(equation: str, *operands: Tensor) -> dict[int, Use | None]:
    """A contraction of two tensors without repeated axes."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(operands) != 2 or len(terms) != 2:
        return {}
    if not arrow:  # in alphabetical order, axes that occur once
        letters = inputs.replace(",", "").replace("...", "")
        output = ("..." if "..." in inputs else "") + "".join(
            sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        )
    hidden = [
        x.ndim - len(term.replace("...", "")) for term, x in zip(terms, operands, strict=True)
    ]

    def labels(term: str, number: int) -> list:
        before, dots, after = term.partition("...")
        return [*before, *(range(-number, 0) if dots else ()), *after]

    first, second = (labels(term, number) for term, number in zip(terms, hidden, strict=True))
    out = labels(output, max(hidden))
    lengths: dict = {}
    for axes, x in ((first, operands[0]), (second, operands[1])):
        for axis, length in zip(axes, x.shape, strict=True):
            if lengths.setdefault(axis, length) != length:
                return {}  # broadcast
    return {
        1: contraction(operands[1], second, first, out, operands[0].shape),
        2: contraction(operands[0], first, second, out, operands[1].shape),
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


def _factor(x: Tensor, w: Tensor, left: bool) -> Use | None:
    """Return the use of ``w`` in ``w @ x`` or ``x @ w``, with PyTorch's rules for axes."""
    if w.ndim == 1 or x.ndim == 1:
        if left or w.ndim > 2 or x.ndim == 1:
            return None
        lead = list(range(x.ndim - 1))
        return contraction(x, [*lead, "in"], ["in"], lead, w.shape)
    out = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    batch = list(range(len(out)))
    x_full = x.expand(*out, *x.shape[-2:])
    w_batch = batch[len(batch) - (w.ndim - 2) :]
    if any(length == 1 != out[axis] for axis, length in zip(w_batch, w.shape[:-2], strict=True)):
        return None
    if left:
        labels = (["in", "rows"], ["out", "in"], ["out", "rows"])
    else:
        labels = (["rows", "in"], ["in", "out"], ["rows", "out"])
    x_labels, w_labels, out_labels = labels
    return contraction(
        x_full,
        [*batch, *x_labels],
        [*w_batch, *w_labels],
        [*batch, *out_labels],
        w.shape,
    )
