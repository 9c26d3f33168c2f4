"""Inverses of KFAC, its structure, and its use in solvers."""

import copy
from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import problems
import pytest
import torch
from contract import ALL, error, matrix
from models import EQUAL_LAYERS, Using, repeated
from problems import Problem
from structured_cases import QUANTITIES
from tables import core, in_turns
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    GGNLinearOperator,
    IdentityLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
)
from curvlinops.operators.kfac import structure


def build(
    name: str = "cnn",
    joint: bool = False,
    fisher: str = "type-2",
    cls: type = KFACLinearOperator,
    **options: Any,
) -> KFACLinearOperator:
    options |= {"fisher_type": fisher, "exact": fisher == "type-2"}
    return problems.make(name).build(cls, separate_weight_and_bias=not joint, **options)


NAMES = ["cnn", "transformer", "transformer-tied", "lstm", "padding-idx"]


@pytest.mark.parametrize("options", [{}, {"joint": True}, {"joint": True, "max_factor_size": 0}])
@pytest.mark.parametrize("name", NAMES)
def test_exact_damping(name: str, options: dict):
    operator = build(name, **options)
    dense = matrix(operator)
    expected = torch.linalg.inv(dense + 0.1 * torch.eye(len(dense), dtype=dense.dtype))
    inverse = operator.inverse(damping=0.1, use_exact_damping=True)
    for _ in range(3):  # nothing changes with products
        assert error(matrix(inverse), expected) <= 1e-9
    assert error(matrix(inverse.T), expected) <= 1e-9 and inverse.T is inverse
    again = KFACInverseLinearOperator(operator, damping=0.1, use_exact_damping=True)
    assert torch.equal(matrix(again), matrix(inverse))
    assert error(matrix(operator), dense) == 0


def damped(A: Tensor, B: Tensor, a: float, b: float) -> Tensor:
    """`(B + b I)^-1 (x) (A + a I)^-1`."""
    A, B = (torch.linalg.inv(M + d * torch.eye(len(M)).to(M)) for M, d in ((A, a), (B, b)))
    return torch.kron(B, A)


@pytest.mark.parametrize("damping", [0.1, (0.1, 0.03), [0.3, 0.2]])
def test_separate_damping(damping: Any):
    operator = build("mlp-ce-mean", joint=True)
    a, b = damping if isinstance(damping, tuple | list) else (damping,) * 2
    inverse = matrix(operator.inverse(damping=damping))
    index = _joint_index(operator, "0")
    A, B = operator.input_covariances["0"], operator.gradient_covariances["0"]
    assert error(inverse[index][:, index], damped(A, B, a, b)) <= 1e-10


def _joint_index(operator: KFACLinearOperator, module: str) -> Tensor:
    """Return the places of a block's entries `[O, I + 1]` in the vector."""
    weight, bias = (
        torch.arange(operator.shape[0])[operator.space.slice(f"{module}.{name}")]
        for name in ("weight", "bias")
    )
    return torch.cat([weight.reshape(len(bias), -1), bias[:, None]], 1).flatten()


@pytest.mark.parametrize("least", [1e-8, 0.1])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("joint", [False, True])
def test_heuristic_damping(double, joint: bool, groups: int, least: float):
    """Martens and Grosse 2015, section 6.3; each group has its own pi."""
    model = nn.Sequential(nn.Conv1d(4, 6, 2, groups=groups), nn.Tanh(), nn.Flatten())
    x = torch.randn(6, 4, 4) * torch.tensor([1.0, 1.0, 30.0, 30.0])[:, None]
    p = Problem.on(model, [x], nn.MSELoss())
    options = {"fisher_type": "empirical", "separate_weight_and_bias": not joint}
    operator, root = p.build(KFACLinearOperator, **options), sqrt(0.02)
    inverse = matrix(operator.inverse(0.02, use_heuristic_damping=True, min_damping=least))
    factors = operator.input_covariances["0"], operator.gradient_covariances["0"]
    blocks, of_bias = [], []
    for A, B in zip(*(x.reshape(groups, *x.shape[-2:]) for x in factors), strict=True):
        pi = sqrt(float(A.trace() / len(A)) / float(B.trace() / len(B)))
        blocks.append(damped(A, B, max(pi * root, least), max(root / pi, least)))
        of_bias += [max(root / pi, least)] * len(B)
    weight, bias = (operator.space.slice(f"0.{name}") for name in ("weight", "bias"))
    index = torch.arange(len(inverse))
    own = _joint_index(operator, "0") if joint else index[weight]
    assert error(inverse[own][:, own], torch.block_diag(*blocks)) <= 1e-10
    if not joint:  # its factor has entries between the groups, too
        B = matrix(operator)[bias, bias]
        expected = torch.linalg.inv(B + torch.diag(torch.tensor(of_bias)))
        assert error(inverse[bias, bias], expected) <= 1e-10


