"""Changes of modules whose names occur in the code of a model."""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlinops import HessianLinearOperator
from curvlinops.autodiff.used_modules import find_modules
from curvlinops.support.fingerprint import Fingerprint

pytestmark = pytest.mark.extensive

#: A package of the user, in which `net.read` is a part of the model.
FILES = {
    "__init__.py": "",
    "config.py": """
import types
SCALE = 1.0
settings = types.SimpleNamespace(scale=1.0)
def scale():
    return SCALE
""",
    "helpers.py": """
from curved import config
def by_function():
    return config.scale()
""",
    "layers.py": "from torch import nn\nnet = nn.Linear(1, 1)",
    "net.py": """
import curved, curved.config as renamed, curved.layers
from curved import config, helpers
def read(x=None):
    {}
""",
}

#: Functions that read the scale of `curved.config`.
READERS = {
    "attribute": "return config.SCALE",
    "attribute of a module in a package": "return curved.config.SCALE",
    "through several modules": "return curved.helpers.config.SCALE",
    "other name": "return renamed.SCALE",
    "attribute of an object": "return curved.config.settings.scale",
    "function": "return curved.config.scale()",
    "function of a function": "return helpers.by_function()",
    "variable": "module = config\n    return module.SCALE",
    "container": "return [config][0].SCALE",
    "comprehension": "return sum(config.SCALE for _ in range(1))",
    "class within": "class Inner:\n        s = config.SCALE\n    return Inner.s",
    "closure": "module = config\n    return (lambda: module.SCALE)()",
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable]:
    """Write the package, with a body of `read`, and return `read`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> Callable:
        (tmp_path / "curved").mkdir()
        for name, text in FILES.items():
            (tmp_path / "curved" / name).write_text(text.format(body) if "{}" in text else text)
        return importlib.import_module("curved.net").read

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "curved"]:
        del sys.modules[name]


class Net(nn.Module):
    def __init__(self, scale: Callable):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2).double(), scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale() * self.layer(x))


def _is_noticed(read: Callable, change: Callable[[types.ModuleType], object]) -> None:
    model = Net(read)
    X, y = torch.linspace(-1, 2, 12).sin().reshape(4, 3).double(), torch.ones(4, 2).double()
    arguments = model, nn.MSELoss(), list(model.parameters()), [(X, y)]
    kept, v = HessianLinearOperator(*arguments, cache="graph"), torch.ones(8).double()
    before = kept @ v
    change(sys.modules["curved.config"])
    expected = HessianLinearOperator(*arguments, cache="none") @ v
    assert not torch.allclose(before, expected, rtol=1e-3)
    torch.testing.assert_close(kept @ v, expected, rtol=1e-10, atol=1e-12)


def _set_scale(config: types.ModuleType) -> None:
    config.SCALE = config.settings.scale = 2.0


@pytest.mark.parametrize("reader", READERS)
def test_changes_of_what_code_reads_of_modules(reader: str, load: Callable):
    _is_noticed(load(READERS[reader]), _set_scale)


def test_replaced_functions_and_modules(load: Callable):
    read, other = load("return curved.config.scale()"), types.SimpleNamespace(scale=lambda: 3.0)
    _is_noticed(read, lambda config: setattr(config, "scale", lambda: 2.0))
    _is_noticed(read, lambda config: setattr(sys.modules["curved"], "config", other))


@pytest.mark.parametrize(
    "reader", ["curved.layers.net(x)", "getattr(curved.layers, 'n' + 'et', curved.layers.net)(x)"]
)
def test_networks_in_modules_are_found(reader: str, load: Callable):
    assert find_modules(load(f"return {reader}")) == [sys.modules["curved.layers"].net]


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
