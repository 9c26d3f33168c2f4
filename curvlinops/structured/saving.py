"""Structured operators from files, which ``StructuredLinearOperator.save`` writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from curvlinops.structured.base import FORMAT, StructuredLinearOperator
from curvlinops.support.arguments import as_device
from curvlinops.support.serialization import from_state, read_state
from curvlinops.support.torch_modes import in_default_modes


@in_default_modes
def load(
    source: str | Path | Mapping[str, Any], device: torch.device | str = "cpu"
) -> StructuredLinearOperator:
    """Return a structured operator that was saved: an inverse, a damped KFAC, a power.

    It has the structure, the precision and the parameters' names of the one that was saved, and
    needs neither model nor data. No code in the file is run.

    Args:
        source: The file that its method ``save`` wrote, or what ``state_dict`` returned.
        device: Where it goes.

    Raises:
        ValueError: If there is no structured operator, it is damaged, or of another version.
    """
    state = source if isinstance(source, Mapping) else read_state(source)
    return from_state(state, FORMAT, StructuredLinearOperator, as_device(device))
