"""The Hessian of the empirical risk."""

from curvlinops.autodiff.backward import Apply
from curvlinops.autodiff.mode_selection import Mode, choose, symmetry_of_hessian
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.custom_functions import check_custom_functions
from curvlinops.risk.empirical_risk import BatchProblem


class HessianLinearOperator(DataLinearOperator):
    """The Hessian of the empirical risk with respect to the parameters.

    ``H = c * sum_t  d^2 l_t / d theta^2``, of shape ``[D, D]``.

    For arguments, attributes and errors see ``DataLinearOperator``. Products follow Pearlmutter,
    Fast exact multiplication by the Hessian, Neural Computation 1994.
    """

    def _linearize(self, problem: BatchProblem, mode: Mode) -> Apply:
        return mode.hessian(problem, problem.loss_seed)

    def _choose(self, problem: BatchProblem, many: bool) -> tuple[Mode, bool]:
        mode, was_tested = choose(self._modes, symmetry_of_hessian, problem, problem.loss_seed)
        if self.autodiff != "reverse" and problem.facts.custom_functions:
            check_custom_functions(problem, mode)
        return mode, was_tested

    def _are_many(self, num_products: int) -> bool:
        return True  # on our benchmarks reverse mode is the faster one already for a single product
