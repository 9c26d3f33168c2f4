"""KFAC and EKFAC against dense references, closed forms, and exact GGNs; their options."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import kfac_reference
import problems
import pytest
import reference
import torch
from contract import error, matrix
from models import Using
from problems import Problem
from tables import core
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
NEED_FALLBACK = ("weight-norm", "cross-attention")
MORE = pytest.mark.extensive


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
    options = {"exact": fisher == "type-2"} | options
    options.setdefault("kfac_approx", "reduce" if reduce else "expand")
    options.setdefault("fallback", "dense" if p.name in NEED_FALLBACK else "error")
    return p.build(cls, fisher_type=fisher, separate_weight_and_bias=not joint, **options)


def types(p: Problem) -> list[str]:
    return ["type-2", "empirical"] if p.mc else ["empirical"]


# --- against the reference ------------------------------------------------------------------------


#: Sums and means stand next to each other.
@pytest.mark.parametrize("name", core([n for i, n in enumerate(LOSSES) if i % 4 in (0, 3)], LOSSES))
def test_all_options_of_losses(name: str):
    p = problems.make(name)
    for fisher in types(p):
        expected = kfac_reference.kfac(p, fisher)
        assert error(matrix(build(p, fisher)), expected) <= p.tolerance


@pytest.mark.parametrize(
    "reduce, joint",
    [(False, False), (False, True), (True, False), pytest.param(True, True, marks=MORE)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, reduce: bool, joint: bool):
    p = problems.make(name)
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
    p = problems.make(name)
    if name == "cnn":  # norms have no factors
        named = {k: v for k, v in p.model.named_parameters() if not k.startswith("1.")}
        p = replace(p, params=named)
    expected = kfac_reference.kfac(p, "forward-only", joint=joint)
    assert error(matrix(build(p, "forward-only", False, joint)), expected) <= p.tolerance


def _hidden(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *layers)


#: Models whose last layer's output is the model's output, and others; the shape of a sample.
OUTPUTS = {
    "linear": (lambda: _hidden(nn.Linear(4, 5)), (3,)),
    "without-bias": (lambda: _hidden(nn.Linear(4, 5, bias=False)), (3,)),
    "scaled": (lambda: Using(lambda m, x: 2 * m.layers(x), layers=_hidden(nn.Linear(4, 5))), (3,)),
    "shifted": (
        lambda: Using(lambda m, x: x[:, :1] + m.layers(x), layers=_hidden(nn.Linear(4, 5))), (3,)
    ),
    "log-softmax": (lambda: _hidden(nn.Linear(4, 5), nn.LogSoftmax(1)), (3,)),
    "used-twice": (
        lambda: Using(
            lambda m, x: m.layer(m.layer(m.first(x)).tanh()), first=nn.Linear(3, 5),
            layer=nn.Linear(5, 5),
        ), (3,),
    ),
    "added-twice": (
        lambda: Using(lambda m, x: m.layer(x) + m.layer(x.sin()), layer=nn.Linear(3, 5)), (3,)
    ),
    # rows of the layer are terms of the loss, or others
    "positions": (lambda: _hidden(nn.Linear(4, 5)), (5, 3)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 2, padding=1), nn.Tanh(), nn.Conv1d(4, 5, 2)), (3, 5)
    ),
}  # fmt: skip

_WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1])
#: Losses, and targets for an output.
OUTPUT_LOSSES = {
    "ce": (nn.CrossEntropyLoss(), problems.indices),
    "ce-options": (
        nn.CrossEntropyLoss(weight=_WEIGHT, ignore_index=1, label_smoothing=0.1), problems.indices
    ),
    "mse": (nn.MSELoss(), torch.sin),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=_WEIGHT), torch.sigmoid),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, loss",
    [
        pytest.param(*pair, marks=[] if "linear" in pair or "ce-options" in pair else MORE)
        for pair in product(OUTPUTS, OUTPUT_LOSSES)
    ],
)
def test_last_layers(double, name: str, loss: str, monkeypatch):
    """Whether or not B is the sum of the loss's Hessians, and however many vectors at once."""
    (make, shape), (loss_func, target) = OUTPUTS[name], OUTPUT_LOSSES[loss]
    X = torch.randn(5, *shape).split([3, 2])
    p = Problem.on(make().double(), X, copy.deepcopy(loss_func).double(), target)
    diagonal = reference.ggn(p).diagonal()
    expected = [kfac_reference.kfac(p, reduce=reduce) for reduce in (False, True)]
    for size in (gradients.BYTES, 1000):
        monkeypatch.setattr(samples, "BYTES", size)
        for reduce, exact in product((False, True), (False, True)):
            if exact or len(shape) == 1:  # else signs are drawn
                found = matrix(build(p, "type-2", reduce, exact=exact))
                assert error(found, expected[reduce]) <= 1e-9
        D = p.build(GGNDiagonalLinearOperator)
        assert error(D.diagonal(), diagonal) <= 1e-9


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
@pytest.mark.parametrize("name", ["cnn", "transformer-tied", "lstm"])
def test_memory_limits(name: str, fisher: str, monkeypatch: pytest.MonkeyPatch):
    """Numbers do not depend on how many vectors, samples and positions fit into the memory."""
    p, kinds = problems.make(name), (KFACLinearOperator, EKFACLinearOperator)
    expected = [matrix(build(p, fisher, cls=cls)) for cls in kinds]
    for size in (1, 600):
        for module in (gradients, samples):
            monkeypatch.setattr(module, "BYTES", size)
        for cls, truth in zip(kinds, expected, strict=True):
            assert error(matrix(build(p, fisher, cls=cls)), truth) <= 1e-9


