"""Registry of small test problems: models x losses, and one problem per awkward feature.

`make(name)` builds one afresh, seeded by its name; `NAMES` lists all of them. Batches are unequal
in size, and in length where there are tokens, because averages over batches are wrong then.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import models
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class Problem:
    """Arguments of the constructors, and facts about them that tests need.

    Attributes:
        mc: Whether the Monte-Carlo Fisher is defined for the loss.
        reduction: Only for losses that are plain functions.
        reference_model: `(params by name, X) -> output` from plain operations, where PyTorch's own
            derivative is wrong or missing, for closures, and where layers are no modules; None: the
            reference uses the model.
        tolerance: Allowed `norm(error) / norm(reference)`, also of each parameter's part; both zero
            for a zero reference.
        constant: Flat coordinates used as constants (pad rows): differences see them, derivatives
            do not.
        tags: "no-double-backward": PyTorch lacks the second derivative of the model itself;
            "inner-grad": the forward calls autograd.grad; "low-precision": below float64.
        name: Key in the registry.
    """

    model: nn.Module | Callable
    loss: nn.Module | Callable
    params: list[Tensor] | dict[str, Tensor]
    data: list[tuple]
    mc: bool
    reduction: str | None = None
    batch_size_fn: Callable[[Any], int] | None = None
    reference_model: Callable[[dict[str, Tensor], Any], Tensor] | None = None
    # float64, and sums of at most a few hundred numbers of similar size
    tolerance: float = 1e-8
    constant: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()
    name: str = ""

    @classmethod
    def of(
        cls, model: Callable, loss: Any, data: Any, reduction: str | None = None, **fields: Any
    ) -> "Problem":
        """A problem in all parameters of a module, as a list, with what follows from the loss."""
        if isinstance(loss, nn.Module):
            reduction = None
        known = nn.MSELoss | nn.CrossEntropyLoss | nn.BCEWithLogitsLoss
        fields.setdefault("mc", isinstance(loss, known))
        if "params" not in fields:
            fields["params"] = list(model.parameters())
        return cls(model, loss, data=data, reduction=reduction, **fields)

    @classmethod
    def on(
        cls, model: Callable, X: list, loss: Any, target: Callable = torch.randn_like, **fields: Any
    ) -> "Problem":
        """The same, with targets made of the outputs."""
        return cls.of(model, loss, [(x, target(model(x).detach())) for x in X], **fields)

    def build(self, kind: Callable, **options: Any) -> Any:
        """An operator of a class that takes a loss."""
        given = {"batch_size_fn": self.batch_size_fn, "reduction": self.reduction} | options
        return kind(self.model, self.loss, self.params, self.data, **given)

    def named_params(self) -> dict[str, Tensor]:
        """Parameters by name (by position for a closure), in the given order."""
        if isinstance(self.params, dict):
            return self.params
        known = {}
        if isinstance(self.model, nn.Module):
            known = {id(tensor): name for name, tensor in self.model.named_parameters()}
        return {known.get(id(tensor), str(i)): tensor for i, tensor in enumerate(self.params)}


# --- Targets --------------------------------------------------------------------------------------


def indices(z: Tensor, classes: int | None = None) -> Tensor:
    """Class indices for outputs `[N, C, ...]`."""
    return torch.randint(classes or z.shape[1], (z.shape[0], *z.shape[2:]))


def ignored(index: int, z: Tensor) -> Tensor:
    """Class indices of which the first sample's first target is ignored, and one is kept."""
    y = indices(z)
    y.view(-1)[-1] = 2 if index != 2 else 0
    y.view(-1)[0] = index
    return y


def probabilities(z: Tensor) -> Tensor:
    """Class probabilities for outputs `[N, C, ...]`."""
    return torch.randn_like(z).softmax(1)


def bits(z: Tensor) -> Tensor:
    """Binary targets."""
    return torch.randint(2, z.shape).to(z)


def counts(z: Tensor) -> Tensor:
    """Counts, for Poisson."""
    return torch.randint(4, z.shape).to(z)


