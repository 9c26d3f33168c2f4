"""Digests of tensors: of their bits, wherever these lie."""

from collections.abc import Callable

import pytest
import torch
from second_device import CPU, put, second_device
from torch import Tensor

from curvlinops.support.digest import checksum, digest

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
]
#: Cut from a matrix with 6 rows and 5 columns.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda x: x[:, 1:2],
    "columns": lambda x: x[:, 1:],
    "every second": lambda x: x[:, ::2],
    "transposed": lambda x: x.T,
    "one column of one row": lambda x: x[2:3, 1],
    "one entry": lambda x: x[2:3, 1:2],
    "a number": lambda x: x[2, 1],
    "repeated": lambda x: x[1:2, 2:3].expand(4, 5),
    "no column": lambda x: x[:, 5:],
    "a column without rows": lambda x: x[:0, 1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype):
    x = (40 * torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) - 20).to(dtype)
    x = LAYOUTS[layout](x)
    same = torch.tensor(x.tolist(), dtype=dtype).view(x.shape)
    assert digest([x]) == digest([same])


@pytest.mark.parametrize("size", [2, 2**15, 2**20 + 1])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_every_number_counts(size: int, place: float):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    changed, n = x.clone(), int(place * (size - 1))
    changed[n] += 1e-3
    with second_device():
        pairs = [(x, changed), tuple(put([y], CPU)[0].to("cuda") for y in (x, changed))]
        assert all(checksum(a) == checksum(a.clone()) != checksum(b) for a, b in pairs)
        assert all(checksum(a) != checksum(a.roll(1)) for a, _ in pairs)
