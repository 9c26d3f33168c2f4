"""Changes of modules whose names occur in the code of a model."""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from contract import num_kept
from torch import Tensor, nn

from curvlinops import HessianLinearOperator
from curvlinops.autodiff.used_modules import find_modules

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
    "through several modules": "return curved.helpers.config.SCALE",
    "other name": "return renamed.SCALE",
    "attribute of an object": "return curved.config.settings.scale",
    "function of a function": "return helpers.by_function()",
    "comprehension": "return sum(config.SCALE for _ in range(1))",
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


def test_networks_in_modules_are_found(load: Callable):
    assert find_modules(load("return curved.layers.net(x)")) == [sys.modules["curved.layers"].net]


@pytest.mark.parametrize("operators", [torch.ops, torch.ops.aten.sin.default], ids=str)
def test_operators_of_pytorch_are_values(operators: object):
    """Their namespaces look like modules of users, and lead to more objects than are compared."""
    model = nn.Linear(2, 2)
    model.operators = operators
    arguments = (
        model,
        nn.MSELoss(),
        list(model.parameters()),
        [(torch.ones(3, 2), torch.ones(3, 2))],
    )
    H = HessianLinearOperator(*arguments, cache="graph")
    H @ torch.ones(6)
    assert num_kept(H) == 1
