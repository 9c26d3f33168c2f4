"""Factors that are computed in parts, and written to a directory."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from contract import error, matrix
from live_bytes import LiveBytes
from problems import Problem
from torch import Tensor, nn

import curvlinops
from curvlinops import EKFACLinearOperator, KFACLinearOperator, write_factors
from curvlinops.layers.factors import KroneckerShape
from curvlinops.operators.kfac import files
from curvlinops.operators.kfac.blocks import LayerUse, Uses
from curvlinops.operators.kfac.partition import num_entries
from curvlinops.structured.layout import ParameterView

CLASSES = [KFACLinearOperator, EKFACLinearOperator]
both = pytest.mark.parametrize("cls", CLASSES)


def build(cls: type, p: Problem, **options: Any):
    return p.build(cls, **({"fisher_type": "empirical"} | options))


class Counted:
    """Data that counts the batches that are read."""

    def __init__(self, data: list):
        self.data, self.read = data, 0

    def __iter__(self):
        for pair in self.data:
            self.read += 1
            yield pair


@both
def test_what_is_there_is_not_computed(cls: type, tmp_path: Path):
    p, passes = problems.make("mlp-ce-mean"), 1 + CLASSES.index(cls)
    data = Counted(p.data)
    operator = build(cls, replace(p, data=data), check_deterministic=False)
    expected = matrix(write_factors(operator, tmp_path, parts=2))
    # one batch for the comparison, a pass for the uses of parameters
    assert data.read == 1 + len(p.data) * (1 + 2 * passes)
    files, data.read = sorted(tmp_path.iterdir()), 0
    assert error(matrix(write_factors(operator, tmp_path, parts=3)), expected) <= 1e-14
    assert data.read == 1
    files[0].unlink()
    data.read = 0
    assert error(matrix(write_factors(operator, tmp_path)), expected) <= 1e-12
    assert data.read == 1 + len(p.data) * passes
    assert set(files[1:]) < set(tmp_path.iterdir())


def test_parts_of_other_data(tmp_path: Path):
    """The number of batches is compared, at the end if the data has no length."""
    p = problems.make("mlp-ce-mean")
    data = [*p.data, *p.data]
    for kind, message in (
        (list, "differs in number of batches: it has 2, not 4"),
        (
            Counted,
            "not the same in all passes.*Delete",
        ),
    ):
        folder = tmp_path / kind.__name__
        write_factors(build(KFACLinearOperator, replace(p, data=kind(p.data))), folder)
        next(folder.iterdir()).unlink()
        with pytest.raises(ValueError, match=message):
            write_factors(build(KFACLinearOperator, replace(p, data=kind(data))), folder)
    with pytest.raises(TypeError, match="Only KFAC and EKFAC"):
        write_factors(p.build(curvlinops.GGNLinearOperator), tmp_path)


class Tasks(nn.Module):
    """A head for each task, and experts that some batches do not use."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, X: dict) -> Tensor:
        return self.heads[X["task"]](torch.tanh(self.body(X["x"])))


@both
@pytest.mark.parametrize("first", ["one task", "no sample"])
def test_layers_that_the_first_batch_does_not_use(cls: type, first: str, tmp_path: Path):
    """A weight and its bias are in one part, as all data shows."""
    torch.manual_seed(0)
    model, y = Tasks().double(), torch.randint(3, (4,))
    data = [({"task": i, "x": torch.randn(4, 4).double()}, y) for i in (0, 1, 2, 1)]
    if first == "no sample":
        data = [({"task": 0, "x": data[0][0]["x"][:0]}, y[:0]), *data]
    p = Problem.of(model, nn.CrossEntropyLoss(), data)
    p = replace(p, batch_size_fn=lambda X: len(X["x"]))
    options = {"separate_weight_and_bias": False, "check_deterministic": False}
    whole = build(cls, p, **options)
    for num in (2, 8):
        parts = write_factors(build(cls, p, **options), tmp_path / str(num), num)
        assert error(matrix(parts), matrix(whole)) <= 1e-12
        assert set(parts.blocks) == set(whole.blocks)


def deep(num_layers: int = 8, width: int = 64) -> Problem:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))
    data = [(torch.randn(4, width), torch.randn(4, width)) for _ in range(2)]
    return Problem.of(model, nn.MSELoss(), data)


@both
def test_memory_of_a_part_only(cls: type, tmp_path: Path):
    peaks = []
    for num in (1, 4):
        operator = build(cls, deep())
        operator.gradient_and_loss()  # what is known of the model
        live = LiveBytes()
        with live:
            write_factors(operator, tmp_path / str(num), num)
        peaks.append(live.peak)
    assert peaks[1] <= 0.4 * peaks[0]


def test_parts_have_equal_shares_beside_a_large_embedding():
    layers = [nn.Linear(32, 32) for _ in range(5)]
    model = nn.Sequential(nn.Embedding(300, 4), nn.Flatten(), nn.Linear(12, 32), *layers)
    data = [(torch.randint(300, (4, 3)), torch.randint(32, (4,)))]
    arguments = model, nn.CrossEntropyLoss(), dict(model.named_parameters()), data
    K = KFACLinearOperator(*arguments)
    sizes = {block.names[0]: sum(map(prod, block.factors)) for block in K.report()}
    parts = files._passes(K, 2, set())
    numbers = [sum(sizes.get(name, 0) for name in part) for part in parts]
    assert max(numbers) <= 0.7 * sum(sizes.values())


def test_sizes_do_not_depend_on_the_order_of_uses():
    """Processes see the uses of a tied table and head in different orders."""
    view = ParameterView.whole("weight", (5, 3))
    shapes = [KroneckerShape(1, 5, 3, view, one_hot_inputs=x) for x in (True, False)]
    uses = [LayerUse(view, shape, True) for shape in shapes]
    sizes = {num_entries(Uses(x), ["weight"], {"weight": (5, 3)}, 99) for x in (uses, uses[::-1])}
    assert sizes == {15 + 25 + 9}
