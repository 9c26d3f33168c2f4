"""Times quantities as multiples of one gradient, by this package, by hand, and by its peers.

`make bench` runs all, and writes `results/` (JSON, Markdown, a picture); with `--problems` or
`--rows` a part is printed only. The problem of real size runs only if `--problems` names it. Each
package has a process of its own with one thread; the processes take turns. Peers take part if they
are installed in a separate environment, whose Python is `--peers` (`make bench-peers` builds it),
and can be imported. `report.py` writes tables and pictures anew.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import numpy
import packages as p
import scipy
import torch
from packages import PACKAGES, UNCHECKED
from problems import BASIC, LARGE, RESTRICTED, Problem, make
from problems import about as about_problem
from report import table, write
from tqdm import tqdm
from worker import FIRST, KEPT, LATER, NEW, SEEN, STEP

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = ROOT / "build" / "peers" / "bin" / "python"

#: The states in which each quantity is measured.
STATES = {
    p.HESSIAN: (NEW, SEEN, STEP, KEPT),
    p.GGN: (NEW, SEEN, STEP, KEPT),
    p.FISHER: (NEW, STEP, KEPT),
    p.HESSIAN_COLUMNS: (KEPT,),
    p.GGN_COLUMNS: (KEPT,),
    p.KFAC: (NEW, SEEN, STEP),
    p.KFAC_EMPIRICAL: (STEP,),
    p.KFAC_TYPE2: (STEP,),
    p.KFAC_PRODUCT: (LATER,),
    p.PLAIN: (FIRST,),
    p.EXACT: (FIRST,),
    p.EKFAC: (FIRST,),
    p.GRADIENTS: (NEW, STEP),
    p.NORMS: (STEP,),
    p.SCORES: (STEP,),
    p.DIAGONAL: (STEP,),
    p.TRACE: (FIRST,),
    p.EIGENPAIRS: (NEW,),
    p.SOLVE: (NEW,),
    p.TRAINING: (NEW,),
}
#: Problems on which most peers refuse a row for its normalization layers and embeddings are
#: measured a second time, with the parameters that all packages know.
AGAIN = {f"{problem}{RESTRICTED}" for problem in ("resnet", "gpt2")}
AGAIN_STATES = {
    name: states
    for name, states in STATES.items()
    if "KFAC" in name or name in (p.GRADIENTS, p.SCORES)
}
#: Tasks that people have, on models as they have them.
TASKS = {
    "resnet18": {p.EIGENPAIRS: (NEW,)},
    "mlp(batches=8)": {p.SOLVE: (NEW,)},
    "huggingface": {p.HUTCHINSON: (NEW,)},
}
#: Problems whose memory is not that of fixed budgets.
WIDE_STATES = {
    p.HESSIAN: (STEP,),
    p.GGN: (STEP, KEPT),
    p.FISHER: (STEP,),
    p.KFAC: (STEP,),
    p.KFAC_TYPE2: (STEP,),
    p.DIAGONAL: (STEP,),
    p.GRADIENTS: (STEP,),
    p.NORMS: (STEP,),
}
WIDE = ("resnet(width=64)", "gpt2(width=128)")
#: The problem of real size: what people compute with factors of hundreds and thousands of rows.
LARGE_STATES = {
    p.HESSIAN: (SEEN, STEP),
    p.GGN: (SEEN, STEP),
    p.KFAC: (SEEN, STEP),
    p.KFAC_PRODUCT: (LATER,),
    p.PLAIN: (FIRST,),
    p.SMALL: (FIRST,),
    p.HEURISTIC: (FIRST,),
    p.EXACT: (FIRST,),
    p.INVERSE_PRODUCT: (LATER,),
    p.EKFAC: (FIRST,),
    p.EKFAC_PRODUCT: (LATER,),
    p.LOGDET: (FIRST,),
    p.LEADING: (SEEN,),
}
MEASURED = (*BASIC, *sorted(AGAIN), *TASKS, *WIDE)
#: What grows -> problems of growing size, and what is measured of them.
GROWTH = {
    "layers": (
        [f"deep(layers={n})" for n in (10, 40, 160)],
        {p.HESSIAN: (STEP, KEPT), p.KFAC: (STEP,)},
    ),
    "width": (
        [f"deep(layers=4,width={n})" for n in (64, 256, 1024)],
        {p.HESSIAN: (STEP, KEPT), p.KFAC: (STEP,), p.PLAIN: (FIRST,)},
    ),
    "classes": (
        [f"deep(layers=2,classes={n})" for n in (10, 50, 250)],
        {p.KFAC_TYPE2: (STEP,), p.DIAGONAL: (STEP,)},
    ),
    "batches": (
        [f"tiny(batches={n})" for n in (1, 8, 64)],
        {p.HESSIAN: (STEP, KEPT), p.KFAC: (STEP,), p.NORMS: (STEP,)},
    ),
    "tokens": (
        [f"gpt2(tokens={n})" for n in (16, 64, 256)],
        {p.HESSIAN: (STEP, KEPT), p.KFAC: (STEP,), p.NORMS: (STEP,)},
    ),
    "samples": (  # the largest batch is cut into parts
        [f"gpt2(samples={n})" for n in (32, 128, 512)],
        {p.SCORES: (STEP,), p.MANY_SCORES: (STEP,), p.LOW_RANK_SCORES: (STEP,)},
    ),
}
#: The largest relative difference that is rounding, where it is not 1e-8.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
#: Whose construction costs differently; so only rows that construct are measured.
CONSTRUCTS = {f"{name}{UNCHECKED}" for name in ("ours", "curvlinops-for-pytorch")}
#: Rows whose calls take long stop after so many rounds, once so many seconds are over.
ROUNDS, ENOUGH = 3, 3


def _command(python: str) -> list[str]:
    """Return how to start Python; another environment must not import this package."""
    return [python] if python == sys.executable else [python, "-E"]


def _environment(tree: Path = ROOT) -> dict[str, str]:
    # users import compiled files
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}


class Worker:
    """A package in a process of its own, which answers each line by a line of JSON."""

    def __init__(self, package: str, python: str, device: str, limit: float, tree: Path = ROOT):
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = Path(self._folder.name) / "numbers.pt"
        self._limit = limit
        self._command = [*_command(python), "worker.py", package, device, str(self._numbers)]
        self._options = {"cwd": HERE, "env": _environment(tree), "text": True}
        self._start()
        if isinstance(self.found, dict):
            raise RuntimeError(self.found["refused"])
        if python == sys.executable and self.found and not Path(self.found).is_relative_to(tree):
            raise RuntimeError(f"Meant to measure the package in {tree}, but found {self.found}.")
        self.comparable: dict[str, bool] = self.ask("names")

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, **pipes, **self._options)
        self.found = json.loads(self._process.stdout.readline())

    def ask(self, line: str) -> Any:
        """Return the answer to a line; a process that takes too long is replaced."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        timer = Timer(self._limit, self._process.kill)
        timer.start()
        answer = self._process.stdout.readline()
        timer.cancel()
        if answer:
            return json.loads(answer)
        self.close()
        self._start()
        return {"refused": f"Takes more than {self._limit:g} s, or ends the process."}

    def numbers(self) -> dict[str, torch.Tensor]:
        """Return the numbers of the latest result."""
        return torch.load(self._numbers)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def rounding(problem: Problem) -> float:
    """Return the largest relative difference that is rounding."""
    params = problem.params
    tensors = params.values() if isinstance(params, dict) else params
    return max(ROUNDING.get(tensor.dtype, 1e-8) for tensor in tensors)


