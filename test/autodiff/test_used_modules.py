"""Modules that a function uses are found, wherever it keeps them."""

import functools
import os
import site
import sysconfig
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from models import Using
from small import build, dense, mlp
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops import EFLinearOperator, HessianLinearOperator
from curvlinops.autodiff.used_modules import find_modules

MODULE = nn.Linear(4, 3).double()


class Trainer:
    """Has more modules than those that it predicts with."""

    def __init__(self):
        self.net, self.average = MODULE, nn.BatchNorm1d(4)
        self.optimizer = torch.optim.Adam(MODULE.parameters())

    def predict(self, X: Tensor) -> Tensor:
        return self.net(X)


settings = types.ModuleType("settings")
settings.net, settings.average = MODULE, nn.Linear(1, 1)


def _by_default(x: Tensor, net: nn.Module = MODULE) -> Tensor:
    return net(x)


#: Functions of a module, and of no other one.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "global": lambda x: MODULE(x),
    "function of a function": lambda x: _by_default(x),
    "attribute of a module": lambda x: sum(settings.net(x) for _ in range(2)),
    "containers": (lambda nets: lambda x: nets["all"][0](x))({"all": (MODULE,)}),
    "decorated": torch.no_grad()(lambda x: MODULE(x)),
    "wrapped": functools.cache(lambda x: MODULE(x)),
    "partial": functools.partial(lambda inner, x: inner(x), MODULE),
    "method": (lambda trainer: lambda x: trainer.predict(x))(Trainer()),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_modules_that_a_function_uses(function: Callable):
    assert find_modules(function) == [[MODULE]]


def test_data_is_not_searched_for_modules():
    class Lazy(dict):
        def values(self) -> list:
            raise AssertionError("all data would be read")

    words, many = Lazy({str(i): i for i in range(2000)}), list(range(100_000))
    assert find_modules(lambda X: MODULE(X) + len(words) + len(many)) == [[MODULE]]


@pytest.mark.parametrize(
    "folder",
    [sysconfig.get_path("purelib"), site.getusersitepackages(), os.path.dirname(torch.__file__)],
)
def test_code_of_packages_is_not_searched(folder: str):
    names = {"net": MODULE}
    exec(compile("def function(x): return net(x)", f"{folder}/package.py", "exec"), names)
    assert not find_modules(names["function"])


# --- what is done with them


def function() -> tuple[Callable, Any, nn.Module]:
    model = mlp(nn.BatchNorm1d(4))
    return lambda X: model(X), list(model.parameters()), model[1]


def function_of_parameters() -> tuple[Callable, Any, nn.Module]:
    model = mlp(nn.BatchNorm1d(4))
    params = dict(model.named_parameters())
    return lambda p, X: functional_call(model, p, (X,)), params, model[1]


def list_of_a_module() -> tuple[Callable, Any, nn.Module]:
    model = Using(lambda s, X: s.used[0](s.layer(X)), layer=nn.Linear(3, 3).double())
    model.used, model.unused = ([nn.BatchNorm1d(3, affine=False).double()] for _ in range(2))
    return model, list(model.parameters()), model.used[0]


COUPLES = r"BatchNorm in train mode couples .*module '\w+'\).*EFLinearOperator.*model.eval"


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
@pytest.mark.parametrize("make", [function, function_of_parameters, list_of_a_module])
def test_norms_behind_functions_and_lists(make: Callable):
    model, params, norm = make()
    before = deepcopy(norm.state_dict())
    dense(HessianLinearOperator, model, params=params)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    with pytest.raises(ValueError, match=COUPLES):
        build(EFLinearOperator, model, params=params)
    norm.eval()
    build(EFLinearOperator, model, params=params)  # modules that are not used do not count
