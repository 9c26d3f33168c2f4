"""Each bad input is answered by an error that names the culprit and the remedy."""

import collections
import functools
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Using
from small import CE, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import curvlinops
from curvlinops import (
    CGInverseLinearOperator,
    EFLinearOperator,
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
KINDS = [HessianLinearOperator, GGNLinearOperator, FisherMCLinearOperator, EFLinearOperator]
JACOBIANS = [JacobianLinearOperator, TransposedJacobianLinearOperator]
Error = type[Exception]


def net(*layers: nn.Module) -> nn.Module:
    return mlp(*layers).float()


def build(
    model: Any = None,
    loss: Any = CE,
    params: Any = None,
    data: Any = DATA,
    kind: Callable = HessianLinearOperator,
    **options: Any,
) -> Any:
    model = net() if model is None else model
    params = list(model.parameters()) if params is None else params
    losses = [] if kind in JACOBIANS else [loss]
    return kind(model, *losses, params, data, **options)


def multiply(**arguments: Any) -> Any:
    operator = build(**arguments)
    return operator @ torch.ones(operator.shape[1])


def refused(error: Error, match: str, **arguments: Any) -> None:
    """Expect the error at construction, and without the check there, at the first product."""
    for check in (True, False):
        with pytest.raises(error, match=match):
            multiply(check_deterministic=check, **arguments)


# --- parameters

shared = net()
EXPIRED, LAZY = shared.parameters(), nn.parameter.UninitializedParameter()
list(EXPIRED)
TIED = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
TIED[1].weight = TIED[0].weight
DIFFERENT = {"0.weight": torch.zeros(3, 3), "1.weight": torch.ones(3, 3)}
FLAT = torch.ones(12, requires_grad=True)
WEIGHT, BIAS = FLAT[:9].view(3, 3), FLAT[9:]
COMPLEX = torch.ones(3, 2, dtype=torch.complex64)
EIGHT_BITS = torch.ones(3, 3).to(torch.float8_e4m3fn)


def linear(params: dict[str, Tensor], X: Tensor) -> Tensor:
    return X @ params["w"]


PARAMETERS: list[tuple[Any, Any, Error, str]] = [
    (shared, [], ValueError, "params is empty.*pass a list"),
    (shared, {}, ValueError, "params is empty"),
    (shared, EXPIRED, ValueError, "used up; pass a list"),
    (shared, shared[0].weight, TypeError, "must be a list of tensors or a dictionary"),
    (shared, set(shared.parameters()), TypeError, "a set, whose order is arbitrary"),
    (shared, dict.fromkeys(shared.parameters()).keys(), TypeError, "a set, whose order is arb"),
    (shared, [shared[0].weight, 1.0], TypeError, "Entry 1 of params is a float"),
    (shared, [shared[0].weight, torch.ones(3)], ValueError, r"Entry 1 of params.*\[3\].*not a"),
    (shared, [shared[0].weight] * 2, ValueError, "'0.weight' occurs twice"),
    (lambda x: x, [X, X], ValueError, "'0' occurs twice|'1' occurs twice"),
    (linear, {"w": X, "v": X}, ValueError, "occurs twice"),
    (nn.BatchNorm1d(3), {"running_mean": X[0]}, ValueError, "'running_mean' .* a buffer"),
    (shared, {"weight": X}, ValueError, "'weight' in params is unknown.*mean '0.weight'"),
    (nn.ModuleDict({str(i): net() for i in range(9)}), {"x": X}, ValueError, "and 26 more"),
    (shared, [shared[0].weight.data], ValueError, r"list\(model.parameters\(\)\).*nor param.data"),
    (shared, CE, TypeError, r"Pass list\(model.parameters\(\)\). The Jacobian takes no loss"),
    (lambda x: x, {"w": X}, TypeError, r"is called as f\(params, X\): too many positional"),
    (CE, [X], ValueError, "CrossEntropyLoss, which has no parameters. The model is the first"),
    (shared, {"0.bias": torch.ones(3)}, ValueError, r"'0.bias'.*shape \[3\].*\[4\]"),
    (linear, {"w": torch.ones(3, 2).long()}, TypeError, "'w' has dtype torch.int64"),
    (linear, {"w": COMPLEX}, TypeError, "'w' has dtype torch.complex64.*view_as_complex"),
    (linear, {"w": EIGHT_BITS}, TypeError, r"'w' has dtype torch.float8_e4m3fn.*16 bits"),
    (linear, {"w": X, "v": X.to("meta")}, ValueError, r"several devices, \['cpu', 'meta'\].*Move"),
    (net().to("meta"), None, ValueError, "'0.weight' is on the meta device.*to_empty"),
    ("model", [X], TypeError, "model_func must be a Module or a function"),
    (nn.LazyLinear(3), None, ValueError, r"\['weight', 'bias'\] are not initialized.*Run the"),
    (lambda x: x, [LAZY], ValueError, r"\['0'\] are not initialized"),
    (TIED, DIFFERENT, ValueError, r"'0.weight' and '1.weight'.*one tied parameter"),
    (lambda x: x @ WEIGHT + BIAS, [WEIGHT, BIAS], ValueError, r"\[0, 1\] of params are computed"),
]


@pytest.mark.parametrize("model, params, error, match", PARAMETERS)
def test_parameters(model: Any, params: Any, error: Error, match: str):
    with pytest.raises(error, match=match):
        build(model=model, params=params)


# --- data


class Augmented(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        return X[n] + 0.1 * torch.randn(3), Y[n]


class Stream(IterableDataset):
    """Goes through its samples once."""

    def __init__(self):
        self._samples = iter([(torch.ones(3), 0)] * 4)

    def __iter__(self) -> Iterator:
        return self._samples


class Wrapped:
    """Yields the batches of a loader."""

    def __init__(self, loader: DataLoader):
        self.loader = loader

    def __iter__(self) -> Iterator:
        return iter(self.loader)


SHUFFLED = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True)
WRAP, NO_PAIR = r"pass \[\(X, y\)\]", r"data is a pair.*pass \[\(X, y\)\]"
SHIFTED = r"Batch 0 of the data is a dict, expected a pair.*transformers\.problem.*be shifted by on"
BATCHES: list[tuple[Any, Error, str]] = [
    ([], ValueError, "data is empty"),
    ((b for b in DATA), ValueError, "one-shot iterator.*DataLoader or a list"),
    (zip([X], [Y], strict=True), ValueError, "one-shot iterator"),
    (X, TypeError, WRAP),
    ({"X": X}, TypeError, WRAP),
    ((X, Y), ValueError, NO_PAIR),
    ([X, Y], ValueError, NO_PAIR),
    (([X, X], Y), ValueError, NO_PAIR),
    (({"x": X}, None), ValueError, NO_PAIR),
    (3, TypeError, "must be an iterable over pairs"),
    (TensorDataset(X, Y), TypeError, r"DataLoader\(dataset, batch_size\)"),
    ([{"X": X}], ValueError, SHIFTED),
    ([(X, Y, Y)], ValueError, r"tuple of length 3.*a pair \(X, y\). Pass .*X, y, _ in"),
    ([X], ValueError, "Batch 0 of the data is a Tensor"),
    (SHUFFLED, RuntimeError, "data shuffles.*list.loader.*shuffle=False"),
    (Wrapped(SHUFFLED), RuntimeError, "data shuffles.*list.loader.*shuffle=False"),
    (DataLoader(Augmented(), 2), RuntimeError, r"augmented at random.*list\(loader\)"),
]


@pytest.mark.parametrize("data, error, match", BATCHES)
def test_data(data: Any, error: Error, match: str):
    with pytest.raises(error, match=match):
        build(data=data)


def test_number_of_samples_is_not_evident():
    model = Using(lambda s, X: s.inner(X["x"]) + X["shift"], inner=net())
    data = [({"x": X, "shift": torch.ones(1, 3)}, Y)]
    with pytest.raises(ValueError, match=r"batch 0 is not evident.*\[1, 5\].*batch_size_fn"):
        build(model=model, data=data, num_data=5)
    build(model=model, data=data, num_data=5, batch_size_fn=lambda X: len(X["x"]))


@pytest.mark.parametrize("check", [True, False])
def test_streams_that_are_exhausted(check: bool):
    """The check at construction takes two batches, the first product all of them."""
    operator = build(data=DataLoader(Stream(), 2), check_deterministic=check)
    if not check:
        operator @ torch.ones(operator.shape[1])
    with pytest.raises(ValueError, match=r"DataLoader\) yields no batch any more"):
        operator @ torch.ones(operator.shape[1])


@pytest.mark.parametrize("kind", JACOBIANS)
def test_data_that_changes_after_construction(kind: type):
    data = list(DATA)
    J = build(data=data, kind=kind)
    data.append(DATA[0])
    with pytest.raises(RuntimeError, match=r"other batches than at const.*of 15\. Build a new"):
        J @ torch.ones(J.shape[1])


# --- models


class Encoding(collections.UserDict):
    """A batch as Hugging Face's tokenizers return it."""

    def __getattr__(self, name: str) -> Any:
        if name in self.data:
            return self.data[name]
        raise AttributeError


class TakesIds(nn.Embedding):
    """A language model with keyword arguments."""

    def forward(self, input_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids.reshape(-1, input_ids.shape[-1])).sum(1)


def returns(wrap: Callable[[Tensor], Any]) -> nn.Module:
    return Using(lambda s, x: wrap(s.inner(x)), inner=net())


def lookup(table: nn.Module) -> nn.Module:
    return Using(lambda s, x: s.table((x > 0).long()).reshape(len(x), -1, 3).sum(1), table=table)


def reentrant() -> nn.Module:
    def function(s: Using, x: Tensor) -> Tensor:
        return checkpoint(s.inner, s.stem(x), use_reentrant=True)

    return Using(function, stem=nn.Linear(3, 3), inner=net())


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(net())


NOISE = Using(lambda s, x: x + torch.randn_like(x))
MODELS: list[tuple[nn.Module, Error, str]] = [
    (net(nn.Dropout(0.5)), RuntimeError, r"different values for the same batch.*model.eval\(\)"),
    (net(nn.Sequential(nn.Identity(), NOISE)), RuntimeError, "Pass noise in X"),
    (reentrant(), RuntimeError, "use_reentrant=False"),
    (lookup(nn.Embedding(2, 3, max_norm=1.0)), ValueError, "'table'.*max_norm=None"),
    (lookup(nn.Embedding(2, 3, scale_grad_by_freq=True)), ValueError, "'table'.*by_freq=False"),
    (returns(lambda z: {"logits": z}), TypeError, "returned dict on batch 0.*logits"),
    (returns(lambda z: (z, z)), TypeError, r"tuple on batch 0.*self.inner\(X\)\[0\].*transformers"),
    (returns(lambda z: z.sum()), TypeError, r"shape \[\].*batch axis first"),
    (returns(lambda z: z.argmax(1)), TypeError, "torch.int64"),
    (returns(lambda z: z.detach()), ValueError, "does not depend on any of the parameters"),
    (scripted(), TypeError, "The model is TorchScript.*original module"),
    (nn.Sequential(scripted()), TypeError, "module '0' is TorchScript.*original module"),
]


@pytest.mark.parametrize("model, error, match", MODELS)
def test_models(model: nn.Module, error: Error, match: str):
    with pytest.raises(error, match=match):
        build(model=model)


def weighted(function: Callable, **parts: Any) -> nn.Module:
    return Using(function, weight=torch.ones(3, 3), bias=torch.ones(3), **parts)


def hidden() -> nn.Module:
    """Uses its parameter by a plain list."""
    model = weighted(lambda s, x: x @ s.aliases[0] + s.bias)
    model.aliases = [model.weight]
    return model


def memoizing() -> nn.Module:
    """Computes a function of a parameter once and for all."""
    model = weighted(lambda s, x: x @ s.root() + s.bias)
    model.root = functools.cache(lambda: model.weight.tanh())
    return model


class Remembering(nn.Linear):
    """Keeps what it computes in its input, as a cache of keys and values does."""

    def forward(self, X: tuple[Tensor, SimpleNamespace]) -> Tensor:
        x, cache = X
        cache.past = [*getattr(cache, "past", []), super().forward(x)]
        return sum(cache.past)


INPUTS = [((x, SimpleNamespace()), y) for x, y in DATA]
ONCE = torch.ones(3, 3)
CLOSURE = {"model": lambda x: x @ ONCE, "params": [torch.ones(3, 3)]}
#: Models whose parameters are no constants, though they seem to be.
SEEMING_CONSTANTS: list[tuple[dict[str, Any], str]] = [
    ({"model": hidden()}, "'weight' by a reference that is not registered"),
    (CLOSURE, "must use the very tensors in params"),
    ({"model": memoizing()}, "keeps what it computed of parameter 'weight'"),
    ({"model": Remembering(3, 3), "data": INPUTS}, "input X that it changes, such as"),
]


@pytest.mark.parametrize("arguments, match", SEEMING_CONSTANTS)
@pytest.mark.parametrize(
    "kind", [HessianLinearOperator, EFLinearOperator, JacobianLinearOperator, KFACLinearOperator]
)
def test_parameters_are_not_taken_for_constants(arguments: dict, match: str, kind: type):
    if arguments.get("data") is INPUTS and kind in JACOBIANS:
        return  # their data is not used before
    refused(ValueError, match, kind=kind, **arguments)


def test_outputs_of_inputs_alone():
    """Outputs may have a graph that does not lead to any parameter."""
    model = Using(lambda s, x: 2 * x, inner=net())
    data = [(X.clone().requires_grad_(), None)]
    match = "does not depend on any of the parameters"
    refused(ValueError, match, model=model, data=data, kind=JacobianLinearOperator)


def test_dictionaries_that_are_keyword_arguments():
    ids = torch.tensor([[0, 1], [2, 3]])
    data = [(Encoding(input_ids=ids), torch.tensor([0, 1]))]
    with pytest.raises(AttributeError) as caught:
        build(model=TakesIds(4, 3), data=data, batch_size_fn=lambda X: 2)
    note = r"X, Encoding of shape \[2, 2\], torch.int64, as one argument\).*transformers\.problem"
    assert re.search(note, "".join(caught.value.__notes__))


NAMED_PARAMS = dict(shared.named_parameters())
SIGNATURES = [
    (lambda p, X: shared(X), list(NAMED_PARAMS.values())),
    (nn.Bilinear(3, 3, 3), None),
]


@pytest.mark.parametrize("model, params", SIGNATURES)
def test_functions_of_other_arguments(model: Callable, params: Any):
    with pytest.raises(TypeError, match="positional argument") as caught:
        build(model=model, params=params)
    assert "the model gets X, Tensor of shape [3, 3]" in "".join(caught.value.__notes__)


# --- losses

SCALE = torch.ones(1, requires_grad=True)
LENGTHS = {
    "model": lambda x: SCALE * x,
    "params": [SCALE],
    "data": [(torch.randn(2, n), torch.randn(2, n)) for n in (3, 4)],
}
SMOOTHED = nn.CrossEntropyLoss()
SMOOTHED.label_smoothing = -0.5
ROOT = Using(lambda s, x: x * s.scale.sqrt(), scale=torch.zeros(3))
BATCH_WEIGHT = nn.BCEWithLogitsLoss(weight=torch.ones(5, 3))
BCE, MSE, SOFT, NAN = (
    nn.BCEWithLogitsLoss(),
    nn.MSELoss(),
    torch.rand(5, 3).softmax(1),
    X * torch.nan,
)


def dice(z: Tensor, y: Tensor) -> Tensor:
    return 1 - (z.sigmoid()[:, 0] * y).sum() / (z.sigmoid()[:, 0].sum() + y.sum())


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    return (z @ z.T).softmax(1).diagonal().sum()


def dropped(z: Tensor, y: Tensor) -> Tensor:
    return F.dropout(z, 0.5).square().sum()


#: A loss and a target, refused with a ValueError.
LOSSES: list[tuple[Any, Any, str]] = [
    (nn.CrossEntropyLoss(reduction="none"), Y, "'none'.*'sum' or 'mean'"),
    (lambda z, y: z.sum(), Y, "reduction='sum' or reduction='mean'"),
    (functools.partial(dice), Y, "does not say how it reduces"),
    (functools.partial(F.mse_loss, reduction="batchmean"), X, "'batchmean'"),
    (MSE, Y, r"Batch 0: MSELoss.*\[5, 3\], got \[5\]"),
    (MSE, X + 1j, "real target"),
    (MSE, X.numpy(), r"Pass torch.as_tensor\(y\)"),
    (BCE, Y, "BCEWithLogitsLoss needs a target of the"),
    (BATCH_WEIGHT, SOFT, r"weight of shape \[5, 3\] has a batch axis"),
    (nn.CrossEntropyLoss(torch.ones(2)), Y, r"weight of shape \[2\]"),
    (nn.CrossEntropyLoss(torch.ones(1, 3)), SOFT, "weight of shape"),
    (nn.NLLLoss(torch.ones(4)), Y, r"weight of shape \[4\]"),
    (SMOOTHED, Y, "label_smoothing must be from 0 to 1"),
    (nn.CrossEntropyLoss(ignore_index=1), SOFT, "probabilities, which cannot be"),
    (CE, torch.zeros(5, 2).long(), r"Batch 0: CrossEntropyLoss.*shape \[5\]; got .*\[5, 2\]"),
    (CE, Y.float(), r"targets of shape \[5\]; got torch.float32.*Pass y.long"),
    (CE, Y[:, None], r"got .*\[5, 1\]. Pass y.squeeze\(1\)."),
    (CE, SOFT.long(), r"got torch.int64 of shape \[5, 3\]. Pass y.argmax\(1\) for one-hot"),
    (CE, Y.numpy(), r"a ndarray. Pass torch.as_tensor\(y\)"),
    (CE, None, "a NoneType"),
    (CE, Y + 1, "targets from 1 to 3, but there are 3 classes"),
    (nn.NLLLoss(), Y - 1, "targets from -1 to 1"),
    (CE, torch.full((5,), -100), "no term.*ignored"),
    (nn.NLLLoss(ignore_index=2), 0 * Y + 2, "no term"),
]


@pytest.mark.parametrize("loss, target, match", LOSSES)
def test_losses_and_targets(loss: Any, target: Any, match: str):
    refused(ValueError, match, loss=loss, data=[(X, target)])


def preferred(z: Tensor, y: Tensor) -> Tensor:
    """Compares pairs of rows."""
    return -F.logsigmoid(z[:4:2] - z[1:4:2]).mean()


#: Losses that are functions, their reduction, and the message of a ValueError.
FUNCTIONS: list[tuple[Callable, str, str]] = [
    (dice, "mean", "dice is not the mean of its samples' losses"),
    (contrastive, "sum", "contrastive is not the sum of its samples' losses"),
    (preferred, "mean", r"3 rows of a batch's output.*let the model return \[N, 2\]"),
    (lambda z, y: z.square().sum(1), "sum", "must return a real scalar tensor"),
    (lambda z, y: z.square().sum() * 1j, "sum", "must return a real scalar tensor.*complex"),
    (lambda z, y: 1.0, "sum", "must return a real scalar tensor.*float"),
    (dropped, "sum", "random ones"),
    (CE, "sum", "contradicts the loss's own, 'mean'"),
    (dice, "none", "'none', expected 'sum' or 'mean'"),
]


def _backward_first(z: Tensor, y: Tensor) -> Tensor:
    value = CE(z, y)
    value.backward(retain_graph=True)
    return value


def _backward_of_a_step(z: Tensor, y: Tensor) -> Tensor:
    """As in a training step."""
    value = CE(z, y)
    value.backward()
    return value.detach()


def _backward_by_function(z: Tensor, y: Tensor) -> Tensor:
    value = CE(z, y)
    torch.autograd.backward([value], create_graph=True)
    return value


BACKWARD = [_backward_first, _backward_of_a_step]
if not torch.__version__.startswith("2.10."):  # there, no mode sees this function
    BACKWARD.append(_backward_by_function)
FUNCTIONS += [(function, "mean", r"calls backward\(\).*autograd.grad") for function in BACKWARD]


@pytest.mark.parametrize("loss, reduction, match", FUNCTIONS)
def test_functions_as_losses(loss: Callable, reduction: str, match: str):
    refused(ValueError, match, loss=loss, reduction=reduction)


LENGTH = "Batch 1 has outputs with a last axis of length 4, others 3.*reduction='sum'"
SIZE = r"batch_size_fn\(X\) must be an integer >= 0, got"
#: Arguments, refused with a ValueError.
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"loss": MSE, **LENGTHS}, LENGTH),
    ({"model": ROOT}, "gradient on batch 0 is not finite in parameter 'scale'"),
    *(({"data": [DATA[0], (NAN, Y)], "kind": kind}, "loss on batch 1 is nan") for kind in KINDS),
    (
        {"data": [(NAN, Y), DATA[0]], "loss": lambda z, y: CE(z, y), "reduction": "mean"},
        "loss on batch 0 is nan",
    ),
    ({"num_data": 6}, "num_data is 6, but data has 5 samples"),
    ({"data": [DATA[0], {"X": X}]}, "Batch 1 of the data is a dict, expected a pair"),
    ({"data": [(X.to("meta"), Y)]}, r"a tensor of shape \[5, 3\] on the meta device"),
    *(({"batch_size_fn": lambda X, n=n: n}, SIZE) for n in (None, 2.5, -1, True)),
]


