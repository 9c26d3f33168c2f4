"""Factors that are computed in parts, and kept in a directory."""

import json
import os
import signal
import subprocess
import sys
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
from torch import nn

import curvlinops
from curvlinops import EKFACLinearOperator, KFACLinearOperator
from curvlinops.layers.factors import KroneckerShape
from curvlinops.operators.kfac.blocks import LayerUse, Uses
from curvlinops.operators.kfac.partition import among, num_entries
from curvlinops.structured.layout import ParameterView

CLASSES = [KFACLinearOperator, EKFACLinearOperator]
both = pytest.mark.parametrize("cls", CLASSES)


def build(cls: type, p: Problem, **options: Any):
    options = {"fisher_type": "empirical", "batch_size_fn": p.batch_size_fn} | options
    return cls(p.model, p.loss, p.params, p.data, **options)


def files(path: Path) -> dict[str, bytes]:
    """Return all files but those whose process was killed while it wrote them."""
    return {
        file.name: file.read_bytes() for file in path.iterdir() if not file.name.endswith(".part")
    }


@both
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["mlp-mse-mean", "cnn", "transformer-tied", "lstm-packed"])
def test_parts(cls: type, name: str, joint: bool, tmp_path: Path):
    p = problems.make(name)
    options = {"separate_weight_and_bias": not joint, "fallback": "dense", "fisher_type": "mc"}
    expected = matrix(build(cls, p, **options))
    in_memory = build(cls, p, module_partitions=3, **options)
    assert error(matrix(in_memory), expected) <= 1e-12
    kept = build(cls, p, module_partitions=3, directory=tmp_path / "factors", **options)
    assert error(matrix(kept), expected) <= 1e-12
    assert kept.report() == build(cls, p, **options).report()
    loaded = build(cls, p, **options)
    loaded.load(tmp_path / "factors")
    assert error(matrix(loaded), expected) <= 1e-12
    structured = curvlinops.load(tmp_path / "factors")
    assert error(matrix(structured), expected) <= 1e-12
    assert (
        error(
            matrix(structured.inverse(0.1)), matrix(in_memory.inverse(0.1, use_exact_damping=True))
        )
        <= 1e-9
    )


class Counted:
    """Data that counts the batches that are read."""

    def __init__(self, data: list):
        self.data, self.read = data, 0

    def __iter__(self):
        for pair in self.data:
            self.read += 1
            yield pair


