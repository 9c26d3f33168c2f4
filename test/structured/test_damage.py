"""Everything that is in files, and everything that happens to files: right numbers or an error."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import torch
from contract import error, matrix
from safetensors.torch import save_file
from structured_cases import A, B, Kron
from torch import Tensor

import curvlinops
from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    load,
    write_factors,
)
from curvlinops.influence import GradientStore
from curvlinops.operators import scores
from curvlinops.support import serialization

ROOT = Path(curvlinops.__file__).parents[1]


def on_data(cls: type, **options: Any) -> Any:
    p = problems.make("mlp-ce-mean")
    options = {"batch_size_fn": p.batch_size_fn, "check_deterministic": False} | options
    return cls(p.model, p.loss, p.params, p.data, **options)


class Structured:
    """An operator without model and data, in a file."""

    def write(self, path: Path, seed: int = 0) -> None:
        (Kron(B, A) * (1.0 + seed)).save(path / "file")

    def read(self, path: Path) -> Tensor:
        return load(path / "file").to_dense()


class Factors:
    """Factors in a file."""

    def __init__(self, cls: type):
        self.cls = cls

    def write(self, path: Path, seed: int = 0) -> None:
        on_data(self.cls, seed=seed).save(path / "file")

    def read(self, path: Path) -> Tensor:
        K = on_data(self.cls, seed=0)
        K.load(path / "file")
        return matrix(K)


class Parts:
    """Factors in a directory, which are computed anew where they are missing."""

    def __init__(self, cls: type, read: Callable[[Any, Path], Any]):
        self.cls, self._read = cls, read

    def write(self, path: Path, seed: int = 0) -> None:
        write_factors(on_data(self.cls, seed=seed), path, parts=2)

    def read(self, path: Path) -> Tensor:
        return matrix(self._read(on_data(self.cls, seed=0), path))


def loaded(K: Any, path: Path) -> Any:
    K.load(path)
    return K


class Scores:
    """Scores in a directory, which are computed anew where they are missing."""

    def write(self, path: Path, seed: int = 0) -> None:
        rows = on_data(PerSampleGradientLinearOperator)
        rows.scores(self._vectors(rows) + seed, out=path)

    def read(self, path: Path) -> Tensor:
        rows = on_data(PerSampleGradientLinearOperator)
        return rows.scores(self._vectors(rows), out=path)

    def _vectors(self, rows: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(rows.shape[1], 2, generator=generator, dtype=torch.float64)


class Gradients:
    """Projected gradients in a directory, which are computed anew where they are missing."""

    def __init__(self, cls: type | None):
        self.cls = cls

    def write(self, path: Path, seed: int = 0) -> GradientStore:
        basis = None if self.cls is None else on_data(self.cls, seed=seed)
        rows = on_data(PerSampleGradientLinearOperator)
        return GradientStore.write(rows, path, rank=2, basis=basis, seed=seed)

    def read(self, path: Path) -> Tensor:
        return self.write(path).scores(on_data(PerSampleGradientLinearOperator))


FILES = {
    "structured": Structured(),
    "kfac": Factors(KFACLinearOperator),
    "ekfac": Factors(EKFACLinearOperator),
}
COMPUTED = {
    "kfac parts": Parts(KFACLinearOperator, partial(write_factors, parts=2)),
    "ekfac parts": Parts(EKFACLinearOperator, partial(write_factors, parts=3)),
    "scores": Scores(),
    "gradients": Gradients(None),
    "gradients, eigenvectors": Gradients(EKFACLinearOperator),
}
LOADED = {
    "parts, load": Parts(KFACLinearOperator, lambda _, path: load(path)),
    "parts, method load": Parts(EKFACLinearOperator, loaded),
}
OBJECTS: dict[str, Any] = FILES | COMPUTED | LOADED


@pytest.fixture(autouse=True)
def scores_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each batch of scores have a file."""
    monkeypatch.setattr(scores, "SECONDS", 0.0)


def one_of(path: Path) -> Path:
    """Return the largest file."""
    return max(path.iterdir(), key=lambda file: (file.stat().st_size, file.name))


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """Return what changes the bytes of a file."""
    return lambda path: one_of(path).write_bytes(change(one_of(path).read_bytes()))


