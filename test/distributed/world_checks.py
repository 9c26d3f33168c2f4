"""Checks of test_parallel.py in the worlds of worlds.py."""

import itertools
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import problems
import scipy.sparse.linalg
import torch
import torch.distributed as dist
from contract import ALL, CASES, FACTORED, error, matrix
from live_batches import WatchedBatches, check_batches_are_freed, saving_outputs
from processes import (
    Failing,
    FailingData,
    FailingLoss,
    assert_same_everywhere,
    check_callbacks,
    fails,
    rank,
    refuses,
    registry,
    vector,
)
from torch import Tensor, nn
from worlds import (
    ALONE,
    REPLICAS,
    SETTINGS,
    SHARDED,
    WORLDS,
    Both,
    Net,
    Sine,
    copied,
    in_worlds,
    sharded,
    spread,
    uses_of,
    varied,
    vectors,
)

import curvlinops

CHECKS, check = registry()
worlds = partial(in_worlds, check)
SQUARE = [case for case, kind in CASES.items() if kind.square]
EMPIRICAL = {"fisher_type": "empirical"}
#: Worlds that differ in more than factors.
PLACES = [name for name, world in WORLDS.items() if not world.factors]

# --- numbers --------------------------------------------------------------------------------------


@worlds(*PLACES, each=SQUARE)
@worlds("copies", "shards", "adapters", sizes=(3,), each=SQUARE)
def products(w: Both, case: str) -> None:
    """As they are, inside `linearized()`, and of changed parameters."""
    if case == "ggn-diagonal" and w.has_parts:
        refuses(TypeError, "GGNDiagonalLinearOperator.*hutchinson_diag", w.build, case)
        return
    together, alone = w.both(case)
    for _ in range(2):
        w.compare_products(together, alone)
        scale(w)
    if case == "ggn-diagonal":
        w.same(together.diagonal(), alone.diagonal())
        torch.testing.assert_close(together.trace(), alone.trace())


#: Sums and means, class weights, ignored targets (on one process all), terms that are no samples,
#: convolutions, attention, tied weights, checkpoints, and derivatives in the loss.
PROBLEMS = (
    *("mlp-ce-sum", "classes-ce-all-mean", "classes-ce-ignore-mean", "tokens-mse-mean"),
    *("mlp-user-mean", "transformer-tied", "functional", "cnn", "group-norm", "self-attention"),
    *("embedding-bag-mean", "weight-norm", "used-twice", "checkpoint", "pinn"),
)


def problem(name: str, world: str) -> Both:
    p = problems.make(name)
    p = replace(p, params=p.named_params(), data=p.data * (2 if len(p.data) == 1 else 1))
    if world != "shards in one piece":
        return Both(p, copied(p), WORLDS[world].factors)
    numbers = [name for name, x in p.params.items() if not x.ndim]
    return Both(p, sharded(p, by_layer=False, whole=numbers))


def products_of_problem(name: str, world: str) -> None:
    w = problem(name, world)
    for case in SQUARE:
        if (w.p.mc or not CASES[case].needs_root) and not (w.has_parts and "diagonal" in case):
            w.compare_products(*w.both(case))


for _name, _world in itertools.product(PROBLEMS, ("copies", "shards in one piece")):
    if (_name, _world) != ("functional", "shards in one piece"):
        check(name=f"products {_name} {_world}")(partial(products_of_problem, _name, _world))


@worlds("one shard", *SHARDED, *REPLICAS, each=("", "term"))
@worlds("shards", "adapters", sizes=(3,), each=("", "term"))
def rows(w: Both, terms: str = "") -> None:
    w.compare_rows(**({"terms": terms} if terms else {}))


@worlds(each={name: (x,) for name, x in SETTINGS.items()})
@worlds("copies", "shards", sizes=(3,), each={name: (x,) for name, x in SETTINGS.items()})
def factors(w: Both, options: dict) -> None:
    w.compare_factors(**options)


def factors_of_problem(name: str, fisher: str, world: str) -> None:
    w = problem(name, world)
    for options in ({}, {"separate_weight_and_bias": False}):
        options |= {"fisher_type": fisher, "fallback": "dense"}
        w.compare_factors(**options)
        if w.factors:
            continue
        for case in FACTORED:
            together, alone = w.both(case, **options)
            state, expected = together.state_dict(), alone.state_dict()
            for key, value in state.items():
                if isinstance(value, Tensor):
                    assert_same_everywhere(value)
                    if case == "kfac":
                        scale = 1e-12 if value.dtype == torch.float64 else 1e-5
                        assert error(value, expected[key]) <= scale, key