def user_sum(z: Tensor, y: Tensor) -> Tensor:
    """A loss nobody has a closed form for; couples the outputs of a sample."""
    return ((z - y).square().flatten(1).sum(1) + 1).log().sum()


def user_mean(z: Tensor, y: Tensor) -> Tensor:
    """The same, averaged over samples."""
    return user_sum(z, y) / z.shape[0]


def _norm_sum(z: Tensor, y: None) -> Tensor:
    return z.square().sum() + z.sin().sum()


def _linear_sum(z: Tensor, y: Tensor) -> Tensor:
    return (z * y).sum()


# --- Losses: a sweep of all options over small models ---------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A loss with its targets, and the small models whose outputs it takes."""

    build: Callable[..., Any]  # of `reduction`
    target: Callable[[Tensor], Tensor]
    models: tuple[str, ...]
    mc: bool = False
    log_softmax: bool = False  # outputs are log-probabilities
    ignore_index: int | None = None  # add a batch in which all targets are ignored
    reductions: tuple[str, ...] = ("sum", "mean")


def _module(kind: type, **options: Any) -> Callable[..., nn.Module]:
    """Builds the loss; options that are lists become tensors."""

    def build(reduction: str) -> nn.Module:
        tensors = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}
        return kind(reduction=reduction, **tensors)

    return build


_CE, _BCE = partial(_module, nn.CrossEntropyLoss), partial(_module, nn.BCEWithLogitsLoss)
_WEIGHT, _POSITIVE = [0.3, 1.0, 2.5], [3.0, 0.4, 1.5]
_CLASSES, _ANY, _REAL = ("mlp", "classes"), ("scalar", "mlp", "tokens"), ("mlp", "tokens")
# options that do not depend on the shape of the output
_CLASS_TOKENS, _REAL_TOKENS = ("classes",), ("tokens",)

LOSSES: dict[str, Loss] = {
    "mse": Loss(_module(nn.MSELoss), torch.randn_like, _ANY, mc=True),
    "ce": Loss(_CE(), indices, _CLASSES, mc=True),
    "ce-weight": Loss(_CE(weight=_WEIGHT), indices, _CLASS_TOKENS, mc=True),
    "ce-ignore": Loss(_CE(), partial(ignored, -100), _CLASSES, mc=True, ignore_index=-100),
    "ce-smooth": Loss(_CE(label_smoothing=0.2), indices, _CLASS_TOKENS, mc=True),
    "ce-all": Loss(
        _CE(weight=_WEIGHT, ignore_index=2, label_smoothing=0.2),
        partial(ignored, 2), _CLASSES, mc=True, ignore_index=2,
    ),
    "ce-prob": Loss(_CE(), probabilities, _CLASSES, mc=True),
    "ce-prob-weight": Loss(_CE(weight=_WEIGHT), probabilities, _CLASS_TOKENS, mc=True),
    "ce-prob-smooth": Loss(_CE(label_smoothing=0.2), probabilities, _CLASS_TOKENS, mc=True),
    "ce-prob-all": Loss(
        _CE(weight=_WEIGHT, label_smoothing=0.2), probabilities, _CLASSES, mc=True
    ),
    "bce": Loss(_BCE(), bits, _ANY, mc=True),
    "bce-weight": Loss(_BCE(weight=_WEIGHT), bits, _REAL_TOKENS, mc=True),
    "bce-pos": Loss(_BCE(pos_weight=_POSITIVE), bits, _REAL_TOKENS, mc=True),
    "bce-pos-scalar": Loss(_BCE(pos_weight=[3.0]), bits, ("scalar",), mc=True),
    "bce-all": Loss(_BCE(weight=_WEIGHT, pos_weight=_POSITIVE), bits, _REAL, mc=True),
    "bce-soft": Loss(
        _BCE(weight=_WEIGHT, pos_weight=_POSITIVE), torch.rand_like, _REAL_TOKENS, mc=True
    ),
    "nll": Loss(_module(nn.NLLLoss), indices, _CLASS_TOKENS, log_softmax=True),
    "nll-all": Loss(
        _module(nn.NLLLoss, weight=_WEIGHT), partial(ignored, -100), _CLASSES,
        log_softmax=True, ignore_index=-100,
    ),
    "l1": Loss(_module(nn.L1Loss), torch.randn_like, _REAL),
    "smooth-l1": Loss(_module(nn.SmoothL1Loss, beta=0.7), torch.randn_like, _REAL_TOKENS),
    "huber": Loss(_module(nn.HuberLoss, delta=0.6), torch.randn_like, _REAL_TOKENS),
    "poisson": Loss(_module(nn.PoissonNLLLoss), counts, _REAL_TOKENS),
    "kl": Loss(
        _module(nn.KLDivLoss), probabilities, _CLASSES,
        log_softmax=True, reductions=("sum", "batchmean"),  # "mean" warns
    ),
    "user": Loss({"sum": user_sum, "mean": user_mean}.__getitem__, torch.randn_like, _REAL),
}  # fmt: skip

