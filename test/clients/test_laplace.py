"""The client laplace-torch runs on this package: evidence and predictive against dense matrices."""

import math
from typing import Any

import pytest
import reference
import torch
from problems import Problem
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops import (
    FisherType,
    JacobianLinearOperator,
    KFACLinearOperator,
    functional_variance,
)

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")
backends = pytest.importorskip("laplace.curvature.curvlinops")

# the client's own code warns
pytestmark = pytest.mark.filterwarnings("ignore")

N, C, BATCH, PRIOR = 13, 3, 5, 0.7
LOSSES = {"classification": nn.CrossEntropyLoss, "regression": nn.MSELoss}
#: The client's losses are negative log-likelihoods: half of the squared error.
FACTORS = {"classification": 1.0, "regression": 0.5}
CURVATURES = {
    "CurvlinopsGGN": (reference.ggn, FisherType.TYPE2),
    "CurvlinopsEF": (reference.empirical_fisher, FisherType.EMPIRICAL),
    "CurvlinopsHessian": (reference.hessian, None),
}
STRUCTURES = ("full", "kron", "diag")


class Sequences(nn.Sequential):
    """A model with shared weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (4, 4))).mean(1)


class Mapped(nn.Sequential):
    """A model of mappings, as language models are."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["input_ids"])


def _mlp(kind: type[nn.Sequential] = nn.Sequential, size: int = 16) -> nn.Module:
    return kind(nn.Linear(size, 5), nn.Tanh(), nn.Linear(5, C))


def _cnn() -> nn.Module:
    layers = (nn.Conv2d(1, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(18, C))
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *layers)


MODELS = {"mlp": _mlp, "sequences": lambda: _mlp(Sequences, 4), "cnn": _cnn}


def _problem(model: str, likelihood: str) -> Problem:
    torch.manual_seed(0)
    net = MODELS[model]().double().eval()
    X = torch.randn(N, 16).double()
    y = torch.randint(C, (N,)) if likelihood == "classification" else torch.randn(N, C).double()
    loss = LOSSES[likelihood](reduction="sum")
    return Problem.of(net, loss, [(X, y)])


def _fit(p: Problem, likelihood: str, **options: Any) -> Any:
    loader = DataLoader(TensorDataset(*p.data[0]), batch_size=BATCH)
    fitted = laplace.Laplace(p.model, likelihood, prior_precision=PRIOR, **options)
    fitted.fit(loader)
    return fitted


def _log_likelihood(p: Problem, likelihood: str) -> Tensor:
    value = -FACTORS[likelihood] * reference.loss_value(p)
    return value - (likelihood == "regression") * N * C * math.log(math.sqrt(2 * math.pi))


def _evidence(p: Problem, H: Tensor, likelihood: str) -> Tensor:
    """Return the log evidence, given the Hessian of the negative log-likelihood."""
    theta = nn.utils.parameters_to_vector(p.params).detach()
    ratio = torch.linalg.slogdet(H / PRIOR + torch.eye(len(H), dtype=H.dtype)).logabsdet
    return _log_likelihood(p, likelihood) - 0.5 * (ratio + PRIOR * theta @ theta)


def _options(structure: str, backend: str) -> dict[str, Any]:
    return {
        "subset_of_weights": "all",
        "hessian_structure": structure,
        "backend": getattr(backends, backend),
    }


