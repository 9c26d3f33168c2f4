"""Operators of several processes: see parallel_checks.py and sharded_checks.py."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import parallel_checks
import pytest
import sharded_checks

#: Seconds after which processes that hang are ended.
LIMIT = 1800
ROOT = Path(__file__).parents[2]
#: Checks of a single process take seconds, those of several minutes.
CASES = [
    pytest.param(module, n, marks=[pytest.mark.extensive] if n > 1 else [])
    for module in (parallel_checks, sharded_checks)
    for n in sorted(module.CHECKS)
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
            code = f"import parallel_checks, processes, sharded_checks; RANK = {rank}; {call}"
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


@pytest.mark.parametrize(("module", "size"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_together(module: ModuleType, size: int, tmp_path: Path):
    """All checks for a number of processes, since it takes seconds to start these."""
    call = f"processes.main({module.__name__}.CHECKS, RANK, {size}, {str(tmp_path)!r})"
    errors = []  # of all, since an error of one often follows from another's
    for rank, log in enumerate(run(call, size, tmp_path)):
        path = tmp_path / f"found.{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        errors += [f"{name} on rank {rank}:\n{error}" for name, error in found.items() if error]
        if missing := module.CHECKS[size].keys() - found.keys():
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
