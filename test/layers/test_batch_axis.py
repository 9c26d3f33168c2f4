"""Rows of a layer's output are assigned to samples in any order and layout."""

from collections.abc import Callable

import pytest
import torch
from contract import error
from sample_gradients import rows_in_batches
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

SEEDS = 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


Layer = Callable[[Tensor], Tensor]


def time_first(f: Layer, x: Tensor) -> Tensor:
    return f(x.transpose(0, 1)).transpose(0, 1)


def flattened(f: Layer, x: Tensor) -> Tensor:
    return f(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def time_first_flattened(f: Layer, x: Tensor) -> Tensor:
    h = f(x.transpose(0, 1).reshape(-1, x.shape[2]))
    return h.reshape(x.shape[1], len(x), -1).transpose(0, 1)


def sorted_by_value(f: Layer, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return f(x[order])[order.argsort()]


def either_way(f: Layer, x: Tensor) -> Tensor:
    return time_first_flattened(f, x) if x[0, 0, 0] > 0 else flattened(f, x)


#: How a layer may see batches ``[N, T, d]``, and whether the rows follow an axis.
ORDERS: dict[str, tuple[Callable[[Layer, Tensor], Tensor], bool]] = {
    "samples first": (lambda f, x: f(x), True),
    "time first": (time_first, True),
    "flattened": (flattened, True),
    "time first, flattened": (time_first_flattened, True),
    "both ways, tied": (lambda f, x: f(x) + 2 * time_first(f, x).sin(), True),
    "either way": (either_way, True),
    "dead samples": (lambda f, x: time_first(f, x) * (x[:, :1, :1] > 0), True),
    "reversed": (lambda f, x: f(x.flip(0)).flip(0), False),
    "sorted by value": (sorted_by_value, False),
}


class Ordered(nn.Module):
    def __init__(self, order: Callable[[Layer, Tensor], Tensor]):
        super().__init__()
        self.order, self.layer, self.head = order, nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.order(self.layer, x)).mean(1))


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 3), (2, 4), (3, 3)],
        [(1, 5), (4, 4), (4, 4)],
        [(16, 2), (16, 2), (5, 2)],
        [(4, 1), (4, 3)],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str, shapes: list[tuple[int, int]]):
    order, follows_axis = ORDERS[name]
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model, loss = Ordered(order).double(), nn.MSELoss(reduction="sum")
        data = [(torch.randn(*s, 3).double(), torch.randn(s[0], 2).double()) for s in shapes]
        rows = rows_in_batches(model, data, loss)
        A = PerSampleGradientLinearOperator(model, loss, list(model.parameters()), data)
        for _ in range(2):
            assert error(A.dense(), rows) <= 1e-10, seed
        assert not (follows_axis and A.fallbacks), (seed, A.fallbacks)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(0, 1).flatten(0, 1)
        h = torch.tanh(self.base(h) + self.up(self.down(h)))
        return h.unflatten(0, (x.shape[1], len(x))).transpose(0, 1).mean(1)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (1, 4)])
def test_adapters_before_and_after_their_first_step(shape: tuple[int, int]):
    model, loss = LoRA().double(), nn.MSELoss(reduction="sum")
    data = [(torch.randn(*shape, 3).double(), torch.randn(shape[0], 4).double()) for _ in "ab"]
    params = [model.down.weight, model.up.weight]
    A = PerSampleGradientLinearOperator(model, loss, params, data)

    def inputs(approx: str) -> Tensor:
        K = KFACLinearOperator(model, loss, params, data, kfac_approx=approx)
        return K.input_covariances["down"]

    for _ in range(2):
        assert error(A.dense(), rows_in_batches(model, data, loss, params)) <= 1e-12
        assert not A.fallbacks
        x = torch.cat([X.flatten(0, 1) for X, _ in data])
        assert error(inputs("expand"), covariance(x)) <= 1e-12
        x = torch.cat([X.mean(1) for X, _ in data])
        assert error(inputs("reduce"), covariance(x)) <= 1e-12
        nn.init.normal_(model.up.weight)