def difference(old: dict, new: dict, floor: float) -> float:
    """Return the largest difference of two results, in multiples of the largest number.

    Results whose parts have other names are compared as one vector. Numbers below the floor count
    as zero.
    """
    if old.keys() != new.keys():
        old, new = ({"": torch.cat([*x.values()])} if x else {} for x in (old, new))
    largest = 0.0
    for name in old.keys() & new.keys():
        a, b = old[name].double(), new[name].double()
        if a.shape != b.shape:
            return math.inf
        differ = (a != b) & ~(a.isnan() & b.isnan())
        if differ.any():
            gap = float((a - b)[differ].abs().max())
            gap /= max(floor, float(a.nan_to_num(0, 0, 0).abs().max()))
            largest = max(largest, math.inf if math.isnan(gap) else gap)
    return largest


def measure(
    problem: str, states: dict[str, tuple], workers: dict[str, Worker], args: argparse.Namespace
) -> Iterator[tuple[str, dict[str, dict]]]:
    """Yield rows: quantity and state, and what each package takes, and its difference from ours."""
    made = make(problem)
    rows = [(name, state) for name, found in states.items() for state in found]
    if not made.exact:  # loss Hessians with too many columns
        rows = [row for row in rows if not p.per_output(row[0])]
    if f"{problem}{RESTRICTED}" in AGAIN:  # a task that no peer can do
        rows = [row for row in rows if row[0] != p.TRAINING]
    rows = [row for row in rows if any(part in ", ".join(row) for part in args.rows)]
    for name, state in tqdm(rows, desc=problem, leave=False, disable=None):
        takes_part = {
            package: worker
            for package, worker in workers.items()
            if name in worker.comparable and (package not in CONSTRUCTS or state in (NEW, SEEN))
        }
        cells = {n: _warm_up(w, f"{problem} | {name} | {state}") for n, w in takes_part.items()}
        begin = time.perf_counter()
        for turn in range(args.repeats):
            if turn >= ROUNDS and time.perf_counter() - begin > ENOUGH:
                break
            for package in [*cells][:: -1 if turn % 2 else 1]:
                if "refused" not in cells[package]:
                    answer = workers[package].ask("time")
                    if isinstance(answer, dict):
                        cells[package] = answer
                    else:
                        cells[package]["times"] += answer
        numbers = {package: cell.pop("numbers", None) for package, cell in cells.items()}
        for package, cell in cells.items():
            if "refused" in cell:
                continue
            cell |= _statistics(cell.pop("times"), args.device)
            # the peak on a seen model is that on a new one
            if (
                args.memory
                and state != SEEN
                and isinstance(peak := workers[package].ask("memory"), int)
            ):
                cell["bytes"] = peak
            comparable = all(workers[n].comparable[name] for n in ("ours", package))
            if numbers["ours"] is not None and (package == "base" or comparable):
                cell["differs"] = difference(numbers["ours"], numbers[package], rounding(made))
        yield f"{name}, {state}", cells


