"""The vector space of parameters that are sharded over processes."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace, dtype_of_vectors
from curvlinops.support.norms import double_norm
from curvlinops.support.torch_internals import distributed_tensors
from curvlinops.team.layout import GatheredColumns, ShardLayout
from curvlinops.team.team import team_of

_NEED_NONE = "Products, inverses, powers, traces and log-determinants of KFAC's blocks need none."


class ShardedSpace(ParameterSpace):
    """The vector space of parameters of which some are sharded over the same processes.

    Each process has its parts of the vectors: those of the sharded parameters, and all of the
    others. Vectors are lists or dictionaries of tensors, which are DTensors with the placements of
    the parameters for the sharded ones. Inner products add up over processes.
    """

    in_parts = True

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        layouts: Mapping[str, ShardLayout],
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.layouts = dict(layouts)
        self.team = team_of(next(iter(layouts.values())).group)
        super().__init__(shapes, dtype, device)

    def _shapes_of_parts(self) -> dict[str, tuple[int, ...]]:
        lengths = {n: x.part.stop - x.part.start for n, x in self.layouts.items()}
        return {
            name: (lengths[name], *shape[1:]) if name in lengths else shape
            for name, shape in self.shapes.items()
        }

    # --- vectors

    def parts(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's parts of vectors, given tensors as users pass them."""
        parts = {}
        for name, value in vectors.items():
            layout, is_spread = self.layouts.get(name), isinstance(value, distributed_tensors())
            if layout is None:
                if is_spread:
                    raise TypeError(
                        f"The vector for parameter '{name}' is a DTensor, but the parameter is not "
                        "sharded. Pass a whole tensor."
                    )
                parts[name] = value
                continue
            if not is_spread:
                raise TypeError(
                    f"The vector for parameter '{name}' is a whole tensor, but the parameter is "
                    "sharded. Pass a DTensor with its placements, such as torch.randn_like(param), "
                    "param.grad, or torch.distributed.tensor.distribute_tensor(x, "
                    "param.device_mesh, param.placements)."
                )
            if value.device_mesh != layout.mesh or tuple(value.placements) != layout.placements:
                raise ValueError(
                    f"The vector for parameter '{name}' has the placements "
                    f"{list(value.placements)}, the parameter {list(layout.placements)}. Call "
                    "redistribute(param.device_mesh, param.placements) on it."
                )
            parts[name] = value.to_local()
        return parts

    def wholes(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return vectors as users get them, given this process's parts, ``[*part(, K)]``."""
        return {n: self.layouts[n].whole(x) if n in self.layouts else x for n, x in parts.items()}

    def check_whole(self, what: str, remedy: str = _NEED_NONE) -> None:
        """Refuse a quantity that needs whole vectors."""
        raise TypeError(f"Parameters are sharded, so that no process has {what}. {remedy}")

    def vectors(self, X: Tensor) -> dict[str, Tensor]:
        """Return vectors as users get them, by the names of the parameters."""
        return self.wholes(self.split_parts(X))

    @property
    def whole(self) -> ParameterSpace:
        """The space of whole vectors."""
        return ParameterSpace(self.shapes, self.dtype, self.device)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Return whole tensors ``[K, *shape]`` for a parameter; all processes do so together."""
        if name not in self.layouts:
            return part
        return self.team.joined(part.movedim(0, -1), self.shapes[name][0]).movedim(-1, 0)

    def gathered(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return whole vectors of which each tensor is gathered when it is read, and not kept."""
        return GatheredColumns(columns, self.gather)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's parts of tensors ``[K, *shape]`` for a parameter."""
        return whole[:, self.layouts[name].part] if name in self.layouts else whole

    def draw(self, num: int, fill: Callable[[Tensor], Any]) -> Tensor:
        """Return random columns, the same for any number of processes."""
        columns = self.empty(num)
        for k in range(num):
            for name, column in self.views(columns[k : k + 1]).items():
                whole = columns.new_empty(prod(self.shapes[name]))
                fill(whole)
                layout, whole = self.layouts.get(name), whole.view(self.shapes[name])
                column[0] = whole if layout is None else whole[layout.part]
        return columns

    # --- what depends on all entries of vectors, which are columns [K, dim]

    def norms(self, columns: Tensor) -> Tensor:
        """Return the Euclidean norms of K vectors, ``[K]``, in float64."""
        return self.team.add(double_norm(self._counted(columns), 1).square()).sqrt()

    def qr(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return orthonormal columns Q, and triangular R, with ``columns.T = Q.T @ R``.

        Each process decomposes its part, and all of them the triangular factors of all parts
        (TSQR, Demmel et al., Communication-optimal parallel and sequential QR and LU
        factorizations, SIAM J. Sci. Comput. 2012).
        """
        K, team = len(columns), self.team
        Q, R = torch.linalg.qr(self._counted(columns).T)
        own = columns.new_zeros(K, K)
        own[: len(R)] = R
        Q_of_all, R = torch.linalg.qr(team.joined(own, team.size * K))
        start = team.rank * K
        Q = (Q @ Q_of_all[start : start + Q.shape[1]]).T.contiguous()
        if self._unsharded:
            first = torch.cat([Q[:, part] for part in self._unsharded], 1)
            team.broadcast(first, 0)
            sizes = [part.stop - part.start for part in self._unsharded]
            for part, numbers in zip(self._unsharded, first.split(sizes, 1), strict=True):
                Q[:, part] = numbers
        return Q, R

    @cached_property
    def _unsharded(self) -> list[slice]:
        """The entries of parameters that all processes have."""
        return [self.slice(name) for name in self.shapes if name not in self.layouts]

    def _counted(self, columns: Tensor) -> Tensor:
        """Return vectors in which one process alone has the entries that all have."""
        if not self._unsharded or self.team.rank == 0:
            return columns
        columns = columns.clone()
        for part in self._unsharded:
            columns[..., part] = 0.0
        return columns

    # --- other spaces

    def _like(
        self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> ParameterSpace:
        """Return a space of some of the tensors, of which perhaps none are sharded."""
        layouts = {name: layout for name, layout in self.layouts.items() if name in shapes}
        if not layouts:
            return super()._like(shapes, dtype, device)
        return ShardedSpace(shapes, layouts, dtype, device)


def space_of(params: Mapping[str, Tensor]) -> ParameterSpace:
    """Return the vector space of parameters, of which some may be sharded."""
    spread = distributed_tensors()
    layouts = {n: ShardLayout.of(x) for n, x in params.items() if isinstance(x, spread)}
    if not layouts:
        return ParameterSpace.of(params)
    shapes = {name: tuple(x.shape) for name, x in params.items()}
    device = next(iter(params.values())).device
    return ShardedSpace(shapes, layouts, dtype_of_vectors(params), device)
