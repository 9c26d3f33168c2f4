"""EKFAC against its dense reference and its definition."""

from dataclasses import replace

import kfac_models
import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from problems import Problem
from torch import Tensor, nn

from curvlinops import EKFACLinearOperator, KFACLinearOperator

#: Problems whose factors have distinct eigenvalues, apart from zeros.
DISTINCT = [
    "mlp-ce-all-mean", "mlp-mse-sum", "mlp-bce-all-mean", "classes-ce-all-mean", "scalar-bce-mean",
    "cnn", "conv1d", "group-norm", "transformer", "self-attention", "cross-attention", "lstm",
    "lstm-packed", "gru", "used-twice", "padding-idx", "embedding-bag-mean", "functional",
    "encoder-layer-train", "subset", "float32-cnn", "float32-float64-norms",
]  # fmt: skip


def build(p: Problem, fisher: str, joint: bool = False, cls: type = EKFACLinearOperator, **options):
    return cls(
        p.model, p.loss, p.params, p.data, fisher_type=fisher, exact=fisher == "type-2",
        separate_weight_and_bias=not joint, batch_size_fn=p.batch_size_fn, reduction=p.reduction,
        fallback="dense", **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", DISTINCT)
def test_equals_dense_reference(name: str, joint: bool):
    p = kfac_models.make(name)
    for fisher in ("type-2", "empirical"):
        expected = kfac_reference.kfac(p, fisher, joint=joint, corrected=True)
        assert error(matrix(build(p, fisher, joint)), expected) <= max(p.tolerance, 1e-7)


@pytest.mark.parametrize("name", ["classes-ce-mean", "rnn"])
def test_reduced_factors_give_another_basis(name: str):
    p = kfac_models.make(name)
    # enough samples that no factor is singular
    more = [(X, y) for X, y in p.data]
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        for X, y in p.data:
            other = (
                torch.randn(X.shape, generator=generator, dtype=X.dtype)
                if X.is_floating_point()
                else torch.randint(5, X.shape, generator=generator)
            )
            more.append((other, y))
    p = replace(p, data=more)
    expected = kfac_reference.kfac(p, "type-2", reduce=True, corrected=True)
    found = build(p, "type-2", kfac_approx="reduce", check_deterministic=False)
    assert error(matrix(found), expected) <= 1e-7


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("name", ["transformer-tied", "padding-idx-tied", "segmentation", "rnn"])
def test_trace_is_exact_and_no_diagonal_is_closer(name: str, fisher: str):
    """Blocks may be sums of Kronecker products."""
    p = problems.make(name)
    truth = (
        reference.ggn(p) if fisher == "type-2" else reference.empirical_fisher(p, terms="sample")
    )
    operator, offset = build(p, fisher), 0
    found = matrix(operator)
    kfac = matrix(build(p, fisher, cls=KFACLinearOperator))
    for param in p.params:
        own = slice(offset, offset + param.numel())
        exact, corrected = truth[own, own], found[own, own]
        assert float(corrected.trace()) == pytest.approx(float(exact.trace()), rel=1e-9)
        # the correction is a projection of the block
        inner = float((corrected * exact).sum())
        assert inner == pytest.approx(float(corrected.square().sum()), rel=1e-9)
        assert float((corrected - exact).norm()) <= float((kfac[own, own] - exact).norm()) + 1e-12
        offset = own.stop


@pytest.mark.parametrize("joint", [False, True])
def test_bases_of_groups_that_are_too_large(joint: bool):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3, groups=2).double()
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(32, 2).double())
    data = [(torch.randn(3, 4, 4, 4).double(), torch.randn(3, 2).double())]
    p = Problem(model, nn.MSELoss(), list(layer.parameters()), data, mc=True)
    operator = build(p, "type-2", joint, max_factor_size=3)
    expected = reference.ggn(p).diagonal().diag()
    assert error(matrix(operator), expected) <= 1e-10