# --- fallbacks


def test_fallbacks(double):
    """Of parameters whose layers are not known: refused, the exact block, or its diagonal."""
    parts = {"a": torch.randn(3, 1), "b": torch.randn(1, 2)}
    model = Using(lambda m, x: x @ (m.a @ m.b), **parts)
    p = Problem.on(model, [torch.randn(4, 3)], nn.MSELoss())
    exact = reference.ggn(p)
    diagonal, dense = exact.diagonal().diag(), torch.block_diag(exact[:3, :3], exact[3:, 3:])
    with pytest.raises(NotImplementedError, match="Parameter 'a'.*fallback='dense'"):
        build(p, "type-2").trace()
    assert error(matrix(build(p, "type-2", fallback="dense")), dense) <= 1e-10
    assert error(matrix(build(p, "type-2", fallback="diagonal")), diagonal) <= 1e-10
    K = build(p, "type-2", fallback="dense", max_factor_size=2)
    assert [block.structure for block in K.report()] == ["diagonal", "dense"]
    assert "larger than max_factor_size=2" in K.report()[0].reason
    assert error(K.diagonal(), exact.diagonal()) <= 1e-10


@pytest.mark.parametrize("limit", [12, 14])
def test_blocks_by_vector(double, limit: int):
    """A parameter that is too large for a block gets one for each vector, or its diagonal."""
    model = Using(lambda m, x: torch.tanh(x + m.a).flatten(1), a=nn.Parameter(torch.randn(6, 5)))
    p = Problem.on(model, [torch.randn(3, 6, 5)], nn.MSELoss())
    exact = reference.ggn(p)
    vectors = torch.block_diag(*[exact[i : i + 5, i : i + 5] for i in range(0, 30, 5)])
    K = build(p, "type-2", max_factor_size=limit)
    expected = vectors if limit == 14 else exact.diagonal().diag()
    assert error(matrix(K), expected) <= 1e-10
    assert ("for each of 6 vectors" if limit == 14 else "max_factor_size") in K.report()[0].reason


# --- EKFAC ----------------------------------------------------------------------------------------

#: Problems whose factors have distinct eigenvalues, apart from zeros.
DISTINCT = [
    "mlp-ce-all-mean", "mlp-mse-sum", "mlp-bce-all-mean", "classes-ce-all-mean", "scalar-bce-mean",
    "cnn", "conv1d", "group-norm", "transformer", "self-attention", "cross-attention", "lstm",
    "lstm-packed", "gru", "used-twice", "padding-idx", "embedding-bag-mean", "functional",
    "encoder-layer-train", "subset", "float32-cnn", "float32-float64-norms",
]  # fmt: skip


