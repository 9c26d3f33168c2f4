"""Building blocks for Kronecker-factored curvature."""

from collections.abc import Callable

from torch import Tensor, nn

from curvlinops.layers.patches import extract_averaged_patches, extract_patches
from curvlinops.losses import wrap_loss
from curvlinops.operators.kfac.options import FisherType, KFACType
from curvlinops.support.torch_modes import in_default_modes

__all__ = [
    "FisherType",
    "KFACType",
    "extract_averaged_patches",
    "extract_patches",
    "loss_hessian_matrix_sqrt",
]


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
