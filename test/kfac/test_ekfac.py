"""EKFAC against its dense reference and its definition."""

from dataclasses import replace

import kfac_models
import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from kfac_models import problem
from models import Using
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


def test_reduced_factors_give_another_basis(double):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    p = problem(model, [torch.randn(n, 4, 3) for n in (12, 8)], nn.MSELoss())
    expected = kfac_reference.kfac(p, "type-2", reduce=True, corrected=True)
    assert error(matrix(build(p, "type-2", kfac_approx="reduce")), expected) <= 1e-7


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
def test_bases_of_groups_that_are_too_large(double, joint: bool):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    p = problem(model, [torch.randn(3, 4, 4, 4)], nn.MSELoss())
    p = replace(p, params=p.params[:2])
    operator = build(p, "type-2", joint, max_factor_size=3)
    assert error(matrix(operator), reference.ggn(p).diagonal().diag()) <= 1e-10


@pytest.mark.parametrize("joint", [False, True])
def test_convolutions_used_twice(double, joint: bool):
    layer = nn.Conv1d(2, 2, 3, padding=1)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Flatten())
    p = problem(model, [torch.randn(8, 2, 6)], nn.MSELoss())
    expected = kfac_reference.kfac(p, "type-2", joint=joint, corrected=True)
    assert error(matrix(build(p, "type-2", joint)), expected) <= 1e-9


def counts(is_head: bool) -> nn.Module:
    """Return a model that looks rows of a weight up, and multiplies with it, from either side."""

    def function(m: Using, x: Tensor) -> Tensor:
        z, weight = torch.tanh(m.embed(x).sum(1)), m.embed.weight
        return z @ weight.T if is_head else torch.cat([z, z[:, :2] ** 2], 1) @ weight

    return Using(function, embed=nn.Embedding(5, 3))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("is_head", [False, True])
def test_lookups_beside_products(double, is_head: bool, joint: bool):
    """Each entry of the diagonal is exact where the basis is the standard one, of the lookups."""
    p = problem(counts(is_head), [torch.randint(5, (n, 2)) for n in (4, 2)], nn.MSELoss())
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


def test_update_keeps_the_basis():
    p = problems.make("mlp-ce-mean")
    operator, truth = build(replace(p, data=p.data[:1]), "type-2"), reference.ggn(p)
    operator.trace()
    operator.update(p.data[-1])
    for param in operator.space.names:  # the trace does not depend on the basis
        own = operator.space.slice(param)
        assert error(matrix(operator)[own, own].trace(), truth[own, own].trace()) <= 1e-9
