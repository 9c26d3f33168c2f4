"""Operators on data whose matrix has structure: the methods that its structure computes."""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from curvlinops.linear_operator.operator import Combined, TorchLinearOperator
from curvlinops.operators.base import DataLinearOperator
from curvlinops.structured.base import StructuredLinearOperator

P = ParamSpec("P")
Result = TypeVar("Result")


def of_structure(
    method: Callable[Concatenate[Any, P], Result],
) -> Callable[Concatenate["StructuredDataLinearOperator", P], Result]:
    """Return the method that calls a method of the structured matrix."""

    @wraps(method)
    def call(operator: "StructuredDataLinearOperator", *args: P.args, **kwargs: P.kwargs) -> Result:
        return getattr(operator.structure, method.__name__)(*args, **kwargs)

    return call


class StructuredDataLinearOperator(DataLinearOperator):
    """An operator on data whose matrix is a structured operator at each moment.

    Quantities, functions, multiples, and sums and products with structured operators are those of
    ``structure``.
    """

    __mul__: ClassVar[Combined[StructuredLinearOperator]]  # no options of a dataclass
    __rmul__: ClassVar[Combined[StructuredLinearOperator]]
    damped: ClassVar[Callable[[Any, Any], StructuredLinearOperator]]

    @property
    @abstractmethod
    def structure(self) -> StructuredLinearOperator:
        """The matrix as a structured operator."""

    trace = of_structure(StructuredLinearOperator.trace)
    det = of_structure(StructuredLinearOperator.det)
    logdet = of_structure(StructuredLinearOperator.logdet)
    frobenius_norm = of_structure(StructuredLinearOperator.frobenius_norm)
    diagonal = of_structure(StructuredLinearOperator.diagonal)
    eigvalsh = of_structure(StructuredLinearOperator.eigvalsh)
    eigh = of_structure(StructuredLinearOperator.eigh)
    solve = of_structure(StructuredLinearOperator.solve)
    power = of_structure(StructuredLinearOperator.power)
    sample = of_structure(StructuredLinearOperator.sample)
    damped = of_structure(StructuredLinearOperator.damped)

    _has_structure = True
    _scaled = of_structure(StructuredLinearOperator._scaled)
    __pow__ = of_structure(StructuredLinearOperator.__pow__)
    _eigenpairs = of_structure(StructuredLinearOperator._eigenpairs)

    def _structured(self) -> StructuredLinearOperator:
        return self.structure

    def _plus(self, other: TorchLinearOperator) -> TorchLinearOperator | None:
        return self.structure._plus(other) if other._has_structure else None

    def _times(self, other: TorchLinearOperator) -> TorchLinearOperator | None:
        return self.structure._times(other) if other._has_structure else None
