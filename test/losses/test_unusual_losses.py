"""Losses that are more than PyTorch's function of an output and a target.

A loss is a row of `LOSSES`, what is computed with it one of `QUANTITIES`. Each loss has each
quantity as it is now, inside `linearized()`, and after a change of the parameters; or the quantity
is refused, in words that the row has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from contract import error, matrix
from models import Using
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlinops as C

pytestmark = pytest.mark.usefixtures("double")
Refusal = tuple[type[Exception] | tuple[type[Exception], ...], str]


@dataclass
class Setting:
    """A model, a loss and data; and what is refused, by groups of quantities."""

    model: nn.Module
    data: list
    loss: Callable
    refuses: dict[str, Refusal]
    reduction: str | None = "mean"
    params: list[Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    whole: bool = False  # the only batch is the only sample
    ggn_is_defined: bool = False  # though other functions of the output are not

    def build(self, quantity: "Quantity", **options: Any) -> Any:
        options = {"reduction": self.reduction, **quantity.options, **self.options, **options}
        return quantity.kind(self.model, self.loss, self.parameters, self.data, **options)

    @property
    def is_dependent(self) -> bool:
        """Whether the loss is not a function of the output."""
        return self.refuses.get(OUTPUT) == NOT_OF_OUTPUT[OUTPUT]

    def refusal(self, quantity: "Quantity") -> Refusal | None:
        return next((self.refuses[g] for g in quantity.groups if g in self.refuses), None)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters()) if self.params is None else self.params


# --- plain autograd, one sample at a time ---------------------------------------------------------


def flat(value: Tensor, leaves: list[Tensor], **options: bool) -> Tensor:
    grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True, **options)
    return torch.cat([g.flatten() for g in grads])


def jacobian(values: Tensor, leaves: list[Tensor]) -> Tensor:
    return torch.stack([flat(v, leaves, retain_graph=True) for v in values.flatten()]).detach()


def select(x: Any, n: int) -> Any:
    """A sample of an input; points of which a loss takes derivatives are leaves again."""
    if isinstance(x, dict):
        return {key: select(value, n) for key, value in x.items()}
    return x[n : n + 1].detach().requires_grad_(x.requires_grad)


def risk(s: Setting) -> Tensor:
    values = [s.loss(s.model(X), y) for X, y in s.data]
    sizes = [1 if s.whole or s.reduction == "sum" else len(y) for _, y in s.data]
    total = sum(v * n for v, n in zip(values, sizes, strict=True))
    return total if s.reduction == "sum" else total / sum(sizes)


def gradient(s: Setting) -> Tensor:
    return flat(risk(s), s.parameters)


def hessian(s: Setting) -> Tensor:
    return jacobian(flat(risk(s), s.parameters, create_graph=True), s.parameters)


def ggn(s: Setting) -> Tensor:
    outputs = [(z := s.model(X), z.detach().requires_grad_(), y) for X, y in s.data]
    data = [(z, y) for _, z, y in outputs]
    parts = replace(s, model=nn.Identity(), data=data, params=[z for z, _ in data])
    J = torch.cat([jacobian(z, s.parameters) for z, _, _ in outputs])
    return J.T @ hessian(parts) @ J


def rows(s: Setting) -> Tensor:
    found = []
    for X, y in s.data:
        for n in range(len(y) if isinstance(y, Tensor) else len(y["x"])):
            x = select(X, n)
            found.append(flat(s.loss(s.model(x), x if y is X else select(y, n)), s.parameters))
    return torch.stack(found)


def squares(s: Setting) -> Tensor:
    return rows(s).T @ rows(s)


def fisher(s: Setting) -> Tensor:
    return squares(s) / (1 if s.reduction == "sum" else len(rows(s)))


# --- what is computed: group, operator, question, truth -------------------------------------------

FULL, OUTPUT, ROWS, SAMPLED, ROOT = "hessian", "output", "rows", "sampled", "root"
FACTORS, R = (OUTPUT, ROWS), C.PerSampleGradientLinearOperator
EMPIRICAL, TYPE_2, MC = {"fisher_type": "empirical"}, {"fisher_type": "type-2"}, {"mc_samples": 2}


class Quantity(NamedTuple):
    """What refuses it, the operator, its options, what is asked, and the same of a `Setting`."""

    groups: tuple[str, ...]
    kind: Callable
    options: dict[str, Any]
    ask: Callable[[Any], Tensor]
    truth: Callable[[Setting], Tensor] | None = None


def of_rows(ask: Callable, truth: Callable[[Tensor], Tensor], **options: Any) -> Quantity:
    return Quantity((ROWS,), R, options, ask, lambda s: truth(rows(s)))


def flat_gradient(H: Any) -> Tensor:
    return torch.cat([g.flatten() for g in H.gradient_and_loss()[0]])


def ones(matrix: Any, *columns: int) -> Tensor:
    return torch.ones(matrix.shape[1], *columns)


QUANTITIES: dict[str, Quantity] = {
    "hessian": Quantity((FULL,), C.HessianLinearOperator, {}, matrix, hessian),
    "gradient": Quantity((FULL,), C.HessianLinearOperator, {}, flat_gradient, gradient),
    "ggn": Quantity((OUTPUT,), C.GGNLinearOperator, {}, matrix, ggn),
    "fisher": Quantity((ROWS,), C.EFLinearOperator, {"terms": "sample"}, matrix, fisher),
    "fisher of terms": Quantity((ROWS,), C.EFLinearOperator, {"terms": "term"}, matrix, fisher),
    "rows": of_rows(lambda A: A.dense(), lambda J: J),
    "rows of terms": of_rows(lambda A: A.dense(), lambda J: J, terms="term"),
    "some rows": of_rows(lambda A: A.dense(), lambda J: J[[2, 1, 2]], subsampling=[2, 1, 2]),
    "rows @ v": of_rows(lambda A: A @ ones(A), lambda J: J @ ones(J)),
    "rows.T @ U": of_rows(lambda A: A.T @ ones(A.T, 2), lambda J: J.T @ ones(J.T, 2)),
    "norms": of_rows(lambda A: A.norms(), lambda J: J.norm(dim=1)),
    "gram": of_rows(lambda A: A.gram(), lambda J: J @ J.T),
    "second moment": of_rows(lambda A: A.second_moment(), lambda J: J.square().mean(0)),
    "variance": of_rows(lambda A: A.variance(), lambda J: J.var(0, correction=0)),
    # that the numbers are right is not for such losses to show
    "diagonal": Quantity((ROOT, *FACTORS), C.GGNDiagonalLinearOperator, {}, matrix),
    "diagonal, mc": Quantity((SAMPLED, *FACTORS), C.GGNDiagonalLinearOperator, MC, matrix),
    "mc": Quantity((SAMPLED, *FACTORS), C.FisherMCLinearOperator, MC, matrix),
    "kfac": Quantity(FACTORS, C.KFACLinearOperator, EMPIRICAL, matrix),
    "kfac, type-2": Quantity((ROOT, *FACTORS), C.KFACLinearOperator, TYPE_2, matrix),
    "ekfac": Quantity(FACTORS, C.EKFACLinearOperator, EMPIRICAL, matrix),
}
CORE = "hessian", "ggn", "rows", "kfac"

# --- losses: name: () -> Setting ------------------------------------------------------------------

LOSSES: dict[str, Callable[[], Setting]] = {}


def row(*arguments: Any) -> Callable:
    """Register a maker; the names of several rows are those of their arguments."""

    def register(make: Callable[..., Setting]) -> Callable[..., Setting]:
        for argument in arguments or [()]:
            argument = argument if isinstance(argument, tuple) else (argument,)
            name = " ".join([make.__name__, *(getattr(x, "__name__", str(x)) for x in argument)])
            LOSSES[name.replace("_", " ")] = lambda argument=argument: make(*argument)
        return make

    return register


class Scaled(nn.Linear):
    """A layer with a scalar factor."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), Scaled(3, 1))


