"""What is saved of structured operators, and of the factors of operators on data."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from contract import error, matrix
from structured_cases import ALL, CHANGES, A, B, Blocks, Diag, Kron, positive
from tables import core
from torch import Tensor

import curvlinops
from curvlinops import (
    EighDecomposedLinearOperator,
    EKFACLinearOperator,
    IdentityLinearOperator,
    KFACLinearOperator,
    StructuredLinearOperator,
    load,
    write_factors,
)

CLASSES = [KFACLinearOperator, EKFACLinearOperator]
both = pytest.mark.parametrize("cls", CLASSES)


def build(cls: type, p: problems.Problem, **options: Any) -> Any:
    return p.build(cls, **({"fallback": "dense"} | options))


def assert_equal(found: Any, expected: Any) -> None:
    """Check that two objects consist of the same, bit for bit."""
    one, two = (x if isinstance(x, dict) else x.state_dict() for x in (found, expected))
    assert one.keys() == two.keys() and one["metadata"] == two["metadata"]
    for name in one.keys() - {"metadata"}:
        assert torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype


# --- structured operators

CASES = {
    **{(name, change): lambda name=name, change=change: CHANGES[change](*ALL[name]())[0]
       for name in ALL
       for change in ("itself", "damped", "inverse", "eigendecomposition", "float32")},
    **{(cls.__name__, name): lambda cls=cls, name=name: build(
        cls, problems.make(name)).inverse(0.1)
       for cls in CLASSES for name in ("cnn", "transformer-tied")},
    ("not symmetric", ""): lambda: Kron(torch.randn(3, 2), torch.randn(4, 5)),
    ("not symmetric", "T"): lambda: Kron(torch.randn(3, 2), torch.randn(4, 5)).T,
    ("not symmetric", "+"): lambda: Kron(A @ A.diag().diag()) + 2 * IdentityLinearOperator(4),
    # eigenvectors by which sums of decompositions keep their structure
    ("shared", ""): lambda: shared(),
    ("parts of large memory", ""): lambda: parts_of_large_memory(),
}  # fmt: skip


def shared() -> StructuredLinearOperator:
    vectors = Kron(*(torch.linalg.eigh(factor).eigenvectors for factor in (B, A)))
    values = positive(12)
    return Blocks([EighDecomposedLinearOperator(x, vectors) for x in (values, values + 1)])


def parts_of_large_memory() -> StructuredLinearOperator:
    whole = torch.arange(1.0, 10.0)
    return Blocks([Diag(whole[2:4]), Diag(whole[3:7]), Diag(whole[::2])])


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_structured_operators(case: tuple[str, str], tmp_path: Path):
    operator, path = CASES[case](), tmp_path / "operator"
    operator.save(path)
    torch.save(operator.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    for found in (load(str(path)), load(state)):
        assert type(found) is type(operator) or case[0] in (
            "KFACLinearOperator",
            CLASSES[1].__name__,
        )
        assert_equal(found, operator)
        assert found.self_adjoint == operator.self_adjoint
        assert found.space.shapes == operator.space.shapes
        assert found.torch_dtype == operator.torch_dtype
        torch.testing.assert_close(found.to_dense(), operator.to_dense())
    if operator.self_adjoint:
        operator.logdet(), operator.eigh()  # factors keep their decompositions
        assert_equal(load(operator.state_dict()), operator)


def test_what_is_shared_is_saved_once():
    state = shared().state_dict()
    assert sum(x.numel() for x in state.values() if isinstance(x, Tensor)) == 9 + 16 + 24
    one, two = load(state)
    assert isinstance(one + two, EighDecomposedLinearOperator)


def test_identities_take_no_memory():
    operator = Kron(IdentityLinearOperator(10**6), A[:1, :1])
    for one in (operator, load(operator.state_dict())):
        tensors = [x for x in one.state_dict().values() if isinstance(x, Tensor)]
        assert sum(x.untyped_storage().nbytes() for x in tensors) <= 8 * 20


@pytest.mark.gpu
def test_another_device(tmp_path: Path):
    operator = build(KFACLinearOperator, problems.make("cnn")).inverse(0.1)
    operator.save(tmp_path / "operator")
    found = load(tmp_path / "operator", device="cuda")
    assert found.device == torch.device("cuda:0")
    torch.testing.assert_close(matrix(found).cpu(), matrix(operator))


class Own(Blocks):
    """Blocks of a user with products of their own, which must not be lost without a word."""

    def _apply(self, columns):
        return 2 * columns


def test_classes_of_users():
    operator = Own([Diag(positive(3))])
    for one in (operator, Blocks([operator])):
        with pytest.raises(NotImplementedError, match="A Own cannot be saved"):
            one.state_dict()


# --- factors


def by_state(K: Any, L: Any, path: Path) -> Any:
    arguments = L.model_func, L.loss_func, L.params, L.data
    options = {"separate_weight_and_bias": L.separate_weight_and_bias, "fisher_type": "mc"}
    options |= {"batch_size_fn": L.batch_size_fn, "fallback": "dense"}
    return type(L).from_state_dict(K.state_dict(), *arguments, **options)


def by_file(K: Any, L: Any, path: Path) -> Any:
    K.save(path)
    L.load(path)
    return L


def by_parts(K: Any, L: Any, path: Path, parts: int = 3) -> Any:
    written = write_factors(L, path, parts)
    for found in (written, curvlinops.load(path)):
        assert error(matrix(found), matrix(K)) <= 1e-12
        inverse = K.inverse(0.1, use_exact_damping=True)
        assert error(matrix(found.inverse(0.1)), matrix(inverse)) <= 1e-9
    L.load(path)
    return L


#: How another operator gets the factors of one, and whether it has the same bits.
WAYS: dict[str, tuple[Callable, bool]] = {
    "state": (by_state, True),
    "file": (by_file, True),
    "one part": (lambda K, L, path: by_parts(K, L, path, 1), False),
    "parts": (by_parts, False),
}


@both
@pytest.mark.parametrize(
    "name, joint",
    core(
        [("cnn", True), ("transformer-tied", False)],
        product(["cnn", "transformer-tied", "cross-attention", "lstm-packed"], [False, True]),
    ),
)
def test_factors(cls: type, joint: bool, name: str, tmp_path: Path):
    """More data is added as if nothing had happened."""
    p = problems.make(name)
    for way, (move, has_bits) in WAYS.items():
        K, L = (build(cls, p, separate_weight_and_bias=not joint) for _ in range(2))
        L = move(K, L, tmp_path / way)
        if has_bits:
            assert_equal(L, K)
        assert L.report() == K.report()
        # to rounding: products with the same numbers depend on how they lie in memory
        assert error(matrix(L), matrix(K)) <= (1e-14 if has_bits else 1e-12)
        for operator in (K, L):
            operator.update(p.data[0])
        assert error(matrix(L), matrix(K)) <= 1e-12


def test_one_output(tmp_path: Path):
    """Eigenvectors of weight and bias are then one tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    data, params = [(torch.randn(8, 4), torch.randn(8, 1))], list(model.parameters())
    E, F = (EKFACLinearOperator(model, torch.nn.MSELoss(), params, data) for _ in range(2))
    assert error(matrix(by_file(E, F, tmp_path / "operator")), matrix(E)) <= 1e-6


