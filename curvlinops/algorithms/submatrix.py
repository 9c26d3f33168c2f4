"""Submatrices: selected rows and columns of a matrix."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, as_operator
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.support.arguments import as_integer

#: Rows or columns: integers, a slice of them, or names of parameters.
Selection = Sequence[int] | Sequence[str] | slice | Tensor | np.ndarray


class SubmatrixLinearOperator(TorchLinearOperator):
    """Selected rows and columns of a matrix, ``A[row_idxs][:, col_idxs]``.

    Products compute only these: an operator on data differentiates the model with respect to the
    parameters that have a row or column in the submatrix.

    Args:
        A: An operator, any other scipy LinearOperator, or a matrix.
        row_idxs: The rows, in this order: integers from 0 on, a slice, or names of parameters. With
            names, vectors may also be lists and dictionaries of tensors.
        col_idxs: The columns.

    Raises:
        ValueError: If a selection is empty, has other entries than integers or names, an index out
            of range, an unknown name, or an entry twice.
        TypeError: If a string is passed instead of a list.
    """

    def __init__(self, A: AnyMatrix, row_idxs: Selection, col_idxs: Selection):
        self.operator = as_operator(A)
        self.set_submatrix(row_idxs, col_idxs)

    def set_submatrix(self, row_idxs: Selection, col_idxs: Selection) -> None:
        """Choose other rows and columns of ``A``.

        Args:
            row_idxs: The rows, see the constructor.
            col_idxs: The columns.
        """
        A = self.operator
        rows = _select(A.codomain, row_idxs, "row_idxs")
        columns = _select(A.domain, col_idxs, "col_idxs")
        self._rows, self._columns = rows, columns
        super().__init__(columns.space, rows.space, A.self_adjoint and rows.equals(columns))

    def _description(self) -> list[str]:
        return [self.operator._formula()]

    def _apply(self, columns: Columns) -> Columns:
        inner = self._columns.embed(columns)
        return self._rows.cut(self.operator._apply_restricted(inner, self._rows.names))

    def _apply_adjoint(self, columns: Columns) -> Columns:
        inner = self._rows.embed(columns)
        return self._columns.cut(self.operator.T._apply_restricted(inner, self._columns.names))


class _Selection:
    """Selected coordinates of a space.

    Args:
        parent: The space.
        names: The tensors that contain the coordinates.
        positions: Indices of the coordinates in the flat vector of these tensors, ``[n]``; ``None``
            for all coordinates of the tensors.
    """

    def __init__(self, parent: ParameterSpace, names: list[str], positions: Tensor | None = None):
        self.names, self._positions = names, positions
        self._inner = parent.restricted(names)
        self.space = self._inner
        if positions is not None:
            self.space = ParameterSpace.flat(len(positions), parent.dtype, parent.device)

    @classmethod
    def of_indices(cls, parent: ParameterSpace, indices: Tensor) -> "_Selection":
        """Return the selection of coordinates ``[n]`` of the flat vector."""
        ends = torch.tensor([parent.slice(name).stop for name in parent.names], device="cpu")
        # the owner is the first tensor with a larger end, which is never an empty tensor
        owners = torch.bucketize(indices, ends, right=True)
        touched = owners.unique().tolist()
        names = [parent.names[owner] for owner in touched]
        inner = parent.restricted(names)
        shifts = torch.zeros(len(parent.names), dtype=torch.long, device="cpu")
        for owner, name in zip(touched, names, strict=True):
            shifts[owner] = inner.slice(name).start - parent.slice(name).start
        return cls(parent, names, (indices + shifts[owners]).to(parent.device))

    def equals(self, other: "_Selection") -> bool:
        """Return whether both have the same coordinates in the same order."""
        if self.names != other.names or self._positions is None or other._positions is None:
            return self.names == other.names and self._positions is other._positions
        return torch.equal(self._positions, other._positions)

    def embed(self, columns: Columns) -> Columns:
        """Return vectors of the tensors that are zero at all other coordinates."""
        if self._positions is None:
            return columns
        flat = self.space.join(columns)
        full = flat.new_zeros(len(flat), self._inner.dim)
        full[:, self._positions] = flat
        return self._inner.split(full)

    def cut(self, columns: Columns) -> Columns:
        """Return the selected coordinates of vectors of the tensors."""
        if self._positions is None:
            return columns
        return self.space.split(self._inner.join(columns)[:, self._positions])


def _select(space: ParameterSpace, idxs: Any, what: str) -> _Selection:
    if isinstance(idxs, str):
        raise TypeError(f"{what} must be a list, got a string. Pass [{idxs!r}].")
    if isinstance(idxs, slice):
        idxs = range(space.dim)[idxs]
    values = idxs.tolist() if hasattr(idxs, "tolist") else idxs
    values = list(values) if isinstance(values, Iterable) else None
    if not values:
        raise ValueError(f"{what} must be a list of at least one index or name, got {idxs!r}.")
    values = [value if (number := as_integer(value)) is None else number for value in values]
    kinds = {type(value) for value in values}
    if kinds == {str}:
        _check_names(space, values, what)
        return _Selection(space, values)
    if kinds != {int}:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(f"{what} must be integers, or names of parameters, got {names}.")
    indices = torch.tensor(values, device="cpu")
    outside = indices[(indices < 0) | (indices >= space.dim)]
    if len(outside):
        raise ValueError(
            f"{what} must lie between 0 and {space.dim - 1}, got {outside[:5].tolist()}."
        )
    found, counts = indices.unique(return_counts=True)
    if len(found) < len(indices):
        raise ValueError(f"{what} has indices twice: {found[counts > 1][:5].tolist()}.")
    return _Selection.of_indices(space, indices)


def _check_names(space: ParameterSpace, names: list[str], what: str) -> None:
    if space.is_flat:
        raise ValueError(
            f"{what} are names, but the matrix has no names: its vectors are flat. Pass integers."
        )
    unknown = [name for name in names if name not in space.shapes]
    if unknown:
        raise ValueError(f"{what} has unknown names {unknown}; there are {space.names}.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} has names twice: {twice}.")