def points() -> list:
    """Two batches of points, which are input and target."""
    return [(x, x) for x in (torch.randn(n, 2, requires_grad=True) for n in (4, 3))]


def measured() -> list:
    return [(torch.randn(n, 2), torch.randn(n, 1)) for n in (4, 3)]


def slope(u: Tensor, x: Tensor, **options: bool) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=True, **options)[0]


NO_FUNCTION = "is not a function of the model's output"
UNKNOWN = "is not known as|has no closed-form|subclasses with a forward method of their"
#: Of all functions of users: no labels can be drawn, there is no root.
USERS = dict.fromkeys((SAMPLED, ROOT), (NotImplementedError, UNKNOWN))
NOT_OF_OUTPUT = {
    SAMPLED: ((NotImplementedError, ValueError), f"{UNKNOWN}|{NO_FUNCTION}"),
    OUTPUT: (ValueError, NO_FUNCTION),
}
NO_ROWS = {ROWS: (ValueError, "gradients of single samples are not defined")}


def nothing(match: str, shows: bool = True) -> dict[str, Refusal]:
    """What the first batch ``shows`` is said before the loss has no root."""
    either = (ValueError, NotImplementedError), f"{match}|{UNKNOWN}"
    rest = (SAMPLED,) if shows else (SAMPLED, ROOT)
    return dict.fromkeys((FULL, OUTPUT, ROWS), (ValueError, match)) | dict.fromkeys(rest, either)