@pytest.mark.parametrize(
    "name, joint, largest",
    core(
        in_turns(product(EQUAL_LAYERS, [False, True]), [0, 40, 2**18]),
        product(EQUAL_LAYERS, [False, True], [0, 40, 2**18]),
    ),
)
def test_equal_layers(double, name: str, joint: bool, largest: int, monkeypatch):
    """What is computed for equal layers together is what operators on one layer each compute."""
    monkeypatch.setattr(structure, "_LARGEST", largest)
    monkeypatch.setattr(structure, "_structure", structure._structure.__wrapped__)  # not kept
    make, shape = EQUAL_LAYERS[name]
    model, X = make(), [torch.randn(n, *shape) for n in (3, 2)]
    data = [(x, torch.randn_like(model(x))) for x in X]
    params = dict(model.named_parameters())
    names = {n.rpartition(".")[0] for n in params}

    def build(cls: type, params: dict, data: list) -> KFACLinearOperator:
        options = {"fisher_type": "empirical", "separate_weight_and_bias": not joint}
        return cls(model, nn.MSELoss(reduction="sum"), params, data, **options)

    for cls in (KFACLinearOperator, EKFACLinearOperator):
        whole = build(cls, params, data[:1])
        whole.update(data[1])
        dampings = [{"damping": 0.1, "use_exact_damping": True}]
        if cls is KFACLinearOperator:
            dampings += [{"damping": (0.1, 0.3)}, {"damping": 0.1, "use_heuristic_damping": True}]
        inverses = [whole.inverse(**options) for options in dampings]
        wholes, logdet = [whole, *inverses, whole.damped(0.1) ** -0.5], 0.0
        for module in names:
            some = {n: p for n, p in params.items() if n.rpartition(".")[0] == module}
            own = build(cls, some, data[:1])
            own.update(data[1])
            logdet += own.damped(0.1).logdet()
            index = torch.cat([torch.arange(whole.shape[0])[whole.space.slice(n)] for n in some])
            parts = [own.inverse(**options) for options in dampings]
            for A, part in zip(wholes, [own, *parts, own.damped(0.1) ** -0.5], strict=True):
                assert error(matrix(A)[index][:, index], matrix(part)) <= 1e-9, module
        assert error(whole.damped(0.1).logdet(), logdet) <= 1e-9


def test_one_of_equal_layers_is_singular(double):
    model, (X, y) = repeated(*[lambda: nn.Linear(3, 3)] * 4), (torch.randn(9, 3), torch.ones(9, 3))
    with torch.no_grad():
        for x in (model[2].weight, model[2].bias):
            x[0] = 0.0
    options = {"fisher_type": "empirical", "separate_weight_and_bias": False}
    params = dict(model.named_parameters())
    operator = KFACLinearOperator(model, nn.MSELoss(), params, [(X, y)], **options)
    for exact in (False, True):
        with pytest.raises(ValueError, match=r"Block '4.weight, 4.bias': .* singular"):
            operator.inverse(use_exact_damping=exact)
    assert operator.logdet() == -torch.inf and operator.inverse(0.1).logdet().isfinite()


def test_heuristic_damping_without_inputs(double):
    p = Problem.on(nn.Linear(3, 2), [torch.zeros(4, 3)], nn.MSELoss())
    operator = p.build(KFACLinearOperator, fisher_type="empirical")
    inverse = matrix(operator.inverse(0.02, use_heuristic_damping=True))
    (A,), (B,) = (x.values() for x in (operator.input_covariances, operator.gradient_covariances))
    weight, root = operator.space.slice("weight"), sqrt(0.02)
    assert not A.any() and B.any()
    assert error(inverse[weight, weight], damped(A, B, root, root)) <= 1e-10


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            ({"damping": damping}, "damping must be a finite number >= 0")
            for damping in (
                *(-1.0, float("nan"), float("inf"), "a", True, torch.tensor([0.1, 0.2])),
                *((0.1, 0.1, 0.1), (0.1, np.bool_(False))),
            )
        ),
        ({"damping": (0.1, 0.1), "use_exact_damping": True}, "one number"),
        ({"damping": (0.1, 0.1), "use_heuristic_damping": True}, "one number"),
        (
            {"damping": 0.1, "use_heuristic_damping": True, "use_exact_damping": True},
            "either heuristic or exact",
        ),
        ({"damping": 0.1, "min_damping": -1.0}, "min_damping must be a finite number >= 0"),
        ({}, "Block '.*weight': .*singular"),
        ({"cls": EKFACLinearOperator, "damping": (0.1, 0.2)}, "no factors to which damping"),
        (
            {"cls": EKFACLinearOperator, "damping": 0.1, "use_heuristic_damping": True},
            "without use_heuristic_damping",
        ),
        ({"cls": EKFACLinearOperator}, "Block '.*: .*singular"),
    ],
    ids=str,
)
def test_refused(options: dict, message: str):
    options = dict(options)
    operator = build(cls=options.pop("cls", KFACLinearOperator))
    with pytest.raises(ValueError, match=message):
        operator.inverse(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
@pytest.mark.parametrize("seed", range(3))
def test_logits_that_do_not_change_the_loss(seed: int, fisher: str, dtype: torch.dtype):
    """Rounding makes the zero eigenvalue of the last layer's factor positive for some seeds."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    data = [(torch.randn(40, 5, dtype=dtype), torch.randint(3, (40,)))]
    for cls in (KFACLinearOperator, EKFACLinearOperator):
        params = list(net.parameters())
        operator = cls(net, nn.CrossEntropyLoss(), params, data, fisher_type=fisher)
        assert operator.logdet() == -torch.inf
        for exact in (False, True):
            with pytest.raises(ValueError, match="Block '2.*singular"):
                operator.inverse(use_exact_damping=exact)


def few_samples(cls: type) -> list:
    """Fewer samples than inputs: in float32, and the same in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 10), nn.Tanh(), nn.Linear(10, 3))
    X, y = 10 * torch.randn(8, 30), torch.randint(3, (8,))
    operators = []
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(net).to(dtype)
        params, data = list(model.parameters()), [(X.to(dtype), y)]
        loss = nn.CrossEntropyLoss()
        operators.append(cls(model, loss, params, data, fisher_type="type-2"))
    return operators


