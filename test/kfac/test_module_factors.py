"""Factors by module and captured layers, as programs read them for sums of their own."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from contract import error
from models import Using
from problems import Problem
from torch import Tensor, nn

from curvlinops import EKFACLinearOperator, FisherType, KFACLinearOperator
from curvlinops.operators.kfac.captured import CapturedLayer


def _operator(
    layer: nn.Module,
    shape: tuple[int, ...],
    cls: type = KFACLinearOperator,
    **options: object,
) -> KFACLinearOperator:
    torch.manual_seed(0)
    X, y = torch.randn(5, 8).double(), torch.randint(3, (5,))
    if isinstance(layer, nn.Embedding):
        X = torch.randint(4, (5, 8))
    model = Using(
        lambda m, x: m.head(m.layer(x.reshape(-1, *shape)).tanh().flatten(1)),
        layer=layer, head=nn.LazyLinear(3),
    ).double()  # fmt: skip
    model(X)
    options = {"fisher_type": FisherType.TYPE2} | options
    params = list(model.parameters())
    return cls(model, nn.CrossEntropyLoss(), params, [(X, y)], **options)


PLAIN = {
    "linear": (nn.Linear(8, 4), (8,)),
    "sequence": (nn.Linear(2, 4, bias=False), (4, 2)),
    "convolution": (nn.Conv2d(2, 3, 2), (2, 2, 2)),
    "convolution-1d": (nn.Conv1d(2, 3, 3, bias=False), (2, 4)),
}


@pytest.mark.parametrize("fisher", ["type-2", "forward-only"])
@pytest.mark.parametrize("layer, shape", PLAIN.values(), ids=PLAIN)
def test_products_of_factors_are_blocks(layer: nn.Module, shape: tuple[int, ...], fisher: str):
    K = _operator(layer, shape, fisher_type=fisher)
    blocks = []
    for name, module in K.risk.model.roots[0].named_modules():
        if name in K._mapping:
            A, B = K._input_covariances[name], K._gradient_covariances[name]
            blocks += [torch.kron(B, A)] + ([] if module.bias is None else [B])
    torch.testing.assert_close(torch.block_diag(*blocks), K @ torch.eye(K.shape[0]).double())


def test_models_that_are_a_single_layer():
    torch.manual_seed(0)
    model, X, y = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    options = {"fisher_type": FisherType.EMPIRICAL, "check_deterministic": False}
    K = KFACLinearOperator(
        model, nn.MSELoss(reduction="sum"), list(model.parameters()), [(X, y)], **options
    )
    g = 2 * (model(X) - y).detach()
    torch.testing.assert_close(K.input_covariances, {"": X.T @ X / 5})
    torch.testing.assert_close(K.gradient_covariances, {"": g.T @ g})
    assert K.mapping == K._mapping == {"": {"weight": 0, "bias": 1}}


def test_writes_to_factors_count(tmp_path: Path):
    K, names = _operator(*PLAIN["linear"]), ("layer", "head")
    units = torch.eye(K.shape[0]).double()
    inverse = K.inverse(0.1) @ units.sum(0)
    K.eigvalsh()
    for name in names:
        K.input_covariances[name].diagonal().add_(0.5)
        K.gradient_covariances[name].mul_(2)
    A, B = K.input_covariances, K.gradient_covariances
    blocks = [x for name in names for x in (torch.kron(B[name], A[name]), B[name])]
    expected = torch.block_diag(*blocks)
    torch.testing.assert_close(K @ units, expected)
    torch.testing.assert_close(K.trace(), expected.trace())
    assert not torch.allclose(K.inverse(0.1) @ units.sum(0), inverse)
    K._input_covariances["layer"].zero_()
    expected[:32, :32] = 0.0
    torch.testing.assert_close(K @ units, expected)
    K.save(tmp_path / "factors")
    other = _operator(*PLAIN["linear"])
    other.load(tmp_path / "factors")
    torch.testing.assert_close(other @ units, expected)


@pytest.mark.parametrize(
    "cls, fisher, factor, message",
    [
        (EKFACLinearOperator, "type-2", "input_covariances", "eigenvalues are those of the data"),
        (KFACLinearOperator, "forward-only", "gradient_covariances", "some are the identity"),
    ],
)
def test_writes_that_cannot_count_are_refused(cls: type, fisher: str, factor: str, message: str):
    K = _operator(*PLAIN["linear"], cls=cls, fisher_type=fisher)
    v = torch.ones(K.shape[0]).double()
    before = K @ v
    getattr(K, factor)["layer"].add_(1)
    for use in (lambda: K @ v, K.state_dict, lambda: K.inverse(0.1)):
        with pytest.raises(RuntimeError, match=message):
            use()
    K.compute_kronecker_factors()
    assert torch.equal(K @ v, before)


def test_mappings_are_copies():
    K = _operator(*PLAIN["linear"])
    for name in ("mapping", "_mapping"):
        getattr(K, name)["layer"]["weight"] = -1
        assert getattr(K, name)["layer"]["weight"] == 0


def test_biases_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = [(torch.randn(5, 3).double(), torch.randint(3, (5,)))]
    options = {"fisher_type": FisherType.TYPE2}

    def build(params: list) -> KFACLinearOperator:
        return KFACLinearOperator(model, nn.CrossEntropyLoss(), params, data, **options)

    whole, K = build(list(model.parameters())), build([model[0].bias, model[2].bias])
    assert K._input_covariances == K.input_covariances == {}
    assert K._mapping == {"0": {"bias": 0}, "2": {"bias": 1}}
    for name, B in K._gradient_covariances.items():
        torch.testing.assert_close(B, whole._gradient_covariances[name])
    torch.testing.assert_close(
        K @ torch.eye(7).double(), torch.block_diag(*K._gradient_covariances.values())
    )
    mixed = build([model[0].bias, model[2].weight])
    assert list(mixed._input_covariances) == ["2"]
    assert sorted(mixed._gradient_covariances) == ["0", "2"]


def test_more_data_is_read():
    K = _operator(*PLAIN["linear"])
    before = K._input_covariances["layer"]
    K.update((torch.ones(2, 8).double(), torch.tensor([0, 1])))
    assert not torch.equal(K._input_covariances["layer"], before)


#: Layers, shapes of their inputs, options, and the name of a parameter without such a factor.
OTHERS = {
    "embedding": (nn.Embedding(4, 4), (8,), {}, "layer.weight"),
    "norm": (nn.LayerNorm(8), (8,), {}, "layer.weight"),
    "groups": (nn.Conv2d(2, 2, 1, groups=2), (2, 2, 2), {}, "layer.weight"),
    "transposed": (nn.ConvTranspose2d(2, 2, 1), (2, 2, 2), {}, "layer.weight"),
    "cell": (nn.PReLU(8), (8,), {}, "layer.weight"),
    "diagonal": (*PLAIN["linear"], {"max_factor_size": 5}, "layer.weight"),
    "bias": (*PLAIN["convolution-1d"], {"kfac_approx": {"head.bias": "reduce"}}, "head.bias"),
}


@pytest.mark.parametrize("layer, shape, options, name", OTHERS.values(), ids=OTHERS)
def test_other_blocks_are_named(layer: nn.Module, shape: tuple, options: dict, name: str):
    K = _operator(layer, shape, **options)
    for attribute in ("_mapping", "_input_covariances", "_gradient_covariances"):
        with pytest.raises(NotImplementedError, match=re.escape(name)):
            getattr(K, attribute)


# --- inputs and output gradients of layers


def text(m: Using, x: Tensor) -> Tensor:
    """An embedding, a layer with tokens, and a grouped convolution over them."""
    h = torch.tanh(m.layer(m.table(x))).mT
    return m.head(torch.tanh(m.conv(h)).mean(2))


def problem(reduction: str) -> tuple:
    torch.manual_seed(0)
    layers = {"table": nn.Embedding(7, 4, padding_idx=0), "layer": nn.Linear(4, 4)}
    layers |= {"conv": nn.Conv1d(4, 6, 2, groups=2), "head": nn.Linear(6, 3, bias=False)}
    model, loss = Using(text, **layers).double(), nn.CrossEntropyLoss(reduction=reduction)
    data = [(torch.randint(7, (n, 5)), torch.randint(3, (n,))) for n in (4, 3)]
    return model, loss, dict(model.named_parameters()), data


def tied(m: Using, x: Tensor) -> Tensor:
    """A table that is the head, too, and a part of it that is a layer."""
    h = torch.tanh(m.layer(m.table(x)))
    h = torch.tanh(nn.functional.linear(h, m.table.weight[1:5]))
    return nn.functional.linear(h.mean(1), m.table.weight)


def indices(n: int) -> Tensor:
    return torch.randint(7, (n, 3))


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape).double()


def of_filters(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))


#: Models, inputs of n samples, and weights that are ``[I, O]`` for a layer.
CAPTURED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], set[str]]] = {
    "linear": (lambda: of_filters(nn.Linear(4, 4)), numbers(2, 4), set()),
    "weight [I, O]": (
        lambda: Using(
            lambda m, x: m.head(torch.addmm(m.b, x, m.w).tanh()),
            w=torch.randn(4, 4), b=torch.randn(4), head=nn.Linear(4, 3),
        ),
        numbers(4),
        {"w"},
    ),
    "embedding": (
        lambda: Using(lambda m, x: m.head(m.table(x).tanh()).mean(1),
                      table=nn.Embedding(7, 7, padding_idx=0), head=nn.Linear(7, 3)),
        indices,
        {"table.weight"},
    ),
    "tied": (
        lambda: Using(tied, table=nn.Embedding(7, 4), layer=nn.Linear(4, 4)),
        indices,
        {"table.weight"},
    ),
    "convolution": (lambda: of_filters(nn.Conv2d(2, 4, 2)), numbers(2, 3, 3), set()),
    "groups": (lambda: of_filters(nn.Conv1d(4, 6, 2, groups=2)), numbers(4, 4), set()),
    "transposed": (
        lambda: of_filters(nn.ConvTranspose2d(2, 2, 1, stride=2)), numbers(2, 2, 2), {"0.weight"}
    ),
    "transposed, groups": (
        lambda: of_filters(nn.ConvTranspose1d(4, 4, 2, groups=2)), numbers(4, 3), {"0.weight"}
    ),
    "recurrent": (
        lambda: Using(lambda m, x: m.layer(x)[0][:, -1], layer=nn.LSTM(4, 3, batch_first=True)),
        numbers(2, 4),
        set(),
    ),
    "attention": (
        lambda: Using(lambda m, x: m.head(m.layer(x, x, x)[0].mean(1)),
                      layer=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3)),
        numbers(3, 4),
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}], ids=["together", "chunks"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_layers_give_exact_blocks(name: str, options: dict):
    """In the order of the weight, whatever the order in which the layer uses it."""
    torch.manual_seed(0)
    make, inputs, transposed = CAPTURED[name]
    model, loss = make().double(), nn.CrossEntropyLoss()
    data = [(inputs(n), torch.randint(3, (n,))) for n in (4, 3)]
    model(data[0][0])
    params = dict(model.named_parameters())
    rows: dict[str, dict[tuple, Tensor]] = {}

    def add(name: str, layer: CapturedLayer, found: Tensor) -> None:
        of_batch = rows.setdefault(name, {})
        where = layer.batch, layer.chunk
        of_batch[where] = of_batch.get(where, 0) + found

    def visit(layer: CapturedLayer) -> None:
        x, g = layer.inputs, layer.gradients
        if x.ndim == 3:  # one group
            x, g = x.unsqueeze(2), g.unsqueeze(3)
        found = layer.weight_gradients()
        assert found.shape[2:] == params[layer.weight].shape
        matrices = torch.einsum("vnsgo,nsgi->vngoi", g, x)
        if layer.weight not in transposed and matrices.numel() == found.numel():
            assert error(matrices.reshape(found.shape), found) <= 1e-12
        add(layer.weight, layer, found.flatten(2))
        found.zero_()  # it is nobody else's
        if layer.bias is not None:
            add(layer.bias, layer, g.sum(2).flatten(2))

    K = KFACLinearOperator(model, loss, params, data, fisher_type="type-2", **options)
    c = K.visit_layers(visit)
    exact = reference.ggn(Problem(model, loss, params, data, mc=True))
    for weight, found in rows.items():
        block = sum(x.flatten(0, 1).T @ x.flatten(0, 1) for x in found.values())
        place = K.space.slice(weight)
        assert error(c * block, exact[place, place]) <= 1e-10, weight
    assert {name for name, p in params.items() if p.ndim > 1} <= rows.keys()


def test_captured_layers_of_chunks():
    """Several chunks of vectors of a batch have the same inputs."""
    options = {"fisher_type": "mc", "mc_samples": 5}
    layers: list[CapturedLayer] = []
    K = KFACLinearOperator(*problem("sum"), **options)
    assert K.visit_layers(layers.append) == 1.0
    assert {layer.batch for layer in layers} == {0, 1}
    B = sum(
        torch.einsum("vnso,vnsp->op", layer.gradients, layer.gradients)
        for layer in layers
        if layer.weight == "layer.weight"
    )
    assert error(B, K.gradient_covariances["layer"]) <= 1e-10