def poisson(u: Tensor, x: Tensor) -> Tensor:
    """Residual of ``-Laplace u = sin(x_1) + sin(x_2)``, and u at the points where x_1 > 0."""
    du = slope(u, x)
    laplacian = sum(slope(du[:, i], x)[:, i] for i in range(2))
    return ((laplacian + x.sin().sum(1)).square() + (x[:, 0] > 0) * u[:, 0].square()).mean()


@row()
def differential_equation() -> Setting:
    return Setting(net(), points(), poisson, NOT_OF_OUTPUT)


@row()
def gradient_of_what_is_constant_in_part() -> Setting:
    def loss(u: Tensor, x: Tensor) -> Tensor:
        du = slope(u + 0 * x[:, :1], x, allow_unused=True, materialize_grads=True)
        return (du.square().sum(1) + u[:, 0].square()).mean()

    return Setting(net(), points(), loss, NOT_OF_OUTPUT)


@row()
def several_inputs() -> Setting:
    """The heat equation; the constants are no samples."""

    def loss(u: Tensor, X: dict[str, Tensor]) -> Tensor:
        return (slope(u, X["t"]) - slope(slope(u, X["x"]), X["x"])).square().sum()

    model = Using(lambda s, X: s.net(torch.stack([X["x"], X["t"]], 1)), net=net())
    X = {name: torch.randn(4, requires_grad=True) for name in ("x", "t")}
    options = {"batch_size_fn": lambda X: len(X["x"])}
    return Setting(model, [(X, X)], loss, NOT_OF_OUTPUT, "sum", options=options)


@row((0, 1), (1, 0))
def equation_on_some_batches(*order: int) -> Setting:
    def loss(u: Tensor, y: Tensor) -> Tensor:
        is_equation = y.requires_grad
        return (slope(u, y).sum(1) - u[:, 0]).square().mean() if is_equation else F.mse_loss(u, y)

    data = [[points()[0], measured()[1]][i] for i in order]
    refuses = NOT_OF_OUTPUT | {ROOT: NOT_OF_OUTPUT[SAMPLED]}
    return Setting(net(), data, loss, refuses, options={"check_deterministic": False})


@row()
def weight_decay() -> Setting:
    model = net()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, y) + 0.1 * sum(p.pow(4).sum() for p in model.parameters())

    return Setting(model, measured(), loss, NOT_OF_OUTPUT)


@row()
def weight_decay_of_a_sum() -> Setting:
    model = net()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return 7 * F.mse_loss(z, y) + sum(p.square().sum() for p in model.parameters())

    no_sum = ValueError, "is not the sum of its samples' losses|" + NO_FUNCTION
    refuses = USERS | dict.fromkeys((OUTPUT, ROWS, ROOT), no_sum)
    return Setting(model, measured()[:1], loss, refuses, "sum")


@row()
def gradient_penalty() -> Setting:
    model = net()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        value = F.mse_loss(z, y)
        slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + 0.1 * sum(s.square().sum() for s in slopes)

    return Setting(model, measured(), loss, NOT_OF_OUTPUT | NO_ROWS)


@row()
def points_with_a_history() -> Setting:
    """They are constants of the model, and the loss still differentiates by them."""
    return Setting(net(), [(2 * x,) * 2 for x, _ in points()], poisson, NOT_OF_OUTPUT)


@row()
def batches_that_cannot_be_cut() -> Setting:
    X = torch.randn(3, 2, requires_grad=True)
    loss = lambda u, x: slope(u, X).square().mean()  # noqa: E731
    return Setting(
        net(),
        [(X, X)],
        loss,
        refuses=NOT_OF_OUTPUT
        | {ROWS: (ValueError, "fails for sample 0 of batch 0: .*used in the graph")},
    )


@row()
def points_that_interact() -> Setting:
    def loss(u: Tensor, x: Tensor) -> Tensor:
        return slope(u, x).square().sum(1).mean() + u.mean().square()

    return Setting(net(), points(), loss, NOT_OF_OUTPUT | NO_ROWS)


@row(False, True)
def parameters_that_are_captured(of_gradients: bool) -> Setting:
    model = net()
    params = list(model.parameters())

    def loss(z: Tensor, y: Tensor) -> Tensor:
        value, parts = F.mse_loss(z, y), params
        if of_gradients:
            parts = torch.autograd.grad(value, params, create_graph=True)
        return value + sum(p.square().sum() for p in parts)

    return Setting(model, measured(), loss, nothing("by a reference that is not registered"))


