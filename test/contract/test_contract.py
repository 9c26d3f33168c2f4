"""Every operator on every problem: equal to its dense reference, and a linear operator."""

import pickle
import re
from dataclasses import replace
from itertools import product

import numpy as np
import problems
import pytest
import reference
import torch
from contract import (
    ALL,
    CASES,
    CORE,
    EXACT,
    MC,
    RANDOM,
    dense,
    error,
    errors,
    matrix,
    pairs,
    vectors,
)
from tables import core
from torch import Tensor, nn

from curvlinops import CGInverseLinearOperator, TorchLinearOperator
from curvlinops.autodiff import backward
from curvlinops.losses import Loss

SQUARE = [case for case in EXACT if CASES[case].square]
#: Problems whose parameters are a list, a dictionary, and tensors of a closure.
PARAMETERS = ["mlp-ce-all-mean", "functional", "closure"]


#: Operators that need many problems: `test_per_sample.py` compares all rows and diagonals, and the
#: others are a transpose and sums of rows.
MOST = ["hessian", "ggn", "fisher", "jacobian"]
#: Models whose dense Hessian takes half a second, or is that of others in another precision.
SLOW = "former|encoder|norms|bidirect|attention|float32-cnn|bfloat16-lstm|other-values"
SMALL = [n for n in problems.MODEL_NAMES if not re.search(SLOW, n)]
#: Problems for what does not depend on the model: ignored targets, tied weights, unequal lengths.
SOME = ["classes-ce-ignore-mean", "transformer-tied", "lstm-packed"]


@pytest.mark.parametrize(
    "case, problem",
    core(pairs(EXACT, CORE) + pairs(["hessian"], SMALL), pairs(MOST, problems.NAMES)),
)
def test_equals_dense_reference(case: str, problem: str):
    p = problems.make(problem)
    operator = CASES[case].build(p)
    expected = dense(case, problem)
    assert operator.shape == tuple(expected.shape)
    # many columns and a single one, the first and the next, may be computed in different ways
    v, u = vectors(operator), vectors(operator, rows=True)
    assert error(operator @ v, expected @ v.double()) <= p.tolerance
    assert error(operator.T @ u, expected.T @ u.double()) <= p.tolerance
    parts = errors(p, matrix(operator), expected, 0 if case == "transposed" else 1)
    assert max(parts.values()) <= p.tolerance, parts
    assert error(operator @ v, expected @ v.double()) <= p.tolerance


@pytest.mark.extensive
@pytest.mark.parametrize("case, problem", pairs(EXACT, ["mlp-ce-all-mean", "cnn", *SOME]))
def test_single_products_of_large_models(case: str, problem: str, monkeypatch):
    """The tangents of large graphs are computed in a pass of their own."""
    monkeypatch.setattr(backward, "bytes_of_pass", lambda device: 1)
    p = problems.make(problem)
    operator = CASES[case].build(p, check_deterministic=False)
    v, u = vectors(operator), vectors(operator, rows=True)
    assert error(operator @ v, dense(case, problem) @ v.double()) <= p.tolerance
    assert error(operator.T @ u, dense(case, problem).T @ u.double()) <= p.tolerance


@pytest.mark.parametrize(
    "case, problem", core(pairs(EXACT, SOME), pairs(EXACT, [*CORE, "pinn", "checkpoint"]))
)
def test_linearized(case: str, problem: str):
    p = problems.make(problem)
    operator, expected = CASES[case].build(p, check_deterministic=False), dense(case, problem)
    v, V, u = vectors(operator), vectors(operator, 3), vectors(operator, rows=True)
    with operator.linearized():
        for _ in range(2):  # what is kept then is of the same numbers
            assert error(operator @ v, expected @ v.double()) <= p.tolerance
            assert error(operator @ V, expected @ V.double()) <= p.tolerance
            assert error(operator.T @ u, expected.T @ u.double()) <= p.tolerance


@pytest.mark.parametrize("case, problem", pairs(ALL, [*PARAMETERS, "cnn"]))
def test_linear_and_adjoint(case: str, problem: str):
    p = problems.make(problem)
    operator = ALL[case].build(p)
    V, U = vectors(operator, 2), vectors(operator, 2, rows=True)
    AV, AtU = operator @ V, operator.T @ U
    assert error(operator @ (V[:, 0] - 3 * V[:, 1]), AV[:, 0] - 3 * AV[:, 1]) <= p.tolerance
    assert error(U.T @ AV, AtU.T @ V) <= p.tolerance
    assert error(U.T @ operator, AtU.T) <= p.tolerance
    assert error(operator.adjoint().T @ V, AV) <= p.tolerance


