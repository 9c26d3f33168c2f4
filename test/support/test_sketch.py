"""A few numbers of a tensor: the same wherever its entries lie, others for other entries."""

from collections.abc import Callable

import pytest
import torch
from second_device import CPU, put, second_device
from torch import Tensor

from curvlinops.support.digest import sketch

BLOCK = 2**10
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, 200 * BLOCK + 1, BLOCK**2 + 3]


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (100 * x).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: int):
    x = numbers(size)
    found = sketch(x)
    torch.testing.assert_close(found[0], x.norm())
    # inner products with vectors of independent entries, which are not those of one block again
    assert bool((found[1:].abs() <= 5 * x.norm()).all())
    assert size < BLOCK or abs(float(found[1])) != abs(float(sketch(x.flip(0))[1]))
    torch.testing.assert_close(sketch(x.float()), found, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(sketch(3 * x), 3 * found)


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype: torch.dtype):
    x = numbers(60, 50, dtype=dtype)
    for view in (x[:, ::2], x.T, x[2:3, 1], x[2, 1], x[:, 50:], x[1:2].expand(4, 50)):
        assert torch.equal(sketch(view), sketch(view.clone(memory_format=torch.contiguous_format)))


#: What changes a square matrix.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.T,
    "negated": lambda x: -x,
    "two rows swapped": lambda x: torch.cat([x[1:2], x[:1], x[2:]]),
    "blocks swapped": lambda x: x.roll(1, 0),
    "an entry": lambda x: torch.cat([x[:-1], x[-1:] * (1 + 1e-1 * torch.eye(len(x))[-1])]),
}


@pytest.mark.parametrize("size", [50, BLOCK])
@pytest.mark.parametrize("change", CHANGES)
def test_other_entries(change: str, size: int):
    x = numbers(size, size)
    one, two = sketch(x), sketch(CHANGES[change](x))
    assert float((one - two).abs().max()) > 1e-6 * float(one[0])


def test_devices():
    x = numbers(3 * BLOCK + 5)
    expected = sketch(x).tolist()
    with second_device():
        other = put([x], CPU)[0].to("cuda")
        assert sketch(other).tolist() == pytest.approx(expected)
