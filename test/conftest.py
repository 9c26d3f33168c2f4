"""Fixtures of several files."""

import gc
from collections.abc import Iterator

import pytest
import torch

from curvlinops.risk.linearization import FreshProducts

FreshProducts.was_said = True  # whichever test is the first with many products would say it


@pytest.fixture
def double() -> Iterator[None]:
    """Seed, and make float64 the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def pytest_collection_finish() -> None:
    """Let garbage collections pass over what was there before the tests, which is a lot."""
    gc.collect()
    gc.freeze()
