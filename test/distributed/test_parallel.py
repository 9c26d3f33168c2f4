"""Operators of several processes: see parallel_checks.py and sharded*_checks.py."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import parallel_checks
import pytest
import sharded_checks
import sharded_parameter_checks

pytestmark = pytest.mark.extensive

#: Seconds after which processes that hang are ended.
LIMIT = 900
ROOT = Path(__file__).parents[2]


MODULES = (parallel_checks, sharded_checks, sharded_parameter_checks)
CASES = [(module, n) for module in MODULES for n in module.CHECKS]


def run(commands: list[list], folder: Path) -> list[Path]:
    """Run processes until they end, or have hung; return what they printed."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "test" / "shared", ROOT / "test/distributed")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    logs, processes = [folder / f"log.{rank}" for rank in range(len(commands))], []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command], env=environment, stdout=file, stderr=file
                    )
                )
        with suppress(subprocess.TimeoutExpired):  # then see how far they got
            for process in processes:
                process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return logs


@pytest.mark.parametrize(("module", "size"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_together(module: ModuleType, size: int, tmp_path: Path):
    """All checks for a number of processes, since it takes seconds to start these."""
    commands = [[module.__file__, str(rank), str(size), tmp_path] for rank in range(size)]
    for rank, log in enumerate(run(commands, tmp_path)):
        path = tmp_path / f"found.{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        failed = [f"{name} on rank {rank}:\n{error}" for name, error in found.items() if error]
        assert not failed, "\n".join(failed)
        missing = module.CHECKS[size].keys() - found.keys()
        assert not missing, f"Rank {rank} did not get to {missing}:\n{log.read_text()[-3000:]}"


def test_process_that_ends(tmp_path: Path):
    """The others have an error."""
    code = "import sharded_parameter_checks as c, pathlib; "
    code += f"c.ended_process({{}}, pathlib.Path({str(tmp_path)!r}))"
    logs = run([["-c", code.format(rank)] for rank in range(2)], tmp_path)
    assert (tmp_path / "error").exists(), logs[0].read_text()[-3000:]
