"""Matrices that are a multiple of the identity but for a low rank, and those that are not."""

import pytest
import torch
from torch import Tensor

from curvlinops.structured import decompositions
from curvlinops.structured.decompositions import eigh_batched, inverse_batched
from curvlinops.structured.low_rank import low_rank

DOUBLE = torch.float64
SIZE, RANK = 600, 25


def gram(
    shift: float = 0.0, dtype: torch.dtype = DOUBLE, size: int = SIZE, seed: int = 0
) -> Tensor:
    """Return the second moment of fewer vectors than they have entries, plus a shift."""
    rows = torch.randn(RANK, SIZE, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return rows.T @ rows / RANK + shift * torch.eye(SIZE, dtype=dtype)


def decaying(dtype: torch.dtype = DOUBLE) -> Tensor:
    vectors, _ = torch.linalg.qr(gram(1.0))
    return (vectors * torch.logspace(0, -5, SIZE, dtype=DOUBLE) @ vectors.T).to(dtype)


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_eigh(shift: float, dtype: torch.dtype):
    matrix = gram(shift, dtype)
    assert low_rank(matrix) is not None
    [(values, vectors)] = eigh_batched([matrix], ["A"])
    eps = torch.finfo(dtype).eps
    expected = torch.linalg.eigvalsh(matrix.double())
    scale = expected.abs().max()
    assert (values.diff() >= 0).all()
    assert (values - expected).abs().max() <= 50 * eps * scale
    assert (vectors.T @ vectors - torch.eye(SIZE, dtype=dtype)).abs().max() <= 50 * eps
    assert ((vectors * values) @ vectors.T - matrix).norm() <= 100 * eps * scale


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (DOUBLE, 1e-9)])
@pytest.mark.parametrize("shift", [1e-3, 1e-2, 1.0, -0.3])
def test_inverse(shift: float, dtype: torch.dtype, tolerance: float, monkeypatch):
    def unexpected(*args: object) -> None:
        raise AssertionError("no decomposition of the whole matrix is needed")

    monkeypatch.setattr(decompositions, "_full_inverse", unexpected)
    matrix = gram(shift, dtype)
    expected = torch.linalg.inv(matrix.double())
    found = inverse_batched([matrix.unsqueeze(0)], ["A"])[0][0]
    assert (found - expected).norm() <= tolerance * expected.norm()
    assert torch.equal(found, found.T)


def test_singular_matrices_have_no_inverse():
    for dtype in (torch.float32, DOUBLE):
        with pytest.raises(ValueError, match="A is singular"):
            inverse_batched([gram(0.0, dtype).unsqueeze(0)], ["A"])


def test_shifts_as_small_as_rounding_are_accurate():
    matrix = gram(1e-5, torch.float32)
    expected = torch.linalg.inv(matrix.double())
    found = inverse_batched([matrix.unsqueeze(0)], ["A"])[0][0]
    assert (found - expected).norm() <= 3.5e-4 * expected.norm()


def test_others_are_decomposed_as_a_whole():
    others = {
        "full": gram(0.0) + decaying(),
        "decaying": decaying(),
        "decaying in float32": decaying(torch.float32),
        "small": gram(1.0)[:100, :100],
        "not finite": torch.full((SIZE, SIZE), torch.nan),
    }
    for name, matrix in others.items():
        assert low_rank(matrix) is None, name


def test_a_direction_that_few_entries_show():
    # the rows and columns that estimate the rank do not see it
    matrix = gram(0.5)
    hidden = torch.zeros(SIZE, dtype=DOUBLE)
    hidden[1::4] = 1.0
    matrix += torch.outer(hidden, hidden)
    [(values, vectors)] = eigh_batched([matrix], ["A"])
    torch.testing.assert_close((vectors * values) @ vectors.T, matrix)


def test_multiples_of_the_identity():
    for scale in (0.0, 3.0):
        [(values, vectors)] = eigh_batched([scale * torch.eye(SIZE, dtype=DOUBLE)], ["A"])
        torch.testing.assert_close(values, torch.full((SIZE,), scale, dtype=DOUBLE))
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(SIZE, dtype=DOUBLE))


def test_some_of_several_matrices():
    matrices = torch.stack([gram(0.1), decaying(), gram(0.2, seed=1)])
    [(values, vectors)] = eigh_batched([matrices], ["A"])
    torch.testing.assert_close(vectors * values.unsqueeze(1) @ vectors.mT, matrices)
    (found,) = inverse_batched([matrices], ["A"])
    eye = torch.eye(SIZE, dtype=DOUBLE).expand_as(found)
    torch.testing.assert_close(found @ matrices, eye, rtol=0.0, atol=1e-8)