@both
def test_factors_of_a_training_run_belong_to_no_batch(cls: type, tmp_path: Path):
    """After updates, a run that continues has another first batch, and other parameters."""
    p = problems.make("mlp-ce-mean")
    operator = build(cls, p)
    operator.update(p.data[1], decay=0.9)
    operator.save(tmp_path / "factors")
    expected = matrix(operator)
    with torch.no_grad():
        for param in p.params:
            param.mul_(1.5)
    later = build(cls, replace(p, data=p.data[1:]))
    later.load(tmp_path / "factors")
    assert error(matrix(later), expected) <= 1e-14
    with pytest.raises(ValueError, match="fisher_type"):
        build(cls, p, fisher_type="empirical").load(tmp_path / "factors")
    # those of all data belong to these parameters again
    later.compute_kronecker_factors()
    later.save(tmp_path / "factors")
    with pytest.raises(ValueError, match="differs in"):
        build(cls, p).load(tmp_path / "factors")


@both
def test_states_share_no_memory(cls: type):
    p = problems.make("cnn")
    operator, loaded = build(cls, p), build(cls, p)
    state = operator.state_dict()
    before = copy.deepcopy(state)
    for _ in range(2):
        operator.update(p.data[0])
        operator.update(p.data[0], decay=0.5)
        if cls is KFACLinearOperator:
            operator.merge(copy.deepcopy(operator))
        assert_equal(state, before)
    loaded.load_state_dict(state)
    for tensor in state.values():
        if isinstance(tensor, Tensor):
            tensor.zero_()
    assert_equal(loaded, before)


