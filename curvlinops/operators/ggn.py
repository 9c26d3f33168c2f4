"""The generalized Gauss-Newton matrix, exact or with sampled loss Hessians."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvlinops.autodiff.backward import Apply
from curvlinops.autodiff.mode_selection import Mode
from curvlinops.losses.base import OutputMatrix
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.vectors import check_sampling, sampled_gradients
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.warnings import warn


@dataclass(eq=False, repr=False, kw_only=True)
class GGNLinearOperator(DataLinearOperator):
    """The generalized Gauss-Newton matrix of the empirical risk.

    ``G = c * sum_t  J_t^T H_t J_t``, of shape ``[D, D]``, with J_t the Jacobian of the outputs
    that belong to a term, and H_t the Hessian of l_t with respect to them (Schraudolph, Fast
    curvature matrix-vector products, Neural Computation 2002). With ``mc_samples > 0``, H_t is
    replaced by an average of outer products of sampled would-be gradients; see
    ``FisherMCLinearOperator``.

    Args:
        mc_samples: Number of samples per term; 0 for the exact matrix.
        seed: Seeds the samples, together with the index of the batch.

    Raises:
        ValueError: If ``mc_samples`` or ``seed`` is negative.
        NotImplementedError: If labels are to be sampled, and the loss is not known as a likelihood.
    """

    mc_samples: int = 0
    seed: int = 2147483647

    def __post_init__(self) -> None:
        """Check the options, too."""
        super().__post_init__()
        self.mc_samples, self.seed = check_sampling(
            self.risk.loss, self.mc_samples, self.seed, at_least=0
        )
        if self.risk.loss.is_linear:
            warn(
                f"{self.risk.loss.name} is linear in the model's output, so its GGN is zero. Train "
                "on logits with CrossEntropyLoss to have the softmax's curvature in the GGN.",
            )

    def _linearize(self, problem: BatchProblem, mode: Mode) -> Apply:
        if self.mc_samples:
            return mode.gauss_newton(
                problem, sampled_curvature(problem, self.mc_samples, self.seed)
            )

        def curvature(output: Tensor) -> tuple[OutputMatrix, Tensor]:
            terms = problem.terms(output)
            return problem.loss.hessian(output, problem.batch.y), terms

        return mode.gauss_newton(problem, curvature)


@dataclass(eq=False, repr=False, kw_only=True)
class FisherMCLinearOperator(DataLinearOperator):
    """The Fisher information matrix, approximated by sampling labels from the model.

    ``F = c * sum_t  1/M sum_m g_tm g_tm^T``, of shape ``[D, D]``. The would-be gradients ``g_tm``
    belong to labels that are drawn from the likelihood of the loss. They are scaled so that the
    expectation of F is the GGN, for all options of the loss. Products repeat exactly for the same
    batches in the same order. The losses are MSELoss, CrossEntropyLoss, BCEWithLogitsLoss and
    PoissonNLLLoss (with ``log_input=True``).

    Args:
        mc_samples: Number M of samples per term.
        seed: Seeds the samples, together with the index of the batch.

    Raises:
        ValueError: If ``mc_samples`` is not positive, or ``seed`` is negative.
        NotImplementedError: If the loss is not known as a likelihood.
    """

    mc_samples: int = 1
    seed: int = 2147483647

    def __post_init__(self) -> None:
        """Check the options, too."""
        super().__post_init__()
        self.mc_samples, self.seed = check_sampling(
            self.risk.loss, self.mc_samples, self.seed, at_least=1
        )

    def _linearize(self, problem: BatchProblem, mode: Mode) -> Apply:
        return mode.gauss_newton(problem, sampled_curvature(problem, self.mc_samples, self.seed))


def sampled_curvature(problem: BatchProblem, num_samples: int, seed: int) -> Any:
    """Return the head that multiplies with outer products of would-be gradients."""

    def curvature(output: Tensor) -> tuple[OutputMatrix, Tensor]:
        terms = problem.terms(output)
        vectors = sampled_gradients(problem, output, num_samples, seed)
        return problem.loss.outer(vectors, output), terms

    return curvature
