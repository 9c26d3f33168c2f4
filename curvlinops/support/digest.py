"""A few numbers of tensors, to compare them without copies: of all bits, or within rounding."""

from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from curvlinops.support.devices import entries_at_once
from curvlinops.support.norms import PART, double_norm
from curvlinops.support.pytree import leaves
from curvlinops.support.torch_internals import strided_tensors


def digest(tree: Any) -> list[tuple]:
    """Return shape, dtype and checksum of each tensor in nested containers."""
    tensors = [part for tensor in leaves(tree) for part in strided_tensors(tensor)]
    return [(tuple(x.shape), x.dtype, checksum(x)) for x in tensors]


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bits; on accelerators of its sketch: copies are slow."""
    x = tensor.detach() if tensor.is_cpu else sketch(tensor).cpu()
    x = x.resolve_conj().resolve_neg().reshape(-1)
    if x.stride() != (1,):  # also one entry, or none, which is contiguous with any stride
        x = x.new_empty(x.shape).copy_(x)
    return crc32(x.view(torch.uint8).numpy())


#: The number of entries that are added up with different random weights.
_BLOCK = 2**10


def sketch(tensor: Tensor) -> Tensor:
    """Return the norm of all entries, and their inner products with two random vectors, ``[3]``.

    The vectors are the same in all processes and on all devices. Entries are added up in float64.
    """
    x = tensor.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.resolve_neg().reshape(-1)
    parts = x.split(max(entries_at_once(x, PART), _BLOCK))
    sums = torch.cat([_in_blocks(part.double()) @ _weights(x.device, 0) for part in parts])
    level = 0
    while len(sums) > 1:
        level += 1
        sums = (_in_blocks(sums) * _weights(x.device, level)).sum(1)
    norm = double_norm(x if x.is_floating_point() else x.double())
    return torch.cat([norm.reshape(1), sums.sum(0)])


def _in_blocks(x: Tensor) -> Tensor:
    """Return entries ``[n, *]`` in blocks, the last one with zeros, ``[n / _BLOCK, _BLOCK, *]``."""
    missing = -len(x) % _BLOCK
    x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
    return x.view(len(x) // _BLOCK, _BLOCK, *x.shape[1:])


@cache
def _weights(device: torch.device, level: int) -> Tensor:
    """Return random weights of the entries of a block, others at each level, ``[_BLOCK, 2]``."""
    generator = torch.Generator().manual_seed(level)
    drawn = torch.randn(_BLOCK, 2, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(device)
