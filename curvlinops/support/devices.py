"""What depends on the kind of a device: modes, generators, memory, and sizes of parts."""

import torch
from torch import Tensor

#: The kinds of devices that have an autocast of their own.
WITH_AUTOCAST = ("cpu", "cuda", "mps", "xpu")

#: Entries that are taken at once on accelerators, where each call costs time.
_AT_ONCE = 2**22

#: A batched pass needs about the graph's memory for each column. Several are faster while this
#: fits the caches, about, or while a pass is too short to occupy the device; see the benchmarks.
_PASS_ON_CPU, _PASS = 64 * 2**20, 512 * 2**20

#: The memory for what products share inside of ``linearized()``, where it cannot be measured.
_KEPT = 2 * 2**30


def generators() -> list[torch.Generator]:
    """Return PyTorch's default generators on all devices in use."""
    accelerators = [module for module in (torch.cuda, torch.xpu) if module.is_initialized()]
    return [torch.default_generator, *(g for a in accelerators for g in a.default_generators)]


def entries_at_once(x: Tensor, on_cpu: int) -> int:
    """Return how many entries of a tensor are taken at once, given the number for the CPU."""
    return on_cpu if x.is_cpu else _AT_ONCE


def bytes_of_pass(device: torch.device) -> int:
    """Return the memory of a backward pass with several columns that is still fast."""
    return _PASS_ON_CPU if device.type == "cpu" else _PASS


def bytes_to_keep(device: torch.device) -> int:
    """Return the memory for what products share inside of ``linearized()``."""
    if device.type != "cuda":
        return _KEPT
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + reserved) // 4