class TimeFirst(nn.Module):
    """Sequences, along the first axis, some of which are switched off."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x.transpose(0, 1).flatten(0, 1)))
        h = h.unflatten(0, (x.shape[1], -1)).transpose(0, 1)
        return self.head((h * (x[:, :1, :1] > 0)).sum(1))


class Experts(nn.Module):
    """Each sample goes to one of three layers."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList([nn.Linear(4, 2) for _ in "abc"])

    def forward(self, x: Tensor) -> Tensor:
        scale, choice = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            own = (choice == i).nonzero()[:, 0]
            out = out.index_add(0, own, expert(x[own]) * scale[own, None])
        return out


def covariance(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def factors(model: nn.Module, data: list, approx: str, **options) -> KFACLinearOperator:
    options = {"fisher_type": "empirical", "kfac_approx": approx, **options}
    return KFACLinearOperator(model, nn.MSELoss(), list(model.parameters()), data, **options)


def test_batches_without_a_gradient():
    model, x, y = TimeFirst().double(), torch.randn(6, 3, 3).double(), torch.randn(6, 2).double()
    x[:, 0, 0] = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    for batches in (data[:1], data):
        with pytest.raises(NotImplementedError, match="rows have no gradient"):
            factors(model, batches, "reduce").trace()
    for batches in (data[::-1], [(x, y)]):
        K = factors(model, batches, "expand")
        torch.testing.assert_close(K.input_covariances["embed"], covariance(x.flatten(0, 1)))
        K = factors(model, batches, "reduce")
        torch.testing.assert_close(K.input_covariances["embed"], covariance(x.mean(1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_routing(dtype: torch.dtype, caplog: pytest.LogCaptureFixture):
    """Rows follow no axis: gradients are computed one by one; KFAC-expand adds over all rows."""
    model, x, y = Experts().to(dtype), torch.randn(30, 4).to(dtype), torch.randn(30, 2).to(dtype)
    params, tolerance = list(model.parameters()), {8: 1e-9, 2: 0.1}[dtype.itemsize]
    rows = PerSampleGradientLinearOperator(model, nn.MSELoss(), params, [(x, y)])
    wide = Experts().double()
    wide.load_state_dict(model.state_dict())
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


class Routed(nn.Module):
    """Tokens go to experts, whose numbers are tensors. A norm sees all tokens, too."""

    def __init__(self):
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(4), nn.Parameter(torch.randn(3, 4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        choice = h[:, :3].detach().argmax(1)
        for i in choice.unique():
            own = (choice == i).nonzero()[:, 0]
            h = h.index_add(0, own, self.norm(h[own]) @ self.experts[i].T)
        return self.head(h.unflatten(0, x.shape[:2]).sum(1))


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_exact_blocks_of_parameters_with_rows_of_both_kinds(cls: type):
    """The norm sees samples in order, and tokens that follow no axis. Its block is exact."""
    model, loss = Routed().double(), nn.MSELoss()
    data = [(torch.randn(n, 4, 4).double(), torch.randn(n, 2).double()) for n in (3, 1)]
    params = [*model.norm.parameters(), model.experts, *model.head.parameters()]
    K = cls(model, loss, params, data, fisher_type="type-2", fallback="dense")
    G = GGNLinearOperator(model, loss, params, data)
    structures = {block.names: block.structure for block in K.report()}
    assert structures["experts",] == "kronecker"
    for own in (slice(0, 4), slice(4, 8)):  # the weight and the bias of the norm
        assert error(K.to_dense()[own, own], G.to_dense()[own, own]) <= 1e-12


def test_bags_with_offsets():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(10, 4), nn.Linear(4, 3)

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.head(self.table(*batch))

    model, loss = Bags().double(), nn.CrossEntropyLoss(reduction="sum")
    text, offsets, y = torch.randint(10, (10,)), torch.tensor([0, 3, 4, 8]), torch.randint(3, (4,))
    options = {"batch_size_fn": lambda X: len(X[1])}
    params = list(model.parameters())
    A = PerSampleGradientLinearOperator(model, loss, params, [((text, offsets), y)], **options)
    start = torch.zeros(1, dtype=torch.int64)
    bags = text.tensor_split(offsets[1:])
    alone = [((bag, start), y[n : n + 1]) for n, bag in enumerate(bags)]
    assert error(A.dense(), rows_in_batches(model, alone, loss)) <= 1e-12


class Attention(nn.Module):
    """Sequences of which the first few tokens are read; of the first alone, softmax is constant."""

    def __init__(self, causal: bool):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head, self.causal = nn.Linear(16, 2), causal

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        x, mask = data["x"], data["mask"]
        layers = (self.query, self.key, self.value)
        qkv = [layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in layers]
        options = {"is_causal": True} if self.causal else {"attn_mask": mask[:, None, None]}
        out = scaled_dot_product_attention(*qkv, **options).transpose(1, 2).flatten(-2)
        if self.causal:
            return self.head(out[:, 0])
        return self.head((out * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("causal", "lengths"),
    [(True, [(4,), (4, 4)]), (False, [(1, 1), (3, 2), (4, 1)]), (False, [(3, 2), (1,)])],
)
def test_gradients_that_are_rounding_errors(
    causal: bool, lengths: list, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
):
    """Kernels of attention return such instead of zeros."""
    model, loss = Attention(causal).to(dtype), nn.CrossEntropyLoss(reduction="sum")
    data = []
    for some in lengths:
        mask = torch.arange(4)[None] < torch.tensor(some)[:, None]
        x = torch.randn(len(some), 4, 16, dtype=dtype)
        data.append(({"x": x, "mask": mask}, torch.randint(2, (len(some),))))
    params = list(model.parameters())
    options = {"batch_size_fn": lambda X: len(X["x"])}
    found = PerSampleGradientLinearOperator(model, loss, params, data, **options).dense()
    rows = []
    for X, y in data:
        for n in range(len(y)):
            output = model({name: x[n : n + 1] for name, x in X.items()})
            grads = torch.autograd.grad(loss(output, y[n : n + 1]), params)
            rows.append(torch.cat([g.flatten() for g in grads]))
    assert error(found, torch.stack(rows)) <= (1e-5 if dtype == torch.float32 else 1e-12)
    assert not caplog.records
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        K = kind(model, loss, params, data, **options)
        assert {block.structure for block in K.report()} == {"kronecker"}
        assert bool(K.trace().isfinite())


class Positions(nn.Module):
    """A row of the output for each token, and a table of positions that sees no sample."""

    def __init__(self):
        super().__init__()
        self.token, self.position, self.head = nn.Linear(5, 5), nn.Embedding(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.token(x) + self.position(torch.arange(4))).tanh()).flatten(0, 1)


@pytest.mark.parametrize("cut", [[1, 2], [1, 1, 1]])
@pytest.mark.parametrize("fisher_type", ["type-2", "empirical"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_tokens_of_one_sample_are_no_samples(cut: list[int], fisher_type: str, approx: str):
    torch.manual_seed(0)
    model, num_samples = Positions().double(), sum(cut)
    X, y = torch.randn(num_samples, 4, 5).double(), torch.randint(3, (num_samples, 4))
    whole = [(X, y.flatten())]
    parts = [(x, t.flatten()) for x, t in zip(X.split(cut), y.split(cut), strict=True)]

    def dense(data: list) -> Tensor:
        params, options = list(model.parameters()), {"fisher_type": fisher_type}
        # else signs are drawn for each batch
        options |= {"kfac_approx": approx, "batch_size_fn": len, "exact": fisher_type == "type-2"}
        K = KFACLinearOperator(model, nn.CrossEntropyLoss(), params, data, **options)
        return K @ torch.eye(K.shape[1]).double()

    torch.testing.assert_close(dense(parts), dense(whole))


def test_other_operations_where_tokens_of_a_sample_interact():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.token(x).tanh()
            h = h + h.mean(1, keepdim=True)
            return self.head(h.sin() if x[0, 0, 0] > 0 else h).flatten(0, 1)

    model, x, y = Mixing().double(), torch.randn(4, 5, 3).double(), torch.randint(2, (20,))
    x[:2, 0, 0], x[2:, 0, 0] = -1.0, 1.0
    data = [(x[:2], y[:10]), (x[2:], y[10:])]
    params, loss = list(model.parameters()), nn.CrossEntropyLoss()
    K = KFACLinearOperator(model, loss, params, data, check_deterministic=False)
    assert error(K.input_covariances["token"], covariance(x.flatten(0, 1))) <= 1e-12


# --- rows of the output that are tokens of samples


class Tokens(nn.Module):
    """A layer for each token, with or without interaction, and outputs for each token."""

    def __init__(self, interact: bool, flat: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.norm, self.interact, self.flat = nn.LayerNorm(5), interact, flat
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = h + h.cumsum(1) if self.interact else h
        out = self.head(h)
        return out.flatten(0, 1) if self.flat else out.movedim(-1, 1)


def tokens(interact: bool, flat: bool, mean: str = "mean") -> tuple:
    """Return the arguments of operators, of a model with flat outputs or without."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 7), (2, 7)]
    X = [torch.randn(*shape, 4, generator=generator).double() for shape in shapes]
    y = [torch.randint(3, shape, generator=generator) for shape in shapes]
    y = [labels.flatten() for labels in y] if flat else y
    model = Tokens(interact, flat)
    loss = nn.CrossEntropyLoss(reduction=mean)
    return model, loss, list(model.parameters()), list(zip(X, y, strict=True))


@pytest.mark.parametrize("kind", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("fisher_type", ["empirical", "type-2"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("interact", [False, True])
def test_factors_of_flattened_tokens(kind: type, fisher_type: str, approx: str, interact: bool):
    options = {"fisher_type": fisher_type, "kfac_approx": approx}
    expected = kind(*tokens(interact, flat=False), **options).to_dense()
    for more in ({}, {"batch_size_fn": len}):
        found = kind(*tokens(interact, flat=True), **options, **more).to_dense()
        assert error(found, expected) <= 1e-9


@pytest.mark.parametrize("mean", ["mean", "sum"])
@pytest.mark.parametrize("interact", [False, True])
def test_samples_of_flattened_tokens(interact: bool, mean: str):
    flat, plain = tokens(interact, True, mean), tokens(interact, False, mean)
    rows, expected = (PerSampleGradientLinearOperator(*arguments) for arguments in (flat, plain))
    assert rows.shape[0] == 8
    assert error(rows.dense(), expected.dense()) <= 1e-10
    assert error(rows.norms(), expected.norms()) <= 1e-10
    assert error(rows.T @ torch.ones(8).double(), expected.dense().sum(0)) <= 1e-10
    by_term = [PerSampleGradientLinearOperator(*a, terms="term") for a in (flat, plain)]
    assert by_term[0].shape[0] == 56
    assert error(by_term[0].dense(), by_term[1].dense()) <= 1e-10
    fisher = [EFLinearOperator(*a, terms="sample").to_dense() for a in (flat, plain)]
    assert error(*fisher) <= 1e-10
    with EFLinearOperator(*flat, terms="sample").linearized():
        assert error(EFLinearOperator(*flat, terms="sample").to_dense(), fisher[0]) <= 1e-10
    diagonals = [GGNDiagonalLinearOperator(*a).diagonal() for a in (flat, plain)]
    assert error(*diagonals) <= 1e-10


def test_flattened_tokens_without_rules():
    """Samples are cut one by one, each with all of its tokens."""

    class Scaled(Tokens):
        def __init__(self):
            super().__init__(interact=True, flat=True)
            self.scale = nn.Parameter(torch.randn(3, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.solve(self.scale, super().forward(x).unsqueeze(-1))[..., 0]

    model, (_, loss, _, data) = Scaled(), tokens(True, True)
    params = [model.scale, model.head.bias]
    A = PerSampleGradientLinearOperator(model, loss, params, data)
    rows = []
    for X, y in data:
        for x, labels in zip(X, y.reshape(len(X), -1), strict=True):
            value = nn.functional.cross_entropy(model(x.unsqueeze(0)), labels, reduction="sum")
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, params)]))
    assert error(A.dense(), torch.stack(rows)) <= 1e-10
    assert list(A.fallbacks) == ["scale"]


def test_tokens_of_unequal_number_are_refused():
    model, loss, params, [(X, y), _] = tokens(False, True)

    class Ragged(nn.Module):
        """Drops a token of a batch of three samples."""

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[: len(x) * 7 - (len(x) == 3)]

    data = [(X, y), (X[:3], y[:20])]
    with pytest.raises(ValueError, match="20 rows for 3 samples"):
        KFACLinearOperator(Ragged(), loss, params, data, kfac_approx="reduce").trace()


# --- rows without a gradient


def test_biases_and_dead_layers_need_no_samples():
    """The bias of a dead layer, whose rows might be any sample's, has a zero block."""
    torch.manual_seed(0)
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


def test_biases_of_half_dead_layers_need_no_samples():
    """Only the rows (0, 0) and (1, 1) have a gradient: an axis of samples is not evident."""

    class HalfDead(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.eye(2, dtype=x.dtype).unsqueeze(-1)
            return self.head((torch.tanh(self.layer(x)) * mask).sum(1))

    model, X, y = HalfDead().double(), torch.randn(2, 2, 3).double(), torch.randn(2, 2).double()
    arguments = model, nn.MSELoss(reduction="sum")
    options = {"fisher_type": "empirical", "kfac_approx": "reduce"}
    K = KFACLinearOperator(*arguments, [model.layer.bias], [(X, y)], **options)
    grads = rows_in_batches(model, [(X, y)], arguments[1], [model.layer.bias])
    assert error(K.to_dense(), grads.T @ grads) <= 1e-10
    with pytest.raises(NotImplementedError, match="rows have no gradient"):
        KFACLinearOperator(*arguments, [model.layer.weight], [(X, y)], **options).trace()


def test_rows_of_packed_sequences_are_no_tokens_of_samples():
    """They are ordered by time: neighboring rows belong to different sequences."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: PackedSequence) -> Tensor:
            return torch.tanh(self.layer(x.data))

    model, y = Packed().double(), torch.randn(9, 3).double()
    X = pack_sequence([torch.randn(n, 4).double() for n in (4, 3, 2)])
    loss, params = nn.MSELoss(reduction="sum"), list(model.parameters())
    A = PerSampleGradientLinearOperator(model, loss, params, [(X, y)])
    assert error(A.dense(), rows_in_batches(model, [(X, y)], loss)) <= 1e-12


# --- a first axis of X that numbers no samples


class TimeMajor(nn.Module):
    """Sequences ``[T, N, d]``, as recurrent layers take them by default; outputs ``[N, C]``."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(0))


class Selecting(nn.Module):
    """Returns the rows of some positions, as models of masked tokens do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.layer(x["x"]))[x["mask"]]


def test_time_major_inputs_are_no_samples():
    torch.manual_seed(0)
    model, loss = TimeMajor().double(), nn.CrossEntropyLoss()
    data = [(torch.randn(3, n, 4).double(), torch.randint(3, (n,))) for n in (6, 3, 4)]
    params = list(model.parameters())
    rows = rows_in_batches(model, data, loss)
    A = PerSampleGradientLinearOperator(model, loss, params, data)
    assert A.shape[0] == 13 and error(A.dense(), rows) <= 1e-10
    E = EFLinearOperator(model, loss, params, data, terms="sample")
    assert error(E.to_dense(), rows.T @ rows / 13) <= 1e-10
    options = {"fisher_type": "type-2"}
    K = [KFACLinearOperator(model, loss, params, data, seed=seed, **options) for seed in (0, 1)]
    assert error(K[0].to_dense(), K[1].to_dense()) <= 1e-12


@pytest.mark.parametrize("masks", [[[1, 3], [1, 2]], [[2], [1, 2]], [[2, 1, 3], [2, 2]]], ids=str)
def test_selected_rows_are_no_tokens_of_samples(masks: list[list[int]]):
    model, loss, data = Selecting().double(), nn.CrossEntropyLoss(reduction="sum"), []
    for counts in masks:
        mask = torch.arange(4) < torch.tensor(counts)[:, None]
        X = {"x": torch.randn(len(counts), 4, 4).double(), "mask": mask}
        data.append((X, torch.randint(3, (sum(counts),))))
    G = GGNLinearOperator(model, loss, list(model.parameters()), data)
    diagonal = GGNDiagonalLinearOperator(model, loss, list(model.parameters()), data)
    assert error(diagonal.diagonal(), G.to_dense().diagonal()) <= 1e-10
    rows = rows_in_batches(model, data, loss)
    A = PerSampleGradientLinearOperator(model, loss, list(model.parameters()), data)
    assert error(A.T @ torch.ones(A.shape[0]).double(), rows.sum(0)) <= 1e-10


def test_unequal_numbers_of_rows_are_noticed_where_samples_are_evaluated_alone():
    """The first and the last sample have the mean number of rows, others do not."""
    mask = torch.arange(4) < torch.tensor([2, 1, 3, 2])[:, None]
    X = {"x": torch.randn(4, 4, 4).double(), "mask": mask}
    model, loss, data = Selecting().double(), nn.CrossEntropyLoss(), [(X, torch.randint(3, (8,)))]
    A = PerSampleGradientLinearOperator(model, loss, list(model.parameters()), data)
    with pytest.raises(ValueError, match="Sample 1 of batch 0 has 1 rows .* 2 for each sample"):
        A.dense()


def test_samples_of_a_recurrence_over_the_batch_are_refused():
    """Only later samples depend on others."""

    class Forgotten(TimeMajor):
        def forward(self, x: Tensor) -> Tensor:  # [N, T, d]
            return self.head(self.rnn(x)[0][:, -1])

    model, X, y = Forgotten().double(), torch.randn(5, 3, 4).double(), torch.randint(3, (5,))
    for kind in (PerSampleGradientLinearOperator, EFLinearOperator, GGNDiagonalLinearOperator):
        with pytest.raises(ValueError, match="depends on the other samples"):
            kind(model, nn.CrossEntropyLoss(), list(model.parameters()), [(X, y)])


def test_zero_heads_and_a_last_batch_of_one_sample():
    model, loss = LoRA().double(), nn.MSELoss(reduction="sum")
    data = [(torch.randn(n, 8, 3).double(), torch.randn(n, 4).double()) for n in (4, 4, 1)]
    params = [model.down.weight, model.up.weight]
    K = KFACLinearOperator(model, loss, params, data, kfac_approx="reduce")
    x = torch.cat([X.mean(1) for X, _ in data])
    assert error(K.input_covariances["down"], covariance(x)) <= 1e-12
    x, y = torch.randn(1, 8, 3).double(), torch.randn(1, 4).double()
    K.update((x, y))
    x = torch.cat([*(X.mean(1) for X, _ in data), x.mean(1)])
    assert error(K.input_covariances["down"], covariance(x)) <= 1e-12


def test_losses_with_graphs_weigh_flattened_tokens_alike():
    """A penalty without effect changes nothing but the way that gradients are computed."""
    module, _, params, data = tokens(interact=True, flat=True)

    def model(x: Tensor) -> Tensor:
        return module(x)

    def plain(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)

    def penalized(output: Tensor, y: Tensor) -> Tensor:
        return plain(output, y) + 0.0 * sum(p.square().sum() for p in params)

    options = {"terms": "sample", "reduction": "mean"}
    fisher = [EFLinearOperator(model, loss, params, data, **options) for loss in (plain, penalized)]
    assert error(*(F.to_dense() for F in fisher)) <= 1e-10
    for terms in ("sample", "term"):
        rows = PerSampleGradientLinearOperator(
            model, penalized, params, data, terms=terms, reduction="mean"
        )
        assert rows.dense().shape[0] == 8
