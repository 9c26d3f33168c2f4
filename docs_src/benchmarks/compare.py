"""Compares two versions of the package: numbers, times, peaks of memory, and forward passes.

`make compare` compares the working tree with a commit, by default the last one before graphs were
kept inside of `linearized()` only; `make compare BASE=HEAD~1 COMPARE_ARGS="--problems mlp --rows
KFAC"` with another one, in part. Problems are the benchmark's, and those of the test suite as
`test/NAME`. Rows named "kept product" run inside of `linearized()`. Each version has a process
of its own; they take turns, and times are those of the CPU in these processes, so
that ratios hold on a noisy machine. The exit status is 1 if numbers differ by more than rounding,
whatever the times are.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from products import PATIENCE, Process
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
BASE = "4def691"
#: The problems of the benchmark, and one of the test suite for each kind of model and loss.
PROBLEMS = [
    *("mlp", "cnn", "transformer", "resnet", "gpt2"),
    *("test/mlp-mse-mean", "test/mlp-ce-all-mean", "test/classes-ce-ignore-mean"),
    *("test/tokens-bce-all-mean", "test/mlp-user-mean", "test/cnn", "test/group-norm"),
    *("test/transformer-tied", "test/self-attention", "test/lstm-packed", "test/functional"),
    *("test/closure", "test/dict-batch-padding-idx", "test/used-twice", "test/weight-norm"),
    *("test/embedding-bag-mean", "test/checkpoint", "test/pinn", "test/bfloat16-mlp"),
]
#: The largest relative difference that is rounding, by the precision of the parameters.
ROUNDING = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 5e-2}
#: The number of rows with the largest ratios in the summary.
WORST = 5


@dataclass
class Row:
    """A quantity in both versions; ratios are those of the new version to the base."""

    name: str
    note: str = ""
    difference: float = math.nan
    allowed: float = math.nan
    milliseconds: tuple[float, ...] = ()
    #: Of times of a new operator's first product, and of its second one; of peaks of memory.
    first: float = math.nan
    second: float = math.nan
    memory: float = math.nan
    #: Forward passes of both products, in the base and in the new version.
    passes: tuple[list[int], ...] = ()

    def __str__(self) -> str:
        """Return a line of the table."""
        if not self.milliseconds:
            return f"{self.name:64} {self.note}"
        first, second = self.milliseconds
        old, new = (f"{a}+{b}" for a, b in self.passes)
        return (
            f"{self.name:64} {self.difference:8.1e} {first:9.1f} x{self.first:6.2f} {second:9.1f} "
            f"x{self.second:6.2f}  x{self.memory:6.2f}  {old} > {new}  {self.note}"
        )


HEADER = f"{'':64} {'differs':>8} {'first, ms':>17} {'second, ms':>17}  memory  forward passes"


@contextmanager
def checked_out(base: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit, or the folder `base` itself."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="compare-", dir=ROOT.parent) as folder:
        tree = Path(folder).resolve() / "base"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), base], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


class Version(Process):
    """The package of a working tree, in its own process."""

    def __init__(self, tree: Path, numbers: Path):
        super().__init__("compared.py", str(numbers), env=os.environ | {"PYTHONPATH": str(tree)})
        self._numbers = numbers
        found = self.answer()
        if not Path(found).is_relative_to(tree):
            raise RuntimeError(f"Meant to compare the package in {tree}, but found {found}.")

    def look(self, row: str) -> dict:
        """Return forward passes, memory and numbers of a row; or the error that refuses it."""
        answer = self.ask(f"look {row}")
        return answer if "refused" in answer else answer | {"numbers": torch.load(self._numbers)}


def difference(old: torch.Tensor, new: torch.Tensor, floor: float) -> float:
    """Return the largest difference in multiples of the largest number, or of the floor."""
    if old.shape != new.shape:
        return math.inf
    old, new = old.double(), new.double()
    differ = (old != new) & ~(old.isnan() & new.isnan())
    if not differ.any():
        return 0.0
    scale = max([floor, *old[old.isfinite()].abs().tolist()])
    gap = float((old - new)[differ].abs().max()) / scale
    return math.inf if math.isnan(gap) else gap


def compare(row: Row, pair: list[Version], repeats: int) -> None:
    """Fill in a row."""
    quantity = row.name.split(" ", 1)[1]
    order = -1 if len(quantity) % 2 else 1  # both versions come first in half of the rows
    old, new = [version.look(quantity) for version in pair[::order]][::order]
    if "refused" in old or "refused" in new:
        who = "both refuse" if "refused" in new else "only the base refuses"
        who = who if "refused" in old else "only the new version refuses"
        row.note = f"{who}: {(old | new)['refused'][:150]}"
        return
    # one version may have more numbers than the other
    labels = old["numbers"].keys() & new["numbers"].keys()
    others = sorted(old["numbers"].keys() ^ new["numbers"].keys())
    row.note = f"only one has {', '.join(others)}" if others else ""
    row.difference = max(
        difference(old["numbers"][label], new["numbers"][label], row.allowed) for label in labels
    )
    row.memory = new["bytes"] / old["bytes"] if old["bytes"] else math.nan
    row.passes = (old["passes"], new["passes"])
    rounds: list[list[list[float]]] = []
    while len(rounds) < repeats and sum(s for turn in rounds for s in turn[0] + turn[1]) < PATIENCE:
        rounds.append([version.ask(f"time {quantity}") for version in pair[::order]][::order])
        order = -order
    row.milliseconds = tuple(1e3 * statistics.median(s[0][call] for s in rounds) for call in (0, 1))
    row.first, row.second = (statistics.median(s[1][i] / s[0][i] for s in rounds) for i in (0, 1))


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield lines about the worst rows."""
    measured = [row for row in rows if row.milliseconds]

    def largest(title: str, measure: Callable[[Row], float], more_than: float) -> Iterator[str]:
        worst = sorted((row for row in measured if measure(row) > more_than), key=measure)
        yield f"\n{title}: {len(worst)} of {len(measured)} rows"
        yield from map(str, worst[: -WORST - 1 : -1])

    for ratio in ("first", "second", "memory"):
        found = [x for x in (getattr(row, ratio) for row in measured) if x > 0]
        mean = statistics.geometric_mean(found) if found else math.nan
        title = f"{ratio}: {mean:.2f} times the base (geometric mean). More than 1.2 times"
        yield from largest(title, lambda row, r=ratio: getattr(row, r), 1.2)
    yield from largest("More forward passes", lambda r: sum(r.passes[1]) - sum(r.passes[0]), 0)
    noted = [row for row in rows if row.note and not row.note.startswith("both")]
    yield f"\nNoted: {len(noted)} rows"
    yield from map(str, noted)
    yield from largest("Largest differences", lambda row: row.difference / row.allowed, 0)
    yield from largest("Beyond rounding", lambda row: row.difference / row.allowed, 1)


