"""Lanczos quadrature: traces of functions, and smoothed densities of spectra."""

import sys
from math import inf, log, pi, sqrt

import matplotlib
import matrices
import numpy as np
import pytest
import torch
from matrices import Counting
from torch import Tensor

from curvlinops import (
    LanczosApproximateSpectrumCached,
    hutchinson_trace,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    lanczos_logdet,
    plot_by_layer,
    plot_loss,
    plot_spectrum,
    trace_function,
)

matplotlib.use("Agg")

A = {name: matrices.symmetric(name) for name in matrices.SPECTRA}
DIM = matrices.DIM
DENSITIES = [lanczos_approximate_spectrum, lanczos_approximate_log_spectrum]


# --- traces of functions


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("name", A)
def test_exact_for_polynomials(name: str, distribution: str):
    # the same vectors in both: degree five needs three nodes
    options = {"distribution": distribution, "seed": 0, "return_error": True}
    found = trace_function(A[name], lambda x: x**5 - x, 3, 6, **options)
    expected = hutchinson_trace(torch.linalg.matrix_power(A[name], 5) - A[name], 6, **options)
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-11)


@pytest.mark.parametrize("ncv", [3, 7, DIM])
def test_exact_for_few_distinct_eigenvalues(ncv: int):
    # signs have equal weights in each eigenvector of a diagonal matrix
    diagonal = matrices.SPECTRA["clustered"]
    found = trace_function(diagonal.diag(), torch.exp, ncv, 1, seed=0)
    assert abs(found / diagonal.exp().sum() - 1) <= 1e-12
    logdet = lanczos_logdet(diagonal.diag(), ncv, 1, seed=0)
    assert abs(logdet / diagonal.log().sum() - 1) <= 1e-12


@pytest.mark.parametrize("name", A)
def test_unbiased_with_honest_errors(name: str):
    results = [
        trace_function(A[name].float(), torch.exp, 15, 10, return_error=True, seed=seed)
        for seed in range(60)
    ]
    estimates, errors = (torch.stack(v).double() for v in zip(*results, strict=True))
    truth = matrices.SPECTRA[name].exp().sum()
    assert abs(estimates.mean() - truth) <= 4 * estimates.std() / 60**0.5
    assert 0.75 <= errors.square().mean().sqrt() / estimates.std() <= 1.33


def test_logdet():
    damped = A["decaying"] + 1e-3 * torch.eye(DIM, dtype=torch.float64)
    found, error = lanczos_logdet(damped, 20, 200, return_error=True, seed=0)
    assert abs(found - torch.logdet(damped)) <= 4 * error
    assert error <= 0.02 * abs(found)
    counting = Counting(damped)
    found, error = lanczos_logdet(counting, 20, 1000, rtol=0.1, return_error=True, seed=0)
    assert error <= 0.1 * abs(found)
    assert counting.products < 1000


@pytest.mark.parametrize("dim", [3, 200])
def test_default_number_of_products_for_logdet(dim: int):
    values = 1 / torch.arange(1, dim + 1, dtype=torch.float64) + 1e-4
    found, error = lanczos_logdet(values.diag(), distribution="sphere", return_error=True, seed=0)
    more = lanczos_logdet(values.diag(), dim, distribution="sphere", seed=0)
    assert abs(found - values.log().sum()) <= 4 * error
    assert abs(found - more) <= 0.1 * error