@pytest.mark.parametrize("case", ALL)
def test_to_dense(case: str):
    p = problems.make("mlp-mse-mean")
    operator = ALL[case].build(p)
    assert error(operator.to_dense(), matrix(operator)) <= p.tolerance
    assert error(operator.T.to_dense(), matrix(operator).T) <= p.tolerance


WITH_STRUCTURE = {"kfac", "ekfac", "ggn-diagonal"}


@pytest.mark.parametrize("case", [case for case in ALL if ALL[case].square])
def test_damped(case: str):
    p = problems.make("mlp-mse-mean")
    operator = ALL[case].build(p)
    damped = operator.damped(0.1)
    assert damped.self_adjoint and damped.space.names == operator.space.names
    assert hasattr(damped, "inverse") == (case in WITH_STRUCTURE)
    expected = matrix(operator) + 0.1 * torch.eye(len(matrix(operator)))
    assert error(matrix(damped), expected) <= p.tolerance


def test_representation():
    """Representations name the operator and the options that are not defaults."""
    p = problems.make("mlp-mse-mean")
    H, K = ALL["hessian"].build(p), ALL["kfac"].build(p, fisher_type="type-2")
    sampled = ALL["ggn-mc"].build(p, block_sizes=[1, 3], cache="none")
    about = "MSELoss, reduction='mean', 5 samples in 2 batches"
    size = "27 x 27, float64, cpu"
    expected = {
        H: f"Hessian({about}, {size})",
        sampled: f"GGN({about}, block_sizes=[1, 3], {size}, cache='none', mc_samples=2)",
        ALL["jacobian"].build(p): "Jacobian(5 samples in 2 batches, 15 x 27, float64, cpu)",
        K: f"KFAC({about}, {size}, fisher_type='type-2', fallback='dense')",
        K.inverse(0.1): f"KFACInverse(4 blocks, {size}, damping=0.1)",
        CGInverseLinearOperator(H, damping=0.1): f"CGInverse(Hessian, {size}, damping=0.1)",
    }
    assert repr(H) == f"HessianLinearOperator(MSELoss, reduction='mean', 2 batches, {size})"
    for operator in (H, K, sampled):
        operator @ vectors(operator)
    for operator, text in expected.items():
        assert repr(operator) == text.replace("(", "LinearOperator(", 1)


@pytest.mark.parametrize("case, problem", core(pairs(SQUARE, SOME), pairs(SQUARE, CORE)))
def test_independent_of_batches(case: str, problem: str):
    p = problems.make(problem)
    if problem != "lstm-packed":  # lengths are a part of its batches
        singles = CASES[case].build(problems.rebatched(p, 1))
        assert error(matrix(singles), dense(case, problem)) <= p.tolerance
    backwards = CASES[case].build(replace(p, data=p.data[::-1]))
    assert error(matrix(backwards), dense(case, problem)) <= p.tolerance
    together = problems.merged(p)
    if together is not None:
        assert error(matrix(CASES[case].build(together)), dense(case, problem)) <= p.tolerance


@pytest.mark.parametrize("case, problem", core(pairs(EXACT, SOME), pairs(EXACT, CORE)))
def test_independent_of_chunks(case: str, problem: str):
    p = problems.make(problem)
    operator = CASES[case].build(p, chunk_size=2, check_deterministic=False)
    V = vectors(operator, 5)
    assert error(operator @ V, dense(case, problem) @ V.double()) <= p.tolerance


@pytest.mark.parametrize(
    "case, problem", core(pairs([*SQUARE, *RANDOM], SOME), pairs([*SQUARE, *RANDOM], CORE))
)
def test_blocks(case: str, problem: str):
    p = problems.make(problem)
    full = matrix(CASES[case].build(p))
    sizes = [1, len(p.params) - 1]
    first = next(iter(p.named_params().values())).numel()
    full[:first, first:] = full[first:, :first] = 0
    operator = CASES[case].build(p, block_sizes=sizes, check_deterministic=False)
    assert error(matrix(operator), full) <= p.tolerance
    v = vectors(operator)
    assert error(operator @ v, full @ v) <= p.tolerance


