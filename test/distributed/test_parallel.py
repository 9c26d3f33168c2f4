"""Operators of several processes: see world_checks.py, parallel_checks.py, sharded_checks.py."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import parallel_checks
import pytest
import sharded_checks
import world_checks

#: Seconds after which processes that hang are ended.
LIMIT = 3600
ROOT = Path(__file__).parents[2]
#: Checks that are core tests, by the number of processes, which has a name: some of each kind, and
#: all that only copies have.
NAMES = {2: "core", 1: "one-process"}
CORE = {
    2: {
        "world_checks": [
            *("products ggn copies", "products hessian shards", "products fisher adapters"),
            *("rows adapters", "factors mc shards", "factors type-2 parts of factors"),
            *("losses_along_directions adapters", "callbacks copies", "no_data copies"),
            *("files kfac partition shards", "files ekfac replicate copies"),
            *("updates kfac replicate copies", "updates ekfac partition adapters"),
            *("errors ggn copies", "errors kfac adapters", "interrupts copies"),
            *("errors_of_solvers copies", "errors_of_the_data ggn adapters"),
            *("errors_of_vectors parts of factors", "errors_before_communication shards"),
        ],
        "parallel_checks": [*parallel_checks.CHECKS[2]],
        "sharded_checks": [
            *("sums_with_factors shards", "errors_of_memory shards", "training adapters"),
            *("rounds_of_schedules shards", "kept_graphs_have_no_gathered_parameters adapters"),
            *("models_that_are_refused adapters", "vectors_that_are_refused shards"),
        ],
    },
    1: {
        "world_checks": [
            *("products hessian alone", "products mc alone", "products ggn-diagonal alone"),
            *("products ggn one shard", "products fisher-samples one shard", "rows one shard"),
            *("factors reduce alone", "factors type-2 one shard", "losses_along_directions alone"),
            *("files ekfac partition alone", "files kfac replicate one shard"),
            *("batches_are_freed one shard", "writes_to_parameters one shard"),
            *("writes_to_what_is_saved alone", "writes_to_what_is_saved one shard"),
        ],
        "sharded_checks": [*sharded_checks.CHECKS[1]],
    },
}
MODULES = world_checks, parallel_checks, sharded_checks
#: Checks that run together, as it takes seconds to start processes: names by module, and how many.
CASES = [
    *(pytest.param(names, n, id=NAMES[n]) for n, names in CORE.items()),
    *(
        pytest.param({x.__name__: rest}, n, id=f"{x.__name__}-{n}", marks=pytest.mark.extensive)
        for x in MODULES
        for n, names in sorted(x.CHECKS.items())
        if (rest := [name for name in names if name not in CORE.get(n, {}).get(x.__name__, ())])
    ),
]


def run(call: str, size: int, folder: Path) -> list[str]:
    """Run processes until they end, or have hung; return what they printed.

    Args:
        call: What a process does after its imports, with its RANK.
        size: How many there are.
        folder: Where they run.
    """
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "test" / "shared", ROOT / "test/distributed")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    logs, processes = [folder / f"log.{rank}" for rank in range(size)], []
    try:
        for rank, log in enumerate(logs):
            code = f"import processes, sharded_checks; RANK = {rank}; {call}"
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", code], env=environment, stdout=file, stderr=file
                    )
                )
        with suppress(subprocess.TimeoutExpired):  # then see how far they got
            for process in processes:
                process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [log.read_text()[-3000:] for log in logs]


@pytest.mark.parametrize(("names", "size"), CASES)
def test_together(names: dict[str, list[str]], size: int, tmp_path: Path):
    call = f"processes.main({names}, RANK, {size}, {str(tmp_path)!r})"
    errors = []  # of all, since an error of one often follows from another's
    for rank, log in enumerate(run(call, size, tmp_path)):
        path = tmp_path / f"found.{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        errors += [f"{name} on rank {rank}:\n{error}" for name, error in found.items() if error]
        if missing := {name for its in names.values() for name in its} - found.keys():
            errors.append(f"Rank {rank} did not get to {sorted(missing)}:\n{log}")
    assert not errors, "\n".join(errors)


@pytest.mark.extensive
def test_process_that_ends(tmp_path: Path):
    """The others have an error."""
    logs = run(f"sharded_checks.ended_process(RANK, {str(tmp_path)!r})", 2, tmp_path)
    assert (tmp_path / "error").exists(), logs[0]


@pytest.mark.slow
def test_script():
    """The script of the documentation finds the same with one process and with two."""
    pytest.importorskip("transformers")
    script, printed = ROOT / "docs_src/recipes/sharded_spectrum.py", []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for size in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
        ran = subprocess.run(
            [*command, str(script)], env=environment, text=True, capture_output=True, timeout=LIMIT
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        printed.append([float(x) for x in re.findall(r"(?:\[|GGN: )(\d+\.\d+)", ran.stdout)])
    assert len(printed[0]) == 3
    assert printed[1] == pytest.approx(printed[0], rel=1e-3)
