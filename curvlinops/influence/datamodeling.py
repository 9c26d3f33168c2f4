"""The linear datamodeling score, which tells how good an attribution is."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.support.torch_modes import in_default_modes

#: The standard error is that of leaving out so many groups of models, one after the other.
_GROUPS = 20


class DatamodelingScore(NamedTuple):
    """Rank correlations of predicted and actual outputs, see ``linear_datamodeling_score``.

    Attributes:
        correlations: Of each query, ``[K]``, from -1 to 1.
        mean: Their mean.
        standard_error: The standard error of the mean, for other queries and other subsets: the
            root of the sum of the two variances. It is too large rather than too small, as both
            have the noise of single correlations.
    """

    correlations: Tensor
    mean: float
    standard_error: float


@in_default_modes
def linear_datamodeling_score(scores: Any, subsets: Any, outputs: Any) -> DatamodelingScore:
    """Compare influence scores with models that were trained anew on subsets of the data.

    The scores of the samples of a subset, added up, predict the output of a model that is trained
    on it, up to increasing functions. For each query, the score is Spearman's rank correlation of
    predictions and outputs over the subsets (Park et al., TRAK: attributing model behavior at
    scale, ICML 2023, arXiv:2303.14186, definition 2.3). Training with another seed changes outputs,
    too: if a subset has several models, take the mean of their outputs.

    Args:
        scores: Scores of N samples for K queries, ``[N, K]``, such as ``rows.scores(P)``.
        subsets: Which samples each of M models was trained on, ``[M, N]``, of zeros and ones or
            booleans. Draw them at random, all of the same size.
        outputs: What the models output for the queries, ``[M, K]``: larger where samples with
            positive scores should make it so. For scores of this package: minus the loss.

    Returns:
        The correlations, their mean, and its standard error.

    Raises:
        ValueError: If shapes do not fit, there are fewer than three models, numbers are not finite,
            or predictions or outputs of a query are the same for all models, so that they have no
            ranks.
    """
    float64 = {"dtype": torch.float64, "device": "cpu"}
    given = [torch.as_tensor(x, **float64).detach() for x in (scores, subsets, outputs)]
    scores, subsets, outputs = given
    M, K = outputs.shape if outputs.ndim == 2 else (0, 0)
    if M < 3 or not K or subsets.shape != (M, len(scores)) or scores.shape != (len(scores), K):
        raise ValueError(
            "Expected scores [N, K], subsets [M, N] and outputs [M, K] of N samples, K queries and "
            f"M >= 3 models, got the shapes {', '.join(str(list(x.shape)) for x in given)}."
        )
    predicted = subsets @ scores
    for what, x in {"predictions": predicted, "outputs": outputs}.items():
        if not bool(x.isfinite().all()):
            raise ValueError(f"The {what} have NaN or infinite values.")
        if bool((same := (x == x[0]).all(0)).any()):
            raise ValueError(
                f"All models have the same {what} for query {int(same.nonzero()[0])}: leave it out."
            )
    correlations = _rank_correlations(predicted, outputs)
    groups = min(M, _GROUPS)
    kept = [torch.arange(M, device="cpu") % groups != group for group in range(groups)]
    means = torch.stack([_rank_correlations(predicted[x], outputs[x]).mean() for x in kept])
    variance = (groups - 1) * means.var(correction=0)  # jackknife
    if K > 1:
        variance += correlations.var() / K
    return DatamodelingScore(correlations, float(correlations.mean()), float(variance.sqrt()))


def _rank_correlations(x: Tensor, y: Tensor) -> Tensor:
    """Return Spearman's correlation of each column of ``[M, K]``; equal numbers share a rank."""
    from scipy.stats import rankdata  # takes long to import

    ranks = (torch.from_numpy(rankdata(z.numpy(), axis=0)) for z in (x, y))
    x, y = (rank - rank.mean(0) for rank in ranks)
    norms = x.norm(dim=0) * y.norm(dim=0)
    return (x * y).sum(0) / norms.clamp(min=0.1)  # zero if all ranks are equal