def build_corrected(p: Problem, fisher: str, joint: bool = False, **options: Any):
    """EKFAC of a problem, with exact blocks where layers are not known."""
    return build(p, fisher, joint=joint, cls=EKFACLinearOperator, fallback="dense", **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "fisher, joint",
    [
        *(("type-2", False), ("empirical", True)),
        *(pytest.param(*x, marks=MORE) for x in (("type-2", True), ("empirical", False))),
    ],
)
@pytest.mark.parametrize("name", DISTINCT)
def test_corrected_by_eigenvalues(name: str, fisher: str, joint: bool):
    p = problems.make(name)
    expected = kfac_reference.kfac(p, fisher, joint=joint, corrected=True)
    assert error(matrix(build_corrected(p, fisher, joint)), expected) <= max(p.tolerance, 1e-7)


def test_reduced_factors_give_another_basis(double):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    p = Problem.on(model, [torch.randn(n, 4, 3) for n in (12, 8)], nn.MSELoss())
    expected = kfac_reference.kfac(p, "type-2", reduce=True, corrected=True)
    assert error(matrix(build_corrected(p, "type-2", kfac_approx="reduce")), expected) <= 1e-7


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize(
    "name", ["transformer-tied", "padding-idx-tied", "segmentation", "rnn", "pinn"]
)
def test_trace_is_exact_and_no_diagonal_is_closer(name: str, fisher: str):
    """Blocks may be sums of Kronecker products."""
    p = problems.make(name)
    truth = (
        reference.ggn(p) if fisher == "type-2" else reference.empirical_fisher(p, terms="sample")
    )
    operator, offset = build_corrected(p, fisher), 0
    found = matrix(operator)
    kfac = matrix(build(p, fisher, fallback="dense"))
    for param in p.params:
        own = slice(offset, offset + param.numel())
        exact, corrected = truth[own, own], found[own, own]
        assert float(corrected.trace()) == pytest.approx(float(exact.trace()), rel=1e-9)
        # the correction is a projection of the block
        inner = float((corrected * exact).sum())
        assert inner == pytest.approx(float(corrected.square().sum()), rel=1e-9)
        distances = [float((block - exact).norm()) for block in (corrected, kfac[own, own])]
        # KFAC's sum of two dense products is not diagonal in the basis of one of them
        assert distances[0] <= distances[1] + 1e-12 or name == "pinn"
        offset = own.stop


@pytest.mark.parametrize("joint", [False, True])
def test_bases_of_groups_that_are_too_large(double, joint: bool):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    p = Problem.on(model, [torch.randn(3, 4, 4, 4)], nn.MSELoss())
    p = replace(p, params=p.params[:2])
    operator = build_corrected(p, "type-2", joint, max_factor_size=3)
    assert error(matrix(operator), reference.ggn(p).diagonal().diag()) <= 1e-10


