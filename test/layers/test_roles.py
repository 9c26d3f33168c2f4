"""Constants that multiply parameters, and rows of samples that look like such."""

import pytest
import torch
from contract import error
from models import Using
from sample_gradients import check_rows, rows_in_batches
from torch import Tensor, nn

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator

SUM = nn.MSELoss(reduction="sum")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def position_bias(s: Using, x: Tensor) -> Tensor:
    """A layer on a constant table with a leading axis of length one, as in SwinV2."""
    return torch.tanh(s.first(x) + s.table(s.places).softmax(-1)).mean(1)


PLACES = torch.randn(1, 3, 2)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (1, 1, 1, 1), (2, 2)], ids=str)
def test_layers_on_constant_tables(sizes: tuple[int, ...]):
    """Whatever the split, also into batches of one sample."""
    model = Using(position_bias, first=nn.Linear(4, 5), table=nn.Linear(2, 5)).double()
    model.register_buffer("places", PLACES.double())
    X, y = torch.randn(4, 3, 4).double(), torch.randn(4, 5).double()
    data, params = list(zip(X.split(sizes), y.split(sizes), strict=True)), list(model.parameters())
    J = PerSampleGradientLinearOperator(model, SUM, params, data)
    check_rows(J, rows_in_batches(model, data, SUM), 1e-10, covered=True)
    options = {"fisher_type": "empirical", "fallback": "dense"}
    for approx in ("expand", "reduce"):
        found = KFACLinearOperator(model, SUM, params, data, kfac_approx=approx, **options)
        whole = KFACLinearOperator(model, SUM, params, [(X, y)], kfac_approx=approx, **options)
        assert error(found.to_dense(), whole.to_dense()) <= 1e-12
        assert [b.structure for b in found.report()] == [b.structure for b in whole.report()]


#: Functions of a weight, and of constants.
FUNCTIONS = {
    "product": lambda s, x: x @ (s.constant @ s.w),
    "product with data, too": lambda s, x: (x @ s.w) @ (s.constant @ s.w),
    "mask": lambda s, x: x @ (s.w * (s.constant > 0)),
    "rows": lambda s, x: x @ s.w[[2, 0, 1, 3]],
    "standardized": lambda s, x: x @ ((s.w - s.w.mean(0)) / s.w.std(0)),
}


@pytest.mark.parametrize("sizes", [(5,), (1, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_weights_and_constants(name: str, sizes: tuple[int, ...]):
    model = Using(lambda s, x: torch.tanh(FUNCTIONS[name](s, x)), w=torch.randn(4, 4)).double()
    model.register_buffer("constant", torch.randn(4, 4).double())
    data = [(torch.randn(n, 4).double(), torch.randn(n, 4).double()) for n in sizes]
    J = PerSampleGradientLinearOperator(model, SUM, [model.w], data)
    check_rows(J, rows_in_batches(model, data, SUM), 1e-10)
    if name != "product with data, too":
        assert not J.fallbacks
    with pytest.raises(NotImplementedError, match="a layer uses a function of it"):
        KFACLinearOperator(model, SUM, [model.w], data).trace()


def test_sets_whose_elements_are_changed_before_the_first_layer():
    """The layer sees rows of samples, not a constant, though its input has no gradient."""

    def function(s: Using, X: dict[str, Tensor]) -> Tensor:
        x = (X["x"] - X["x"].mean()).clamp(min=-1)
        return X["pool"] @ s.layer(x).tanh()

    model, data = Using(function, layer=nn.Linear(3, 2)).double(), []
    for sizes in ([2, 2], [1, 3]):
        pool = torch.block_diag(*(torch.ones(1, size) for size in sizes)).double()
        data.append(({"x": torch.randn(4, 3).double(), "pool": pool}, torch.randn(2, 2).double()))
    params, options = list(model.parameters()), {"batch_size_fn": lambda X: len(X["pool"])}
    J = PerSampleGradientLinearOperator(model, SUM, params, data, **options)
    check_rows(J, rows_in_batches(model, data, SUM), 1e-10)
    K = KFACLinearOperator(model, SUM, params, data, fisher_type="type-2", **options)
    x = torch.cat([(X["x"] - X["x"].mean()).clamp(min=-1) for X, _ in data])
    assert error(K.input_covariances["layer"], x.T @ x / len(x)) <= 1e-12