for _name, _fishers in {
    "classes-ce-ignore-mean": ("type-2", "mc", "empirical"),
    "mlp-ce-sum": ("mc",),
    "cnn": ("type-2",),
    "transformer-tied": ("empirical", "type-2"),
    "float32-mlp": ("type-2",),
}.items():
    for _fisher, _world in itertools.product(_fishers, ("copies", "parts of factors")):
        run = partial(factors_of_problem, _name, _fisher, _world)
        check(name=f"factors {_name} {_fisher} {_world}")(run)


def with_checkpoints() -> nn.Module:
    net = Net()
    net.uses_checkpoint = True
    return net


def scale(w: Both) -> None:
    with torch.no_grad():
        for x in {*w.p.params.values(), *w.own.params.values()}:
            x.mul_(1.1)


def models(w: Both) -> None:
    """Calls that others take the place of, and checkpoints, which read parameters again."""
    w.compare()
    if w.has_parts:
        w.compare_rows()
    w.compare_factors(fisher_type="type-2")
    names = list(w.p.params)[1::3]  # the others are constants
    some = Both(*(replace(p, params={n: p.params[n] for n in names}) for p in (w.p, w.own)))
    if w.has_parts:
        some.compare_rows()
    some.compare_factors(**EMPIRICAL)


for _make, _names in {
    vectors: ("copies", "shards in one piece"),
    varied: ("copies", "shards", "shards in one piece"),
    with_checkpoints: ("copies", "shards", "adapters"),
}.items():
    worlds(*_names, make=_make, each={_make.__name__: ()})(models)


@worlds("copies", "parts of factors", "shards", each=("kfac", "ekfac"))
def algebra_of_factors(w: Both, case: str) -> None:
    for options in ({}, {"separate_weight_and_bias": False}):
        own, alone = w.both(case, fisher_type="type-2", **options)
        for function in (
            lambda A: A.inverse(0.1, use_exact_damping=True),
            lambda A: A.inverse(0.1, use_heuristic_damping=case == "kfac"),
            lambda A: A.damped(0.1).power(0.5),
            lambda A: A.damped({"*": 0.1, A.report()[-1].names: 0.3}).inverse(),
            lambda A: 2 * A + A.inverse(0.3),
            lambda A: A.inverse(0.3).T @ A,
        ):
            assert error(w.matrix(function(own)), matrix(function(alone))) <= 1e-10
        if not w.has_parts:
            assert error(own.eigvalsh(), alone.eigvalsh()) <= 1e-10
            assert error(*(A.damped(0.1).sample(seed=0) for A in (own, alone))) <= 1e-9


# --- algorithms -----------------------------------------------------------------------------------


@worlds("copies", "shards in one piece", "some are whole", "adapters")
def algorithms(w: Both) -> None:
    (G, M), (H, N) = (w.both(case) for case in ("ggn", "hessian"))
    M, N = matrix(M), matrix(N)
    eye, v = torch.eye(len(M)).double(), vector(G)
    mine, expected = spread(w.own, v), torch.linalg.solve(M + 0.1 * eye, v)
    K = w.build("kfac", **EMPIRICAL).inverse(0.1)
    cg, minres = curvlinops.CGInverseLinearOperator, curvlinops.MINRESInverseLinearOperator
    for solver, options in ((cg, {}), (cg, {"preconditioner": K}), (minres, {})):
        w.same(solver(G, damping=0.1, rtol=1e-12, **options) @ mine, expected)
    found = w.joined(cg(H @ H, damping=0.1, rtol=1e-12) @ mine)
    assert error(found, torch.linalg.solve(N @ N + 0.1 * eye, v)) <= 1e-8
    for options in ({}, {"preconditioner": K}):
        interval = curvlinops.quadratic_form(G, mine, 0.1, rtol=1e-8, **options)
        assert interval.lower <= v @ expected <= interval.upper
        assert interval.upper - interval.lower <= 1e-7 * interval.upper
        assert_same_everywhere(torch.stack(interval[:2]))
    series = curvlinops.NeumannInverseLinearOperator(G.damped(0.5), num_terms=100, scale=0.5)
    w.same(series @ mine, torch.linalg.solve(M + 0.5 * eye, v), 1e-8)
    for which in ("LM", "SA"):
        pairs = curvlinops.eigsh(H, k=3, which=which, seed=0)
        values, V = pairs.eigenvalues, w.joined(pairs.eigenvectors)
        assert error(N @ V, V * values) <= 1e-8
        assert error(V.T @ V, torch.eye(3).double()) <= 1e-10
        expected = torch.linalg.eigvalsh(N)
        if which == "LM":
            expected = expected[expected.abs().argsort(descending=True)]
        w.same(values, expected[:3].sort().values, 1e-8)
    for name in ("hutchpp_trace", "xtrace", "xnystrace", "hutchinson_trace"):
        tolerance = 0.3 if name == "hutchinson_trace" else 1e-2
        w.same(getattr(curvlinops, name)(G, 60, seed=1), M.trace(), tolerance)
    assert error(w.joined(curvlinops.xdiag(G, 60, seed=1)), M.diagonal()) <= 0.1
    assert_same_everywhere(curvlinops.lanczos_logdet(G.damped(0.1), 15, num_repeats=2, seed=1))
    for x in curvlinops.lanczos_approximate_spectrum(H, ncv=8, seed=1):
        assert_same_everywhere(x)
    if not w.has_parts:
        found = scipy.sparse.linalg.eigsh(G, 2, v0=v.numpy())[0]
        w.same(torch.from_numpy(found), torch.linalg.eigvalsh(M)[-2:])
        found = curvlinops.hutchinson_trace(G, 5, seed=0)
        w.same(found, curvlinops.hutchinson_trace(w.both("ggn")[1], 5, seed=0))


