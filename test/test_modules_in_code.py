"""What code reads of the modules that it names, and how much is looked at to know of a change."""

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlinops import HessianLinearOperator
from curvlinops.autodiff.used_modules import find_modules
from curvlinops.support.fingerprint import Fingerprint

pytestmark = pytest.mark.extensive

FILES = {
    "__init__.py": "from curved import config, helpers, lazy, deep\nFACTOR = 1.0",
    "config.py": """
        import types
        SCALE = 1.0
        TABLE = {"scale": 1.0}
        settings = types.SimpleNamespace(scale=1.0)
        def scale():
            return SCALE
        """,
    "helpers.py": """
        from curved import config
        def scale_of(module):
            return module.SCALE
        def by_function():
            return config.scale()
        """,
    "lazy.py": """
        from curved import config
        SCALE = 5.0
        def __getattr__(name):
            return config if name == "made" else getattr(config, name.upper())
        """,
    "deep/__init__.py": "from curved.deep import net",
    "deep/net.py": "",
}

HEAD = """
import functools
import operator
import curved
import curved as other
import curved.config as renamed
from curved import config, helpers, lazy
from curved.config import *
from importlib import import_module as load
everything = globals
KEY, KEYS = "SCALE", ("SCALE",)
class Holder:
    module = config
class Meta(type):
    scale = property(lambda self: config.SCALE)
class Settings(metaclass=Meta):
    pass
@functools.singledispatch
def of(x):
    return 1.0
@of.register
def _of_int(x: int):
    return config.SCALE
"""

#: Functions that read the scale of ``curved.config``.
READERS = {
    "attribute": "return config.SCALE",
    "attribute of a module in a package": "return curved.config.SCALE",
    "through several modules": "return curved.helpers.config.SCALE",
    "other name": "return renamed.SCALE",
    "item": "return config.TABLE['scale']",
    "attribute of an object": "return curved.config.settings.scale",
    "function": "return curved.config.scale()",
    "function of a function": "return helpers.by_function()",
    "variable": "module = config\n    return module.SCALE",
    "container": "return [config][0].SCALE",
    "chosen": "return (None or config).SCALE",
    "chosen by a condition": "return (config if config else helpers).SCALE",
    "assigned at once": "return (module := config) and module.SCALE",
    "default": "return (lambda module=config: module.SCALE)()",
    "metaclass": "return Settings.scale",
    "function within": "return (lambda: curved.config.SCALE)()",
    "comprehension": "return sum(config.SCALE for _ in range(1))",
    "class within": "class Inner:\n        s = config.SCALE\n    return Inner.s",
    "closure": "module = config\n    return (lambda: module.SCALE)()",
    "attribute that a module makes up": "return lazy.scale",
    "import": "import curved.config\n    return curved.config.SCALE",
    "import of the package": "import curved\n    return curved.config.SCALE",
    "import under another name": "import curved.config as c\n    return c.SCALE",
    "import from the package": "from curved import config as c\n    return c.SCALE",
    "import from the module": "from curved.config import SCALE as s\n    return s",
    "relative import": "from .. import config as c\n    return c.SCALE",
    "relative import from the module": "from ..config import TABLE as t\n    return t['scale']",
    "import, passed on with another": (
        "from .. import config as c\n    h = helpers\n    return (lambda a, b: b.SCALE)(h, c)"
    ),
    "import, in another variable": "from .. import config as c\n    d = c\n    return d.SCALE",
    "import, in a closure": "from .. import config as c\n    return (lambda: c.SCALE)()",
    "import, under the name of a global": (
        "def f():\n        from .. import config as lazy\n        return lazy.SCALE\n    return f()"
    ),
    "import, where a global has the same path": (
        "def f():\n        from other import config as c\n        return c.SCALE\n"
        "    from curved import config as c\n    return f() * other.config.SCALE * c.SCALE"
    ),
    "import, of several": (
        "from .. import helpers, config as c, lazy\n    return c.TABLE['scale']"
    ),
    "import of several packages": "import math, curved.config as c, os\n    return c.SCALE",
    "import in a function within": (
        "def f():\n        from ..config import SCALE as s\n        return s\n    return f()"
    ),
}


