"""Compares two versions of the package: numbers, times, and peaks of memory.

`make compare` compares the working tree with a commit, by default the one where the branch left
main; `make compare BASE=HEAD~1 COMPARE_ARGS="--problems mlp --rows KFAC"` with another one, in
part. Rows, states and processes are those of the benchmark, with more quantities and some problems
of the test suite.
The exit status is 1 if numbers differ by more than rounding, whatever the times are.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import ROOT, STATES, Worker, measure, rounding
from problems import BASIC, make
from worker import SEEN

#: One problem of the test suite for each kind of model and loss.
OF_THE_SUITE = [
    *("test/mlp-mse-mean", "test/mlp-ce-all-mean", "test/classes-ce-ignore-mean"),
    *("test/tokens-bce-all-mean", "test/mlp-user-mean", "test/cnn", "test/group-norm"),
    *("test/transformer-tied", "test/self-attention", "test/lstm-packed", "test/functional"),
    *("test/closure", "test/dict-batch-padding-idx", "test/used-twice", "test/weight-norm"),
    *("test/embedding-bag-mean", "test/checkpoint", "test/pinn", "test/bfloat16-mlp"),
]
#: The number of rows in each part of the summary.
WORST = 5


def branch_point() -> str:
    """Return the commit where the branch left main: as it is upstream, or here, else ``HEAD``."""
    for main in ("main@{upstream}", "main"):
        command = ["git", "-C", str(ROOT), "merge-base", "HEAD", main]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    return "HEAD"


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


def line(name: str, old: dict, new: dict) -> dict:
    """Return a row of the comparison: ratios to the base, the difference, or who refuses."""
    row = {"name": name}
    if "refused" in old or "refused" in new:
        who = "the base" if "refused" in old else "the new version"
        return row | {"note": f"only {who} refuses: {(old | new)['refused']}"}
    row |= {"ms": 1e3 * new["seconds"], "time": new["seconds"] / old["seconds"]}
    row |= {"differs": old["differs"]}
    return row | ({"memory": new["bytes"] / old["bytes"]} if old.get("bytes") else {})


def written(row: dict) -> str:
    """Write a row."""
    if "note" in row:
        return f"{row['name']:72} {row['note']}"
    memory = f"x{row['memory']:6.2f}" if "memory" in row else ""
    return f"{row['name']:72} {row['differs']:8.1e} {row['ms']:9.2f} x{row['time']:6.2f} {memory}"


def summary(rows: list[dict]) -> Iterator[str]:
    """Yield lines about the worst rows."""
    measured = [row for row in rows if "note" not in row]

    def largest(title: str, found: list[dict], key: Callable[[dict], float]) -> Iterator[str]:
        yield f"\n{title}: {len(found)} of {len(measured)} rows"
        yield from map(written, sorted(found, key=key, reverse=True)[:WORST])

    for what in ("time", "memory"):
        ratios = [row[what] for row in measured if row.get(what)]
        mean = statistics.geometric_mean(ratios) if ratios else 1.0
        title = f"{what}: {mean:.2f} times the base (geometric mean). More than 1.2 times"
        more = [row for row in measured if row.get(what, 0) > 1.2]
        yield from largest(title, more, lambda row, what=what: row[what])
    yield "\nRefused by one version"
    yield from (written(row) for row in rows if "note" in row)
    beyond = [row for row in measured if row["differs"] > row["allowed"]]
    yield from largest("Beyond rounding", beyond, lambda row: row["differs"] / row["allowed"])


def main() -> None:
    """Compare, print, and fail if numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", help="a commit, or a folder with the package; by default, where main was left"
    )
    parser.add_argument("--problems", nargs="+", default=[*BASIC, *OF_THE_SUITE])
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument("--repeats", type=int, default=2, help="rounds that count")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()
    args.device = "cpu"
    rows: list[dict] = []
    base = args.base or branch_point()
    print(f"The base is {base}.")
    with checked_out(base) as tree:
        trees = {"ours": ROOT, "base": tree}
        workers = {
            n: Worker("ours unchecked", sys.executable, "cpu", 600, at) for n, at in trees.items()
        }
        states = {name: STATES.get(name, (SEEN,)) for name in workers["ours"].comparable}
        print(f"{'':72} {'differs':>8} {'ms':>9} {'time':>7}  memory")
        for problem in args.problems:
            allowed = rounding(make(problem))
            for name, cells in measure(problem, states, workers, args):
                if any("refused" not in cell for cell in cells.values()):
                    row = line(f"{problem}, {name}", cells["base"], cells["ours"])
                    rows.append(row | {"allowed": allowed})
                    print(written(rows[-1]), flush=True)
        for worker in workers.values():
            worker.close()
    print("\n".join(summary(rows)))
    sys.exit(any(row.get("differs", 0) > row["allowed"] for row in rows))


if __name__ == "__main__":
    main()
