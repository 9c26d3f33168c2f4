"""Memory of the tensors that operations make."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still alive."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta:
                self._add(x.untyped_storage(), given)
        self.peak = max(self.peak, self.now)
        return out

    def _add(self, storage: torch.UntypedStorage, given: set):
        is_file = storage.device.type == "cpu" and storage.filename is not None  # mapped
        if storage not in self._seen and storage not in given and not is_file:
            self._seen.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int):
        self.now -= num_bytes

    def peaks(self, run) -> tuple[int, int]:
        """Return how much a first and a second call need in addition to what is there."""
        found = []
        with self:
            for _ in range(2):
                before = self.peak = self.now
                run()
                found.append(self.peak - before)
        return tuple(found)
