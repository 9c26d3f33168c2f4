"""Checks of test_parallel.py: each process has the whole model, and a part of the data."""

import copy
import os
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import problems
import scipy.sparse.linalg
import torch
import torch.distributed as dist
from contract import ALL, CASES, error, matrix
from live_batches import WatchedBatches, check_batches_are_freed, saving_outputs
from models import Experts, Rewired, Using
from problems import Problem
from processes import (
    Failing,
    assert_alike_everywhere,
    assert_same_everywhere,
    check_callbacks,
    classifier,
    everywhere,
    fails,
    group,
    part,
    rank,
    registry,
    vector,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import curvlinops
from curvlinops import EKFACLinearOperator, KFACLinearOperator
from curvlinops.integrations.transformers import problem
from curvlinops.operators.kfac.sums import ChangedError
from curvlinops.structured.kronecker import SumOfKroneckersLinearOperator
from curvlinops.team.team import Ranks
from curvlinops.training import KFACPreconditioner

CHECKS, check = registry()

#: Whether there are language models to check.
try:
    import transformers
except ImportError:
    transformers = None


def both(case: str, p: Problem, **options: Any) -> tuple[Any, Any]:
    """The operator of all processes together, and that of one with all data."""
    shard = replace(p, data=part(p.data))
    together = ALL[case].build(shard, process_group=group(), **options)
    return together, ALL[case].build(p, **options)


# --- products -------------------------------------------------------------------------------------

#: Sums and means, class weights, ignored targets (on one process all), terms that are no samples.
PROBLEMS = (
    "mlp-ce-sum", "classes-ce-all-mean", "classes-ce-ignore-mean", "tokens-mse-mean",
    "mlp-user-mean", "transformer-tied", "closure",
)  # fmt: skip


def product(case: str, name: str) -> Callable[[], None]:
    def run() -> None:
        p = problems.make(name)
        together, alone = both(case, p)
        found, tolerance = matrix(together), 1e-12 if p.tolerance <= 1e-6 else 10 * p.tolerance
        assert error(found, matrix(alone)) <= tolerance
        assert_same_everywhere(found)

    return run


for _name in PROBLEMS:
    _mc = problems.make(_name).mc
    for _case, _kind in CASES.items():
        if _kind.square and (_mc or not _kind.needs_root):
            CHECKS[2][f"{_case}-{_name}"] = product(_case, _name)


@check()
def other_kinds_of_products() -> None:
    together, alone = both("hessian", classifier((4, 2, 3, 1)), block_sizes=[2, 2])
    found = []
    for operator in (together, alone):
        v = vector(alone).requires_grad_()
        (v @ (operator @ v)).backward()  # a derivative of a product
        some = curvlinops.SubmatrixLinearOperator(operator, ["0.bias"], ["2.weight"])
        gradient, loss = operator.gradient_and_loss()
        products = [operator @ vector(alone, 3), torch.from_numpy(operator @ np.ones(len(v)))]
        found.append([v.grad, matrix(some), matrix(operator), *gradient, loss, *products])
    torch.testing.assert_close(*found)


@check()
def losses_along_directions() -> None:
    together, alone = both("hessian", classifier((4, 2, 3, 1)))
    found, expected = (
        curvlinops.loss_along(H, vector(alone, 2), [0, 0.3]) for H in (together, alone)
    )
    torch.testing.assert_close(found, expected)
    with fails(ValueError, "differ in points"):
        curvlinops.loss_along(together, vector(alone), [0.1 * rank()])


@check()
def vectors_of_the_caller_stay() -> None:
    together, alone = both("hessian", classifier())
    v = vector(alone)
    drifted = v * (1 + 1e-12 * rank())
    before = drifted.clone()
    found = together @ drifted
    torch.testing.assert_close(found, alone @ v, rtol=1e-11, atol=0)
    assert_same_everywhere(found)
    assert torch.equal(drifted, before)


@check(3)
def diagonals() -> None:
    together, alone = both("ggn-diagonal", classifier((4, 2, 3, 1)), mc_samples=2)
    torch.testing.assert_close(together.trace(), alone.trace())
    torch.testing.assert_close(together.diagonal(), alone.diagonal())


@check()
def changes_of_parameters() -> None:
    """Each process decides for itself what it keeps inside of ``linearized()``."""
    for cache in ("auto", ("auto", "none")[rank()]):
        p = classifier()
        together, alone = both("hessian", p, cache=cache)
        v = vector(alone)
        for _ in range(3):
            torch.testing.assert_close(together @ v, alone @ v)
            with together.linearized():
                for _ in range(3):
                    torch.testing.assert_close(together @ v, alone @ v)
            with torch.no_grad():
                for param in p.params:
                    param.mul_(1.1)


@check()
def writes_inside_of_linearized() -> None:
    p = classifier()
    together, alone = both("ggn", p)
    v = vector(alone)
    with together.linearized():
        together @ v
        changed(lambda p: p.params[1].mul_(1), p)  # the same numbers
        with fails(RuntimeError, "'0.bias' was overwritten", on=1):
            together @ v
    torch.testing.assert_close(together @ v, alone @ v)


@check()
def random_numbers() -> None:
    """No two batches have the same, though all are alike."""
    p = classifier((1, 1, 1, 1))
    p = replace(p, data=[(torch.ones(5, 3).double(), p.data[0][1].expand(5))] * 4)
    drawn = []
    for data in (p.data[:1], p.data[:2]):
        shard = replace(p, data=data)
        F = ALL["mc"].build(shard, process_group=group(), mc_samples=1)
        drawn.append(F @ vector(F))
    only = [ALL["mc"].build(replace(p, data=p.data[:n]), mc_samples=1) for n in (2, 4)]
    for found, operator in zip(drawn, only, strict=True):
        torch.testing.assert_close(found, operator @ vector(operator))


# --- algorithms -----------------------------------------------------------------------------------


@check()
def algorithms() -> None:
    together, alone = both("ggn", classifier())
    identity = curvlinops.IdentityLinearOperator(alone.space)
    v = vector(alone)
    found = curvlinops.eigsh(together, 2, seed=0).eigenvalues
    torch.testing.assert_close(found, curvlinops.eigsh(alone, 2, seed=0).eigenvalues)
    assert_alike_everywhere(found)
    start = v.numpy()
    found = scipy.sparse.linalg.eigsh(together, 2, v0=start)[0]
    expected = scipy.sparse.linalg.eigsh(alone, 2, v0=start)[0]
    np.testing.assert_allclose(found, expected)
    assert_alike_everywhere(found)
    found = curvlinops.CGInverseLinearOperator(together + 0.1 * identity, rtol=1e-10) @ v
    expected = curvlinops.CGInverseLinearOperator(alone + 0.1 * identity, rtol=1e-10) @ v
    torch.testing.assert_close(found, expected)
    assert_alike_everywhere(found)
    found = curvlinops.hutchinson_trace(together, 5, seed=0)
    torch.testing.assert_close(found, curvlinops.hutchinson_trace(alone, 5, seed=0))
    assert_alike_everywhere(found)


@check()
def algorithms_out_of_step() -> None:
    """Other random vectors than the first process has would be multiplied in vain."""
    together, _ = both("ggn", classifier())
    with fails(ValueError, "different vectors.*seed"):
        curvlinops.hutchinson_trace(together, 5, seed=rank())
    with fails(ValueError, "different vectors"):
        together @ (vector(together, 3) * torch.tensor([1, 1, 1 + 0.1 * rank()]))


@check()
def callbacks() -> None:
    together, _ = both("ggn", classifier())
    K, _ = both("kfac", classifier(), factor_placement="partition")
    identity = curvlinops.IdentityLinearOperator(together.space)
    inverse = curvlinops.CGInverseLinearOperator(identity, preconditioner=K.inverse(0.5))
    blocks = curvlinops.SubmatrixLinearOperator(K.damped(0.5), ["*"], ["*"])
    for A in (together.damped(0.5), blocks, inverse):
        check_callbacks(A, vector(A))
    alone, _ = both("kfac", classifier())
    alone.compute_kronecker_factors()
    if rank() == 0:  # it needs no other process
        curvlinops.hutchinson_trace(alone, 8, callback=lambda state: None)


@check()
def batches_are_freed() -> None:
    p = classifier((4, 2, 3, 1), saving_outputs)

    def build(case: str, data: WatchedBatches) -> Any:
        options = {"process_group": group()} if ALL[case].square else {}
        return ALL[case].build(replace(p, data=data), **options)

    check_batches_are_freed(build, part(p.data))


# --- errors ---------------------------------------------------------------------------------------


@check()
def errors_of_the_model() -> None:
    p = classifier(make=lambda: nn.Sequential(nn.Linear(3, 4), Failing(), nn.Linear(4, 3)))
    model = p.model[1]
    for case in ("hessian", "ggn", "mc", "fisher", "ggn-diagonal", "kfac", "ekfac"):
        model.fails = False
        together, alone = both(case, p)
        model.fails = True
        with fails(KeyError, "here", on=1):
            together @ vector(together)
        with fails(KeyError, "here", on=1):
            together.gradient_and_loss()
        with fails(KeyError, "here", on=1):
            both(case, p)
        model.fails = False
        torch.testing.assert_close(together @ vector(together), alone @ vector(alone))
        if case in ("kfac", "ekfac"):
            model.fails = True
            with fails(KeyError, "here", on=1):
                together.update(p.data[0])
            with fails(KeyError, "here", on=1):
                together.compute_kronecker_factors()
            with fails(ValueError, "update.. takes a batch", on=1):
                together.update(None if rank() else p.data[0])


def uses_of(A: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """Calls with several communications each."""

    def context() -> None:
        with A.linearized():
            for _ in range(2):
                A @ v

    return {
        "product": lambda: A @ v,
        "product of products": lambda: (A @ A + A) @ v,
        "context": context,
        "gradient": lambda: A.gradient_and_loss(),
        "CG": lambda: curvlinops.CGInverseLinearOperator(A, damping=1.0) @ v,
        "eigsh": lambda: curvlinops.eigsh(A, 2, seed=0),
        "trace": lambda: curvlinops.hutchinson_trace(A, 2, seed=0),
    }


@check()
def interrupts() -> None:
    """Ctrl-C and the like, raised by the model."""
    for kind in (KeyboardInterrupt, SystemExit):
        p = classifier(make=lambda: nn.Sequential(nn.Linear(3, 4), Failing(), nn.Linear(4, 3)))
        G, _ = both("ggn", p)
        p.model[1].error = kind
        for use in uses_of(G, vector(G)).values():
            p.model[1].fails = True
            with fails(kind, "here", on=1):
                use()
            p.model[1].fails = False
            use()


@check()
def errors_of_solvers() -> None:
    """Errors between two products, and at the beginning."""

    class Broken(curvlinops.IdentityLinearOperator):
        fails = False

        def _apply(self, columns: Any) -> Any:
            if self.fails and rank() == 1:
                raise KeyError("here")
            return super()._apply(columns)

    G, _ = both("ggn", classifier())
    M, v = Broken(G.space), vector(G)
    for solver in (curvlinops.CGInverseLinearOperator, curvlinops.MINRESInverseLinearOperator):
        solver = solver(G, damping=0.1, preconditioner=M)
        M.fails = False
        expected = solver @ v
        M.fails = True
        with fails(KeyError, "here", on=1):
            solver @ v
        M.fails = False
        assert torch.equal(solver @ v, expected)
    with fails(ValueError, "num_matvecs", on=1):
        curvlinops.hutchinson_trace(G, 4 - 4 * rank())
    # the model is read anew at the beginning
    params = {"W": torch.ones(3, 3).double()}
    p = replace(classifier(), model=lambda params, X: X @ params["W"], params=params)
    G, _ = both("ggn", p)
    W = params["W"]
    for use in uses_of(G, vector(G)).values():
        if rank() == 1:
            params["W"] = torch.ones(2, 3).double()
        with fails(ValueError, "'W' is now of shape", on=1):
            use()
        params["W"] = W
        use()


@check()
def errors_of_the_data() -> None:
    p = classifier((4, 2, 3, 1))
    good = part(p.data)
    data = list(good)
    together = ALL["ggn"].build(replace(p, data=data), process_group=group())
    expected = together @ vector(together)
    X, y = good[0]
    for bad, kind, match in (
        ([(X * torch.nan, y)], ValueError, "batch 0"),
        ([(X, y[:1])], ValueError, "[Bb]atch"),
        ([X], ValueError, "expected a pair"),
        ([], ValueError, "data is empty"),
    ):
        for case in ("ggn", "kfac"):
            if rank() == 1:
                data[:] = bad
            with fails(kind, match, on=1):
                ALL[case].build(replace(p, data=data), process_group=group())
            later = ALL[case].build(
                replace(p, data=data), process_group=group(), check_deterministic=False
            )
            with fails(kind, match, on=1):
                later @ vector(together)
            data[:] = good
    torch.testing.assert_close(together @ vector(together), expected)


@check()
def errors_of_vectors() -> None:
    """A wrong vector on one process, or more vectors than on the other."""
    p = classifier()
    G, K = both("ggn", p)[0], both("kfac", p, fisher_type="empirical")[0]
    part_of_K = both("kfac", p, fisher_type="empirical", factor_placement="partition")[0]
    v = vector(G)
    wrong = {"NaN or infinite": v * torch.nan, r"shape \[30\]": v[1:], "complex": v * 1j}
    solver = curvlinops.CGInverseLinearOperator(G, damping=0.1)
    for A in (G, G @ G + 2 * G, solver, part_of_K, part_of_K.inverse(0.1), G @ K):
        for match, bad in wrong.items():
            kind = TypeError if match == "complex" else ValueError
            with fails(kind, match, on=1):
                A @ (bad if rank() == 1 else v)
    with fails(ValueError, "differ in the number of vectors.*0: 2; .*1: 0"):
        G @ vector(G, 2)[:, : 2 - 2 * rank()]
    assert (G @ vector(G, 0)).shape == (len(v), 0)


@check()
def nothing_but_ignored_targets() -> None:
    p = classifier()
    ignored = replace(p, data=[(X, torch.full_like(y, -100)) for X, y in p.data])
    together = ALL["ggn"].build(replace(ignored, data=part(ignored.data)), process_group=group())
    with fails(ValueError, "The data has no term"):
        together @ vector(together)
    with fails(ValueError, "The data has no term"):
        together.gradient_and_loss()


@check()
def constructors() -> None:
    p = classifier()
    shard = ALL["hessian"].build(replace(p, data=part(p.data)), process_group=group())
    assert re.search(rf"Hessian.* batch(es)? on rank {rank()} of 2, ", repr(shard))
    # one batch of each process is not all data
    arguments = p.model, interacting, p.params, part(p.data)[:1]
    with fails(ValueError, "interacting is not the sum of its samples' losses"):
        curvlinops.HessianLinearOperator(*arguments, reduction="sum", process_group=group())
    with fails(ValueError, "not a parameter of the model", on=1):
        params = [nn.Parameter(torch.ones(3))] if rank() == 1 else p.params
        ALL["hessian"].build(replace(p, params=params), process_group=group())
    noisy = nn.Sequential(*p.model, nn.Dropout()).train(rank() == 1)
    with fails(RuntimeError, "switches Dropout off", on=1):
        ALL["hessian"].build(replace(p, model=noisy), process_group=group())


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
        with fails(ValueError, "differ in the values of .*(weight|bias)"):
            both("hessian", changed(change))
    p = classifier()
    together, alone = both("hessian", p)
    operators = [both(case, p)[0] for case in ("ggn-diagonal", "kfac", "ekfac")]
    assert_same_everywhere(together @ vector(together))
    changed(lambda p: p.params[1].add_(1e-8), p)
    with fails(ValueError, "differ in the values of 0.bias"), together.linearized():
        pass
    with mock.patch.dict(os.environ, {"CURVLINOPS_COMPARE_PROCESSES": "1"}):
        with fails(ValueError, "differ in the values of 0.bias"):
            together.gradient_and_loss()
        for operator in (together, *operators):
            with fails(ValueError, "differ in the values of 0.bias"):
                operator @ vector(together)
    changed(lambda p: p.params[1].sub_(1e-8), p)
    torch.testing.assert_close(together @ vector(together), alone @ vector(together))


def interacting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output @ output.T).square().sum()


def own_loss(output: torch.Tensor, target: torch.Tensor, **options: float) -> torch.Tensor:
    """A function that is none of PyTorch's."""
    return nn.functional.cross_entropy(output, target, reduction="sum", **options)


@check()
def other_models() -> None:
    for name, match in (("params", "the order of parameters"), ("model", "parameter '0.weight'")):
        p = classifier()
        if rank() == 1 and name == "params":
            p = replace(p, params=p.params[::-1])
        if rank() == 1 and name == "model":
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
            p = replace(p, model=model, params=list(model.parameters()))
        with fails(ValueError, f"differ in {match}"):
            both("hessian", p)
    option = {"label_smoothing": 0.1 * rank()}
    with fails(ValueError, "differ in loss.*label_smoothing"):
        both("hessian", replace(classifier(), loss=nn.CrossEntropyLoss(**option)))
    with fails(ValueError, "differ in loss.*label_smoothing"):
        both("hessian", replace(classifier(), loss=partial(own_loss, **option), reduction="sum"))
    with fails(ValueError, "differ in loss.*sum"):
        both("hessian", classifier(reduction=("mean", "sum")[rank()]))
    weight = torch.tensor([1.0, 2.0, 3.0]).double()
    with fails(ValueError, r"\(frozen parameter or buffer\)"):
        both("hessian", classifier(weight=weight + torch.tensor([0, rank(), 0])))
    frozen = changed(lambda p: p.params[0].add_(1.0))
    with fails(ValueError, r"\(frozen parameter or buffer\)"):
        both("hessian", replace(frozen, params=frozen.params[2:]))


@check()
def ranks_without_samples() -> None:
    p = classifier()
    X, y = p.data[0]
    own = [(X, y)] if rank() == 0 else [(X[:0], y[:0])]
    for case in ("hessian", "ggn", "fisher", "ggn-diagonal", "kfac", "ekfac"):
        together = ALL[case].build(replace(p, data=own), process_group=group())
        alone = ALL[case].build(replace(p, data=[(X, y)]))
        torch.testing.assert_close(together @ vector(alone), alone @ vector(alone))
    none = replace(p, data=[(X[:0], y[:0])])
    with fails(ValueError, "no term|no sample"):
        ALL["kfac"].build(none, process_group=group(), check_deterministic=False).trace()


@check()
def other_operations() -> None:
    p = classifier()
    together, alone = both("hessian", p)
    with fails(ValueError, r"differ in operation.*matmat.*gradient_and_loss"):
        together.gradient_and_loss() if rank() else together @ vector(alone)
    with fails(ValueError, "differ in the number of vectors"):
        together @ vector(alone, 2 + rank())
    with fails(ValueError, "differ in blocks"):
        both("hessian", p, block_sizes=[2, 2] if rank() else [1, 3])
    for case, options in {
        "fisher": {"terms": ("term", "sample")[rank()]},
        "mc": {"mc_samples": 1 + rank()},
        "ggn-diagonal": {"mc_samples": rank()},
        "kfac": {"fisher_type": ("type-2", "empirical")[rank()]},
    }.items():
        with fails(ValueError, "differ in option '"):
            both(case, p, **options)
    with fails(ValueError, "cache must be", on=1):
        both("ggn", p, cache=-1 if rank() == 1 else "auto")
    torch.testing.assert_close(together @ vector(alone), alone @ vector(alone))


@check()
def rows() -> None:
    p = classifier()
    with fails(ValueError, "rows for the data of one process"):
        ALL["gradients"].build(p, process_group=group())
    for case in ("jacobian", "transposed"):
        with fails(TypeError, "process_group"):
            ALL[case].build(p, process_group=group())


@check()
def wrapped_models() -> None:
    p = changed(lambda p: p.params[0].add_(1.0))
    wrapped = nn.parallel.DistributedDataParallel(p.model)  # sends the first process's values
    p = replace(p, model=wrapped, params=list(wrapped.parameters()))
    torch.testing.assert_close(*map(matrix, both("hessian", p)))
    torch.testing.assert_close(
        matrix(both("hessian", p)[0]), matrix(both("hessian", classifier())[1])
    )


@check()
def wrapped_language_models() -> None:
    if transformers is None:
        return
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=6)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    texts = [{"input_ids": torch.randint(11, (2, 5))} for _ in range(3)]
    p = Problem(*problem(model, texts), mc=True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for net in (wrapped, torch.compile(wrapped, backend="eager")):
        own = Problem(*problem(net, part(texts)), mc=True)
        assert list(own.params) == list(p.params)
        for case in ("ggn", "kfac"):
            options = {"fisher_type": "empirical"} if case == "kfac" else {}
            together = ALL[case].build(own, process_group=group(), **options)
            alone = ALL[case].build(p, **options)
            assert error(together @ vector(alone), alone @ vector(alone)) <= 1e-10


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
def spread_parameters() -> None:
    mesh = init_device_mesh("cpu", (2,))
    p = classifier()
    weight = distribute_tensor(p.params[0].detach(), mesh, [Shard(0)])
    with fails(TypeError, r"\['0'\] are DTensors: .*each process has only a part"):
        ALL["hessian"].build(replace(p, model=lambda x: x @ weight.mT, params=[weight]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would like another device
        spread = nn.Sequential(
            FullyShardedDataParallel(classifier().model, device_id=torch.device("cpu"))
        )
    with fails(TypeError, "module '0' is FullyShardedDataParallel: .*only a part"):
        ALL["hessian"].build(replace(p, model=spread, params=list(spread.parameters())))
    with fails(TypeError, "The model is FullyShardedDataParallel: .*only a part"):
        problem(spread[0], [{}])


@check()
def groups() -> None:
    p = classifier()
    with fails(TypeError, "process_group must be"):
        ALL["hessian"].build(p, process_group="gloo")
    singles = [dist.new_group([n]) for n in range(2)]
    with fails(TypeError, "to which this process belongs"):
        ALL["hessian"].build(p, process_group=singles[1 - rank()])
    alone = ALL["hessian"].build(p, process_group=singles[rank()])
    assert torch.equal(matrix(alone), matrix(ALL["hessian"].build(p)))


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
    with fails(ValueError, "batch 0", on=2):
        together.gradient_and_loss()


@check()
def copies() -> None:
    together, alone = both("hessian", classifier())
    v = vector(alone)
    torch.testing.assert_close(copy.deepcopy(together) @ v, alone @ v)
    with fails(TypeError, "process_group cannot be pickled"):
        pickle.dumps(together)


# --- factors --------------------------------------------------------------------------------------

FACTORED = {
    "classes-ce-ignore-mean": ("type-2", "mc", "empirical"),
    "mlp-ce-sum": ("mc",),
    "cnn": ("type-2",),
    "transformer-tied": ("empirical",),
    "float32-mlp": ("type-2",),
}


def factors(case: str, name: str, fisher: str) -> Callable[[], None]:
    def run() -> None:
        p = problems.make(name)
        for options in ({}, {"separate_weight_and_bias": False, "kfac_approx": "reduce"}):
            together, alone = both(case, p, fisher_type=fisher, **options)
            state, expected = together.state_dict(), alone.state_dict()
            for key, value in state.items():
                if isinstance(value, Tensor):
                    assert_same_everywhere(value)
                    if case == "kfac":
                        scale = 1e-12 if value.dtype == torch.float64 else 1e-5
                        assert error(value, expected[key]) <= scale, key
            if together.torch_dtype == torch.float64:
                assert error(together.trace(), alone.trace()) <= 1e-12
                assert together.report() == alone.report()
                # with null spaces, where bases are not unique, EKFAC's depend on rounding
                if case == "kfac":
                    assert error(matrix(together), matrix(alone)) <= 1e-12
                    inverses = together.inverse(0.1), alone.inverse(0.1)
                    assert error(*map(matrix, inverses)) <= 1e-10

    return run


CHECKS[2] |= {
    f"{case}-{fisher}-{name}": factors(case, name, fisher)
    for name, fishers in FACTORED.items()
    for fisher in fishers
    for case in ("kfac", "ekfac")
}


def updates(case: str) -> Callable[[], None]:
    def run() -> None:
        p = classifier((5, 4, 6, 7, 4))
        arguments = {"fisher_type": "mc", "mc_samples": 2}
        some = replace(p, data=p.data[:3])  # numbers 0 and 2 here, 1 there
        together, alone = both(case, some, **arguments)
        assert error(together.trace(), alone.trace()) <= 1e-12
        before = matrix(alone)
        together.update(p.data[3 + rank()])
        with torch.no_grad():  # the next two of one process have numbers 3 and 4, not 4 and 5
            alone.update((torch.zeros(0, 3).double(), p.data[0][1][:0]))
        alone.update(p.data[3]), alone.update(p.data[4])
        assert error(matrix(alone), before) > 1e-3
        assert error(matrix(together), matrix(alone)) <= 1e-12
        assert_alike_everywhere(matrix(together))
        if case == "ekfac":
            return
        together, alone = both(case, some, fisher_type="empirical")
        other, rest = both(case, replace(p, data=p.data[3:]), fisher_type="empirical")
        together.merge(other)
        alone.merge(rest)
        assert error(matrix(together), matrix(alone)) <= 1e-12
        with fails(ValueError, "same process_group"):
            together.merge(alone)

    return run


CHECKS[2] |= {f"updates-{case}": updates(case) for case in ("kfac", "ekfac")}


@check()
def saving() -> None:
    p = classifier()
    for cls in (KFACLinearOperator, EKFACLinearOperator):
        case = "kfac" if cls is KFACLinearOperator else "ekfac"
        together, alone = both(case, p)
        path = Path(f"{case}.{rank()}")
        together.save(path)
        alone.load(path)  # by a process alone
        torch.testing.assert_close(matrix(alone), matrix(together))
        for _ in range(20):  # by all processes to one path
            together.save(case)
        alone.load(case)
        torch.testing.assert_close(matrix(alone), matrix(together))
        again, _ = both(case, p)
        again.load(path)
        torch.testing.assert_close(matrix(again), matrix(together))
        again.update(p.data[rank()])
        assert_alike_everywhere(matrix(again))
        state = together.state_dict()
        loaded = cls.from_state_dict(
            state, p.model, p.loss, p.params, part(p.data), process_group=group(), fallback="dense"
        )
        torch.testing.assert_close(matrix(loaded), matrix(together))


# --- factors of which each process has a part -----------------------------------------------------


def held(operator: Any) -> int:
    """The bytes of an operator's factors on this process."""
    tensors = operator._factor_sums().tensors.values()
    distinct = {x.data_ptr(): x.nbytes for x in tensors}
    return sum(distinct.values())


def partitioned(case: str, name: str, fisher: str) -> Callable[[], None]:
    def run() -> None:
        p = problems.make(name)
        for options in ({}, {"separate_weight_and_bias": False}):
            options |= {"fisher_type": fisher, "fallback": "dense"}
            own, alone = both(case, p, factor_placement="partition", **options)
            expected = matrix(alone)
            assert error(matrix(own), expected) <= 1e-12
            assert_alike_everywhere(own @ vector(own, 2))
            for quantity in ("trace", "frobenius_norm", "diagonal"):
                assert error(getattr(own, quantity)(), getattr(alone, quantity)()) <= 1e-12
            assert error(own.damped(0.1).logdet(), alone.damped(0.1).logdet()) <= 1e-12
            for function in (
                lambda A: A.inverse(0.1, use_exact_damping=True),
                lambda A: A.inverse(0.1, use_heuristic_damping=case == "kfac"),
                lambda A: A.inverse(0.2),
                lambda A: A.damped(0.1).power(0.5),
                lambda A: 2 * A + A.inverse(0.3),
                lambda A: A.inverse(0.3).T @ A,
            ):
                assert error(matrix(function(own)), matrix(function(alone))) <= 1e-10
            assert error(own.eigvalsh(), alone.eigvalsh()) <= 1e-10
            draws = [A.sample(seed=0) for A in (own.damped(0.1), alone.damped(0.1))]
            assert error(*draws) <= 1e-9
            with fails(ValueError, "call curvlinops.write_factors"):
                own.save("nowhere")

    return run


CHECKS[2] |= {
    f"partitioned-{case}-{name}": partitioned(case, name, fisher)
    for case in ("kfac", "ekfac")
    for name, fisher in {"mlp-ce-sum": "mc", "transformer-tied": "type-2"}.items()
}


@check()
def fits() -> None:
    p = problems.make("mlp-mse-mean")
    pairs = [(fit, x) for fit in ("frobenius", "kl", "shampoo") for x in ("replicate", "partition")]
    for fit, placed in pairs:
        options = {"fit": fit, "factor_placement": placed, "fisher_type": "empirical"}
        together, alone = both("kfac", p, **options)
        assert error(matrix(together), matrix(alone)) <= 1e-9, (fit, placed)
        ours, theirs = together.distance(), alone.distance()
        assert ours.keys() == theirs.keys()
        for name, estimate in ours.items():
            assert error(torch.stack(estimate), torch.stack(theirs[name])) <= 1e-9, name
        batch = p.data[0]
        together.update(batch)
        alone.update((torch.cat([batch[0]] * 2), torch.cat([batch[1]] * 2)))
        assert error(matrix(together), matrix(alone)) <= 1e-9, (fit, placed)


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
    return Problem(model, nn.CrossEntropyLoss(), list(model.parameters()), data, mc=True)


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
        assert {x.names for x in own.report()} == {x.names for x in alone.report()}
        # draws depend on the number of the batch, which updates of all at once have each their own
        own, alone = both(case, p, factor_placement="partition", fisher_type="empirical")
        own.update(p.data[rank() % 2])
        for index in range(dist.get_world_size()):
            alone.update(p.data[index % 2])
        assert error(matrix(own), matrix(alone)) <= 1e-12


def placement_on_files() -> None:
    p, size = layers(), dist.get_world_size()
    shard = replace(p, data=part(p.data))
    for case in ("kfac", "ekfac"):
        for placed in ("partition", "replicate"):
            folder = Path(f"factors-{case}-{placed}-{size}")
            options = {"factor_placement": placed, "fisher_type": "empirical"}
            other, alone = both(case, p, **options)
            expected = matrix(alone)
            own = ALL[case].build(shard, process_group=group(), **options)
            for num in (2, 1):  # computed, then found
                written = curvlinops.write_factors(own, folder, num)
                assert error(matrix(written), expected) <= 1e-12
            for loaded in (alone, other, own):
                loaded.load(folder)
                assert error(matrix(loaded), expected) <= 1e-12
            assert error(matrix(curvlinops.load(folder)), expected) <= 1e-12
            dist.barrier()


@check()
def directories() -> None:
    p, loss = classifier(), nn.CrossEntropyLoss(reduction="sum")
    unnamed = replace(p, loss=lambda f, y: loss(f, y), reduction="sum")
    for placed in ("partition", "replicate"):
        options = {"fisher_type": "empirical", "factor_placement": placed}
        alone = ALL["kfac"].build(unnamed, **options)
        shard = replace(unnamed, data=part(p.data))
        for _ in range(2):  # computed, then found
            own = ALL["kfac"].build(shard, process_group=group(), **options)
            written = curvlinops.write_factors(own, f"unnamed-{placed}", parts=2)
            assert error(written.trace(), alone.trace()) <= 1e-12
    K, _ = both("kfac", p)
    folder = Path(f"not shared {rank()}")
    with fails(ValueError, "not the directory of the first process", on=1):
        curvlinops.write_factors(K, folder)
    folder.mkdir(exist_ok=True)
    with fails(ValueError, "All processes must have the same directory", on=1):
        curvlinops.write_factors(K, folder)
    folder = Path("shared")
    curvlinops.write_factors(K, folder)
    if rank() == 0:
        (folder / "x.safetensors").write_text("something")
    with fails(ValueError, "incomplete.*Delete", on=0):
        curvlinops.write_factors(K, folder)


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


class Pairs(nn.Module):
    """A layer that gets another bias for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(3, 3), nn.Parameter(torch.randn(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.other if x[0, 0] > 5 else self.first.bias
        return self.head(nn.functional.linear(x, self.first.weight, bias).tanh())


@check()
def bases_that_are_lost() -> None:
    p = classifier(make=Pairs)
    p = replace(p, params=dict(p.model.named_parameters()))
    X, y = p.data[0]
    options = {"fisher_type": "empirical", "separate_weight_and_bias": False}
    for placed, on in (("replicate", None), ("partition", 0)):
        K, _ = both("ekfac", p, factor_placement=placed, **options)
        K.compute_kronecker_factors()
        with fails(ChangedError, "first.weight in other ways", on=on):
            K.update((X + 10, y))


@check()
def memory_for_sums_of_others() -> None:
    ranks, own = Ranks(group()), {} if rank() else {"a": torch.ones(2)}
    for share in (ranks.add_all, ranks.exchange):
        with fails(RuntimeError, "device type.*nowhere", on=1):
            share(own, "nowhere" if rank() else "cpu")
        assert torch.equal(share(own, "cpu")["a"], torch.ones(2))


for _size in (2, 3):
    CHECKS[_size] |= {"placement": placement, "placement-on-files": placement_on_files}
CHECKS[2] |= {"errors-of-parts": errors_of_parts}


def later(model: type[nn.Module], targets: Callable[[Tensor], Tensor], loss: nn.Module) -> Callable:
    """Each process uses parameters in other ways."""

    def run() -> None:
        torch.manual_seed(0)
        net = model().double()
        if model is Experts:
            x = torch.randn(9, 3).double()
            data = [(x[i], targets(x[i])) for i in (x[:, 0] <= 0, x[:, 0] > 0)]
        else:
            x = torch.randint(3, (6,))
            data = [(x[:4], targets(x[:4])), (x[4:], targets(x[4:]))]
        p = Problem(net, loss, dict(net.named_parameters()), data, mc=True)
        options = {"fisher_type": "empirical", "check_deterministic": False}
        for case in ("kfac", "ekfac"):
            if model is Rewired:
                with fails(ChangedError, "embed.weight in other ways", on=0):
                    both(case, p, **options)[0].trace()
                continue
            together, alone = both(case, p, **options)
            assert error(matrix(together), matrix(alone)) <= 1e-12
            assert together.report() == alone.report()
            assert_alike_everywhere(matrix(together))
            first, _ = both(case, replace(p, data=[data[0]] * 2), **options)
            first.update(data[rank()])
            alone = ALL[case].build(replace(p, data=[*data[:1] * 3, data[1]]), **options)
            assert error(first.trace(), alone.trace()) <= 1e-12
        if model is Rewired:
            K, _ = both("kfac", replace(p, data=[data[0]] * 2), **options)
            with fails(ChangedError, "embed.weight in other ways", on=1):
                K.update(data[rank()])

    return run


CHECKS[2] |= {
    "later-experts": later(Experts, lambda x: x[:, :2].sin(), nn.MSELoss()),
    "later-rewired": later(Rewired, lambda x: (x + 1) % 3, nn.CrossEntropyLoss()),
}


@check(3)
def documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    exec(compile(code, "distributed.md", "exec"), {})
    assert "process_group" in code