# Per-sample additive losses average over samples, so they need equal token counts.
_EQUAL_TOKENS = {"l1", "kl", "user"}


def _tokens(vocabulary: int = 5, shapes: tuple = ((2, 3), (3, 2))) -> list[Tensor]:
    """Batches of token indices, unequal in size and length."""
    return [torch.randint(vocabulary, shape) for shape in shapes]


def _real(*shape: int, sizes: tuple = (3, 2)) -> list[Tensor]:
    """Batches `[N, *shape]`, unequal in size."""
    return [torch.randn(n, *shape) for n in sizes]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "mlp": (models.mlp, partial(_real, 4)),  # [N, C]
    "scalar": (models.scalar, partial(_real, 4)),  # [N]
    "tokens": (models.Tokens, _tokens),  # [N, T, C]
    "classes": (partial(models.Tokens, axis=1), _tokens),  # [N, C, T]
}


def compose(model_name: str, loss_name: str, reduction: str) -> Problem:
    """A small model with a loss, under the caller's seed."""
    build, inputs = MODELS[model_name]
    loss = LOSSES[loss_name]
    model, X = build(), inputs()
    if loss_name in _EQUAL_TOKENS and model_name in ("tokens", "classes"):
        X = _tokens(shapes=((3, 3), (2, 3)))
    if loss.log_softmax:
        model = nn.Sequential(model, nn.LogSoftmax(dim=1))
    loss_func = loss.build(reduction)
    p = Problem.on(model, X, loss_func, loss.target, reduction=reduction, mc=loss.mc)
    if loss.ignore_index is not None:
        x, y = p.data[0]
        p.data.insert(1, (x.clone(), torch.full_like(y, loss.ignore_index)))
    return p


# --- One problem per awkward feature --------------------------------------------------------------

_MAKERS: dict[str, Callable[[], Problem]] = {
    f"{model}-{name}-{reduction}": partial(compose, model, name, reduction)
    for name, loss in LOSSES.items()
    for model in loss.models
    for reduction in loss.reductions
}


def _register(maker: Callable[[], Problem]) -> Callable[[], Problem]:
    _MAKERS[maker.__name__.strip("_").replace("_", "-")] = maker
    return maker


def _classify(model: nn.Module, X: list, reduction: str = "mean", **fields: Any) -> Problem:
    return Problem.on(model, X, nn.CrossEntropyLoss(reduction=reduction), indices, **fields)


def _regress(model: Callable, X: list, reduction: str = "mean", **fields: Any) -> Problem:
    return Problem.on(model, X, nn.MSELoss(reduction=reduction), **fields)


def _row(model: nn.Module, parameter: str, row: int) -> tuple[int, ...]:
    """Flat coordinates of one row of a parameter among all parameters."""
    start = 0
    for name, tensor in model.named_parameters():
        if name == parameter:
            width = tensor[0].numel()
            return tuple(range(start + row * width, start + (row + 1) * width))
        start += tensor.numel()
    raise KeyError(parameter)


def _add(
    name: str, build: Callable, inputs: Callable, make: Callable, plain: Any = None, **fields: Any
) -> None:
    _MAKERS[name] = lambda: make(build(), inputs(), reference_model=plain, **fields)


