"""Everything runs where the model is, also where that is not the CPU."""

from collections.abc import Callable

import problems
import pytest
import torch
from contract import ALL, matrix, pairs, vectors
from second_device import CPU, OTHER, place_of, put, second_device
from torch import Tensor

import curvlinops as C

pytestmark = pytest.mark.extensive

MODELS = ["cnn", "transformer-tied", "lstm-bidirectional", "embedding-bag-mean", "weight-norm"]
PROBLEMS = ["mlp-ce-all-mean", "tokens-bce-all-sum", "pinn", "dict-batch", "padding-idx", *MODELS]


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


@pytest.mark.parametrize("case, problem", pairs(list(ALL), PROBLEMS))
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


def _build(kind: type, device: str, **options) -> C.TorchLinearOperator:
    p = problems.make("cnn")
    put(p.data, CPU)
    operator = kind(p.model, p.loss, p.params, p.data, **options)
    return operator.to_device(device)


def _update(K: C.KFACLinearOperator) -> Tensor:
    K.update(problems.make("cnn").data[0], decay=0.5)
    return K.diagonal()


GGN = C.GGNLinearOperator, {}
ROWS = C.PerSampleGradientLinearOperator, {}
KFAC = C.KFACLinearOperator, {"fisher_type": "type-2"}
REDUCE = C.KFACLinearOperator, {"fisher_type": "empirical", "kfac_approx": "reduce"}
EKFAC = C.EKFACLinearOperator, {"fisher_type": "type-2"}
#: Quantities that operators compute.
QUANTITIES: dict[str, tuple[tuple[type, dict], Callable]] = {
    "gram": (ROWS, lambda A: A.gram()),
    "norms": (ROWS, lambda A: A.norms()),
    "variance": (ROWS, lambda A: A.variance()),
    "some rows": ((ROWS[0], {"subsampling": [3, 0]}), lambda A: A.dense()),
    "diagonal": ((C.GGNDiagonalLinearOperator, {}), lambda A: A.diagonal()),
    "gradient": (GGN, lambda A: torch.cat([g.flatten() for g in A.gradient_and_loss()[0]])),
    "eigenvalues": (GGN, lambda A: C.eigsh(A, k=3)[0]),
    "CG": (GGN, lambda A: C.CGInverseLinearOperator(A, damping=0.1) @ _ones(A)),
    "MINRES": (GGN, lambda A: C.MINRESInverseLinearOperator(_damped(A)) @ _ones(A)),
    "LSMR": (GGN, lambda A: C.LSMRInverseLinearOperator(_damped(A)) @ _ones(A)),
    "trace": (GGN, lambda A: C.hutchpp_trace(A, 12, seed=0)),
    "xdiag": (GGN, lambda A: C.xdiag(A, 12, seed=0)),
    "density": (GGN, lambda A: C.lanczos_approximate_spectrum(A, 5, seed=0)[1]),
    "KFAC trace": (KFAC, lambda K: K.trace()),
    "KFAC inverse": (KFAC, lambda K: K.inverse(damping=0.1) @ _ones(K)),
    "exact damping": (KFAC, lambda K: K.inverse(damping=0.1, use_exact_damping=True).diagonal()),
    "heuristic damping": (
        KFAC,
        lambda K: K.inverse(damping=0.1, use_heuristic_damping=True).diagonal(),
    ),
    "reduce": (REDUCE, lambda K: K.diagonal()),
    "update": (REDUCE, _update),
    "EKFAC": (EKFAC, lambda K: K.inverse(damping=0.1).diagonal()),
    "EKFAC root": (EKFAC, lambda K: (K.inverse(damping=0.1) ** 0.5).diagonal()),
}


def _ones(A: C.TorchLinearOperator) -> Tensor:
    return torch.ones(A.shape[1], dtype=A.torch_dtype, device=A.device)


def _damped(A: C.TorchLinearOperator) -> C.TorchLinearOperator:
    return A + 0.1 * C.IdentityLinearOperator(A.space)


@pytest.mark.parametrize("name", QUANTITIES)
def test_quantities(name: str):
    (kind, options), quantity = QUANTITIES[name]
    expected = quantity(_build(kind, "cpu", **options))
    with second_device():
        _agree(quantity(_build(kind, "cuda", **options)), expected)
