"""Rows of tables, of which the core tests have a part."""

from collections.abc import Iterable
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
