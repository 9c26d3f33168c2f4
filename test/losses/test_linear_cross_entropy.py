"""Cross-entropy of a linear head in chunks: all matrices are those of the logits."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from contract import ALL, error, vectors
from live_bytes import LiveBytes
from models import Using
from problems import Problem
from tables import core, in_turns
from torch import Tensor, nn

from curvlinops import GGNLinearOperator, HessianLinearOperator, LinearCrossEntropyLoss

V, D = 11, 4


def hidden(s: Using, X: Tensor) -> Tensor:
    return torch.tanh(s.layer(s.table(X).cumsum(1)))


def logits(s: Using, X: Tensor) -> Tensor:
    return s.head(hidden(s, X)).movedim(-1, 1)


def layers(tied: bool) -> dict[str, nn.Module]:
    """Return the layers of a model of tokens; a head that is tied to the table has no bias."""
    torch.manual_seed(0)
    head = nn.Linear(D, V, bias=not tied)
    made = {"table": nn.Embedding(V, D), "layer": nn.Linear(D, D), "head": head}
    if tied:
        head.weight = made["table"].weight
    return made


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return batches of sequences, with an ignored position."""
    generator = torch.Generator().manual_seed(1)
    X, y = (torch.randint(V, (3, 5), generator=generator) for _ in range(2))
    y[0, 3] = -100
    return [(X[:2], y[:2]), (X[2:], y[2:])]


def problems(tied: bool, with_head: bool, reduction: str = "mean") -> tuple[Problem, Problem]:
    """Return a problem of hidden states, and the same of logits."""
    made = {}
    for name, module in layers(tied).items():
        made[name] = module.double()
    params = list(nn.ModuleDict(made).parameters()) if with_head else [*made["layer"].parameters()]
    losses: list[tuple[Callable, Any]] = [
        (hidden, LinearCrossEntropyLoss(made["head"], reduction=reduction, chunk_size=3)),
        (logits, nn.CrossEntropyLoss(reduction=reduction)),
    ]
    found = [
        Problem(Using(function, **made), loss, params, batches(), True, reduction)
        for function, loss in losses
    ]
    return found[0], found[1]


BOTH = [False, True]
#: Operators, their options, and whether they are defined if the head is differentiated.
OPERATORS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "hessian": ("hessian", {}, True),
    "ggn": ("ggn", {}, True),
    "rows": ("gradients", {}, True),
    "fisher of samples": ("fisher", {"terms": "sample"}, True),
    "fisher": ("fisher", {}, False),
    "rows of terms": ("gradients", {"terms": "term"}, False),
    "mc": ("mc", {"mc_samples": 2}, False),
    "kfac": ("kfac", {}, False),
    "ekfac, empirical": ("ekfac", {"fisher_type": "empirical"}, False),
    "ggn-diagonal, mc": ("ggn-diagonal", {"mc_samples": 2}, False),
}