class Temperature(nn.Module):
    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output / self.scale, y)


@row()
def parameters_of_the_loss() -> Setting:
    """They are constants."""
    return Setting(net(), measured(), Temperature(), USERS, None)


# --- samples that interact


def heads(*sizes: int) -> tuple[nn.Module, list]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    X, y = torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    return model, list(zip(X.split(sizes), y.split(sizes), strict=True))


def info_nce(z: Tensor, y: Tensor) -> Tensor:
    """Samples with the same y attract each other."""
    z, itself = F.normalize(z), torch.eye(len(z), dtype=torch.bool)
    logits = (2 * z @ z.T).masked_fill(itself, -1e9)
    return -logits.log_softmax(1)[(y[:, None] == y) & ~itself].mean()


def barlow_twins(z: Tensor, y: Tensor) -> Tensor:
    """The correlation of two views, which are the halves of a row, becomes the identity."""
    first, second = ((z - z.mean(0)) / z.std(0)).chunk(2, 1)
    return (first.T @ second / (len(z) - 1) - torch.eye(2)).square().sum()


def squared_sum(z: Tensor, y: Tensor) -> Tensor:
    return z.square().sum()


def spread(z: Tensor, y: Tensor) -> Tensor:
    return (z - z.mean(0)).square().mean()


@row((info_nce, "mean"), (info_nce, "sum"), (barlow_twins, "mean"), (info_nce, "mean", DataLoader))
def one_batch(loss: Callable, reduction: str, container: Callable | None = None) -> Setting:
    """The value of the loss is the risk, whatever the reduction."""
    model, data = heads(6)
    if container:
        data = DataLoader(TensorDataset(*data[0]), batch_size=6)
    no_sum = ValueError, f"{loss.__name__} is not the {reduction} of its samples' losses"
    refuses = {OUTPUT: no_sum, ROWS: no_sum, SAMPLED: (NotImplementedError, UNKNOWN)}
    return Setting(model, data, loss, refuses, reduction, whole=True, ggn_is_defined=True)


#: The remedy for one batch.
WHOLE = r".*data=\[\(X, y\)\]"


@row((info_nce, 0, 3, 3), (info_nce, 0, 4, 2), (spread, 1, 1, 5), (squared_sum, 1, 1, 5))
def several_batches(loss: Callable, found: int, *sizes: int) -> Setting:
    """A batch of one sample does not show that the loss is no mean."""
    words = f"Batch {found}: {loss.__name__} is not the mean"
    return Setting(*heads(*sizes), loss, nothing(words + WHOLE * (not found), not found))


@row()
def one_batch_of_data_of_unknown_length() -> Setting:
    class Unsized:
        def __iter__(self) -> Iterator:
            return iter(data)

    model, data = heads(6)
    return Setting(model, Unsized(), info_nce, nothing("Batch 0: info_nce is not the" + WHOLE))


# --- losses that only look known


def tripled(z: Tensor, y: Tensor) -> Tensor:
    return 3 * F.cross_entropy(z, y)


class Called(nn.CrossEntropyLoss):
    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return tripled(z, y)


class Forward(nn.CrossEntropyLoss):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return tripled(z, y)


def hooked() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, inputs, out: 3 * out)
    return loss


def patched() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = tripled
    return loss


@row(Called, Forward, hooked, patched)
def three_times_cross_entropy(make: Callable) -> Setting:
    return Setting(*heads(4, 2), make(), USERS, None)


@row(3.0, 5.0)
def means_with_weights(last: float) -> Setting:
    """They are means of samples' losses if the weights are equal."""
    weight = torch.tensor([3.0, last, 3.0, 3.0])

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, weight=weight)

    no_mean = nothing("is not the mean of its samples' losses")
    return Setting(*heads(4, 2), loss, USERS if last == 3 else no_mean)


# --- the test -------------------------------------------------------------------------------------


