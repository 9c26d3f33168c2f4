"""Times operator products as multiples of one gradient on the same batch, against other libraries.

`make bench` runs all problems, `make bench BENCH_ARGS="--problems cnn --repeats 5"` some of them.
Each contender has a process of its own; they take turns, and medians count. Peers take part if
they are installed in a separate environment, whose Python is named by `--peers`. The table is
written to `results/`, as JSON and as a page for the documentation.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, PEERS
from problems import PROBLEMS, make
from tqdm import tqdm

HERE = Path(__file__).parent
#: Rounds that do not count: they choose modes and keep graphs.
WARM_UP = 2
#: A quantity is repeated until so many seconds are over.
PATIENCE = 20


class Process:
    """A script of this folder in its own process. It answers each line by a line of JSON."""

    def __init__(self, *arguments: str, python: str = sys.executable, **options: Any):
        # another environment must not import this package from PYTHONPATH
        isolated = [] if python == sys.executable else ["-E"]
        self._process = subprocess.Popen(
            [python, *isolated, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
            **options,
        )

    def ask(self, line: str) -> Any:
        """Send a line and return the answer."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self._process.args[1:])} failed, see above.")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


class Worker(Process):
    """A contender in a process of its own."""

    def __init__(self, python: str, contender: str, problem: str, columns: int, device: str):
        super().__init__("worker.py", contender, problem, str(columns), device, python=python)
        self.quantities: list[str] = self.answer()

    def keep(self, parts: list[str]) -> None:
        """Forget the quantities in whose names none of the parts occurs."""
        self.quantities = [q for q in self.quantities if any(part in q for part in parts)]


def installed(python: str) -> list[str]:
    """Return the contenders that an environment has."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps("
        "{d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    packages = json.loads(
        subprocess.run([python, "-c", code], capture_output=True, check=True).stdout
    )
    return [name for name, package in PEERS.items() if package in packages]


def machine(device: str) -> str:
    """Describe what was measured on."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        where = (
            f"{models[0] if models else platform.processor()}, {torch.get_num_threads()} threads"
        )
    return f"{where}; PyTorch {torch.__version__}, Python {platform.python_version()}"


def measure(problem: str, args: argparse.Namespace) -> dict:
    """Measure all contenders on a problem."""
    pythons = {name: sys.executable for name in CONTENDERS if name not in PEERS}
    if args.peers:
        pythons |= dict.fromkeys(installed(args.peers), args.peers)
    setting = (problem, args.columns, args.device)
    workers = {n: Worker(python, n, *setting) for n, python in pythons.items()}
    for worker in workers.values():
        worker.keep(args.rows)
    times = {n: {q: [] for q in ["gradient", *w.quantities]} for n, w in workers.items()}
    for _ in tqdm(range(args.repeats + WARM_UP), desc=problem, leave=False):
        for name, worker in workers.items():
            for quantity, values in times[name].items():
                if sum(values) < PATIENCE:
                    values.append(worker.ask(quantity))
    unit_flops = workers["repeated"].ask("flops gradient")
    flops = {q: workers["repeated"].ask(f"flops {q}") for q in workers["repeated"].quantities}
    found = {n: {q: w.ask(f"accuracy {q}") for q in w.quantities} for n, w in workers.items()}
    for worker in workers.values():
        worker.close()
    # the median over all processes: allocations of a process make its own gradients slower
    unit = statistics.median(median(values.pop("gradient")) for values in times.values())
    rows = {}
    for name in workers:
        for quantity, values in times[name].items():
            row = {"ratio": median(values) / unit, "bytes": None}
            if args.memory:
                fresh = Worker(pythons[name], name, *setting)
                row["bytes"] = fresh.ask(f"memory {quantity}")
                fresh.close()
            row |= found[name][quantity] or {}
            rows.setdefault(quantity.format(args.columns), {})[name] = row
    model = make(problem, "cpu")[0]
    return {
        "about": PROBLEMS[problem].__doc__,
        "num_params": sum(p.numel() for p in model.parameters()),
        "gradient_ms": 1e3 * unit,
        "flops": {q.format(args.columns): value / unit_flops for q, value in flops.items()},
        "rows": rows,
    }


def median(seconds: list[float]) -> float:
    """Return the median time after warming up."""
    return statistics.median(seconds[WARM_UP:] or seconds[-1:])


def table(results: dict) -> str:
    """Write results as Markdown."""
    lines = [f"Measured on: {results['machine']}.", ""]
    for problem, result in results["problems"].items():
        contenders = list(dict.fromkeys(n for row in result["rows"].values() for n in row))
        lines += [
            f"**{problem}**: {result['about']} One gradient takes {result['gradient_ms']:.1f} ms.",
            "",
            f"| | {' | '.join(contenders)} | flops |",
            "|---" * (len(contenders) + 2) + "|",
        ]
        for quantity, row in result["rows"].items():
            cells = [_cell(row.get(name)) for name in contenders]
            flops = f"{result['flops'][quantity]:.2f}" if quantity in result["flops"] else ""
            lines.append(f"| {quantity} | {' | '.join(cells)} | {flops} |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    memory = "" if row["bytes"] is None else f", {row['bytes'] / 2**20:.0f} MiB"
    products = f", {row['products']:.4g} products" if row.get("products") else ""
    error = f", error {row['error']:.1e}" if row.get("error") is not None else ""
    return f"{row['ratio']:.2f}{memory}{products}{error}"


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = ["mlp", "cnn", "transformer"]
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=default)
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="parts of the names of rows; the others stay"
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to measure memory anew, which takes a process for each cell",
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", help="the Python of an environment with other libraries")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()

    path = args.output / f"{args.device}.json"
    results = json.loads(path.read_text()) if path.exists() else {"problems": {}}
    results["machine"] = f"{machine(args.device)}, float32"
    for problem in args.problems:
        found = measure(problem, args)
        before = results["problems"].get(problem, {"rows": {}, "flops": {}})
        for quantity, row in found["rows"].items():
            for name, cell in row.items():
                old = before["rows"].get(quantity, {}).get(name, {"bytes": None})
                cell["bytes"] = cell["bytes"] if args.memory else old["bytes"]
        merged = {key: before[key] | found[key] for key in ("rows", "flops")}
        results["problems"][problem] = found | merged
    args.output.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
