"""Data: batches in containers and layouts of all kinds, and loaders."""

import multiprocessing
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import ALL, error, matrix, vectors
from tables import core
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import curvlinops
from curvlinops.support.pytree import leaves, map_leaves, move, select_samples

transformers = pytest.importorskip("transformers")
ModelOutput, BatchEncoding = transformers.utils.ModelOutput, transformers.BatchEncoding

N = 6


class Features(dict):
    """A dictionary that moves itself."""

    def to(self, device: torch.device) -> "Features":
        return Features({key: value.to(device) for key, value in self.items()})


@dataclass
class Output(ModelOutput):
    """An output of Hugging Face."""

    logits: Tensor
    cache: Any = None


@dataclass(frozen=True)
class Record:
    """A dataclass, with fields that are no tensors."""

    values: Tensor
    name: str = "name"
    mask: Tensor | None = None


Named = namedtuple("Named", ["values"])

#: Make a container of a tensor, and take it out again.
CONTAINERS: dict[str, tuple[Callable, Callable]] = {
    "dict": (lambda v: {"values": v}, lambda c: c["values"]),
    "dict that moves itself": (lambda v: Features(values=v), lambda c: c["values"]),
    "BatchEncoding": (lambda v: BatchEncoding({"values": v}), lambda c: c["values"]),
    "ModelOutput": (lambda v: Output(logits=v), lambda c: c.logits),
    "named tuple": (lambda v: Named(v), lambda c: c.values),
    "dataclass": (lambda v: Record(v), lambda c: c.values if c.mask is None else c.name),
    "nested": (lambda v: [Record({"a": (v,)})], lambda c: c[0].values["a"][0]),
}


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return X, torch.randint(2, (N,), generator=generator)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_inputs_and_targets(kind: str):
    """Of a loss that uses parameters, so that samples are taken out of the containers."""
    wrap, get = CONTAINERS[kind]
    model, (X, y) = net(), samples()
    params, data = list(model.parameters()), [(wrap(X), wrap(y))]

    def loss(output: Tensor, target: Any) -> Tensor:
        decay = sum(p.pow(4).sum() for p in params)
        return F.cross_entropy(output, get(target)) + 0.1 * decay

    arguments = lambda c: model(get(c)), loss, params, data
    rows = curvlinops.PerSampleGradientLinearOperator(*arguments, reduction="mean").dense()
    for n in range(N):
        value = loss(model(X[n : n + 1]), wrap(y[n : n + 1]))
        torch.testing.assert_close(rows[n], flat(torch.autograd.grad(value, params)))
    H = curvlinops.HessianLinearOperator(*arguments, reduction="mean")
    grads = torch.autograd.grad(loss(model(X), wrap(y)), params, create_graph=True)
    v = torch.ones(8).double()
    torch.testing.assert_close(H @ v, flat(torch.autograd.grad(flat(grads) @ v, params)))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_types_stay(kind: str):
    wrap, get = CONTAINERS[kind]
    X, _ = samples()
    whole = wrap(X)

    def cut(leaf: Any) -> Any:
        return leaf[2:4] if isinstance(leaf, Tensor) else leaf

    for part in (select_samples(whole, slice(2, 4), N), map_leaves(whole, cut)):
        assert type(part) is type(whole)
        torch.testing.assert_close(get(part), X[2:4])
    assert leaves(whole)[0] is X
    assert move(whole, torch.device("meta")) is not whole
    assert [x.is_meta for x in leaves(move(wrap(X), torch.device("meta")))] == [True]
    assert get(whole) is X


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (torch.ones(3, 2), torch.ones(3, 2)),  # not as many as samples
        (torch.tensor(1.0), torch.tensor(1.0)),
        (np.arange(N), np.array([1])),
        (list("abcdef"), ["b"]),
        ([{"boxes": torch.full((n, 4), n)} for n in range(N)], [{"boxes": torch.ones(1, 4)}]),
        ([{"a": torch.arange(N)}] * N, [{"a": torch.tensor([1])}] * N),
        ([torch.arange(N)] * N, [torch.tensor([1])] * N),
        ("abcdef", "abcdef"),
        (None, None),
    ],
)
def test_parts_of_a_sample(part: Any, expected: Any):
    found = select_samples(part, slice(1, 2), N)
    if leaves(expected):
        torch.testing.assert_close(found, expected, check_dtype=False)
    else:
        np.testing.assert_equal(found, expected)


