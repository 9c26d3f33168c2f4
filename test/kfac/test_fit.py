"""Fits of Kronecker products: against dense references, the closest product, and the likelihood."""

from dataclasses import replace
from itertools import product

import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from problems import Problem
from tables import core, in_turns
from torch import Tensor, nn

from curvlinops import EKFACLinearOperator, KFACLinearOperator, load, write_factors

FITS = ["frobenius", "kl", "shampoo"]
MODELS = [
    "mlp-ce-sum", "cnn", "segmentation", "transformer", "transformer-tied", "lstm", "used-twice",
    "padding-idx", "embedding-bag-mean", "subset", "dict-batch-padding-idx", "conv1d",
]  # fmt: skip


def build(
    p: Problem, fit: str, reduce: bool = False, joint: bool = False, cls: type = KFACLinearOperator,
    **options: object,
) -> KFACLinearOperator:  # fmt: skip
    """KFAC, with the gradients of the loss."""
    options["kfac_approx"] = "reduce" if reduce else "expand"
    options |= {"separate_weight_and_bias": not joint, "check_deterministic": False}
    return p.build(cls, fisher_type="empirical", fit=fit, **options)


@pytest.mark.parametrize(
    "name, fit, reduce, joint",
    core(
        in_turns(product(MODELS, FITS), [False, True], [True, False]),
        product(MODELS, FITS, [False, True], [False, True]),
    ),
)
def test_layers(name: str, reduce: bool, joint: bool, fit: str):
    p = problems.make(name)
    expected = kfac_reference.kfac(p, "empirical", reduce=reduce, joint=joint, fit=fit)
    assert error(matrix(build(p, fit, reduce, joint)), expected) <= max(p.tolerance, 1e-9)