@pytest.mark.parametrize("arguments, match", ARGUMENTS)
def test_arguments_and_batches(arguments: dict, match: str):
    refused(ValueError, match, **arguments)


def test_sums_of_unequal_lengths_are_taken():
    multiply(loss=nn.MSELoss(reduction="sum"), **LENGTHS)


def own_mean(z: Tensor, y: Tensor | None) -> Tensor:
    return z.mean()


#: Returns its loss, as models of Hugging Face do that are given labels.
WITH_LABELS = Using(lambda s, X: CE(s.inner(X["x"]), X["labels"]).unsqueeze(0), inner=net())
LABELED = {"x": X, "labels": Y}
OF_OUTPUTS = {"model": WITH_LABELS, "loss": own_mean, "reduction": "mean"}
ROWS_AND_TARGETS = "Batch 0: the model's output has a first axis of length 1, its target one of le"


@pytest.mark.parametrize(
    "kind",
    [
        *(HessianLinearOperator, EFLinearOperator, PerSampleGradientLinearOperator),
        functools.partial(KFACLinearOperator, fisher_type="empirical"),
    ],
)
def test_losses_as_outputs(kind: Callable):
    match = ROWS_AND_TARGETS + "ngth 5.*row for each sample.*batch_size_fn"
    refused(ValueError, match, data=[(LABELED, Y)], kind=kind, **OF_OUTPUTS)
    # nor where the input does not say how many samples there are
    index = LABELED | {"positions": torch.arange(3)}
    with pytest.raises(ValueError, match=ROWS_AND_TARGETS):
        multiply(data=[(index, {"y": Y, "weight": Y.float()})], kind=kind, **OF_OUTPUTS)


