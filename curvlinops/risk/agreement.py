"""Facts about which all processes of a risk must agree."""

from typing import Any

from torch import Tensor, nn

from curvlinops.support.digest import checksum
from curvlinops.support.torch_internals import distributed_tensors


def description(
    risk: Any, task: str, columns: Tensor | None = None, with_values: bool = False
) -> dict[str, Any]:
    """Return what must be the same in all processes, by name; perhaps with all numbers."""
    values = numbers_of(risk) if with_values else {}
    return {
        "operation": f"{risk.name}.{task}",
        "loss": None if risk.loss is None else risk.loss.description,
        **{f"parameter '{n}'": (tuple(x.shape), x.dtype) for n, x in risk.model.params.items()},
        "the order of parameters": list(risk.model.params),
        "the number of vectors": None if columns is None else len(columns),
        "the length of the outputs' last axis, so that their mean is not defined (use "
        "reduction='sum', or data that agree)": risk.term_size,
        **{
            f"the values of {name} (make them equal, e.g. with torch.distributed.broadcast, or as "
            "DistributedDataParallel does)": checksum(x)
            for name, x in values.items()
        },
    }


def numbers_of(risk: Any, sharded: bool = False) -> dict[str, Tensor]:
    """Return parameters and buffers of model and loss, frozen and perhaps sharded ones."""
    spread = () if sharded else distributed_tensors()
    params = risk.model.params
    tensors = {name: x for name, x in params.items() if not isinstance(x, spread)}
    replaced = set(map(id, params.values()))
    modules = [*risk.model.roots, getattr(risk.loss, "module", None)]
    for number, module in enumerate(x for x in modules if isinstance(x, nn.Module)):
        for name, x in module.state_dict(keep_vars=True).items():
            is_kept = isinstance(x, Tensor) and not isinstance(x, spread)
            is_dense = is_kept and x.is_floating_point() and not (x.is_sparse or x.is_meta)
            if is_dense and id(x) not in replaced and name not in params:
                tensors[f"{name} of module {number} (frozen parameter or buffer)"] = x
    return tensors
