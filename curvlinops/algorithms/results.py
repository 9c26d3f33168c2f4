"""Results as plain dictionaries, and as files."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.certified import CertifiedScores
from curvlinops.algorithms.eigsh import Eigenpairs
from curvlinops.algorithms.intervals import Interval
from curvlinops.algorithms.iteration import Iteration
from curvlinops.algorithms.krylov import Solution
from curvlinops.algorithms.lsmr import LSMRSolution
from curvlinops.algorithms.sampling import Estimate
from curvlinops.algorithms.spectrum import SpectralDensity

# torch.load(weights_only=True) reads them: they have tensors, numbers and dictionaries only
torch.serialization.add_safe_globals(
    [
        CertifiedScores,
        Eigenpairs,
        Estimate,
        Interval,
        Iteration,
        LSMRSolution,
        Solution,
        SpectralDensity,
    ]
)


def to_plain(result: Any, skip: Iterable[str] = ("eigenvectors", "iterate", "x")) -> Any:
    """Return a result as dictionaries, lists and numbers, which ``json.dumps`` writes.

    Args:
        result: A result of this package, such as ``Eigenpairs``, ``Estimate`` or ``Solution``; a
            tensor or an array; or lists and dictionaries of these.
        skip: Fields that are left out. By default those with a number for each model parameter.

    Returns:
        Results with fields as dictionaries, tensors as nested lists.

    Raises:
        TypeError: If there is an object of another type inside.

    Example:
        >>> import numpy as np
        >>> from curvlinops import eigsh, to_plain
        >>> pairs = eigsh(np.diag([1.0, 2.0, 3.0]), k=1, seed=0)
        >>> sorted(to_plain(pairs))
        ['eigenvalues', 'history', 'num_products', 'residuals']
    """
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    if result is None or isinstance(result, bool | int | float | str):
        return result
    if isinstance(result, Tensor | np.ndarray | np.generic):
        return result.tolist()
    if isinstance(result, Mapping):
        return {name: to_plain(entry, skip) for name, entry in result.items()}
    if names := _fields(result):
        return {name: to_plain(getattr(result, name), skip) for name in names if name not in skip}
    if isinstance(result, list | tuple):
        return [to_plain(entry, skip) for entry in result]
    raise TypeError(f"A {type(result).__name__} has no plain form of numbers.")


def _fields(result: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or named tuple."""
    if is_dataclass(result) and not isinstance(result, type):
        return tuple(field.name for field in fields(result))
    return getattr(result, "_fields", ())