def test_shared_tensors_stay_shared():
    x = torch.ones(N, 2, requires_grad=True)
    X, y = select_samples((BatchEncoding({"x": x}), Record(x)), slice(0, 1), N)
    assert X["x"] is y.values and y.values.requires_grad and y.values.is_leaf


def test_lists_of_things_for_each_sample_as_targets():
    model, (X, _) = net(), samples()
    targets = [{"mean": torch.full((n + 1,), float(n)).double()} for n in range(N)]

    def loss(output: Tensor, target: list) -> Tensor:
        pairs = zip(output, target, strict=True)
        return sum((z[0] - t["mean"]).square().sum() + z[1] ** 4 for z, t in pairs)

    rows = curvlinops.PerSampleGradientLinearOperator(
        model, loss, list(model.parameters()), [(X, targets)], reduction="sum"
    ).dense()
    z = model(X).detach()
    slopes = torch.stack(
        [2 * torch.arange(1, N + 1) * (z[:, 0] - torch.arange(N)), 4 * z[:, 1] ** 3], 1
    )
    expected = torch.cat([(slopes[:, :, None] * X[:, None]).flatten(1), slopes], 1)
    torch.testing.assert_close(rows, expected)


# --- layouts


#: Batches cut from a tensor with 12 rows and 5 columns.
CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda base: base[:6, 1:],
    "one column": lambda base: base[:, 2:3].expand(12, 4),
    "transposed": lambda base: base.view(4, 15).T[:6],
    "repeated": lambda base: base[1, :4].expand(6, 4),
    "odd address": lambda base: base.view(-1)[1:25].view(6, 4),
    "one sample": lambda base: base[:1, 1:],
    "one entry": lambda base: base[2:3, 1:2],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", CUTS)
def test_batches_in_any_layout(name: str, dtype: torch.dtype):
    """Two draws of the first batch are compared bit by bit."""
    torch.manual_seed(0)
    X = CUTS[name]((3 * torch.rand(12, 5)).to(dtype))
    linear = nn.Linear(X.shape[1], 2).double()
    y = torch.randint(2, (len(X), 2))[:, 0]

    def model(params: dict[str, Tensor], X: Tensor) -> Tensor:
        return torch.func.functional_call(linear, params, X.double())

    arguments = model, nn.CrossEntropyLoss(), dict(linear.named_parameters())
    found, expected = (
        curvlinops.GGNLinearOperator(*arguments, data)
        for data in ([(X, y)], [(X.clone(memory_format=torch.contiguous_format), y.clone())])
    )
    torch.testing.assert_close(matrix(found), matrix(expected), rtol=1e-12, atol=0)


# --- loaders whose batches are read by processes of their own


class Samples(Dataset):
    """Samples that are made from their indices, in the process that reads them."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.arange(index, index + 3).sin(), index % 2


#: Solvers, which linearize, and products, which do not.
USES: dict[str, Callable[[curvlinops.TorchLinearOperator], Tensor]] = {
    "product": lambda A: A @ vectors(A),
    "eigsh": lambda A: curvlinops.eigsh(A, k=2).eigenvalues,
    "CG": lambda A: curvlinops.CGInverseLinearOperator(A.damped(1.0)) @ vectors(A),
}


@pytest.mark.parametrize(
    "persistent, case",
    core(
        [(False, "hessian"), (True, "hessian"), (True, "gradients"), (False, "kfac")],
        product([False, True], ["ggn", "fisher"]),
    ),
)
def test_workers(persistent: bool, case: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def build(**options) -> curvlinops.TorchLinearOperator:
        data = DataLoader(Samples(), batch_size=4, **options)
        return ALL[case].operator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)

    # a worker that hangs is an error
    A = build(num_workers=2, persistent_workers=persistent, timeout=60)
    for use in USES.values() if ALL[case].square else [USES["product"]]:
        assert error(use(A), use(build())) <= 1e-5
    if not persistent:
        assert not multiprocessing.active_children()


def test_workers_of_a_pass_that_fails():
    """They are stopped, and the next pass has all data."""
    model = nn.Linear(3, 2)
    data = DataLoader(Samples(), batch_size=4, num_workers=2, timeout=60)
    A = curvlinops.HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), data
    )
    expected, seen = A @ vectors(A), []

    def fail(module: nn.Module, inputs: tuple) -> None:
        seen.append(inputs)
        if len(seen) == 2:
            raise ZeroDivisionError

    with model.register_forward_pre_hook(fail), pytest.raises(ZeroDivisionError):
        A @ vectors(A)
    assert torch.equal(A @ vectors(A), expected)
    assert not multiprocessing.active_children()