@pytest.mark.parametrize("joint", [False, True])
def test_convolutions_used_twice(joint: bool):
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 2, 3, padding=1).double()
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Flatten())
    data = [(torch.randn(8, 2, 6).double(), torch.randn(8, 12).double())]
    p = Problem(model, nn.MSELoss(), list(layer.parameters()), data, mc=True)
    expected = kfac_reference.kfac(p, "type-2", joint=joint, corrected=True)
    assert error(matrix(build(p, "type-2", joint)), expected) <= 1e-9


class Counts(nn.Module):
    """Looks rows of a weight up, and multiplies with it, from either side."""

    def __init__(self, head: bool):
        super().__init__()
        self.embed, self._head = nn.Embedding(5, 3), head

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(x).sum(1))
        weight = self.embed.weight
        return z @ weight.T if self._head else torch.cat([z, z[:, :2] ** 2], 1) @ weight


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_lookups_beside_products(head: bool, joint: bool):
    """Each entry of the diagonal is exact where the basis is the standard one, of the lookups."""
    torch.manual_seed(0)
    model, x = Counts(head).double(), torch.randint(5, (6, 2))
    data = [(x[:4], torch.randn(4, 5 if head else 3).double()), (x[4:], model(x[4:]).detach())]
    p = Problem(model, nn.MSELoss(), list(model.parameters()), data, mc=True)
    operator, exact = build(p, "type-2", joint), reference.ggn(p)
    assert error(operator.trace(), exact.trace()) <= 1e-10
    # along the lookups' axis the matrix is diagonal, with the exact blocks' traces
    found = matrix(operator).reshape(5, 3, 5, 3).diagonal(dim1=1, dim2=3).sum(-1)
    expected = exact.reshape(5, 3, 5, 3).diagonal(dim1=1, dim2=3).sum(-1)
    assert error(found, expected.diagonal().diag()) <= 1e-10


@pytest.mark.parametrize(
    "fisher, message", [("forward-only", "EKFAC needs gradients"), ("type2", "must be one of")]
)
def test_fisher_types_are_refused_before_any_pass(fisher: str, message: str):
    p = problems.make("mlp-ce-mean")
    data = Failing(p.data, at=1)
    with pytest.raises(ValueError, match=message):
        build(replace(p, data=data), fisher)
    assert data.passes == 0


class Failing:
    """Batches that fail in one of the passes."""

    def __init__(self, data: list, at: int):
        self.data, self.at, self.passes = data, at, 0

    def __iter__(self):
        self.passes += 1
        yield self.data[0]
        if self.passes == self.at:
            raise RuntimeError("on purpose")
        yield from self.data[1:]


@pytest.mark.parametrize("at", [1, 2])
def test_after_a_failed_pass_all_is_computed_anew(at: int):
    p = problems.make("mlp-ce-mean")
    operator = build(replace(p, data=Failing(p.data, at)), "type-2", check_deterministic=False)
    with pytest.raises(RuntimeError, match="on purpose"):
        operator.trace()
    assert error(matrix(operator), matrix(build(p, "type-2"))) <= 1e-12


def corrected(p: Problem, bases: Problem, decay: float = 1.0) -> Tensor:
    """Second moments on all of `p` in the eigenbasis of the factors of `bases`."""
    operator = build(bases, "type-2")
    operator.trace()
    operator.update(p.data[-1], decay)
    return matrix(operator)


def test_update_keeps_the_basis():
    p = problems.make("mlp-ce-mean")
    first = replace(p, data=p.data[:1])
    found = corrected(p, first)
    truth = reference.ggn(p)
    offset = 0
    for param in p.params:  # the trace does not depend on the basis
        own = slice(offset, offset + param.numel())
        assert float(found[own, own].trace()) == pytest.approx(
            float(truth[own, own].trace()), rel=1e-9
        )
        offset = own.stop


def test_merges_are_refused():
    p = problems.make("mlp-ce-mean")
    one, two = build(p, "type-2"), build(p, "type-2")
    with pytest.raises(ValueError, match="Merge KFACLinearOperators, or build one operator on all"):
        one.merge(two)