@pytest.mark.parametrize(
    "target, options", [(None, {}), (Y, {"batch_size_fn": lambda X: 1})], ids=["none", "one"]
)
def test_losses_as_outputs_count_as_one_sample(target: Tensor | None, options: dict):
    """With one batch, the mean over its samples."""
    params = list(WITH_LABELS.parameters())
    expected = multiply(model=WITH_LABELS.inner, params=params, data=[(X, Y)])
    found = multiply(data=[(LABELED, target)], **OF_OUTPUTS, **options)
    torch.testing.assert_close(found, expected)


NEGATIVE = torch.tensor([1.0, -1.0, 1.0])
SAMPLED: list[tuple[Any, Tensor, Error, str]] = [
    (nn.NLLLoss(), Y, NotImplementedError, "NLLLoss.*Supported are MSELoss"),
    (nn.L1Loss(), X, NotImplementedError, "L1Loss is not known as"),
    (nn.CrossEntropyLoss(weight=NEGATIVE), Y, ValueError, "negative curvature"),
    (nn.BCEWithLogitsLoss(weight=NEGATIVE), SOFT, ValueError, "negative curvat"),
    (nn.BCEWithLogitsLoss(), X + 3, ValueError, r"outside \[0, 1\]"),
]


@pytest.mark.parametrize("options", [{"kind": FisherMCLinearOperator}, {"mc_samples": 2}])
@pytest.mark.parametrize("loss, target, error, match", SAMPLED)
def test_sampling(options: dict, loss: Any, target: Tensor, error: Error, match: str):
    with pytest.raises(error, match=match):
        multiply(loss=loss, data=[(X, target)], **{"kind": GGNLinearOperator} | options)


