"""Operators of several processes: see parallel_checks.py and sharded_checks.py."""

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

pytestmark = pytest.mark.extensive

#: Seconds after which processes that hang are ended.
LIMIT = 150
ROOT = Path(__file__).parents[2]


CASES = [(module, n) for module in (parallel_checks, sharded_checks) for n in module.CHECKS]


@pytest.mark.parametrize(("module", "size"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_together(module: ModuleType, size: int, tmp_path: Path):
    """All checks for a number of processes, since it takes seconds to start these."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "test" / "shared")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    logs, processes = [tmp_path / f"log.{rank}" for rank in range(size)], []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, module.__file__, str(rank), str(size), tmp_path]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                )
        with suppress(subprocess.TimeoutExpired):  # then see how far they got
            for process in processes:
                process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, log in enumerate(logs):
        path = tmp_path / f"found.{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        failed = [f"{name} on rank {rank}:\n{error}" for name, error in found.items() if error]
        assert not failed, "\n".join(failed)
        missing = module.CHECKS[size].keys() - found.keys()
        assert not missing, f"Rank {rank} did not get to {missing}:\n{log.read_text()[-3000:]}"
