"""Building blocks for Kronecker-factored curvature."""

from collections.abc import Callable
from math import prod
from typing import Any

from einops import reduce
from torch import Tensor, nn

from curvlinops.layers.patches import Lengths, Padding, Window, make_patches, patch_sums
from curvlinops.losses import wrap_loss
from curvlinops.operators.kfac.options import FisherType, KFACType
from curvlinops.support.norms import wide
from curvlinops.support.torch_modes import in_default_modes

__all__ = [
    "FisherType",
    "KFACType",
    "extract_averaged_patches",
    "extract_patches",
    "loss_hessian_matrix_sqrt",
]


def __dir__() -> list[str]:
    """List the functions, without what they import."""
    return __all__


@in_default_modes
def loss_hessian_matrix_sqrt(
    output_one_datum: Tensor, target_one_datum: Tensor, loss_func: nn.Module | Callable
) -> Tensor:
    """Return a square root of the loss's Hessian with respect to one datum's output.

    ``S S^T = d^2 l / d f^2``, with l the term that belongs to the datum: weights and label
    smoothing are in it, the scale of ``reduction="mean"`` over the data is not. With k = 1 for
    "sum" and 1/C for "mean": MSELoss has ``S = sqrt(2 k) I``; CrossEntropyLoss has
    ``S = sqrt(s) (diag(sqrt p) - p sqrt(p)^T)`` for ``p = softmax(f)`` and the weight s of the
    target (0 where ignored); BCEWithLogitsLoss has
    ``S = sqrt(k w) diag(sqrt(sigmoid(f) (1 - sigmoid(f))))``; BCELoss of probabilities f has
    ``S = sqrt(k w) diag(sqrt(y / f^2 + (1 - y) / (1 - f)^2))`` for targets y.

    Args:
        output_one_datum: The model's output, ``[1, C]``.
        target_one_datum: The target, of the shape that the loss expects for one datum.
        loss_func: MSELoss, CrossEntropyLoss, BCEWithLogitsLoss, BCELoss, PoissonNLLLoss, HuberLoss
            or SmoothL1Loss.

    Returns:
        S, of shape ``[C, C]``.

    Raises:
        ValueError: If the output is not of shape ``[1, C]``, the target does not fit, or the
            Hessian is indefinite, infinite or NaN.
        NotImplementedError: If the loss has no closed form.
    """
    output = output_one_datum.detach()
    if output.ndim != 2 or output.shape[0] != 1:
        raise ValueError(f"Expected the output of one datum, [1, C], got {list(output.shape)}.")
    try:
        loss = wrap_loss(loss_func)
    except ValueError as error:
        # a plain function has no reduction, nor a closed form
        if getattr(loss_func, "reduction", None) is None:
            raise NotImplementedError(f"No closed form for {loss_func}: {error}") from error
        raise
    loss.check(output, target_one_datum)
    root = loss.hessian_sqrt(output, target_one_datum)[:, 0].T.contiguous().detach()
    if not bool(root.isfinite().all()):
        raise ValueError("The square root is not finite. Check output, target and weights for NaN.")
    return root


def extract_patches(
    x: Tensor,
    kernel_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:
    """Return the inputs seen by each output location of a convolution.

    ``patches[n, o, (c, k)] = 1/G sum_g x[n, g C/G + c, o * stride + k * dilation - before]``, and
    zero outside of the input, in 1, 2 and 3 dimensions.

    Args:
        x: Input of the convolution, ``[N, C, *I]``.
        kernel_size: Lengths K of the kernel, a number or one for each axis.
        stride: Steps between patches.
        padding: Zeros on both sides of each axis, pairs of the numbers of zeros before and behind
            each axis, "valid" (none), or "same" (the output is as long as the input; one more
            behind than before where the number is odd).
        dilation: Steps within a patch.
        groups: Number G of groups of channels. Patches are averaged over groups.

    Returns:
        Patches ``[N, prod(O), C/G * prod(K)]``, in float32 for inputs in half precision.

    Raises:
        ValueError: If there are no such patches, or padding is negative: the message says why.
    """
    return make_patches(*_averaged(x, kernel_size, stride, padding, dilation, groups)).squeeze(2)


def extract_averaged_patches(
    x: Tensor,
    kernel_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:
    """Return the average of ``extract_patches`` over output locations, without forming patches.

    Along each axis, position k of the kernel sees the input's positions
    ``{o * stride + k * dilation - before}``, so that the average is a product of ``x`` with one
    0-1 matrix ``[K, I]`` for each axis (Dangel, arXiv:2307.02275, section 2): 2-3 passes over the
    memory of ``x``.

    Args:
        x: Input of the convolution, ``[N, C, *I]``.
        kernel_size: As those of ``extract_patches``, like all that follows.
        stride: Steps between patches.
        padding: Zeros around the input.
        dilation: Steps within a patch.
        groups: Number G of groups of channels. Patches are averaged over groups.

    Returns:
        Averages ``[N, C/G * prod(K)]``, in float32 for inputs in half precision.

    Raises:
        ValueError: If there are no such patches, or padding is negative: the message says why.
    """
    # the average over groups reads the input once, and leaves little to do
    averaged, window = _averaged(x, kernel_size, stride, padding, dilation, groups)
    return patch_sums(averaged, window).squeeze(1) / prod(window.size)


def _averaged(x: Tensor, *options: Any) -> tuple[Tensor, Window]:
    """Return the average over groups, and the window, which PyTorch would not refuse."""
    window = Window.of(x, *options)
    if min(map(min, window.pads)) < 0:
        raise ValueError(f"padding must be at least 0, got {options[2]}. Crop the input instead.")
    x = wide(x)
    if window.groups > 1:
        x = reduce(x, "n (g c) ... -> n c ...", "mean", g=window.groups)
    return x, window._replace(groups=1)