def _curvature(p: Problem, structure: str, backend: str) -> Tensor:
    """Return the curvature of the loss on all data at once."""
    dense, fisher_type = CURVATURES[backend]
    if structure == "kron":
        K = p.build(KFACLinearOperator, fisher_type=fisher_type)
        return K @ torch.eye(K.shape[0]).double()
    return dense(p).diag().diag() if structure == "diag" else dense(p)


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("backend", ["CurvlinopsGGN", "CurvlinopsEF"])
def test_evidence(backend: str, structure: str, model: str, likelihood: str):
    p = _problem(model, likelihood)
    H = FACTORS[likelihood] * _curvature(p, structure, backend)
    fitted = _fit(p, likelihood, **_options(structure, backend))
    torch.testing.assert_close(fitted.log_marginal_likelihood(), _evidence(p, H, likelihood))


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", CURVATURES)
def test_precision(backend: str, model: str, likelihood: str):
    p = _problem(model, likelihood)
    H = FACTORS[likelihood] * CURVATURES[backend][0](p)
    fitted = _fit(p, likelihood, **_options("full", backend))
    torch.testing.assert_close(fitted.posterior_precision, H + PRIOR * torch.eye(len(H)).double())


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictive(structure: str, likelihood: str):
    p = _problem("mlp", likelihood)
    P = FACTORS[likelihood] * _curvature(p, structure, "CurvlinopsGGN")
    P += PRIOR * torch.eye(len(P)).double()
    J = reference.jacobian(p).reshape(N, C, -1)
    fitted = _fit(p, likelihood, **_options(structure, "CurvlinopsGGN"))
    mean, variance = fitted._glm_predictive_distribution(p.data[0][0])
    torch.testing.assert_close(mean, p.model(p.data[0][0]).detach())
    torch.testing.assert_close(variance, J @ torch.linalg.solve(P, J.mT))


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_precisions_by_parameter(model: str, likelihood: str):
    """The client's evidence, its derivatives, and variances, by a damped structure."""
    p = _problem(model, likelihood)
    fitted = _fit(p, likelihood, **_options("kron", "CurvlinopsGGN"))
    K = KFACLinearOperator(p.model, p.loss, p.params, p.data, fisher_type=FisherType.TYPE2)
    K, theta = FACTORS[likelihood] * K, nn.utils.parameters_to_vector(p.params).detach()
    logs = torch.linspace(-1, 1, len(K.blocks), dtype=torch.float64).requires_grad_()
    taus = dict(zip(K.space.names, logs.exp(), strict=True))
    prior = sum(
        taus[name] * x.square().sum() - x.numel() * taus[name].log()
        for name, x in K.space.split(theta).items()
    )
    own = _log_likelihood(p, likelihood) - (prior + K.damped(taus).logdet()) / 2
    expected = fitted.log_marginal_likelihood(logs.exp())
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logs)[0] for x in (own, expected)))
    fitted.prior_precision, X = logs.exp().detach(), p.data[0][0]
    _, variance = fitted._glm_predictive_distribution(X)
    with torch.no_grad():
        S = K.damped(taus).inverse()
    J = JacobianLinearOperator(p.model, p.params, [(X[:4], None), (X[4:], None)])
    torch.testing.assert_close(functional_variance(J, S), variance)


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("backend", ["CurvlinopsGGN", "CurvlinopsEF"])
def test_last_layer(backend: str, structure: str, likelihood: str):
    p = _problem("cnn", likelihood)
    own = Problem(p.model, p.loss, list(p.model[-1].parameters()), p.data, mc=True)
    H = FACTORS[likelihood] * _curvature(own, structure, backend)
    fitted = _fit(
        p, likelihood, **(_options(structure, backend) | {"subset_of_weights": "last_layer"})
    )
    found = fitted.log_marginal_likelihood()
    torch.testing.assert_close(found, _evidence(own, H, likelihood))


class Mappings(TensorDataset):
    """Samples that are mappings."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        X, y = super().__getitem__(index)
        return {"input_ids": X, "labels": y}


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_mappings(structure: str, likelihood: str):
    p = _problem("mlp", likelihood)
    options = _options(structure, "CurvlinopsGGN")
    expected = _fit(p, likelihood, **options).log_marginal_likelihood()
    mapped = Mapped(*p.model)
    fitted = laplace.Laplace(mapped, likelihood, prior_precision=PRIOR, **options)
    fitted.fit(DataLoader(Mappings(*p.data[0]), batch_size=BATCH))
    torch.testing.assert_close(fitted.log_marginal_likelihood(), expected)


@pytest.mark.parametrize("options", [{"kfac_approx": "reduce"}, {"mc_samples": 500}], ids=str)
def test_options_of_factors(options: dict):
    """Sampled curvature is near the exact one, and settings arrive."""
    p = _problem("sequences", "classification")
    fisher_type = FisherType.MC if "mc_samples" in options else FisherType.TYPE2
    exact = {"fisher_type": FisherType.TYPE2} | {
        name: value for name, value in options.items() if name != "mc_samples"
    }
    K = p.build(KFACLinearOperator, **exact)
    fitted = _fit(
        p,
        "classification",
        **_options("kron", "CurvlinopsGGN"),
        backend_kwargs={"stochastic": fisher_type is FisherType.MC},
        asdl_fisher_kwargs=options,
    )
    rtol = 0.05 if fisher_type is FisherType.MC else 1e-7
    found = fitted.H.to_matrix()
    expected = K @ torch.eye(K.shape[0]).double()
    assert (found - expected).norm() < rtol * expected.norm()


def test_unsupported_layers_are_named():
    p = _problem("mlp", "regression")
    model = nn.Sequential(nn.LayerNorm(16).double(), *p.model)
    p = Problem.of(model, p.loss, p.data)
    with pytest.raises(NotImplementedError, match=r"block of 0\.weight"):
        _fit(p, "regression", **_options("kron", "CurvlinopsGGN"))
