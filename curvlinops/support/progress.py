"""Progress bars: one for each call of a solver, and one for each pass over data."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm

#: Inside of a solver, a pass over data has its own bar after so many seconds.
_LONG = 2.0


class _Solver(threading.local):
    """The outermost solver that runs in a thread, if there is one."""

    def __init__(self):
        self.depth = 0
        self.name = ""
        self.total: int | None = None
        self.bar: tqdm | None = None


_SOLVER = _Solver()


@contextmanager
def solver_bar(name: str) -> Iterator[None]:
    """Show one bar for all products of a solver.

    The bar begins with the first pass over data that shows one. Solvers inside of solvers have
    none.

    Args:
        name: The name of the solver.
    """
    if _SOLVER.depth == 0:
        _SOLVER.name, _SOLVER.total, _SOLVER.bar = name, None, None
    _SOLVER.depth += 1
    try:
        yield
    finally:
        _SOLVER.depth -= 1
        if _SOLVER.depth == 0 and _SOLVER.bar is not None:
            _SOLVER.bar.close()
            _SOLVER.bar = None


def shown(data: Iterable, name: str) -> Iterable:
    """Return data with a progress bar, which is removed at the end of the pass."""
    if _SOLVER.depth and _SOLVER.bar is None:
        _SOLVER.bar = tqdm(desc=_SOLVER.name, total=_SOLVER.total, unit="product")
    return tqdm(data, desc=name, leave=False, delay=_LONG if _SOLVER.depth else 0)


def expect_products(number: int) -> None:
    """Set the total of the running solver's bar; if there are more products, it has none."""
    if _SOLVER.depth == 1:
        _SOLVER.total = number
        if _SOLVER.bar is not None:
            _SOLVER.bar.total = number


def count_products(number: int) -> None:
    """Advance the bar of the running solver by a number of products."""
    if _SOLVER.depth == 1 and _SOLVER.bar is not None:
        _SOLVER.bar.update(number)


def show_residuals(*measures: tuple[Tensor, Tensor]) -> None:
    """Show the largest ratio of residual to tolerance on the bar of the running solver.

    Args:
        *measures: Residuals of all systems, ``[K]``, and their tolerances, ``[K]``. A system is
            solved if one of its residuals is below the tolerance.
    """
    if _SOLVER.depth == 1 and _SOLVER.bar is not None and measures[0][0].numel():
        ratios = torch.stack([residuals / goals for residuals, goals in measures])
        ratio = float(ratios.amin(0).max())
        _SOLVER.bar.set_postfix_str(f"residual/tolerance={ratio:.1e}", refresh=False)