@worlds("alone", "copies", "adapters")
def losses_along_directions(w: Both) -> None:
    together, alone = w.both("hessian")
    found, expected = (
        curvlinops.loss_along(H, vector(alone, 2), [0, 0.3]) for H in (together, alone)
    )
    torch.testing.assert_close(found, expected)
    if dist.get_world_size() > 1:
        with fails(ValueError, "differ in points"):
            curvlinops.loss_along(together, vector(alone), [0.1 * rank()])


@worlds("copies", "parts of factors", "shards", "adapters")
def callbacks(w: Both) -> None:
    G, K = w.build("ggn"), w.build("kfac")
    check_callbacks(G.damped(0.5), w.v(G))
    if not (w.has_parts or w.factors):
        return  # products with factors need no other process
    identity = curvlinops.IdentityLinearOperator(G.space)
    inverse = curvlinops.CGInverseLinearOperator(identity, preconditioner=K.inverse(0.5))
    blocks = curvlinops.SubmatrixLinearOperator(K.inverse(1.0), ["*"], ["*"])
    for A in (blocks, inverse):
        check_callbacks(A, w.v(A))


@worlds("copies", "adapters")
def vectors_that_are_whole(w: Both) -> None:
    """All processes multiply those of the first one, unless they differ by more than rounding."""
    together, alone = w.both("ggn")
    v = vector(alone)
    drifted = v * (1 + 1e-12 * rank())
    before = drifted.clone()
    w.same(together @ drifted, alone @ v)
    assert torch.equal(drifted, before)
    with fails(ValueError, "different vectors.*seed"):
        curvlinops.hutchinson_trace(together, 5, seed=rank())
    with fails(ValueError, "different vectors"):
        together @ (vector(together, 3) * torch.tensor([1, 1, 1 + 0.1 * rank()]))


# --- data -----------------------------------------------------------------------------------------


@worlds("one shard", "copies", "shards", make=saving_outputs)
def batches_are_freed(w: Both) -> None:
    def build(case: str, data: WatchedBatches) -> Any:
        return w.build(case, replace(w.own, data=data))

    check_batches_are_freed(build, w.own.data, without="LSMR" if w.has_parts else ())


def net_with_sine() -> nn.Module:
    return Net(Sine())


@worlds("copies", "parts of factors", "shards", "adapters", make=net_with_sine)
def different_evaluations(w: Both) -> None:
    """Other numbers of batches, columns at once, and kept graphs."""
    w = w.of(w.p.data, w.p.data[:1] if rank() == 0 else w.p.data[1:])
    cache, chunk_size = ("auto", "none")[rank()], 1 if w.has_parts else 2
    with warnings.catch_warnings():  # on one process
        warnings.filterwarnings("ignore", ".*(not|cannot be) compared")
        for case in ("hessian", "ggn", "fisher"):
            together, alone = w.build(case, cache=cache, chunk_size=chunk_size), w.both(case)[1]
            for _ in range(2):
                w.compare_products(together, alone)
                scale(w)
        w.compare_factors(fisher_type="type-2", cache=cache)
        if w.has_parts:
            w.compare_rows()
            G = w.build("ggn")
            with fails(RuntimeError, "product of several vectors failed.*chunk_size=1", on=0):
                G @ w.v(G, 3)


