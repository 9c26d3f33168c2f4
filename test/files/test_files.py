"""What is read equals what was written, or is refused by name: all that is saved, in one table."""

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
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from contract import error, matrix
from models import Using
from safetensors.torch import save_file
from structured_cases import A, B, Kron
from tables import core
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    load,
    write_factors,
)
from curvlinops.influence import GradientStore, row_files
from curvlinops.support import files
from curvlinops.support.rng import GeneratorStates

ROOT = Path(__file__).parents[2]
KFAC, EKFAC, Rows = KFACLinearOperator, EKFACLinearOperator, PerSampleGradientLinearOperator


class World:
    """A model, a loss and data; tests change its attributes to others of the same shapes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.activation, self.dropout, self.is_flat = torch.tanh, 0.0, True
        self.layers = {"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 3)}
        self.model = Using(self.forward, **self.layers).double()
        self.model.register_buffer("shift", torch.zeros(4).double())
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(draw(*p.shape))
        self.x = [torch.randint(8, (n, 5), generator=generator) for n in (4, 3)]
        self.y = [torch.randint(3, (n, 5), generator=generator) for n in (4, 3)]
        self.wrap: Callable[[Tensor], Any] = lambda x: x
        self.unwrap: Callable[[Any], Tensor] = lambda X: X
        self.loss, self.columns, self.params = nn.CrossEntropyLoss(), draw(51, 2), slice(None)
        self.options, self.kfac, self.rows = {}, {"fisher_type": "empirical"}, dict[str, Any]()
        self.classes, self.store = dict[type, type](), dict[str, Any]()
        self.kind_of_data: type = list

    def forward(self, m: Any, X: Any) -> Tensor:
        h = self.activation(m.embed(self.unwrap(X)) + m.shift)
        return self.arranged(m.head(nn.functional.dropout(h, self.dropout)))

    def arranged(self, output: Tensor) -> Tensor:
        """Return one row for each place, or for each sample."""
        return output.flatten(0, 1) if self.is_flat else output.mT

    def build(self, cls: type) -> Any:
        reduction = None if isinstance(self.loss, nn.CrossEntropyLoss) else "mean"
        options = {"check_deterministic": False, "reduction": reduction, "batch_size_fn": len}
        options |= self.options
        options |= self.rows if cls is Rows else self.kfac
        params = list(self.model.parameters())[self.params]
        targets = [y.flatten() if self.is_flat else y for y in self.y]
        data = list(zip(map(self.wrap, self.x), targets, strict=True))
        problem = self.model, self.loss, params, self.kind_of_data(data)
        return self.classes.get(cls, cls)(*problem, **options)


class Thing(NamedTuple):
    """How something of a world is written to a path, and read from it, perhaps in another one."""

    write: Callable[[World, Path], Any]
    read: Callable[[World, Path], Tensor]


def factors(cls: type, write: Callable, read: Callable) -> Thing:
    """Return factors, given what an operator and a path do; ``read`` returns an operator."""
    return Thing(
        lambda w, path: write(w.build(cls), path), lambda w, path: matrix(read(w.build(cls), path))
    )


def loaded(K: Any, path: Path) -> Any:
    K.load(path)
    return K


def restored(K: Any, path: Path) -> Any:
    K.load_state_dict(torch.load(path, weights_only=True))
    return K


OPERATORS: dict[Path, Any] = {}


def kept(K: Any, path: Path) -> None:
    OPERATORS[path] = K
    path.touch()


def merged(K: Any, path: Path) -> Any:
    K.merge(OPERATORS[path])
    return K


def scores(w: World, path: Path) -> Tensor:
    return torch.tensor(np.asarray(w.build(Rows).scores(w.columns, out=path)))


def store(basis: type | None, w: World, path: Path) -> GradientStore:
    K = None if basis is None else w.build(basis)
    return GradientStore.write(w.build(Rows), path, **{"rank": 2, "basis": K} | w.store)


def gradients(basis: type | None) -> Thing:
    write = partial(store, basis)
    return Thing(write, lambda w, path: write(w, path).scores(w.build(Rows)))


two, three = (partial(write_factors, parts=n) for n in (2, 3))
FILES = {
    "structured": Thing(
        lambda w, path: w.build(KFAC).inverse(0.1).save(path), lambda w, path: matrix(load(path))
    ),
    "kfac": factors(KFAC, KFAC.save, loaded),
    "ekfac": factors(EKFAC, EKFAC.save, loaded),
}
#: What reads these directories computes what is missing.
COMPUTED = {
    "kfac parts": factors(KFAC, two, two),
    "ekfac parts": factors(EKFAC, two, three),
    "scores": Thing(scores, scores),
    "gradients": gradients(None),
    "gradients, eigenvectors": gradients(EKFAC),
}
LOADED = {
    "gradients, store": Thing(
        partial(store, None), lambda w, path: GradientStore(path).scores(w.build(Rows))
    ),
    "parts, load": factors(KFAC, two, lambda _, path: load(path)),
    "parts, method load": factors(EKFAC, two, loaded),
}
THINGS = FILES | COMPUTED | LOADED
#: Those that belong to options, model, loss and data, and what else does.
BELONGING = {name: THINGS[name] for name in ("kfac", "kfac parts", "scores", "gradients")} | {
    "state": factors(KFAC, lambda K, path: torch.save(K.state_dict(), path), restored),
    "merge": factors(KFAC, kept, merged),
}


@pytest.fixture(autouse=True)
def file_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Tensor]:
    """Return a function that puts a thing at a path and returns what is read; it is made once."""

    @cache
    def made(name: str) -> tuple[Path, Tensor]:
        path = tmp_path_factory.mktemp("written") / "x"
        THINGS[name].write(World(), path)
        return path, THINGS[name].read(World(), path)

    def put(name: str, path: Path) -> Tensor:
        source, expected = made(name)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        return expected

    return put


# --- what happens to files


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in files_of(path)}


def largest(path: Path) -> Path:
    return max(files_of(path), key=lambda file: (file.stat().st_size, file.name))


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """Return what changes the bytes of a file."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


