"""What is backpropagated for each type of Fisher matrix."""

from collections.abc import Iterable

from torch import Tensor

from curvlinops.core.risk import BatchRisk
from curvlinops.operators.kronecker.options import FisherType, Options
from curvlinops.operators.vectors import hessian_roots, signed_hessian_roots, would_be_gradients


def backpropagated(
    bound: BatchRisk, output: Tensor, num_samples: int, options: Options
) -> Iterable[Tensor]:
    """Yield vectors ``[V, *output]`` whose outer products are, or replace, the loss's Hessian.

    Args:
        bound: The risk on a batch.
        output: The model's output.
        num_samples: How many samples it has, with as many neighboring rows each.
        options: The options of the approximation.
    """
    if options.fisher_type is FisherType.FORWARD_ONLY:
        return [output.new_zeros(0, *output.shape)]
    if options.fisher_type is FisherType.EMPIRICAL:
        return [bound.loss.gradient(output, bound.batch.y).unsqueeze(0)]
    if options.fisher_type is FisherType.MC:
        draws = would_be_gradients(bound, output, options.mc_samples, options.seed)
        return [draws / options.mc_samples**0.5]
    if options.exact:
        return hessian_roots(bound, output, num_samples)
    return signed_hessian_roots(bound, output, options.mc_samples, options.seed, num_samples)
