"""Each bad input is answered by an error that names the culprit and the remedy."""

import collections
import functools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    FisherMCLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    TransposedJacobianLinearOperator,
)

X, Y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
DATA = [(X[:3], Y[:3]), (X[3:], Y[3:])]
CE = nn.CrossEntropyLoss()


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 3))


def build(
    model: Any = None,
    loss: Any = CE,
    params: Any = None,
    data: Any = DATA,
    kind: type = HessianLinearOperator,
    **options: Any,
) -> Any:
    model = net() if model is None else model
    params = list(model.parameters()) if params is None else params
    return kind(model, loss, params, data, **options)


def multiply(**arguments: Any) -> Any:
    operator = build(**arguments)
    return operator @ torch.ones(operator.shape[1])


def both(check: Callable[[bool], Any], error: type[Exception], match: str) -> None:
    """Expect the error at construction, and without the check there, at the first product."""
    for deterministic in (True, False):
        with pytest.raises(error, match=match):
            check(deterministic)


# --- parameters

shared = net()
EXPIRED, LAZY = shared.parameters(), nn.parameter.UninitializedParameter()
list(EXPIRED)


class Functional:
    def __call__(self, params: dict[str, Tensor], X: Tensor) -> Tensor:
        return X @ params["w"]


@pytest.mark.parametrize(
    "model, params, error, match",
    [
        (shared, [], ValueError, "params is empty.*pass a list"),
        (shared, {}, ValueError, "params is empty"),
        (shared, EXPIRED, ValueError, "used up; pass a list"),
        (shared, shared[0].weight, TypeError, "must be a list of tensors or a dictionary"),
        (shared, [shared[0].weight, 1.0], TypeError, "Entry 1 of params is a float"),
        (shared, [shared[0].weight, torch.ones(3)], ValueError, r"Entry 1 of params.*\[3\].*not a"),
        (shared, [shared[0].weight] * 2, ValueError, "'0.weight' occurs twice"),
        (lambda x: x, [X, X], ValueError, "'0' occurs twice|'1' occurs twice"),
        (Functional(), {"w": X, "v": X}, ValueError, "occurs twice"),
        (nn.BatchNorm1d(3), {"running_mean": X[0]}, ValueError, "'running_mean' .* a buffer"),
        (shared, {"weight": X}, ValueError, "'weight' in params is unknown.*0.weight"),
        (shared, {"0.bias": torch.ones(3)}, ValueError, r"'0.bias'.*shape \[3\].*\[4\]"),
        (Functional(), {"w": torch.ones(3, 2).long()}, TypeError, "'w' has dtype torch.int64"),
        (Functional(), {"w": torch.ones(3, 2) * 1j}, TypeError, "'w' has dtype torch.complex64"),
        (
            Functional(),
            {"w": X, "v": torch.ones(2, device="meta")},
            ValueError,
            r"several devices, \['cpu', 'meta'\].*Move",
        ),
        ("model", [X], TypeError, "model_func must be a Module or a function"),
        (nn.LazyLinear(3), None, ValueError, r"\['weight', 'bias'\] are not initialized.*Run the"),
        (lambda x: x, [LAZY], ValueError, r"\['0'\] are not initialized"),
    ],
)
def test_parameters(model: Any, params: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        build(model=model, params=params)


def test_tied_names_with_different_values():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    params = {"0.weight": torch.zeros(3, 3), "1.weight": torch.ones(3, 3)}
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight'.*one tied parameter"):
        build(model=model, params=params)


# --- data


class Shrinking:
    def __init__(self):
        self.sizes = [2, 1, 1]

    def __iter__(self) -> Iterator:
        return iter(DATA[: self.sizes.pop(0)])


class Augmented(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        return X[n] + 0.1 * torch.randn(3), Y[n]


NAN = [DATA[0], (X[3:] * float("nan"), Y[3:])]


@pytest.mark.parametrize(
    "data, options, error, match",
    [
        ([], {}, ValueError, "data is empty"),
        ((b for b in DATA), {}, ValueError, "one-shot iterator.*DataLoader or a list"),
        (zip([X], [Y], strict=True), {}, ValueError, "one-shot iterator"),
        (map(tuple, DATA), {}, ValueError, "one-shot iterator"),
        (X, {}, TypeError, r"pass \[\(X, y\)\]"),
        ({"X": X}, {}, TypeError, r"pass \[\(X, y\)\]"),
        (3, {}, TypeError, "must be an iterable over pairs"),
        ([DATA[0], {"X": X}], {}, ValueError, "Batch 1 of the data is a dict, expected a pair"),
        ([(X, Y, Y)], {}, ValueError, "Batch 0 of the data is a tuple of length 3"),
        ([X], {}, ValueError, "Batch 0 of the data is a Tensor"),
        (DATA, {"num_data": 6}, ValueError, "num_data is 6, but data has 5 samples"),
        (NAN, {}, ValueError, "loss on batch 1 is nan"),
        (Shrinking(), {}, RuntimeError, "first pass over data yields 2 batches, the second 1"),
    ],
)
def test_data(data: Any, options: dict, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        build(data=data, **options)


def test_number_of_samples_is_not_evident():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, X: dict[str, Tensor]) -> Tensor:
            return self.inner(X["x"]) + X["shift"]

    data = [({"x": X, "shift": torch.ones(1, 3)}, Y)]
    with pytest.raises(ValueError, match=r"batch 0 is not evident.*\[1, 5\].*batch_size_fn"):
        build(model=Pair(), data=data, num_data=5)
    build(model=Pair(), data=data, num_data=5, batch_size_fn=lambda X: len(X["x"]))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"shuffle": True}, "DataLoader shuffles.*shuffle=False"),
        ({"shuffle": True, "drop_last": True}, "shuffles .*and the DataLoader drops the last"),
    ],
)
@pytest.mark.parametrize("kind", [HessianLinearOperator, EFLinearOperator])
def test_shuffling_loaders(kind: type, options: dict, match: str):
    data = DataLoader(TensorDataset(X, Y), batch_size=2, **options)
    with pytest.raises(RuntimeError, match=match):
        build(data=data, kind=kind)


