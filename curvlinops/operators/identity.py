"""The identity of a saved object: options, shapes, and numbers of model, loss and first batch."""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.gradients import LowRank
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.agreement import numbers_of
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.repeats import sketches
from curvlinops.risk.data import Batches
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import seed_everything, seeded
from curvlinops.support.sketch import sketch
from curvlinops.support.torch_internals import distributed_tensors, strided_tensors
from curvlinops.team.team import ALONE

#: Plain values and ``Numbers`` by name, as JSON has them.
Identity = dict[str, Any]

#: The largest difference of numbers that are read, relative to the norm: they were perhaps rounded
#: to float32 before.
_READ = 1e-6
#: The same for numbers that are computed, by dtype: the rounding of a deep model, on a GPU perhaps
#: with products in TF32, which has a precision of 1e-3; in half precision that of a few operations.
_COMPUTED = {torch.float64: 1e-8, torch.float32: 1e-3}
_COMPUTED_IN_HALF = 5e-2

#: The length up to which messages show two values.
_SHORT = 80

_NUMBER, _SAMPLES = "the number of the batch", "the number of samples in the first batch"


def identity_of(
    operator: DataLinearOperator, options: Mapping[str, Any], with_numbers: bool = True
) -> Identity:
    """Return numbers that tell whether operators have the same options, model, loss and data.

    The data is represented by this process's first batch with rows: the model is evaluated on it
    once, with one backward pass, and with the same random numbers each time. Processes with shards
    of the model call it together.

    Args:
        operator: The operator.
        options: The options that matter, plain values or numbers.
        with_numbers: Whether numbers of model, loss and data matter, too.
    """
    if not with_numbers:
        return _facts(operator, options)
    with (operator.risk.peers if operator.risk.model.shards else ALONE).raise_on_all_ranks():
        numbers = _on_batch(operator)
    return _facts(operator, options) | _values(operator) | numbers


def check_identity(
    source: str,
    other: Identity,
    operator: DataLinearOperator,
    options: Mapping[str, Any],
    remedy: str = "",
    data: Batches | None = None,
) -> None:
    """Refuse an object that does not belong to an operator. All processes call it together.

    Args:
        source: What has the other identity, for messages.
        other: The other identity.
        operator: The operator.
        options: Its options that matter.
        remedy: The end of messages.
        data: The data of the other identity, of which each process has its own. Default: the
            operator's data.

    Raises:
        ValueError: If they differ, naming the first difference.
    """
    ranks = operator.risk.ranks
    with ranks.raise_on_all_ranks():
        facts = _facts(operator, options)
        check_same(source, other, facts, remedy)  # before the model is evaluated
    if _NUMBER not in other:
        return
    index, rank = divmod(other[_NUMBER], ranks.size)
    with operator.risk.peers.raise_on_all_ranks():
        is_own = data is not None or rank == ranks.rank
        numbers = _on_batch(operator, index, data) if is_own else {}
    if data is None:
        numbers = ranks.gather_objects(numbers)[rank]
    more = {name: None for name, x in other.items() if _are_numbers(x)}
    this = more | facts | _values(operator) | numbers
    with ranks.raise_on_all_ranks():
        check_same(source, other, this, remedy)


def check_model(source: str, other: Identity, operator: DataLinearOperator) -> None:
    """Refuse an operator with another model or other parameters; loss and data may be others."""
    this = _facts(operator, {}) | _values(operator)
    starts = ("parameters", "the shape of ", "dtype", "the values of ")
    common = {name: x for name, x in this.items() if name in other and name.startswith(starts)}
    check_same(source, other, common)


def numbers_in(columns: Mapping[str, Any]) -> Identity:
    """Return numbers of vectors by the parameter; some vectors may have a low rank."""
    tensors = {}
    for name, x in columns.items():
        for part, tensor in enumerate((x.left, x.right) if isinstance(x, LowRank) else (x,)):
            tensors[f"the vectors for {name}" + ", second factor" * part] = tensor
    return _read(tensors)


def computed_numbers(numbers: list[float], dtype: torch.dtype) -> dict[str, Any]:
    """Return numbers that were computed in a dtype; the first one is the scale."""
    return _numbers(numbers, _COMPUTED.get(dtype, _COMPUTED_IN_HALF))


def check_same(source: str, other: Identity, this: Identity, remedy: str = "") -> None:
    """Compare two identities in all that the second one has, see ``check_identity``."""
    for name, new in this.items():
        old = other.get(name)
        if _are_numbers(old) and _are_numbers(new):
            if not _agree(old, new):
                raise ValueError(f"The {source} differs in {name}.{remedy}")
        elif old != new:
            values = f": it has {old}, not {new}"
            values = values if len(values) < _SHORT else ""
            raise ValueError(f"The {source} differs in {name}{values}.{remedy}")


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and "numbers" in value