@pytest.mark.parametrize("exponent", [-100, 100])
def test_scales_whose_squares_are_no_numbers(exponent: int):
    matrix, scale = A["clustered"].float(), 2.0**exponent
    found = lanczos_logdet(scale * matrix, 10, 5, seed=0) - DIM * exponent * log(2)
    assert abs(found - lanczos_logdet(matrix, 10, 5, seed=0)) <= 1e-4 * DIM * abs(exponent)
    grid, density = lanczos_approximate_spectrum(scale * matrix, 10, seed=0)
    expected = lanczos_approximate_spectrum(matrix, 10, seed=0)
    torch.testing.assert_close(grid / scale, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(density * scale, expected[1], rtol=1e-2, atol=1e-4)


def test_blocks_agree():
    # Lanczos runs do not see each other: some end early, some do not
    found = [
        trace_function(A["clustered"].numpy(), torch.exp, 10, 6, chunk_size=size, seed=0)
        for size in (1, 2, 6)
    ]
    assert np.allclose(found, found[0], rtol=1e-12)


# --- densities


def mixture(points: Tensor, centers: Tensor, sigma: float) -> Tensor:
    """Return the average of Gaussians around the centers."""
    z = (points.unsqueeze(1) - centers) / sigma
    return ((-(z**2) / 2).exp() / (sigma * sqrt(2 * pi))).mean(1)


def width(axis: Tensor, ncv: int, kappa: float) -> float:
    return float(axis[-1] - axis[0]) / ((ncv - 1) * sqrt(8 * log(kappa)))


@pytest.mark.parametrize("name", A)
def test_density_is_the_smoothed_spectrum(name: str):
    lam = matrices.SPECTRA[name]
    grid, density, error = lanczos_approximate_spectrum(
        A[name], 12, 600, 400, kappa=1.5, return_error=True, seed=0
    )
    # moments beyond twice the nodes are lost, which a Gaussian of this width does not have
    expected = mixture(grid, lam, width(grid, 12, 1.5))
    inside = (grid >= lam[0].min()) & (grid <= lam.max())
    assert ((density - expected).abs()[inside] <= 5 * error[inside] + 0.02 * expected.max()).all()


def test_log_density_is_the_smoothed_log_spectrum():
    lam = torch.logspace(-2, 0, DIM, dtype=torch.float64)
    grid, density, error = lanczos_approximate_log_spectrum(
        matrices.with_spectrum(lam), DIM, 600, 400, epsilon=1e-3, return_error=True, seed=0
    )
    axis, centers = grid.log(), (lam + 1e-3).log()
    expected = mixture(axis, centers, width(axis, DIM, 1.04))
    inside = (axis >= centers.min() + 0.5) & (axis <= centers.max() - 0.5)
    wrong = (grid * density - expected).abs()
    assert (wrong[inside] <= 5 * (grid * error)[inside] + 0.01 * expected.max()).all()
    assert grid[0] > 0 and torch.allclose(axis.diff(), axis.diff()[0].expand(599), rtol=1e-6)


@pytest.mark.parametrize("margin", [0.0, 1.0])
@pytest.mark.parametrize("num_points", [2, 1024])
@pytest.mark.parametrize("kappa", [1.04, 3.0, 1e12])
def test_densities_integrate_to_one(kappa: float, num_points: int, margin: float):
    options = {"kappa": kappa, "num_points": num_points, "margin": margin}
    for density in DENSITIES:
        grid, values = density(A["indefinite"], 10, num_repeats=2, seed=0, **options)
        assert (values >= 0).all()
        assert abs(torch.trapezoid(values, grid) - 1) <= 1e-12


@pytest.mark.parametrize("known", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("ncv", [10, 30])
@pytest.mark.parametrize("name", A)
def test_boundaries_are_given_or_found(name: str, ncv: int, known: list[int]):
    lam = matrices.SPECTRA[name]
    ends = float(lam.min()), float(lam.max())
    given = [ends[i] if i in known else None for i in (0, 1)]
    grid, _ = lanczos_approximate_spectrum(A[name], ncv, boundaries=given, margin=0.1, seed=0)
    beyond = ends[0] - float(grid[0]), float(grid[-1]) - ends[1]
    for i in (0, 1):
        error = abs(beyond[i] / (ends[1] - ends[0]) - 0.1)
        assert error <= (5e-3 if i in known else 0.03)


CACHED = ["approximate_spectrum", "approximate_log_spectrum"]


@pytest.mark.parametrize("method, call", list(zip(CACHED, DENSITIES, strict=True)))
def test_cached_runs_need_no_products(method: str, call):
    counting = Counting(A["indefinite"])
    cached = LanczosApproximateSpectrumCached(counting, 20, seed=0, chunk_size=1)
    approximate = getattr(cached, method)
    approximate(3)
    products = counting.products
    assert products <= 3 * 20 + DIM
    for options in [{"kappa": 2.0}, {"margin": 0.2}, {"num_points": 100}, {"num_repeats": 2}]:
        options = {"num_repeats": 3} | options
        expected = call(counting.matrix, 20, seed=0, chunk_size=1, **options)
        torch.testing.assert_close(approximate(**options), expected)
    assert counting.products == products
    approximate(4)
    assert counting.products == products + 20


@pytest.mark.parametrize("method", CACHED)
def test_more_runs_later_are_those_at_once(method: str):
    matrix = matrices.with_spectrum(torch.linspace(0, 1, 30) ** 3)
    first, second = (
        getattr(LanczosApproximateSpectrumCached(matrix, 5, chunk_size=c, seed=3), method)
        for c in (None, 2)
    )
    first(2)
    torch.testing.assert_close(first(7), second(7), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("scale", [0.0, -3.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_multiples_of_the_identity(density, scale: float, dtype: torch.dtype):
    grid, values = density(scale * torch.eye(5, dtype=dtype), 3, 200, seed=0)
    assert grid.dtype == values.dtype == dtype
    assert (grid.diff() > 0).all()
    assert abs(torch.trapezoid(values.double(), grid.double()) - 1) <= 1e-3
    center = scale if density is lanczos_approximate_spectrum else abs(scale) + 1e-5
    assert abs(grid[values.argmax()] - center) <= 0.03 * (abs(center) or 1)


@pytest.mark.parametrize("density", DENSITIES)
def test_seeds(density):
    first, again, other = (density(A["clustered"], 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[1], again[1]) and not torch.equal(first[1], other[1])


# --- plots


def test_plot():
    import matplotlib.pyplot as plt

    result = lanczos_approximate_spectrum(A["decaying"], 10, num_repeats=3, return_error=True)
    ax = plot_spectrum(*result, label="spectrum")
    assert (ax.get_xscale(), ax.get_xlabel()) == ("linear", "eigenvalue")
    assert ax.get_yscale() == "log" and ax.get_lines()[0].get_label() == "spectrum"
    assert np.allclose(ax.get_lines()[0].get_ydata(), result.density)
    assert plot_spectrum(*result[:2], ax=ax, log_y=False) is ax
    assert len(ax.get_lines()) == 2 and ax.get_yscale() == "linear"
    x, y = lanczos_approximate_log_spectrum(A["decaying"].float(), 10, seed=0)
    ax = plot_spectrum(x, y.numpy(), log_x=True)
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "|eigenvalue|")
    assert ax.get_ylabel() == "density per log |eigenvalue|"
    assert np.allclose(ax.get_lines()[0].get_ydata(), x * y)
    plt.close("all")
    with pytest.raises(ValueError, match="needs positive eigenvalues"):
        plot_spectrum(*result, log_x=True)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for plot in (plot_spectrum, plot_loss):
        with pytest.raises(ImportError, match=f"{plot.__name__} needs matplotlib: pip install"):
            plot([1.0, 2.0], [0.5, 0.5])
    with pytest.raises(ImportError, match="plot_by_layer needs matplotlib: pip install"):
        plot_by_layer({"a": 1.0})


# --- errors

_B = A["indefinite"]
_BAD = [
    *((f, {"ncv": ncv}, "ncv must be") for f in DENSITIES for ncv in (1, DIM + 1)),
    *((f, {"kappa": kappa}, "kappa must be larger") for f in DENSITIES for kappa in (1, inf)),
    *((f, {"margin": m}, "margin must not be negative") for f in DENSITIES for m in (-0.1, inf)),
    *((f, {"num_points": 1}, "num_points must be an integer >= 2") for f in DENSITIES),
    *((f, {"num_repeats": 0}, "num_repeats must be an integer >= 1") for f in DENSITIES),
    *((f, {"return_error": True}, "num_repeats must be an integer >= 2") for f in DENSITIES),
    *((f, {"boundaries": 1.0}, "boundaries must be a pair") for f in DENSITIES),
    *((f, {"boundaries": (3.0, 1.0)}, "must be finite and ascending") for f in DENSITIES),
    *((f, {"boundaries": (1.0, 1.5)}, "outside of the boundaries") for f in DENSITIES),
    *((f, {"A": _B[:3]}, "must be square") for f in DENSITIES),
    *((f, {"A": matrices.nonsymmetric()}, "not symmetric") for f in DENSITIES),
    (DENSITIES[0], {"boundaries": (9.0, None)}, "outside of the boundaries"),
    (DENSITIES[1], {"boundaries": (-1.0, 3.0)}, "absolute values"),
    (DENSITIES[0], {"A": torch.ones(1, 1), "ncv": 2}, "from 2 to 1"),
    (DENSITIES[1], {"epsilon": 0.0}, "epsilon must be positive"),
    (DENSITIES[1], {"epsilon": inf}, "epsilon must be positive and finite"),
    (lanczos_logdet, {}, "not positive definite to working precision: it has an eigenvalue of -"),
    (lanczos_logdet, {"A": A["singular"]}, "not positive definite"),
    (
        lanczos_logdet,
        {"A": (0.5 ** torch.arange(30.0)).diag(), "ncv": 30, "seed": 0},
        "it has an eigenvalue of .* Add a multiple",
    ),
    (lanczos_logdet, {"A": torch.zeros(30, 30)}, "not positive definite"),
    (lanczos_logdet, {"num_repeats": 0}, "num_repeats must be an integer >= 1"),
    (trace_function, {"f": torch.log}, "f is not finite at -"),
    (trace_function, {"f": torch.sum}, "f must return a real tensor of shape"),
    (trace_function, {"f": lambda x: x + 1j}, "got .torch.complex128"),
    (trace_function, {"f": torch.exp, "ncv": 41}, "ncv must be an integer from 1 to 40"),
    (trace_function, {"f": torch.exp, "num_repeats": 1, "return_error": True}, "num_repeats must"),
    (trace_function, {"f": torch.exp, "A": matrices.nonsymmetric()}, "not symmetric"),
]


@pytest.mark.parametrize("call, changes, message", _BAD)
def test_errors(call, changes: dict, message: str):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        call(**({"A": _B, "ncv": 20} | changes))
    if changes.keys() & {"ncv", "kappa", "margin", "num_points", "num_repeats", "epsilon"}:
        assert torch.equal(torch.get_rng_state(), before)  # it draws nothing