def test_random_augmentation():
    with pytest.raises(RuntimeError, match="drawn or augmented at random"):
        build(data=DataLoader(Augmented(), batch_size=2))


# --- models


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Hidden(nn.Module):
    """Uses its parameter by a plain list."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        self.aliases = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.aliases[0] + self.bias


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Linear(3, 3), net()

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, self.stem(x), use_reentrant=True)


class Lookup(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.lookup = inner

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.lookup((x > 0).long())[:, :3].flatten(2).sum(1)
            if x.ndim > 2
            else self.lookup((x > 0).long()).reshape(len(x), -1, 3).sum(1)
        )


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]):
        super().__init__()
        self.inner, self.wrap = net(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x))


@pytest.mark.parametrize(
    "model, error, match",
    [
        (net(nn.Dropout(0.5)), RuntimeError, r"module '1' \(Dropout\).*call eval\(\)"),
        (net(nn.Sequential(nn.Identity(), Noise())), RuntimeError, r"module '1.1' \(Noise\)"),
        (net(nn.RReLU()), RuntimeError, r"'1' \(RReLU\)"),
        (Hidden(), ValueError, "'weight' by a reference that is not registered"),
        (Reentrant(), ValueError, "reentrant.*use_reentrant=False"),
        (Lookup(nn.Embedding(2, 3, max_norm=1.0)), ValueError, "'lookup'.*max_norm=None"),
        (
            Lookup(nn.Embedding(2, 3, scale_grad_by_freq=True)),
            ValueError,
            "'lookup'.*scale_grad_by_freq=False",
        ),
        (Lookup(nn.EmbeddingBag(2, 3, mode="max")), NotImplementedError, "mode='max'"),
        (Returns(lambda z: {"logits": z}), TypeError, "returned dict on batch 0.*logits"),
        (Returns(lambda z: (z, z)), TypeError, "returned tuple on batch 0"),
        (Returns(lambda z: z.sum()), TypeError, r"shape \[\].*batch axis first"),
        (Returns(lambda z: z.argmax(1)), TypeError, "torch.int64"),
        (Returns(lambda z: z.detach()), ValueError, "does not depend on any of the parameters"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_models(model: nn.Module, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        build(model=model)


class Checkpointed(nn.Module):
    """Recomputes its first layers, whose input requires no gradient."""

    def __init__(self, wrap: Callable = lambda inner: inner):
        super().__init__()
        self.inner, self.head = wrap(nn.Linear(3, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return self.head(h[0] if isinstance(h, tuple) else h)


CHECKPOINTED = {
    "linear": lambda: Checkpointed(),
    "parametrized": lambda: Checkpointed(nn.utils.parametrizations.weight_norm),
    "nested list": lambda: Checkpointed(lambda _: nn.RNN(3, 4)),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, KFACLinearOperator])
@pytest.mark.parametrize("model", CHECKPOINTED)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_of_the_first_layers(model: str, kind: type, check: bool):
    with pytest.raises(ValueError, match="use_reentrant=False"):
        multiply(model=CHECKPOINTED[model](), kind=kind, check_deterministic=check)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_of_other_parameters():
    model = Checkpointed()
    found = build(model=model, params=list(model.head.parameters())) @ torch.eye(15)
    truth = build(model=model.head, data=[(model.inner(x).detach(), y) for x, y in DATA])
    torch.testing.assert_close(found, truth @ torch.eye(15))


class Encoding(collections.UserDict):
    """What Hugging Face's tokenizers return."""

    def __getattr__(self, name: str) -> Any:
        if name in self.data:
            return self.data[name]
        raise AttributeError


