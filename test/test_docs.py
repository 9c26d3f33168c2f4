"""What the documentation shows, runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md"]
PAGES += [f"docs/{page}.md" for page in ("quickstart", "per_sample", "solvers", "spectra")]


def blocks(page: str) -> str:
    """Return all Python blocks of a page; later ones build on earlier ones."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES)
def test_pages_run(page: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = blocks(page)
    assert "import" in code
    exec(compile(code, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "name, figure",
    [
        ("plot_digits_cnn", "eigenvalues.png"),
        pytest.param("plot_spectral_density", "spectral_density.png", marks=pytest.mark.slow),
    ],
)
def test_examples_run(name: str, figure: str, tmp_path: Path):
    script = ROOT / "docs_src" / "examples" / f"{name}.py"
    environment = os.environ | {"MPLBACKEND": "Agg", "TQDM_DISABLE": "1"}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / figure).stat().st_size > 10_000
