"""Structured operators in files."""

import json
from typing import Any

import problems
import pytest
import torch
from contract import error, matrix
from safetensors import safe_open
from safetensors.torch import save_file
from structured_cases import ALL, CHANGES, A, B, Blocks, Diag, Kron, positive

from curvlinops import (
    CGInverseLinearOperator,
    EighDecomposedLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    IdentityLinearOperator,
    KFACLinearOperator,
    StructuredLinearOperator,
    TorchLinearOperator,
    load,
)
from curvlinops.support import serialization


def kfac(name: str = "transformer-tied", cls: type = KFACLinearOperator, **options: Any):
    p = problems.make(name)
    options = {"fallback": "dense", "batch_size_fn": p.batch_size_fn} | options
    return cls(p.model, p.loss, p.params, p.data, **options)


def assert_equal(found: TorchLinearOperator, expected: TorchLinearOperator) -> None:
    """Check that two operators consist of the same."""
    one, two = found.state_dict(), expected.state_dict()
    assert one.keys() == two.keys() and one["metadata"] == two["metadata"]
    for name in one.keys() - {"metadata"}:
        assert torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype
    assert found.self_adjoint == expected.self_adjoint
    assert found.space.shapes == expected.space.shapes
    assert found.torch_dtype == expected.torch_dtype


@pytest.mark.parametrize("change", ["itself", "damped", "inverse", "eigendecomposition", "float32"])
@pytest.mark.parametrize("name", ALL)
def test_files(name: str, change: str, tmp_path):
    operator, _ = CHANGES[change](*ALL[name]())
    operator.save(tmp_path / "operator")
    loaded = load(tmp_path / "operator")
    assert type(loaded) is type(operator)
    assert_equal(loaded, operator)
    torch.testing.assert_close(loaded.to_dense(), operator.to_dense())
    operator.logdet(), operator.eigh()  # factors keep their decompositions
    assert_equal(load(operator.state_dict()), operator)


def test_two_writers_at_once(tmp_path, monkeypatch):
    """Each of them finds its file whole; the path has the one that was complete last."""
    path, writers = tmp_path / "operator", [ALL[name]()[0] for name in list(ALL)[:2]]
    last, save = list(writers), serialization.save_file

    def save_and_wait(*args: Any) -> None:
        save(*args)
        if last:
            last.pop().save(path)

    monkeypatch.setattr(serialization, "save_file", save_and_wait)
    last.pop(0).save(path)
    assert not last
    assert_equal(load(path), writers[0])
    assert list(tmp_path.iterdir()) == [path]


def test_products_that_are_not_symmetric():
    operator = Kron(torch.randn(3, 2), torch.randn(4, 5))
    for one in (operator, operator.T, (Kron(A @ A.diag().diag()) + 2 * IdentityLinearOperator(4))):
        assert not one.self_adjoint
        assert torch.equal(load(one.state_dict()).to_dense(), one.to_dense())


def test_a_preconditioner_without_model_and_data(tmp_path):
    p = problems.make("mlp-ce-mean")
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data)
    K.inverse(0.1, use_heuristic_damping=True).save(tmp_path / "inverse")
    M = load(str(tmp_path / "inverse"))
    assert list(M.blocks) == list(K.blocks)
    G = GGNLinearOperator(p.model, p.loss, p.params, p.data)
    damped = G + 0.1 * IdentityLinearOperator(G.space)
    v = torch.ones(G.shape[0], dtype=G.torch_dtype)
    solution = CGInverseLinearOperator(damped, preconditioner=M, rtol=1e-10) @ v
    torch.testing.assert_close(damped @ solution, v)
    gradients = {name: torch.ones_like(x) for name, x in zip(M.space.names, p.params, strict=True)}
    torch.testing.assert_close(list((M @ gradients).values()), list(M @ list(gradients.values())))


def test_plain_data_only(tmp_path):
    operator = kfac().inverse(0.1)
    torch.save(operator.state_dict(), tmp_path / "state")
    assert_equal(load(torch.load(tmp_path / "state", weights_only=True)), operator)
    operator.save(tmp_path / "file")
    with safe_open(str(tmp_path / "file"), "pt") as file:
        metadata = json.loads(file.metadata()["metadata"])
    assert metadata["content"]["class"] == "BlockDiagonalLinearOperator"


def test_what_is_shared_is_saved_once():
    """Also eigenvectors, by which sums of decompositions keep their structure."""
    vectors = Kron(*(torch.linalg.eigh(factor).eigenvectors for factor in (B, A)))
    values = positive(12)
    pair = Blocks([EighDecomposedLinearOperator(x, vectors) for x in (values, values + 1)])
    state = pair.state_dict()
    assert sum(x.numel() for x in state.values() if isinstance(x, torch.Tensor)) == 9 + 16 + 24
    one, two = load(state)
    assert isinstance(one + two, EighDecomposedLinearOperator)


