"""The key of an operator: options, shapes, and numbers of model, loss and first batch."""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from curvlinops.risk.agreement import numbers_of
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.first_batch import sketches
from curvlinops.risk.data import Batches
from curvlinops.support.keys import Key, check_key, is_numbers, numbers, of_tensors, tolerance_of
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import seed_everything, seeded
from curvlinops.support.torch_internals import distributed_tensors
from curvlinops.team.team import ALONE

_NUMBER, _SAMPLES = "the number of the batch", "the number of samples in the first batch"


def key_of(operator: Any, options: Mapping[str, Any], with_numbers: bool = True) -> Key:
    """Return what tells whether operators have the same options, model, loss and data.

    The data is represented by this process's first batch with rows: the model is evaluated on it
    once, with one backward pass, and with the same random numbers each time. Processes with shards
    of the model call it together. Options are plain values or numbers.
    """
    if not with_numbers:
        return _facts(operator, options)
    with (operator.risk.peers if operator.risk.model.shards else ALONE).raise_on_all_ranks():
        found = _on_batch(operator)
    return _facts(operator, options) | _values(operator) | found


def check_operator(
    source: str,
    key: Key,
    operator: Any,
    options: Mapping[str, Any],
    remedy: str = "",
    data: Batches | None = None,
) -> None:
    """Refuse what has the key of another operator by the first difference. All processes call it.

    The key is of ``data``, of which each process has its own, or of the operator's data. Messages
    begin with the ``source`` of the key and end with the remedy.
    """
    ranks = operator.risk.ranks
    with ranks.raise_on_all_ranks():
        facts = _facts(operator, options)
        check_key(source, key, facts, remedy)  # before the model is evaluated
    if _NUMBER not in key:
        return
    index, rank = divmod(key[_NUMBER], ranks.size)
    with operator.risk.peers.raise_on_all_ranks():
        is_own = data is not None or rank == ranks.rank
        found = _on_batch(operator, index, data) if is_own else {}
    if data is None:
        found = ranks.gather_objects(found)[rank]
    missing = {name: None for name, x in key.items() if is_numbers(x)}
    with ranks.raise_on_all_ranks():
        check_key(source, key, missing | facts | _values(operator) | found, remedy)


def check_model(source: str, key: Key, operator: Any) -> None:
    """Refuse an operator with another model or other parameters; loss and data may be others."""
    this = _facts(operator, {}) | _values(operator)
    starts = ("parameters", "the shape of ", "dtype", "the values of ")
    check_key(source, key, {n: x for n, x in this.items() if n in key and n.startswith(starts)})


def _facts(operator: Any, options: Mapping[str, Any]) -> Key:
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


def _values(operator: Any) -> Key:
    """Return numbers of parameters and buffers of model and loss; sharded ones are gathered."""
    risk, found = operator.risk, Key()
    if risk.model.shards:
        risk.peers.gather_objects(None)  # nobody evaluates the model any more
    for name, x in numbers_of(risk, sharded=True).items():
        is_sharded = isinstance(x, distributed_tensors())
        found |= of_tensors({f"the values of {name}": x.full_tensor() if is_sharded else x})
    return found


def _on_batch(operator: Any, index: int | None = None, data: Batches | None = None) -> Key:
    """Return numbers of a batch and its gradient, by default the first batch with rows."""
    with operator._batches("first batch", data) as problems:
        seed_everything(0)
        for problem in islice(problems, index or 0, None):
            found = _numbers_of(problem)
            if index is not None or found[_SAMPLES]:
                return {_NUMBER: problem.number, **found}
    return {}


def _numbers_of(problem: BatchProblem) -> Key:
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
    tensors = (output, *problem.model.tensors().values())
    tolerance, number = tolerance_of(*(x.dtype for x in tensors)), float(value)
    return {
        _SAMPLES: problem.samples_of(output) if len(output) else 0,
        **of_tensors(read),
        "the loss on the first batch": numbers([abs(number), number], tolerance),
        **of_tensors(computed, tolerance),
        **{
            f"the gradient of {name} on the first batch": numbers(x.tolist(), tolerance)
            for name, x in gradients.items()
        },
    }
