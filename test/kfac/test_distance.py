"""The distance of blocks to the exact ones, against dense matrices."""

from itertools import product

import matplotlib.pyplot as plt
import problems
import pytest
import reference
import torch
from contract import matrix
from tables import core, in_turns
from torch import Tensor

from curvlinops import EKFACLinearOperator, KFACLinearOperator, plot_by_layer

MODELS = [
    *("mlp-mse-sum", "mlp-mse-mean", "cnn", "transformer-tied", "padding-idx"),
    *("used-twice", "lstm-packed"),
]
CLASSES = [KFACLinearOperator, EKFACLinearOperator]


def expected(p: object, operator: KFACLinearOperator, truth: Tensor) -> dict[str, float]:
    """Relative errors of the blocks that are Kronecker products."""
    dense, names = matrix(operator), operator.space.names
    sizes = [param.numel() for param in p.params]
    places, end = {}, 0
    for name, size in zip(names, sizes, strict=True):
        places[name] = torch.arange(end, end + size)
        end += size
    errors = {}
    for block in operator.report():
        if block.structure != "kronecker":
            continue
        place = torch.cat([places[name] for name in block.names])
        F, K = (x[place[:, None], place] for x in (truth, dense))
        errors[block.names[0]] = float((K - F).norm() / F.norm())
    return errors


@pytest.mark.parametrize(
    "name, cls, joint",
    core(
        in_turns(product(MODELS, CLASSES), [False, True, True, False]),
        product(MODELS, CLASSES, [False, True]),
    ),
)
def test_equals_that_of_dense_matrices(name: str, cls: type, joint: bool):
    p = problems.make(name)
    for fisher in ("type-2", "empirical") if p.mc else ("empirical",):
        options = {"separate_weight_and_bias": not joint, "check_deterministic": False}
        operator = p.build(cls, fisher_type=fisher, exact=fisher == "type-2", **options)
        is_ggn = fisher == "type-2"
        truth = reference.ggn(p) if is_ggn else reference.empirical_fisher(p, terms="sample")
        found = operator.distance(num_vectors=1000)
        errors = expected(p, operator, truth)
        assert found.keys() == errors.keys()
        for key, error in errors.items():
            assert float(found[key].estimate) == pytest.approx(error, rel=1e-6, abs=1e-7)
            assert float(found[key].standard_error) == 0


@pytest.mark.parametrize("num_vectors", [2, 1000])
def test_layers_without_gradients(num_vectors: int):
    """Behind a head of zeros, K and the exact block are zero."""
    p = problems.make("mlp-ce-mean")
    head = [param for param in p.params if param.ndim == 2][-1]
    with torch.no_grad():
        head.zero_()
    operator = p.build(KFACLinearOperator, fisher_type="empirical")
    *behind, last = [x for n, x in operator.distance(num_vectors).items() if "weight" in n]
    assert all(float(error) == float(standard_error) == 0 for error, standard_error in behind)
    assert 0 < float(last.estimate) < torch.inf


def test_drawn_by_layer():
    p = problems.make("mlp-mse-mean")
    found = p.build(KFACLinearOperator).distance()
    axes = plot_by_layer(found)
    assert len(axes.patches) == len(found)
    plt.close(axes.figure)


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_random_vectors(fisher: str):
    """Estimates are within their errors, and the same seed draws the same samples."""
    p = problems.make("mlp-ce-sum")
    operator = p.build(KFACLinearOperator, fisher_type=fisher)
    exact = operator.distance(num_vectors=1000)
    estimates = [operator.distance(num_vectors=6, seed=seed) for seed in range(40)]
    for name, (truth, _) in exact.items():
        values, errors = map(torch.stack, zip(*(x[name] for x in estimates), strict=True))
        if not bool(errors.any()):  # of few entries
            continue
        squares = values.square()
        assert abs(squares.mean() - truth**2) <= 4 * squares.std() / 40**0.5 + 0.05 * truth**2
        assert 0.4 <= float(errors.mean() / values.std()) <= 2


def test_refused():
    p = problems.make("mlp-mse-mean")
    operator = p.build(KFACLinearOperator, fisher_type="forward-only")
    with pytest.raises(ValueError, match="needs gradients"):
        operator.distance()
    operator = p.build(KFACLinearOperator)
    with pytest.raises(ValueError, match="num_vectors"):
        operator.distance(num_vectors=1)