def main() -> None:
    """Compare, print, and fail if numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=BASE, help="a commit, or a folder with the package")
    parser.add_argument("--problems", nargs="+", default=PROBLEMS)
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument("--repeats", type=int, help="default: 3, and 1 for the suite's problems")
    parser.add_argument(
        "--rounding", nargs="+", default=[], metavar="DTYPE=NUMBER", help=f"default: {ROUNDING}"
    )
    args = parser.parse_args()
    rounding = ROUNDING | {k: float(x) for k, x in (r.split("=") for r in args.rounding)}
    rows: list[Row] = []
    with checked_out(args.base) as tree, tempfile.TemporaryDirectory() as folder:
        files = (Path(folder) / f"{name}.pt" for name in ("base", "new"))
        pair = [Version(*at) for at in zip((tree, ROOT), files, strict=True)]
        print(HEADER)
        for problem in args.problems:
            repeats = args.repeats or (1 if problem.startswith("test/") else 3)
            answers = [version.ask(f"problem {problem}") for version in pair]
            quantities = [q for q in answers[0]["rows"] if any(part in q for part in args.rows)]
            for quantity in tqdm(quantities, desc=problem, leave=False, disable=None):
                rows.append(Row(f"{problem} {quantity}", allowed=rounding[answers[0]["dtype"]]))
                compare(rows[-1], pair, repeats)
                if not rows[-1].note.startswith("both"):
                    tqdm.write(str(rows[-1]))
        for version in pair:
            version.close()
    print("\n".join(summary(rows)))
    sys.exit(any(row.difference > row.allowed for row in rows))


if __name__ == "__main__":
    main()