@both
def test_files_that_are_in_use_can_be_replaced(cls: type, tmp_path: Path):
    path, p = tmp_path / "factors.safetensors", problems.make("mlp-ce-mean")
    operator, loaded = build(cls, p), build(cls, p)
    operator.save(path)
    loaded.load(path)
    before = matrix(loaded)
    for factors in (operator, loaded):
        factors.update(p.data[0])
        factors.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert error(matrix(loaded), matrix(operator)) <= 1e-12
    assert error(matrix(loaded), before) > 1e-3


# --- wrong states


def reader_of(operator: Any) -> Callable[[dict], Any]:
    return operator.load_state_dict if hasattr(operator, "load_state_dict") else load


#: What happens to a tensor of a state; ``None`` if it is missing.
WRONG = {
    "NaN": lambda x: x * float("nan"),
    "infinite": lambda x: x + float("inf"),
    "shape": lambda x: x.new_ones(2, 3, 5),
    "integers": lambda x: x.long(),
    "float32": lambda x: x.float(),
    "missing": None,
    "no tensor": lambda x: x.tolist(),
}
OBJECTS: dict[str, Callable[[], Any]] = {
    "structured": lambda: Kron(B, A),
    **{cls.__name__: lambda cls=cls: build(cls, problems.make("cnn")) for cls in CLASSES},
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("how", WRONG)
def test_wrong_entries(name: str, how: str):
    """They are refused by name, and the operator stays as it is."""
    operator, change = OBJECTS[name](), WRONG[how]
    state, before, read = operator.state_dict(), matrix(operator), reader_of(operator)
    for entry in state.keys() - {"metadata"}:
        wrong = {k: v for k, v in state.items() if k != entry}
        if change is not None:
            wrong[entry] = change(state[entry])
        with pytest.raises(ValueError, match=f"damaged: .*('{entry}'|expand)"):
            read(wrong)
    assert torch.equal(matrix(operator), before)
    read(state)
    assert torch.equal(matrix(operator), before)


@pytest.mark.parametrize("name", OBJECTS)
def test_wrong_descriptions(name: str):
    operator = OBJECTS[name]()
    state, read = operator.state_dict(), reader_of(operator)
    metadata = json.loads(state["metadata"])
    contents = {"class": "Unknown", "arguments": []}, {"items": [1]}, {"tensor": "0"}, {}, None, 3
    others = [json.dumps(metadata | {"content": content}) for content in contents]
    for text in (*others, "", "{", "3", "{}"):
        with pytest.raises(ValueError, match=r"damaged|has a \w+, no (Structured|FactorSums)"):
            read(state | {"metadata": text})
    with pytest.raises(ValueError, match="no metadata"):
        read({})


def test_what_is_something_else(tmp_path: Path):
    path, K = tmp_path / "file", build(KFACLinearOperator, problems.make("cnn"))
    K.save(path)
    with pytest.raises(ValueError, match=r"FactorSums, no Structured.*method load\(path\)"):
        load(path)
    with pytest.raises(ValueError, match="no FactorSums.*by curvlinops.load"):
        K.load_state_dict(K.inverse(0.1).state_dict())
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")
