"""Exact traces and spectra of generalized Gauss-Newton matrices, in plain PyTorch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from problems import Problem
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

#: Samples whose Jacobians are in memory at once.
_CHUNK = 4
#: Rows of the root beyond which the spectrum takes too long.
_MOST_ROWS = 1000


def _roots(problem: Problem) -> Iterator[Tensor]:
    """Yield rows, some samples at a time, whose outer products add up to the GGN."""
    model, X, _ = problem
    theta = {name: param.detach() for name, param in model.named_parameters()}

    def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, x.unsqueeze(0))[0]

    for x in X.split(_CHUNK):
        jacobians = vmap(jacrev(output), (None, 0))(theta, x)
        J = torch.cat([jacobian.flatten(2) for jacobian in jacobians.values()], dim=2)
        p = F.softmax(model(x).detach(), dim=1)
        root = p.sqrt().diag_embed() - p.unsqueeze(2) * p.sqrt().unsqueeze(1)
        yield (root.mT @ J).flatten(0, 1) / len(X) ** 0.5


def ggn_trace(problem: Problem) -> float | None:
    """Return the trace; None if samples have several terms, of which there are too many."""
    if problem[2].ndim > 1:
        return None
    return sum(float(rows.square().sum(dtype=torch.float64)) for rows in _roots(problem))


def ggn_eigenvalues(problem: Problem) -> Tensor | None:
    """Return the eigenvalues that may differ from zero; None if there are too many."""
    model, X, y = problem
    if y.ndim > 1 or len(X) * model(X[:1]).shape[1] > _MOST_ROWS:
        return None
    rows = torch.cat(list(_roots(problem)))
    return torch.linalg.eigvalsh((rows @ rows.T).double()).clamp(min=0).cpu()
