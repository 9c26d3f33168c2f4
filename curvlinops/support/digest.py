"""Digests of tensors, to compare them without copies."""

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from curvlinops.support.pytree import leaves
from curvlinops.support.sketch import sketch
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
