"""Numbers of rows in a directory of files, for computations that may be killed and continued."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.support.files import read_parts, recorded, write_part
from curvlinops.support.keys import Key

#: A file is written after so many seconds. A process that is killed loses the rows since.
SECONDS = 30.0
#: A file is written when numbers of this many bytes wait for it.
_BYTES = 2**28


@recorded
class Rows(NamedTuple):
    """Numbers of some rows."""

    places: Tensor  # which of all rows they are, [n]
    values: Tensor  # the numbers, [n, *]


class RowFiles:
    """Numbers of all rows in files that never change; iteration yields each row once."""

    def __init__(self, directory: Path, num_rows: int, key: Key):
        self._directory, self._num_rows, self._key = directory, num_rows, key

    def __iter__(self) -> Iterator[Rows]:
        done, device = self._none(), torch.device("cpu")
        for part in read_parts(self._directory, (Rows, tuple), device, self._key):
            if isinstance(part.value, Rows):
                places, values = part.value
                new = ~done[places]
                done[places] = True
                yield part.value if bool(new.all()) else Rows(places[new], values[new])

    def fill(self, compute: Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Write the numbers of other rows, computed from which rows have numbers, ``[N]``."""
        done, new, written = self._none(), list[Rows](), monotonic()
        for part in self:
            done[part.places] = True
        if bool(done.all()):
            return
        try:
            for places, values in compute(done):
                new.append(Rows(places.cpu(), values.detach().cpu()))
                is_large = sum(x.values.nbytes for x in new) >= _BYTES
                if is_large or monotonic() - written >= SECONDS:
                    self._write(new)
                    written = monotonic()
        finally:
            self._write(new)  # also after Ctrl-C

    def _write(self, new: list[Rows]) -> None:
        if new:
            value = Rows(*(torch.cat(x) for x in zip(*new, strict=True)))
            write_part(self._directory, value, self._key)
            new.clear()

    def _none(self) -> Tensor:
        return torch.zeros(self._num_rows, dtype=torch.bool, device="cpu")