@pytest.mark.parametrize(
    "name, with_head, tied, reduction",
    core(
        in_turns(product(OPERATORS, BOTH, BOTH), ["mean", "sum", "sum", "mean"]),
        product(OPERATORS, BOTH, BOTH, ["mean", "sum"]),
    ),
)
def test_operators(name: str, with_head: bool, tied: bool, reduction: str):
    case, options, is_defined = OPERATORS[name]
    one, other = problems(tied, with_head, reduction)
    if with_head and not is_defined:
        with pytest.raises(ValueError, match="Leave the head .* out of params"):
            A = ALL[case].build(one, **options)
            A @ vectors(A)
        return
    A, B = ALL[case].build(one, **options), ALL[case].build(other, **options)
    v, columns = vectors(B), vectors(B, 3)
    assert error(A @ v, B @ v) <= 1e-12
    assert error(A @ columns, B @ columns) <= 1e-12
    with A.linearized():
        for _ in range(2):
            assert error(A @ columns, B @ columns) <= 1e-12
    (gradient, loss), (expected, value) = A.gradient_and_loss(), B.gradient_and_loss()
    torch.testing.assert_close(loss, value, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_and_derivatives(dtype: torch.dtype, bias: bool):
    """As a module, in a function that is differentiated three times."""
    torch.manual_seed(0)
    head, (X, y) = nn.Linear(D, V, bias).to(dtype), (torch.randn(2, 5, D), batches()[0][1])
    X = X.to(dtype).requires_grad_()
    leaves, results = [X, *head.parameters()], []
    v = [torch.randn(x.shape).to(dtype) for x in leaves]
    wide = torch.promote_types(dtype, torch.float32)

    def plain(X: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(X).to(wide).flatten(0, 1), y.flatten())

    for function in (LinearCrossEntropyLoss(head, chunk_size=3), plain):
        value = function(X, y)
        first = torch.autograd.grad(value.square(), leaves, create_graph=True)
        second = torch.autograd.grad(first, leaves, v, create_graph=True)
        third = torch.autograd.grad([x.square().sum() for x in second], leaves)
        results.append([value, *first, *second, *third])
    tolerance = 1e-11 if dtype is torch.float64 else 0.05
    for one, other in zip(*results, strict=True):
        assert one.dtype is other.dtype
        assert error(one.detach(), other.detach()) <= tolerance


@pytest.mark.parametrize(
    "kind, with_head",
    core(
        [(HessianLinearOperator, True), (GGNLinearOperator, False)],
        product([HessianLinearOperator, GGNLinearOperator], BOTH),
    ),
)
def test_memory_is_that_of_a_chunk(kind: type, with_head: bool):
    size, length = 20000, 200
    model = Using(lambda s, x: s.layer(x), layer=nn.Linear(2, 2), head=nn.Linear(2, size))
    data = [(torch.randn(1, length, 2), torch.randint(size, (1, length)))]
    params = list((model if with_head else model.layer).parameters())
    A = kind(model, LinearCrossEntropyLoss(model.head, chunk_size=5), params, data)
    v = vectors(A)
    peaks = LiveBytes().peaks(lambda: A @ v)
    with A.linearized():
        peaks += LiveBytes().peaks(lambda: A @ v)
    assert max(peaks) <= 4 * size * length / 2  # half of the logits


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no layer": (lambda: LinearCrossEntropyLoss(torch.ones(2, 3)), TypeError, "must be a torch.nn"),
    "reduction": (
        lambda: LinearCrossEntropyLoss(nn.Linear(2, 3), reduction="none"), ValueError, "'none'",
    ),
    "chunk": (
        lambda: LinearCrossEntropyLoss(nn.Linear(2, 3), chunk_size=0), ValueError, "positive",
    ),
    "logits": (lambda: hessian(nn.Linear(2, 3), 5), ValueError, "inputs .N, ..., 5. of the head"),
    "targets": (
        lambda: hessian(nn.Linear(2, 5), 5, torch.tensor([7, 0])), ValueError, "from 0 to 7",
    ),
    "shape": (
        lambda: hessian(nn.Linear(2, 5), 5, torch.zeros(2, 1).long()), ValueError, "shape .2.; got",
    ),
    "probabilities": (
        lambda: hessian(nn.Linear(2, 5), 5, torch.zeros(2)), ValueError, "integer targets",
    ),
    "type-2": (
        lambda: ALL["kfac"].build(problems(False, False)[0], fisher_type="type-2").trace(),
        NotImplementedError,
        "no closed-form square root of its Hessian. Sample labels",
    ),
}  # fmt: skip


def hessian(model: nn.Module, width: int, y: Tensor | None = None) -> HessianLinearOperator:
    y = torch.zeros(2).long() if y is None else y
    loss = LinearCrossEntropyLoss(nn.Linear(width, 6))
    return HessianLinearOperator(model, loss, list(model.parameters()), [(torch.ones(2, 2), y)])


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        call()


def temperature(head: nn.Linear) -> None:
    head.register_forward_hook(lambda m, i, o: o / 3.0)


def rescaled_inputs(head: nn.Linear) -> None:
    head.register_forward_pre_hook(lambda m, i: (i[0] * 2,))


def soft_cap(head: nn.Linear) -> None:
    head.forward = lambda z: 5 * torch.tanh(nn.functional.linear(z, head.weight, head.bias) / 5)


def rounded(head: nn.Linear) -> None:
    head.forward = lambda z: nn.functional.linear(
        z, head.weight.to(torch.bfloat16).to(z), head.bias
    )


def logger(head: nn.Linear) -> None:
    head.register_forward_hook(lambda m, i, o: None)


def pruned(head: nn.Linear) -> None:
    nn.utils.prune.random_unstructured(head, "weight", 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("change", [temperature, rescaled_inputs, soft_cap, rounded])
def test_heads_that_are_more_than_a_product(change: Callable, kind: type, dtype: torch.dtype):
    made = {name: module.to(dtype) for name, module in layers(False).items()}
    change(made["head"])
    args = Using(hidden, **made), LinearCrossEntropyLoss(made["head"])
    with pytest.raises(ValueError, match="the head returns others"):
        kind(*args, list(made["layer"].parameters()), batches()) @ torch.ones(20)
    X, y = batches()[0]
    with pytest.raises(ValueError, match="the head returns others"):  # in training, too
        args[1](args[0](X), y)


@pytest.mark.parametrize("change", [logger, pruned])
def test_heads_with_hooks_that_change_nothing(change: Callable):
    made = {name: module.double() for name, module in layers(False).items()}
    change(made["head"])
    losses = (hidden, LinearCrossEntropyLoss(made["head"])), (logits, nn.CrossEntropyLoss())
    found = [
        HessianLinearOperator(Using(f, **made), loss, [*made["layer"].parameters()], batches())
        for f, loss in losses
    ]
    assert error(found[0].to_dense(), found[1].to_dense()) <= 1e-12