@pytest.mark.parametrize("joint", [False, True])
def test_convolutions_used_twice(double, joint: bool):
    layer = nn.Conv1d(2, 2, 3, padding=1)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Flatten())
    p = Problem.on(model, [torch.randn(8, 2, 6)], nn.MSELoss())
    expected = kfac_reference.kfac(p, "type-2", joint=joint, corrected=True)
    assert error(matrix(build_corrected(p, "type-2", joint)), expected) <= 1e-9


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
    p = Problem.on(counts(is_head), [torch.randint(5, (n, 2)) for n in (4, 2)], nn.MSELoss())
    operator, exact = build_corrected(p, "type-2", joint), reference.ggn(p)
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
        build_corrected(replace(p, data=data), fisher)
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
    operator = build_corrected(
        replace(p, data=Failing(p.data, at)), "type-2", check_deterministic=False
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        operator.trace()
    assert error(matrix(operator), matrix(build_corrected(p, "type-2"))) <= 1e-12


def test_update_keeps_the_basis():
    p = problems.make("mlp-ce-mean")
    operator, truth = build_corrected(replace(p, data=p.data[:1]), "type-2"), reference.ggn(p)
    operator.trace()
    operator.update(p.data[-1])
    for param in operator.space.names:  # the trace does not depend on the basis
        own = operator.space.slice(param)
        assert error(matrix(operator)[own, own].trace(), truth[own, own].trace()) <= 1e-9


# --- randomness -----------------------------------------------------------------------------------


def _factors(p: Problem, fisher: str, **options: Any) -> Tensor:
    """All gradient factors, in which samples enter linearly."""
    operator = build(p, fisher, check_deterministic=False, **options)
    return torch.cat([B.flatten() for B in operator.gradient_covariances.values()])


@pytest.mark.parametrize(
    "name, fisher, num",
    [
        *((f"mlp-{loss}-mean", "mc", 300) for loss in ("ce-all", "bce-all", "mse")),
        ("transformer", "mc", 50),  # where terms interact, of which type-2 draws signs
        ("transformer", "type-2", 4),
    ],
)
def test_samples_are_unbiased(name: str, fisher: str, num: int):
    p = problems.make(name)
    exact = _factors(p, "type-2")
    draws = [_factors(p, fisher, mc_samples=num, seed=s, exact=False) for s in range(20)]
    assert torch.equal(_factors(p, fisher, mc_samples=num, seed=0, exact=False), draws[0])
    assert error(draws[0], draws[1]) > 1e-3
    mean, deviation = torch.stack(draws).mean(0), torch.stack(draws).std(0) / len(draws) ** 0.5
    assert bool(((mean - exact).abs() <= 5 * deviation + 1e-9).all())
    assert error(mean, exact) <= 0.1


def test_signs_do_not_matter_where_terms_do_not_interact():
    p = problems.make("tokens-mse-mean")
    one, two = (matrix(build(p, "type-2", exact=False, seed=s)) for s in (0, 1))
    assert error(one, two) > 1e-4  # its positions do
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).double()
    p = Problem.on(model, [torch.randint(5, (3, 4))], nn.MSELoss())
    expected = kfac_reference.kfac(p, "type-2")
    assert error(matrix(build(p, "type-2", exact=False)), expected) <= 1e-10


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
    p = Problem.on(model, [torch.randn(8, 2)], nn.MSELoss())
    assert 0 < int((model[:2](p.data[0][0]) == 0).sum()) < 8
    expected = kfac_reference.kfac(p, "type-2")
    for size in (1, 2, 8):
        found = build(problems.rebatched(p, size), "type-2")
        assert error(matrix(found), expected) <= 1e-10


def flat_tokens() -> Problem:
    """A problem in which the output's rows are those of all samples."""
    p = problems.make("tokens-mse-mean")
    data = [(X, y.flatten(0, 1)) for X, y in p.data]
    model = nn.Sequential(p.model, nn.Flatten(0, 1))
    return replace(p, model=model, data=data, batch_size_fn=len)


@pytest.mark.parametrize("make", [lambda: problems.make("mlp-ce-mean"), flat_tokens])
def test_empty_batches(make: Callable):
    p = make()
    expected = matrix(build(p, "type-2"))
    X, y = p.data[0]
    for data in ([(X[:0], y[:0]), *p.data], [*p.data, (X[:0], y[:0])]):
        assert error(matrix(build(replace(p, data=data), "type-2")), expected) <= 1e-12
    with pytest.raises(ValueError, match="no sample|empty|No term|no term"):
        build(replace(p, data=[(X[:0], y[:0])]), "type-2", check_deterministic=False).trace()


# --- structure ------------------------------------------------------------------------------------


def test_report():
    p = problems.make("transformer-tied")
    reports = {report.names[0]: report for report in build(p, "type-2", joint=True).report()}
    tied, norm = reports["embed.weight"], reports["norm1.weight"]
    assert tied.structure == "kronecker"
    assert tied.factors == ((1, 5, 5), (1, 4, 4), (1, 4, 4), (1, 5))
    assert norm.structure == "dense" and norm.reason
    assert reports["mlp.0.weight"].names == ("mlp.0.weight", "mlp.0.bias")
    p = problems.make("mlp-ce-mean")  # 4 -> 3 -> 3
    [large, *_] = build(p, "type-2", max_factor_size=2).report()
    assert "gradient factor diagonal: it is too large" in large.reason
    [identity, *_] = build(p, "forward-only").report()
    assert identity.reason == "gradient factor diagonal: the identity by fisher_type"