@worlds("copies", "shards", "adapters", sizes=(3,))
def unequal_data(w: Both) -> None:
    X, y = w.p.data[0]
    w = w.of(w.p.data, w.p.data if rank() == 0 else [(X[:0], y[:0])])
    w.compare()
    w.compare_factors(**EMPIRICAL)
    if w.has_parts:
        mine = w.build("gradients")
        assert mine.dense().shape == (10 if rank() == 0 else 0, mine.shape[1])
        others = w.p.data[rank() :: dist.get_world_size() - 1]
        w.of(w.p.data, w.p.data[:1] if rank() == 0 else others).compare_rows()
    else:
        together, alone = w.both("ggn-diagonal")
        w.same(together.diagonal(), alone.diagonal())


@worlds("copies", "shards", "adapters")
def no_data(w: Both) -> None:
    """Nothing but ignored targets, or no sample."""
    w = w.of([(X, torch.full_like(y, -100)) for X, y in w.p.data])
    together = w.build("ggn")
    for use in (lambda: together @ w.v(together), together.gradient_and_loss):
        refuses(ValueError, "The data has no term", use)
    X, y = w.p.data[0]
    none = w.of([], [(X[:0], y[:0])])
    with fails(ValueError, "no term|no sample"):
        none.build("kfac", check_deterministic=False).trace()


# --- factors in files, and their updates ----------------------------------------------------------

PLACED = {
    f"{case} {placed}": (case, placed) for case in FACTORED for placed in ("replicate", "partition")
}


@worlds(*ALONE, "shards", "adapters", each=PLACED)
@worlds("copies", sizes=(3,), each=PLACED)
def files(w: Both, case: str, placed: str) -> None:
    options = {"factor_placement": placed, **EMPIRICAL}
    own, alone = w.both(case, **options)
    expected, folder = (
        matrix(alone),
        Path(f"factors-{case}-{placed}-{w.has_parts}-{len(w.p.params)}"),
    )
    for num in (2, 1):  # computed, then found
        written = curvlinops.write_factors(own, folder, num)
        assert error(matrix(written), expected) <= 1e-10
    for loaded in (w.build(case, **options), own):
        loaded.load(folder)
        assert error(w.matrix(loaded), expected) <= 1e-10
    alone.load(folder)
    for loaded in (alone, curvlinops.load(folder)):
        assert error(matrix(loaded), expected) <= 1e-10
    dist.barrier()


@worlds("copies", "shards", "adapters", batches=(5, 4, 6, 7, 4), each=PLACED)
def updates(w: Both, case: str, placed: str) -> None:
    data, options = w.p.data, {"factor_placement": placed}
    some, rest = w.of(data[:3]), w.of(data[3:])  # numbers 0 and 2 here, 1 there
    together, alone = some.both(case, fisher_type="mc", mc_samples=2, **options)
    assert error(together.trace(), alone.trace()) <= 1e-10
    before = alone.trace()
    with fails(ValueError, "update.. takes a batch", on=1):
        together.update(None if rank() else data[0])
    together.update(data[3 + rank()])
    with torch.no_grad():  # the next two of one process have numbers 3 and 4, not 4 and 5
        alone.update((data[0][0][:0], data[0][1][:0]))
    alone.update(data[3]), alone.update(data[4])
    assert error(alone.trace(), before) > 1e-3
    assert error(together.trace(), alone.trace()) <= 1e-10
    if case == "kfac":  # null spaces have no unique eigenvectors
        w.same(w.matrix(together), matrix(alone))
    if (case, placed) != ("kfac", "replicate"):
        return
    together, alone = some.both(case, **EMPIRICAL, **options)
    other, its = rest.both(case, **EMPIRICAL, **options)
    together.merge(other)
    alone.merge(its)
    w.same(w.matrix(together), matrix(alone))