def _recurrent(kind: type, *sizes: int, **options: Any) -> models.Recurrent:
    return models.Recurrent(kind(*sizes, batch_first=True, **options))


def _plain(kind: str, **options: int) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return partial(models.plain_recurrent, kind, **options)


def _pinn() -> nn.Module:
    # the derivatives of the last two are kernels of their own
    activation = nn.Sequential(nn.Tanh(), nn.SiLU(), nn.GELU())
    return models.pinn(nn.Sequential(nn.Linear(2, 4), activation, nn.Linear(4, 1)))


_IMAGES, _LONG = partial(_real, 2, 4, 4), (lambda: [torch.randn(2, 2, 5), torch.randn(3, 2, 5)])
_FOUR = lambda: [torch.randn(2, 3, 4), torch.randn(3, 2, 4)]  # noqa: E731
_SEQUENCE = partial(_real, 3, 2, sizes=(2, 3))  # three steps of width two
_TEXT = partial(_tokens, shapes=((2, 4), (3, 3)))
for _case in [
    ("cnn", models.cnn, _IMAGES, _classify),
    ("segmentation", models.segmentation, partial(_real, 1, 2, 3), _classify),
    ("conv1d", models.conv1d, _LONG, _regress),
    ("instance-norm", lambda: models.norm(nn.InstanceNorm1d(4, affine=True)), _LONG, _regress),
    ("group-norm", lambda: models.norm(nn.GroupNorm(2, 4)), _LONG, _classify),
    ("transformer", models.Transformer, _TEXT, _classify),
    ("transformer-tied", partial(models.Transformer, tied=True), _TEXT, _classify),
    (
        "encoder-layer-eval", lambda: models.encoder_layer().eval(), _FOUR, _classify,
        partial(models.plain_encoder_layer, False),
    ),
    (
        "encoder-layer-train", partial(models.encoder_layer, norm_first=True), _FOUR, _classify,
        partial(models.plain_encoder_layer, True),
    ),
    ("self-attention", models.self_attention, _FOUR, _regress, models.plain_self_attention),
    ("rnn", partial(_recurrent, nn.RNN, 2, 3), _SEQUENCE, _regress, _plain("rnn")),
    ("gru", partial(_recurrent, nn.GRU, 2, 2), _SEQUENCE, _classify, _plain("gru")),
    ("lstm", partial(_recurrent, nn.LSTM, 2, 2), _SEQUENCE, _classify, _plain("lstm")),
    (
        "lstm-bidirectional",
        partial(_recurrent, nn.LSTM, 2, 2, num_layers=2, bidirectional=True, proj_size=1),
        partial(_real, 2, 2, sizes=(2, 1)), partial(_regress, reduction="sum"),
        _plain("lstm", layers=2, directions=2),
    ),
    ("bare-parameter", models.bare, partial(_real, 4), _classify, models.plain_bare),
    ("used-twice", models.twice, partial(_real, 4), _classify),
    ("checkpoint", models.checkpointed, partial(_real, 4), _classify),
    ("linear-mse-mean", partial(nn.Linear, 4, 3), partial(_real, 4), _regress),
    ("logistic", partial(nn.Linear, 4, 3), partial(_real, 4), _classify),
]:  # fmt: skip
    _add(*_case)
_add("inner-steps", models.InnerSteps, partial(_real, 3), _regress, tags=frozenset({"inner-grad"}))
_add(
    *("pinn", _pinn, partial(_real, 2), _regress, models.plain_pinn),
    tags=frozenset({"inner-grad"}),
)


@_register
def _cross_attention() -> Problem:
    X = [(torch.randn(2, 2, 4), torch.randn(2, 3, 3)), (torch.randn(3, 3, 4), torch.randn(3, 2, 3))]
    fields = {"reference_model": models.plain_cross_attention}
    return _regress(models.cross_attention(), X, batch_size_fn=lambda X: X[0].shape[0], **fields)