def flipped(data: bytes, place: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def in_header(data: bytes) -> bytes:
    """Change a digit of a number."""
    place = re.search(rb"\d\.\d{3}", data[: len(data) // 2]) or re.search(rb"\d\.\d", data)
    return flipped(data, place.start()) if place else flipped(data, -9)


#: What happens to the largest file of all that there are.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "last byte": changed(lambda x: x[:-1]),
    "half": changed(lambda x: x[: len(x) // 2]),
    "100 bytes": changed(lambda x: x[:100]),
    "empty": changed(lambda x: b""),
    "a hole": changed(lambda x: x[:-48] + bytes(48)),
    "NaN": changed(lambda x: x[:-16] + np.full(2, np.nan).tobytes()),
    "a bit of a number": changed(partial(flipped, place=-3)),
    "a bit of the header": changed(in_header),
    "a bit of the length": changed(partial(flipped, place=1)),
    "pickled": lambda path: torch.save({"x": torch.ones(1)}, one_of(path)),
    "another's": lambda path: save_file({"x": torch.ones(1)}, str(one_of(path))),
    "another object": lambda path: Kron(A, A).inverse(1.0).save(one_of(path)),
}


def check(name: str, folder: Path, expected: Tensor, must_fail: bool) -> None:
    """Check that numbers are right, or an error names the file or directory, and a remedy.

    Args:
        name: The object.
        folder: Where it is.
        expected: The right numbers.
        must_fail: Whether there has to be an error.
    """
    remedy = "Write it anew|Delete|[Mm]ove|Choose|Continue|Compute|are read by"
    try:
        found = OBJECTS[name].read(folder)
    except (ValueError, OSError) as message:
        assert str(folder) in str(message) and re.search(remedy, str(message)), message
        assert len(str(message)) < 600
    else:
        assert not must_fail
        assert error(found, expected) <= 1e-12


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OBJECTS)
def test_damaged_files(name: str, damage: str, tmp_path: Path):
    folder, kind = tmp_path / "x", OBJECTS[name]
    folder.mkdir()
    kind.write(folder)
    expected = kind.read(folder)
    whole = contents(folder)
    DAMAGES[damage](folder)
    damaged = contents(folder)
    # another structured operator is one
    if name != "structured" or damage != "another object":
        check(name, folder, expected, must_fail=True)
    assert contents(folder) == damaged
    if name in COMPUTED:  # as messages say
        for file in damaged:
            if damaged[file] != whole[file]:
                (folder / file).unlink()
        assert error(kind.read(folder), expected) <= 1e-12


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def swap(path: Path) -> None:
    one, two, *_ = sorted(path.iterdir())
    one.rename(path / "third")
    two.rename(one)
    (path / "third").rename(two)


def add_foreign(path: Path, kind: Any) -> None:
    """Add a file of another computation."""
    other = path.parent / "other"
    kind.write(other, seed=1)
    shutil.copy(one_of(other), path / "0.safetensors")


#: What happens to a directory, given what is in it, and whether all that reads it is an error.
CHANGES: dict[str, tuple[Callable[[Path, Any], Any], bool | str]] = {
    "swapped": (lambda path, _: swap(path), False),
    "renamed": (lambda path, _: one_of(path).rename(path / "new.safetensors"), False),
    "moved": (lambda path, _: path.rename(path.parent / "y").rename(path), False),
    "twice": (lambda path, _: shutil.copy(one_of(path), path / "copy.safetensors"), False),
    "more files": (
        lambda path, _: [(path / x).write_text("{") for x in ("notes.txt", "x.safetensors.1.part")],
        False,
    ),
    "missing": (lambda path, _: one_of(path).unlink(), "load"),
    "empty": (lambda path, _: [file.unlink() for file in path.iterdir()], "load"),
    "unfinished": (lambda path, _: one_of(path).rename(path / "x.safetensors.1.part"), "load"),
    "foreign": (add_foreign, True),
    "a file": (lambda path, _: shutil.rmtree(path) or path.write_text("mine"), True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", COMPUTED | LOADED)
def test_changed_directories(name: str, change: str, tmp_path: Path):
    folder, kind = tmp_path / "x", OBJECTS[name]
    kind.write(folder)
    expected, (act, fails) = kind.read(folder), CHANGES[change]
    act(folder, kind)
    check(name, folder, expected, name in LOADED if fails == "load" else bool(fails))


@pytest.mark.parametrize("name", OBJECTS)
def test_read_only(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is complete is read without writing."""
    folder, kind = tmp_path / "x", OBJECTS[name]
    folder.mkdir()
    kind.write(folder)
    expected = kind.read(folder)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Read-only file system")

    for module, function in ((serialization, "save_file"), (os, "replace"), (Path, "mkdir")):
        monkeypatch.setattr(module, function, refuse)
    assert error(kind.read(folder), expected) <= 1e-12
    with pytest.raises(OSError, match="Read-only file system"):
        kind.write(tmp_path / "y", seed=1)


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Let no file be larger than some bytes."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 500])
@pytest.mark.parametrize("name", OBJECTS)
def test_full_disks(name: str, size: int, tmp_path: Path):
    folder, kind = tmp_path / "x", OBJECTS[name]
    folder.mkdir()
    with (
        small_disk(size),
        pytest.raises(OSError, match=f"{folder}.*cannot be written.*Make space"),
    ):
        kind.write(folder)
    assert not list(folder.iterdir())
    kind.write(folder)
    with small_disk(0):
        kind.read(folder)


class Killed(BaseException):
    """Stands for the end of the process."""


PLACES = ("in a write", "before the new name", "after it")


def dying(when: int, place: str) -> tuple[Callable, Callable]:
    """Return functions that write and rename files; one of them ends the process."""
    save, rename, count = serialization.save_file, os.replace, [0]

    def dies(here: str) -> bool:
        return place == here and count[0] == when

    def dying_save(tensors: Any, path: str, metadata: Any) -> None:
        save(tensors, path, metadata)
        count[0] += 1
        if dies(PLACES[0]):
            shutil.copy(path, f"{path}.left.part")
            os.truncate(f"{path}.left.part", 100)
            raise Killed

    def dying_rename(old: Any, new: Any) -> None:
        if not dies(PLACES[1]):
            rename(old, new)
        if dies(PLACES[1]) or dies(PLACES[2]):
            raise Killed

    return dying_save, dying_rename


@pytest.mark.parametrize("when", [1, 2, 4])
@pytest.mark.parametrize("name", COMPUTED)
def test_killed(name: str, when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Again and again."""
    folder, kind = tmp_path / "x", OBJECTS[name]
    kind.write(tmp_path / "whole")
    expected = kind.read(tmp_path / "whole")
    for place in PLACES:
        with monkeypatch.context() as patch, suppress(Killed):
            save, rename = dying(when, place)
            patch.setattr(serialization, "save_file", save)
            patch.setattr(os, "replace", rename)
            kind.write(folder)
    assert error(kind.read(folder), expected) <= 1e-12


class Slow(list):
    """Data that takes time."""

    def __iter__(self) -> Iterator[Any]:
        for pair in super().__iter__():
            time.sleep(0.02)
            yield pair


def main(name: str, folder: str, trials: str) -> None:
    """Kill processes that write, twice for each directory; print the largest error.

    Several that write to one directory at the same time all get what they need.
    """
    kind, make, scores.SECONDS = OBJECTS[name], problems.make, 0.0
    random, worst = np.random.default_rng(0), 0.0
    kind.write(Path(folder) / "whole")
    expected = kind.read(Path(folder) / "whole")
    for trial in range(int(trials)):
        path = Path(folder) / str(trial)
        for _ in range(2):
            writers = []
            for _ in range(1 + trial % 2):
                writers.append(os.fork())
                if not writers[-1]:
                    problems.make = lambda name: replace(make(name), data=Slow(make(name).data))
                    kind.write(path)
                    os._exit(0)
            time.sleep(random.uniform(0.0, 0.4))
            for writer in writers:
                os.kill(writer, signal.SIGKILL)
                os.waitpid(writer, 0)
        worst = max(worst, error(kind.read(path), expected))
    print(worst)


@pytest.mark.extensive
@pytest.mark.parametrize("name", COMPUTED)
def test_killed_at_random_moments(name: str, tmp_path: Path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(problems.__file__).parent))),
        "OMP_NUM_THREADS": "1",  # so that processes can fork
    }
    command = [sys.executable, __file__, name, str(tmp_path), "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1e-12


if __name__ == "__main__":
    main(*sys.argv[1:])