def _warm_up(worker: Worker, row: str) -> dict:
    """Begin a row by two calls that do not count, or return how it is refused."""
    for command in (f"row {row}", "numbers", "time"):
        answer = worker.ask(command)
        if isinstance(answer, dict):
            return answer
    return {"times": [], "numbers": worker.numbers()}


def _statistics(times: list[tuple[float, float]], device: str) -> dict:
    """Return the least seconds, and by how much the median is above; CPU seconds on a CPU."""
    cpu, wall = zip(*times, strict=True)
    counts = wall if device == "cuda" else cpu
    least = min(counts)
    spread = statistics.median(counts) / least - 1
    return {"n": len(counts), "seconds": least, "spread": spread, "wall": min(wall)}


def installed(python: str) -> dict[str, str]:
    """Return the versions of the distributions of an environment."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps("
        "{d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)


def start(args: argparse.Namespace) -> tuple[dict[str, Worker], dict[str, str], dict[str, str]]:
    """Return the processes, the versions of peers, and why other peers are missing."""
    versions = installed(args.peers) if args.peers else {}
    workers, peers, missing = {}, {}, {}
    for name, package in PACKAGES.items():
        if package.distribution and package.distribution not in versions:
            missing[name] = "not installed"
            continue
        python = args.peers if package.distribution else sys.executable
        try:
            workers[name] = Worker(name, python, args.device, args.limit)
        except RuntimeError as error:
            if not package.distribution:
                raise
            missing[name] = str(error)
        else:
            if package.distribution and package.module:
                peers[name] = versions[package.distribution]
    return workers, peers, missing


def imports(pythons: dict[str, str]) -> dict[str, float]:
    """Return the least CPU seconds of an import after that of PyTorch, of three."""
    code = "import time, torch; t = time.process_time(); import {}; print(time.process_time() - t)"
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for package, python in pythons.items():
            if module := PACKAGES[package].module:
                command = [*_command(python), "-c", code.format(module)]
                run = subprocess.run(command, stdout=-1, check=True, cwd=HERE, env=_environment())
                found.setdefault(package, []).append(float(run.stdout))
    return {package: min(seconds) for package, seconds in found.items()}


def about(device: str) -> dict[str, str]:
    """Return what was measured, and on what."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    code = ["curvlinops", "docs_src/benchmarks/*.py"]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code]).returncode
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    where = (
        torch.cuda.get_device_name() if device == "cuda" else (models or [platform.processor()])[0]
    )
    return {
        "commit": commit.stdout.strip()[:12] + (" with changes" if changed else ""),
        "machine": f"{where}, {os.cpu_count()} cores, one thread",
        "versions": f"PyTorch {torch.__version__}, NumPy {numpy.__version__}, "
        f"SciPy {scipy.__version__}, Python {platform.python_version()}, float32",
    }


def main() -> None:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", help=f"of {', '.join([*MEASURED, LARGE])}")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument("--growth", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", default=str(PEERS) if PEERS.exists() else None)
    parser.add_argument("--output", type=Path, help="default: results/, if all is measured")
    args = parser.parse_args()
    part = args.problems or args.rows != [""] or not args.growth
    output = args.output or (None if part else HERE / "results")

    workers, peers, missing = start(args)
    results = about(args.device) | {
        "peers": peers,
        "missing": missing,
        "imports": imports({n: args.peers if n in peers else sys.executable for n in workers}),
        "problems": {},
        "growth": {},
    }

    begin = time.perf_counter()

    def save() -> None:
        results["minutes"] = round((time.perf_counter() - begin) / 60)
        if output:
            output.mkdir(exist_ok=True, parents=True)
            path = output / f"{args.device}.json"
            path.write_text(json.dumps(results, indent=1) + "\n")
            write(path)

    for problem in args.problems or MEASURED:
        gradients = dict(measure(problem, {"gradient": (SEEN,)}, workers, _all_rows(args)))
        cells = gradients[f"gradient, {SEEN}"].values()
        unit = min(cell["seconds"] for cell in cells if "seconds" in cell)
        rows = dict(measure(problem, states_of(problem), workers, args))
        about_it = {"about": about_problem(problem), "gradient": unit}
        results["problems"][problem] = about_it | {"rows": rows}
        save()
    chosen = {n: w for n, w in workers.items() if n not in CONSTRUCTS}
    for what, (problems, states) in GROWTH.items() if args.growth else ():
        sizes = {problem: dict(measure(problem, states, chosen, args)) for problem in problems}
        results["growth"][what] = sizes
        save()
    for worker in workers.values():
        worker.close()
    print(table(results))


def states_of(problem: str) -> dict[str, tuple]:
    """Return what is measured of a problem, and in which states."""
    if problem.startswith(LARGE):
        return LARGE_STATES
    if problem in WIDE:
        return WIDE_STATES
    return AGAIN_STATES if problem in AGAIN else TASKS.get(problem, STATES)


def _all_rows(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | {"rows": [""], "memory": False})


if __name__ == "__main__":
    main()
