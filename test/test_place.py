"""Parts of parameters: the entries that a view has, and whether one occurs twice."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from curvlinops.layers.place import Place, are_disjoint
from curvlinops.layers.views import view_of

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


#: Parts of a parameter, given a copy somewhere on the way.
COPIED = {
    "all": lambda w, copy: copy(w),
    "first": lambda w, copy: copy(w[:1]),
    "transposed": lambda w, copy: copy(w.mT),
    "transposed after": lambda w, copy: copy(w).transpose(-1, -2),
    "in another order of memory": lambda w, copy: copy(w.mT).contiguous(),
    "permuted": lambda w, copy: copy(w).permute(-1, 0, 1),
    "without the last": lambda w, copy: copy(w)[:, :-1],
    "steps": lambda w, copy: copy(w[:, 1::2, ::3]),
    "narrowed": lambda w, copy: copy(copy(w)[1]).narrow(-1, 1, 2),
    "last": lambda w, copy: copy(w)[:, -1],
    "chunk": lambda w, copy: copy(w.chunk(2, -1)[1]),
    "split": lambda w, copy: copy(w).split([1, 2], -2)[1],
    "unbound": lambda w, copy: copy(w).unbind(-3)[1],
    "one more axis": lambda w, copy: copy(w)[None].mT,
    "squeezed": lambda w, copy: copy(w[:1]).squeeze(0).t(),
    "without all axes of length one": lambda w, copy: copy(w[:1, :, :1]).squeeze(),
    "without some": lambda w, copy: copy(w[:1, :, :1]).squeeze((0, -1)),
    "flat": lambda w, copy: copy(w.flatten(1)),
    "in another shape": lambda w, copy: copy(w).reshape(-1)[4:10].view(2, 3),
}
COPIES = {
    "cast": Tensor.double,
    "cast twice": lambda x: x.bfloat16().double(),
    "clone": Tensor.clone,
    "cast back": lambda x: x.double().float(),
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", COPIED)
def test_copies(name: str, copy: str):
    leaf = torch.arange(24.0).reshape(2, 3, 4).requires_grad_()
    tensor = COPIED[name](leaf, COPIES[copy])
    view = view_of(tensor, leaf)
    assert torch.equal(view.double(), tensor.double())
    assert view.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    assert view.dtype == leaf.dtype and (view is leaf) == (name == "all")
    entries = Place.of(view, leaf).entries(torch.device("cpu"))
    assert torch.equal(entries.double(), tensor.detach().double().flatten())


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
@pytest.mark.parametrize(
    "function",
    [
        lambda w: 2 * w.double(),
        lambda w: w.double().sin().float(),
        lambda w: w.double().mul_(2),
        lambda w: w.double().tril(),
        lambda w: w.double()[[1, 0]],
        lambda w: torch.cat([w, w]).double(),
        lambda w: w.to(torch.complex64),
        lambda w: w.to(torch.complex64).mT.to(torch.float64),
        lambda w: w.double()[:, :1].expand(2, 3, 4),
        lambda w: w.double().mT.reshape(2, 12),
    ],
)
def test_no_copies(function: Callable):
    leaf = torch.ones(2, 3, 4, requires_grad=True)
    assert Place.of(view_of(function(leaf), leaf), leaf) is None


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
def test_complex_casts_are_no_copies():
    leaf = torch.ones(2, 3, dtype=torch.complex128, requires_grad=True)
    tensor = leaf.to(torch.float64)
    assert view_of(tensor, leaf) is tensor
