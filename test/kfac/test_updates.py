"""The life of factors: when they are computed, updated and merged."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import problems
import pytest
import torch
from contract import error, matrix
from models import Conditional, Experts, Rewired, Using
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    IdentityLinearOperator,
    KFACLinearOperator,
    SubmatrixLinearOperator,
)

CLASSES = [KFACLinearOperator, EKFACLinearOperator]
both = pytest.mark.parametrize("cls", CLASSES)


@both
def test_lazy_snapshot(cls: type):
    p = problems.make("mlp-ce-mean")
    passes = []

    class Data:
        def __iter__(self):
            passes.append(1)
            return iter(p.data)

    operator = replace(p, data=Data()).build(cls, check_deterministic=False)
    assert not passes
    before = matrix(operator)
    assert len(passes) == CLASSES.index(cls) + 1
    with torch.no_grad():
        p.params[0].mul_(1.5)
    assert torch.equal(matrix(operator), before)
    operator.compute_kronecker_factors()
    assert error(matrix(operator), matrix(p.build(cls))) <= 1e-12
    assert error(matrix(operator), before) > 1e-3


DERIVED = {
    "inverse": (lambda K: K.inverse(0.1), False),
    "damped": (lambda K: K + 0.1 * IdentityLinearOperator(K.space), False),
    "power": (lambda K: K**2, False),
    "product": (lambda K: K @ K, False),
    "eigendecomposition": (lambda K: K.eigh(), False),
    "structure": (lambda K: K.structure, False),
    "adjoint": (lambda K: K.T, True),
    "sum": (lambda K: K + K, False),
    "submatrix": (lambda K: SubmatrixLinearOperator(K, [0, 1], [0, 1]), True),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_operators_follow_new_factors_or_not(name: str):
    """Operators with structure are snapshots; operators that multiply by another one follow it."""
    p = problems.make("mlp-ce-mean")
    operator = p.build(KFACLinearOperator)
    derive, follows = DERIVED[name]
    derived = derive(operator)
    before = matrix(derived)
    with torch.no_grad():
        p.params[0].mul_(1.5)
    operator.compute_kronecker_factors()
    expected = matrix(derive(operator)) if follows else before
    assert error(before, matrix(derive(operator))) > 1e-3
    assert error(matrix(derived), expected) <= 1e-12


@both
def test_copies(cls: type):
    operator = problems.make("cnn").build(cls)
    expected, inverse = matrix(operator), operator.inverse(damping=0.1)
    for copied in (copy.deepcopy(operator), operator.to_device("cpu")):
        assert torch.equal(matrix(copied), expected)
    assert torch.equal(matrix(pickle.loads(pickle.dumps(inverse))), matrix(inverse))


def test_update_with_decay():
    """Means in which older data weighs less."""
    p = problems.make("mlp-ce-mean")
    operators = [
        replace(p, data=[batch]).build(KFACLinearOperator, fisher_type="empirical")
        for batch in p.data
    ]
    old, new = ((K.input_covariances["0"], K.gradient_covariances["0"]) for K in operators)
    n, m = (len(X) for X, _ in p.data)
    operators[0].update(p.data[1], decay=0.9)
    found = operators[0].input_covariances["0"], operators[0].gradient_covariances["0"]
    for factor, before, added in zip(found, old, new, strict=True):
        assert error(factor, (0.9 * n * before + m * added) / (0.9 * n + m)) <= 1e-14
    with pytest.raises(ValueError, match="decay must be between"):
        operators[0].update(p.data[1], decay=1.5)


@both
@pytest.mark.parametrize("fisher", ["type-2", "mc"])
def test_failed_updates_change_nothing(cls: type, fisher: str):
    p = problems.make("mlp-ce-mean")
    operator = p.build(cls, fisher_type=fisher, fallback="diagonal")
    before, blocks = matrix(operator), operator.report()
    X, y = p.data[0]
    message = {0: "loss on batch . is nan", 2: "Batch 2: CrossEntropyLoss", 3: "has targets from"}
    for i, batch in enumerate(
        ((X * float("nan"), y), (X[:, :2], y), (X, y[:1]), (X, y + 100), (X, y.double()))
    ):
        with pytest.raises((ValueError, RuntimeError), match=message.get(i)):
            operator.update(batch, decay=0.5)
        assert torch.equal(matrix(operator), before)
    operator.compute_kronecker_factors()  # nothing is concluded from numbers that are none
    assert operator.report() == blocks
    assert error(matrix(operator), before) <= 1e-12


def test_merge():
    p = problems.rebatched(problems.make("classes-ce-ignore-mean"), 1)
    p = replace(p, data=[batch for batch in p.data if bool((batch[1] != -100).any())])
    first, *others = (
        replace(p, data=[batch]).build(KFACLinearOperator, fisher_type="empirical", seed=seed)
        for seed, batch in enumerate(p.data)
    )
    for other in others:
        before = matrix(other)
        first.merge(other)
        assert torch.equal(matrix(other), before)
    whole = p.build(KFACLinearOperator, fisher_type="empirical")
    assert error(matrix(first), matrix(whole)) <= 1e-12


def conditional(
    cls: type, kind: type = Conditional, **options: Any
) -> tuple[Callable[[list], KFACLinearOperator], list]:
    """Return what builds an operator on data, and two batches that use a weight in two ways."""
    torch.manual_seed(0)
    model, x, y = kind().double(), torch.randint(3, (6,)), torch.randint(3, (6,))
    arguments = model, nn.CrossEntropyLoss(), list(model.parameters())
    options |= {"fisher_type": "type-2", "check_deterministic": False}
    return lambda data: cls(*arguments, data, **options), [(x[:4], y[:4]), (x[4:], y[4:])]


@both
def test_structure_that_shows_later(cls: type):
    make, data = conditional(cls)
    one, two, first = map(make, (data, data[::-1], data[:1]))
    assert error(matrix(one), matrix(two)) <= 1e-12
    first.update(data[1])
    assert error(first.trace(), one.trace()) <= 1e-12
    if cls is KFACLinearOperator:
        assert error(matrix(first), matrix(one)) <= 1e-12
    # from a state, what was not used yet is known as well
    last = make(data[:1])
    last.load_state_dict(copy.deepcopy(first.state_dict()))
    first.update(data[0], decay=0.5)
    last.update(data[0], decay=0.5)
    assert error(matrix(last), matrix(first)) <= 1e-12


@both
def test_factors_anew_with_other_data(cls: type):
    """Nothing of earlier data is left, such as uses of a parameter in another way."""
    make, data = conditional(cls)
    operator = make(data)
    matrix(operator)
    data.pop()
    operator.compute_kronecker_factors()
    assert error(matrix(operator), matrix(make(data))) <= 1e-12


@both
def test_structures_that_conflict(cls: type):
    make, data = conditional(cls, Rewired, fallback="dense")
    first, last, whole, reverse = map(make, (data[:1], data[1:], data, data[::-1]))
    before = matrix(first)
    for add in (lambda: first.update(data[1]), whole.trace):
        with pytest.raises(RuntimeError, match=r"embed\.weight in other ways.* a batch first"):
            add()
    with pytest.raises((RuntimeError, ValueError), match="from all data|cannot be merged"):
        first.merge(last)
    assert torch.equal(matrix(first), before)
    assert {block.structure for block in reverse.report()} == {"dense", "kronecker"}


@both
@pytest.mark.parametrize("joint", [False, True])
def test_experts_that_are_used_later(cls: type, joint: bool):
    torch.manual_seed(0)
    model, x, y = Experts().double(), torch.randn(9, 3).double(), torch.randn(9, 2).double()
    some = [x[:, 0] <= 0, x[:, 0] > 0]
    data, params = [(x[i], y[i]) for i in some], dict(model.named_parameters())

    def build(data: list, **options: Any):
        options = {"check_deterministic": False, "separate_weight_and_bias": not joint} | options
        options = {"fisher_type": "empirical"} | options
        return cls(model, nn.MSELoss(), params, data, **options)

    whole, (one, two) = build(data), (build([batch]) for batch in data)
    updated = build(data[:1])
    updated.update(data[1])
    if cls is KFACLinearOperator:
        one.merge(two)
        assert one.report() == whole.report()
        assert error(matrix(one), matrix(whole)) <= 1e-12
        assert error(matrix(updated), matrix(whole)) <= 1e-12
    loaded = build(data)
    loaded.load_state_dict(updated.state_dict())
    assert {block.structure for block in updated.report()} == {"kronecker", "dense", "zero"}
    assert updated.report() == whole.report()
    assert error(updated.trace(), whole.trace()) <= 1e-12
    assert torch.equal(matrix(loaded), matrix(updated))


def attention() -> nn.Module:
    """Return a model whose keys have inputs of their own in some batches."""

    def function(m: Using, X: dict[str, Any]) -> Tensor:
        h = torch.tanh(m.embed(X["x"]))
        q, k, v = m.q(h), m.k(2 * h if X["own"] else h), m.v(h)
        return m.head(torch.nn.functional.scaled_dot_product_attention(q, k, v).mean(1))

    torch.manual_seed(0)
    return Using(function, **{name: nn.Linear(3, 3) for name in ("embed", "q", "k", "v", "head")})


@both
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("damping", [{}, {"use_heuristic_damping": True}])
def test_layers_that_have_the_same_inputs_in_some_batches(
    cls: type, reduce: bool, damping: dict[str, bool], tmp_path
):
    model = attention().double()
    X = [{"x": torch.randn(n, 4, 3).double(), "own": n == 3} for n in (4, 3, 5)]
    data = [(x, torch.randint(3, (len(x["x"]),))) for x in X]
    params = dict(model.named_parameters())
    options = {"fisher_type": "type-2", "kfac_approx": "reduce" if reduce else "expand"}
    arguments = model, nn.CrossEntropyLoss(), params
    equal = [({**x, "own": False}, y) for x, y in data]  # the same number of samples
    alike, operator = (cls(*arguments, some, **options) for some in (equal, data))
    for name, _ in model.named_children():  # one layer alone shares nothing
        own = {key: x for key, x in params.items() if key.startswith(f"{name}.")}
        alone = cls(model, nn.CrossEntropyLoss(), own, data, **options)
        together = SubmatrixLinearOperator(operator, list(own), list(own))
        assert error(matrix(together), matrix(alone)) <= 1e-12
        if cls is KFACLinearOperator:
            inverse = operator.inverse(0.1, **damping)
            together = SubmatrixLinearOperator(inverse, list(own), list(own))
            assert error(matrix(together), matrix(alone.inverse(0.1, **damping))) <= 1e-12
    before, other = matrix(operator), matrix(alike)
    assert error(other, before) > 1e-3
    operator.save(tmp_path / "factors")
    alike.load(tmp_path / "factors")
    assert error(matrix(alike), before) <= 1e-14
    if cls is KFACLinearOperator:
        first, last = (cls(*arguments, some, **options) for some in (data[:1], data[1:]))
        first.merge(last)
        assert error(matrix(first), before) <= 1e-12
        last.update(data[0])
        assert error(matrix(last), before) <= 1e-12