def _load(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        lines = text.splitlines()
        indent = 8 if len(lines) > 1 and lines[1].startswith(" " * 8) else 0
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(line[indent:] for line in lines))


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "curved"]:
        del sys.modules[name]


class Net(nn.Module):
    def __init__(self, module: types.ModuleType):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2).double(), module.read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale() * self.layer(x))


def _set(value: float) -> None:
    config = sys.modules["curved.config"]
    config.SCALE = config.TABLE["scale"] = config.settings.scale = value


def _is_noticed(model: nn.Module, change) -> None:
    X, y = torch.linspace(-1, 2, 12).sin().reshape(4, 3).double(), torch.ones(4, 2).double()
    arguments = model, nn.MSELoss(), list(model.parameters()), [(X, y)]
    kept, v = HessianLinearOperator(*arguments, cache="graph"), torch.ones(8).double()
    before = kept @ v
    change()
    expected = HessianLinearOperator(*arguments, cache="none") @ v
    assert not torch.allclose(before, expected, rtol=1e-3)
    torch.testing.assert_close(kept @ v, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reader", READERS)
def test_changes_of_what_code_reads_of_modules(reader: str, tmp_path: Path):
    code = f"{HEAD}\ndef read():\n    {READERS[reader]}\n"
    _load(tmp_path / "curved", {**FILES, "deep/net.py": code})
    _load(tmp_path / "other", {"__init__.py": "", "config.py": "SCALE = 1.0"})
    _is_noticed(Net(importlib.import_module("curved.deep.net")), lambda: _set(2.0))


@pytest.mark.parametrize("reader", ["FACTOR", "curved.FACTOR", "curved.config.TABLE['scale']"])
def test_changes_of_what_an_import_in_a_function_makes_a_variable(reader: str, tmp_path: Path):
    text = f"FACTOR = 1.0\ndef read():\n    import curved.config\n    return {reader}\n"
    _load(tmp_path / "curved", {**FILES, "deep/net.py": text})
    model = Net(net := importlib.import_module("curved.deep.net"))

    def change():
        _set(2.0)
        net.FACTOR = sys.modules["curved"].FACTOR = 2.0

    _is_noticed(model, change)


@pytest.mark.parametrize("how", ["", "import curved.config as c", "from curved import config as c"])
@pytest.mark.parametrize("name", ["config", "config.scale"])
def test_replaced_modules_and_functions(name: str, how: str, tmp_path: Path):
    reader = f"    {how}\n    return c.scale()" if how else "    return curved.config.scale()"
    code = f"{HEAD}\ndef read():\n{reader}\n"
    _load(tmp_path / "curved", {**FILES, "deep/net.py": code})
    model = Net(importlib.import_module("curved.deep.net"))
    *path, last = name.split(".")
    owner = sys.modules[".".join(["curved", *path])]
    new = (lambda: 2.0) if path else types.SimpleNamespace(scale=lambda: 2.0)
    _is_noticed(model, lambda: setattr(owner, last, new))


@pytest.mark.parametrize(
    "reader", ["curved.layers.net(x)", "getattr(curved.layers, 'n' + 'et', curved.layers.net)(x)"]
)
def test_networks_in_modules_are_found(reader: str, tmp_path: Path):
    layers = "from torch import nn\nnet = nn.Linear(1, 1)"
    code = f"import curved.layers\ndef read(x):\n    return {reader}\n"
    files = {"__init__.py": "", "layers.py": layers, "net.py": code}
    _load(tmp_path / "curved", files)
    read = importlib.import_module("curved.net").read
    assert find_modules(read) == [sys.modules["curved.layers"].net]


@pytest.mark.parametrize(
    "operators",
    [torch.ops, torch.ops.aten, torch.ops.aten.sin, torch.ops.aten.sin.default],
    ids=str,
)
def test_operators_of_pytorch_are_values(operators: object):
    """Their namespaces look like modules of users, and lead to all others."""
    model = nn.Linear(2, 2)
    known = len(Fingerprint([model])._parts)
    model.operators = operators
    assert len(Fingerprint([model])._parts) == known
