"""Figures of spectral densities, of quantities by layer, and of the loss along directions."""

from collections.abc import Mapping
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
    ax = _new_axes("plot_spectrum") if ax is None else ax
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


def plot_by_layer(results: Mapping[str, Any], *, ax: "Axes | None" = None, **bars: Any) -> "Axes":
    """Draw a number, or several, for each layer as bars, as ``by_layer`` returns them.

    Args:
        results: For each layer a number; an ``Estimate``, whose standard error is drawn; or
            several numbers, ``[K]``, or ``Eigenpairs``, as K bars next to each other.
        ax: The axes to draw into. Default: those of a new figure.
        **bars: Passed to ``ax.bar``, such as ``label`` and ``color``.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no results, or one is not a number or a list of numbers.
    """
    if not results:
        raise ValueError("There are no layers to draw.")
    ax = _new_axes("plot_by_layer") if ax is None else ax
    bars_of = [_bars(*pair) for pair in results.items()]
    width = 0.8 / max(len(height) for height, _ in bars_of)
    places = [
        i + width * (np.arange(len(h)) - (len(h) - 1) / 2) for i, (h, _) in enumerate(bars_of)
    ]
    x, height, error = map(np.concatenate, (places, *zip(*bars_of, strict=True)))
    ax.bar(x, height, **{"width": 0.9 * width, "yerr": error if error.any() else None} | bars)
    ax.set_xticks(range(len(results)), list(results), rotation=45, ha="right")
    return ax


def _bars(layer: str, result: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the heights of a layer's bars, and their errors, ``[K]``."""
    error = getattr(result, "standard_error", 0.0)
    value = getattr(result, "estimate", getattr(result, "eigenvalues", result))
    try:
        height = np.atleast_1d(_to_numpy(value)).astype(float)
        error = np.broadcast_to(_to_numpy(error).astype(float), height.shape)
    except (TypeError, ValueError):
        height = np.empty((0, 0))
    if height.ndim != 1 or not height.size:
        raise ValueError(
            f"The result of layer {layer!r} must be a number or a list of numbers, got a "
            f"{type(result).__name__}. Densities are drawn by plot_spectrum, one by one."
        )
    return height, error


def plot_loss(
    steps: Tensor | np.ndarray,
    losses: Tensor | np.ndarray,
    quadratic: Tensor | np.ndarray | None = None,
    *,
    ax: "Axes | None" = None,
    **lines: Any,
) -> "Axes":
    """Draw the loss along one or two directions, and its quadratic approximation dashed.

    ``plot_loss(*loss_along(H, directions, steps))`` draws a result.

    Args:
        steps: The steps, ``[S]``.
        losses: The losses, ``[S]``; or, along two directions, ``[S, S]``, drawn as contours, with
            the first direction as x-axis.
        quadratic: The approximations, of the shape of ``losses``.
        ax: The axes to draw into. Default: those of a new figure.
        **lines: For the loss, passed to ``ax.plot``, such as ``label`` and ``color``, or to
            ``ax.contour``, such as ``levels``.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the shapes do not fit.
    """
    ax = _new_axes("plot_loss") if ax is None else ax
    x, y, parabola = (None if v is None else _to_numpy(v) for v in (steps, losses, quadratic))
    if y.ndim == 2:
        drawn = ax.contour(x, x, y.T, **lines)
        ax.clabel(drawn)
        if parabola is not None:
            same = {"levels": drawn.levels, "norm": drawn.norm, "cmap": drawn.cmap}
            ax.contour(x, x, parabola.T, linestyles="dashed", alpha=0.6, **same)
        ax.set(xlabel="step along the first direction", ylabel="step along the second direction")
        return ax
    (line,) = ax.plot(x, y, **{"label": "loss"} | lines)
    if parabola is not None:
        label = f"{line.get_label()}, quadratic approximation"
        ax.plot(x, parabola, "--", color=line.get_color(), alpha=0.6, label=label)
    ax.set(xlabel="step", ylabel="loss")
    ax.legend()
    return ax


def _new_axes(function: str) -> "Axes":
    """Return the axes of a new figure."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            f"{function} needs matplotlib: pip install 'curvlinops[plot]'."
        ) from error
    return plt.subplots(layout="constrained")[1]


def _to_numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
