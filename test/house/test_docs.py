"""The code in the documentation runs."""

import doctest
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from tables import core

import curvlinops

ROOT = Path(__file__).parents[2]
#: These take more than a second or two.
LONG = [
    f"docs/{name}.md"
    for name in (
        *("influence", "language_models", "loss_landscapes", "optimizers", "pinns", "solvers"),
    )
]
#: Pages with code; those about several processes run in these, in parallel_checks.py.
PAGES = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "\n```python\n" in path.read_text() and not path.stem.startswith("distributed")
]
#: Pages with tables of calls that can be made.
WITH_CALLS = ["README.md", "docs/migration.md", "docs/laplace.md"]
EXAMPLES = sorted((ROOT / "docs_src" / "examples").glob("plot_*.py"))
#: What pages of the gallery do in a test, in place of something that takes longer.
LESS = {
    "plot_attribution_quality": {
        "num_steps = 400, 60, 200": "num_steps = 400, 60, 100",
        "= 100\n": "= 30\n",
    },
    "plot_eigenvalues_through_training": {
        "= 1000, 25": "= 300, 50",
        "[0.5, 2 / 3, 1.0]": "[1.0]",
    },
    "plot_finite_differences": {
        "num_steps = 500": "num_steps = 30",
        "tol=1e-3": "tol=1e-2",
        "logspace(-6, 1, 15)": "logspace(-6, 1, 8)",
        "= 40, 2": "= 10, 1",
    },
    "plot_influence": {
        "num_data = 1000": "num_data = 300",
        '"network": nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double(),': "",
        "num_left_out = 16": "num_left_out = 10",
    },
    "plot_influence_lora": {"= 400, 400, 4": "= 200, 100, 4"},
    "plot_influence_sequences": {"= 48, 6, 8, 12": "= 12, 6, 4, 12"},
    "plot_kfac_optimizer": {
        "num_steps = 150": "num_steps = 60",
        '{"lr": (0.05, 0.1, 0.2, 0.4), "momentum": (0.9, 0.95)}': (
            '{"lr": (0.1, 0.2), "momentum": (0.9,)}'
        ),
        '{"lr": (0.01, 0.02, 0.04, 0.08), "weight_decay": (0.0, 0.1)}': (
            '{"lr": (0.02, 0.04), "weight_decay": (0.0,)}'
        ),
        '{"lr": (0.05, 0.1, 0.2), "damping": (0.03, 0.1, 0.3)}': (
            '{"lr": (0.1,), "damping": (0.1,)}'
        ),
        "range(1, 6)": "range(1, 3)",
    },
    "plot_laplace": {
        "[-2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.5, 1]": "[-1, -0.5, 0]",
        "linspace(-4, 5, 80,": "linspace(-4, 5, 25,",
        "num_draws = 300": "num_draws = 50",
    },
    "plot_lora_gpt2": {
        "= 64, 18, 20": "= 32, 12, 12",
        "num_steps=1500": "num_steps=50",
        "num_steps=500": "num_steps=50",
        "num_samples=20": "num_samples=5",
    },
    "plot_model_merging": {"[1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0]": "[1e-4, 1e-2]"},
    "plot_preconditioned_cg": {
        "damping = 1e-6": "damping = 1e-5",
        "[1e-1, 1e-2, 1e-3, 1e-4]": "[1e-1, 1e-2]",
    },
    "plot_pruning": {"range(10, 15)": "range(10, 12)"},
    "plot_resnet_training": {
        "num_data = 512": "num_data = 128",
        "width = 16": "width = 8",
        "= 30, 3": "= 4, 2",
        "xtrace(H, 20,": "xtrace(H, 10,",
    },
    "plot_sharpness_of_sgd": {
        "= 3000, 100": "= 600, 300",
        "[(0.6, 256), (0.6, 32), (0.6, 8), (0.2, 256)]": "[(0.6, 256), (0.6, 8)]",
    },
    "plot_spectral_density": {"num_repeats = 10": "num_repeats = 2"},
    "plot_tangent_kernel": {"= 300, 200": "= 100, 50", "range(500)": "range(200)"},
}
NOTEBOOKS = sorted((ROOT / "docs_src" / "notebooks").glob("*.ipynb"))
_WITH_NOTEBOOKS = {f"plot_{notebook.stem}" for notebook in NOTEBOOKS}
#: Pages that no other test runs in full.
REDUCED = [s for s in EXAMPLES if s.stem in LESS and s.stem not in _WITH_NOTEBOOKS]


def blocks(page: str) -> str:
    """Return all Python blocks of a page; later ones build on earlier ones."""
    text = (ROOT / page).read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def test_versions_agree():
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest[1] == cited[1] == curvlinops.__version__


def calls(page: str) -> list[str]:
    """Return the code in the columns "call" of a page's tables."""
    found, column = [], None
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 1:
            column = None
        elif column is None:
            column = cells.index("call") if "call" in cells else -1
        elif column > 0:
            found += re.findall(r"`([^`]+)`", cells[column])
    return found


