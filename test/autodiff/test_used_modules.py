"""Modules that a function uses are found, wherever it keeps them."""

import copy
import functools
import types
from collections.abc import Callable

import pytest
import torch
from contract import error
from small import build, dense, mlp
from torch import Tensor, nn
from torch.func import functional_call

from curvlinops import EFLinearOperator, GGNLinearOperator, HessianLinearOperator
from curvlinops.autodiff.used_modules import find_modules

MODULE = nn.Linear(4, 3).double()


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
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_modules_that_a_function_uses(function: Callable):
    assert find_modules(function) == [MODULE]


def test_data_is_not_searched_for_modules():
    class Lazy(dict):
        def values(self) -> list:
            raise AssertionError("all data would be read")

    words, many = Lazy({str(i): i for i in range(2000)}), list(range(100_000))
    assert find_modules(lambda X: MODULE(X) + len(words) + len(many)) == [MODULE]


# --- what is done with them


class Trainer:
    """Has more modules than those that it predicts with."""

    def __init__(self, model: nn.Module):
        self.net, self.average = model, nn.BatchNorm1d(4)
        self.optimizer = torch.optim.Adam(model.parameters())

    def predict(self, X: Tensor) -> Tensor:
        return self.net(X)


#: Functions that call a module, which is found behind them.
WRAPPERS: dict[str, Callable[[nn.Module], Callable]] = {
    "partial": lambda model: functools.partial(lambda inner, X: inner(X), model),
    "closure": lambda model: lambda X: model(X),
    "method": lambda model: (lambda trainer: lambda X: trainer.predict(X))(Trainer(model)),
}


COUPLES = r"BatchNorm in train mode couples .*module '\w+'\).*EFLinearOperator.*model.eval"


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
@pytest.mark.parametrize("name", WRAPPERS)
def test_modules_behind_functions_are_found(name: str):
    model, wrap = mlp(nn.BatchNorm1d(4)), WRAPPERS[name]
    params, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    expected = dense(HessianLinearOperator, model)
    assert error(dense(HessianLinearOperator, wrap(model), params=params), expected) <= 1e-12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=COUPLES):
        build(EFLinearOperator, wrap(model), params=params)
    build(EFLinearOperator, wrap(model.eval()), params=params)  # other modules do not count


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
def test_modules_behind_functions_of_parameters_are_found():
    model = mlp(nn.BatchNorm1d(4))
    before, params = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    dense(GGNLinearOperator, lambda p, X: functional_call(model, p, (X,)), params=params)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Unregistered(nn.Module):
    """Uses one of two layers that it keeps in plain lists."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.used, self.unused = ([nn.BatchNorm1d(3, affine=False).double()] for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.used[0](self.linear(x))


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
def test_modules_that_are_not_registered_are_found():
    model = Unregistered()
    before = copy.deepcopy(model.used[0].state_dict())
    dense(HessianLinearOperator, model)
    assert all(torch.equal(x, before[name]) for name, x in model.used[0].state_dict().items())
    with pytest.raises(ValueError, match=COUPLES):
        build(EFLinearOperator, model)
    model.used[0].eval()
    build(EFLinearOperator, model)
