"""Directions are those of dense KFAC, and training with them lowers the loss."""

import copy
import io
from collections.abc import Callable
from typing import Any

import kfac_reference
import pytest
import torch
from contract import error
from sklearn.datasets import load_digits
from torch import Tensor, nn
from training_runs import CE, batches, flags, in_eval_mode, network, random_numbers

from curvlinops import (
    EKFACLinearOperator,
    GGNLinearOperator,
    KFACLinearOperator,
    select_parameters,
)
from curvlinops.training import KFACPreconditioner

DAMPING = 0.05


def build(model: nn.Module, data: list, cls: type = KFACLinearOperator, **options: Any) -> Any:
    """Return an operator that is built in eval mode; train flags are as before."""
    before = flags(model)
    params = options.pop("params", None) or list(model.parameters())
    options = {"fisher_type": "type-2"} | options
    K = cls(model.eval(), CE, params, data, **options)
    for module, flag in zip(model.modules(), before, strict=True):
        module.training = flag
    return K


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def differentiate(model: nn.Module, X: Tensor, y: Tensor) -> None:
    model.zero_grad()
    CE(model(X), y).backward()


def flat(grads: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in grads])


#: Operator, its options, and those of the reference.
KINDS: dict[str, tuple[type, dict, dict]] = {
    "kfac": (KFACLinearOperator, {}, {}),
    "joint": (KFACLinearOperator, {"separate_weight_and_bias": False}, {"joint": True}),
    "reduce": (KFACLinearOperator, {"kfac_approx": "reduce"}, {"reduce": True}),
    "ekfac": (EKFACLinearOperator, {}, {"corrected": True}),
}


@pytest.mark.parametrize("clip", [None, 1e-3, 1e3])
@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_those_of_the_dense_matrix(kind: str, clip: float | None):
    cls, options, of_reference = KINDS[kind]
    model, first, batch = network(), *batches(6, 4)
    # eigenvectors of EKFAC stay those of the first data
    first = batch if kind == "ekfac" else first
    model[1].eval()
    optimizer, before = sgd(model), flags(model)
    preconditioner = KFACPreconditioner(
        build(model, [first], cls, **options), optimizer, DAMPING, decay=1.0, clip=clip
    )
    torch.manual_seed(3)
    differentiate(model, *batch)
    grads, numbers = [p.grad.clone() for p in model.parameters()], random_numbers()
    dense = kfac_reference.kfac(in_eval_mode(model, [first, batch]), "type-2", **of_reference)
    preconditioner.step(*batch)

    g = flat(grads)
    direction = torch.linalg.solve(dense + DAMPING * torch.eye(len(g)).to(g), g)
    if clip is not None:
        direction *= min(1.0, float(clip / (0.1**2 * g @ direction)) ** 0.5)
    assert error(flat([p.grad for p in model.parameters()]), direction) <= 1e-9
    assert flags(model) == before and random_numbers() == numbers


def test_the_newest_batch_alone_with_decay_zero():
    model, data = network(), batches(6, 4, 5)
    K = build(model, data[:1])
    preconditioner = KFACPreconditioner(
        K, sgd(model), DAMPING, update_every=1, invert_every=1, decay=0.0, clip=None
    )
    for batch in data[1:]:
        differentiate(model, *batch)
        g = flat([p.grad for p in model.parameters()])
        preconditioner.step(*batch)
        dense = kfac_reference.kfac(in_eval_mode(model, [batch]), "type-2")
        expected = torch.linalg.solve(dense + DAMPING * torch.eye(len(g)).to(g), g)
        assert error(flat([p.grad for p in model.parameters()]), expected) <= 1e-9


@pytest.mark.parametrize(("updates", "inverses"), [(1, 1), (2, 3), (3, 2)])
def test_factors_and_inverse_are_renewed_at_their_steps(updates: int, inverses: int):
    model, data = network(), batches(*[4] * 8)
    every = {"update_every": updates, "invert_every": inverses}
    K = build(model, data[:1])
    preconditioner = KFACPreconditioner(K, sgd(model), DAMPING, clip=None, **every)
    evaluated = network().eval()
    K = build(evaluated, data[:1])
    g = [torch.randn_like(p) for p in model.parameters()]
    for step, (X, y) in enumerate(data[1:]):
        for p, x in zip(model.parameters(), g, strict=True):
            p.grad = x.clone()
        preconditioner.step(X, y)
        if step % updates == 0:
            K.update((X, y), 0.95)
        if step % inverses == 0:
            inverse = K.inverse(DAMPING, use_exact_damping=True)
        found = [p.grad for p in model.parameters()]
        assert error(flat(found), flat(inverse @ g)) <= 1e-12
    assert preconditioner.num_steps == 7