def flipped(data: bytes, place: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def in_header(data: bytes) -> bytes:
    """Change a digit of a number."""
    place = re.search(rb"\d\.\d{3}", data[: len(data) // 2]) or re.search(rb"\d\.\d", data)
    return flipped(data, place.start()) if place else flipped(data, -9)


#: What happens to the largest file of all that there are: all that reads it is an error.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "last byte": changed(lambda x: x[:-1]),
    "half": changed(lambda x: x[: len(x) // 2]),
    "100 bytes": changed(lambda x: x[:100]),
    "no bytes": changed(lambda x: b""),
    "a hole": changed(lambda x: x[:-48] + bytes(48)),
    "NaN": changed(lambda x: x[:-16] + np.full(2, np.nan).tobytes()),
    "a bit of a number": changed(partial(flipped, place=-3)),
    "a bit of the header": changed(in_header),
    "a bit of the length": changed(partial(flipped, place=1)),
    "another format": changed(lambda x: x.replace(b"curvlinops 1", b"curvlinops 0")),
    "pickled": lambda file: torch.save({"x": torch.ones(1)}, file),
    "another's": lambda file: save_file({"x": torch.ones(1)}, str(file)),
    "an earlier version's": lambda file: save_file(
        {"0": torch.ones(1)}, str(file), {"metadata": "{}", "checksum": "00000000"}
    ),
    "another object": lambda file: Kron(A, A).inverse(1.0).save(file),
}


def check(thing: Thing, path: Path, expected: Tensor, must_fail: bool) -> None:
    """Check that numbers are right, or an error names the file or directory, and a remedy."""
    remedy = "Write it anew|Delete|[Mm]ove|Choose|Continue|Compute|are read by"
    try:
        found = thing.read(World(), path)
    except (ValueError, OSError) as message:
        assert str(path) in str(message) and re.search(remedy, str(message)), message
        assert len(str(message)) < 600
    else:
        assert not must_fail
        assert error(found, expected) <= 1e-12


def swap(path: Path) -> None:
    one, two, *_ = files_of(path)
    one.rename(path / "third")
    two.rename(one)
    (path / "third").rename(two)


def add_foreign(path: Path, thing: Thing) -> None:
    """Add a file of another computation."""
    other = World()
    fill("head.bias", 0)(other)
    thing.write(other, path.parent / "other")
    shutil.copy(largest(path.parent / "other"), path / "0.safetensors")


#: What happens to a directory, and whether all that reads it is an error.
CHANGES: dict[str, tuple[Callable[[Path, Thing], Any], bool | str]] = {
    "nothing": (lambda path, _: None, False),
    "swapped": (lambda path, _: swap(path), False),
    "renamed": (lambda path, _: largest(path).rename(path / "new.safetensors"), False),
    "moved": (lambda path, _: path.rename(path.parent / "y").rename(path), False),
    "twice": (lambda path, _: shutil.copy(largest(path), path / "copy.safetensors"), False),
    "more files": (
        lambda path, _: [(path / x).write_text("{") for x in ("notes.txt", "x.safetensors.1.part")],
        False,
    ),
    "missing": (lambda path, _: largest(path).unlink(), "load"),
    "empty": (lambda path, _: [file.unlink() for file in path.iterdir()], "load"),
    "unfinished": (lambda path, _: largest(path).rename(path / "x.safetensors.1.part"), "load"),
    "foreign": (add_foreign, True),
    "a file": (lambda path, _: shutil.rmtree(path) or path.write_text("mine"), True),
}


CASES = [(name, event) for name in THINGS for event in DAMAGES]
CASES += [(name, event) for name in COMPUTED | LOADED for event in CHANGES]
CASES.remove(("structured", "another object"))  # it is a structured operator, too


#: Things that are read by code of their own, and damages of all kinds.
FEW = [*FILES, "kfac parts", "gradients"]
SOME = ["half", "NaN", "a bit of a number", "a bit of the header", "another object", *CHANGES]


@pytest.mark.parametrize(
    "name, event", core((x for x in CASES if x[0] in FEW or x[1] in SOME), CASES)
)
def test_what_happens(name: str, event: str, written: Callable, tmp_path: Path):
    path, thing = tmp_path / "x", THINGS[name]
    expected, whole = written(name, path), contents(path)
    if event in CHANGES:
        act, fails = CHANGES[event]
        act(path, thing)
        check(thing, path, expected, name in LOADED if fails == "load" else bool(fails))
        return
    DAMAGES[event](largest(path))
    damaged = contents(path)
    check(thing, path, expected, must_fail=True)
    assert contents(path) == damaged
    if name in COMPUTED:  # as messages say
        for file in damaged:
            if damaged[file] != whole[file]:
                file.unlink()
        assert error(thing.read(World(), path), expected) <= 1e-12


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_there_is_not_computed(name: str, tmp_path: Path):
    """Nor read: the first batch alone is, to compare it."""
    thing, calls = THINGS[name], []
    for state in ("empty", "complete", "missing"):
        world, num = World(), [0]
        world.model.register_forward_hook(lambda *_, num=num: num.__setitem__(0, num[0] + 1))
        if state == "missing":
            files_of(tmp_path / "x")[-1].unlink()
        thing.read(world, tmp_path / "x")
        calls += num
    assert calls[1] < calls[2] <= calls[0]


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
@pytest.mark.parametrize("name", THINGS)
def test_full_disks(name: str, size: int, tmp_path: Path):
    """What is complete is read without writing."""
    path, thing = tmp_path / "x" / "y", THINGS[name]
    path.parent.mkdir()
    with small_disk(size), pytest.raises(OSError, match=f"{path}.*cannot be written.*Make space"):
        thing.write(World(), path)
    assert not [file for file in path.parent.rglob("*") if file.is_file()]
    thing.write(World(), path)
    with small_disk(0):
        thing.read(World(), path)


def test_two_writers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each of them finds its file whole; the path has the one that was complete last."""
    path, writers = tmp_path / "operator", [Kron(B, A), Kron(A, B)]
    last, save = list(writers), files.save_file

    def save_and_wait(*args: Any) -> None:
        save(*args)
        if last:
            last.pop().save(path)

    monkeypatch.setattr(files, "save_file", save_and_wait)
    last.pop(0).save(path)
    assert not last
    assert torch.equal(matrix(load(path)), matrix(writers[0]))
    assert list(tmp_path.iterdir()) == [path]


class Killed(BaseException):
    """Stands for the end of the process."""


PLACES = ("in a write", "before the new name", "after it")


def dying(when: int, place: str) -> tuple[Callable, Callable]:
    """Return functions that write and rename files; one of them ends the process."""
    save, rename, count = files.save_file, os.replace, [0]

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
def test_killed(
    name: str, when: int, written: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Again and again."""
    path, thing = tmp_path / "x", THINGS[name]
    expected = written(name, tmp_path / "whole")
    for place in PLACES:
        with monkeypatch.context() as patch, suppress(Killed):
            save, rename = dying(when, place)
            patch.setattr(files, "save_file", save)
            patch.setattr(os, "replace", rename)
            thing.write(World(), path)
    assert error(thing.read(World(), path), expected) <= 1e-12


class Slow(list):
    """Data that takes time."""

    def __iter__(self) -> Iterator[Any]:
        for pair in super().__iter__():
            time.sleep(0.02)
            yield pair


def write_and_be_killed(name: str, folder: Path, trials: int) -> float:
    """Kill processes that write, twice for each directory; return the largest error.

    Several that write to one directory at the same time all get what they need.
    """
    thing, slow = THINGS[name], World()
    slow.kind_of_data = Slow
    row_files.SECONDS, random, worst = 0.0, np.random.default_rng(0), 0.0
    thing.write(World(), folder / "whole")
    expected = thing.read(World(), folder / "whole")
    for trial in range(trials):
        path = folder / str(trial)
        for _ in range(2):
            writers = []
            for _ in range(1 + trial % 2):
                writers.append(os.fork())
                if not writers[-1]:
                    thing.write(slow, path)
                    os._exit(0)
            time.sleep(random.uniform(0.0, 0.4))
            for writer in writers:
                os.kill(writer, signal.SIGKILL)
                os.waitpid(writer, 0)
        worst = max(worst, error(thing.read(World(), path), expected))
    return worst


@pytest.mark.extensive
@pytest.mark.parametrize("name", COMPUTED)
def test_killed_at_random_moments(name: str, tmp_path: Path):
    folders = map(str, (ROOT, ROOT / "test" / "shared", ROOT / "test" / "files"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",  # so that processes can fork
    }
    program = (
        "from pathlib import Path; from test_files import write_and_be_killed; "
        f"print(write_and_be_killed({name!r}, Path({str(tmp_path)!r}), 4))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1e-12


# --- what files belong to


class Scaled(nn.Module):
    """A loss of the user's own, with a buffer and options that are no numbers or strings."""

    def __init__(self, options: Any, weight: float | None = None):
        super().__init__()
        self.options, self.weight = options, 1.0
        if weight is not None:
            del self.weight
            self.register_buffer("weight", torch.tensor(weight))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        scale = self.options() if callable(self.options) else np.asarray(self.options).sum()
        return float(scale) * self.weight * nn.functional.cross_entropy(output, target)


def times(factor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss with a value in its closure."""
    return lambda output, target: Scaled(factor)(output, target)


@dataclass
class Item:
    """An X of tensors and numbers."""

    x: Any
    scale: float = 1.0


def set_to(**values: Any) -> Callable[[World], None]:
    """Return what sets attributes of a world."""
    return lambda w: vars(w).update(values)


def fill(name: str, index: Any = ...) -> Callable[[World], Any]:
    """Return what changes numbers of a parameter or buffer in place."""
    return lambda w: w.model.state_dict()[name][index].add_(0.1)


STRINGS = set_to(
    wrap=lambda x: ["".join(map(str, row.tolist())) for row in x],
    unwrap=lambda X: torch.tensor([list(map(int, row)) for row in X]),
)
ARRAYS = set_to(wrap=lambda x: Item(x.numpy()), unwrap=lambda X: torch.as_tensor(X.x))


def ids(changed: int) -> Callable[[World], None]:
    """Let X be large numbers, of which the last digit means nothing."""
    return set_to(
        wrap=lambda x: 10**9 + 10 * x + changed * (torch.arange(x.numel()) == 0).view_as(x),
        unwrap=lambda X: (X - 10**9) // 10,
    )


def masked(place: int) -> Callable[[World], None]:
    """Add a mask with one true value to the first batch, which the model does not read."""
    mask = torch.arange(40) == place
    options = {"batch_size_fn": lambda X: len(X[0])}
    wrapped = {"wrap": lambda x: (x, mask.view(8, 5)[: len(x)]), "unwrap": lambda X: X[0]}
    return set_to(**wrapped, options=options)


def shortened(w: World) -> None:
    """Take samples from the second batch."""
    w.x[1], w.y[1] = w.x[1][:2], w.y[1][:2]


#: Objects show no places, of which a flattened output could have a row each.
COUNTED = set_to(is_flat=False, options={"batch_size_fn": lambda X: len(getattr(X, "x", X))})


def scaled(w: World, scale: float) -> None:
    w.wrap, w.unwrap = (lambda x: Item(x, scale)), lambda X: X.x
    w.activation = lambda h: torch.tanh(h * scale)


def loss(value: Any) -> Callable[[World], None]:
    return set_to(loss=value)


def kfac(**options: Any) -> Callable[[World], None]:
    return set_to(kfac=options)


OF_KFAC, OF_ROWS = {"kfac", "kfac parts", "state", "merge"}, {"scores", "gradients"}
#: Merged data is other data, and perhaps drawn in another way.
NOT_MERGED = BELONGING.keys() - {"merge"}
MC, SUM = kfac(fisher_type="mc"), nn.CrossEntropyLoss(reduction="sum")
#: What makes the world that is saved of a plain one, another one of that, and what tells.
OTHERS: dict[str, tuple] = {
    "activation": ([], set_to(activation=torch.sigmoid)),
    "a parameter": ([], fill("head.bias", 0)),
    "a row that the first batch does not use": ([], fill("embed.weight", 8)),
    "a buffer": ([], fill("shift")),
    "parameters": ([], set_to(params=slice(2)), OF_KFAC),
    "their order": ([], set_to(params=slice(None, None, -1))),
    "data": ([], lambda w: w.x.reverse() or w.y.reverse(), NOT_MERGED),
    "a label": ([], lambda w: w.y[0].copy_((w.y[0] + 1) % 3), NOT_MERGED),
    "one label": ([], lambda w: w.y[0][0, 0].copy_((w.y[0][0, 0] + 1) % 3), NOT_MERGED),
    "strings": ([STRINGS, COUNTED], lambda w: w.x[0].add_(1), NOT_MERGED),
    "NumPy": (
        [ARRAYS, COUNTED],
        lambda w: w.x.__setitem__(0, (w.x[0] + 1) % 8),
        NOT_MERGED,
    ),
    "a number in X": ([partial(scaled, scale=1.0), COUNTED], partial(scaled, scale=3.0)),
    "one number among integers": ([ids(0)], ids(1), NOT_MERGED),
    "a truth value": ([masked(0)], masked(1), NOT_MERGED),
    "the length of the second batch": ([], shortened, {"kfac", "kfac parts", "state"}),
    "weights": ([], loss(nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]).double()))),
    "smoothing": ([], loss(nn.CrossEntropyLoss(label_smoothing=0.1))),
    "ignored": ([], loss(nn.CrossEntropyLoss(ignore_index=7))),
    "reduction": ([], loss(SUM)),
    "list": ([loss(Scaled([1.0]))], loss(Scaled([0.3]))),
    "function in a loss": ([loss(Scaled(lambda: 1.0))], loss(Scaled(lambda: 0.3))),
    "buffer of a loss": ([loss(Scaled([1.0], 1.0))], loss(Scaled([1.0], 2.0))),
    "closure": ([loss(times(2.0))], loss(times(3.0))),
    "sample": ([], set_to(options={"batch_size_fn": lambda X: X.numel()})),
    "class": ([], set_to(classes={KFAC: EKFAC}), OF_KFAC),
    "fisher_type": ([], kfac(fisher_type="type-2"), OF_KFAC),
    "seed": ([MC], kfac(fisher_type="mc", seed=3), OF_KFAC - {"merge"}),
    "mc_samples": ([MC], kfac(fisher_type="mc", mc_samples=2), OF_KFAC - {"merge"}),
    **{
        name: ([MC], kfac(fisher_type="mc", **{name: value}), OF_KFAC)
        for name, value in (
            *(("kfac_approx", "reduce"), ("separate_weight_and_bias", False)),
            *(("max_factor_size", 3), ("fallback", "dense")),
        )
    },
    # the rows are compared, not their places among those of the batches in use
    **{
        f"subsampling {others}": (
            [set_to(rows={"subsampling": [0, 1]})],
            set_to(rows={"subsampling": others}),
            OF_ROWS,
        )
        for others in ([0, 2], [1, 0])
    },
    **{
        f"{name} of a store": ([], set_to(store={name: value}), {"gradients"})
        for name, value in (("rank", 1), ("seed", 3), ("relative_damping", 0.2))
    },
    "basis": ([], lambda w: w.store.update(basis=w.build(KFAC)), {"gradients"}),
    "vectors": ([], lambda w: w.columns.add_(0.1), {"scores"}),
    "one vector": (
        [lambda w: vars(w).update(columns=w.columns[:, :1])],
        lambda w: vars(w).update(columns=w.columns[:, 0]),
        {"scores"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name: str, tmp_path: Path):
    prepare, change, *ways = OTHERS[name]
    for way in ways[0] if ways else BELONGING:
        one, two = World(), World()
        for step in (*prepare, *prepare):
            step(one), step(two)
        change(two)
        states = GeneratorStates()
        BELONGING[way].write(one, tmp_path / way)
        before = contents(tmp_path / way)
        with pytest.raises(
            ValueError, match=r"differs in (?!.*differs)|Operators act|one class|Merge KFAC"
        ) as caught:
            BELONGING[way].read(two, tmp_path / way)
        assert len(str(caught.value)) < 500
        assert states.are_current()
        assert contents(tmp_path / way) == before


#: What makes the same of a world, in other words or with other rounding.
SAME: dict[str, Callable[[World], Any]] = {
    "nothing": lambda w: None,
    "another module": loss(Scaled((0.5, 0.5))),
    "a function": loss(times(1.0)),
    "a seed of nothing": kfac(fisher_type="empirical", seed=3),
    "rounded": lambda w: w.model.head.weight.data.mul_(1 + 1e-9),
}


@pytest.mark.parametrize("way", BELONGING)
@pytest.mark.parametrize(
    "name, dropout", [*((name, 0.0) for name in SAME), ("nothing", 0.5), ("rounded", 0.5)]
)
def test_the_same_is_taken(name: str, dropout: float, way: str, tmp_path: Path):
    """Also with dropout, of which each evaluation takes the same draw."""
    one, two = World(), World()
    for world in (one, two):
        set_to(loss=Scaled([1.0]), dropout=dropout)(world)
    SAME[name](two)
    BELONGING[way].write(one, tmp_path / "x")
    assert bool(BELONGING[way].read(two, tmp_path / "x").isfinite().all())
