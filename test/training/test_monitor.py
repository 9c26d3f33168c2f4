"""The monitor measures the matrices of the references, and leaves the training run as it is."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training_runs import CE, batches, flags, in_eval_mode, network, random_numbers

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
)
from curvlinops.training import CurvatureMonitor


def operator(kind: type, model: nn.Module, data: Any) -> Any:
    """Return an operator that is built in eval mode; the model is in train mode afterwards."""
    A = kind(model.eval(), CE, list(model.parameters()), data)
    model.train()
    return A


LAYERS = {"module": {"0": "0.", "1": "1.", "5": "5."}, "parameter": None, "dict": {"first": "0."}}


@pytest.mark.parametrize("by", [None, *LAYERS])
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_measurements_are_those_of_the_reference(kind: type, by: str | None):
    model, data = network(), batches(6, 4)
    k = 3
    monitor = CurvatureMonitor(
        operator(kind, model, data),
        k=k,
        num_matvecs=1000,  # exact
        by={"first": "0"} if by == "dict" else by,
        tol=1e-8,
    )
    found = monitor.measure()

    p = in_eval_mode(model, data)
    dense = {HessianLinearOperator: reference.hessian, GGNLinearOperator: reference.ggn}[kind](p)
    names = [name for name, value in p.params.items() for _ in range(value.numel())]
    prefixes = (LAYERS[by] or {name: name for name in p.params}) if by else {}
    expected = {"loss": reference.loss_value(p)}
    for label, prefix in {"": "", **{f"{layer}/": x for layer, x in prefixes.items()}}.items():
        rows = torch.tensor([name.startswith(prefix) for name in names])
        block = dense[rows][:, rows]
        values = torch.linalg.eigvalsh(block).flip(0)[:k].tolist()
        columns = ["sharpness", "eigenvalue_2", "eigenvalue_3"][: len(values)]
        expected |= {f"{label}{name}": x for name, x in zip(columns, values, strict=True)}
        expected |= {f"{label}trace": float(block.trace()), f"{label}trace_error": 0.0}
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert list(found) == list(expected)


class Drawing(Dataset):
    """Samples that are the same in each pass, though random numbers are drawn for them."""

    def __init__(self, data: list[tuple[Tensor, Tensor]]):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch.rand(1), np.random.rand(), random.random()
        X, y = self.data[index]
        return X[0], y[0]


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: batches(5, 3, dtype=torch.float32),
    "loader": lambda: DataLoader(Drawing(batches(*[1] * 8, dtype=torch.float32)), batch_size=5),
}


def train(data: Callable[[], Any] | None, fails: bool = False) -> list[Any]:
    """Train with momentum, dropout and shuffled batches; return all that the run leaves."""
    random.seed(0), np.random.seed(0)
    model = network(torch.float32)
    model[1].eval()  # frozen statistics
    torch.manual_seed(1)
    monitor = None
    if data is not None:
        before = flags(model)
        with_flags = zip(model.modules(), before, strict=True)
        A = HessianLinearOperator(model.eval(), CE, list(model.parameters()), data())
        for module, flag in with_flags:
            module.training = flag
        monitor = CurvatureMonitor(A, every=2, k=2, num_matvecs=6, by="module")
    loader = DataLoader(Drawing(batches(*[1] * 16, dtype=torch.float32)), 4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (X, y) in enumerate([*loader, *loader]):
        optimizer.zero_grad()
        CE(model(X), y).backward()
        if monitor is not None:
            if fails and step == 2:
                monitor.operator.data[1][0][0, 0, 0, 0] = float("nan")
                with pytest.raises(ValueError, match="loss"):
                    monitor.log(step)
                monitor = None
            else:
                monitor.log(step)
        optimizer.step()
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    grads = [p.grad for p in model.parameters()]
    tensors = [*model.state_dict().values(), *moments, *grads]
    return [[x.tolist() for x in tensors], flags(model), random_numbers()]


@pytest.mark.parametrize(("source", "fails"), [("list", False), ("loader", False), ("list", True)])
def test_the_run_is_the_same_with_a_monitor(source: str, fails: bool):
    assert train(SOURCES[source], fails) == train(None)


class Writer:
    """Takes numbers as TensorBoard's writer does."""

    def __init__(self):
        self.numbers: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.numbers.append((tag, scalar_value, global_step))


def rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def test_numbers_are_written(tmp_path: Path):
    model, path, writer = network(), tmp_path / "curvature.csv", Writer()
    A = operator(GGNLinearOperator, model, batches(4))
    monitor = CurvatureMonitor(A, path, writer, every=2, num_matvecs=0, by="parameter")
    found = {step: monitor.log(step) for step in range(4)}
    assert found[1] is found[3] is None and found[0] == found[2] == monitor.measure()
    again = CurvatureMonitor(A, str(path), every=2, num_matvecs=0, by="parameter")
    again.log(4)  # continues the file
    runs = [(1, 0), (1, 2), (2, 4)]
    assert rows(path) == [{"run": run, "step": step, **found[0]} for run, step in runs]
    expected = [(f"curvature/{n}", x, step) for step in (0, 2) for n, x in found[0].items()]
    assert writer.numbers == expected

    other = CurvatureMonitor(A, path, num_matvecs=0)
    with pytest.raises(ValueError, match=r"curvature.csv has the columns .* Choose another path"):
        other.log(0)
    assert len(rows(path)) == 3


def test_measurements_follow_the_model():
    model, data = network(), batches(6)
    monitor = CurvatureMonitor(operator(HessianLinearOperator, model, data), tol=1e-8)
    for _ in range(2):
        p = in_eval_mode(model, data)
        largest = float(torch.linalg.eigvalsh(reference.hessian(p))[-1])
        assert monitor.measure()["sharpness"] == pytest.approx(largest, rel=1e-7)
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(1.5)


BAD: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "got Sequential": (TypeError, lambda A: CurvatureMonitor(A.model_func)),
    "got JacobianLinearOperator": (
        TypeError,
        lambda A: CurvatureMonitor(JacobianLinearOperator(A.model_func, A.params, A.data)),
    ),
    "that follows the model, .* got KFACLinearOperator": (
        TypeError,
        lambda A: CurvatureMonitor(KFACLinearOperator(A.model_func, CE, A.params, A.data)),
    ),
    "every must be": (ValueError, lambda A: CurvatureMonitor(A, every=0)),
    "k must be": (ValueError, lambda A: CurvatureMonitor(A, k=0)),
    "num_matvecs must be": (ValueError, lambda A: CurvatureMonitor(A, num_matvecs=-1)),
    "num_matvecs must be 0": (ValueError, lambda A: CurvatureMonitor(A, num_matvecs=5)),
    "by must be": (ValueError, lambda A: CurvatureMonitor(A, by="layer").log(0)),
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_arguments_are_refused(words: str):
    kind, build = BAD[words]
    model = network().eval()
    A = GGNLinearOperator(model, CE, list(model.parameters()), batches(4))
    with pytest.raises(kind, match=words):
        build(A)
    assert not any(flags(model))
