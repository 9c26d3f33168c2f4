"""The generalized Gauss-Newton matrix, exact or with sampled loss Hessians."""

from dataclasses import dataclass

from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.vectors import check_sampling, sampled_gradients
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import gauss_newton, hessian
from curvlinops.support.rng import DEFAULT_SEED
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
    seed: int = DEFAULT_SEED

    #: The smallest number of samples.
    _fewest_samples = 0

    def _check_options(self) -> None:
        self.mc_samples, self.seed = check_sampling(
            self.risk.loss, self.mc_samples, self.seed, at_least=self._fewest_samples
        )
        if self.risk.loss.is_linear:
            warn(
                f"{self.risk.loss.name} is linear in the model's output, so its GGN is zero. Train "
                "on logits with CrossEntropyLoss to have the softmax's curvature in the GGN.",
            )

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        def curvature(output: Tensor) -> tuple[Linear, Tensor]:
            if not self.mc_samples:
                weight = problem.weight(output)
                return problem.loss.hessian(output, problem.batch.y), weight
            weight = problem.check(output)
            vectors = sampled_gradients(problem, output, self.mc_samples, self.seed)
            return problem.loss.outer(vectors, output), weight

        has_head = problem.loss.has_parameters and not self.mc_samples
        if has_head and problem.loss_needs_graph:
            return hessian(problem, problem.curvature_seed, self.chunk_size, single)
        return gauss_newton(problem, curvature, self.chunk_size, single)


@dataclass(eq=False, repr=False, kw_only=True)
class FisherMCLinearOperator(GGNLinearOperator):
    """The Fisher information matrix, approximated by sampling labels from the model.

    ``F = c * sum_t  1/M sum_m g_tm g_tm^T``, of shape ``[D, D]``: ``GGNLinearOperator`` with
    ``mc_samples=M``. The would-be gradients ``g_tm`` belong to labels that are drawn from the
    likelihood of the loss. They are scaled so that the expectation of F is the GGN, for all options
    of the loss; for BCELoss, whose Hessian depends on the target, the expectation is the GGN
    averaged over labels of the model. Products repeat exactly for the same batches in the same
    order. The losses are MSELoss, CrossEntropyLoss, LinearCrossEntropyLoss, BCEWithLogitsLoss,
    BCELoss and PoissonNLLLoss (with ``log_input=True``).

    Args:
        mc_samples: Number M of samples per term.
        seed: Seeds the samples, together with the index of the batch.

    Raises:
        ValueError: If ``mc_samples`` is not positive, or ``seed`` is negative.
        NotImplementedError: If the loss is not known as a likelihood.
    """

    mc_samples: int = 1

    _fewest_samples = 1
