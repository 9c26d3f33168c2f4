"""Norms and inner products in float64: exact, and without large copies."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvlinops.support.norms import PART, double_dot, double_dots, double_norm

CASES = {
    "vector": ((3 * PART + 5,), 0),
    "all": ((3, PART), None),
    "long rows": ((3, PART), 1),
    "long columns": ((PART, 3), 0),
    "many rows": ((PART, 3), -1),
    "matrices": ((2, 500, 400), (-2, -1)),
    "first and last": ((50, 60, 70), (0, -1)),
    "few": ((3, 4), 1),
    "none": ((0, 4), 0),
    "no rows": ((0, 4), 1),
    "a number": ((), None),
    "strided": ((2 * PART, 2), 0),
}


class Largest(TorchDispatchMode):
    """Notes the largest float64 tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if getattr(x, "dtype", None) == torch.float64]
        self.size = max([self.size, *sizes])
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_norms_and_inner_products(name: str, dtype: torch.dtype):
    shape, dim = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x[:, ::2] if name == "strided" else x
    y = (x.flatten().flip(0).reshape(x.shape) + 2 * x).to(dtype)
    products, squares = x.double() * y.double(), x.double().square()
    with Largest() as double:
        norms, inner = double_norm(x, dim), double_dot(x, y)
    expected = squares.sum(tuple(range(x.ndim)) if dim is None else dim).sqrt()
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(inner, products.sum(), rtol=1e-12, atol=0)
    assert dtype == torch.float64 or double.size <= PART
    if x.ndim:
        torch.testing.assert_close(double_dots(x, y), products.sum(-1), rtol=1e-12, atol=1e-12)


def test_squares_that_are_no_numbers():
    x = torch.full((2, 2 * PART), 1e30)
    expected = torch.full((2,), 1e30 * (2 * PART) ** 0.5, dtype=torch.float64)
    torch.testing.assert_close(double_norm(x, 1), expected)
    torch.testing.assert_close(double_norm(1e-30 * x * 1e-30, 1), expected * 1e-60)
