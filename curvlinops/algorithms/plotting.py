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
    log_x: bool | None = None,
    log_y: bool = True,
    floor: float = 1e-7,
    ax: "Axes | None" = None,
    **line: Any,
) -> "Axes":
    """Draw a spectral density with matplotlib, ``pip install 'curvlinops[plot]'``.

    Args:
        grid: The eigenvalues, ``[num_points]``, of ``lanczos_approximate_spectrum`` or
            ``lanczos_approximate_log_spectrum``. A result with an error can be passed as
            ``plot_spectrum(*result)``.
        density: The density per unit of the eigenvalue, ``[num_points]``.
        standard_error: Its standard error, drawn as a band of one standard error to both sides.
        log_x: Whether the axis of eigenvalues is logarithmic. The density drawn is then that per
            unit of the natural logarithm, ``grid * density``. Default: whether the grid is evenly
            spaced in the logarithm, as that of ``lanczos_approximate_log_spectrum`` is.
        log_y: Whether the axis of densities is logarithmic.
        floor: Densities are drawn down to this one if their axis is logarithmic.
        ax: The axes to draw into. Default: those of a new figure.
        **line: Passed to ``ax.plot``, such as ``label`` and ``color``.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the arrays do not fit each other, or a logarithmic axis the eigenvalues.
    """
    x, y, error = (None if v is None else _to_numpy(v) for v in (grid, density, standard_error))
    if x.ndim != 1 or any(v is not None and v.shape != x.shape for v in (y, error)):
        shapes = [list(v.shape) for v in (x, y, error) if v is not None]
        raise ValueError(
            "grid, density and standard_error must be vectors of one length, got shapes "
            f"{', '.join(map(str, shapes))}."
        )
    is_log_spectrum = _is_even_in_logarithm(x)
    log_x = is_log_spectrum if log_x is None else log_x
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
    name = "|eigenvalue|" if is_log_spectrum else "eigenvalue"
    ax.set(
        xlabel=name,
        ylabel=f"density per log {name}" if log_x else "density",
        xscale="log" if log_x else "linear",
        yscale="log" if log_y else "linear",
    )
    if log_y:
        ax.set_ylim(bottom=floor)
    return ax


def _is_even_in_logarithm(x: np.ndarray) -> bool:
    # grids over less than ten percent are even in both
    if len(x) < 3 or x[0] <= 0 or x[-1] < 1.1 * x[0] or np.any(np.diff(x) <= 0):
        return False
    steps = np.diff(np.log(x))
    return bool(np.ptp(steps) <= 1e-2 * steps.mean())


def _to_numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
