"""KFAC's factors against dense references, closed forms, and exact GGNs."""

import logging
import re
from dataclasses import replace
from typing import Any

import kfac_models
import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from models import Using
from problems import Problem
from torch import Tensor, nn

from curvlinops import EKFACLinearOperator, GGNDiagonalLinearOperator, KFACLinearOperator
from curvlinops.layers import gradients, samples
from curvlinops.layers.covariance import second_moment

LOSSES = [n for n in problems.NAMES if n.split("-")[0] in problems.MODELS]
LAYERS = [
    "cnn", "segmentation", "conv1d", "instance-norm", "group-norm", "transformer",
    "transformer-tied", "encoder-layer-eval", "encoder-layer-train", "self-attention",
    "cross-attention", "rnn", "gru", "lstm", "lstm-bidirectional", "lstm-packed",
    "bare-parameter", "used-twice", "checkpoint", "functional", "closure", "other-values",
    "subset", "padding-idx", "padding-idx-tied", "embedding-bag-sum", "embedding-bag-mean",
    "dict-batch-padding-idx", "frozen-stem", "data-parallel", "weight-norm",
    "pinn", "float32-transformer", "bfloat16-cnn",
    "bfloat16-float32-norms", "float32-float64-norms",
]  # fmt: skip
#: Parameters of which layers use functions, or that are used where nobody sees it.
NEED_FALLBACK = ("weight-norm", "pinn", "cross-attention")


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "curvlinops")


def build(
    p: Problem,
    fisher: str,
    reduce: bool = False,
    joint: bool = False,
    cls: type = KFACLinearOperator,
    **options: Any,
) -> KFACLinearOperator:
    """KFAC of a problem, with all terms on their own."""
    options = {"exact": fisher == "type-2", "batch_size_fn": p.batch_size_fn} | options
    options.setdefault("kfac_approx", "reduce" if reduce else "expand")
    options.setdefault("fallback", "dense" if p.name in NEED_FALLBACK else "error")
    return cls(
        p.model, p.loss, p.params, p.data, fisher_type=fisher, reduction=p.reduction,
        separate_weight_and_bias=not joint, **options,
    )  # fmt: skip


def types(p: Problem) -> list[str]:
    return ["type-2", "empirical"] if p.mc else ["empirical"]


def problem(model: Any, X: list[Any], loss: nn.Module, target: Any = torch.randn_like) -> Problem:
    """A problem in all parameters."""
    data = [(x, target(model(x).detach())) for x in X]
    return Problem(model, loss, list(model.parameters()), data, mc=True)


# --- against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_all_options_of_losses(name: str):
    p = kfac_models.make(name)
    for fisher in types(p):
        expected = kfac_reference.kfac(p, fisher)
        assert error(matrix(build(p, fisher)), expected) <= p.tolerance


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, reduce: bool, joint: bool):
    p = kfac_models.make(name)
    fisher = "type-2" if p.mc and joint else "empirical"
    if reduce and name == "lstm-packed":  # its rows are along no axis of samples
        with pytest.raises(NotImplementedError, match="not known to which samples"):
            build(p, fisher, reduce, joint).trace()
        return
    expected = kfac_reference.kfac(p, fisher, reduce=reduce, joint=joint)
    assert error(matrix(build(p, fisher, reduce, joint)), expected) <= p.tolerance


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["cnn", "used-twice", "lstm", "padding-idx"])
def test_forward_only(name: str, joint: bool):
    p = kfac_models.make(name)
    if name == "cnn":  # norms have no factors
        named = {k: v for k, v in p.model.named_parameters() if not k.startswith("1.")}
        p = replace(p, params=named)
    expected = kfac_reference.kfac(p, "forward-only", joint=joint)
    assert error(matrix(build(p, "forward-only", False, joint)), expected) <= p.tolerance


def _hidden(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *layers)


