"""Replaced calls: their values, and their derivatives of first and second order."""

import pytest
import torch
import torch.nn.functional as F
from models import Using
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from curvlinops import HessianLinearOperator
from curvlinops.autodiff import overrides
from curvlinops.autodiff.overrides import TWICE
from curvlinops.autodiff.overrides.convolution import CONVOLUTIONS
from curvlinops.autodiff.overrides.recurrent import RECURRENT
from curvlinops.autodiff.overrides.writes import Protected

pytestmark = pytest.mark.extensive

X, BAGS = (4, 3, 5), torch.tensor([[0, 1, 6], [1, 1, 2]])


def tensor(*shape: int, positive: bool = False) -> Tensor:
    """Return random numbers that require a gradient."""
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values.abs() + 0.5 if positive else values).requires_grad_()


CALLS = {
    "gelu": (F.gelu, (tensor(*X),), {}),
    "gelu-tanh": (F.gelu, (tensor(*X),), {"approximate": "tanh"}),
    "std": (torch.std, (tensor(*X),), {"dim": (0, 2), "correction": 0}),
    "weight-norm": (torch._weight_norm, (tensor(4, 3), tensor(1, 3), 1), {}),
    "weight-norm-of-all": (torch._weight_norm, (tensor(4, 3), tensor(), -1), {}),
    "embedding-bag": (F.embedding_bag, (BAGS, tensor(7, 2)), {"padding_idx": 1}),
    "embedding-bag-weights": (
        F.embedding_bag,
        (BAGS, tensor(7, 2)),
        {"mode": "sum", "per_sample_weights": tensor(2, 3)},
    ),
    "embedding-bag-offsets": (
        F.embedding_bag,
        (BAGS.flatten(), tensor(7, 2), torch.tensor([0, 2, 2, 6])),
        {"mode": "sum", "include_last_offset": True, "per_sample_weights": tensor(6)},
    ),
    "embedding-bag-max": (F.embedding_bag, (BAGS, tensor(7, 2)), {"mode": "max"}),
    "embedding-bag-max-padding": (
        F.embedding_bag,
        (torch.tensor([[0, 1, 6], [1, 1, 1]]), tensor(7, 2)),
        {"mode": "max", "padding_idx": 1},
    ),
    "embedding-bag-max-offsets": (
        F.embedding_bag,
        (BAGS.flatten(), tensor(7, 2), torch.tensor([0, 2, 2, 6])),
        {"mode": "max", "padding_idx": -1, "include_last_offset": True},
    ),
    "embedding-bag-max-empty": (
        F.embedding_bag,
        (torch.zeros(0).long(), tensor(7, 2), torch.tensor([0, 0])),
        {"mode": "max"},
    ),
    "cdist": (torch.cdist, (tensor(*X), tensor(2, 5)), {}),
    "cdist-cubic": (torch.cdist, (tensor(2, 5), tensor(4, 5).detach()), {"p": 3.0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name: str):
    function, arguments, options = CALLS[name]
    given = [*arguments, *options.values()]
    leaves = [a for a in given if isinstance(a, Tensor) and a.requires_grad]

    def call(*values: Tensor) -> Tensor:
        rest = iter(values)
        filled = [next(rest) if any(a is leaf for leaf in leaves) else a for a in given]
        named = dict(zip(options, filled[len(arguments) :], strict=True))
        return TWICE[function](*filled[: len(arguments)], **named)

    torch.testing.assert_close(call(*leaves), function(*arguments, **options))
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_alone(dtype: torch.dtype):
    x = torch.randn(2, 3, 4).to(dtype)
    assert torch.equal(TWICE[F.gelu](x, "tanh"), F.gelu(x, approximate="tanh"))


def test_in_place():
    x = torch.randn(2, 4)
    with overrides.active("twice", Protected([]), {}):
        expected = F.hardsigmoid(x)
        assert F.hardsigmoid(x, inplace=True) is x
        assert torch.equal(x, expected)


def test_extreme_inputs_stay_finite():
    x = torch.tensor([-1e4, -40.0, 0.0, 40.0, 1e4], requires_grad=True)
    for approximate in ("none", "tanh"):
        out = TWICE[F.gelu](x, approximate)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert bool(gradient.isfinite().all() & second.isfinite().all())
        torch.testing.assert_close(gradient.detach()[[0, -1]], torch.tensor([0.0, 1.0]))


def test_confident_float32_hessian():
    """The softmax of a confident model: PyTorch's own double backward cancels."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3, bias=False), torch.randn(5, 4)
    with torch.no_grad():
        model.weight.mul_(20)
    y = model(x).argmax(1)
    v = torch.randn(12)

    def product(model: nn.Module, x: Tensor) -> Tensor:
        params = list(model.parameters())
        H = HessianLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, y)])
        return (H @ v.to(x.dtype)).double()

    single = product(model, x)
    double = nn.Linear(4, 3, bias=False).double()
    double.load_state_dict(model.state_dict())
    exact = product(double, x.double())
    # the logits, of size 50, are accurate to 1e-6 each
    assert (single - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("batch_first", "bidirectional"), [(False, True), (True, False)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.RNN, {}),
    ],
)
def test_dropout_between_recurrent_layers(
    kind: type, options: dict, dropout: float, batch_first: bool, bidirectional: bool, packed: bool
):
    """PyTorch's composed layers forget it."""
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "bidirectional": bidirectional, **options}
    layer = kind(4, 3, 3, dropout=dropout, **options).double()
    X: Tensor | nn.utils.rnn.PackedSequence = torch.randn(5, 5, 4, dtype=torch.float64)
    if packed:
        lengths = torch.tensor([3, 2, 4, 5, 1])
        X = nn.utils.rnn.pack_padded_sequence(X, lengths, batch_first, enforce_sorted=False)
    torch.manual_seed(1)
    expected = layer(X)
    torch.manual_seed(1)
    with overrides.Overrides(RECURRENT, Protected([])):
        found = layer(X)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_random(kind: type):
    layer = kind(4, 3, 2, dropout=0.5, batch_first=True)
    model = Using(lambda s, X: s.layer(X)[0][:, -1], layer=layer)
    data = [(torch.randn(6, 3, 4), torch.randn(6, 3))]
    with pytest.raises(RuntimeError, match="model.eval.. switches Dropout off"):
        HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    HessianLinearOperator(model.eval(), nn.MSELoss(), list(model.parameters()), data)


# --- convolutions with a double backward of their own


CONVOLVED = {
    "plain": (torch.conv2d, (2, 4, 5, 5), (3, 4, 3, 3), {}),
    "strided": (torch.conv2d, (2, 4, 6, 5), (3, 4, 3, 2), {"stride": (2, 1), "padding": 1}),
    "dilated": (torch.conv2d, (2, 2, 7, 7), (3, 2, 3, 3), {"dilation": 2}),
    "grouped": (torch.conv2d, (2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2, "padding": (1, 0)}),
    "depthwise": (torch.conv2d, (2, 4, 5, 5), (4, 1, 3, 3), {"groups": 4}),
    "same": (torch.conv2d, (2, 2, 5, 5), (3, 2, 2, 2), {"padding": "same"}),
    "unbatched": (torch.conv2d, (2, 5, 5), (3, 2, 3, 3), {}),
    "1d": (torch.conv1d, (2, 2, 7), (3, 2, 3), {"stride": 2}),
    "3d": (torch.conv3d, (2, 2, 3, 4, 4), (3, 2, 2, 2, 2), {"padding": 1}),
    "transposed 1d": (torch.conv_transpose1d, (2, 2, 4), (2, 3, 3), {"stride": 2}),
    "transposed 2d": (
        torch.conv_transpose2d,
        (2, 4, 3, 3),
        (4, 3, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "dilation": 2},
    ),
    "transposed 3d": (torch.conv_transpose3d, (1, 2, 2, 2, 2), (2, 1, 2, 2, 2), {}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # PyTorch pads even kernels by a copy
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CONVOLVED)
def test_derivatives_of_convolutions(name: str, bias: bool):
    function, x_shape, w_shape, options = CONVOLVED[name]
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [draw(x_shape), draw(w_shape)]
    out = function(*inputs, **options)
    if bias:
        axis = out.ndim - len(w_shape) + 1  # of the channels
        inputs.append(draw((out.shape[axis],)))
    results = []
    u = torch.randn(out.shape, generator=generator, dtype=torch.float64).requires_grad_()
    v = [draw(tuple(x.shape)) for x in inputs]
    for call in (function, CONVOLUTIONS[function]):
        out = call(*inputs, **options)
        first = torch.autograd.grad(out.sin(), inputs, u, create_graph=True)
        second = torch.autograd.grad(first, [*inputs, u], v, create_graph=True)
        third = ()
        if "output_padding" not in options:  # PyTorch has no third derivative of it
            total = sum(t.cos().sum() for t in second)
            third = torch.autograd.grad(total, inputs, retain_graph=True)
        stacked = [torch.stack([x, 2 * x]) for x in v]
        batched = torch.autograd.grad(first, [*inputs, u], stacked, is_grads_batched=True)
        torch.testing.assert_close([b[1] / 2 for b in batched], list(second))
        results.append([out, *first, *second, *third])
    torch.testing.assert_close(results[1], results[0])
