"""Whether several processes have the same model, told by a few numbers."""

from collections.abc import Iterator
from math import cos, fsum
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.core.norms import double_norm

#: What all tensors have in common that are not differentiated.
OTHERS = "frozen parameters or buffers"


def checksums(risk: Any) -> dict[str, tuple[float, float]]:
    """Return two numbers for each parameter, and for all else that is saved with the model.

    They are of the size of one, whatever the scale of the tensor.

    Args:
        risk: The ``EmpiricalRisk``.
    """
    params = risk.model.params
    others = [x for x in _others(risk) if x.is_floating_point() and not x.is_sparse]
    others = [x for x in others if x.device == risk.space.device]
    sums = [_checksum(x.detach(), number) for number, x in enumerate(params.values())]
    # these are in no particular order
    sums += [_checksum(x.detach(), len(params)) for x in others]
    found = torch.stack(sums).tolist()
    total = tuple(map(fsum, zip(*found[len(params) :], strict=True))) or (0.0, 0.0)
    return {n: tuple(own) for n, own in zip(params, found, strict=False)} | {OTHERS: total}


def _others(risk: Any) -> list[Tensor]:
    """Return tensors of modules, those apart in place of which there are parameters."""
    params, found = risk.model.params, {}
    replaced = {id(param) for param in params.values()}
    for root in [*risk.model.roots, getattr(risk.loss, "module", None)]:
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            for name, tensor in _saved(module):
                found[id(tensor)] = tensor
                if (f"{path}.{name}" if path else name) in params:
                    replaced.add(id(tensor))
    return [tensor for key, tensor in found.items() if key not in replaced]


def _saved(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    # running statistics do not matter while batches are normalized by their own
    buffers = dict(module.named_buffers(recurse=False))
    if not ("running_mean" in buffers and module.training):
        passing = module._non_persistent_buffers_set
        yield from ((name, buffer) for name, buffer in buffers.items() if name not in passing)


def _checksum(tensor: Tensor, number: int) -> Tensor:
    """Return a sum with other weights for each entry, over the norm, and the norm's logarithm."""
    matrix = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    matrix = matrix.flatten(1) if matrix.ndim > 1 else matrix.reshape(1, -1)
    rows, cols = (
        torch.arange(1, n + 1, dtype=matrix.dtype, device=matrix.device) for n in matrix.shape
    )
    norm = double_norm(matrix).clamp(min=torch.finfo(torch.float64).tiny)
    value = (rows * (cos(number) + 2)).cos() @ (matrix @ cols.sin())
    return torch.stack([value / norm, norm.log()])