def pairs() -> list[Any]:
    """All losses and quantities of which is known what they are; some are tested each time."""
    found = []
    for loss, make in LOSSES.items():
        setting = make()
        for name, quantity in QUANTITIES.items():
            if quantity.truth or setting.refusal(quantity):
                is_core = name in (["ggn"] if setting.is_dependent else CORE)
                marks = [] if is_core else [pytest.mark.extensive]
                found.append(pytest.param(loss, name, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("loss, name", pairs())
def test_losses(loss: str, name: str):
    """A quantity is that of plain autograd, or is refused in the words of the loss's row."""
    s, quantity = LOSSES[loss](), QUANTITIES[name]
    refusal = s.refusal(quantity)
    if refusal and not (name == "ggn" and s.ggn_is_defined):
        for check in (True, False):
            with pytest.raises(refusal[0], match=refusal[1]):
                quantity.ask(s.build(quantity, check_deterministic=check))
        return
    A = s.build(quantity)
    for _ in range(2):
        expected = quantity.truth(s)
        for _ in range(2):
            assert error(quantity.ask(A), expected) <= 1e-10
        with A.linearized():
            assert error(quantity.ask(A), expected) <= 1e-10
        with torch.no_grad():
            s.parameters[0].mul_(1.1)
    assert all(p.grad is None for p in s.model.parameters())


def test_rows_one_by_one_are_said(caplog: pytest.LogCaptureFixture):
    s = LOSSES["weight decay"]()
    A = s.build(QUANTITIES["rows"])
    for _ in range(2):
        A.dense()
    assert set(A.fallbacks) == set(A.domain.names)
    assert len([r for r in caplog.records if "sample by sample" in r.message]) == 1


@pytest.mark.extensive
@pytest.mark.parametrize("begins", ["later", "with the second batch"])
@pytest.mark.parametrize("name", [n for n, q in QUANTITIES.items() if q.truth and n != "ggn"])
def test_penalties_that_begin(name: str, begins: str):
    """Operators that were built, or have passed a batch, before the loss used the parameters."""
    s, strength = LOSSES["weight decay"](), [0.0 if begins == "later" else 0.1]
    if begins != "later":
        s.data[1][1].add_(9.0)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        total, used = F.mse_loss(output, y), begins == "later" or bool((y > 5).all())
        if not (strength[0] and used):
            return total
        return total + strength[0] * sum(p.square().sum() for p in s.model.parameters())

    s, quantity = replace(s, loss=loss), QUANTITIES[name]
    A = s.build(quantity)
    before, strength[0] = quantity.ask(A), 0.1
    expected = quantity.truth(s)
    assert error(quantity.ask(A), expected) <= 1e-9
    if begins == "later" and name != "variance":
        assert error(before, expected) > 1e-3


# --- what is no matrix of a loss ------------------------------------------------------------------


def test_factors_without_derivatives_of_the_loss():
    model = net()
    data, params = points(), [param for param in model.parameters() if param.ndim]
    options = {"reduction": "mean", "fisher_type": "forward-only"}
    found = C.KFACLinearOperator(model, poisson, params, data, **options)
    inputs, expected = torch.cat([x for x, _ in data]).detach(), []
    for layer in model:
        if isinstance(layer, nn.Linear):
            identity = torch.eye(layer.out_features)
            expected += [torch.kron(identity, inputs.T @ inputs / len(inputs)), identity]
        inputs = layer(inputs).detach()
    torch.testing.assert_close(found.to_dense(), torch.block_diag(*expected))


@pytest.mark.parametrize("number", [float, torch.tensor], ids=["float", "tensor"])
def test_penalties_that_begin_and_end(number: Callable):
    """Of the operators themselves and of later ones."""
    model, strength = net(), [number(0.0)]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        used = sum(p.square().sum() for p in model.parameters()) if strength[0] else 0.0
        return F.mse_loss(output, y) + strength[0] * used / 2

    def build(kind: type) -> C.HessianLinearOperator | C.GGNLinearOperator:
        return kind(model, loss, list(model.parameters()), data, reduction="mean")

    data = measured()
    H, G = build(C.HessianLinearOperator), build(C.GGNLinearOperator)
    plain, ggn = H.to_dense(), G.to_dense()
    for penalty in (0.0, 0.5, 0.5, 0.0):
        if number is float:
            strength[0] = penalty
        else:
            strength[0].fill_(penalty)
        for operator in (H, build(C.HessianLinearOperator)):
            torch.testing.assert_close(operator.to_dense(), plain + penalty * torch.eye(len(plain)))
        for operator in (G, build(C.GGNLinearOperator)):
            for v in (torch.eye(len(ggn)), torch.ones(len(ggn))):
                if penalty:
                    with pytest.raises(ValueError, match="not a function of the model's output"):
                        operator @ v
                else:
                    torch.testing.assert_close(operator @ v, ggn @ v)


def test_a_second_batch_comes_later():
    model, data = heads(6)
    H = C.HessianLinearOperator(model, info_nce, list(model.parameters()), data, reduction="mean")
    v = torch.ones(H.shape[1])
    expected = H @ v
    data.append(data[0])
    for _ in range(2):
        with pytest.raises(ValueError, match="info_nce is not the mean"):
            H @ v
    data.pop()
    torch.testing.assert_close(H @ v, expected)