def test_other_parameters_keep_their_gradients():
    model, (batch,) = network(), batches(6)
    own = select_parameters(model, "5")  # the last layer
    K = build(model, [batch], params=own)
    preconditioner = KFACPreconditioner(K, sgd(model), DAMPING, clip=None)
    differentiate(model, *batch)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    preconditioner.step(*batch)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name]) == (name not in own)


def test_a_parameter_without_gradient_stays_without():
    model, (batch,) = network(), batches(6)
    preconditioner = KFACPreconditioner(build(model, [batch]), sgd(model), DAMPING, clip=None)
    differentiate(model, *batch)
    grads = [p.grad.clone() for p in model.parameters()]
    grads[0].zero_()
    model[0].weight.grad = None
    preconditioner.step(*batch)
    assert model[0].weight.grad is None
    expected = preconditioner.K.inverse(DAMPING, use_exact_damping=True) @ grads
    for p, x in zip([*model.parameters()][1:], expected[1:], strict=True):
        torch.testing.assert_close(p.grad, x, rtol=1e-10, atol=1e-14)


def state_of(preconditioner: KFACPreconditioner) -> list:
    """Return what a step may change."""
    grads = [p.grad for p in preconditioner._params.values()]
    saved = preconditioner.state_dict()["factors"].values()
    factors = [x for x in saved if isinstance(x, Tensor)]
    return copy.deepcopy([preconditioner.num_steps, factors, grads])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_at_the_wrong_place_is_refused(to_none: bool, updates: int):
    model, (batch,) = network(), batches(6)
    optimizer = sgd(model)
    preconditioner = KFACPreconditioner(build(model, [batch]), optimizer, update_every=updates)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        if all(p.grad is None for p in model.parameters()):
            before = state_of(preconditioner)
            with pytest.raises(ValueError, match=r"No parameter .* before optimizer.step\(\)"):
                preconditioner.step(*batch)
            torch.testing.assert_close(state_of(preconditioner), before, rtol=0, atol=0)
        CE(model(batch[0]), batch[1]).backward()
        preconditioner.step(*batch)
        optimizer.step()
        before = state_of(preconditioner)
        with pytest.raises(ValueError, match=r"made a step with these gradients.*backward"):
            preconditioner.step(*batch)
        torch.testing.assert_close(state_of(preconditioner), before, rtol=0, atol=0)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)).double()
    batch = torch.arange(4), torch.tensor([0, 1, 1, 0])
    for params in (list(model.parameters()), list(model[1].parameters())):
        preconditioner = KFACPreconditioner(
            KFACLinearOperator(model, CE, params, [batch]), sgd(model)
        )
        CE(model(batch[0]), batch[1]).backward()
        if len(params) == 3:
            with pytest.raises(ValueError, match="gradient of '0.weight' is sparse. Take sparse"):
                preconditioner.step(*batch)
        else:
            preconditioner.step(*batch)


