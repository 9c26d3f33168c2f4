"""Checks of test_parallel.py: each process has the whole model, and a part of the data."""

import copy
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import problems
import torch
import torch.distributed as dist
from contract import ALL, FACTORED, error, matrix
from models import Experts, Rewired, Using
from problems import Problem
from processes import (
    assert_alike_everywhere,
    assert_same_everywhere,
    classifier,
    everywhere,
    fails,
    group,
    part,
    rank,
    refuses,
    registry,
    vector,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import Both, copied, uses_of

import curvlinops
from curvlinops import KFACLinearOperator
from curvlinops.integrations.transformers import problem
from curvlinops.operators.kfac.sums import ChangedError
from curvlinops.structured.kronecker import SumOfKroneckersLinearOperator
from curvlinops.team.messages import gather_objects
from curvlinops.team.team import Team
from curvlinops.training import KFACPreconditioner

CHECKS, check = registry()


def both(case: str, p: Problem, **options: Any) -> tuple[Any, Any]:
    """The operator of all processes together, and that of one with all data."""
    return Both(p, copied(p)).both(case, **options)


# --- products -------------------------------------------------------------------------------------


@check()
def other_kinds_of_products() -> None:
    together, alone = both("hessian", classifier((4, 2, 3, 1)), block_sizes=[2, 2])
    found = []
    for operator in (together, alone):
        v = vector(alone).requires_grad_()
        (v @ (operator @ v)).backward()  # a derivative of a product
        some = curvlinops.SubmatrixLinearOperator(operator, ["0.bias"], ["2.weight"])
        product = torch.from_numpy(operator @ np.ones(len(v)))
        found.append([v.grad, matrix(some), matrix(operator), product])
    torch.testing.assert_close(*found)
    for case in ("hessian", "ggn", "fisher"):
        together, alone = both(case, problems.make("closure"))
        assert error(matrix(together), matrix(alone)) <= 1e-12
        assert_same_everywhere(matrix(together))


@check()
def writes_inside_of_linearized() -> None:
    p = classifier()
    together, alone = both("ggn", p)
    v = vector(alone)
    with together.linearized():
        together @ v
        changed(lambda p: p.params[1].mul_(1), p)  # the same numbers
        refuses(RuntimeError, "'0.bias' was overwritten", together.__matmul__, v, on=1)
    torch.testing.assert_close(together @ v, alone @ v)


# --- what must be the same ------------------------------------------------------------------------


@check()
def functions_are_read_anew() -> None:
    """At the beginning of each use."""
    params = {"W": torch.ones(3, 3).double()}
    p = replace(classifier(), model=lambda params, X: X @ params["W"], params=params)
    G, _ = both("ggn", p)
    W = params["W"]
    for use in uses_of(G, vector(G)).values():
        if rank() == 1:
            params["W"] = torch.ones(2, 3).double()
        refuses(ValueError, "'W' is now of shape", use, on=1)
        params["W"] = W
        use()


def changed(change: Callable[[Problem], None], p: Problem | None = None) -> Problem:
    """A problem that is another one on the second process."""
    p = p or classifier()
    if rank() == 1:
        with torch.no_grad():
            change(p)
    return p


@check()
def other_parameters() -> None:
    for change in (
        lambda p: p.params[0][0, 0].add_(1e-9),
        lambda p: p.params[0].copy_(p.params[0].flip(0)),
    ):
        refuses(
            ValueError, "differ in the values of .*(weight|bias)", both, "hessian", changed(change)
        )
    p = classifier()
    together, alone = both("hessian", p)
    v, match = vector(alone), "differ in the values of 0.bias"
    assert_same_everywhere(together @ v)
    changed(lambda p: p.params[1].add_(1e-8), p)
    refuses(ValueError, match, together.linearized().__enter__)
    changed(lambda p: p.params[1].sub_(1e-8), p)
    torch.testing.assert_close(together @ v, alone @ v)


def interacting(output: Tensor, target: Tensor) -> Tensor:
    return (output @ output.T).square().sum()


def own_loss(output: Tensor, target: Tensor, **options: float) -> Tensor:
    """A function that is none of PyTorch's."""
    return nn.functional.cross_entropy(output, target, reduction="sum", **options)


@check()
def other_arguments() -> None:
    """One process has others, or wrong ones."""
    p, other = classifier(), rank() == 1
    refused, hessian = partial(refuses, ValueError), partial(both, "hessian")
    shard = ALL["hessian"].build(replace(p, data=part(p.data)), process_group=group())
    assert re.search(rf"Hessian.* batch(es)? on rank {rank()} of 2, ", repr(shard))
    # models and parameters
    wide = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = wide if other else p.model
    changed_model = replace(p, model=model, params=list(model.parameters()))
    refused("differ in parameter '0.weight'", hessian, changed_model)
    order = p.params[::-1] if other else p.params
    refused("differ in the order of parameters", hessian, replace(p, params=order))
    params = [nn.Parameter(torch.ones(3))] if other else p.params
    refused("not a parameter of the model", hessian, replace(p, params=params), on=1)
    frozen = changed(lambda p: p.params[0].add_(1.0))
    frozen = replace(frozen, params=frozen.params[2:])
    refused(r"\(frozen parameter or buffer\)", hessian, frozen)
    noisy = nn.Sequential(*p.model, nn.Dropout()).train(other)
    refuses(RuntimeError, "switches Dropout off", hessian, replace(p, model=noisy), on=1)
    # losses
    option = {"label_smoothing": 0.1 * rank()}
    for loss in (nn.CrossEntropyLoss(reduction="sum", **option), partial(own_loss, **option)):
        its = {} if isinstance(loss, nn.Module) else {"reduction": "sum"}
        refused("differ in loss.*label_smoothing", hessian, replace(p, loss=loss, **its))
    refused("differ in loss.*sum", hessian, classifier(reduction=("mean", "sum")[rank()]))
    weight = torch.tensor([1.0, 2.0 + rank(), 3.0]).double()
    refused(r"\(frozen parameter or buffer\)", hessian, classifier(weight=weight))
    # one batch of each process is not all data
    few = replace(p, loss=interacting, reduction="sum", data=part(p.data)[:1])
    build = partial(ALL["hessian"].build, few, process_group=group())
    refused("interacting is not the sum of its samples' losses", build)
    # options
    for case, options in {
        "fisher": {"terms": ("term", "sample")[rank()]},
        "mc": {"mc_samples": 1 + rank()},
        "ggn-diagonal": {"mc_samples": rank()},
        "kfac": {"fisher_type": ("type-2", "empirical")[rank()]},
    }.items():
        refused("differ in option '", both, case, p, **options)
    refused("differ in blocks", hessian, p, block_sizes=[2, 2] if other else [1, 3])
    refused("cache must be", hessian, p, cache=-1 if other else "auto", on=1)
    refused("rows for the data of one process", both, "gradients", p, process_group=group())
    for case in ("jacobian", "transposed"):
        refuses(TypeError, "process_group", ALL[case].build, p, process_group=group())
    # operations
    together, alone = hessian(p)
    v = vector(alone)
    use = together.gradient_and_loss if other else partial(together.__matmul__, v)
    refused(r"differ in operation.*matmat.*gradient_and_loss", use)
    columns = vector(alone, 2 + rank())
    refused("differ in the number of vectors", together.__matmul__, columns)
    torch.testing.assert_close(together @ v, alone @ v)


@check()
def groups() -> None:
    p = classifier()
    singles = [dist.new_group([n]) for n in range(2)]
    for match, wrong in (
        ("process_group must be", "gloo"),
        ("to which this process belongs", singles[1 - rank()]),
    ):
        refuses(TypeError, match, ALL["hessian"].build, p, process_group=wrong)
    alone = ALL["hessian"].build(p, process_group=singles[rank()])
    assert torch.equal(matrix(alone), matrix(ALL["hessian"].build(p)))
    together, alone = both("hessian", p)
    v = vector(alone)
    torch.testing.assert_close(copy.deepcopy(together) @ v, alone @ v)
    refuses(TypeError, "process_group cannot be pickled", pickle.dumps, together)
    K, _ = both("kfac", p)
    K.compute_kronecker_factors()
    if rank() == 0:  # it needs no other process
        curvlinops.hutchinson_trace(K, 8, callback=lambda state: None)


@check()
def wrapped_models() -> None:
    p = changed(lambda p: p.params[0].add_(1.0))
    wrapped = nn.parallel.DistributedDataParallel(p.model)  # sends the first process's values
    together, alone = both("hessian", replace(p, model=wrapped, params=list(wrapped.parameters())))
    for expected in (alone, ALL["hessian"].build(classifier())):
        torch.testing.assert_close(matrix(together), matrix(expected))


@check()
def training_of_replicas() -> None:
    """Preconditioned replicas stay equal, and have the run of one process."""

    def run(num: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        data = [(torch.randn(8, 5).double(), torch.randint(3, (8,))) for _ in range(5)]
        data = [(X[rank() % num :: num], y[rank() % num :: num]) for X, y in data]
        if num > 1:
            model = nn.parallel.DistributedDataParallel(model)
        loss, params = nn.CrossEntropyLoss(), list(model.parameters())
        processes = group() if num > 1 else None
        K = KFACLinearOperator(
            model, loss, params, data[:1], fisher_type="type-2", process_group=processes
        )
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        preconditioner = KFACPreconditioner(K, optimizer, update_every=2, invert_every=2)
        for X, y in data:
            optimizer.zero_grad()
            loss(model(X), y).backward()
            preconditioner.step(X, y)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in params])

    together = run(2)
    assert_same_everywhere(together)
    assert error(together, run(1)) <= 1e-12


