"""Parts of parameters that layers use: views, and copies of views."""

from collections.abc import Callable
from itertools import combinations_with_replacement

import pytest
import torch
from sample_gradients import check_rows
from torch import Tensor, nn

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.structured.layout import ParameterView, are_disjoint, with_strides

LEAF = torch.arange(24.0).reshape(4, 6)

#: Views, and whether their axes are nested, so that no entry occurs twice.
VIEWS = {
    "all": (LEAF, True),
    "transposed": (LEAF.T, True),
    "an entry": (LEAF[2, 3], True),
    "rows": (LEAF[1:3], True),
    "columns": (LEAF[:, 1:3], True),
    "steps": (LEAF[::2, ::3], True),
    "expanded": (LEAF[:, :1].expand(4, 3), False),
    "axis of length one": (LEAF[:, :1].expand(4, 1), True),
    "windows": (LEAF.flatten().unfold(0, 3, 1), False),
    "windows side by side": (LEAF.flatten().unfold(0, 3, 3), True),
    "as many windows as entries": (LEAF.flatten().as_strided((2, 12), (1, 1)), False),
    "interleaved": (LEAF.flatten().as_strided((2, 3), (3, 2)), False),
    "diagonal": (LEAF.diagonal(), True),
}


def view_of(x: Tensor) -> ParameterView | None:
    return with_strides("w", tuple(x.shape), x.stride(), x.storage_offset())


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str):
    view, is_nested = VIEWS[name]
    found = view_of(view)
    assert (found is not None) == is_nested
    if is_nested:
        vector = LEAF.reshape(1, -1)
        assert torch.equal(found.of(vector).flatten(), view.flatten())
        assert torch.equal(found.in_order.of(vector).flatten(), view.flatten().sort().values)
        spread = found.spread(view.reshape(1, -1), 24)
        assert torch.equal(spread, vector * torch.isin(vector, view.flatten()))


@pytest.mark.parametrize(
    ("first", "second"),
    list(combinations_with_replacement([n for n in VIEWS if VIEWS[n][1]], 2)),
)
def test_disjoint(first: str, second: str):
    views = VIEWS[first][0], VIEWS[second][0]
    found = [view_of(view) for view in views]
    assert are_disjoint(found) == (not torch.isin(*(view.flatten() for view in views)).any())


#: Parts of a parameter, given a copy somewhere on the way.
PARTS = {
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
    "selected by a tensor": lambda w, copy: copy(w)[torch.tensor(1)],
    "one more axis": lambda w, copy: copy(w)[None].mT,
    "squeezed": lambda w, copy: copy(w[:1]).squeeze(0).t(),
    "without some axes of length one": lambda w, copy: copy(w[:1, :, :1]).squeeze((0, -1)),
    "flat": lambda w, copy: copy(w.flatten(1)),
    "in another shape": lambda w, copy: copy(w).reshape(-1)[4:10].view(2, 3),
    "in another order and shape": lambda w, copy: copy(w).mT.reshape(2, 12),
}
COPIES = {
    "none": lambda x: x,
    "cast": Tensor.float,
}
#: Functions that are no views, or have entries twice.
FUNCTIONS = {
    "twice": lambda w: 2 * w.float(),
    "sine": lambda w: w.float().sin().double(),
    "written to": lambda w: w.clone().mul_(2),
    "triangle": lambda w: w.clone().tril(),
    "index": lambda w: w.clone()[[1, 0]],
    "side by side": lambda w: torch.cat([w, w]).float(),
    "expanded": lambda w: w.float()[:, :1].expand(2, 3, 4),
}


def operators(part: Callable[[Tensor], Tensor]) -> tuple:
    """Return the operators of a model that multiplies with a part, and the rows."""

    def model(params: dict[str, Tensor], X: Tensor) -> Tensor:
        w = part(params["w"])
        out = torch.tensordot(X[:, : len(w)].to(w.dtype), w, 1)
        return out.reshape(len(X), -1).double().sin()

    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 3, 4, generator=generator).double()
    X = torch.randn(5, 4, generator=generator).double()
    data, loss = [(X, torch.zeros_like(model({"w": w}, X)))], nn.MSELoss(reduction="sum")

    def loss_of(w: Tensor) -> Tensor:
        return model({"w": w}, X).square().sum(1)

    rows = torch.autograd.functional.jacobian(loss_of, w).flatten(1)
    return (
        PerSampleGradientLinearOperator(model, loss, {"w": w}, data),
        lambda: KFACLinearOperator(model, loss, {"w": w}, data, fisher_type="type-2"),
        rows,
    )


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str, copy: str):
    gradients, kfac, rows = operators(lambda w: PARTS[name](w, COPIES[copy]))
    check_rows(gradients, rows, 1e-6, covered=True)
    assert kfac().report()[0].structure == "kronecker"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str):
    gradients, kfac, rows = operators(FUNCTIONS[name])
    check_rows(gradients, rows, 1e-6, covered=True)
    with pytest.raises(NotImplementedError, match="a layer uses a function of it"):
        kfac().report()


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
def test_casts_to_complex_numbers_are_functions():
    gradients, _, rows = operators(lambda w: w.to(torch.complex64).mT.to(torch.float64))
    torch.testing.assert_close(gradients.dense(), rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_a_slice_that_is_used_twice_and_transposed(approx: str):
    """Its block is that of a parameter that has the slice alone."""
    w, X = torch.randn(5, 4).double(), torch.randn(7, 4).double()

    def block(w: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        def model(params: dict[str, Tensor], X: Tensor) -> Tensor:
            own = part(params["w"])
            return torch.tanh(X @ own.T) @ own

        options = {"fisher_type": "type-2", "kfac_approx": approx}
        K = KFACLinearOperator(model, nn.MSELoss(), {"w": w}, [(X, X.cos())], **options)
        return K @ torch.eye(K.shape[1]).double()

    found = block(w, lambda w: w[1:4])
    torch.testing.assert_close(found[4:16, 4:16], block(w[1:4].clone(), lambda w: w))
    assert torch.count_nonzero(found[[*range(4), *range(16, 20)]]) == 0