def net(seed: int = 0) -> Problem:
    """A net with more samples than parameters of a layer, whose blocks have full rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    return Problem.on(model.double(), [torch.randn(n, 3).double() for n in (50, 30)], nn.MSELoss())


def blocks(p: Problem, dense: Tensor) -> list[Tensor]:
    """The diagonal blocks of the parameters."""
    sizes = [param.numel() for param in p.params]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [dense[e - n : e, e - n : e] for e, n in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("reduce", [False, True])
def test_converges_to_the_closest_product(reduce: bool):
    """That is the first singular pair of the rearranged block (Van Loan and Pitsianis)."""
    p = net()
    truth = blocks(p, reference.empirical_fisher(p, terms="sample"))
    found = blocks(p, matrix(build(p, "frobenius", reduce, steps=60)))
    for param, F, K in zip(p.params, truth, found, strict=True):
        o, i = param.shape
        pairs = F.reshape(o, i, o, i).permute(0, 2, 1, 3).reshape(o * o, i * i)
        U, S, V = torch.linalg.svd(pairs, full_matrices=False)
        closest = torch.kron((S[0] * U[:, 0]).reshape(o, o), V[0].reshape(i, i))
        assert error(K, closest) <= 1e-9


def test_divergence_falls_to_a_stationary_point():
    p = net()
    truth = blocks(p, reference.empirical_fisher(p, terms="sample"))

    def divergences(steps: int) -> Tensor:
        fit = {"fit": "kl", "steps": steps} if steps else {"fit": "kfac"}
        found = blocks(p, matrix(build(p, **fit)))
        traces = [torch.linalg.solve(K, F).trace() for K, F in zip(found, truth, strict=True)]
        logdets = [torch.logdet(K) for K in found]
        return torch.stack(traces) + torch.stack(logdets)

    values = torch.stack([divergences(steps) for steps in (0, 1, 2, 3, 60)])
    assert bool((values.diff(dim=0) < 1e-9).all())
    # at the stationary point, each factor is the most likely one given the other
    found = build(p, "kl", steps=60)
    operator = build(p, "kl", steps=61)
    assert error(matrix(operator), matrix(found)) <= 1e-7
    for K, F in zip(blocks(p, matrix(found)), truth, strict=True):
        assert float(torch.linalg.solve(K, F).trace()) == pytest.approx(len(K), rel=1e-9)


def test_where_gradients_have_no_full_rank():
    """Inputs that are zero have no row in the range, and stay zero."""
    torch.manual_seed(0)
    X = torch.randn(6, 5).double()
    X[:, 2] = 0
    p = Problem.on(nn.Linear(5, 4, bias=False).double(), [X], nn.MSELoss())
    operator = build(p, "kl", steps=3)
    (A,) = operator.input_covariances.values()
    assert bool(A[2].eq(0).all())
    assert bool(A.isfinite().all())
    expected = kfac_reference.kfac(p, "empirical", fit="kl", steps=3)
    assert error(matrix(operator), expected) <= 1e-9


@pytest.mark.parametrize("fit", FITS)
def test_eigenvalues_can_be_corrected(fit: str):
    p = net()
    truth = reference.empirical_fisher(p, terms="sample")
    plain = blocks(p, matrix(build(p, fit)))
    corrected = blocks(p, matrix(build(p, fit, cls=EKFACLinearOperator)))
    for F, K, E in zip(blocks(p, truth), plain, corrected, strict=True):
        assert float(E.trace()) == pytest.approx(float(F.trace()), rel=1e-9)
        _, Q = torch.linalg.eigh(K)
        assert error(E, (Q * (Q.T @ F @ Q).diagonal()) @ Q.T) <= 1e-7


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("fit", FITS)
def test_independent_of_batches(fit: str, cls: type):
    p = net()
    (X, y), (other, z) = p.data
    whole = build(p, fit, cls=cls)
    p = replace(p, data=[(torch.cat([other, X]), torch.cat([z, y]))])
    assert error(matrix(build(p, fit, cls=cls)), matrix(whole)) <= 1e-9


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("fit", FITS)
def test_updates_average(fit: str, decay: float):
    """A batch adds what it has beside the factors so far."""
    p = net()
    first, (X, y) = p.data
    p = replace(p, data=[first])
    operator = build(p, fit)
    before = {
        name: (operator.gradient_covariances[name], operator.input_covariances[name])
        for name in operator.mapping
    }
    traces = {name: float(B.trace()) for name, (B, _) in before.items()}
    operator.update((X, y), decay)
    p = replace(p, data=[(X, y)])
    options = kfac_reference.Options(fit=fit)
    sums = kfac_reference.sums(p, kfac_reference.empirical, options).products.values()
    share = len(X) / (decay * len(first[0]) + len(X))
    for (name, (B, A)), of_layer in zip(before.items(), sums, strict=True):
        G, c = torch.cat(of_layer.rows)[:, 0], reference.normalization(p)
        if fit == "shampoo":
            A = A * traces[name]  # the sum, without its normalization
            left, right = torch.eye(len(A)).double(), torch.eye(len(B)).double()
        elif fit == "frobenius":
            left, right = A / A.square().sum(), B / B.square().sum()
        else:
            left, right = A.inverse() / len(A), B.inverse() / len(B)
        new_B = c * torch.einsum("poi,ij,pkj->ok", G, left, G)
        new_A = c * torch.einsum("poi,ok,pkj->ij", G, right, G)
        B, A = B.lerp(new_B, share), A.lerp(new_A, share)
        A = A / A.trace() if fit == "shampoo" else A
        assert error(operator.gradient_covariances[name], B) <= 1e-9
        assert error(operator.input_covariances[name], A) <= 1e-9


@pytest.mark.parametrize("fit", FITS)
def test_saved(fit: str, tmp_path):
    p = net()
    operator = build(p, fit)
    operator.save(tmp_path / "factors.safetensors")
    other = build(p, fit)
    other.load(tmp_path / "factors.safetensors")
    assert torch.equal(matrix(other), matrix(operator))
    read = write_factors(build(p, fit), tmp_path / "factors", parts=2)
    assert error(matrix(read), matrix(operator)) <= 1e-12
    assert torch.equal(matrix(load(tmp_path / "factors")), matrix(read))
    with pytest.raises(ValueError, match="fit"):
        build(p, "kfac").load(tmp_path / "factors.safetensors")


def test_cannot_be_merged():
    p = net()
    with pytest.raises(ValueError, match="cannot be merged"):
        build(p, "kl").merge(build(p, "kl"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fit": "svd"}, "fit"),
        ({"fit": "kfac", "steps": 2}, "steps has no meaning"),
        ({"fit": "shampoo", "steps": 2}, "steps has no meaning"),
        ({"fit": "kl", "steps": 0}, "steps"),
        ({"fit": "kl", "fisher_type": "forward-only"}, "needs gradients"),
    ],
)
def test_bad_options(options: dict, words: str):
    p = net()
    with pytest.raises(ValueError, match=words):
        p.build(KFACLinearOperator, **options)