@_register
def _lstm_packed() -> Problem:
    lengths = [torch.tensor([2, 3]), torch.tensor([3, 1, 2])]
    X = [(torch.randn(len(n), 3, 2), n) for n in lengths]
    fields = {"reference_model": models.plain_packed_lstm}
    return _classify(models.packed_lstm(), X, batch_size_fn=lambda X: X[0].shape[0], **fields)


@_register
def _weight_norm() -> Problem:
    model = models.mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2], dim=1)
    # magnitudes that are not just the norms
    nn.init.uniform_(model[0].parametrizations.weight.original0, 0.5, 2.0)
    return _classify(model, _real(4), reference_model=models.plain_weight_norm)


def _padding(tied: bool) -> Problem:
    model = models.padded(tied)
    # pads in the second batch only: a test on the first one would not notice them
    X = [torch.tensor([[0, 4, 2], [3, 3, 2]]), torch.tensor([[1, 2], [4, 0], [1, 3]])]
    constant = _row(model, "embed.weight", 1)
    plain = partial(models.plain_padded, tied)
    return _classify(model, X, reference_model=plain, constant=constant)


def _bag(mode: str) -> Problem:
    return _classify(
        models.bag(mode),
        _tokens(),
        reference_model=partial(models.plain_bag, mode),
        tags=frozenset({"no-double-backward"}),
    )


@_register
def _functional() -> Problem:
    params = {"v": torch.randn(3, 2), "w": torch.randn(4, 3), "b": torch.randn(3)}
    X = _real(4)
    data = [(x, torch.randn(len(x), 2)) for x in X]
    return Problem.of(models.plain_mlp, nn.MSELoss(), data, params=params)


@_register
def _closure() -> Problem:
    params = [torch.randn(*shape).requires_grad_() for shape in [(3, 2), (4, 3), (3,)]]

    def model(X: Tensor) -> Tensor:
        return models.plain_mlp(dict(zip("vwb", params, strict=True)), X)

    def plain(params: dict[str, Tensor], X: Tensor) -> Tensor:
        return models.plain_mlp(dict(zip("vwb", params.values(), strict=True)), X)

    return _regress(model, _real(4), reduction="sum", params=params, reference_model=plain)


@_register
def _other_values() -> Problem:
    """A dict whose values are not the module's own, not in its order."""
    model = models.cnn()
    params = {k: v.detach() + 0.1 * torch.randn_like(v) for k, v in model.named_parameters()}
    return _classify(model, _IMAGES(), params=dict(reversed(params.items())))


@_register
def _subset() -> Problem:
    """Some parameters, not in the module's order."""
    model = models.mlp()
    return _classify(model, _real(4), params=[model[2].bias, model[0].weight, model[0].bias])


def _dict_batches() -> list[dict[str, Tensor]]:
    # pads (0) under the mask, and one among the attended tokens
    ids = [[[3, 0, 1], [2, 4, 0]], [[1, 0], [4, 2], [2, 2]]]
    masks = [[[1, 1, 1], [1, 1, 0]], [[1, 0], [1, 1], [1, 1]]]
    return [
        {"input_ids": torch.tensor(x), "attention_mask": torch.tensor(m)}
        for x, m in zip(ids, masks, strict=True)
    ]


def _masked(padding_idx: int | None) -> Problem:
    model = models.masked_bag(padding_idx)
    fields: dict[str, Any] = {"batch_size_fn": lambda X: X["input_ids"].shape[0]}

    if padding_idx is not None:
        fields["reference_model"] = partial(models.plain_masked_bag, padding_idx)
        fields["constant"] = _row(model, "embed.weight", padding_idx)
    return _classify(model, _dict_batches(), **fields)


_MAKERS |= {
    "padding-idx": partial(_padding, False),
    "padding-idx-tied": partial(_padding, True),
    "embedding-bag-sum": partial(_bag, "sum"),
    "embedding-bag-mean": partial(_bag, "mean"),
    "dict-batch": partial(_masked, None),
    "dict-batch-padding-idx": partial(_masked, 0),
}