@pytest.mark.parametrize("case, problem", pairs(ALL, PARAMETERS))
def test_kinds_of_vectors(case: str, problem: str):
    p = problems.make(problem)
    operator = ALL[case].build(p, check_deterministic=False)
    V = vectors(operator, 2)
    AV = operator @ V
    found = operator @ V.numpy()
    assert isinstance(found, np.ndarray) and found.dtype == operator.dtype
    assert error(torch.from_numpy(found), AV) <= p.tolerance
    assert error(torch.from_numpy(operator @ V[:, :1].numpy()), AV[:, :1]) <= p.tolerance
    assert (operator @ V[:, :0]).shape == (operator.shape[0], 0)
    if case == "transposed":
        return
    space = operator.space
    as_dict = space.split(V)
    for structure in (as_dict, list(as_dict.values())):
        out = operator @ structure
        if case in ("jacobian", "gradients"):  # rows have no names
            (out,) = out if isinstance(structure, list) else [out]
            assert error(out.reshape(-1, 2), AV) <= p.tolerance
            continue
        assert type(out) is type(structure)
        values = out.values() if isinstance(out, dict) else out
        flat = torch.cat([value.reshape(-1, 2) for value in values])
        assert error(flat, AV) <= p.tolerance
    single = operator @ {name: value[..., 0] for name, value in as_dict.items()}
    flat = single if case in ("jacobian", "gradients") else space.join(single)
    assert error(flat, AV[:, 0]) <= p.tolerance


@pytest.mark.parametrize("case, problem", pairs(["hessian", "ggn", "fisher"], CORE))
def test_gradient_and_loss(case: str, problem: str):
    p = problems.make(problem)
    gradient, loss = CASES[case].build(p).gradient_and_loss()
    assert type(gradient) is type(p.params)
    values = gradient.values() if isinstance(gradient, dict) else gradient
    flat = torch.cat([value.flatten() for value in values])
    assert error(flat, reference.gradient(p)) <= p.tolerance
    assert float(loss) == pytest.approx(reference.loss_value(p), rel=p.tolerance)


# --- Monte-Carlo Fishers


@pytest.mark.parametrize("case, problem", core(pairs(RANDOM, SOME), pairs(RANDOM, CORE)))
def test_samples_repeat(case: str, problem: str):
    p = problems.make(problem)
    operator = CASES[case].build(p)
    v = vectors(operator)
    first = operator @ v
    torch.manual_seed(1)
    assert torch.equal(operator @ v, first)
    assert torch.equal(CASES[case].build(p) @ v, first)
    # further columns are computed in another way, at the same samples
    assert error((operator @ torch.stack([v, v], 1))[:, 1], first) <= p.tolerance
    with operator.linearized():
        assert error(operator @ v, first) <= p.tolerance
        assert error(operator @ v, first) <= p.tolerance
    other = CASES[case].build(p, seed=0, check_deterministic=False)
    assert error(other @ v, first) > 1e-3