def _agree(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether numbers are the same within rounding, relative to the first one, a norm."""
    if old["kind"] != new["kind"]:
        return False
    tolerance = max(old["tolerance"], new["tolerance"])
    scale = max(old["numbers"][0], new["numbers"][0])
    pairs = zip(old["numbers"], new["numbers"], strict=True)
    return all(a == b or abs(a - b) <= tolerance * scale or (a != a and b != b) for a, b in pairs)


# --- numbers


def _read(tensors: Mapping[str, Tensor], tolerance: float = _READ) -> Identity:
    """Return shape, dtype and sketch of tensors by name."""
    parts = {
        f"{name}, part {i}" if i else name: x
        for name, whole in tensors.items()
        for i, x in enumerate(strided_tensors(whole))
    }
    if not parts:
        return {}
    numbers = torch.stack([sketch(x).cpu() for x in parts.values()]).tolist()
    return {
        name: _numbers(of_part, tolerance, str(tuple(x.shape)), str(x.dtype))
        for of_part, (name, x) in zip(numbers, parts.items(), strict=True)
    }


def _numbers(numbers: list[float], tolerance: float, *kind: str) -> dict[str, Any]:
    return {"numbers": numbers, "tolerance": tolerance, "kind": " ".join(kind)}


def _facts(operator: DataLinearOperator, options: Mapping[str, Any]) -> Identity:
    """Return the part that takes no evaluation of the model, as JSON has it."""
    shapes, loss = operator.risk.space.shapes, operator.risk.loss
    facts = {
        "class": type(operator).__name__,
        **options,
        "parameters": list(shapes),
        **{f"the shape of {name}": shape for name, shape in shapes.items()},
        "dtype": str(operator.risk.space.dtype),
        "loss": repr(loss.description) if loss.is_function_of_values else loss.reduction,
    }
    return json.loads(json.dumps(facts))


def _values(operator: DataLinearOperator) -> Identity:
    """Return numbers of parameters and buffers of model and loss; sharded ones are gathered."""
    risk, found = operator.risk, Identity()
    if risk.model.shards:
        risk.peers.gather_objects(None)  # nobody evaluates the model any more
    for name, x in numbers_of(risk, sharded=True).items():
        is_sharded = isinstance(x, distributed_tensors())
        found |= _read({f"the values of {name}": x.full_tensor() if is_sharded else x})
    return found


def _on_batch(
    operator: DataLinearOperator, index: int | None = None, data: Batches | None = None
) -> Identity:
    """Return numbers of a batch, by default the first one with rows, and of what it leads to."""
    with DataLinearOperator._batches(operator, "first batch", data) as problems:
        seed_everything(0)
        for problem in islice(problems, index or 0, None):
            found = _numbers_of(problem)
            if index is not None or found[_SAMPLES]:
                return {_NUMBER: problem.number, **found}
    raise ValueError("The data has no sample.")


def _numbers_of(problem: BatchProblem) -> Identity:
    """Return numbers of a batch, of loss and output, and of gradients in random directions."""
    batch, loss = problem.batch, problem.loss
    read = {f"tensor {i} of the first batch": x for i, x in enumerate(leaves((batch.X, batch.y)))}
    with problem.recording("once", is_summed=False) as (_, inputs, output):
        with problem.formulas():
            value, _ = problem.loss_sum(output)
            start, cotangent, computed = value, None, {}
            if not problem.loss_needs_graph:
                # gradients of samples may cancel, those with random weights do not
                slope = loss.gradient(output.detach(), batch.y)
                weights = torch.randn(len(output), generator=seeded("cpu", 0), device="cpu")
                weights = weights.to(slope).reshape(-1, *[1] * (slope.ndim - 1))
                start, cotangent = output, slope * weights
                computed["the loss's gradient on the first batch"] = slope
        computed["the output on the first batch"] = output.detach().nan_to_num(0.0, 0.0, 0.0)
        value = value.detach()
        problem.check_finite(value)
        gradients = sketches(start, cotangent, inputs)
    problem.check_finite(value, gradients)
    dtypes = {output.dtype, *(x.dtype for x in problem.model.tensors().values())}
    tolerance = max(
        _COMPUTED.get(dtype, _COMPUTED_IN_HALF) for dtype in dtypes if dtype.is_floating_point
    )
    number = float(value)
    return {
        _SAMPLES: problem.samples_of(output) if len(output) else 0,
        **_read(read),
        "the loss on the first batch": _numbers([abs(number), number], tolerance),
        **_read(computed, tolerance),
        **{
            f"the gradient of {name} on the first batch": _numbers(x.tolist(), tolerance)
            for name, x in gradients.items()
        },
    }
