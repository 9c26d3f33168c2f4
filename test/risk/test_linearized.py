"""Products inside of `linearized()`: the numbers of fresh ones, without reading data again."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product

import pytest
import scipy.sparse.linalg
import torch
from changeable import World
from contract import ALL, error, matrix, vectors
from live_bytes import LiveBytes
from problems import Problem
from quantities import ALGORITHMS, ones
from tables import core
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlinops as C
from curvlinops.autodiff.linear import Linear
from curvlinops.linear_operator import operator as operator_module
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk import linearization as linearization_module
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import hessian


@dataclass(eq=False, repr=False)
class Own(DataLinearOperator):
    """An operator of a user's."""

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        return hessian(problem, problem.loss_seed, single=single)


H, G, J = (ALL[case].build for case in ("hessian", "ggn", "jacobian"))
#: Builders of operators, of a problem and options.
OPERATORS: dict[str, Callable[..., C.TorchLinearOperator]] = {
    **{name: case.build for name, case in ALL.items()},
    "user's": lambda p, **o: p.build(Own, **o),
    "sum": lambda p, **o: H(p, **o) - 2 * G(p, **o),
    "damped": lambda p, **o: G(p, **o).damped(0.1),
    "product": lambda p, **o: H(p, **o) @ G(p, **o),
    "kernel": lambda p, **o: J(p, **o) @ J(p, **o).T,
    "submatrix": lambda p, **o: C.SubmatrixLinearOperator(H(p, **o), [3, 1, 40], range(20)),
    "block": lambda p, **o: C.SubmatrixLinearOperator(G(p, **o), ["last.weight"], ["first.bias"]),
    "CG": lambda p, **o: C.CGInverseLinearOperator(G(p, **o).damped(1.0), rtol=1e-12),
}


@pytest.mark.parametrize(
    "name, cache",
    core(
        [*product(OPERATORS, [3000]), *product(["hessian", "gradients", "sum"], ["auto", "none"])],
        product(OPERATORS, ["auto", "none"]),
    ),
)
def test_equal_fresh_products(name: str, cache: str | int):
    A = OPERATORS[name](World().problem, cache=cache)
    V, U = vectors(A, 3), vectors(A, 2, rows=True)

    def products() -> list[Tensor]:
        return [A @ V[:, 0], A @ V, A.T @ U, A.T @ U[:, 0]]

    fresh = products()
    with A.linearized():
        inside = [products() for _ in range(2)]
    for found in (*inside, products()):
        for x, expected in zip(found, fresh, strict=True):
            assert error(x, expected) <= 1e-9


# --- what is read and kept


