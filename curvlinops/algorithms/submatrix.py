"""Submatrices: selected rows and columns of a matrix."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, as_operator
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace, match_names
from curvlinops.support.arguments import as_integer

#: Rows or columns: integers, a slice of them, or names and globs of parameters.
Selection = Sequence[int] | Sequence[str] | slice | Tensor | np.ndarray


class SubmatrixLinearOperator(TorchLinearOperator):
    """Selected rows and columns of a matrix, ``A[row_idxs][:, col_idxs]``.

    Products compute only these: an operator on data differentiates the model with respect to the
    parameters that have a row or column in the submatrix.

    Args:
        A: An operator, any other scipy LinearOperator, or a matrix.
        row_idxs: The rows, in this order: integers from 0 on, a slice, or names of parameters.
            The name of a module stands for all of its parameters, and a glob, such as
            ``"*.attn.*"``, for all that it matches, in their order in ``A``. With names, vectors
            may also be lists and dictionaries of tensors.
        col_idxs: The columns.

    Raises:
        ValueError: If a selection is empty, has other entries than integers or names, an index out
            of range, an unknown name, a glob that matches nothing, or an entry twice.
        TypeError: If a string is passed instead of a list.
    """

    def __init__(self, A: AnyMatrix, row_idxs: Selection, col_idxs: Selection):
        self.operator = A = as_operator(A)
        rows = _read(A.codomain, row_idxs, "row_idxs")
        columns = _read(A.domain, col_idxs, "col_idxs")
        self._rows, self._columns = _Selection(A.codomain, rows), _Selection(A.domain, columns)
        self._of_tensors = A._part(self._rows.tensors, self._columns.tensors)
        is_symmetric = A.self_adjoint and rows == columns
        super().__init__(self._columns.space, self._rows.space, is_symmetric)

    def _description(self) -> list[str]:
        return [self.operator._formula()]

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return (self._of_tensors,)

    def _apply(self, columns: Tensor) -> Tensor:
        return self._rows.cut(self._of_tensors._checked_apply(self._columns.embed(columns)))

    def _transposed(self) -> "SubmatrixLinearOperator":
        selections = self._columns.chosen, self._rows.chosen
        return SubmatrixLinearOperator(self.operator.T, *selections)


class _Selection:
    """Selected coordinates of a space: ``chosen`` indices of the flat vector, or names of tensors.

    ``tensors`` is the space of the tensors that contain these, ``space`` that of the coordinates.
    """

    def __init__(self, parent: ParameterSpace, chosen: list[int] | list[str]):
        self.chosen = chosen
        if isinstance(chosen[0], str):
            self._positions, self.tensors = None, parent.restricted(chosen)
            self.space = self.tensors
            return
        ends = torch.tensor([parent.slice(name).stop for name in parent.names], device="cpu")
        indices = torch.tensor(chosen, device="cpu")
        # the owner is the first tensor with a larger end, which is never an empty tensor
        owners = torch.bucketize(indices, ends, right=True)
        touched = owners.unique().tolist()
        names = [parent.names[owner] for owner in touched]
        self.tensors = parent.restricted(names)
        shifts = torch.zeros(len(parent.names), dtype=torch.long, device="cpu")
        for owner, name in zip(touched, names, strict=True):
            shifts[owner] = self.tensors.slice(name).start - parent.slice(name).start
        # positions in the flat vector that has these tensors only
        self._positions = (indices + shifts[owners]).to(parent.device)
        self.space = ParameterSpace.flat(len(chosen), parent.dtype, parent.device)

    def embed(self, columns: Tensor) -> Tensor:
        """Return vectors of the tensors that are zero at all other coordinates."""
        if self._positions is None:
            return columns
        full = columns.new_zeros(len(columns), self.tensors.dim)
        full[:, self._positions] = columns
        return full

    def cut(self, columns: Tensor) -> Tensor:
        """Return the selected coordinates of vectors of the tensors."""
        return columns if self._positions is None else columns[:, self._positions]


def _read(space: ParameterSpace, idxs: Any, what: str) -> list[int] | list[str]:
    """Return a user's selection of coordinates as indices or names."""
    if isinstance(idxs, str):
        raise TypeError(f"{what} must be a list, got a string. Pass [{idxs!r}].")
    if isinstance(idxs, slice):
        idxs = range(space.dim)[idxs]
    values = idxs.tolist() if hasattr(idxs, "tolist") else idxs
    values = list(values) if isinstance(values, Iterable) else None
    if not values:
        raise ValueError(f"{what} must be a list of at least one index or name, got {idxs!r}.")
    chosen = [value if (number := as_integer(value)) is None else number for value in values]
    kinds = {type(value) for value in chosen}
    if kinds not in ({str}, {int}):
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(f"{what} must be integers, or names of parameters, got {names}.")
    by_name = kinds == {str}
    if by_name and space.is_flat:
        raise ValueError(
            f"{what} are names, but the matrix has no names: its vectors are flat. Pass integers."
        )
    twice = [value for value, count in Counter(chosen).items() if count > 1]
    if twice:
        raise ValueError(f"{what} has entries twice: {twice[:5]}.")
    if by_name:
        return match_names(space.names, chosen, what)
    if outside := [value for value in chosen if not 0 <= value < space.dim]:
        raise ValueError(f"{what} must lie between 0 and {space.dim - 1}, got {outside[:5]}.")
    return chosen
