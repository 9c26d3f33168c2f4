"""Rows of tables, of which the core tests have a part."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def core(rows: Iterable[Any], rest: Iterable[Any] = ()) -> list[Any]:
    """Return rows of the core tests, and the rest, marked ``extensive``.

    Args:
        rows: The rows: a value each, or a tuple for several parameters. Equal ones count once.
        rest: Further rows; those that are among the first ones do not count.
    """
    given = list(rows)
    rows = [row for number, row in enumerate(given) if row not in given[:number]]
    others = [row if isinstance(row, tuple) else (row,) for row in rest if row not in rows]
    return rows + [pytest.param(*row, marks=pytest.mark.extensive) for row in others]


def in_turns(rows: Iterable[Any], *others: Sequence[Any]) -> list[tuple]:
    """Return each row with an entry of each of the other tables, which take turns."""
    given = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [(*row, *(x[i % len(x)] for x in others)) for i, row in enumerate(given)]
