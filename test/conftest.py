"""Fixtures of several files."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def double() -> Iterator[None]:
    """Seed, and make float64 the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