@_register
def _no_targets() -> Problem:
    return Problem.of(models.mlp(), _norm_sum, [(x, None) for x in _real(4)], reduction="sum")


@_register
def _constant_gradient() -> Problem:
    """Linear model, linear loss: the Hessian is zero and autograd calls the gradient constant."""
    model = nn.Linear(4, 3)
    return Problem.on(model, _real(4), _linear_sum, reduction="sum")


@_register
def _data_parallel() -> Problem:
    model = nn.DataParallel(models.mlp())
    model.device_ids = []  # where there are GPUs it would otherwise claim them all
    return _classify(model.cpu(), _real(4))


@_register
def _frozen_stem() -> Problem:
    """A part under torch.no_grad(), whose parameters are not asked for."""
    model = models.frozen_stem()
    params = {k: v for k, v in model.named_parameters() if k.startswith("head")}
    return _classify(model, _real(4), params=params)


# --- Low precision --------------------------------------------------------------------------------


def _cast(name: str, dtype: torch.dtype, tolerance: float, norms: torch.dtype = None) -> Problem:
    """A problem with parameters and data rounded; the reference is exact in the rounded values."""
    p = make(name)
    p.model.to(dtype)
    for module in p.model.modules():
        if isinstance(module, nn.LayerNorm) and norms is not None:
            module.to(norms)

    def rounded(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    tags = p.tags | {"low-precision"}
    return replace(p, data=tree_map(rounded, p.data), tolerance=tolerance, tags=tags)


for _name, _model in {"mlp": "mlp-ce-mean", "cnn": "cnn", "transformer": "transformer"}.items():
    # 1e-7 observed with plain double backward; a hundred times that for other orders of summation
    _MAKERS[f"float32-{_name}"] = partial(_cast, _model, torch.float32, 1e-5)
for _name, _model in {"mlp": "mlp-ce-mean", "cnn": "cnn"}.items():
    # eight bits of mantissa: 5e-3 observed with plain double backward
    _MAKERS[f"bfloat16-{_name}"] = partial(_cast, _model, torch.bfloat16, 2e-2)
# the fused LSTM kernels of float32 and bfloat16 lack derivatives that those of float64 have
_MAKERS["float32-lstm"] = partial(_cast, "lstm", torch.float32, 1e-5)
_MAKERS["bfloat16-lstm"] = partial(_cast, "lstm", torch.bfloat16, 3e-2)
_MAKERS["bfloat16-float32-norms"] = partial(
    _cast, "transformer", torch.bfloat16, 2e-2, norms=torch.float32
)
_MAKERS["float32-float64-norms"] = partial(
    _cast, "transformer", torch.float32, 1e-5, norms=torch.float64
)


@contextmanager
def _seeded(name: str):
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(crc32(name.encode()))
            yield
    finally:
        torch.set_default_dtype(dtype)


def make(name: str) -> Problem:
    """Build a problem: the same values each time, no state shared with earlier ones."""
    with _seeded(name):
        return replace(_MAKERS[name](), name=name)


NAMES = list(_MAKERS)
#: Problems of which no other one has the same model.
MODEL_NAMES = [
    name
    for name in NAMES
    if name.partition("-")[0] not in MODELS or name.endswith(("-mse-mean", "-nll-all-mean"))
]


def rebatched(p: Problem, size: int = 1) -> Problem:
    """The same samples in batches of at most `size`."""
    data = []
    for X, y in p.data:
        for n in range(0, len(tree_leaves(X)[0]), size):
            part = tree_map(lambda t, n=n: t[n : n + size] if isinstance(t, Tensor) else t, (X, y))
            data.append(part)
    return replace(p, data=data)


def merged(p: Problem) -> Problem | None:
    """The same samples in one batch; None where lengths differ between batches."""
    shapes = {tuple(t.shape[1:] for t in tree_leaves(b) if isinstance(t, Tensor)) for b in p.data}
    if len(shapes) > 1:
        return None
    cat = tree_map(lambda *ts: torch.cat(ts) if isinstance(ts[0], Tensor) else ts[0], *p.data)
    return replace(p, data=[cat])
