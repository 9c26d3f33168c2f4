"""Rows of a layer's output are assigned to samples in any order and layout."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from contract import error, matrix
from models import Using
from sample_gradients import loop, rows_in_batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

SUM = nn.MSELoss(reduction="sum")
TERMS = {"terms": "sample"}
#: Says what a sample is where outputs are flattened.
FLAT = {"batch_size_fn": len}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def adapter() -> nn.Module:
    """A frozen layer, and an adapter before its first step, which see the sequences first."""

    def function(s: Using, x: Tensor) -> Tensor:
        h = x.transpose(0, 1).flatten(0, 1)
        h = torch.tanh(s.base(h) + s.up(s.down(h)))
        return h.unflatten(0, (x.shape[1], len(x))).transpose(0, 1).mean(1)

    down, up = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)
    nn.init.zeros_(up.weight)
    base = nn.Linear(3, 4).requires_grad_(False)
    return Using(function, base=base, down=down, up=up).double()


def adapter_data(*shapes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(*s, 3).double(), torch.randn(s[0], 4).double()) for s in shapes]


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (1, 4)])
def test_adapters_before_and_after_their_first_step(shape: tuple[int, int]):
    model, data = adapter(), adapter_data(shape, shape)
    params = [model.down.weight, model.up.weight]
    A = PerSampleGradientLinearOperator(model, SUM, params, data)

    def inputs(approx: str) -> Tensor:
        K = KFACLinearOperator(model, SUM, params, data, kfac_approx=approx)
        return K.input_covariances["down"]

    for _ in range(2):
        assert error(A.dense(), rows_in_batches(model, data, SUM, params)) <= 1e-12
        assert not A.fallbacks
        x = torch.cat([X.flatten(0, 1) for X, _ in data])
        assert error(inputs("expand"), covariance(x)) <= 1e-12
        x = torch.cat([X.mean(1) for X, _ in data])
        assert error(inputs("reduce"), covariance(x)) <= 1e-12
        nn.init.normal_(model.up.weight)


def test_zero_heads_and_a_last_batch_of_one_sample():
    model, (*data, last) = adapter(), adapter_data((4, 8), (4, 8), (1, 8), (1, 8))
    params = [model.down.weight, model.up.weight]
    K = KFACLinearOperator(model, SUM, params, data, kfac_approx="reduce")
    x = torch.cat([X.mean(1) for X, _ in data])
    assert error(K.input_covariances["down"], covariance(x)) <= 1e-12
    K.update(last)
    assert error(K.input_covariances["down"], covariance(torch.cat([x, last[0].mean(1)]))) <= 1e-12


def covariance(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def switched(s: Using, x: Tensor) -> Tensor:
    """Sequences, along the first axis, some of which are switched off."""
    h = torch.tanh(s.embed(x.transpose(0, 1).flatten(0, 1)))
    h = h.unflatten(0, (x.shape[1], -1)).transpose(0, 1)
    return s.head((h * (x[:, :1, :1] > 0)).sum(1))


def test_batches_without_a_gradient():
    model = Using(switched, embed=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, 3).double(), torch.randn(6, 2).double()
    x[:3, 0, 0], x[3:, 0, 0] = -1.0, 1.0
    data = [(x[:3], y[:3]), (x[3:], y[3:])]

    def factors(data: list, approx: str) -> KFACLinearOperator:
        options = {"fisher_type": "empirical", "kfac_approx": approx}
        return KFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data, **options)

    for batches in (data, data[::-1], [(x, y)]):
        for approx, rows in (("expand", x.flatten(0, 1)), ("reduce", x.mean(1))):
            found = factors(batches, approx).input_covariances["embed"]
            torch.testing.assert_close(found, covariance(rows))


def routed(s: Using, x: Tensor) -> Tensor:
    """Each sample goes to one of three layers."""
    scale, choice = s.gate(x).softmax(-1).max(-1)
    out = x.new_zeros(len(x), 2)
    for i, expert in enumerate(s.experts):
        own = (choice == i).nonzero()[:, 0]
        out = out.index_add(0, own, expert(x[own]) * scale[own, None])
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_routing(dtype: torch.dtype, caplog: pytest.LogCaptureFixture):
    """Rows follow no axis: gradients are computed one by one; KFAC-expand adds over all rows."""
    experts = nn.ModuleList([nn.Linear(4, 2) for _ in "abc"])
    model = Using(routed, gate=nn.Linear(4, 3), experts=experts).to(dtype)
    x, y = torch.randn(30, 4).to(dtype), torch.randn(30, 2).to(dtype)
    params, tolerance = list(model.parameters()), {8: 1e-9, 2: 0.1}[dtype.itemsize]
    rows = PerSampleGradientLinearOperator(model, nn.MSELoss(), params, [(x, y)])
    wide = deepcopy(model).double()
    arguments = (wide, nn.MSELoss(), list(wide.parameters()))
    one_by_one = [(x[n : n + 1].double(), y[n : n + 1].double()) for n in range(30)]
    expected = PerSampleGradientLinearOperator(*arguments, one_by_one).dense()
    assert error(rows.dense(), expected) <= tolerance
    names = {name for name, _ in model.named_parameters() if name.startswith("experts")}
    assert set(rows.fallbacks) == names and len(caplog.records) == 1
    options = {"fisher_type": "empirical"}
    for operator in (KFACLinearOperator, EKFACLinearOperator):
        K = operator(model, nn.MSELoss(), params, [(x, y)], **options)
        truth = operator(*arguments, one_by_one, **options)
        v = torch.randn(K.shape[0])
        assert error(K @ v, truth @ v.double()) <= tolerance
        options["kfac_approx"] = "reduce"
        with pytest.raises(NotImplementedError, match="not known to which samples"):
            operator(model, nn.MSELoss(), params, [(x, y)], **options).trace()
        del options["kfac_approx"]


def routed_tokens(s: Using, x: Tensor) -> Tensor:
    """Tokens go to experts, whose numbers are tensors. A norm sees all tokens, too."""
    h = s.norm(x).flatten(0, 1)
    choice = h[:, :3].detach().argmax(1)
    for i in choice.unique():
        own = (choice == i).nonzero()[:, 0]
        h = h.index_add(0, own, s.norm(h[own]) @ s.experts[i].T)
    return s.head(h.unflatten(0, x.shape[:2]).sum(1))


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_exact_blocks_of_parameters_with_rows_of_both_kinds(cls: type):
    """The norm sees samples in order, and tokens that follow no axis. Its block is exact."""
    parts = {"experts": torch.randn(3, 4, 4), "head": nn.Linear(4, 2)}
    model, loss = Using(routed_tokens, norm=nn.LayerNorm(4), **parts).double(), nn.MSELoss()
    data = [(torch.randn(n, 4, 4).double(), torch.randn(n, 2).double()) for n in (3, 1)]
    params = [*model.norm.parameters(), model.experts, *model.head.parameters()]
    K = cls(model, loss, params, data, fisher_type="type-2", fallback="dense")
    G = GGNLinearOperator(model, loss, params, data)
    structures = {block.names: block.structure for block in K.report()}
    assert structures["experts",] == "kronecker"
    for own in (slice(0, 4), slice(4, 8)):  # the weight and the bias of the norm
        assert error(K.to_dense()[own, own], G.to_dense()[own, own]) <= 1e-12


def attention(s: Using, X: dict[str, Tensor], causal: bool) -> Tensor:
    """Sequences of which the first few tokens are read; of the first alone, softmax is constant."""
    x, mask = X["x"], X["mask"]
    qkv = [f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (s.query, s.key, s.value)]
    options = {"is_causal": True} if causal else {"attn_mask": mask[:, None, None]}
    out = scaled_dot_product_attention(*qkv, **options).transpose(1, 2).flatten(-2)
    if causal:
        return s.head(out[:, 0])
    return s.head((out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("causal", "lengths"),
    [(True, [(4,), (4, 4)]), (False, [(1, 1), (3, 2), (4, 1)]), (False, [(3, 2), (1,)])],
)
def test_gradients_that_are_rounding_errors(
    causal: bool, lengths: list, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
):
    """Kernels of attention return such instead of zeros."""
    layers = {name: nn.Linear(16, 16) for name in ("query", "key", "value")}
    layers["head"] = nn.Linear(16, 2)
    model = Using(lambda s, X: attention(s, X, causal), **layers).to(dtype)
    loss, data = nn.CrossEntropyLoss(reduction="sum"), []
    for some in lengths:
        mask = torch.arange(4)[None] < torch.tensor(some)[:, None]
        x = torch.randn(len(some), 4, 16, dtype=dtype)
        data.append(({"x": x, "mask": mask}, torch.randint(2, (len(some),))))
    params = list(model.parameters())
    options = {"batch_size_fn": lambda X: len(X["x"])}
    found = PerSampleGradientLinearOperator(model, loss, params, data, **options).dense()
    rows = loop(model, params, data, loss)
    assert error(found, rows) <= (1e-5 if dtype == torch.float32 else 1e-12)
    assert not caplog.records
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        K = kind(model, loss, params, data, **options)
        assert {block.structure for block in K.report()} == {"kronecker"}
        assert bool(K.trace().isfinite())


def mixing(s: Using, x: Tensor) -> Tensor:
    """The second batch has another operation."""
    h = s.token(x).tanh()
    h = h + h.mean(1, keepdim=True)
    return s.head(h.sin() if x[0, 0, 0] > 0 else h).flatten(0, 1)


def test_other_operations_where_tokens_of_a_sample_interact():
    model = Using(mixing, token=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()
    x, y = torch.randn(4, 5, 3).double(), torch.randint(2, (20,))
    x[:2, 0, 0], x[2:, 0, 0] = -1.0, 1.0
    data = [(x[:2], y[:10]), (x[2:], y[10:])]
    params, loss = list(model.parameters()), nn.CrossEntropyLoss()
    K = KFACLinearOperator(model, loss, params, data, **FLAT, check_deterministic=False)
    assert error(K.input_covariances["token"], covariance(x.flatten(0, 1))) <= 1e-12


# --- rows of the output that are tokens of samples


def tokens(interact: bool, flat: bool, mean: str = "mean", sizes: tuple = (6, 2)) -> tuple:
    """Return the arguments of operators, of a model with flat outputs or without.

    A layer sees each token, and a table of positions sees no sample.
    """

    def function(s: Using, x: Tensor) -> Tensor:
        h = torch.tanh(s.norm(s.first(x)) + s.position(torch.arange(7)))
        h = h + h.cumsum(1) if interact else h
        out = s.head(h)
        return out.flatten(0, 1) if flat else out.movedim(-1, 1)

    torch.manual_seed(0)
    layers = {"position": nn.Embedding(7, 5), "norm": nn.LayerNorm(5), "head": nn.Linear(5, 3)}
    model = Using(function, first=nn.Linear(4, 5), **layers).double()
    X = [torch.randn(n, 7, 4).double() for n in sizes]
    y = [torch.randint(3, (n * 7,) if flat else (n, 7)) for n in sizes]
    loss = nn.CrossEntropyLoss(reduction=mean)
    return model, loss, list(model.parameters()), list(zip(X, y, strict=True))


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("fisher_type", ["empirical", "type-2"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("interact, sizes", [(False, (6, 2)), (True, (6, 2)), (False, (1, 2))])
def test_factors_of_flattened_tokens(
    kind: type, fisher_type: str, approx: str, interact: bool, sizes: tuple[int, ...]
):
    options = {"fisher_type": fisher_type, "kfac_approx": approx}
    expected = kind(*tokens(interact, False, sizes=sizes), **options).to_dense()
    found = kind(*tokens(interact, True, sizes=sizes), **options, **FLAT).to_dense()
    assert error(found, expected) <= 1e-9


@pytest.mark.parametrize("mean", ["mean", "sum"])
@pytest.mark.parametrize("interact", [False, True])
def test_samples_of_flattened_tokens(interact: bool, mean: str):
    flat, plain = tokens(interact, True, mean), tokens(interact, False, mean)
    rows, expected = (PerSampleGradientLinearOperator(*a, **FLAT) for a in (flat, plain))
    assert rows.shape[0] == 8
    assert error(rows.dense(), expected.dense()) <= 1e-10
    assert error(rows.norms(), expected.norms()) <= 1e-10
    assert error(rows.T @ torch.ones(8).double(), expected.dense().sum(0)) <= 1e-10
    by_term = [PerSampleGradientLinearOperator(*a, **FLAT, terms="term") for a in (flat, plain)]
    assert by_term[0].shape[0] == 56
    assert error(by_term[0].dense(), by_term[1].dense()) <= 1e-10
    options = {"terms": "sample", **FLAT}
    fisher = [EFLinearOperator(*a, **options).to_dense() for a in (flat, plain)]
    assert error(*fisher) <= 1e-10
    unchecked = tokens(interact, True, mean)  # of a new model, whose parts no check has evaluated
    found = EFLinearOperator(*unchecked, **options, check_deterministic=False).to_dense()
    assert error(found, fisher[0]) <= 1e-10
    E = EFLinearOperator(*flat, **options)
    with E.linearized():
        assert error(E.to_dense(), fisher[0]) <= 1e-10
    diagonals = [GGNDiagonalLinearOperator(*a, **FLAT).diagonal() for a in (flat, plain)]
    assert error(*diagonals) <= 1e-10
    model, _, params, data = flat
    for some in ({}, FLAT):  # the Jacobian has no samples
        J = JacobianLinearOperator(model, params, data, **some)
        assert error(J.gram(), matrix(J) @ matrix(J).T) <= 1e-10


def test_flattened_tokens_without_rules():
    """Samples are cut one by one, each with all of its tokens."""
    inner, loss, _, data = tokens(True, True)
    model = Using(
        lambda s, x: torch.linalg.solve(s.scale, s.inner(x).unsqueeze(-1))[..., 0],
        inner=inner,
        scale=torch.randn(3, 3).double(),
    )
    params = [model.scale, inner.head.bias]
    A = PerSampleGradientLinearOperator(model, loss, params, data, **FLAT)
    by_sample = [(X, y.view(len(X), -1)) for X, y in data]
    rows = loop(model, params, by_sample, lambda z, y: cross_entropy(z, y[0], reduction="sum"))
    assert error(A.dense(), rows) <= 1e-10
    assert list(A.fallbacks) == ["scale"]


def test_tokens_of_unequal_number_are_refused():
    inner, loss, params, [(X, y), _] = tokens(False, True)

    def ragged(x: Tensor) -> Tensor:
        """Drop a token of a batch of three samples."""
        return inner(x)[: len(x) * 7 - (len(x) == 3)]

    data = [(X, y), (X[:3], y[:20])]
    with pytest.raises(ValueError, match="20 rows for the 3 samples"):
        KFACLinearOperator(ragged, loss, params, data, **FLAT, kfac_approx="reduce").trace()


def test_losses_with_graphs_weigh_flattened_tokens_alike():
    """A penalty without effect changes nothing but the way that gradients are computed."""
    module, _, params, data = tokens(interact=True, flat=True)

    def model(x: Tensor) -> Tensor:  # a module's parameters may not be used by the loss, too
        return module(x)

    def plain(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y)

    def penalized(output: Tensor, y: Tensor) -> Tensor:
        return plain(output, y) + 0.0 * sum(p.square().sum() for p in params)

    options = {"terms": "sample", "reduction": "mean", **FLAT}
    fisher = [EFLinearOperator(model, loss, params, data, **options) for loss in (plain, penalized)]
    assert error(*(F.to_dense() for F in fisher)) <= 1e-10
    for terms in ("sample", "term"):
        options["terms"] = terms
        rows = PerSampleGradientLinearOperator(model, penalized, params, data, **options)
        assert rows.dense().shape[0] == 8


# --- rows without a gradient


def test_biases_and_dead_layers_need_no_samples():
    """The bias of a dead layer, whose rows might be any sample's, has a zero block."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Flatten(1), nn.Linear(16, 5)).double()
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.fill_(-1.0)
    X, y = torch.randn(2, 8, 3).double(), torch.tensor([0, 1])
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        options = {"fisher_type": "type-2", "kfac_approx": "reduce"}
        arguments = model, nn.CrossEntropyLoss(), list(model[0].parameters()), [(X, y)]
        K = kind(*arguments, **options)
        assert K.trace() == 0
        torch.testing.assert_close(K.input_covariances["0"], covariance(X.mean(1)))