@pytest.mark.parametrize("damping, tolerance", [(1e-3, 1e-3), (1e-5, 1e-2), (1e-6, 5e-2)])
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_little_damping_in_float32(cls: type, damping: float, tolerance: float):
    """The error is that of the factors in float32."""
    operator, wide = few_samples(cls)
    expected = matrix(wide.inverse(damping, use_exact_damping=True))
    identity = damping * IdentityLinearOperator(operator.space)
    for inverse in (
        operator.inverse(damping, use_exact_damping=True),
        (operator + identity).inverse(),
        operator.eigh().inverse(damping),
    ):
        assert error(matrix(inverse).double(), expected) <= tolerance


@pytest.mark.parametrize("damping", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("options", [{}, {"use_exact_damping": True}], ids=["separate", "exact"])
def test_inverses_are_positive(options: dict, damping: float):
    """Factors are sums of squares, though rounding makes eigenvalues negative."""
    operator, _ = few_samples(KFACLinearOperator)
    for name, block in operator.inverse(damping, **options).blocks.items():
        values = block.eigh().eigenvalues
        exact = "use_exact_damping" in options or "bias" in name
        assert float(values.max()) <= (1 + 1e-3) / (damping if exact else damping**2), name
        if exact:
            assert float(values.min()) > 0, name


def test_refused_by_the_class():
    p = problems.make("mlp-ce-mean")
    with pytest.raises(TypeError, match="no option cache.* Leave the argument out"):
        KFACInverseLinearOperator(build("mlp-ce-mean"), damping=0.1, cache=False)
    with pytest.raises(ValueError, match="Only KFAC and EKFAC"):
        KFACInverseLinearOperator(p.build(GGNLinearOperator))


def test_unused_parameters_have_zero_blocks():
    net = Using(lambda m, x: m.used(x), used=nn.Linear(2, 2), unused=nn.Linear(2, 2))
    p = Problem.on(net, [torch.randn(6, 2)], nn.MSELoss())
    operator = p.build(KFACLinearOperator)
    assert [block.structure for block in operator.report()] == ["kronecker"] * 2 + ["zero"] * 2
    assert not matrix(operator)[6:].any()
    inverse = matrix(operator.inverse(damping=0.5))
    torch.testing.assert_close(inverse[6:, 6:], 2 * torch.eye(6))
    with pytest.raises(ValueError, match="Block 'unused.weight'"):
        operator.inverse(damping=(0.1, 0.0))


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_unused_parts_of_parameters_are_damped(double, cls: type):
    parts = {"weight": torch.randn(8, 5), "bias": torch.randn(8)}
    net = Using(lambda m, x: nn.functional.linear(x, m.weight[::2], m.bias[:4]), **parts)
    p = Problem.on(net, [torch.randn(9, 5)], nn.MSELoss())
    for separate in (True, False):
        options = {"separate_weight_and_bias": separate}
        operator = p.build(cls, **options)
        truth = torch.linalg.inv(matrix(operator) + 0.1 * torch.eye(48))
        for inverse in (
            operator.inverse(0.1, use_exact_damping=True),
            (operator + 0.1 * IdentityLinearOperator(operator.space)).inverse(),
        ):
            assert error(matrix(inverse), truth) <= 1e-10
        plain = operator.inverse(0.1).diagonal()[5:10]  # the second row
        torch.testing.assert_close(plain, torch.full_like(plain, 10.0))
        with pytest.raises(ValueError, match="singular"):
            operator.inverse()


class Tied(nn.Module):
    """Embedding and head share a table."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.body = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.table = nn.Embedding(vocabulary, width)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.body(self.table(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) @ self.table.weight.T


def test_damping_of_blocks_that_are_no_product():
    torch.manual_seed(0)
    net, words, (a, b) = Tied(5, 3).double(), torch.tensor([0, 1, 1, 2, 4, 4, 4]), (0.1, 0.03)
    loss, data = nn.CrossEntropyLoss(), [(words, words.flip(0))]
    operator = KFACLinearOperator(net, loss, [*net.norm.parameters()], data)
    expected = torch.linalg.inv(matrix(operator) + b * torch.eye(6).double())
    assert error(matrix(operator.inverse((a, b))), expected) <= 1e-10
    # the two products' factors of inputs; those of gradients are identities
    operator = KFACLinearOperator(net, loss, [net.table.weight], data, fisher_type="forward-only")
    counts = words.bincount(minlength=5).double() / len(words)
    h = net.hidden(words).detach()
    by_word, by_width = (torch.eye(n).double() * (1 + b) for n in (5, 3))
    expected = torch.kron(torch.diag(counts + a), by_width)
    expected += torch.kron(by_word, h.T @ h / len(words) + a * torch.eye(3).double())
    assert error(matrix(operator.inverse((a, b))), torch.linalg.inv(expected)) <= 1e-10


@pytest.mark.parametrize(
    ("vocabulary", "width", "limit"), [(1100, 8, 16384), (17_000, 64, 16384), (17_000, 64, 0)]
)
def test_exact_damping_of_a_large_table(
    vocabulary: int, width: int, limit: int, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    net, words = Tied(vocabulary, width), torch.randint(vocabulary, (9,))
    options = {"fisher_type": "empirical", "max_factor_size": limit}
    args = net, nn.CrossEntropyLoss(), list(net.parameters()), [(words, words.flip(0))]
    operator = KFACLinearOperator(*args, **options)
    v = torch.rand(operator.shape[1])
    if limit == 0:  # all factors are diagonal
        inverse = operator.inverse(0.1, use_exact_damping=True)
        torch.testing.assert_close(inverse @ v, v / (operator.diagonal() + 0.1))
        return
    assert (operator.inverse(0.1) @ v).isfinite().all()
    with monkeypatch.context() as patch:  # nothing is decomposed before
        patch.setattr(torch.linalg, "eigh", None)
        with pytest.raises(ValueError, match="'table.weight'.*inverse.damping.*params.*max_factor"):
            operator.inverse(0.1, use_exact_damping=True)
    with pytest.raises(ValueError, match="'table.weight'.*max_factor_size"):
        (operator + 0.1 * IdentityLinearOperator(operator.space)).logdet()


STRUCTURED = {
    **{name: lambda name=name: build(name) for name in ("cnn", "transformer-tied")},
    "cross-attention": lambda: build("cross-attention", fisher="empirical", fallback="dense"),
    "corrected": lambda: build(joint=True, fisher="empirical", cls=EKFACLinearOperator),
    "diagonal of the GGN": lambda: ALL["ggn-diagonal"].build(problems.make("mlp-mse-mean")),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structure(name: str):
    """Operators on data have all methods of structured operators."""
    operator = STRUCTURED[name]()
    dense = matrix(operator)
    labels = ["trace", "norm", "diagonal", "dense", "eigenvalues", "damped", "power 3"]
    for label in [*labels, *(["damped inverse", "inverse"] if "GGN" in name else [])]:
        quantity, expected = QUANTITIES[label]
        assert error(quantity(operator), expected(dense)) <= 1e-9, label
    shifted = 2 * operator + 0.3 * IdentityLinearOperator(operator.space)
    truth = 2 * dense + 0.3 * torch.eye(len(dense), dtype=dense.dtype)
    for label, (quantity, expected) in QUANTITIES.items():
        assert error(quantity(shifted), expected(truth)) <= 1e-9, label
    draws = operator.sample(torch.Generator().manual_seed(0), 4000)
    assert error(draws @ draws.T / 4000, dense) <= 0.15


def test_factors_that_overflow():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = [(1e25 * torch.rand(5, 3), torch.randint(2, (5,)))]
    operator = KFACLinearOperator(net, nn.CrossEntropyLoss(), list(net.parameters()), data)
    for exact in (False, True):
        with pytest.raises(ValueError, match="'0.weight'.*NaN or infinite"):
            operator.inverse(damping=0.1, use_exact_damping=exact)
