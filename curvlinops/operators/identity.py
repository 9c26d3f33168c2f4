"""The identity, to damp other operators with."""

from curvlinops.core.operator import TorchLinearOperator
from curvlinops.core.space import Columns, ParameterSpace


class IdentityLinearOperator(TorchLinearOperator):
    """The identity on a space, e.g. ``H + 0.1 * IdentityLinearOperator(H.space)``.

    Args:
        space: The space; every operator of this package has one as ``space``.
    """

    def __init__(self, space: ParameterSpace):
        super().__init__(space, self_adjoint=True)

    def _apply(self, columns: Columns) -> Columns:
        return {name: column.clone() for name, column in columns.items()}
