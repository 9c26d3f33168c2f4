"""Contractions of any number of tensors, two at a time."""

import string
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.uses import Use, contraction, handles


def contract(axes: tuple[str, str, str], first: Tensor, second: Tensor) -> Tensor:
    """Contract two tensors.

    Args:
        axes: A letter for each axis of either, and of the output: each occurs once in a tensor,
            has one length, and is in the output or in both tensors.
        first: One tensor.
        second: The other.
    """
    if torch.overrides.has_torch_function((first, second)):
        return torch.overrides.handle_torch_function(contract, (first, second), axes, first, second)
    return torch.einsum(f"{axes[0]},{axes[1]}->{axes[2]}", first, second)


@handles(contract)
def uses_of_contract(
    axes: tuple[str, str, str], first: Tensor, second: Tensor
) -> dict[str, Use | None]:
    """Either may be the parameter."""
    a, b, out = (" ".join(term) for term in axes)
    return {
        "first": contraction(f"{b}, {a} -> {out}", second, first.shape),
        "second": contraction(f"{a}, {b} -> {out}", first, second.shape),
    }


def einsum(*args: Any) -> Tensor:
    """Contract tensors from left to right, each with the next one that shares an axis with it."""
    terms, output, operands = _parse(args)
    lengths: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for axis, length in zip(term, x.shape, strict=True):
            lengths[axis] = length if lengths.get(axis, 1) == 1 else lengths[axis]
    pairs = [_simplify(x, term, lengths) for x, term in zip(operands, terms, strict=True)]
    x, term = _sum_alone(*pairs.pop(0), output, pairs)
    while pairs:
        shared = (i for i, (_, other) in enumerate(pairs) if set(other) & set(term))
        second, axes = _sum_alone(*pairs.pop(next(shared, 0)), output + term, pairs)
        x, term = _sum_alone(x, term, output + axes, pairs)
        kept = set(output).union(*(other for _, other in pairs))
        result = "".join(axis for axis in dict.fromkeys(term + axes) if axis in kept)
        x, term = contract((term, axes, result), x, second), result
    return x.permute([term.index(axis) for axis in output])


def _parse(args: tuple) -> tuple[list[str], str, list[Tensor]]:
    """Return a letter for each axis of each operand, those of the output, and the operands."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:  # in alphabetical order, axes that occur once
        counts = Counter(inputs.replace(",", "").replace("...", ""))
        output = "..." * ("..." in inputs) + "".join(
            sorted(axis for axis, count in counts.items() if count == 1)
        )
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True)]
    hidden = [n if "..." in term else 0 for term, n in zip(terms, hidden, strict=True)]
    dots = unused[: max(hidden)]

    def spell(term: str, number: int) -> str:
        return term.replace("...", "".join(dots[len(dots) - number :]))

    named = [spell(term, number) for term, number in zip(terms, hidden, strict=True)]
    return named, spell(output, len(dots)), list(operands)


def _simplify(x: Tensor, term: str, lengths: dict[str, int]) -> tuple[Tensor, str]:
    """Take the diagonal of repeated axes, and drop axes that are broadcast."""
    for axis, count in Counter(term).items():
        for _ in range(count - 1):
            first, second = (i for i, other in enumerate(term) if other == axis)
            x = x.diagonal(dim1=first, dim2=second)
            term = term.replace(axis, "") + axis
    for i in reversed(range(x.ndim)):
        if x.shape[i] == 1 != lengths[term[i]]:
            x, term = x.squeeze(i), term[:i] + term[i + 1 :]
    return x, term


def _sum_alone(
    x: Tensor, term: str, output: str, others: list[tuple[Tensor, str]]
) -> tuple[Tensor, str]:
    """Sum over axes that occur nowhere else."""
    wanted = set(output).union(*(other for _, other in others))
    alone = [i for i, axis in enumerate(term) if axis not in wanted]
    rest = "".join(axis for axis in term if axis in wanted)
    return (x.sum(alone) if alone else x), rest
