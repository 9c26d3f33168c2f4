"""Digests of tensors, bit by bit, to compare them without copies."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from curvlinops.support.pytree import leaves
from curvlinops.support.torch_internals import strided_tensors


def digest(tree: Any) -> list[tuple]:
    """Return shape, dtype and checksum of each tensor in nested containers."""
    tensors = [part for tensor in leaves(tree) for part in strided_tensors(tensor)]
    sums = torch.stack([checksum(x).cpu() for x in tensors]).tolist() if tensors else []
    return [(tuple(x.shape), x.dtype, number) for x, number in zip(tensors, sums, strict=True)]


def checksum(tensor: Tensor) -> Tensor:
    """Return a weighted sum of a tensor's bits, modulo 2^64: the same on all devices, exactly."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    words = tensor.resolve_neg().reshape(-1).contiguous()
    words = words.view({1: torch.uint8, 2: torch.int16}.get(words.itemsize, torch.int32))
    weights = _weights(2**15 if words.is_cpu else 2**21, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(len(weights)):
        total = total * 6364136223846793005 + (part * weights[: len(part)]).sum()
    return total


@cache
def _weights(num: int, device: torch.device) -> Tensor:
    """Return random odd numbers of 64 bits, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    kind = {"dtype": torch.int64, "device": "cpu", "generator": generator}
    return (torch.randint(-(2**63), 2**63 - 1, (num,), **kind) | 1).to(device)