def all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses draw every label once, or every axis of the noise, weighted by its probability.

    The average over samples, which are uncorrelated between terms, then is their expectation.
    """
    sample = Loss.sample

    def every(self: Loss, output: Tensor, target: object, num: int, generator: object) -> Tensor:
        size, weights = self.to_terms(output.unsqueeze(0)).shape[2], []
        num = 2**size if self.name == "BCEWithLogitsLoss" else size  # all that can be drawn

        def labels(p: Tensor, num: int, replacement: bool, generator: object) -> Tensor:
            assert replacement and num == p.shape[1]
            weights.append(p.T / p.sum(1))
            return torch.arange(p.shape[1]).expand_as(p)

        def bits(p: Tensor, generator: object) -> Tensor:
            draws = torch.tensor(list(product([0.0, 1.0], repeat=p.shape[2])), dtype=p.dtype)
            draws = draws.unsqueeze(1).expand_as(p)
            weights.append(torch.where(draws == 1, p[:1], 1 - p[:1]).prod(2))
            return draws

        def noise(num: int, terms: int, size: int, **options: object) -> Tensor:
            assert num == size
            weights.append(torch.full((size, terms), 1 / size))
            eye = torch.eye(size, dtype=options["dtype"])
            return size**0.5 * eye.unsqueeze(1).expand(-1, terms, -1)

        with monkeypatch.context() as patch:
            for name, draw in (("multinomial", labels), ("bernoulli", bits), ("randn", noise)):
                patch.setattr(torch, name, draw)
            rows = self.to_terms(sample(self, output, target, num, generator))
        (weight,) = weights
        return self.from_terms(rows * (len(rows) * weight).sqrt().unsqueeze(2), output)

    monkeypatch.setattr(Loss, "sample", every)


@pytest.mark.parametrize(
    "case, problem",
    core(pairs(RANDOM, CORE), pairs(["mc"], MC)),
)
def test_expectation_over_samples(case: str, problem: str, monkeypatch):
    p = problems.make(problem)
    all_draws(monkeypatch)
    operator = CASES[case].build(p, check_deterministic=False)
    V = vectors(operator, 3)
    assert error(operator @ V, dense("ggn", problem) @ V.double()) <= p.tolerance


@pytest.mark.parametrize(
    "problem",
    ["mlp-mse-mean", "mlp-ce-all-mean", "tokens-bce-all-mean", "cnn", "classes-ce-ignore-mean"],
)
def test_samples_are_unbiased(problem: str):
    """The mean over many seeds differs from the GGN by no more than its standard error."""
    p = problems.make(problem)
    # few columns of a small matrix: their distance is a chi-square with many degrees of freedom
    operators = [
        CASES["mc"].build(p, mc_samples=256, seed=seed, check_deterministic=False)
        for seed in range(24)
    ]
    V = vectors(operators[0], 4)
    draws = torch.stack([operator @ V for operator in operators])
    mean, standard_error = draws.mean(0), draws.std(0) / len(draws) ** 0.5
    expected = dense("ggn", problem) @ V
    # the ratio is about one, the worst of a hundred problems has 1.6
    assert (mean - expected).norm() <= 2.5 * standard_error.norm()
    assert standard_error.norm() <= 0.03 * expected.norm()


# --- life of an operator


@pytest.mark.parametrize("problem", ["mlp-ce-all-mean", "lstm"])
@pytest.mark.parametrize("case", ALL)
def test_pickle(case: str, problem: str):
    operator = ALL[case].build(problems.make(problem))
    v = vectors(operator)
    before = operator @ v
    copy = pickle.loads(pickle.dumps(operator))
    assert torch.equal(copy @ v, before)


#: Methods that pass over the data, and the names of these passes.
PASSES: dict[tuple[str, str], list[str]] = {(case, "product"): ["matmat"] for case in ALL} | {
    ("ggn-diagonal", "product"): ["matmat"],
    ("transposed", "product"): ["rmatmat"],
    ("kfac", "product"): ["factors"],
    ("ekfac", "product"): ["factors", "eigenvalues"],
    ("ggn-diagonal", "trace"): ["trace"],
    ("ggn-diagonal", "diagonal"): ["matmat"],
    ("gradients", "norms"): ["norms"],
    ("gradients", "gram"): ["gram"],
    ("gradients", "dense"): ["gradients"],
    ("gradients", "gradients"): ["gradients"],
    ("gradients", "second_moment"): ["second_moment"],
    ("jacobian", "gram"): ["gram"],
    ("hessian", "gradient_and_loss"): ["gradient_and_loss"],
}


def passes(operator: TorchLinearOperator, capsys: pytest.CaptureFixture) -> list[str]:
    """Return for what progress bars were shown, each name of an operator and a device checked."""
    labels = re.findall(r"\r([^\r]*?): +\d+%", capsys.readouterr().err)
    parts = [re.fullmatch(r"(\w+)\.(\w+) on cpu", label) for label in labels]
    (own,) = operator._operands() or (operator,)
    assert {part[1] for part in parts} == {type(own).__name__}
    return list(dict.fromkeys(part[2] for part in parts))


@pytest.mark.parametrize("case, method", PASSES)
def test_progress_names_operator_pass_and_device(case: str, method: str, capsys):
    operator = ALL[case].build(problems.make("mlp-ce-mean"), progressbar=True)
    assert "check_deterministic" in passes(operator, capsys)
    operator @ vectors(operator) if method == "product" else getattr(operator, method)()
    assert passes(operator, capsys) == PASSES[case, method]


@pytest.mark.gpu
@pytest.mark.parametrize("case, problem", pairs(EXACT, problems.NAMES))
def test_equals_dense_reference_on_gpu(case: str, problem: str):
    p = problems.make(problem)
    if not isinstance(p.model, nn.Module):
        pytest.skip("the closure's and the function's tensors stay on the CPU")
    operator = CASES[case].build(p).to_device("cuda")
    # other orders of summation, and TF32 switched off by default
    assert error(matrix(operator).cpu(), dense(case, problem)) <= max(p.tolerance, 1e-8)
    v = vectors(operator)
    assert (operator @ v.cuda()).device.type == "cuda"
