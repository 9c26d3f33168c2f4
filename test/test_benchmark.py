"""The benchmark runs, on a problem with nothing to measure."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extensive

ROOT = Path(__file__).parent.parent


def test_benchmark_runs(tmp_path: Path):
    script = ROOT / "docs_src" / "benchmarks" / "products.py"
    options = ["--problems", "tiny", "--repeats", "1", "--columns", "2", "--device", "cpu"]
    options += ["--no-memory"]
    command = [sys.executable, str(script), *options, "--output", str(tmp_path)]
    subprocess.run(command, check=True)
    results = json.loads((tmp_path / "cpu.json").read_text())
    rows = results["problems"]["tiny"]["rows"]
    assert set(rows) >= {"Hessian-vector", "GGN-vector", "Jacobian-vector", "GGN, 2 columns"}
    assert all(cell["ratio"] > 0 for row in rows.values() for cell in row.values())
    found = {name: row["repeated"] for name, row in rows.items() if "repeated" in row}
    for how in ("", " by scipy"):
        row = found[f"Hessian, ten eigenpairs{how}"]
        assert 10 <= row["products"] <= 30 and row["error"] <= 1e-2
    # exact for a matrix of so small a rank
    assert found["GGN trace, XNysTrace"]["error"] <= 1e-4
    assert 0 < found["GGN density, 30 Lanczos steps"]["error"] < 0.3
    page = (tmp_path / "cpu.md").read_text()
    assert "| Hessian-vector |" in page and "12 products, error" in page


def test_benchmark_measures_memory():
    worker = ROOT / "docs_src" / "benchmarks" / "worker.py"
    command = [sys.executable, str(worker), "first", "tiny", "2", "cpu"]
    answers = subprocess.run(
        command, check=True, input="memory GGN-vector\n", capture_output=True, text=True
    )
    names, memory = map(json.loads, answers.stdout.splitlines())
    assert "GGN-vector" in names and (memory is None or 0 <= memory < 2**28)


def test_committed_table_is_complete():
    results = json.loads((ROOT / "docs_src/benchmarks/results/cpu.json").read_text())
    for problem in results["problems"].values():
        assert {"first", "repeated", "torch.func"} <= set(problem["rows"]["Hessian-vector"])


DOUBLED = """
_matmul = HessianLinearOperator.__matmul__
HessianLinearOperator.__matmul__ = lambda self, x: 2 * _matmul(self, x)
del GGNLinearOperator
"""


def test_comparison_notices_another_number(tmp_path: Path):
    shutil.copytree(ROOT / "curvlinops", tmp_path / "curvlinops")
    with (tmp_path / "curvlinops" / "__init__.py").open("a") as file:
        file.write(DOUBLED)
    script = ROOT / "docs_src" / "benchmarks" / "compare.py"
    options = ["--base", str(tmp_path), "--problems", "tiny", "--repeats", "1"]
    command = [sys.executable, str(script), *options, "--rows", "Hessian: product", "GGN: product"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    table, beyond = found.stdout.split("Beyond rounding: 1 of")
    assert "tiny Hessian: product" in beyond and "5.0e-01" in beyond
    assert "tiny GGN: product" in table and "only the base refuses: AttributeError" in table
    options = ["--base", str(tmp_path), "--problems", "test/mlp-ce-mean", "--rows", "Jacobian"]
    assert subprocess.run([sys.executable, str(script), *options]).returncode == 0