def test_identities_take_no_memory():
    operator = Kron(IdentityLinearOperator(10**6), A[:1, :1])
    loaded = load(operator.state_dict())
    for one in (operator, loaded):
        tensors = [x for x in one.state_dict().values() if isinstance(x, torch.Tensor)]
        assert sum(x.untyped_storage().nbytes() for x in tensors) <= 8 * 20


def test_one_output(tmp_path):
    """Eigenvectors of weight and bias are then one tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
    data, params = [(torch.randn(8, 4), torch.randn(8, 1))], list(model.parameters())
    E, F = (EKFACLinearOperator(model, torch.nn.MSELoss(), params, data) for _ in range(2))
    E.save(tmp_path / "operator")
    F.load(tmp_path / "operator")
    assert error(matrix(F), matrix(E)) <= 1e-6


def test_parts_of_large_memory(tmp_path):
    whole = torch.arange(1.0, 10.0)
    blocks = Blocks([Diag(whole[2:4]), Diag(whole[3:7]), Diag(whole[::2])])
    blocks.save(tmp_path / "parts")
    assert torch.equal(load(tmp_path / "parts").diagonal(), blocks.diagonal())


@pytest.mark.gpu
def test_another_device(tmp_path):
    operator = kfac().inverse(0.1)
    operator.save(tmp_path / "operator")
    loaded = load(tmp_path / "operator", device="cuda")
    assert loaded.device == torch.device("cuda:0")
    torch.testing.assert_close(matrix(loaded).cpu(), matrix(operator))


class Own(StructuredLinearOperator):
    """An operator of a user."""

    def _apply(self, columns):
        return columns


class OwnBlocks(Blocks):
    """Blocks with products of their own, which must not be lost without a word."""

    def _apply(self, columns):
        return 2 * columns


@pytest.mark.parametrize("operator", [Own(Diag(positive(3)).space), OwnBlocks([Diag(positive(3))])])
def test_classes_of_users(operator: StructuredLinearOperator):
    for one in (operator, Blocks([operator])):
        with pytest.raises(NotImplementedError, match=f"A {type(operator).__name__} cannot be"):
            one.state_dict()


def test_what_is_no_operator(tmp_path):
    K, path = kfac(), tmp_path / "file"
    for operator in (K, kfac(cls=EKFACLinearOperator)):
        operator.save(path)
        with pytest.raises(ValueError, match=r"'Kronecker factors \d+'.*method load\(path\)"):
            load(path)
    with pytest.raises(ValueError, match="'structured operator 6'.*by curvlinops.load"):
        K.load_state_dict(K.inverse(0.1).state_dict())
    with pytest.raises(ValueError, match="no metadata"):
        load({})
    save_file({"x": torch.ones(1)}, str(path))
    with pytest.raises(ValueError, match="not the state of an operator"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")


def test_damaged_states():
    state = Kron(B, A).state_dict()
    for name in ("0", "1"):
        with pytest.raises(ValueError, match=f"damaged: KeyError.'{name}'"):
            load({key: value for key, value in state.items() if key != name})
        with pytest.raises(ValueError, match=f"damaged: The entry '{name}' has NaN"):
            load(state | {name: torch.full_like(state[name], torch.nan)})
        with pytest.raises(ValueError, match="damaged"):
            load(state | {name: torch.ones(7, 2, 3).double()})
        with pytest.raises(ValueError, match=f"'{name}' .*float64, got torch.float32"):
            load(state | {name: state[name].float()})
    metadata = json.loads(state["metadata"])
    for content in (
        {"class": "Unknown", "arguments": []},
        {"class": "KroneckerProductLinearOperator", "arguments": 3},
        {"class": "DiagonalLinearOperator", "arguments": []},
        {"class": "Factor", "arguments": [0.0, 0.0]},
        {"class": "ParameterSpace", "arguments": [{"items": []}, {"dtype": "save"}]},
        {"items": [1]},
        {"items": [[1, 2, 3]]},
        {"tensor": "0"},
        {},
        None,
        3,
    ):
        damaged = json.dumps(metadata | {"content": content})
        with pytest.raises(ValueError, match="damaged|no StructuredLinearOperator"):
            load(state | {"metadata": damaged})
    for damaged in ("", "{", "3", "{}", json.dumps({"format": metadata["format"]}), 3):
        with pytest.raises(ValueError, match="damaged"):
            load(state | {"metadata": damaged})
