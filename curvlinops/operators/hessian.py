"""The Hessian of the empirical risk."""

from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.linear_operator.space import Columns
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.custom_functions import check_hessian
from curvlinops.risk.derivatives import hessian


class HessianLinearOperator(DataLinearOperator):
    """The Hessian of the empirical risk with respect to the parameters.

    ``H = c * sum_t  d^2 l_t / d theta^2``, of shape ``[D, D]``.

    For arguments, attributes and errors see ``DataLinearOperator``. Products follow Pearlmutter,
    Fast exact multiplication by the Hessian, Neural Computation 1994.
    """

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        product = hessian(problem, problem.loss_seed, self.chunk_size, single)

        def apply(V: Columns, out: Columns) -> Tensor:
            weight = product.apply(V, out)
            if problem.uncompared:  # autograd cannot know whether custom functions are right
                check_hessian(problem, hessian(problem, problem.loss_seed) if single else product)
            return weight

        return product._replace(apply=apply)