@worlds("copies", "parts of factors", "shards", "adapters", each=("frobenius", "kl", "shampoo"))
def fits(w: Both, fit: str) -> None:
    together, alone = w.both("kfac", fit=fit, **EMPIRICAL)
    assert error(w.matrix(together), matrix(alone)) <= 1e-9
    ours, theirs = together.distance(), alone.distance()
    assert ours.keys() == theirs.keys()
    for name, estimate in ours.items():
        # numbers of order one; those of exact blocks are rounding errors
        difference = torch.stack(estimate) - torch.stack(theirs[name])
        assert float(difference.abs().max()) <= 1e-9, name
    X, y = w.p.data[0]
    together.update((X, y))
    alone.update((torch.cat([X] * 2), torch.cat([y] * 2)))
    assert error(w.matrix(together), matrix(alone)) <= 1e-9


# --- errors ---------------------------------------------------------------------------------------


def failing() -> nn.Module:
    return Net(Failing())


def errors(w: Both, case: str) -> None:
    """An error in the model, the loss or the data of one process is raised in all."""
    options = EMPIRICAL if case in FACTORED else {}
    loss = w.p.loss if case in ("mc", "ggn-diagonal") else FailingLoss()
    w.own = replace(w.own, data=FailingData(w.own.data), loss=loss)
    culprits = w.own.model.act, w.own.data, loss
    for culprit in culprits[: 2 if loss is w.p.loss or case == "jacobian" else 3]:
        together, alone = w.both(case, **options)
        v = w.v(alone)
        uses = [partial(together.__matmul__, v)]
        if not ALL[case].square:
            uses += [
                partial(together.T.__matmul__, [torch.ones(together.codomain.shapes[""]).double()])
            ]
        if culprit is w.own.model.act:
            uses += [partial(w.build, case, **options)]
            uses += [] if case == "jacobian" else [together.gradient_and_loss]
            if case in FACTORED:
                uses += [partial(together.update, w.p.data[0]), together.compute_kronecker_factors]
        culprit.fails = True
        for use in uses:
            refuses(KeyError, "here", use, on=1)
        culprit.fails = False
        found, expected = together @ v, alone @ vector(alone)
        if ALL[case].square and case != "ekfac":  # null spaces have no unique eigenvectors
            w.same(found, expected)


worlds("copies", "shards", "adapters", make=failing, each=[*SQUARE[:5], *FACTORED])(errors)
worlds("copies", "adapters", make=failing, each=("ggn-diagonal",))(errors)
worlds(
    *("shards", "adapters", *REPLICAS),
    make=failing, batches=(4, 2, 3, 1) * 2, each=("gradients", "jacobian"),
)(errors)  # fmt: skip


@worlds("copies", "shards", "adapters", make=failing, each={"": (KeyboardInterrupt, SystemExit)})
def interrupts(w: Both, *kinds: type[BaseException]) -> None:
    """Ctrl-C and the like, raised by the model."""
    G = w.build("ggn")
    for kind in kinds:
        w.own.model.act.error = kind
        for use in uses_of(G, w.v(G)).values():
            w.own.model.act.fails = True
            refuses(kind, "here", use, on=1)
            w.own.model.act.fails = False
            use()


class Broken(curvlinops.IdentityLinearOperator):
    fails = False

    def _apply(self, columns: Any) -> Any:
        if self.fails and rank() == 1:
            raise KeyError("here")
        return super()._apply(columns)


@worlds("copies", "adapters")
def errors_of_solvers(w: Both) -> None:
    """Errors between two products, and at the beginning."""
    G = w.build("ggn")
    M, v = Broken(G.space), w.v(G)
    for solver in (curvlinops.CGInverseLinearOperator, curvlinops.MINRESInverseLinearOperator):
        solver = solver(G, damping=0.1, preconditioner=M)
        expected = w.joined(solver @ v)
        M.fails = True
        refuses(KeyError, "here", solver.__matmul__, v, on=1)
        M.fails = False
        assert torch.equal(w.joined(solver @ v), expected)
    refuses(ValueError, "num_matvecs", curvlinops.hutchinson_trace, G, 4 - 4 * rank(), on=1)


@worlds("copies", "shards", "adapters", each=("ggn", "kfac"))
@worlds("shards", "adapters", each=("gradients",))
def errors_of_the_data(w: Both, case: str) -> None:
    good = list(w.own.data)
    w.own = replace(w.own, data=list(good))
    together, alone = w.both("ggn")
    X, y = good[0]
    for bad, kind, match in (
        ([(X * torch.nan, y)], ValueError, "batch 0"),
        ([(X, y[:1])], ValueError, "[Bb]atch"),
        ([X], ValueError, "expected a pair"),
        ([], ValueError, "data is empty"),
    ):
        if rank() == 1:
            w.own.data[:] = bad
        refuses(kind, match, w.build, case, on=1)
        later = partial(w.build, case, check_deterministic=False)
        refuses(kind, match, lambda later=later: later() @ w.v(together), on=1)
        w.own.data[:] = good
    w.same(together @ w.v(together), alone @ vector(alone))