class Counting(World):
    """Counts the samples that are read, and knows the activations that were computed."""

    def __init__(self):
        super().__init__()
        X, y = (torch.cat(tensors) for tensors in zip(*self.data, strict=True))
        self.samples, self.read, self.activations = [*zip(X, y, strict=True)], 0, []
        self.model.first.register_forward_hook(self.note)
        self.data = DataLoader(self, 4)

    def note(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Note an evaluation."""
        self.activations.append(weakref.ref(output))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        return self.samples[index]

    def forget(self) -> None:
        """Count anew."""
        self.read = 0
        self.activations.clear()


SOLVERS: dict[str, Callable[[C.TorchLinearOperator], object]] = {
    "CG": lambda A: C.CGInverseLinearOperator(A.damped(10.0)) @ vectors(A, 2),
    "eigsh": lambda A: C.eigsh(A, 2),
    "eigsh of a product": lambda A: C.eigsh(A @ A, 2),
    "trace": lambda A: C.hutchinson_trace(A, 5, chunk_size=1),
    "to_dense": lambda A: A.to_dense(),
    "spectrum": lambda A: C.lanczos_approximate_spectrum(A, 4),
}


def test_nothing_is_read_of_selected_samples():
    w = Counting()
    A = OPERATORS["gradients"](w.problem, subsampling=[5])  # none of the first batch
    with A.linearized():
        expected = A @ vectors(A)
        w.forget()
        assert torch.equal(A @ vectors(A), expected) and not w.read


@pytest.mark.parametrize("case", ["hessian", "ggn", "mc", "gradients", "jacobian", "user's"])
def test_nothing_is_read_once_all_is_kept(case: str):
    w = Counting()
    A = OPERATORS[case](w.problem)
    A @ vectors(A)  # the model is known now
    with A.linearized():
        w.forget()
        A @ vectors(A)
        assert w.read == len(w)
        A.T @ vectors(A, rows=True)
        w.forget()
        A @ vectors(A, 3)
        with A.linearized(), (2 * A).linearized():
            A @ vectors(A)
        if ALL.get(case, ALL["hessian"]).square:
            scipy.sparse.linalg.eigsh(A, 2)
            for solve in SOLVERS.values():
                solve(A)
        A @ vectors(A)  # the inner contexts have not ended it
        assert not w.read and not w.activations
    A @ vectors(A)
    assert w.read == len(w)


@pytest.mark.parametrize("raised", [None, ZeroDivisionError])
@pytest.mark.parametrize("case", ["hessian", "ggn", "mc", "gradients", "jacobian"])
def test_all_is_freed_at_the_end(case: str, raised: type[Exception] | None):
    w = Counting()
    A = OPERATORS[case](w.problem)
    v = vectors(A)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(raised) if raised else nullcontext(), A.linearized():
            w.forget()
            A @ v
            alive = [reference for reference in w.activations if reference() is not None]
            assert alive
            if raised:
                raise raised
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("case", ["hessian", "ggn"])
def test_budget(case: str):
    layers = [nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 60), nn.GELU(), nn.Linear(60, 2)]
    model, batches = nn.Sequential(*layers), TensorDataset(torch.randn(900, 50), torch.ones(900, 2))
    data = DataLoader(batches, 300)
    p = Problem.of(model, nn.MSELoss(), data)

    def kept(cache: str | int) -> int:
        A, live = OPERATORS[case](p, cache=cache), LiveBytes()
        A @ vectors(A)
        with A.linearized():
            with live:
                A @ vectors(A)
            gc.collect()
            inside = live.now
        return inside - live.now

    size = kept("auto") / 3  # of one batch
    assert size > 300_000
    assert kept("none") == kept(int(0.9 * size)) == 0
    for num in (1, 2):
        assert kept(int((num + 0.9) * size)) == pytest.approx(num * size, rel=0.02)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("case", core(["ggn", "gradients"], ["hessian", "fisher", "transposed"]))
def test_memory_is_flat(case: str, inside: bool):
    A = OPERATORS[case](World().problem)

    def num_tensors() -> int:
        A @ vectors(A)
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    with A.linearized() if inside else nullcontext():
        counts = [num_tensors() for _ in range(6)]
    assert len(set(counts[2:])) == 1


# --- who is inside


def test_other_threads_are_outside():
    w, calls = World(), []
    A = w.build("ggn").damped(10.0)
    v, inside, resumed = vectors(A), threading.Event(), threading.Event()

    def preconditioner(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 2:  # after the first product
            inside.set()
            assert resumed.wait(60)
        return x

    def matrices() -> dict[str, Tensor]:
        return {case: matrix(w.build(case)) for case in ALL}

    inverse, found = C.CGInverseLinearOperator(A, preconditioner=preconditioner), []
    thread = threading.Thread(target=lambda: found.append(inverse @ v), daemon=True)
    expected, truth = C.CGInverseLinearOperator(A) @ v, matrices()
    thread.start()
    assert inside.wait(60)
    meanwhile = matrices()
    w.params[0].data.mul_(3)
    changed = A @ v, A.to_dense() @ v, w.build("ggn").damped(10.0) @ v
    resumed.set()
    thread.join()
    assert all(torch.equal(meanwhile[case], truth[case]) for case in ALL)
    assert error(changed[0], changed[2]) <= 1e-12 and error(changed[1], changed[2]) <= 1e-12
    assert error(found[0], expected) <= 1e-6  # the solver went on with what it had kept


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda A: pickle.loads(pickle.dumps(A))])
@pytest.mark.parametrize("case", ["hessian", "gradients", "transposed", "sum", "CG"])
def test_copies_are_outside(case: str, duplicate: Callable):
    A = OPERATORS[case](World().problem)
    v = vectors(A)
    with A.linearized():
        expected = A @ v
        twin = duplicate(A)
        assert error(twin @ v, expected) <= 1e-9
        with twin.linearized():
            assert error(twin @ v, expected) <= 1e-9
        assert torch.equal(A @ v, expected)


@pytest.mark.parametrize("cache", ["auto", 3000])
@pytest.mark.parametrize("case", ["hessian", "ggn", "fisher", "gradients", "jacobian"])
def test_models_that_draw_random_numbers(case: str, cache: str | int):
    """Fresh products follow the seed; inside, Dropout has the mask of the first one."""
    w = World()
    w.model.act = nn.Dropout()
    A = OPERATORS[case](w.problem, check_deterministic=False, cache=cache)
    v = vectors(A)

    def product(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return A @ v

    first, second = product(1), product(2)
    assert error(second, first) > 1e-2 and error(product(1), first) <= 1e-12
    with A.linearized():
        assert error(product(2), second) <= 1e-12
        assert torch.equal(product(1), product(3))
        assert error(product(1), second) <= 1e-12


# --- what operators and algorithms are made of

CG, MINRES = C.CGInverseLinearOperator, C.MINRESInverseLinearOperator
LSMR, Neumann = C.LSMRInverseLinearOperator, C.NeumannInverseLinearOperator
DIM = 8


class Diagonal(C.TorchLinearOperator):
    """A diagonal matrix that counts its products, those inside `linearized()`, and its entries."""

    def __init__(self, self_adjoint: bool = True):
        super().__init__(C.ParameterSpace({"": (DIM,)}, torch.float64), self_adjoint=self_adjoint)
        self.diagonal = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)
        self.depth = self.entries = self.products = self.linearized_products = 0

    def _apply(self, columns: Tensor) -> Tensor:
        self.products += 1
        self.linearized_products += self.depth > 0
        return columns * self.diagonal

    def _transposed(self) -> "Diagonal":
        return self

    @contextmanager
    def linearized(self) -> Iterator[None]:
        self.entries += not self.depth
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


Build = Callable[[C.TorchLinearOperator, C.TorchLinearOperator], C.TorchLinearOperator]

#: Operators made of one operator, or of two, and how many.
OPERANDS: dict[str, tuple[Build, int]] = {
    "multiple": (lambda A, B: -2 * A, 1),
    "power": (lambda A, B: A**2, 1),
    "power zero": (lambda A, B: A**0, 0),
    "adjoint": (lambda A, B: B.T @ A, 2),
    "damped": (lambda A, B: A.damped(0.1), 1),
    "sum": (lambda A, B: A + B, 2),
    "sum with structure": (lambda A, B: A + C.IdentityLinearOperator(DIM), 1),
    "product": (lambda A, B: A @ B, 2),
    "submatrix": (lambda A, B: C.SubmatrixLinearOperator(A, [0, 2], [1, 3]), 1),
    "CG": (lambda A, B: CG(A), 1),
    "MINRES": (lambda A, B: MINRES(A, damping=1.0), 1),
    "LSMR": (lambda A, B: LSMR(A), 1),
    "Neumann": (lambda A, B: Neumann(A), 1),
    "CG, preconditioned": (lambda A, B: CG(A, preconditioner=B), 2),
    "Neumann, preconditioned": (lambda A, B: Neumann(A, preconditioner=B.T), 2),
    "function as preconditioner": (lambda A, B: CG(A, preconditioner=torch.clone), 1),
    "matrix as preconditioner": (lambda A, B: CG(A, preconditioner=torch.eye(DIM)), 1),
    "nested": (lambda A, B: C.SubmatrixLinearOperator((A @ B.T - 2 * A) ** 3, [0, 1], [1]).T, 2),
    "inverse of an inverse": (lambda A, B: CG(CG(A) + B), 2),
}


@pytest.mark.parametrize("build, number", OPERANDS.values(), ids=OPERANDS)
def test_operands_are_linearized(build: Build, number: int):
    parts = Diagonal(), Diagonal(self_adjoint=False)
    expected = [i < number for i in range(2)]
    operator = build(*parts)
    with operator.linearized() as entered:
        assert entered is None
        assert [part.depth > 0 for part in parts] == expected
        with pytest.raises(ZeroDivisionError), operator.linearized():
            raise ZeroDivisionError
        assert [part.depth > 0 for part in parts] == expected
    assert [part.depth for part in parts] == [0, 0]


@pytest.mark.parametrize("solve", ALGORITHMS.values(), ids=ALGORITHMS)
def test_algorithms_linearize(solve: Callable[[C.TorchLinearOperator], object]):
    A = Diagonal()
    solve(A)
    assert A.products == A.linearized_products > 0 and (A.depth, A.entries) == (0, 1)


def test_preconditioners_are_linearized():
    A, M = Diagonal(), Diagonal()
    CG(A, preconditioner=M) @ ones(A)
    assert M.products == M.linearized_products > 0


@pytest.mark.parametrize("columns, entries", [(DIM, 0), (DIM - 1, 1)])
def test_dense_matrices_of_several_chunks(
    columns: int, entries: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(operator_module, "_DENSE_BLOCK", columns * DIM * 8)
    A = Diagonal()
    assert torch.equal(A.to_dense(), A.diagonal.diag())
    assert A.entries == entries and A.linearized_products == entries * A.products


def test_products_of_solvers_that_share_nothing(caplog: pytest.LogCaptureFixture, monkeypatch):
    """SciPy's solvers outside of the context get a hint; steps of an optimizer do not."""
    w = World()
    A, (first, *_) = H(w.problem), w.params
    v = ones(A)

    def hints() -> list[str]:
        return [record.message for record in caplog.records if "linearized" in record.message]

    monkeypatch.setattr(linearization_module.FreshProducts, "was_said", False)
    with A.linearized():
        for _ in range(30):
            A @ v
    for _ in range(30):
        A @ v
        with torch.no_grad():
            first.mul_(0.99)
    assert not hints()
    for _ in range(2):
        scipy.sparse.linalg.eigsh(A, k=1, ncv=25)
    assert len(hints()) == 1
