"""Which calls see the sample of a batch of one? Those with more rows, or calls, if it comes twice.

No gradient tells: all rows are the sample's, also those of a function of parameters alone.
"""

from collections import Counter

import torch

from curvlinops.layers.batch import RecordedBatch
from curvlinops.layers.parts import Key
from curvlinops.risk.data import Batch
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.risk.sample_coupling import differs
from curvlinops.support.pytree import duplicate_sample


def sample_twice(problem: BatchProblem) -> BatchProblem:
    """Return the model on a batch that has the only sample of another one twice."""
    return problem.on(Batch(problem.batch.index, duplicate_sample(problem.batch.X), None))


def blind(once: RecordedBatch, both: RecordedBatch) -> set[Key]:
    """Return the uses whose calls do not see the sample.

    Args:
        once: A batch of one sample.
        both: That with the sample twice.

    Raises:
        ValueError: If the output is not what it was, twice.
    """
    output, expected = both.model_output.detach(), torch.cat([once.model_output.detach()] * 2)
    if output.shape != expected.shape or differs(output, expected, expected):
        raise ValueError("the model returns something else for two copies of a sample")
    leads = {key: recorded.use.lead for key, recorded in both.uses.items()}
    # a loop over samples has more calls instead
    counts = [Counter(key._replace(index=0) for key in run.uses) for run in (once, both)]
    more = counts[1] - counts[0]
    return {
        key
        for key, recorded in once.uses.items()
        if 0 not in recorded.use.lead
        and recorded.use.lead == leads.get(key)
        and key._replace(index=0) not in more
    }
