"""How many collectives a product takes, and what a difference between processes costs."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from contract import ALL
from processes import classifier, fails, group, part, rank, registry, vector
from test_parallel import run

import curvlinops
from curvlinops.team.messages import gather_objects

CHECKS, check = registry()
#: All functions of torch.distributed that communicate; some have new names since PyTorch 2.13.
COLLECTIVES = [
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "barrier"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "all_to_all"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "send", "recv", "isend", "irecv"),
]


@contextmanager
def counted() -> Iterator[Counter]:
    """Count the collectives of this process."""
    numbers: Counter = Counter()

    def counting(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            numbers[name] += 1
            return function(*args, **kwargs)

        return call

    present = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    with mock.patch.multiple(dist, **{n: counting(n, f) for n, f in present.items()}):
        yield numbers


@check()
def collectives_per_product() -> None:
    p = classifier()
    p = replace(p, data=part(p.data))
    for case in ("hessian", "ggn", "fisher", "mc", "ggn-diagonal"):
        A = ALL[case].build(p, process_group=group())
        v = vector(A, 2)
        with counted() as fresh:
            A @ v
        with A.linearized():
            A @ v
            with counted() as kept:
                A @ v
            with counted() as other:
                A @ (v * (1 + 1e-15 * rank()))
            with counted() as damped:
                A.damped(0.1) @ v
        for numbers in (fresh, kept, damped):
            assert numbers.total() == 2, (case, numbers)
            assert numbers["all_reduce"] == 1
        # vectors that differ by rounding
        assert other.total() == 2, other
        with counted() as numbers:
            A.gradient_and_loss()
        assert numbers.total() == 2, numbers
        solver = curvlinops.CGInverseLinearOperator(A, damping=1.0)
        with counted() as numbers:
            iterations = int(solver.solve(vector(A)).iterations)
        assert numbers.total() <= 4 * iterations + 16, (iterations, numbers)  # one for callbacks


@check()
def objects_of_any_size() -> None:
    """Objects take one collective, unless one of them is long."""
    for sizes in ((0, 1), (0, 10**5), (500, 600), (400, 450), (10**4, 10**5)):
        objects = [bytes(size) for size in sizes]
        with counted() as numbers:
            assert gather_objects(objects[rank()], group()) == objects
        assert numbers["all_gather_object"] == (max(sizes) > 512)


@check()
def values_inside_of_linearized() -> None:
    """An environment variable lets products compare parameters that PyTorch does not watch."""
    p = classifier()
    A = ALL["hessian"].build(replace(p, data=part(p.data)), process_group=group())
    v, before = vector(A), p.params[0].detach().clone()
    with mock.patch.dict(os.environ, {"CURVLINOPS_COMPARE_PROCESSES": "1"}), A.linearized():
        A @ v
        p.params[0].data += rank()
        with fails(ValueError, "differ in the values of 0.weight"):
            A @ v
        p.params[0].data.copy_(before)
        A @ v


@pytest.mark.extensive
def test_collectives(tmp_path: Path):
    """Two processes run all checks of this file."""
    call = "import test_collectives; "
    call += f"processes.main(test_collectives.CHECKS, RANK, 2, {str(tmp_path)!r})"
    logs = run(call, 2, tmp_path)
    for rank_, log in enumerate(logs):
        found = json.loads((tmp_path / f"found.{rank_}").read_text())
        assert found.keys() == CHECKS[2].keys(), log
        assert not any(found.values()), "\n".join(found.values())
