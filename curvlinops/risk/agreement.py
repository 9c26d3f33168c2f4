"""Facts about which all processes of a risk must agree."""

from typing import Any

from torch import Tensor, nn

from curvlinops.linear_operator.space import Columns
from curvlinops.support.digest import checksum
from curvlinops.support.torch_internals import distributed_tensors

#: If this environment variable is set, products compare parameters in ``linearized()``, too.
COMPARES_ALWAYS = "CURVLINOPS_COMPARE_PROCESSES"


def description(risk: Any, task: str, columns: Columns | None = None) -> dict[str, Any]:
    """Return the operation, and the shapes and dtypes of its parameters and vectors."""
    params, sharded = risk.model.params, risk.model.shards.params
    vectors = {name: x for name, x in (columns or {}).items() if name not in sharded}
    return {
        "operation": f"{risk.name}.{task}",
        "loss": None if risk.loss is None else risk.loss.description,
        **{f"parameter '{n}'": (tuple(x.shape), x.dtype) for n, x in params.items()},
        **{f"vectors for '{n}'": tuple(x.shape) for n, x in vectors.items()},
        "the order of parameters": list(params),
    }


def checksums_of(risk: Any) -> dict[str, int]:
    """Return checksums of parameters and buffers, frozen ones included, sharded ones not."""
    return {name: checksum(x) for name, x in numbers_of(risk).items()}


def numbers_of(risk: Any, sharded: bool = False) -> dict[str, Tensor]:
    """Return parameters and buffers of model and loss, frozen ones included.

    Args:
        risk: The ``EmpiricalRisk``.
        sharded: Whether to return sharded ones, too.
    """
    spread = () if sharded else distributed_tensors()
    params = risk.model.params
    tensors = {name: x for name, x in params.items() if not isinstance(x, spread)}
    replaced = set(map(id, params.values()))
    modules = [*risk.model.roots, getattr(risk.loss, "module", None)]
    for number, module in enumerate(x for x in modules if isinstance(x, nn.Module)):
        for name, x in module.state_dict(keep_vars=True).items():
            is_kept = isinstance(x, Tensor) and not isinstance(x, spread)
            is_dense = is_kept and x.is_floating_point() and not x.is_sparse
            if is_dense and id(x) not in replaced and name not in params:
                tensors[f"{name} of module {number} (frozen parameter or buffer)"] = x
    return tensors