@both
def test_factors_that_are_there_take_one_batch(cls: type, tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    options = {"module_partitions": 2, "directory": tmp_path, "check_deterministic": False}
    expected = matrix(build(cls, p, **options))
    data = Counted(p.data)
    again = build(cls, replace(p, data=data), **options)
    assert error(matrix(again), expected) <= 1e-14
    assert data.read == 1
    before = files(tmp_path)
    again.compute_kronecker_factors()
    assert data.read > len(p.data)
    assert files(tmp_path) == before
    with torch.no_grad():
        p.params[0].mul_(1.5)
    again.compute_kronecker_factors()
    assert error(matrix(again), matrix(build(cls, p))) <= 1e-12
    anew = build(cls, p, directory=tmp_path, resume=False)
    with torch.no_grad():
        p.params[0].mul_(0.5)
    assert error(matrix(anew), matrix(build(cls, p))) <= 1e-12
    with pytest.raises(ValueError, match="add more data, load them into an operator without"):
        anew.update(p.data[0])


#: What is done to the operator's arguments, and the message.
OTHERS = {
    "seed": ({"seed": 3}, "differs in seed"),
    "class": ({"cls": EKFACLinearOperator}, "differs in class"),
    "values": ({"values": 1.1}, "differs in the values of"),
    "data": (
        {"data": slice(1, None)},
        "differs in the number of samples.*: it has 3",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_factors_of_something_else_are_refused(name: str, tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    build(KFACLinearOperator, p, directory=tmp_path).compute_kronecker_factors()
    before, (changes, message) = files(tmp_path), OTHERS[name]
    options = dict(changes)
    cls = options.pop("cls", KFACLinearOperator)
    p = replace(p, data=p.data[options.pop("data", slice(None))])
    with torch.no_grad():
        p.params[0].mul_(options.pop("values", 1.0))
    operator = build(cls, p, directory=tmp_path, **options)
    with pytest.raises(ValueError, match=f"{message}.*With resume=False"):
        operator.trace()
    assert files(tmp_path) == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


#: What happens to a directory, and the message.
DAMAGES = {
    "truncated": (lambda path: truncate(path / "0001-0000.safetensors"), "incomplete"),
    "foreign": (
        lambda path: os.replace(path.parent / "others" / "0001-0000.safetensors",
                                path / "0001-0000.safetensors"),
        "differs in computation",
    ),
    "swapped": (
        lambda path: os.replace(path / "0000-0000.safetensors", path / "0001-0000.safetensors"),
        "missing",
    ),
    "missing": (lambda path: (path / "0001-0000.safetensors").unlink(), "missing"),
    "manifest": (lambda path: truncate(path / "manifest.json"), "no manifest of factors"),
    "format": (
        lambda path: (path / "manifest.json").write_text('{"format": "older"}'),
        "has the format 'older'",
    ),
    "no-manifest": (lambda path: (path / "manifest.json").unlink(), "no directory of factors"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_directories_are_refused(name: str, tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    folder, options = tmp_path / "factors", {"module_partitions": 2}
    other = build(KFACLinearOperator, p, directory=tmp_path / "others", seed=1, **options)
    for operator in (other, build(KFACLinearOperator, p, directory=folder, **options)):
        operator.compute_kronecker_factors()
    damage, message = DAMAGES[name]
    damage(folder)
    for read in (
        build(KFACLinearOperator, p, directory=folder).trace,
        lambda: build(KFACLinearOperator, p).load(folder),
        lambda: curvlinops.load(folder),
    ):
        with pytest.raises(ValueError, match=message):
            read()


def test_incomplete_directories(tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    operator = build(KFACLinearOperator, p, directory=tmp_path, module_partitions=2)
    operator.compute_kronecker_factors()
    expected, before = matrix(operator), files(tmp_path)
    manifest = json.loads(before["manifest.json"])
    manifest["parts"][1] = {"names": manifest["parts"][1]["names"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="1 of 2 parts"):
        curvlinops.load(tmp_path)
    data = Counted(p.data)
    rest = build(KFACLinearOperator, replace(p, data=data), directory=tmp_path)
    data.read = 0
    assert error(matrix(rest), expected) <= 1e-14
    assert data.read == len(data.data) + 1
    assert files(tmp_path) == before


class Growing:
    """Data with one more batch in each later pass."""

    def __init__(self, data: list):
        self.data, self.passes = data, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.data * (1 if self.passes < 3 else 2))


def test_data_that_is_another_in_later_passes():
    p = problems.make("mlp-ce-mean")
    p = replace(p, data=Growing(p.data))
    operator = build(KFACLinearOperator, p, module_partitions=2, check_deterministic=False)
    with pytest.raises(ValueError, match="not the same in all passes"):
        operator.trace()


def deep(num_layers: int = 8, width: int = 64) -> Problem:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_layers)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))
    data = [(torch.randn(4, width), torch.randn(4, width)) for _ in range(2)]
    return Problem(model, nn.MSELoss(), list(model.parameters()), data, mc=True)


@both
def test_memory_of_a_part_only(cls: type, tmp_path: Path):
    peaks = []
    for num in (1, 4):
        directory = tmp_path / str(num)
        operator = build(cls, deep(), module_partitions=num, directory=directory)
        operator.gradient_and_loss()  # what is known of the model
        live = LiveBytes()
        with live:
            operator.compute_kronecker_factors()
        peaks.append(live.peak)
    assert peaks[1] <= 0.4 * peaks[0]


def test_parts_have_equal_shares_beside_a_large_embedding(tmp_path: Path):
    layers = [nn.Linear(32, 32) for _ in range(5)]
    model = nn.Sequential(nn.Embedding(300, 4), nn.Flatten(), nn.Linear(12, 32), *layers)
    data = [(torch.randint(300, (4, 3)), torch.randint(32, (4,)))]
    arguments = model, nn.CrossEntropyLoss(), dict(model.named_parameters()), data
    K = KFACLinearOperator(*arguments, module_partitions=2, directory=tmp_path)
    K.compute_kronecker_factors()
    sizes = {block.names[0]: sum(map(prod, block.factors)) for block in K.report()}
    parts = json.loads((tmp_path / "manifest.json").read_text())["parts"]
    numbers = [sum(sizes.get(name, 0) for name in part["names"]) for part in parts]
    assert max(numbers) <= 0.7 * sum(sizes.values())


def test_sizes_do_not_depend_on_the_order_of_uses():
    """Processes see the uses of a tied table and head in different orders."""
    view = ParameterView.whole("weight", (5, 3))
    shapes = [KroneckerShape(1, 5, 3, view, one_hot_inputs=x) for x in (True, False)]
    uses = [LayerUse(view, shape, True) for shape in shapes]
    sizes = {num_entries(Uses(x), ["weight"], {"weight": (5, 3)}, 99) for x in (uses, uses[::-1])}
    assert sizes == {15 + 25 + 9}


def test_the_largest_tasks_go_first_to_the_process_that_has_least():
    assert among([4, 9, 1, 4], 2) == [1, 0, 1, 1]


# --- processes that are killed


def _die(when: int, how: str) -> None:
    """Kill this process at a write of a file: in the middle, before it is renamed, or after."""
    from curvlinops.support import serialization

    count, save, rename = [0], serialization.save_file, os.replace

    def dying_save(tensors, path, metadata):
        save(tensors, path, metadata)
        count[0] += 1
        if count[0] == when and how == "middle":
            truncate(Path(path))
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_rename(old, new):
        dies = count[0] == when and how != "middle"
        if dies and how == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    serialization.save_file, os.replace = dying_save, dying_rename


def main(folder: str, when: str, how: str) -> None:
    _die(int(when), how)
    corrected(Path(folder)).compute_kronecker_factors()


def corrected(folder: Path, num: int = 3) -> EKFACLinearOperator:
    """Return an operator that keeps its factors, and then its eigenvalues, in a directory."""
    return build(EKFACLinearOperator, deep(6, 8), directory=folder, module_partitions=num)


@pytest.mark.extensive
def test_killed_processes_continue(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    corrected(whole).compute_kronecker_factors()
    paths = Path(curvlinops.__file__).parents[1], Path(problems.__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    for when, how in [(1, "middle"), (2, "before"), (2, "after"), (2, "middle")]:
        command = [sys.executable, __file__, str(killed), str(when), how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
    corrected(killed, num=1).compute_kronecker_factors()
    assert files(killed) == files(whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