class TakesIds(nn.Module):
    """A language model with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)

    def forward(self, input_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.embed(input_ids.reshape(-1, input_ids.shape[-1])).sum(1)


def test_dictionaries_that_are_keyword_arguments():
    data = [(Encoding(input_ids=torch.tensor([[0, 1], [2, 3]])), torch.tensor([0, 1]))]
    options = {"model": TakesIds(), "data": data, "batch_size_fn": lambda X: 2}
    with pytest.raises(AttributeError) as caught:
        build(**options)
    assert "type Encoding, as one argument" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("kind", [set, frozenset, lambda params: dict.fromkeys(params).keys()])
def test_parameters_without_order(kind: Callable):
    with pytest.raises(TypeError, match="a set, whose order is arbitrary"):
        build(params=kind(net().parameters()))


def test_containers_of_parameters():
    W, b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.zeros(3))

    def model(params: dict, x: Tensor) -> Tensor:
        return x @ params["W"] + params["b"]

    plain = build(model=model, params={"W": W, "b": b})
    named = build(model=model, params=nn.ParameterDict({"W": W, "b": b}))
    assert named.space.shapes == plain.space.shapes
    assert torch.equal(named @ torch.eye(12), plain @ torch.eye(12))
    assert isinstance(named.gradient_and_loss()[0], dict)
    listed = build(model=lambda x: x @ W + b, params=nn.ParameterList([W, b]))
    torch.testing.assert_close(listed @ torch.eye(12), plain @ torch.eye(12))


KINDS = [HessianLinearOperator, GGNLinearOperator, FisherMCLinearOperator, EFLinearOperator]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_cannot_be_replaced_are_not_taken_for_constants(kind: type, check: bool):
    with pytest.raises(ValueError, match="'weight' by a reference that is not registered"):
        multiply(model=Hidden(), kind=kind, check_deterministic=check)
    weight, clone = torch.ones(3, 3), torch.ones(3, 3)
    with pytest.raises(ValueError, match="must use the very tensors in params"):
        multiply(model=lambda x: x @ weight, params=[clone], kind=kind, check_deterministic=check)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", [JacobianLinearOperator, TransposedJacobianLinearOperator])
def test_jacobians_of_parameters_that_cannot_be_replaced(kind: type, check: bool):
    model = Hidden()
    with pytest.raises(ValueError, match="'weight' by a reference that is not registered"):
        kind(model, list(model.parameters()), DATA, check_deterministic=check)


class Memoizing(nn.Module):
    """Computes a function of a parameter once and for all."""

    def __init__(self, cache: Callable):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        self.root = cache(lambda: self.weight.tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.root() + self.bias


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("names", [["weight"], ["weight", "bias"]])
@pytest.mark.parametrize("kind", [*KINDS, KFACLinearOperator, PerSampleGradientLinearOperator])
def test_memoized_parameters(kind: type, names: list[str], check: bool):
    model = Memoizing(functools.cache)
    params = [getattr(model, name) for name in names]
    for _ in range(2):  # the second operator meets what the first one left behind
        with pytest.raises(ValueError, match="keeps what it computed of parameter 'weight'"):
            multiply(model=model, params=params, kind=kind, check_deterministic=check)


class Remembering(nn.Linear):
    """Keeps what it computes in its input, as a cache of keys and values does."""

    def forward(self, X: tuple[Tensor, SimpleNamespace]) -> Tensor:
        x, cache = X
        cache.past = [*getattr(cache, "past", []), super().forward(x)]
        return sum(cache.past)


@pytest.mark.parametrize("kind", [*KINDS, KFACLinearOperator, PerSampleGradientLinearOperator])
def test_inputs_that_the_model_changes(kind: type):
    data = [((x, SimpleNamespace()), y) for x, y in DATA]
    with pytest.raises(ValueError, match="input X that it changes, such as a cache"):
        multiply(model=Remembering(3, 3), data=data, kind=kind)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", [JacobianLinearOperator, TransposedJacobianLinearOperator])
def test_jacobians_of_memoized_parameters(kind: type, check: bool):
    model = Memoizing(functools.cache)
    with pytest.raises(ValueError, match="keeps what it computed of parameter 'weight'"):
        kind(model, list(model.parameters()), DATA, check_deterministic=check)


@pytest.mark.parametrize("check", [True, False])
def test_outputs_of_inputs_alone(check: bool):
    """They may have a graph that does not lead to any parameter."""
    model, data = Returns(lambda z: z), [(X.clone().requires_grad_(), None)]
    model.forward = lambda x: 2 * x
    with pytest.raises(ValueError, match="does not depend on any of the parameters"):
        JacobianLinearOperator(model, list(model.parameters()), data, check_deterministic=check)


def test_scripted_modules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net())
    with pytest.raises(TypeError, match=r"The model is TorchScript.*original module"):
        build(model=scripted)
    with pytest.raises(TypeError, match=r"module '1' is TorchScript.*original module"):
        build(model=nn.Sequential(nn.Identity(), scripted))


def test_random_closure():
    weight = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="different values for the same batch"):
        build(model=lambda x: (x + torch.randn_like(x)) @ weight, params=[weight])


def test_closure_of_computed_tensors():
    flat = torch.ones(12, requires_grad=True)
    weight, bias = flat[:9].view(3, 3), flat[9:]
    with pytest.raises(ValueError, match=r"\[0, 1\] of params are computed.*Pass the tensors that"):
        build(model=lambda x: x @ weight + bias, params=[weight, bias])
    build(model=lambda x: x @ flat[:9].view(3, 3) + flat[9:], params=[flat])


def test_parameters_of_eight_bits():
    params = {"weight": torch.ones(3, 3).to(torch.float8_e4m3fn)}
    with pytest.raises(TypeError, match=r"'weight' has dtype torch.float8_e4m3fn.*16 bits"):
        build(model=lambda p, x: x @ p["weight"].float(), params=params)


class Stream(IterableDataset):
    """Goes through its samples once."""

    def __init__(self):
        self._samples = iter([(torch.ones(3), 0)] * 4)

    def __iter__(self) -> Iterator:
        return self._samples


def test_exhausted_streams():
    with pytest.raises(ValueError, match=r"DataLoader\) yields no batch any more.*start anew"):
        build(data=DataLoader(Stream(), 2))
    operator = build(data=DataLoader(Stream(), 2), check_deterministic=False)
    operator @ torch.ones(operator.shape[1])
    with pytest.raises(ValueError, match="yields no batch any more"):
        operator @ torch.ones(operator.shape[1])


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
def test_random_models_are_no_fault_of_rules(kind: type):
    """Without the check at construction, too, the message says what is the matter."""
    model = net(nn.Dropout(0.5))
    with pytest.raises(NotImplementedError, match="two passes over one batch differ.*Dropout"):
        multiply(model=model, kind=kind, check_deterministic=False)


@pytest.mark.parametrize("name", ["1", "1.0"])
def test_batch_norm_in_train_mode(name: str):
    norm = nn.BatchNorm1d(4)
    model = net(norm if name == "1" else nn.Sequential(norm))
    match = rf"couples the samples.*'{name}'\).*EFLinearOperator.*model.eval"
    with pytest.raises(ValueError, match=match):
        build(model=model, kind=EFLinearOperator)
    for kind in (HessianLinearOperator, GGNLinearOperator, FisherMCLinearOperator):
        with pytest.warns(UserWarning, match=rf"module '{name}'\): the result depends on how"):
            build(model=model, kind=kind)
    with pytest.warns(UserWarning, match="the result depends on how"):
        JacobianLinearOperator(model, list(model.parameters()), DATA)


# --- derivatives that do not exist


class Opaque(torch.autograd.Function):
    """A sine whose backward is not differentiable, and does not say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].detach().cos()


