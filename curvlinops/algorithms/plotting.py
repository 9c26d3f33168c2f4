"""A figure of a spectral density."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_spectrum(
    grid: Tensor | np.ndarray,
    density: Tensor | np.ndarray,
    standard_error: Tensor | np.ndarray | None = None,
    *,
    log_x: bool = False,
    log_y: bool = True,
    floor: float = 1e-7,
    ax: "Axes | None" = None,
    **line: Any,
) -> "Axes":
    """Draw a spectral density with matplotlib, ``pip install 'curvlinops[plot]'``.

    ``plot_spectrum(*lanczos_approximate_spectrum(A, ncv))`` draws a result with or without error.

    Args:
        grid: The eigenvalues, ``[num_points]``.
        density: The density per unit of the eigenvalue, ``[num_points]``.
        standard_error: The standard error of the density. The band reaches one to both sides.
        log_x: Whether the axis of eigenvalues is logarithmic. The density drawn is then that per
            unit of the natural logarithm, ``grid * density``: pass ``True`` for results of
            ``lanczos_approximate_log_spectrum``.
        log_y: Whether the axis of densities is logarithmic.
        floor: The smallest density on a logarithmic axis.
        ax: The axes to draw into. Default: those of a new figure.
        **line: Passed to ``ax.plot``, such as ``label`` and ``color``.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the shapes differ, or ``log_x`` and an eigenvalue is not positive.
    """
    x, y, error = (None if v is None else _to_numpy(v) for v in (grid, density, standard_error))
    if log_x and x.min() <= 0:
        raise ValueError(
            f"A logarithmic axis needs positive eigenvalues, got {x.min():.3e}. Use "
            "lanczos_approximate_log_spectrum."
        )
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error_of_import:
            raise ImportError(
                "plot_spectrum needs matplotlib: pip install 'curvlinops[plot]'."
            ) from error_of_import
        ax = plt.subplots(layout="constrained")[1]
    unit = x if log_x else 1.0
    (drawn,) = ax.plot(x, y * unit, **line)
    if error is not None:
        low, high = (np.clip(y + sign * error, 0, None) * unit for sign in (-1, 1))
        ax.fill_between(x, low, high, color=drawn.get_color(), alpha=0.3, linewidth=0)
    name = "|eigenvalue|" if log_x else "eigenvalue"
    ax.set(
        xlabel=name,
        ylabel=f"density per log {name}" if log_x else "density",
        xscale="log" if log_x else "linear",
        yscale="log" if log_y else "linear",
    )
    if log_y:
        ax.set_ylim(bottom=floor)
    return ax


def _to_numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
