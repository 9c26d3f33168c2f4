"""Quantities layer by layer, against blocks of the dense matrix; parameters by glob."""

import matplotlib.pyplot as plt
import numpy as np
import problems
import pytest
import torch
from contract import CASES, places
from models import Using
from torch import nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    SubmatrixLinearOperator,
    by_layer,
    eigsh,
    hutchinson_trace,
    lanczos_approximate_spectrum,
    plot_by_layer,
    select_parameters,
    xtrace,
)
from curvlinops.algorithms.sampling import Estimate

PROBLEM = "mlp-ce-mean"


def block() -> nn.Module:
    """Two modules, and a parameter of its own."""
    parts = {"attn": nn.Linear(3, 3), "mlp": nn.Linear(3, 3), "scale": torch.ones(3)}
    return Using(lambda m, x: m.scale * m.mlp(m.attn(x).tanh()), **parts)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), nn.Linear(3, 2)).double()


def hessian(model: nn.Module) -> HessianLinearOperator:
    data = [(torch.randn(7, 3).double(), torch.randint(2, (7,)))]
    return HessianLinearOperator(model, nn.CrossEntropyLoss(), dict(model.named_parameters()), data)


LAYERS = {
    "module": {
        "0": ["0.scale"],
        "0.attn": ["0.attn.weight", "0.attn.bias"],
        "0.mlp": ["0.mlp.weight", "0.mlp.bias"],
        "1": ["1.scale"],
        "1.attn": ["1.attn.weight", "1.attn.bias"],
        "1.mlp": ["1.mlp.weight", "1.mlp.bias"],
        "2": ["2.weight", "2.bias"],
    },
    "parameter": {name: [name] for name, _ in network().named_parameters()},
}


@pytest.mark.parametrize("by", LAYERS)
def test_layers(by: str):
    H = hessian(network())
    matrix = H.to_dense()
    traces, pairs = by_layer(H, xtrace, 10**3, by=by), by_layer(H, eigsh, k=2, which="LA", by=by)
    assert list(traces) == list(pairs) == list(LAYERS[by])
    for layer, names in LAYERS[by].items():
        chosen = places(H.space, names)
        block = matrix[chosen][:, chosen]
        torch.testing.assert_close(traces[layer], block.trace())
        expected = torch.linalg.eigvalsh(block)[-2:]
        torch.testing.assert_close(pairs[layer].eigenvalues, expected, atol=1e-10, rtol=1e-8)


def test_layers_by_patterns():
    H = hessian(network())
    by = {"attention": "*.attn", "first": ["0", "2.bias"], "all": "*"}
    sizes = by_layer(H, lambda block: block.shape[0], by=by)
    assert sizes == {"attention": 24, "first": 27 + 2, "all": H.shape[0]}
    trace = by_layer(H, xtrace, 10**3, by=by)["all"]
    torch.testing.assert_close(trace, H.to_dense().trace())


def test_parameters_without_modules_and_structured_operators():
    H = CASES["hessian"].build(problems.make("functional"))
    assert list(by_layer(H, xtrace, 5, seed=0)) == H.space.names
    p = problems.make(PROBLEM)
    K = p.build(KFACLinearOperator, fisher_type="type-2")
    traces = by_layer(K, xtrace, 10**3)
    torch.testing.assert_close(sum(traces.values()), K.trace())


def test_spectra():
    A = CASES["ggn"].build(problems.make(PROBLEM))
    for grid, density in by_layer(A, lanczos_approximate_spectrum, 5, seed=0).values():
        assert abs(torch.trapezoid(density, grid) - 1) <= 1e-12


def test_graphs_are_shared():
    """All products with all layers take one pass over the data."""

    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    model = network()
    data = Counted([(torch.randn(7, 3).double(), torch.randint(2, (7,)))])
    G = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    before = data.passes
    by_layer(G, hutchinson_trace, 12, seed=0, chunk_size=3)
    assert data.passes == before + 1


def test_errors():
    H = hessian(network())
    for A, options, kind, message in [
        (torch.eye(3), {}, TypeError, "operator of this package, got Tensor"),
        (SubmatrixLinearOperator(torch.eye(3), [0], [0]), {}, ValueError, "on named parameters"),
        (CASES["jacobian"].build(problems.make(PROBLEM)), {}, ValueError, "square operator"),
        (H, {"by": "layer"}, ValueError, "by must be 'module', 'parameter', or a dictionary"),
        (H, {"by": {"head": ["3"]}}, ValueError, r"by\['head'\] has unknown names \['3'\]"),
    ]:
        with pytest.raises(kind, match=message):
            by_layer(A, xtrace, 5, **options)
    with pytest.raises(ValueError, match="k must be") as caught:
        by_layer(H, eigsh, k=20)
    assert "In the layer '0', of dimension 3." in "".join(caught.value.__notes__)


