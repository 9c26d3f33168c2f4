"""Parts of parameters: the entries that a view has, and whether one occurs twice."""

from itertools import product

import pytest
import torch
from torch import Tensor

from curvlinops.layers.place import Place, are_disjoint

LEAF = torch.arange(24.0).reshape(4, 6)

#: Views, and whether no entry occurs twice.
VIEWS = {
    "all": (LEAF, True),
    "transposed": (LEAF.T, True),
    "an entry": (LEAF[2, 3], True),
    "rows": (LEAF[1:3], True),
    "columns": (LEAF[:, 1:3], True),
    "steps": (LEAF[::2, ::3], True),
    "empty": (LEAF[:0], True),
    "expanded": (LEAF[:, :1].expand(4, 3), False),
    "axis of length one": (LEAF[:, :1].expand(4, 1), True),
    "windows": (LEAF.flatten().unfold(0, 3, 1), False),
    "windows side by side": (LEAF.flatten().unfold(0, 3, 3), True),
    "as many windows as entries": (LEAF.flatten().as_strided((2, 12), (1, 1)), False),
    "interleaved": (LEAF.flatten().as_strided((2, 3), (3, 2)), True),
    "interleaved, and one twice": (LEAF.flatten().as_strided((3, 4), (3, 2)), False),
    "diagonal": (LEAF.diagonal(), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str):
    view, distinct = VIEWS[name]
    place = Place.of(view, LEAF)
    assert (place is not None) == distinct
    entries = view.flatten().long()
    assert distinct == (len(entries.unique()) == len(entries))
    if distinct:
        assert torch.equal(place.entries(torch.device("cpu")), entries)
        whole = torch.equal(entries.sort().values, torch.arange(24))
        assert place.is_whole(24) == whole


@pytest.mark.parametrize(
    ("first", "second"), list(product([n for n in VIEWS if VIEWS[n][1]], repeat=2))
)
def test_disjoint(first: str, second: str):
    def entries(view: Tensor) -> set[int]:
        return set(view.flatten().long().tolist())

    views = VIEWS[first][0], VIEWS[second][0]
    places = [Place.of(view, LEAF) for view in views]
    assert are_disjoint(places) == (not entries(views[0]) & entries(views[1]))


def test_no_part():
    assert Place.of(LEAF.clone(), LEAF) is None
    assert Place.of(LEAF, LEAF.T) is None
