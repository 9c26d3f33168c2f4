"""Arguments that are numbers or choices: of all kinds, and refused in words."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import curvlinops as c
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.kfac.options import FisherType
from curvlinops.support.arguments import check_choice, check_count, check_number

A = torch.diag(torch.arange(1.0, 11.0))


def kronecker() -> c.KroneckerProductLinearOperator:
    return c.KroneckerProductLinearOperator(A)


def on_data(kind: type, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.randint(2, (4,)))]
    arguments = model, nn.CrossEntropyLoss(), list(model.parameters()), data
    H = kind(*arguments, **options)
    return H @ torch.eye(H.shape[1])


#: Uses of the number two as an argument.
USES: dict[str, Callable[[Any], Any]] = {
    "num_tests": lambda two: c.dottest(A, two, seed=0),
    "k": lambda two: c.eigsh(A, k=two, seed=0).eigenvalues,
    "ncv": lambda two: c.eigsh(A, k=2, ncv=5 * two, seed=0).eigenvalues,
    "maxiter": lambda two: c.eigsh(A, k=2, maxiter=two, ncv=10, seed=0).eigenvalues,
    "seed of eigsh": lambda two: c.eigsh(A, k=2, seed=two).eigenvectors.abs(),
    "seed of a trace": lambda two: c.hutchinson_trace(A, 4, distribution="gaussian", seed=two),
    "num_matvecs": lambda two: c.hutchinson_trace(A, two, seed=0),
    "maxiter of CG": lambda two: c.CGInverseLinearOperator(A, maxiter=5 * two) @ torch.ones(10),
    "damping of CG": lambda two: c.CGInverseLinearOperator(A, damping=two) @ torch.ones(10),
    "rtol": lambda two: c.MINRESInverseLinearOperator(A, rtol=two / 1e4) @ torch.ones(10),
    "atol": lambda two: c.LSMRInverseLinearOperator(A, atol=two / 1e7) @ torch.ones(10),
    "dimension": lambda two: c.IdentityLinearOperator(two) @ torch.ones(2),
    "indices": lambda two: c.SubmatrixLinearOperator(A, [two, 1], [two]) @ torch.ones(1),
    "power": lambda two: c.SubmatrixLinearOperator(A, [1, 2], [1, 2]) ** two @ torch.ones(2),
    "power of a structure": lambda two: kronecker() ** two @ torch.ones(10),
    "damping": lambda two: kronecker().inverse(two) @ torch.ones(10),
    "number of draws": lambda two: kronecker().sample(torch.Generator().manual_seed(0), two),
    "block_sizes": lambda two: on_data(c.HessianLinearOperator, block_sizes=[two]),
    "num_data": lambda two: on_data(c.HessianLinearOperator, num_data=two * 2),
    "cache": lambda two: on_data(c.HessianLinearOperator, cache=two),
    "chunk_size": lambda two: on_data(c.HessianLinearOperator, chunk_size=two),
    "mc_samples": lambda two: on_data(c.GGNLinearOperator, mc_samples=two, seed=1),
    "seed": lambda two: on_data(c.GGNLinearOperator, mc_samples=1, seed=two),
    "subsampling": lambda two: on_data(c.PerSampleGradientLinearOperator, subsampling=[two]),
}


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), torch.tensor(2)], ids=str)
@pytest.mark.parametrize("name", USES)
def test_integers_of_all_kinds(name: str, two: Any):
    torch.testing.assert_close(USES[name](two), USES[name](2), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [True, 1.5, "2", None, -1, torch.ones(2, dtype=torch.int64)])
def test_counts(wrong: Any):
    with pytest.raises(ValueError, match="n must be an integer >= 0, got"):
        check_count("n", wrong, at_least=0)
    with pytest.raises(ValueError, match="n must be an integer from 1 to 3, got"):
        check_count("n", 4, at_most=3)


@pytest.mark.parametrize(
    "wrong", [True, "2", None, -1, float("nan"), float("inf"), 1j, torch.ones(2)]
)
def test_numbers(wrong: Any):
    with pytest.raises(ValueError, match="x must be a finite number >= 0, got"):
        check_number("x", wrong, 0)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int8(2), torch.tensor(2.0)], ids=repr)
def test_numbers_of_all_kinds(number: Any):
    found = check_number("x", number)
    assert type(found) is float and found == 2.0


def test_choices():
    assert check_choice("x", "mc", FisherType) is FisherType.MC
    assert check_choice("x", FisherType.MC, FisherType) is FisherType.MC
    for wrong in ("MC", None, 1, torch.ones(2), ["mc"]):
        with pytest.raises(ValueError, match="x must be one of .*'type-2', 'mc', .*got"):
            check_choice("x", wrong, FisherType)


#: Further tables are in the tests of algorithms.
ERRORS: list[tuple[Callable, str]] = [
    (lambda: kronecker().sample(None, -1), "num_samples must be an integer >= 0, got -1"),
    (lambda: kronecker().sample(None, 1.5), "num_samples must be an integer >= 0, got 1.5"),
    (lambda: kronecker().inverse("x"), "damping must be a finite number, got 'x'"),
    (lambda: kronecker() ** True, "exponent must be a finite number, got True"),
    (lambda: c.SubmatrixLinearOperator(A, [1], [1]) ** 0.5, "exponent must be an integer >= 0"),
    (lambda: c.CGInverseLinearOperator(A, atol=-1), "atol must be a finite number >= 0, got -1"),
    (lambda: c.MINRESInverseLinearOperator(A, damping="1"), "damping must be a finite number"),
    (lambda: c.LSMRInverseLinearOperator(A, btol=-1), "btol must be a finite number >= 0, got -1"),
    (lambda: c.LSMRInverseLinearOperator(A, conlim=-1), "conlim must be a finite number >= 0"),
    (lambda: c.eigsh(A, 1, seed=1.5), "seed must be an integer >= 0, got 1.5"),
    (lambda: c.dottest(A, True), "num_tests must be an integer >= 1, got True"),
]


@pytest.mark.parametrize("use, match", ERRORS)
def test_errors(use: Callable, match: str):
    with pytest.raises(ValueError, match=match):
        use()


SHARED = set(inspect.signature(c.HessianLinearOperator).parameters)
FACTORED = {
    "fisher_type": "mc",
    "mc_samples": 1,
    "kfac_approx": "expand",
    "num_per_example_loss_terms": None,
    "separate_weight_and_bias": True,
    "seed": 2147483647,
    "fallback": "error",
    "fit": "kfac",
    "steps": 1,
    "exact": False,
    "max_factor_size": 16384,
    "factor_placement": "replicate",
}
JACOBIANS = {c.JacobianLinearOperator, c.TransposedJacobianLinearOperator}
NO_LOSS = {"loss_func", "block_sizes", "reduction", "process_group"}
OPTIONS = {
    c.FisherMCLinearOperator: {"mc_samples": 1, "seed": 2147483647},
    c.GGNLinearOperator: {"mc_samples": 0, "seed": 2147483647},
    c.EFLinearOperator: {"terms": "term"},
    c.KFACLinearOperator: FACTORED,
    c.EKFACLinearOperator: FACTORED,
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_signatures_show_inherited_options(kind: type):
    found = inspect.signature(kind).parameters
    assert len(SHARED) == 13 and found.keys() >= SHARED
    assert {n: p.default for n, p in found.items() if n not in SHARED} == OPTIONS[kind]


ON_DATA = [
    kind
    for kind in (getattr(c, name) for name in c.__all__)
    if isinstance(kind, type) and issubclass(kind, DataLinearOperator)
]


@pytest.mark.parametrize("kind", ON_DATA)
def test_signatures_show_what_is_accepted(kind: type):
    model = nn.Linear(3, 2)
    given = {
        "model_func": model,
        "loss_func": nn.CrossEntropyLoss(),
        "params": list(model.parameters()),
        "data": [(torch.randn(4, 3), torch.randint(2, (4,)))],
    }
    shown = inspect.signature(kind).parameters
    required = {name for name, p in shown.items() if p.default is p.empty}
    assert required <= given.keys() and len(ON_DATA) > 9
    kind(**{name: given.get(name, p.default) for name, p in shown.items()})
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option 'unknown'. There are"):
        kind(**{name: given[name] for name in required}, unknown=1)
    missing = SHARED - shown.keys()
    assert missing == (NO_LOSS if kind in JACOBIANS else set())


@pytest.mark.parametrize("kind", ON_DATA)
def test_misspelt_options_are_refused_before_any_pass(kind: type):
    class Data:
        def __iter__(self):
            raise AssertionError("There is a pass over the data.")

    model = nn.Linear(3, 2)
    loss = () if kind in JACOBIANS else (nn.MSELoss(),)
    with pytest.raises(TypeError, match="fisher_typ'. (Did you|There)"):
        kind(model, *loss, list(model.parameters()), Data(), fisher_typ="mc")


WRONG_OPTIONS: list[tuple[type, dict[str, Any], str]] = [
    (c.GGNLinearOperator, {"mc_samples": -1}, "mc_samples must be an integer >= 0, got -1"),
    (c.GGNLinearOperator, {"seed": -1}, "seed must be"),
    (c.GGNLinearOperator, {"mc_samples": True}, "integer >= 0, got True"),
    (c.FisherMCLinearOperator, {"mc_samples": 0}, "mc_samples must be an integer >= 1, got 0"),
    (c.FisherMCLinearOperator, {"seed": -1}, "seed must be an integer >= 0"),
    (c.GGNDiagonalLinearOperator, {"mc_samples": -1}, "mc_samples must be"),
    (c.EFLinearOperator, {"terms": "x"}, "terms must be one of"),
    (c.HessianLinearOperator, {"num_data": -1}, "num_data must be an integer >= 0"),
    *((c.HessianLinearOperator, options, match) for options, match in (
        ({"cache": "x"}, r"cache must be 'auto', .*got 'x'"),
        ({"cache": -1}, "number of bytes, got -1"),
        ({"cache": True}, "number of bytes, got True"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
        ({"chunk_size": 1.5}, "chunk_size must be an integer >= 1"),
        ({"block_sizes": [5]}, "add up to the number of parameters, 2"),
        ({"block_sizes": [2, 0]}, "positive integers"),
        ({"block_sizes": []}, r"add up to the number of parameters, 2; got \[\]"),
        ({"block_sizes": 4}, "positive integers.*got 4"),
        ({"progressbar": "yes"}, "progressbar must be True or False, got 'yes'"),
        ({"check_deterministic": 1}, "check_deterministic must be True or False, got 1"),
    )),
    (c.PerSampleGradientLinearOperator, {"terms": "x"}, "terms must be one of"),
    (c.PerSampleGradientLinearOperator, {"block_sizes": [1, 1]}, "omit block_sizes"),
    (c.PerSampleGradientLinearOperator, {"subsampling": "x"}, "subsampling must be a list"),
    (c.PerSampleGradientLinearOperator, {"subsampling": [0.5]}, "subsampling must be a list"),
    (c.KFACLinearOperator, {"kfac_approx": "x"}, "kfac_approx must be one of"),
    (c.KFACLinearOperator, {"block_sizes": [1, 1]}, "block_sizes cannot be chosen"),
    (c.KFACLinearOperator, {"exact": True}, "exact=True is a variant of fisher_type='type-2'"),
    (c.KFACLinearOperator, {"exact": 1}, "exact must be True or False"),
    (c.EKFACLinearOperator, {"separate_weight_and_bias": "no"}, "must be True or False"),
    (c.EKFACLinearOperator, {"steps": 2}, "steps has no meaning"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "match"), WRONG_OPTIONS, ids=[str(x[:2]) for x in WRONG_OPTIONS]
)
def test_options_are_checked_before_the_model_is_called(kind: type, options: dict, match: str):
    model, calls = nn.Linear(3, 2), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    data = [(torch.randn(4, 3), torch.randint(2, (4,)))]
    with pytest.raises(ValueError, match=match):
        kind(model, nn.CrossEntropyLoss(), list(model.parameters()), data, **options)
    assert not calls


def test_an_option_that_begins_like_an_unknown_one_is_meant():
    with pytest.raises(TypeError, match="Did you mean 'check_deterministic'"):
        on_data(c.HessianLinearOperator, check=False)


def test_lists_of_numbers_are_vectors():
    identity = c.IdentityLinearOperator(3)
    assert (identity @ ([1.0] * 3)).tolist() == [1.0] * 3
    with pytest.raises(ValueError, match=r"shape \[1\], expected \[3\].* \(A @ \[x\]\) \* D"):
        identity @ [1.0] * 3