def test_clipping_reads_the_learning_rate_of_each_group():
    model, (batch,) = network(), batches(6)
    groups = [{"params": model[:5].parameters()}, {"params": model[5].parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    preconditioner = KFACPreconditioner(build(model, [batch]), optimizer, DAMPING, clip=1e-4)
    for scale in (1.0, 0.5):  # as a schedule does
        for group in optimizer.param_groups:
            group["lr"] *= scale
        differentiate(model, *batch)
        grads = [p.grad.clone() for p in model.parameters()]
        preconditioner.step(*batch)
        directions = preconditioner.K.inverse(DAMPING, use_exact_damping=True) @ grads
        terms = [(g * d).sum() for g, d in zip(grads, directions, strict=True)]
        rates = [scale * lr for lr in (0.1, 0.1, 0.1, 0.1, 1.0, 1.0)]
        divergence = sum(lr**2 * term for lr, term in zip(rates, terms, strict=True))
        nu = min(1.0, float(1e-4 / divergence) ** 0.5)
        assert nu < 1
        found = flat([p.grad for p in model.parameters()])
        assert error(found, nu * flat(directions)) <= 1e-9


@pytest.fixture(scope="module")
def digits() -> list[tuple[Tensor, Tensor]]:
    """Return batches of images ``[100, 1, 8, 8]`` and classes."""
    images, labels = load_digits(return_X_y=True)
    X = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return list(zip(X[:1700].split(100), torch.tensor(labels)[:1700].split(100), strict=True))


def mean_loss(model: nn.Module, data: list) -> float:
    model.eval()
    with torch.no_grad():
        loss = sum(CE(model(X), y) for X, y in data) / len(data)
    model.train()
    return float(loss)


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_the_loss_falls(cls: type, digits: list):
    model = network(torch.float32, pixels=8, classes=10)
    K = build(model, digits[:1], cls, fisher_type="mc")
    optimizer = sgd(model, lr=0.05)
    preconditioner = KFACPreconditioner(K, optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 34)
    before = mean_loss(model, digits)
    for X, y in 2 * digits:
        optimizer.zero_grad()
        for part in (slice(50), slice(50, 100)):  # gradients are accumulated
            (CE(model(X[part]), y[part]) / 2).backward()
        preconditioner.step(X, y)
        optimizer.step()
        schedule.step()
        assert all(flags(model))
    assert mean_loss(model, digits) < 0.2 * before


@pytest.mark.parametrize("fisher_type", ["mc", "type-2"])
def test_a_run_continues_from_a_checkpoint(fisher_type: str):
    data = batches(*[6] * 10, dtype=torch.float32)

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, KFACPreconditioner]:
        model = network(torch.float32)
        model[4].p = 0.0
        K, optimizer = build(model, data[:1], fisher_type=fisher_type), sgd(model)
        return model, optimizer, KFACPreconditioner(K, optimizer, update_every=3, invert_every=3)

    def run(parts: tuple, some: list) -> None:
        model, optimizer, preconditioner = parts
        for X, y in some:
            differentiate(model, X, y)
            preconditioner.step(X, y)
            optimizer.step()

    whole, first, second = begin(), begin(), begin()
    run(whole, data)
    run(first, data[:5])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    run(second, data[5:])
    for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_before_the_first_step():
    model, (batch,) = network(), batches(6)
    preconditioner = KFACPreconditioner(build(model, [batch]), sgd(model))
    assert preconditioner.state_dict()["num_steps"] == 0
    assert all(module.training for module in model.modules())


BAD: dict[str, tuple[type, Callable[[nn.Module, Any], Any]]] = {
    "K must be a KFACLinearOperator": (
        TypeError,
        lambda model, K: KFACPreconditioner(
            GGNLinearOperator(model.eval(), CE, K.params, K.data), sgd(model)
        ),
    ),
    "The optimizer lacks parameters of K, such as '0.weight'": (
        ValueError,
        lambda model, K: KFACPreconditioner(K, sgd(model[1:])),
    ),
    "update_every must be": (
        ValueError,
        lambda model, K: KFACPreconditioner(K, sgd(model), update_every=0),
    ),
    "invert_every must be": (
        ValueError,
        lambda model, K: KFACPreconditioner(K, sgd(model), invert_every=1.5),
    ),
    "clip must be": (ValueError, lambda model, K: KFACPreconditioner(K, sgd(model), clip=-1.0)),
    "clip must be positive": (
        ValueError,
        lambda model, K: KFACPreconditioner(K, sgd(model), clip=0.0),
    ),
    "damping must be": (ValueError, lambda model, K: KFACPreconditioner(K, sgd(model), -1.0)),
    "decay must be": (ValueError, lambda model, K: KFACPreconditioner(K, sgd(model), decay=2.0)),
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_arguments_are_refused(words: str):
    model, (batch,) = network(), batches(6)
    kind, build_wrongly = BAD[words]
    with pytest.raises(kind, match=words):
        build_wrongly(model, build(model, [batch]))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_are_not_finite_are_refused():
    model, (batch,) = network(), batches(6)
    preconditioner = KFACPreconditioner(build(model, [batch]), sgd(model))
    differentiate(model, *batch)
    model[0].weight.grad[0] = float("inf")
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="0.weight"):
        preconditioner.step(*batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
