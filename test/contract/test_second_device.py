"""Everything runs where the model is, also where that is not the CPU."""

from tempfile import TemporaryDirectory

import problems
import pytest
import torch
from contract import ALL, matrix, pairs, vectors
from quantities import ALGORITHMS, METHODS, REDUCE
from second_device import CPU, OTHER, place_of, put, second_device
from torch import Tensor
from torch.utils._pytree import tree_leaves

import curvlinops as C
from curvlinops.influence import GradientStore, preconditioned, self_scores, top_scores

pytestmark = pytest.mark.extensive

PROBLEMS = ["mlp-ce-all-mean", "cnn", "transformer-tied"]
#: Models that make tensors of their own.
MODELS = ["tokens-bce-all-sum", "pinn", "dict-batch", "padding-idx", "lstm-bidirectional"]
MODELS += ["embedding-bag-mean", "weight-norm"]


def _agree(found: Tensor, expected: Tensor) -> None:
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


def test_devices_are_told_apart():
    with second_device():
        one, other = torch.ones(2, device="cpu"), torch.ones(2, device="cuda")
        assert (one.device, other.device, (other + 1).device) == (CPU, OTHER, OTHER)
        assert other.cpu().device == CPU and one.to("cuda").device == OTHER
        for call in (lambda: one + other, lambda: other.numpy(), lambda: torch.cat([other, one])):
            with pytest.raises((RuntimeError, TypeError), match="device"):
                call()
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(2, device="cuda", generator=torch.Generator("cpu"))
    assert place_of(torch.ones(2)) is None


@pytest.mark.parametrize(
    "case, problem", pairs(list(ALL), PROBLEMS) + pairs(["hessian", "gradients", "kfac"], MODELS)
)
def test_products(case: str, problem: str):
    operator = ALL[case].build(problems.make(problem))
    expected, v = matrix(operator), vectors(operator)
    with second_device():
        p = problems.make(problem)
        put(p.data, CPU)
        operator = ALL[case].build(p).to_device("cuda")
        with operator.linearized():
            for _ in range(2):
                _agree(matrix(operator), expected)
        assert (operator @ v.numpy()).shape == expected.shape[:1]


def _build(case: str, device: str, **options) -> C.TorchLinearOperator:
    p = problems.make("cnn")
    put(p.data, CPU)
    return ALL[case].build(p, **options).to_device(device)


def _update(K: C.KFACLinearOperator) -> Tensor:
    K.update(problems.make("cnn").data[0], decay=0.5)
    return K.diagonal()


def _rows(device: torch.device) -> C.PerSampleGradientLinearOperator:
    p = problems.make("cnn")
    put(p.data, CPU)
    return ALL["gradients"].build(p).to_device(device)


def _leading(K: C.EKFACLinearOperator) -> Tensor:
    rows = _rows(K.device)
    top = top_scores(rows, preconditioned(rows, K, rank=2), 2)
    return torch.cat([top.values, self_scores(rows, K).unsqueeze(0)])


def _stored(K: C.EKFACLinearOperator) -> Tensor:
    rows, scores = _rows(K.device), []
    for basis in (K, None):
        with TemporaryDirectory() as directory:
            scores.append(GradientStore.write(rows, directory, 2, basis).scores(rows))
    return torch.stack(scores)


QUANTITIES = METHODS | {
    "update": ("kfac", REDUCE, _update),
    "influence": ("ekfac", {"fisher_type": "empirical"}, _leading),
    "stored gradients": ("ekfac", {"fisher_type": "empirical"}, _stored),
}
QUANTITIES |= {
    name: ("ggn", {}, lambda G, compute=compute: compute(G.damped(0.1)))
    for name, compute in ALGORITHMS.items()
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities(name: str):
    case, options, quantity = QUANTITIES[name]
    expected = tree_leaves(quantity(_build(case, "cpu", **options)))
    with second_device():
        found = tree_leaves(quantity(_build(case, "cuda", **options)))
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Tensor):
                _agree(one, other)
            else:
                assert one == pytest.approx(other)