def test_half_dead_layers():
    """Only the rows (0, 0) and (1, 1) have a gradient: it shows no axis of samples."""

    def half_dead(s: Using, x: Tensor) -> Tensor:
        return s.head((torch.tanh(s.layer(x)) * torch.eye(2).to(x).unsqueeze(-1)).sum(1))

    model = Using(half_dead, layer=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()
    X, y = torch.randn(2, 2, 3).double(), torch.randn(2, 2).double()
    options = {"fisher_type": "empirical", "kfac_approx": "reduce"}
    K = KFACLinearOperator(model, SUM, [model.layer.bias], [(X, y)], **options)
    grads = rows_in_batches(model, [(X, y)], SUM, [model.layer.bias])
    assert error(K.to_dense(), grads.T @ grads) <= 1e-10
    K = KFACLinearOperator(model, SUM, [model.layer.weight], [(X, y)], **options)
    assert error(K.input_covariances["layer"], covariance(X.mean(1))) <= 1e-12


# --- a first axis of X that numbers no samples


def recurrent(function: Callable[[Using, Tensor], Tensor]) -> nn.Module:
    return Using(function, rnn=nn.RNN(4, 5), head=nn.Linear(5, 3)).double()


def test_time_major_inputs_are_no_samples():
    """Sequences are ``[T, N, d]``, as recurrent layers take them by default; outputs ``[N, C]``.

    Where N is larger than T, the batch has more rows than samples unless the user says otherwise.
    """
    model, loss = recurrent(lambda s, x: s.head(s.rnn(x)[0].mean(0))), nn.CrossEntropyLoss()
    data = [(torch.randn(3, n, 4).double(), torch.randint(3, (n,))) for n in (6, 3, 4)]
    params = list(model.parameters())
    rows = rows_in_batches(model, data, loss)
    with pytest.raises(ValueError, match="6 rows for the 3 samples .* batch_size_fn"):
        PerSampleGradientLinearOperator(model, loss, params, data)
    options: dict[str, Any] = {"batch_size_fn": lambda X: X.shape[1]}
    A = PerSampleGradientLinearOperator(model, loss, params, data, **options)
    assert A.shape[0] == 13 and error(A.dense(), rows) <= 1e-10
    E = EFLinearOperator(model, loss, params, data, **options, terms="sample")
    assert error(E.to_dense(), rows.T @ rows / 13) <= 1e-10
    options |= {"fisher_type": "type-2"}
    K = [KFACLinearOperator(model, loss, params, data, seed=seed, **options) for seed in (0, 1)]
    assert error(K[0].to_dense(), K[1].to_dense()) <= 1e-12


def rows_of_sequences(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the gradients of sequences, of which the model returns a row for each token."""
    params = list(model.parameters())
    rows = [
        torch.autograd.grad(SUM(model(X[n : n + 1]), y), params)
        for X, target in data
        for n, y in enumerate(target.split(X.shape[1]))
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize("sizes", [(1, 3), (1, 1), (3, 1)], ids=str)
def test_tokens_of_one_sample(sizes: tuple[int, ...]):
    """Batches of one sequence, whose model returns a row for each token, also after an error."""
    model, loss = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(0, 1)).double(), SUM
    data = [(torch.randn(n, 4, 4).double(), torch.randn(4 * n, 3).double()) for n in sizes]
    params, G = list(model.parameters()), rows_of_sequences(model, data)
    for kind, options, expected in [
        (PerSampleGradientLinearOperator, FLAT, G),
        (EFLinearOperator, TERMS | FLAT, G.T @ G),
    ]:
        A, V = kind(model, loss, params, data, **options), torch.eye(G.shape[1]).double()
        assert error(A @ V, expected) <= 1e-12
        before = model[0].weight.detach().clone()
        nn.init.constant_(model[0].weight, torch.nan)
        with pytest.raises(ValueError, match="(?i)nan"):
            A @ V
        nn.init.zeros_(model[0].weight).data.add_(before)
        assert error(A @ V, expected) <= 1e-12


def test_tokens_of_longer_sequences_than_before():
    """A list that is filled anew, first with sequences of length one: a row for each sample."""
    model, data = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1)).double(), []

    def fill(length: int) -> None:
        X, y = torch.randn(3, length, 4).double(), torch.randn(3 * length, 3).double()
        data[:] = [(X, y)]

    for kind, options in [
        (PerSampleGradientLinearOperator, FLAT),
        (EFLinearOperator, TERMS | FLAT),
    ]:
        fill(1)
        A = kind(model, SUM, list(model.parameters()), data, **options)
        V = torch.randn(A.shape[1], 2).double()
        A @ V
        fill(4)
        G = rows_of_sequences(model, data)
        expected = (G if kind is PerSampleGradientLinearOperator else G.T @ G) @ V
        assert error(A @ V[:, 0], expected[:, 0]) <= 1e-12
        assert error(A @ V, expected) <= 1e-12


def test_samples_of_a_recurrence_over_the_batch_are_refused():
    """Only later samples depend on others."""

    model = recurrent(lambda s, x: s.head(s.rnn(x)[0][:, -1]))  # of [N, T, d]
    X, y = torch.randn(5, 3, 4).double(), torch.randint(3, (5,))
    for kind in (PerSampleGradientLinearOperator, EFLinearOperator, GGNDiagonalLinearOperator):
        with pytest.raises(ValueError, match="depends on the other samples"):
            kind(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, y)])


def test_sets_whose_elements_are_changed_before_the_first_layer():
    """The layer sees rows of samples, not a constant, though its input has no gradient."""

    def function(s: Using, X: dict[str, Tensor]) -> Tensor:
        x = (X["x"] - X["x"].mean()).clamp(min=-1)
        return X["pool"] @ s.layer(x).tanh()

    model, data = Using(function, layer=nn.Linear(3, 2)).double(), []
    for sizes in ([2, 2], [1, 3]):
        pool = torch.block_diag(*(torch.ones(1, size) for size in sizes)).double()
        data.append(({"x": torch.randn(4, 3).double(), "pool": pool}, torch.randn(2, 2).double()))
    params, options = list(model.parameters()), {"batch_size_fn": lambda X: len(X["pool"])}
    J = PerSampleGradientLinearOperator(model, SUM, params, data, **options)
    assert error(J.dense(), rows_in_batches(model, data, SUM)) <= 1e-10
    K = KFACLinearOperator(model, SUM, params, data, fisher_type="type-2", **options)
    x = torch.cat([(X["x"] - X["x"].mean()).clamp(min=-1) for X, _ in data])
    assert error(K.input_covariances["layer"], x.T @ x / len(x)) <= 1e-12