#: Models whose last layer's output is the model's output, and others.
OUTPUTS = {
    "linear": lambda: _hidden(nn.Linear(4, 5)),
    "without-bias": lambda: _hidden(nn.Linear(4, 5, bias=False)),
    "alone": lambda: nn.Linear(3, 5),
    "scaled": lambda: Using(lambda m, x: 2 * m.layers(x), layers=_hidden(nn.Linear(4, 5))),
    "shifted": lambda: Using(lambda m, x: x[:, :1] + m.layers(x), layers=_hidden(nn.Linear(4, 5))),
    "log-softmax": lambda: _hidden(nn.Linear(4, 5), nn.LogSoftmax(1)),
    "used-twice": lambda: Using(
        lambda m, x: m.layer(m.layer(m.first(x)).tanh()), first=nn.Linear(3, 5),
        layer=nn.Linear(5, 5),
    ),
    "added-twice": lambda: Using(
        lambda m, x: m.layer(x) + m.layer(x.sin()), layer=nn.Linear(3, 5)
    ),
}  # fmt: skip

#: Losses, and targets for an output.
OUTPUT_LOSSES = {
    "ce": (nn.CrossEntropyLoss, lambda z: z.argmax(1)),
    "ce-options": (
        lambda: nn.CrossEntropyLoss(
            weight=torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1]), ignore_index=1, label_smoothing=0.1
        ),
        lambda z: torch.arange(len(z)) % 5,
    ),
    "mse": (nn.MSELoss, torch.sin),
    "bce": (
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1])),
        torch.sigmoid,
    ),
}