class Once(Opaque):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class Exp(torch.autograd.Function):
    """Keeps its output outside of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = x.exp()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.y


class Swish(torch.autograd.Function):
    """Saves its input only; its backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s * (1 + x * (1 - s)))


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Apply(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@pytest.mark.parametrize("function", [Opaque, Once, Exp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_custom_functions(function: type, dtype: torch.dtype):
    data = [(x.to(dtype), y) for x, y in DATA]
    model = net(Apply(function)).to(dtype)
    with pytest.raises(RuntimeError, match=r"custom autograd.Function.*from PyTorch op"):
        multiply(model=model, data=data)
    multiply(model=net(Apply(Sine)).to(dtype), data=data)
    multiply(model=net(nn.ReLU(), Apply(Swish)).to(dtype), data=data)
    # the Gauss-Newton matrix needs the first derivative only, and Opaque's is linear in g
    if function is Opaque:
        v = torch.ones(sum(p.numel() for p in model.parameters()), dtype=dtype)
        expected = build(model=net(Apply(Sine)).to(dtype), data=data, kind=GGNLinearOperator) @ v
        found = build(model=model, data=data, kind=GGNLinearOperator) @ v
        torch.testing.assert_close(found, expected)


Terms = functools.partial(PerSampleGradientLinearOperator, terms="term")


@pytest.mark.parametrize("cache", ["auto", "none"])
def test_once_differentiable_functions(cache: str):
    """Gradients of samples need no second derivative, and no tangents."""
    model, other = net(Apply(Once)).double(), net(Apply(Sine)).double()
    other.load_state_dict(model.state_dict())
    empty = (torch.zeros(0, 3), torch.zeros(0).long())
    options = {"data": [(x.double(), y) for x, y in (empty, *DATA)], "cache": cache}
    for kind, terms in [
        (EFLinearOperator, "term"),
        (PerSampleGradientLinearOperator, "sample"),
        (PerSampleGradientLinearOperator, "term"),
    ]:
        found, expected = (
            build(model=m, kind=kind, terms=terms, **options) for m in (model, other)
        )
        v = torch.ones(found.shape[1], dtype=torch.float64)
        for _ in range(3):
            torch.testing.assert_close(found @ v, expected @ v)
        V = torch.stack([v, v.cumsum(0)], 1)
        torch.testing.assert_close(found @ V, expected @ V)
    for kind in (GGNLinearOperator, HessianLinearOperator):
        with pytest.raises(RuntimeError, match=r"custom autograd.Function.*from PyTorch op"):
            build(model=model, kind=kind, **options) @ v


@pytest.mark.parametrize("cut", [1, 5])
@pytest.mark.parametrize("kind", [GGNLinearOperator, HessianLinearOperator])
def test_first_samples_without_derivatives_choose_no_mode(kind: type, cut: int):
    """Where all derivatives vanish, a wrong mode looks like a right one."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4, bias=False), Apply(Once), nn.Linear(4, 3, bias=False)]
    model = nn.Sequential(*layers).double()
    x, y = X.double() * torch.tensor([0, 0, 0, 1, 1])[:, None], Y
    data = [(x, y)] if cut == 5 else [(x[:3], y[:3]), (x[3:], y[3:])]
    operator = build(model=model, data=data, kind=kind, loss=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(RuntimeError, match=r"custom autograd.Function.*from PyTorch op"):
        operator @ torch.ones(operator.shape[1], dtype=torch.float64)


def test_functions_that_modes_pass_over_do_not_agree_by_chance():
    for seed in range(40):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), Apply(Once), nn.Linear(5, 3))
        data = [(torch.randn(3, 4), torch.randint(3, (3,)))]
        operator = build(model=model, data=data, kind=GGNLinearOperator)
        with pytest.raises(RuntimeError, match=r"custom autograd.Function"):
            operator @ torch.ones(operator.shape[1])


class Sine(Opaque):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


def test_straight_through_estimators_are_taken_on_request():
    model = net(Apply(Round))
    assert multiply(model=model, autodiff="reverse").isfinite().all()


def test_gradient_that_does_not_exist():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.sqrt()

    both(
        lambda check: multiply(model=Root(), check_deterministic=check),
        ValueError,
        "gradient on batch 0 is not finite in parameter 'scale'",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_loss_that_is_not_finite_without_check(kind: type):
    both(
        lambda check: multiply(data=NAN, kind=kind, check_deterministic=check),
        ValueError,
        "loss on batch 1 is nan",
    )


def test_classes_that_are_masked_out_can_be_sampled_from():
    mask = torch.tensor([0.0, 0.0, -float("inf")])
    data = [(X, Y % 2)]
    product = multiply(
        model=Returns(lambda z: z + mask), data=data, kind=FisherMCLinearOperator, mc_samples=3
    )
    assert product.isfinite().all()


# --- losses

SOFT = [(X, torch.rand(5, 3).softmax(1))]
TOKENS = [(X, torch.zeros(5, 2).long())]


def dice(z: Tensor, y: Tensor) -> Tensor:
    return 1 - (z.sigmoid()[:, 0] * y).sum() / (z.sigmoid()[:, 0].sum() + y.sum())


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    return (z @ z.T).softmax(1).diagonal().sum()


@pytest.mark.parametrize(
    "loss, data, error, match",
    [
        (nn.CrossEntropyLoss(reduction="none"), DATA, ValueError, "'none'.*'sum' or 'mean'"),
        (lambda z, y: z.sum(), DATA, ValueError, "reduction='sum' or reduction='mean'"),
        (functools.partial(dice), DATA, ValueError, "does not say how it reduces"),
        ("loss", DATA, TypeError, "loss_func must be callable"),
        (nn.MSELoss(), [(X, Y)], ValueError, r"Batch 0: MSELoss.*\[5, 3\], got \[5\]"),
        (nn.BCEWithLogitsLoss(), [(X, Y)], ValueError, "BCEWithLogitsLoss needs a target of the"),
        (
            nn.BCEWithLogitsLoss(weight=torch.ones(5, 3)),
            [(X, X.sigmoid())],
            ValueError,
            r"weight of shape \[5, 3\] has a batch axis",
        ),
        (nn.CrossEntropyLoss(ignore_index=1), SOFT, ValueError, "probabilities, which cannot be"),
        (CE, TOKENS, ValueError, r"Batch 0: CrossEntropyLoss.*shape \[5\]; got .*\[5, 2\]"),
        (CE, [(X, Y.float())], ValueError, r"integer targets of shape \[5\]; got torch.float32"),
        (CE, [(X, None)], ValueError, "a NoneType"),
        (CE, [(X, Y + 1)], ValueError, "targets from 1 to 3, but the output has 3 classes"),
        (nn.NLLLoss(), [(X, Y - 1)], ValueError, "targets from -1 to 1"),
        (CE, [(X, torch.full((5,), -100))], ValueError, "no term.*ignored"),
        (nn.NLLLoss(ignore_index=2), [(X, 0 * Y + 2)], ValueError, "no term"),
    ],
)
def test_losses(loss: Any, data: list, error: type[Exception], match: str):
    both(
        lambda check: multiply(loss=loss, data=data, check_deterministic=check),
        error,
        match,
    )


@pytest.mark.parametrize(
    "loss, reduction, match",
    [
        (dice, "mean", "dice is not the mean of its samples' losses"),
        (contrastive, "sum", "contrastive is not the sum of its samples' losses"),
        (lambda z, y: z.square().sum(1), "sum", "must return a real scalar tensor"),
        (lambda z, y: z.square().sum() * 1j, "sum", "must return a real scalar tensor.*complex"),
        (lambda z, y: 1.0, "sum", "must return a real scalar tensor.*float"),
        (CE, "sum", "contradicts the loss's own, 'mean'"),
        (dice, "none", "'none', expected 'sum' or 'mean'"),
    ],
)
def test_reductions(loss: Any, reduction: str, match: str):
    both(
        lambda check: multiply(loss=loss, reduction=reduction, check_deterministic=check),
        ValueError,
        match,
    )


class WithLabels(nn.Module):
    """Returns its loss, as models of Hugging Face do that are given labels."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        return CE(self.inner(X["x"]), X["labels"]).unsqueeze(0)


def own_mean(z: Tensor, y: Tensor | None) -> Tensor:
    return z.mean()


def labeled(X: Tensor, Y: Tensor) -> dict[str, Tensor]:
    return {"x": X, "labels": Y}


ROWS_AND_TARGETS = "Batch 0: the model's output has a first axis of length 1, its target one of le"


@pytest.mark.parametrize(
    "kind",
    [
        HessianLinearOperator,
        GGNLinearOperator,
        EFLinearOperator,
        PerSampleGradientLinearOperator,
        functools.partial(KFACLinearOperator, fisher_type="empirical"),
    ],
)
def test_losses_as_outputs(kind: Callable):
    arguments = {"model": WithLabels(), "loss": own_mean, "reduction": "mean", "kind": kind}
    both(
        lambda check: multiply(data=[(labeled(X, Y), Y)], check_deterministic=check, **arguments),
        ValueError,
        ROWS_AND_TARGETS + "ngth 5.*row for each sample.*batch_size_fn",
    )
    # nor where the input does not say how many samples there are
    index = {**labeled(X, Y), "positions": torch.arange(3)}
    with pytest.raises(ValueError, match=ROWS_AND_TARGETS):
        multiply(data=[(index, {"y": Y, "weight": Y.float()})], **arguments)


def test_outputs_of_one_row():
    """A mean over samples may be a sample, of which there are as many as batches."""
    model, one = WithLabels(), [(X[n : n + 1], Y[n : n + 1]) for n in range(len(X))]
    arguments = {"model": model, "loss": own_mean, "reduction": "mean"}
    expected = multiply(model=model.inner, params=list(model.parameters()), data=one)
    found = [
        multiply(data=[(labeled(x, y), y) for x, y in one], **arguments),
        multiply(data=[(labeled(X, Y), None)], **arguments),
        multiply(data=[(labeled(X, Y), Y)], batch_size_fn=lambda X: 1, **arguments),
    ]
    for product in found:
        torch.testing.assert_close(product, expected)


def test_targets_that_are_no_samples():
    """Where input and output agree, the target may be a table."""
    table = torch.randn(9, 3)

    def distance(z: Tensor, y: Tensor) -> Tensor:
        return (z.unsqueeze(1) - y).square().sum((1, 2)).exp().sum()

    found, expected = (
        multiply(loss=loss, reduction="sum", data=[(0.1 * X, y)])
        for loss, y in ((distance, table), (lambda z, y: distance(z, table), None))
    )
    torch.testing.assert_close(found, expected)


def test_lengths_that_differ_between_batches():
    data = [(torch.randn(2, n), torch.randn(2, n)) for n in (3, 4)]
    scale = torch.ones(1, requires_grad=True)
    both(
        lambda check: multiply(
            model=lambda x: scale * x,
            params=[scale],
            loss=nn.MSELoss(),
            data=data,
            check_deterministic=check,
        ),
        ValueError,
        "Batch 1 has outputs with a last axis of length 4, others 3.*reduction='sum'",
    )
    multiply(model=lambda x: scale * x, params=[scale], loss=nn.MSELoss(reduction="sum"), data=data)


NEGATIVE = torch.tensor([1.0, -1.0, 1.0])


@pytest.mark.parametrize("options", [{"kind": FisherMCLinearOperator}, {"mc_samples": 2}])
@pytest.mark.parametrize(
    "loss, data, error, match",
    [
        (nn.NLLLoss(), DATA, NotImplementedError, "NLLLoss.*Supported are MSELoss"),
        (nn.L1Loss(), [(X, X)], NotImplementedError, "L1Loss is not known as"),
        (nn.CrossEntropyLoss(weight=NEGATIVE), DATA, ValueError, "negative curvature"),
        (nn.BCEWithLogitsLoss(weight=NEGATIVE), [(X, X.sigmoid())], ValueError, "negative curvat"),
        (nn.BCEWithLogitsLoss(), [(X, X + 3)], ValueError, r"outside \[0, 1\]"),
    ],
)
def test_sampling(options: dict, loss: Any, data: list, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        multiply(loss=loss, data=data, **{"kind": GGNLinearOperator} | options)


def test_gauss_newton_of_a_loss_without_second_derivative():
    with pytest.raises(NotImplementedError, match=r"MultiMarginLoss twice.*Write the loss"):
        multiply(loss=nn.MultiMarginLoss(), kind=GGNLinearOperator)


def test_gauss_newton_of_a_linear_loss_warns():
    model = nn.Sequential(net(), nn.LogSoftmax(1))
    with pytest.warns(UserWarning, match="NLLLoss is linear.*GGN is zero.*CrossEntropyLoss"):
        product = multiply(model=model, loss=nn.NLLLoss(), kind=GGNLinearOperator)
    assert not product.any()


# --- options


@pytest.mark.parametrize(
    "options, match",
    [
        ({"block_sizes": [2, 1]}, "add up to the number of parameters, 4"),
        ({"block_sizes": [4, 0]}, "positive integers"),
        ({"block_sizes": []}, r"add up to the number of parameters, 4; got \[\]"),
        ({"block_sizes": 4}, "positive integers.*got 4"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
        ({"chunk_size": 1.5}, "chunk_size must be an integer >= 1"),
        ({"cache": "always"}, r"cache must be 'auto', .*got 'always'"),
        ({"cache": -1}, "number of bytes, got -1"),
        ({"cache": True}, "number of bytes, got True"),
        ({"cache": "graph", "autodiff": "forward"}, "forward mode has no"),
        ({"autodiff": "jvp"}, "autodiff must be one of"),
        ({"kind": EFLinearOperator, "terms": "tokens"}, "terms must be one of .*got 'tokens'"),
        ({"kind": GGNLinearOperator, "mc_samples": -1}, "mc_samples must be an integer >= 0"),
        ({"kind": GGNLinearOperator, "mc_samples": 1.5}, "integer >= 0, got 1.5"),
        ({"kind": GGNLinearOperator, "mc_samples": True}, "integer >= 0, got True"),
        ({"kind": FisherMCLinearOperator, "mc_samples": 0}, "mc_samples must be an integer >= 1"),
        ({"kind": FisherMCLinearOperator, "seed": -1}, "seed must be an integer >= 0"),
    ],
)
def test_options(options: dict, match: str):
    with pytest.raises(ValueError, match=match):
        build(**options)


def test_forward_mode_of_a_closure():
    weight = torch.ones(3, 3)
    with pytest.raises(ValueError, match="closure cannot carry tangents"):
        build(model=lambda x: x @ weight, params=[weight], autodiff="forward")


SECOND_BATCHES = {
    "another dtype": (X[3:].double(), "dtype", "shape [2, 3], torch.float64"),
    "another width": (X[3:, :2], "shapes cannot", "shape [2, 2], torch.float32"),
    "no tensor": ("text", "must be Tensor", "str"),
}


@pytest.mark.parametrize(
    "kind", [HessianLinearOperator, PerSampleGradientLinearOperator, KFACLinearOperator]
)
@pytest.mark.parametrize("name", SECOND_BATCHES)
def test_errors_in_the_model_name_the_batch(name: str, kind: type):
    second, match, description = SECOND_BATCHES[name]
    for check in (True, False):
        with pytest.raises((RuntimeError, TypeError), match=match) as caught:
            multiply(data=[DATA[0], (second, Y[3:])], kind=kind, check_deterministic=check)
        assert caught.value.__notes__ == [f"(in batch 1 of the data, X of {description})"]


def test_errors_in_the_loss_name_the_batch():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.expand_as(output)).square().sum()

    wrong = [(X[:3], X[:3]), (X[3:], X)]
    with pytest.raises(RuntimeError, match="expand") as caught:
        multiply(loss=loss, data=wrong, reduction="sum")
    notes = caught.value.__notes__
    assert notes.count("(in batch 1 of the data, X of shape [2, 3], torch.float32)") == 1


def test_batch_size_fn_is_a_function():
    with pytest.raises(TypeError, match=r"batch_size_fn must be a function.*got int"):
        build(batch_size_fn=5)


@pytest.mark.parametrize("size", [None, "3", 2.5, -1, True, torch.ones(2)], ids=str)
def test_numbers_that_batch_size_fn_returns(size: Any):
    both(
        lambda check: multiply(batch_size_fn=lambda X: size, check_deterministic=check),
        ValueError,
        r"batch_size_fn\(X\) must be an integer >= 0, got",
    )


# --- vectors

D = sum(p.numel() for p in net().parameters())
NAMED = {name: torch.ones_like(p) for name, p in net().named_parameters()}


@pytest.mark.parametrize(
    "vector, error, match",
    [
        (np.ones(D + 1), ValueError, rf"shape \[{D + 1}\], expected \[{D}\] or \[{D}, K\]"),
        (torch.ones(D + 1), ValueError, rf"expected \[{D}\]"),
        (torch.ones(D, 1, 1), ValueError, "expected"),
        (np.ones((D, 1, 1)), ValueError, "expected"),
        (list(NAMED.values())[:-1], ValueError, "a list of 3 tensors.*expected 4"),
        ({"w": torch.ones(3)}, ValueError, r"missing \['0.weight'.*unknown \['w'\]"),
        (
            NAMED | {"0.bias": torch.ones(5)},
            ValueError,
            r"'0.bias' has shape \[5\], expected \[4\] or \[4, K\]",
        ),
        (
            NAMED | {"2.weight": NAMED["2.weight"].T},
            ValueError,
            r"'2.weight' has shape \[4, 3\], expected \[3, 4\] or \[3, 4, K\]",
        ),
        (
            {n: v.unsqueeze(-1) for n, v in NAMED.items()} | {"2.weight": torch.ones(4, 3, 1)},
            ValueError,
            r"'2.weight' has shape \[4, 3, 1\], expected \[3, 4\] or \[3, 4, K\]",
        ),
        (
            NAMED | {"2.bias": torch.ones(3, 2)},
            ValueError,
            "unequal numbers of columns: {'0.weight': 'one vector', .*'2.bias': 2}",
        ),
        (NAMED | {"0.bias": np.ones(4)}, TypeError, "'0.bias' is a ndarray"),
        (1j * np.ones(D), TypeError, "real, the vector complex"),
        (1j * torch.ones(D), TypeError, "real, the vector complex"),
        (np.array(["a"] * D), TypeError, "must be numbers"),
        (np.full(D, np.nan), ValueError, "NaN or infinite values in parameter '0.weight'"),
        (torch.full((D,), float("inf")), ValueError, "NaN or infinite"),
        (
            NAMED | {"2.bias": torch.tensor([0.0, float("nan"), 0.0])},
            ValueError,
            "in parameter '2.bias'",
        ),
    ],
)
def test_vectors(vector: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        build() @ vector


def test_output_vectors_have_no_structure():
    model = net()
    J = JacobianLinearOperator(model, list(model.parameters()), DATA)
    with pytest.raises(ValueError, match="one flat vector of length 15"):
        J.T @ NAMED
    with pytest.raises(ValueError, match=r"expected \[15\]"):
        J.T @ torch.ones(D)
    with pytest.raises(ValueError, match="has no loss"):
        J.gradient_and_loss()


@pytest.mark.parametrize("vector", [np.array([None] * D), {n: v * 1j for n, v in NAMED.items()}])
def test_vectors_of_other_kinds(vector: Any):
    with pytest.raises(TypeError, match=r"must be numbers|the vector complex"):
        build() @ vector


def test_unequal_numbers_of_columns():
    vector = {n: torch.ones(*v.shape, 2 + (n == "2.bias")) for n, v in NAMED.items()}
    with pytest.raises(ValueError, match=r"unequal numbers of columns.*'2.bias': 3"):
        build() @ vector


def test_data_that_changes_after_construction():
    model, data = net(), list(DATA)
    kinds = (JacobianLinearOperator, TransposedJacobianLinearOperator)
    operators = [kind(model, list(model.parameters()), data) for kind in kinds]
    data.append(DATA[0])
    for J in operators:
        with pytest.raises(
            RuntimeError, match=r"other batches than at construction.*of 15\. Build a new"
        ):
            J @ torch.ones(J.shape[1])


def test_wrong_number_of_samples_without_check():
    with pytest.raises(ValueError, match="num_data is 6, but data has 5 samples"):
        multiply(num_data=6, check_deterministic=False)


def test_tensors_without_values():
    with pytest.raises(ValueError, match="'0.weight' is on the meta device.*to_empty"):
        build(model=net().to("meta"))
    data = [(X.to("meta"), Y)]
    both(
        lambda check: multiply(data=data, check_deterministic=check),
        ValueError,
        "a tensor of shape \\[5, 3\\] on the meta device",
    )


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, KFACLinearOperator])
def test_parameters_of_another_shape(kind: type):
    model = net()
    operator = build(model, kind=kind)
    model[0].weight.data = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"'0.weight' has shape \[5, 3\]; it had \[4, 3\]"):
        operator @ torch.ones(operator.shape[1])


def test_complex_parameters_name_the_remedy():
    weight = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(TypeError, match="view_as_complex"):
        build(lambda x: (x * weight).real, params=[weight])


class Coupled(nn.Module):
    """Subtracts the batch's mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z - z.mean(0)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (1, 1, 3), (2, 3), (3, 2), (5,)])
@pytest.mark.parametrize("kind", [EFLinearOperator, PerSampleGradientLinearOperator])
def test_samples_that_interact_in_any_order_of_batches(kind: type, sizes: tuple[int, ...]):
    parts = list(zip(X.split(list(sizes)), Y.split(list(sizes)), strict=True))
    with pytest.raises(ValueError, match="depends on the other samples"):
        build(Coupled(), data=parts, kind=kind)