@worlds("copies", "parts of factors", "shards", "adapters")
def errors_of_vectors(w: Both) -> None:
    """A wrong vector on one process, or more vectors than on the other."""
    G, K = w.build("ggn"), w.build("kfac", **EMPIRICAL)
    v = w.v(G)
    wrong = {
        "NaN or infinite": lambda x: x * torch.nan,
        r"names are not those": None,
        r"has shape|placements": lambda x: x[1:],
        "complex": lambda x: x * 1j,
    }
    solver = curvlinops.CGInverseLinearOperator(G, damping=0.1)
    factors = (K, K.inverse(0.1)) if w.has_parts or w.factors else ()  # else of one process alone
    for A in (G, G @ G + 2 * G, solver, G @ K, *factors):
        for match, change in wrong.items():
            bad = {n: x for n, x in v.items() if n != "head.bias"}
            if change is not None:
                bad |= {"head.bias": change(v["head.bias"])}
            with fails(TypeError if match == "complex" else ValueError, match, on=1):
                A @ (bad if rank() == 1 else v)
    if not w.has_parts:
        with fails(ValueError, "differ in the number of vectors.*0: 2; .*1: 0"):
            G @ vector(G, 2)[:, : 2 - 2 * rank()]
        assert (G @ vector(G, 0)).shape == (G.shape[1], 0)
        flat = vector(G)
        for match, bad in (("NaN or infinite", flat * torch.nan), (r"shape \[", flat[1:])):
            refuses(ValueError, match, G.__matmul__, bad if rank() == 1 else flat, on=1)


@worlds("shards", "adapters")
def errors_before_communication(w: Both) -> None:
    """Wrong arguments, files and memory of one process: the other ones do not wait for it."""
    own = w.own
    J = ALL["jacobian"].build(own)
    u = [torch.ones(J.codomain.shapes[""]).double()]
    if rank() == 1:
        u[0][0] = torch.nan
    with fails(ValueError, "NaN or infinite", on=1):
        J.T @ u
    with fails(ValueError, "indices from 0 to 100", on=1):
        ALL["gradients"].build(own, subsampling=[0, 100 if rank() == 1 else 1])
    with fails(ValueError, "one-shot iterator", on=1):
        ALL["jacobian"].build(replace(own, data=iter(own.data) if rank() == 1 else own.data))

    rows = ALL["gradients"].build(own)
    v = spread(own, torch.ones(rows.shape[1]).double())
    path = Path(f"other scores {w.has_parts} {rank()}")
    if rank() == 1:
        path.write_text("something else")
    refuses(ValueError, "is a file, expected a directory", rows.scores, v, out=path, on=1)
    missing = dict(list(v.items())[1:]) if rank() == 1 else v
    for use in (rows.scores, rows.__matmul__):
        refuses(ValueError, "names are not those", use, missing, on=1)


class Decaying(Net):
    """Writes to its weights, each of which is gathered only for a while."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.layer.weight.data.mul_(0.5)
        with torch.no_grad():
            self.head.weight[0].zero_()
        return super().forward(x)


@worlds(*ALONE, "copies", "shards", "adapters", make=Decaying)
def writes_to_parameters(w: Both) -> None:
    before = [getattr(x, "_local_tensor", x).tolist() for x in w.own.model.parameters()]
    for case in ("hessian", "kfac"):
        refuses(ValueError, "writes to parameter 'second.layer.weight'", w.build, case)
    after = [getattr(x, "_local_tensor", x).tolist() for x in w.own.model.parameters()]
    assert after == before


class Overwriting(Net):
    """Writes to the output of a layer that needs it, or of one that does not."""

    needs_output = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.tanh_() if self.needs_output else x.sin()
        return self.head(self.second(x.mul_(2)).relu_())


@worlds(*ALONE, "copies", "shards", make=Overwriting)
def writes_to_what_is_saved(w: Both) -> None:
    for case in ("hessian", "ggn", "fisher", "gradients", "kfac"):
        with fails(RuntimeError, "modified by an inplace operation"):
            A = w.build(case, check_deterministic=False)
            A @ w.v(A)
    w.p.model.needs_output = w.own.model.needs_output = False
    w.compare()
    if w.has_parts:
        w.compare_rows()