@pytest.mark.parametrize("loss", OUTPUT_LOSSES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_last_layers(name: str, loss: str, monkeypatch):
    """Whether or not B is the sum of the loss's Hessians, and however many vectors at once."""
    kind, target = OUTPUT_LOSSES[loss]
    X = torch.randn(10, 3, dtype=torch.float64).split([6, 4])
    p = problem(OUTPUTS[name]().double(), X, kind().double(), target)
    diagonal = reference.ggn(p).diagonal()
    for size in (gradients.BYTES, 1000):
        monkeypatch.setattr(samples, "BYTES", size)
        for reduce in (False, True):
            expected = kfac_reference.kfac(p, reduce=reduce)
            for exact in (False, True):
                found = matrix(build(p, "type-2", reduce, exact=exact))
                assert error(found, expected) <= 1e-9
        D = GGNDiagonalLinearOperator(p.model, p.loss, p.params, p.data)
        assert error(D.diagonal(), diagonal) <= 1e-9


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("loss", ["mse", "bce", "ce"])
def test_last_layers_with_positions(loss: str, reduce: bool):
    """Rows of the layer are terms of the loss, or others."""
    kind, target = OUTPUT_LOSSES[loss]
    kind = nn.BCEWithLogitsLoss if loss == "bce" else kind
    for model, shape in (
        (_hidden(nn.Linear(4, 1)), (3,)),
        (_hidden(nn.Linear(4, 4)), (4, 3)),
        (nn.Sequential(nn.Conv1d(3, 4, 2, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 2)), (3, 4)),
    ):
        X = torch.randn(5, *shape, dtype=torch.float64).split([3, 2])
        p = problem(model.double(), X, kind().double(), target)
        expected = kfac_reference.kfac(p, reduce=reduce)
        assert error(matrix(build(p, "type-2", reduce)), expected) <= 1e-9


def _conv(kind: type, *sizes: int, **options: Any) -> nn.Module:
    return nn.Sequential(kind(*sizes, **options), nn.Tanh(), nn.Flatten())


CONVOLUTIONS = {
    "1d-even-same": (_conv(nn.Conv1d, 2, 3, 4, padding="same"), (2, 5)),
    "2d-grouped": (_conv(nn.Conv2d, 4, 6, (2, 3), groups=2, padding=(1, 0)), (4, 4, 5)),
    "2d-circular": (_conv(nn.Conv2d, 2, 2, 3, padding=1, padding_mode="circular"), (2, 4, 4)),
    "3d": (_conv(nn.Conv3d, 2, 2, 2, stride=(1, 2, 1), padding=1), (2, 2, 3, 2)),
    "transposed-2d": (
        _conv(nn.ConvTranspose2d, 2, 3, 3, stride=2, padding=1, output_padding=1), (2, 2, 3)
    ),
    # the bias is also added where the filters write nothing
    "transposed-gaps": (_conv(nn.ConvTranspose2d, 2, 2, 1, stride=2), (2, 3, 2)),
    "transposed-cut": (_conv(nn.ConvTranspose2d, 2, 2, 1, padding=1), (2, 3, 3)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(double, name: str, joint: bool):
    model, shape = CONVOLUTIONS[name]
    model = model.double()
    p = problem(model, [torch.randn(2, *shape), torch.randn(1, *shape)], nn.MSELoss())
    for reduce in (False, True):
        expected = kfac_reference.kfac(p, "empirical", reduce=reduce, joint=joint)
        assert error(matrix(build(p, "empirical", reduce, joint)), expected) <= 1e-10


def shared_weight() -> nn.Module:
    """Two layers with one weight, and biases of their own."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


OTHERS = {
    "shared-weight": (shared_weight, (3,)),
    "bilinear": (lambda: Using(lambda m, x: m.layer(x, x.sin()), layer=nn.Bilinear(3, 3, 2)), (3,)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), (3,)),
    "layer-norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), (2, 3)),
    "rms-norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), (2, 3)),
    "batch-norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), (3,)),
    "one-output": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), (3,)),
    "one-input": (lambda: nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 2)), (1,)),
    "log-scale": (
        lambda: Using(
            lambda m, x: m.layer(x) * m.log.exp(),
            layer=nn.Linear(3, 2), log=nn.Parameter(torch.randn(2)),
        ), (3,),
    ),
    "unused": (
        lambda: Using(lambda m, x: (m.b(x), m.a(x))[1], a=nn.Linear(3, 2), b=nn.Linear(3, 2)), (3,)
    ),
    "class-token": (
        lambda: Using(
            lambda m, x: m.layer(torch.cat([m.token.expand(len(x), 1, 3), x], 1)).tanh().mean(1),
            layer=nn.Linear(3, 2), token=nn.Parameter(torch.randn(1, 1, 3)),
        ), (2, 3),
    ),
    "position": (
        lambda: Using(
            lambda m, x: m.layer(x + m.position[: x.shape[1]]).tanh().mean(1),
            layer=nn.Linear(3, 2), position=nn.Parameter(torch.randn(4, 3)),
        ), (2, 3),
    ),
    "no-positions": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(double, name: str, joint: bool):
    make, shape = OTHERS[name]
    p = problem(make().double(), [torch.randn(3, *shape), torch.randn(2, *shape)], nn.MSELoss())
    for fisher in ("type-2", "empirical"):
        for reduce in (False, True):
            expected = kfac_reference.kfac(p, fisher, reduce=reduce, joint=joint)
            assert error(matrix(build(p, fisher, reduce, joint)), expected) <= 1e-10


# --- exactness ------------------------------------------------------------------------------------


def blocks_of(dense: Tensor, params: list[Tensor], joint: bool = False) -> Tensor:
    """Keep the diagonal blocks, of one or of two parameters each."""
    sizes = [p.numel() for p in params]
    if joint:
        sizes = [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    out = torch.zeros_like(dense)
    for start, size in zip([sum(sizes[:i]) for i in range(len(sizes))], sizes, strict=True):
        block = slice(start, start + size)
        out[block, block] = dense[block, block]
    return out


class Pooled(nn.Module):
    """A net whose output is averaged over positions, `[N, *, C]` or `[N, C, *]`."""

    def __init__(self, *layers: nn.Module, channels: int):
        super().__init__()
        self.net, self._channels = nn.Sequential(*layers), channels

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(self._channels, -1).flatten(1, -2).mean(1)


CIRCULAR = {"padding": 1, "padding_mode": "circular"}
DEEP_LINEAR = {
    "expand": (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3), nn.Linear(3, 2)), (4, 3), False),
    "reduce": (Pooled(nn.Linear(3, 2), nn.Linear(2, 2), channels=-1), (4, 3), True),
    "reduce-conv2d": (
        Pooled(nn.Conv2d(2, 2, 3, **CIRCULAR), nn.Conv2d(2, 3, (1, 2)), channels=1), (2, 3, 4), True
    ),
    "reduce-strided": (
        Pooled(nn.Conv2d(2, 3, 2, stride=2, dilation=2), channels=1), (2, 5, 4), True
    ),
    "reduce-conv3d": (Pooled(nn.Conv3d(1, 2, 2, padding=1), channels=1), (1, 2, 3, 2), True),
    "reduce-transposed": (
        Pooled(nn.ConvTranspose2d(2, 2, 2, stride=3), channels=1), (2, 2, 3), True
    ),
}  # fmt: skip


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", DEEP_LINEAR)
def test_exact_for_deep_linear_nets(double, name: str, reduction: str, joint: bool):
    """Eschenhagen et al. 2023, propositions 1 and 2."""
    model, shape, reduce = DEEP_LINEAR[name]
    loss = nn.MSELoss(reduction=reduction)
    p = problem(model.double(), [torch.randn(3, *shape), torch.randn(2, *shape)], loss)
    joint = joint and "transposed" not in name  # its bias has other positions
    if name == "reduce-conv2d":  # the second one sees borders: its own block is exact, only
        p = replace(p, params=p.params[2:])
    expected = blocks_of(reference.ggn(p), p.params, joint)
    assert error(matrix(build(p, "type-2", reduce, joint)), expected) <= 1e-10


@pytest.mark.parametrize("name", [n for n in LOSSES if re.fullmatch("mlp-.*-mean", n)])
def test_exact_for_one_datum(name: str):
    """With a single position, a single Kronecker product is the matrix itself."""
    p = problems.rebatched(problems.make(name), 1)
    p = replace(p, data=p.data[-1:])
    truths = {"type-2": reference.ggn, "empirical": reference.empirical_fisher}
    for fisher in types(p):
        expected = blocks_of(truths[fisher](p), p.params, joint=True)
        operator = build(p, fisher, joint=True, check_deterministic=False)
        assert error(matrix(operator), expected) <= 1e-8


@pytest.mark.parametrize("name", ["weight-norm", "pinn", "bare-parameter"])
def test_fallbacks(name: str):
    """Dense ones are the exact blocks, diagonal ones their diagonals."""
    p = problems.make(name)
    exact = blocks_of(reference.empirical_fisher(p, terms="sample"), p.params)
    dense = build(p, "empirical", fallback="dense")
    known = [block.structure == "dense" for block in dense.report()]
    found, offset = matrix(dense), 0
    diagonal = build(p, "empirical", fallback="diagonal").diagonal()
    for is_dense, param in zip(known, p.params, strict=True):
        own = slice(offset, offset + param.numel())
        if is_dense:
            assert error(found[own, own], exact[own, own]) <= p.tolerance
            assert error(diagonal[own], exact[own, own].diagonal()) <= p.tolerance
        offset = own.stop
    assert any(known)


def test_fallback_is_refused_by_default(double):
    p = problem(
        Using(
            lambda m, x: x @ (m.a @ m.b), a=nn.Parameter(torch.randn(3, 1)),
            b=nn.Parameter(torch.randn(1, 2)),
        ),
        [torch.randn(4, 3)], nn.MSELoss(),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="Parameter 'a'.*fallback='dense'"):
        build(p, "empirical").trace()
    found = matrix(build(p, "type-2", fallback="dense"))
    assert error(found, blocks_of(reference.ggn(p), p.params)) <= 1e-10


@pytest.mark.parametrize("limit", [12, 14])
def test_blocks_by_vector(double, limit: int):
    """A parameter that is too large for a block gets one for each vector, or its diagonal."""
    model = Using(lambda m, x: torch.tanh(x + m.a).flatten(1), a=nn.Parameter(torch.randn(6, 5)))
    p = problem(model, [torch.randn(3, 6, 5)], nn.MSELoss())
    exact = reference.ggn(p)
    vectors = torch.block_diag(*[exact[i : i + 5, i : i + 5] for i in range(0, 30, 5)])
    K = build(p, "type-2", max_factor_size=limit)
    expected = vectors if limit == 14 else exact.diagonal().diag()
    assert error(matrix(K), expected) <= 1e-10
    assert ("for each of 6 vectors" if limit == 14 else "max_factor_size") in K.report()[0].reason


def test_dense_fallbacks_that_are_too_large(double):
    model = Using(
        lambda m, x: x @ (m.a @ m.b),
        a=nn.Parameter(torch.randn(3, 1)),
        b=nn.Parameter(torch.randn(1, 2)),
    )
    p = problem(model, [torch.randn(4, 3)], nn.MSELoss())
    K = build(p, "type-2", fallback="dense", max_factor_size=2)
    assert [block.structure for block in K.report()] == ["diagonal", "dense"]
    assert "larger than max_factor_size=2" in K.report()[0].reason
    assert error(K.diagonal(), reference.ggn(p).diagonal()) <= 1e-10


# --- randomness -----------------------------------------------------------------------------------


def _mean_and_error(draws: list[Tensor]) -> tuple[Tensor, Tensor]:
    stacked = torch.stack(draws)
    return stacked.mean(0), stacked.std(0) / len(draws) ** 0.5


def _factors(p: Problem, fisher: str, **options: Any) -> Tensor:
    """All gradient factors, in which samples enter linearly."""
    operator = build(p, fisher, check_deterministic=False, **options)
    return torch.cat([B.flatten() for B in operator.gradient_covariances.values()])


@pytest.mark.parametrize("name", ["mlp-ce-all-mean", "mlp-bce-all-mean", "mlp-mse-mean"])
def test_mc_converges_to_type_2(name: str):
    p = problems.make(name)
    exact = _factors(p, "type-2")
    draws = [_factors(p, "mc", mc_samples=300, seed=s, exact=False) for s in range(16)]
    mean, deviation = _mean_and_error(draws)
    assert bool(((mean - exact).abs() <= 5 * deviation + 1e-9).all())
    assert error(mean, exact) <= 0.1


def test_signs_are_unbiased():
    """On attention, where terms interact; mc agrees, too."""
    p = kfac_models.make("transformer")
    exact = _factors(p, "type-2")
    for fisher, options in (("type-2", {"mc_samples": 4}), ("mc", {"mc_samples": 50})):
        draws = [_factors(p, fisher, seed=s, exact=False, **options) for s in range(24)]
        mean, deviation = _mean_and_error(draws)
        assert error(draws[0], exact) > 1e-4
        assert bool(((mean - exact).abs() <= 5 * deviation + 1e-9).all())
        assert error(mean, exact) <= 0.1


def test_signs_do_not_matter_where_terms_do_not_interact():
    p = problems.make("tokens-mse-mean")
    one, two = (matrix(build(p, "type-2", exact=False, seed=s)) for s in (0, 1))
    assert error(one, two) > 1e-4  # its positions do
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).double()
    p = problem(model, [torch.randint(5, (3, 4))], nn.MSELoss())
    expected = kfac_reference.kfac(p, "type-2")
    assert error(matrix(build(p, "type-2", exact=False)), expected) <= 1e-10


def test_seeds():
    p = problems.make("classes-ce-all-mean")
    first, again, other = (matrix(build(p, "mc", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and error(other, first) > 1e-3


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, reduce, cls",
    [
        (name, reduce, KFACLinearOperator)
        for name in ("mlp-ce-all-mean", "classes-ce-ignore-mean", "cnn", "transformer")
        for reduce in (False, True)
    ]
    + [("mlp-ce-all-mean", False, EKFACLinearOperator)],
)
def test_independent_of_batches(name: str, reduce: bool, cls: type):
    p = problems.make(name)
    expected = matrix(build(p, "type-2", reduce, cls=cls))
    backwards = replace(p, data=p.data[::-1])
    for other in (problems.rebatched(p, 1), backwards, problems.merged(p)):
        if other is not None:
            assert error(matrix(build(other, "type-2", reduce, cls=cls)), expected) <= 1e-9


def test_samples_without_effect_are_inputs(double):
    """Samples whose gradients are zero behind a ReLU still count in the factor of inputs."""
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2))
    p = problem(model, [torch.randn(8, 2)], nn.MSELoss())
    assert 0 < int((model[:2](p.data[0][0]) == 0).sum()) < 8
    expected = kfac_reference.kfac(p, "type-2")
    for size in (1, 2, 8):
        found = build(problems.rebatched(p, size), "type-2")
        assert error(matrix(found), expected) <= 1e-10


def test_empty_batches():
    p = problems.make("mlp-ce-mean")
    expected = matrix(build(p, "type-2"))
    X, y = p.data[0]
    for data in ([(X[:0], y[:0]), *p.data], [*p.data, (X[:0], y[:0])]):
        assert error(matrix(build(replace(p, data=data), "type-2")), expected) <= 1e-12
    with pytest.raises(ValueError, match="no sample|empty|No term|no term"):
        build(replace(p, data=[(X[:0], y[:0])]), "type-2", check_deterministic=False).trace()


def test_order_and_subsets_of_parameters():
    p = problems.make("mlp-ce-mean")
    full = matrix(build(p, "type-2"))
    sizes = [x.numel() for x in p.params]
    for order in ([3, 1, 0, 2], [1, 2], [0], [3]):
        index = torch.cat([sum(sizes[:i]) + torch.arange(sizes[i]) for i in order])
        found = matrix(build(replace(p, params=[p.params[i] for i in order]), "type-2"))
        assert error(found, full[index][:, index]) <= 1e-12
    # jointly: only where both are there
    joint = matrix(build(replace(p, params=[p.params[i] for i in (3, 0, 2)]), "type-2", joint=True))
    expected = kfac_reference.kfac(
        replace(p, params=[p.params[i] for i in (3, 0, 2)]), "type-2", joint=True
    )
    assert error(joint, expected) <= 1e-10


def test_low_precision_models_have_float32_factors():
    p, dtype = problems.make("cnn"), torch.bfloat16
    p.model.to(dtype)
    data = [(X.to(dtype), y) for X, y in p.data]
    operator = build(replace(p, data=data), "empirical")
    for factor in [*operator.input_covariances.values(), *operator.gradient_covariances.values()]:
        assert factor.dtype == torch.float32
    expected = kfac_reference.kfac(replace(p, data=data), "empirical")
    assert error(matrix(operator), expected) <= 5e-2


# --- structure ------------------------------------------------------------------------------------


def test_blocks_report():
    p = problems.make("transformer-tied")
    reports = {report.names[0]: report for report in build(p, "type-2", joint=True).report()}
    tied = reports["embed.weight"]
    assert tied.structure == "kronecker" and tied.factors == (
        (1, 5, 5),
        (1, 4, 4),
        (1, 4, 4),
        (1, 5),
    )
    assert reports["norm1.weight"].structure == "dense" and reports["norm1.weight"].reason
    assert reports["mlp.0.weight"].names == ("mlp.0.weight", "mlp.0.bias")


def test_blocks_report_diagonal_gradient_factors():
    p = problems.make("mlp-ce-mean")  # 4 -> 3 -> 3
    [large, *_] = build(p, "type-2", max_factor_size=2).report()
    assert "gradient factor diagonal: it is too large" in large.reason
    [identity, *_] = build(p, "forward-only").report()
    assert identity.reason == "gradient factor diagonal: the identity by fisher_type"


@pytest.mark.parametrize("joint", [False, True])
def test_large_factors_become_diagonal(joint: bool):
    p = problems.make("mlp-ce-mean")  # 4 -> 3 -> 3
    full = build(p, "type-2", joint=joint)
    small = build(p, "type-2", joint=joint, max_factor_size=3)
    assert small.report()[0].factors == ((1, 3, 3), (1, 4 + joint))
    A, B = full.input_covariances["0"], full.gradient_covariances["0"]
    torch.testing.assert_close(small.input_covariances["0"], A.diagonal())
    torch.testing.assert_close(small.gradient_covariances["0"], B)
    none = build(p, "type-2", joint=joint, max_factor_size=0)
    torch.testing.assert_close(matrix(none), full.diagonal().diag())


def test_factors_by_module():
    p = problems.make("cnn")
    operator = build(p, "type-2")
    assert operator.mapping["0"] == {"weight": 0, "bias": 1}
    assert operator.input_covariances["3"].shape == (2, 4, 4)
    A, B = operator.input_covariances["6"], operator.gradient_covariances["6"]
    size = p.model[6].weight.numel()
    block = matrix(operator)[-size - 2 : -2, -size - 2 : -2]
    assert error(block, torch.kron(B, A)) <= 1e-12


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_blocks_by_the_names_of_their_parameters(cls: type, joint: bool):
    p = problems.make("mlp-ce-mean")
    names = ["0, weight", "0, bias", "2", "2, bias"]  # of a function's parameters
    params = dict(zip(names, p.params, strict=True))

    def forward(params: dict, X: torch.Tensor) -> torch.Tensor:
        state = zip(dict(p.model.named_parameters()), params.values(), strict=True)
        return torch.func.functional_call(p.model, dict(state), (X,))

    options = {"fisher_type": "type-2", "separate_weight_and_bias": not joint}
    K = cls(forward, p.loss, params, p.data, **options)
    expected = [tuple(names[:2]), tuple(names[2:])] if joint else [(name,) for name in names]
    assert [block.names for block in K.report()] == expected
    inverses = [K.inverse(0.1), K.inverse(0.1, use_exact_damping=True)]
    for operator in (K, *inverses):
        assert list(operator.blocks) == expected
        dense = matrix(operator)
        for key, block in operator.blocks.items():
            index = torch.cat([torch.arange(len(dense))[K.space.slice(name)] for name in key])
            assert error(block.to_dense(), dense[index][:, index]) <= 1e-12


# --- errors ---------------------------------------------------------------------------------------

BAD = [
    ({"fisher_type": "x"}, "fisher_type must be one of"),
    ({"kfac_approx": "x"}, "kfac_approx must be one of"),
    ({"kfac_approx": {"zzz": "reduce"}}, "unknown name 'zzz'. There are"),
    ({"kfac_approx": {"0": "x"}}, "must be one of"),
    ({"fallback": "x"}, "fallback must be one of"),
    ({"mc_samples": 0}, "mc_samples must be an integer >= 1"),
    ({"fisher_type": "empirical", "mc_samples": 2}, "mc_samples has no meaning"),
    ({"exact": True}, "variant of fisher_type='type-2'"),
    ({"seed": -1}, "seed must be"),
    ({"max_factor_size": -1}, "max_factor_size"),
    ({"num_per_example_loss_terms": 0}, "num_per_example_loss_terms must be"),
    ({"num_per_example_loss_terms": "3"}, "num_per_example_loss_terms must be"),
    ({"block_sizes": [1, 3]}, "block_sizes cannot be chosen"),
]


@pytest.mark.parametrize("options, message", BAD, ids=lambda x: str(x))
def test_bad_options(options: dict, message: str):
    p = problems.make("mlp-ce-mean")
    with pytest.raises(ValueError, match=message):
        KFACLinearOperator(p.model, p.loss, p.params, p.data, **options)


def test_number_of_terms_is_checked():
    p = problems.make("tokens-mse-mean")
    with pytest.raises(ValueError, match="num_per_example_loss_terms is 2"):
        build(p, "empirical", num_per_example_loss_terms=2).trace()
    build(problems.make("mlp-ce-mean"), "type-2", num_per_example_loss_terms=1).trace()


def test_refused_models_and_data():
    p = problems.make("mlp-ce-mean")
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match="BatchNorm in train mode"):
        build(replace(p, model=norm, params=list(norm.parameters())), "type-2")
    with pytest.raises((TypeError, ValueError), match="iterator|once"):
        build(replace(p, data=iter(p.data)), "type-2")
    with pytest.raises(NotImplementedError, match="sampled.*fisher_type='empirical'"):
        q = problems.make("mlp-l1-mean")
        build(q, "mc")
    norm.eval()
    with pytest.raises(NotImplementedError, match="forward-only.*'1.weight'"):
        build(replace(p, model=norm, params=list(norm.parameters())), "forward-only").trace()


def test_settings_by_module():
    p = problems.make("classes-ce-mean")
    reduced, expanded = (matrix(build(p, "type-2", reduce)) for reduce in (True, False))
    mixed = matrix(build(p, "type-2", kfac_approx={"mix": "reduce"}))
    own = slice(p.params[0].numel(), p.params[0].numel() + 12)
    expanded[own, own] = reduced[own, own]
    assert error(mixed, expanded) <= 1e-12


@pytest.mark.parametrize(
    "approx, reduced",
    [
        ({"0.bias": "reduce"}, ["0.bias"]),
        ({"0.weight": "reduce"}, ["0.weight"]),
        ({"0": "reduce", "0.bias": "expand"}, ["0.weight"]),
        ({"0": "reduce"}, ["0.weight", "0.bias"]),
    ],
    ids=str,
)
def test_settings_by_parameter(double, approx: dict[str, str], reduced: list[str]):
    """A bias may have another setting than its weight, unless both are in one block."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    p = problem(model, [torch.randn(3, 5, 3)], nn.MSELoss())
    both = {r: kfac_reference.kfac(p, "empirical", reduce=r) for r in (True, False)}
    operator = build(p, "empirical", kfac_approx=approx)
    for name in operator.space.names:
        own, reduce = operator.space.slice(name), name in reduced
        assert error(matrix(operator)[own, own], both[reduce][own, own]) <= 1e-10
    joint = build(p, "empirical", joint=True, kfac_approx=approx)
    if len(reduced) == 1:
        with pytest.raises(ValueError, match="kfac_approx differs for '0.weight' and '0.bias'"):
            joint.trace()
    else:
        joint.trace()


class _Attention(nn.Module):
    """Positions interact; the output's rows are those of all samples."""

    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(x, x, x)[0]).flatten(0, 1)


class _Unflattened(nn.Module):
    def __init__(self, flat: nn.Module):
        super().__init__()
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(x).unflatten(0, x.shape[:2]).transpose(1, 2)


@pytest.mark.parametrize("operator", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_rows_of_the_output_may_be_tokens(operator: type, approx: str):
    model, loss = _Attention(), nn.CrossEntropyLoss()  # in float32, with many rows
    data = [(torch.randn(n, 6, 8), torch.randint(3, (n, 6))) for n in (40, 7)]
    options = {"fisher_type": "type-2", "kfac_approx": approx}
    params = list(model.parameters())
    flat = operator(model, loss, params, [(X, y.flatten()) for X, y in data], **options)
    expected = operator(_Unflattened(model), loss, params, data, **options)
    assert error(flat.diagonal(), expected.diagonal()) <= 1e-5


@pytest.mark.parametrize("operator", [KFACLinearOperator, EKFACLinearOperator])
def test_rows_of_the_output_in_odd_batches(operator: type):
    model, loss = _Attention(), nn.CrossEntropyLoss()
    X, y, params = torch.randn(5, 6, 8), torch.randint(3, (30,)), list(model.parameters())
    full, empty = (operator(model, loss, params, [(X, y), *d]) for d in ([], [(X[:0], y[:0])]))
    assert error(empty.diagonal(), full.diagonal()) <= 1e-6
    data = [(X, y), (X[:, :4], y[:20])]
    sizes = {6: 5, 4: 3}  # by the number of tokens; the second is wrong
    options = {"check_deterministic": False, "batch_size_fn": lambda X: sizes[X.shape[1]]}
    odd = operator(model, loss, params, data, **options)
    with pytest.raises(ValueError, match="20 rows for 3 samples"):
        odd.diagonal()


def test_bias_without_a_joint_block_says_why():
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 3)).double()
    data = [(torch.randn(4, 2, 2).double(), torch.tensor([0, 1, 2, 0]))]
    arguments = model, nn.CrossEntropyLoss(), list(model.parameters()), data
    blocks = KFACLinearOperator(*arguments, separate_weight_and_bias=False).report()
    reasons = {block.names: block.reason for block in blocks}
    assert list(reasons) == [("0.weight",), ("0.bias",), ("2.weight", "2.bias")]
    assert "transposed convolutions" in reasons["0.bias",] and not reasons["0.weight",]
    separate = KFACLinearOperator(*arguments).report()
    assert [block.reason for block in separate] == [""] * 4


@pytest.mark.parametrize("shape", [(2, 2**18, 3), (600, 301), (2**15 + 600, 64)])
def test_moments_of_many_rows(shape: tuple[int, ...]):
    rows = torch.rand(shape, generator=torch.manual_seed(0))
    wide = rows.double()
    assert error(second_moment(rows), wide.mT @ wide) <= 1e-5


class Masked(nn.Linear):
    def __init__(self, masks: object):
        super().__init__(3, 2)
        self.masks = masks

    def attention_masks(self, X: Tensor) -> object:
        return self.masks


@pytest.mark.parametrize("masks", [torch.ones(5, 4), [torch.ones(5)], [[1, 0]], None])
def test_attention_masks_are_a_list_of_matrices(masks: object):
    model, data = Masked(masks), [(torch.randn(5, 3), torch.randn(5, 2))]
    K = KFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    with pytest.raises(TypeError, match=r"attention_masks.*return \[mask\]"):
        K.compute_kronecker_factors()