# --- names and globs


@pytest.mark.parametrize(
    "patterns, expected",
    [
        (["*.attn.*"], ["0.attn.weight", "0.attn.bias", "1.attn.weight", "1.attn.bias"]),
        (["*.attn"], ["0.attn.weight", "0.attn.bias", "1.attn.weight", "1.attn.bias"]),
        (["2", "0.scale"], ["2.weight", "2.bias", "0.scale"]),
        (
            ["[01].mlp.bias", "*.bias"],
            [f"{n}.bias" for n in ("0.mlp", "1.mlp", "0.attn", "1.attn", 2)],
        ),
        (["?.scale"], ["0.scale", "1.scale"]),
    ],
)
def test_names_and_globs(patterns: list[str], expected: list[str]):
    model = network()
    H = hessian(model)
    S = SubmatrixLinearOperator(H, patterns, ["0.scale"])
    assert S.codomain.names == expected
    rows, columns = places(H.space, expected), places(H.space, ["0.scale"])
    torch.testing.assert_close(S.to_dense(), H.to_dense()[rows][:, columns])
    chosen = select_parameters(model, *patterns)
    own = dict(model.named_parameters())
    assert list(chosen) == [name for name in own if name in expected]
    assert all(chosen[name] is own[name] for name in chosen)


def test_tied_and_wrapped_parameters():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["table"].weight
    assert list(select_parameters(model, "*")) == ["table.weight", "head.bias"]
    assert list(select_parameters(model, "head")) == ["head.weight", "head.bias"]
    wrapped = nn.DataParallel(network())
    assert list(select_parameters(wrapped, "2")) == ["2.weight", "2.bias"]


def test_names_with_brackets_are_names():
    params = {"w[0]": torch.ones(2, 3), "w0": torch.ones(3)}
    data = [(torch.ones(4, 3), torch.ones(4, 2))]
    H = HessianLinearOperator(lambda p, X: (X * p["w0"]) @ p["w[0]"].T, nn.MSELoss(), params, data)
    assert SubmatrixLinearOperator(H, ["w[0]"], ["w[01]"]).shape == (6, 3)


def test_errors_of_names():
    H, model = hessian(network()), network()
    with pytest.raises(ValueError, match=r"row_idxs has unknown names \['\*.conv'\]. There are"):
        SubmatrixLinearOperator(H, ["*.conv", "2"], ["2"])
    with pytest.raises(
        ValueError, match="patterns has unknown names .*Names of modules, and globs"
    ):
        select_parameters(model, "2", "conv")
    with pytest.raises(ValueError, match="'\\*' is all of them"):
        select_parameters(model)
    with pytest.raises(TypeError, match=r"must be strings, got \[\['2'\]\]"):
        select_parameters(model, ["2"])
    with pytest.raises(TypeError, match="must be a torch.nn.Module, got list"):
        select_parameters([model], "2")


# --- plots


def test_plot():
    tensor = torch.tensor
    ax = plot_by_layer({"a": tensor(2.0), "b": 3, "c": np.float64(-1)}, color="red")
    assert [bar.get_height() for bar in ax.patches] == [2, 3, -1]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]
    assert np.allclose([bar.get_center()[0] for bar in ax.patches], [0, 1, 2])
    assert ax.patches[0].get_facecolor()[:3] == (1, 0, 0) and not ax.containers[0].errorbar
    ax = plot_by_layer({"a": Estimate(tensor(2.0), tensor(0.5)), "b": tensor(1.0)})
    (errors,) = ax.containers[-1].errorbar[2]
    assert np.allclose([part[:, 1] for part in errors.get_segments()], [[1.5, 2.5], [1, 1]])
    pairs = eigsh(np.diag([1.0, 2.0, 3.0]), 2, seed=0)
    ax = plot_by_layer({"a": pairs, "b": [4.0]})
    assert np.allclose([bar.get_height() for bar in ax.patches], [2, 3, 4])
    assert np.allclose([bar.get_center()[0] for bar in ax.patches], [-0.2, 0.2, 1])
    assert plot_by_layer({"a": 1.0}, ax=ax) is ax
    plt.close("all")
    for wrong in (torch.ones(2, 2), (torch.ones(3), torch.ones(3)), "a", []):
        with pytest.raises(ValueError, match="layer 'b' must be a number or a list"):
            plot_by_layer({"a": 1.0, "b": wrong})
    with pytest.raises(ValueError, match="no layers"):
        plot_by_layer({})
