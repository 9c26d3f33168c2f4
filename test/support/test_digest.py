"""Digests of tensors: of their bits, wherever these lie."""

from collections.abc import Callable

import pytest
import torch
from second_device import CPU, put, second_device
from torch import Tensor

from curvlinops.support.digest import checksum, digest

BLOCK = 2**15
#: Numbers of words below, at and above the borders of blocks, of groups of blocks, of their sums.
SIZES = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 64 * BLOCK + 7, 65 * BLOCK, 201 * BLOCK]
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


@pytest.mark.parametrize("size", SIZES)
def test_devices(size: int):
    """Blocks are summed one by one on the CPU, several at once elsewhere."""
    x = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(size))
    x = x.to(torch.int32)
    expected = int(checksum(x))
    with second_device():
        other = put([x], CPU)[0].to("cuda")
        assert other.is_cuda
        assert int(checksum(other)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_devices_on_gpu(size: int):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert int(checksum(x)) == int(checksum(x.cuda()))


@pytest.mark.parametrize("size", [s for s in SIZES if s > 1])
def test_every_word_counts(size: int):
    x = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(size))
    x = x.to(torch.int32)
    found = {int(checksum(x))}
    for place in (0, size // 2, size - 1):
        changed = x.clone()
        changed[place] ^= 1 << 20
        found.add(int(checksum(changed)))
    shifts = {1, size - 1, *(n for n in (BLOCK, 64 * BLOCK) if n < size)}  # also whole blocks
    found |= {int(checksum(x.roll(n))) for n in shifts}
    places = len({0, size // 2, size - 1})
    assert len(found) == 1 + places + len(shifts)