def test_losses_without_second_derivatives():
    with pytest.raises(NotImplementedError, match=r"MultiMarginLoss twice.*Write the loss"):
        multiply(loss=nn.MultiMarginLoss(), kind=GGNLinearOperator)


class Margin(nn.Module):
    """A loss with a head of its own, and a temperature, as ArcFace has them."""

    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.head, self.temperature = nn.Linear(3, 3), nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return CE(self.head(output) * self.temperature, target)


MARGIN, SMALL = Margin(), net()
LEARNED: dict[str, tuple[Any, Any, str]] = {
    "list": (MARGIN, [*SMALL.parameters(), *MARGIN.parameters()], "Entry 4"),
    "dictionary": (MARGIN, dict(SMALL.named_parameters()) | {"h": MARGIN.head.bias}, "'h'"),
    "function": (lambda z, y: MARGIN(z, y), [SMALL[0].weight, MARGIN.head.weight], "Entry 1"),
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_the_loss(kind: type, name: str):
    loss, params, culprit = LEARNED[name]
    match = f"{culprit} .*For a parameter of the loss, let a Module hold the model"
    with pytest.raises(ValueError, match=match):
        build(SMALL, loss, params, kind=kind, reduction="mean")
    # as the message says
    whole = Using(lambda s, x: s.m.head(s.net(x)) * s.m.temperature, net=SMALL, m=MARGIN)
    gradient, loss_value = build(whole, CE, kind=HessianLinearOperator).gradient_and_loss()
    expected = MARGIN(SMALL(X), Y)
    torch.testing.assert_close(loss_value, expected.detach())
    torch.testing.assert_close(gradient, [*torch.autograd.grad(expected, [*whole.parameters()])])


def selective() -> nn.Module:
    """Layers whose products are kept, and all else computed again in the backward pass."""

    def policy(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        is_kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def function(s: Using, x: Tensor) -> Tensor:
        return checkpoint(s.inner, s.stem(x), use_reentrant=False, context_fn=contexts)

    return Using(function, stem=nn.Linear(3, 3), inner=net())


@pytest.mark.parametrize(
    "kind", [HessianLinearOperator, GGNLinearOperator, EFLinearOperator, KFACLinearOperator]
)
def test_selective_checkpoints(kind: type):
    A = build(selective(), kind=kind)
    match = "selective activation.*without context_fn"
    with pytest.raises(NotImplementedError, match=match), A.linearized():
        A @ torch.ones(A.shape[1])


def test_selective_checkpoints_of_one_backward_pass():
    torch.manual_seed(0)
    model = selective()
    plain = Using(lambda s, x: s.inner(s.stem(x)), stem=model.stem, inner=model.inner)
    torch.testing.assert_close(build(model).gradient_and_loss(), build(plain).gradient_and_loss())
    if hasattr(torch.utils.checkpoint, "_NoopSaveInputs"):
        return  # older versions of PyTorch have no forward mode in checkpoints
    for kind in (GGNLinearOperator, EFLinearOperator):
        A, B = build(model, kind=kind), build(plain, kind=kind)
        v = torch.randn(A.shape[1])
        torch.testing.assert_close(A @ v, B @ v)


# --- options

WEIGHTS = [torch.ones(3, 3)]
RANDOM = {"model": lambda x: (x + torch.randn_like(x)) @ WEIGHTS[0], "params": WEIGHTS}
DROPPED = {"loss": dropped, "reduction": "sum", "data": [(X[:1], Y[:1])]}
OTHERS: list[tuple[dict[str, Any], Error, str]] = [
    ({"data": X, "progressbar": Y}, TypeError, WRAP),
    ({"batch_size_fn": 5}, TypeError, "batch_size_fn must be a function.*got int"),
    ({"loss": "loss"}, TypeError, "loss_func must be callable"),
    ({"loss": nn.HuberLoss}, TypeError, "the class HuberLoss; pass an instance"),
    (RANDOM, RuntimeError, "different values for the same batch"),
    (DROPPED, RuntimeError, "The model or the loss gives different values"),
]


@pytest.mark.parametrize("options, error, match", OTHERS)
def test_options(options: dict, error: Error, match: str):
    with pytest.raises(error, match=match):
        build(**options)


# --- X of another type than the model

ALL_KINDS = [*KINDS, *JACOBIANS, PerSampleGradientLinearOperator, KFACLinearOperator]
_CONVERT = " Parameters are of torch.float32: pass X.to(dtype)."
TYPES: dict[str, tuple[Any, str, str]] = {
    "an array": (
        X.numpy(),
        "ndarray",
        " Where the model takes tensors, pass X as torch.as_tensor(X).",
    ),
    "float64": (X.double(), "Tensor of shape [5, 3], torch.float64", _CONVERT),
    "integers": (X.long(), "Tensor of shape [5, 3], torch.int64", ""),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("wrong, described, remedy", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("check", [True, False])
def test_types_of_inputs(kind: type, wrong: Any, described: str, remedy: str, check: bool):
    with pytest.raises((TypeError, RuntimeError)) as caught:
        multiply(data=[(wrong, Y)], kind=kind, check_deterministic=check)
    note = f"(in batch 0 of the data; the model gets X, {described}, as one argument)"
    assert caught.value.__notes__ == [note + remedy]


@pytest.mark.parametrize("converted", [X.numpy(), X.double()], ids=["array", "float64"])
def test_types_that_the_model_converts(converted: Any):
    model = Using(lambda s, X: s.inner(torch.as_tensor(X).float()), inner=net())
    expected = multiply(model=model, data=[(X, Y)])
    torch.testing.assert_close(multiply(model=model, data=[(converted, Y)]), expected)


# --- errors name the batch

SECOND_BATCHES = {
    "another dtype": (X[3:].double(), "dtype", "Tensor of shape [2, 3], torch.float64"),
    "another width": (X[3:, :2], "shapes cannot", "Tensor of shape [2, 2], torch.float32"),
    "no tensor": ("text", "must be Tensor", "str"),
}


@pytest.mark.parametrize(
    "kind", [HessianLinearOperator, PerSampleGradientLinearOperator, KFACLinearOperator]
)
@pytest.mark.parametrize("name", SECOND_BATCHES)
@pytest.mark.parametrize("check", [True, False])
def test_errors_in_the_model_name_the_batch(check: bool, name: str, kind: type):
    second, match, description = SECOND_BATCHES[name]
    with pytest.raises((RuntimeError, TypeError), match=match) as caught:
        multiply(data=[DATA[0], (second, Y[3:])], kind=kind, check_deterministic=check)
    note = f"(in batch 1 of the data; the model gets X, {description}, as one argument)"
    assert caught.value.__notes__ == [note + _CONVERT * (name == "another dtype")]


def test_errors_in_the_loss_name_the_batch():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target.expand_as(output)).square().sum()

    with pytest.raises(RuntimeError, match="expand") as caught:
        multiply(loss=loss, data=[(X[:3], X[:3]), (X[3:], X)], reduction="sum")
    notes = caught.value.__notes__
    assert sum("in batch 1 of the data" in note for note in notes) == 1


def test_errors_of_losses_on_single_samples_have_a_note():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() if len(output) > 1 else output[1].sum()

    with pytest.raises(IndexError) as caught:
        build(loss=loss, reduction="sum")
    assert "was evaluated on one sample" in "".join(caught.value.__notes__)
    weighted = functools.partial(F.mse_loss, weight=torch.rand(5, 3))
    with pytest.raises(ValueError, match="Batch 0: .*mse_loss was.*such as a weight for each samp"):
        build(kind=EFLinearOperator, loss=weighted, data=[(X, X)], reduction="mean")


# --- vectors

D = sum(p.numel() for p in net().parameters())
NAMED = {name: torch.ones_like(p) for name, p in net().named_parameters()}
COLUMNS = {name: v.unsqueeze(-1) for name, v in NAMED.items()}
UNEQUAL = "unequal numbers of columns"
VECTORS: list[tuple[Any, Error, str]] = [
    (np.ones(D + 1), ValueError, rf"shape \[{D + 1}\], expected \[{D}\] or \[{D}, K\]"),
    (torch.ones(D + 1), ValueError, rf"expected \[{D}\]"),
    (torch.ones(D, 1, 1), ValueError, "expected"),
    (np.ones((D, 1, 1)), ValueError, "expected"),
    (list(NAMED.values())[:-1], ValueError, "a list of 3 tensors.*expected 4"),
    ({"w": torch.ones(3)}, ValueError, r"missing \['0.weight'.*unknown \['w'\]"),
    (NAMED | {"0.bias": X[:, 0]}, ValueError, r"'0.bias' .* \[5\], expected \[4\] or \[4, K\]"),
    (NAMED | {"2.weight": torch.ones(4, 3)}, ValueError, r"\[4, 3\], expected \[3, 4\] or \[3, 4,"),
    (COLUMNS | {"2.weight": torch.ones(4, 3, 1)}, ValueError, r"'2.weight' has shape \[4, 3, 1\]"),
    (NAMED | {"2.bias": X[:3, :2]}, ValueError, f"{UNEQUAL}: .*'0.weight': 'one vector', .*s': 2"),
    (COLUMNS | {"2.bias": torch.ones(3, 2)}, ValueError, f"{UNEQUAL}.*'2.bias': 2"),
    (NAMED | {"0.bias": np.ones(4)}, TypeError, "'0.bias' is a ndarray"),
    (1j * np.ones(D), TypeError, "real, the vector complex"),
    (1j * torch.ones(D), TypeError, "real, the vector complex"),
    ({n: v * 1j for n, v in NAMED.items()}, TypeError, "the vector complex"),
    (np.array(["a"] * D), TypeError, "must be numbers"),
    (np.array([None] * D), TypeError, "must be numbers"),
    (np.full(D, np.nan), ValueError, "NaN or infinite values in parameter '0.weight'"),
    (torch.full((D,), float("inf")), ValueError, "NaN or infinite"),
    (NAMED | {"2.bias": torch.tensor([0, torch.nan, 0])}, ValueError, "in parameter '2.bias'"),
]


@pytest.mark.parametrize("vector, error, match", VECTORS)
def test_vectors(vector: Any, error: Error, match: str):
    with pytest.raises(error, match=match):
        build() @ vector


@pytest.mark.parametrize("wrong", ["abc", b"abc", None, {1, 2}, net()], ids=repr)
def test_what_is_no_vector(wrong: Any):
    H, match = build(), f"Cannot multiply with a {type(wrong).__name__}. Pass a numpy array"
    calls = [lambda: H @ wrong, lambda: wrong @ H, lambda: H.dot(wrong), lambda: H.matvec(wrong)]
    for call in [*calls, lambda: H * wrong]:
        with pytest.raises(TypeError, match=match):
            call()


def test_jacobian_that_is_not_finite():
    root = returns(lambda z: F.threshold(z, -1, 0).sqrt())
    for p in root.parameters():
        nn.init.zeros_(p)
    for operator in (J := build(root, data=[(X, None)], kind=JacobianLinearOperator), J.T):
        with pytest.raises(ValueError, match="JacobianLinearOperator is not finite"):
            operator @ torch.ones(operator.shape[1])


MASKED = returns(lambda z: z + torch.tensor([0.0, 0.0, -torch.inf]))


@pytest.mark.parametrize("kind", JACOBIANS)
def test_jacobian_of_data_that_are_not_finite(kind: type):
    """Outputs may be infinite, as those of classes that are masked out are."""
    with pytest.raises(ValueError, match="The model's output on batch 1 has NaN"):
        build(data=[DATA[0], (NAN, Y)], kind=kind)
    assert multiply(model=MASKED, kind=kind).isfinite().all()


def test_classes_that_are_masked_out_can_be_sampled_from():
    options = {"kind": FisherMCLinearOperator, "mc_samples": 3}
    assert multiply(model=MASKED, data=[(X, Y % 2)], **options).isfinite().all()


def test_output_vectors_have_no_structure():
    J = build(kind=JacobianLinearOperator)
    with pytest.raises(ValueError, match="one flat vector of length 15"):
        J.T @ NAMED
    with pytest.raises(ValueError, match=r"expected \[15\]"):
        J.T @ torch.ones(D)
    with pytest.raises(ValueError, match="has no loss"):
        J.gradient_and_loss()


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator, KFACLinearOperator])
def test_parameters_of_another_shape(kind: type):
    model = net()
    operator = build(model, kind=kind)
    model[0].weight.data = torch.randn(5, 3)
    with pytest.raises(ValueError, match=r"'0.weight' is now of shape \[5, 3\].*it was .*\[4, 3\]"):
        operator @ torch.ones(operator.shape[1])


# --- calls of operators

H, K = build(), build(kind=KFACLinearOperator)
TWICE, ONES = H + 2.0 * H, torch.ones(D)
KFAC_OF_DATA = functools.partial(
    KFACLinearOperator.from_state_dict, {}, shared, list(shared.parameters()), DATA
)
ARGUMENT_ORDER = (
    r"from_state_dict\(\) takes the state, model_func, loss_func, params and data.*'dat"
)
PRECONDITIONER = r"preconditioner has shape \[31\].*DiagonalLinearOperator\(d\).*lambda v: d \* v"
CG, NEUMANN = CGInverseLinearOperator, curvlinops.NeumannInverseLinearOperator(H.damped(10.0))
USES: list[tuple[Callable, Error, str]] = [
    (lambda: H.trace(), AttributeError, r"no 'trace'. Only operators with structure.*xtrace\(A"),
    (lambda: H.to("cpu"), AttributeError, r"HessianLinearOperator has no 'to'.*to_device\(device"),
    (lambda: H.double(), AttributeError, "Convert the model"),
    (lambda: H.eigenvalues, AttributeError, r"eigsh\(A, k\)"),
    (lambda: H.eigsh(), AttributeError, r"Write curvlinops.eigsh"),
    (lambda: H.spectrum(), AttributeError, r"lanczos_approximate_spectrum\(A, ncv\)"),
    (lambda: H.hvp(ONES), AttributeError, "Write A @ x"),
    (lambda: curvlinops.Hessian, AttributeError, "Did you mean HessianLinearOperator.$"),
    (lambda: curvlinops.GGN, AttributeError, "mean GGNDiagonalLinearOp.*, GGNLinearOp"),
    (lambda: curvlinops.KFAC, AttributeError, "Did you .*KFACLinearOperator, KFACType"),
    (lambda: curvlinops.hvp, AttributeError, "no attribute 'hvp'. Write A @ x."),
    (lambda: H.dense(), AttributeError, r"A.to_dense\(\) is the matrix"),
    (lambda: curvlinops.by_layer(H, "xtrace"), TypeError, "function of an operator.*got str"),
    (lambda: curvlinops.eigsh(H, k=2, which="SM"), ValueError, "which='SM'.*which='SA' finds"),
    (lambda: H.to_device("gpu"), ValueError, "Device 'gpu' cannot be used here. There are .'cpu'"),
    (lambda: K.inverse(0.1).to_device("cuda:99"), ValueError, "'cuda:99' cannot be used here"),
    (lambda: H @ [[1.0], [1.0, 2.0]], ValueError, "Got a list of 2 tensors as vector"),
    (lambda: H @ [x.tolist() for x in shared.parameters()], TypeError, "is a list, expected a ten"),
    (lambda: curvlinops.loss_along(H, ONES, 1.0), ValueError, r"steps must be a list.*shape \[\]"),
    (lambda: H.todense(), AttributeError, r"to_dense\(\)"),
    (lambda: K.inv(), AttributeError, r"KFACLinearOperator has no 'inv'.*A.inverse\(\)"),
    (lambda: TWICE.gradient_and_loss(), AttributeError, "SumLinearOperator has no.*add up"),
    (lambda: H[0], TypeError, r"SubmatrixLinearOperator\(A, rows, columns\)"),
    (lambda: list(H), TypeError, "has no entries"),
    (lambda: H**-1, ValueError, "exponent must be an integer >= 0, got -1. Solve with CGInv"),
    (lambda: K.update(X, Y), ValueError, r"as in K.update\(\(X, y\)\), got Tensor"),
    (lambda: K.update([DATA[0]] * 3), ValueError, "update.. takes a batch.*, got list"),
    (KFAC_OF_DATA, TypeError, ARGUMENT_ORDER),
    (lambda: CG(H, preconditioner=ONES), ValueError, PRECONDITIONER),
    (lambda: NEUMANN @ ONES, curvlinops.DivergenceError, "Choose a scale below two over"),
]


@pytest.mark.parametrize("use, error, match", USES)
def test_uses(use: Callable, error: Error, match: str):
    with pytest.raises(error, match=match):
        use()


def test_a_matrix_is_added_as_the_message_says():
    matrix = np.arange(31.0**2).reshape(31, 31)
    with pytest.raises(TypeError, match=r"KroneckerProductLinearOperator\(torch.as_tensor\(M\)\)"):
        H + matrix
    total = H + curvlinops.KroneckerProductLinearOperator(torch.as_tensor(matrix))
    expected = H.to_dense().double() + torch.as_tensor(matrix)
    torch.testing.assert_close(total.to_dense(), expected)


def test_functions_are_no_methods():
    functions = {name: getattr(curvlinops, name) for name in curvlinops.__all__}
    functions = {n: f for n, f in functions.items() if inspect.isfunction(f)}
    for name in [
        n for n, f in functions.items() if next(iter(inspect.signature(f).parameters)) == "A"
    ]:
        with pytest.raises(AttributeError, match=f"Write curvlinops.{name}"):
            getattr(H, name)


def test_unknown_names():
    with pytest.raises(ModuleNotFoundError, match="No module named 'curvlinops.unknown'"):
        importlib.import_module("curvlinops.unknown")
    with pytest.raises(ImportError, match="cannot import name 'Unknown'"):
        exec("from curvlinops import Unknown")
    with pytest.raises(AttributeError, match="'curvlinops' has no attribute 'Unknown'"):
        _ = curvlinops.Unknown


def test_what_completes():
    code = """if True:
        import sys
        import curvlinops
        assert "curvlinops.training" not in sys.modules
        names = [name for name in dir(curvlinops) if name not in curvlinops.__all__]
        assert all(hasattr(curvlinops, name) for name in names)
        print(*names, *dir(curvlinops.kfac_utils), curvlinops.integrations.transformers.problem)
        sys.modules["transformers"] = None
        import curvlinops.integrations.trainer
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split()[:6] == [
        *("__version__", "influence", "integrations", "kfac_utils", "landscape", "training")
    ]
    assert "nn" not in found.stdout.split()
    assert "needs transformers: pip install 'curvlinops[transformers]'" in found.stderr
