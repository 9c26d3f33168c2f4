"""The rules of the house: imports go down only, the public names are known."""

import ast
from functools import cache
from pathlib import Path

import mutations
import pytest

import curvlinops

ROOT = Path(curvlinops.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
_BASE = {"support", "team", "linear_operator"}
#: The folders that a folder may import. `layers` and `algorithms` do not know each other.
ALLOWED = {
    "support": {"support"},
    "team": {"team", "support"},
    "linear_operator": _BASE,
    "structured": {"structured", *_BASE},
    "algorithms": {"algorithms", *_BASE},
    "autodiff": {"autodiff", *_BASE},
    "losses": {"losses", "autodiff", *_BASE},
    "risk": {"risk", "losses", "autodiff", *_BASE},
    "layers": {"layers", "risk", "autodiff", "structured", *_BASE},
    "operators": {
        *("operators", "structured", "algorithms", "layers", "losses", "risk", "autodiff"),
        *_BASE,
    },
    "landscape": {"landscape", "operators", "algorithms", "risk", "autodiff", *_BASE},
    "influence": {
        *("influence", "operators", "layers", "structured", "losses", "risk", "autodiff"),
        *_BASE,
    },
    "training": {"training", "landscape", "operators", "algorithms", "autodiff", *_BASE},
    "integrations": {
        *("integrations", "training", "operators", "risk", "losses", "autodiff"),
        *_BASE,
    },
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the syntax of a file."""
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path: Path, package: str = "curvlinops") -> set[str]:
    """Return the modules of a package that a file imports, wherever in the file."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if f"{name}.".startswith(f"{package}.")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path):
    room = path.relative_to(ROOT).parts[0]
    if room in ALLOWED:
        rooms = {name.split(".")[1] for name in imported(path)}
        assert rooms <= ALLOWED[room]


def test_team_alone_imports_distributed():
    importing = {path.relative_to(ROOT) for path in FILES if imported(path, "torch.distributed")}
    assert {path.parts[0] for path in importing} == {"team"}


def test_no_import_circle():
    modules = {
        ".".join(("curvlinops", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in FILES
        if path.name != "__init__.py"
    }
    edges = {name: imported(path) & set(modules) for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {(*trail, name)}"
        if name not in done:
            for other in edges[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_layers_import_all_rules():
    layers = [path for path in FILES if path.parent.name == "layers" and path.stem != "rules"]
    have_rules = {path.stem for path in layers if "rules.reads" in str(imported(path))}
    assert have_rules == set(curvlinops.layers.__all__)
    named = {name.split(".")[-1] for name in imported(ROOT / "layers" / "__init__.py")}
    assert have_rules <= named


#: Functions that make tensors on PyTorch's default device, unless told otherwise.
_FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones"}
_FACTORIES |= {"rand", "randint", "randn", "randperm", "tensor", "zeros"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tensors_are_made_on_a_device_of_our_choice(path: Path):
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if module == "torch" and name in _FACTORIES:
            # further keywords may have it
            assert {"device", None} & {keyword.arg for keyword in node.keywords}, node.lineno


def test_every_folder_has_tests_for_its_mutations():
    assert mutations.folders().keys() == mutations.TESTS.keys()
    for test in {test for folder in mutations.TESTS for test in mutations.tests(folder)}:
        path, _, name = test.partition("::")
        assert (f"def {name.partition('[')[0]}(" if name else "") in Path(path).read_text()