@pytest.mark.parametrize("page", core((page for page in PAGES if page not in LONG), PAGES))
def test_pages_run(page: str, tmp_path: Path, monkeypatch):
    """With the calls in their tables."""
    monkeypatch.chdir(tmp_path)
    code, namespace = blocks(page), {"__name__": "__main__"}
    assert "import" in code
    exec(compile(code, page, "exec"), namespace)
    if page in WITH_CALLS:
        namespace |= {name: getattr(curvlinops, name) for name in curvlinops.__all__}
        assert len(calls(page)) > 3
        for call in calls(page):
            eval(call, namespace)


def test_docstrings_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [m.name for m in pkgutil.walk_packages(curvlinops.__path__, "curvlinops.")]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in results) > 0
    assert not sum(result.failed for result in results)


#: Folders from which pages name files.
FOLDERS = [ROOT, ROOT / "curvlinops", ROOT / "test"]


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/extending.md", "test/README.md"])
def test_pages_name_what_exists(page: str):
    files = [*(ROOT / "curvlinops").rglob("*.py"), *(ROOT / "test").rglob("*.py")]
    source = "".join(path.read_text() for path in files if path != Path(__file__))
    for name in re.findall(r"`([\w./]+)(?:\([\w, ]*\))?`", (ROOT / page).read_text()):
        if "/" in name or name.endswith(".py"):
            assert any((folder / name).exists() for folder in FOLDERS), name
        else:
            assert name.rpartition(".")[2] in source, name


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings in the repository and on the site."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.replace(" ", "-") for text in words if text == text.strip()}


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_work_in_the_repository(page: Path):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_everything_public_is_on_an_api_page():
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("api_*.md"))
    documented = re.findall(r"auto(?:class|function):: curvlinops\.(\w+)$", text, re.MULTILINE)
    assert sorted(documented) == sorted(curvlinops.__all__)


def site_extension() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "site_extension.py"))


def test_all_examples_have_a_place_in_the_gallery():
    order = site_extension()["READING_ORDER"]
    assert sorted(order) == [script.stem.removeprefix("plot_") for script in EXAMPLES]


def test_calls_in_tables_break():
    code = '<code><span class="pre">Operator(model).inverse(d=1)</span></code>'
    context = {"body": f"{code}<table>{code}</table>"}
    site_extension()["break_calls"](None, "page", "page.html", context)
    outside, inside = context["body"].split("<table>")
    assert outside == code
    words = re.findall(r'<span class="pre">(.*?)</span>', inside)
    assert words == ["Operator(", "model).", "inverse(", "d=", "1)"]


OPERATORS = [x for x in vars(curvlinops).values() if inspect.isclass(x)]
OPERATORS = [x for x in OPERATORS if issubclass(x, curvlinops.TorchLinearOperator)]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_api_pages_document_all_arguments(operator: type):
    extension, lines = site_extension(), []
    extension["inherit_entries"](None, "class", "", operator, None, lines)
    sections = extension["sections"]("\n".join(lines))
    documented = [name for name, _ in extension["entries"](sections.get("Args:", []))]
    assert documented == list(inspect.signature(operator.__init__).parameters)[1:]


def test_installation_page_has_all_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "installation.md").read_text()
    for requirement in project["dependencies"]:
        name, bound = requirement.split(">=")
        assert f"| `{name}` | {bound} or later" in page


def run_example(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page of the gallery, which checks its own results, and check that it has figures."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(plt, "show", lambda: None)
    try:
        with plt.rc_context({"backend": "agg"}), torch.random.fork_rng(devices=[]):
            runpy.run_path(str(script), run_name="__main__")
        assert plt.get_fignums()
        assert all(figure.stat().st_size > 10_000 for figure in folder.glob("*.png"))
    finally:
        plt.close("all")


@pytest.mark.extensive
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_examples_run(script: Path, tmp_path: Path, monkeypatch):
    text = script.read_text()
    for long, short in LESS.get(script.stem, {}).items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    reduced = tmp_path / script.name
    reduced.write_text(text)
    run_example(reduced, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("script", REDUCED, ids=lambda script: script.stem)
def test_examples_run_in_full(script: Path, tmp_path: Path, monkeypatch):
    run_example(script, tmp_path, monkeypatch)


def code_cells(notebook: Path) -> list[str]:
    """Return the code of a notebook's cells."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_are_those_of_the_gallery(notebook: Path):
    script = (EXAMPLES[0].parent / f"plot_{notebook.stem}.py").read_text()
    assert all(cell.strip() in script for cell in code_cells(notebook))
    assert notebook.stat().st_size < 2**20


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch):
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text("\n".join(code_cells(notebook)))
    run_example(script, tmp_path, monkeypatch)