@check()
def parts_of_parameters() -> None:
    p = classifier()
    weight = distribute_tensor(p.params[0].detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    closure = replace(p, model=lambda x: x @ weight.mT, params=[weight])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would like another device
        spread = FullyShardedDataParallel(classifier().model, device_id=torch.device("cpu"))
    outer = nn.Sequential(spread)
    outer = replace(p, model=outer, params=list(outer.parameters()))
    for match, use in (
        (r"\['0'\] are DTensors", lambda: ALL["hessian"].build(closure)),
        ("module '0' is FullyShardedDataParallel", lambda: ALL["hessian"].build(outer)),
        ("The model is FullyShardedDataParallel", lambda: problem(spread, [{}])),
    ):
        refuses(TypeError, f"{match}: .*only a part", use)


@check(3)
def part_of_all_processes() -> None:
    p = classifier()
    pair = dist.new_group([1, 2])
    if rank() == 0:
        return
    data = p.data[rank() - 1 :: 2]
    together = ALL["mc"].build(replace(p, data=data), process_group=pair)
    torch.testing.assert_close(matrix(together), matrix(ALL["mc"].build(p)))
    if rank() == 2:
        data[0] = (data[0][0] * torch.nan, data[0][1])
    refuses(ValueError, "batch 0", together.gradient_and_loss, on=2)


# --- factors --------------------------------------------------------------------------------------


@check()
def saving() -> None:
    p = classifier()
    for case in FACTORED:
        together, alone = both(case, p)
        again, expected, path = both(case, p)[0], matrix(together), Path(f"{case}.{rank()}")
        together.save(path)
        for _ in range(20):  # by all processes to one path
            together.save(case)
        for loaded, saved in ((alone, path), (alone, case), (again, path)):  # by a process alone
            loaded.load(saved)
            torch.testing.assert_close(matrix(loaded), expected)
        again.update(p.data[rank()])
        assert_alike_everywhere(matrix(again))
        loaded = ALL[case].operator.from_state_dict(
            together.state_dict(), p.model, p.loss, p.params, part(p.data),
            process_group=group(), fallback="dense",
        )  # fmt: skip
        torch.testing.assert_close(matrix(loaded), expected)
        own, alone = both(case, p, factor_placement="partition")
        refuses(ValueError, "call curvlinops.write_factors", own.save, "nowhere")
        refuses(ValueError, "cannot be merged", own.merge, alone)
    together, alone = both("kfac", p, fisher_type="empirical")
    refuses(ValueError, "same process_group", together.merge, alone)


# --- factors of which each process has a part -----------------------------------------------------


def held(operator: Any) -> int:
    """The bytes of an operator's factors on this process."""
    tensors = operator._factor_sums().tensors.values()
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


def layers(num: int = 6) -> Problem:
    """Several layers of equal size, two of which have the same inputs."""
    torch.manual_seed(0)
    parts = {str(i): nn.Linear(5, 5) for i in range(num)}

    def run(m: Using, x: Tensor) -> Tensor:
        h = m.get_submodule("0")(x).tanh() * m.get_submodule("1")(x)
        for i in range(2, num):
            h = m.get_submodule(str(i))(h).tanh()
        return h

    model = Using(run, **parts).double()
    data = [(torch.randn(n, 5).double(), torch.randint(5, (n,))) for n in (4, 2, 3)]
    return Problem.of(model, nn.CrossEntropyLoss(), data)


@check(2, 3)
def placement() -> None:
    p = layers()
    for case in ("kfac", "ekfac"):
        own, alone = both(case, p, factor_placement="partition")
        own.compute_kronecker_factors()
        num_bytes = [int(x) for x in everywhere(torch.tensor(held(own)))]
        every = held(alone)
        most = 0.6 if dist.get_world_size() == 2 else 0.45
        assert max(num_bytes) <= most * every, (num_bytes, every)
        assert sum(num_bytes) <= 1.05 * every, (case, num_bytes, every)
        assert len(own.input_covariances) < len(alone.input_covariances)


@check()
def directories() -> None:
    p, loss = classifier(), nn.CrossEntropyLoss(reduction="sum")
    w = Both(unnamed := replace(p, loss=lambda f, y: loss(f, y), reduction="sum"), copied(unnamed))
    for placed in ("partition", "replicate"):
        options = {"fisher_type": "empirical", "factor_placement": placed}
        for _ in range(2):  # computed, then found
            own, alone = w.both("kfac", **options)
            written = curvlinops.write_factors(own, f"unnamed-{placed}", parts=2)
            assert error(written.trace(), alone.trace()) <= 1e-12
    write = partial(refuses, ValueError, use=partial(curvlinops.write_factors, both("kfac", p)[0]))
    folder = Path(f"not shared {rank()}")
    write("not the directory of the first process", directory=folder, on=1)
    folder.mkdir(exist_ok=True)
    write("All processes must have the same directory", directory=folder, on=1)
    curvlinops.write_factors(both("kfac", p)[0], folder := Path("shared"))
    if rank() == 0:
        (folder / "x.safetensors").write_text("something")
    write("incomplete.*Delete", directory=folder, on=0)


@check()
def errors_of_parts() -> None:
    p = layers()
    with torch.no_grad():
        p.params[-2].zero_(), p.params[-4].zero_()
    own, _ = both("kfac", p, factor_placement="partition", fisher_type="empirical")
    try:
        own.inverse()
    except (ValueError, RuntimeError) as raised:
        assert "singular" in str(raised)  # on all processes
    else:
        raise AssertionError("There is no error.")
    v = vector(own) + rank()
    with fails(ValueError, "different vectors"):
        own.inverse(0.1) @ v
    p = problems.make("transformer-tied")
    own, alone = both("kfac", p, factor_placement="partition", fisher_type="empirical")
    expected = curvlinops.eigsh(alone, 2, seed=0).eigenvalues
    with mock.patch.object(SumOfKroneckersLinearOperator, "can_be_written", False):
        with fails(ValueError, "too large for exact damping", on=1):
            own.inverse(0.1, use_exact_damping=True)
        assert error(curvlinops.eigsh(own, 2, seed=0).eigenvalues, expected) <= 1e-10


@check()
def bases_that_are_lost() -> None:
    """A layer gets another bias for some inputs."""

    def run(m: Using, x: Tensor) -> Tensor:
        bias = m.other if x[0, 0] > 5 else m.first.bias
        return m.head(nn.functional.linear(x, m.first.weight, bias).tanh())

    make = lambda: Using(run, first=nn.Linear(3, 3), other=torch.randn(3), head=nn.Linear(3, 3))  # noqa: E731
    p = classifier(make=make)
    p = replace(p, params=dict(p.model.named_parameters()))
    X, y = p.data[0]
    options = {"fisher_type": "empirical", "separate_weight_and_bias": False}
    for placed, on in (("replicate", None), ("partition", 0)):
        K, _ = both("ekfac", p, factor_placement=placed, **options)
        K.compute_kronecker_factors()
        refuses(ChangedError, "first.weight in other ways", K.update, (X + 10, y), on=on)


@check()
def memory_for_sums_of_others() -> None:
    ranks, own = Team(group()), {} if rank() else {"a": torch.ones(2)}
    for share in (ranks.add_all, ranks.exchange):
        with fails(RuntimeError, "device type.*nowhere", on=1):
            share(own, "nowhere" if rank() else "cpu")
        assert torch.equal(share(own, "cpu")["a"], torch.ones(2))


@check()
def experts_of_processes() -> None:
    """Each process uses other parameters."""
    torch.manual_seed(0)
    net, x = Experts().double(), torch.randn(9, 3).double()
    data = [(x[i], x[i][:, :2].sin()) for i in (x[:, 0] <= 0, x[:, 0] > 0)]
    p = Problem(net, nn.MSELoss(), dict(net.named_parameters()), data, mc=True)
    options = {"fisher_type": "empirical", "check_deterministic": False}
    for case in FACTORED:
        together, alone = both(case, p, **options)
        assert error(matrix(together), matrix(alone)) <= 1e-12
        assert together.report() == alone.report()
        assert_alike_everywhere(matrix(together))
        first, _ = both(case, replace(p, data=[data[0]] * 2), **options)
        first.update(data[rank()])
        alone = ALL[case].build(replace(p, data=[*data[:1] * 3, data[1]]), **options)
        assert error(first.trace(), alone.trace()) <= 1e-12


@check()
def other_uses_of_parameters() -> None:
    """Those of one process do not go together with those of the other."""
    torch.manual_seed(0)
    net, x, match = Rewired().double(), torch.randint(3, (6,)), "embed.weight in other ways"
    data = [(x, (x + 1) % 3) for x in (x[:4], x[4:])]
    p = Problem(net, nn.CrossEntropyLoss(), dict(net.named_parameters()), data, mc=True)
    options = {"fisher_type": "empirical", "check_deterministic": False}
    for case in FACTORED:
        refuses(ChangedError, match, both(case, p, **options)[0].trace, on=0)
    K, _ = both("kfac", replace(p, data=[data[0]] * 2), **options)
    refuses(ChangedError, match, K.update, data[rank()], on=1)


# --- how often processes communicate --------------------------------------------------------------

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


@check(3)
def documentation() -> None:
    """The reference continues the code of the guide."""
    folder = Path(__file__).parents[2] / "docs"
    pages = ("distributed.md", "distributed_reference.md")
    text = "".join((folder / page).read_text() for page in pages)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    exec(compile(code, "distributed.md", "exec"), {})
    assert "process_group" in code