def test_bias_without_a_joint_block_says_why(double):
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 3))
    p = Problem.on(model, [torch.randn(4, 2, 2)], nn.MSELoss())
    reasons = {block.names: block.reason for block in build(p, "empirical", joint=True).report()}
    assert list(reasons) == [("0.weight",), ("0.bias",), ("2.weight", "2.bias")]
    assert "transposed convolutions" in reasons["0.bias",] and not reasons["0.weight",]
    assert [block.reason for block in build(p, "empirical").report()] == [""] * 4


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


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("name", ["mlp-ce-mean", "cnn", "transformer-tied", "lstm"])
def test_damping_by_block(name: str, cls: type, joint: bool):
    """Another number for each block, with the derivatives of the log-determinant in all."""
    K = build(problems.make(name), "empirical", joint=joint, cls=cls)
    numbers = torch.linspace(0.5, 2.0, len(K.blocks), dtype=torch.float64, requires_grad=True)
    given = dict(zip(K.blocks, numbers.unbind(), strict=True))
    of = {name: number for names, number in given.items() for name in names}
    added = torch.cat([of[n].expand(x.numel()) for n, x in K.space.split(K.diagonal()).items()])
    expected = torch.logdet(matrix(K) + added.diag())
    found = K.damped(given).logdet()
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(x, numbers, create_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), numbers)[0] for x in slopes))
    with torch.no_grad():
        damped = K.damped(given)
        total = matrix(K) + added.diag()
        assert error(matrix(damped), total) <= 1e-12
        assert error(matrix(damped.inverse()), torch.linalg.inv(total)) <= 1e-10
        assert error(matrix(damped.power(0.5) ** 2), total) <= 1e-10
        torch.testing.assert_close(damped.logdet(), expected)


# --- errors ---------------------------------------------------------------------------------------

BAD = [
    ({"fisher_type": "x"}, "fisher_type must be one of"),
    ({"kfac_approx": "x"}, "kfac_approx must be one of"),
    ({"kfac_approx": {"zzz": "reduce"}}, r"unknown names \['zzz'\]. There are"),
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
        p.build(KFACLinearOperator, **options)


class Masked(nn.Linear):
    def __init__(self, masks: object):
        super().__init__(3, 2)
        self.masks = masks

    def attention_masks(self, X: Tensor) -> object:
        return self.masks


def batch_norm(train: bool) -> Problem:
    p = problems.make("mlp-mse-mean")
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().train(train)
    return replace(p, model=model, params=list(model.parameters()))


#: Problems, the Fisher's type and options that do not go together.
REFUSED = [
    (lambda: batch_norm(True), "type-2", {}, ValueError, "BatchNorm in train mode"),
    (
        lambda: batch_norm(False), "forward-only", {}, NotImplementedError,
        "forward-only.*'1.weight'",
    ),
    (
        lambda: problems.make("mlp-l1-mean"), "mc", {}, NotImplementedError,
        "sampled.*fisher_type='empirical'",
    ),
    (
        lambda: problems.make("tokens-mse-mean"), "empirical", {"num_per_example_loss_terms": 2},
        ValueError, "num_per_example_loss_terms is 2",
    ),
] + [
    (
        lambda masks=masks: Problem.on(Masked(masks), [torch.randn(5, 3)], nn.MSELoss()),
        "empirical", {}, TypeError, r"attention_masks.*return \[mask\]",
    )
    for masks in (torch.ones(5, 4), [torch.ones(5)], [[1, 0]], None)
]  # fmt: skip


@pytest.mark.parametrize("make, fisher, options, kind, message", REFUSED)
def test_refused(make: Callable, fisher: str, options: dict, kind: type, message: str):
    with pytest.raises(kind, match=message):
        build(make(), fisher, **options).trace()


@pytest.mark.parametrize(
    "approx, reduced",
    [
        ({"0.bias": "reduce"}, ["0.bias"]),
        ({"0.weight": "reduce"}, ["0.weight"]),
        ({"0": "reduce", "0.bias": "expand"}, ["0.weight"]),
        ({"0": "reduce"}, ["0.weight", "0.bias"]),
        ({"": "reduce"}, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ({("0", "2.*"): "reduce"}, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ({"0.*": "reduce", "*": "expand"}, ["0.weight", "0.bias"]),
    ],
    ids=str,
)
def test_settings_by_parameter(double, approx: dict[str, str], reduced: list[str]):
    """A bias may have another setting than its weight, unless both are in one block."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    p = Problem.on(model, [torch.randn(3, 5, 3)], nn.MSELoss())
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


@pytest.mark.parametrize("shape", [(2, 2**18, 3), (600, 301), (2**15 + 600, 64)])
def test_moments_of_many_rows(shape: tuple[int, ...]):
    rows = torch.rand(shape, generator=torch.manual_seed(0))
    wide = rows.double()
    assert error(second_moment(rows), wide.mT @ wide) <= 1e-5
