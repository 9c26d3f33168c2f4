"""Kronecker factors and squares in a basis of each class of gradients, against plain sums."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, unfold

from curvlinops.layers.embedding import EmbeddingGradient
from curvlinops.layers.factors import (
    FactoredGradient,
    KroneckerShape,
)
from curvlinops.layers.gradients import Entries
from curvlinops.layers.inputs import Patches
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.patches import Window
from curvlinops.operators.kfac.blocks import MOMENT
from curvlinops.operators.kfac.eigenbasis import Basis
from curvlinops.operators.kfac.moments import gradient_factor, input_factor

VECTORS, SAMPLES = 2, 3


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class SameInputs(FactoredGradient):
    """A user's class: inputs ``[N, I]`` are the same at all positions of ``[V, N, S, O]``."""

    def __init__(self, x: Tensor, g: Tensor):
        self.x, self.g = x, g
        self.num_vectors, self.num_samples = g.shape[:2]
        self.entries = Entries.all([g.shape[-1], x.shape[-1]])

    @property
    def kronecker_shape(self) -> KroneckerShape:
        return KroneckerShape(1, *self.entries.shape, self.entries.view)

    def values(self, samples: slice) -> Tensor:
        return torch.einsum("vnso,ni->vnoi", self.g[:, samples], self.x[samples])

    def to(self, dtype: torch.dtype) -> "SameInputs":
        return SameInputs(self.x.to(dtype), self.g.to(dtype))

    def output_gradients(self) -> Tensor:
        return self.g.unsqueeze(3)

    def inputs(self) -> Tensor:
        return self.x[:, None, None].expand(-1, self.g.shape[2], -1, -1)


class Case(NamedTuple):
    """A gradient, its inputs ``[N, S, G, I]``, output gradients, and which inputs count."""

    gradient: FactoredGradient
    x: Tensor
    g: Tensor
    counts: Tensor | None = None


def products(positions: int, groups: int, outputs: int = 3, inputs: int = 4) -> Case:
    x, g = (
        draw(SAMPLES, positions, groups, inputs),
        draw(VECTORS, SAMPLES, positions, groups, outputs),
    )
    return Case(OuterProducts(x, g, Entries.all([groups, outputs, inputs])), x, g)


def patches(groups: int, vectors: int = VECTORS, channels: int = 2) -> Case:
    images = draw(SAMPLES, 2, groups * channels, 5, 4)
    window = Window.of(images[0], (3, 2), 1, [(1, 0), (1, 1)], 1, groups)
    padded = torch.nn.functional.pad(images.flatten(0, 1), (1, 1, 1, 0))
    x = unfold(padded, (3, 2)).reshape(SAMPLES, 2, groups, channels * 6, -1)
    x = x.movedim(-1, 2).flatten(1, 2)
    g = draw(vectors, SAMPLES, x.shape[1], groups, 3)
    entries = Entries.all([groups, 3, x.shape[-1]])
    return Case(OuterProducts(Patches(images, window), g, entries), x, g)


def lookups(padding: int) -> Case:
    indices = torch.tensor([[0, 2, 2, 1], [4, 4, 4, 4], [1, 1, 1, 1]])
    counts = indices != padding
    g = draw(VECTORS, SAMPLES, 4, 3) * counts.unsqueeze(-1)
    x = (one_hot(indices, 5) * counts.unsqueeze(-1)).double().unsqueeze(2)
    gradient = EmbeddingGradient(indices, g, Entries.all([5, 3]), padding)
    return Case(gradient, x, g.unsqueeze(3), counts)


def same_inputs(positions: int) -> Case:
    x, g = draw(SAMPLES, 4), draw(VECTORS, SAMPLES, positions, 3)
    return Case(SameInputs(x, g), x[:, None, None].expand(-1, positions, -1, -1), g.unsqueeze(3))


#: The uses of one parameter.
CASES: dict[str, Callable[[], list[Case]]] = {
    "one position": lambda: [products(1, 1)],
    "two positions": lambda: [products(2, 1)],
    "positions": lambda: [products(30, 1)],
    "groups": lambda: [products(2, 2)],
    "groups and positions": lambda: [products(30, 2)],
    "two uses": lambda: [products(2, 2), products(3, 2)],
    "no positions": lambda: [products(0, 1)],
    "patches": lambda: [patches(1)],
    "patches of one vector": lambda: [patches(1, vectors=1, channels=8)],
    "patches in groups": lambda: [patches(2)],
    "two uses of patches": lambda: [patches(2), patches(2)],
    "patches and products": lambda: [patches(1), products(2, 1, inputs=12)],
    "lookups": lambda: [lookups(-1)],
    "lookups with padding": lambda: [lookups(4)],
    "two lookups": lambda: [lookups(4), lookups(4)],
    "a user's class": lambda: [same_inputs(3)],
    "two uses of a user's class": lambda: [same_inputs(3), same_inputs(1)],
}


#: With and without a bias beside the weight, which lookups do not have.
JOINT = [(name, bias) for name in CASES for bias in (False, True) if not (bias and "look" in name)]


def dense(name: str, bias: bool = False) -> tuple[list[FactoredGradient], Tensor, Tensor, Tensor]:
    """Return gradients, and inputs, output gradients and counts of all uses side by side."""
    torch.manual_seed(0)
    cases = CASES[name]()
    x, g = torch.cat([case.x for case in cases], 1), torch.cat([case.g for case in cases], 2)
    counts = [
        torch.ones(case.x.shape[:2]) if case.counts is None else case.counts for case in cases
    ]
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1) if bias else x
    return [case.gradient for case in cases], x, g, torch.cat(counts, 1).double()


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("name, bias", JOINT)
def test_input_factors(name: str, reduce: bool, bias: bool, diagonal: bool, masked: bool):
    gradients, x, _, counts = dense(name, bias)
    masks: list[Tensor | None] = [None] * len(gradients)
    if masked:
        mask = torch.rand(counts.shape) < 0.5
        masks = list(mask.split([gradient.inputs().shape[1] for gradient in gradients], 1))
        x, counts = x * mask[..., None, None], counts * mask
    if reduce:
        numbers = counts.sum(1, keepdim=True)
        x = x.sum(1, keepdim=True) / numbers.clamp(min=1)[..., None, None]
        counts = (numbers > 0).double()
    expected = torch.einsum("nsgi,nsgj->gij", x, x)
    if diagonal or gradients[0].kronecker_shape.one_hot_inputs:
        expected = expected.diagonal(dim1=1, dim2=2)
    total, count = input_factor(gradients, masks, reduce, bias, diagonal)
    close(total, expected)
    assert float(count) == float(counts.sum())


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradient_factors(name: str, reduce: bool, diagonal: bool):
    gradients, _, g, _ = dense(name)
    g = g.sum(2, keepdim=True) if reduce else g
    expected = torch.einsum("vnsgo,vnsgp->gop", g, g)
    expected = expected.diagonal(dim1=1, dim2=2) if diagonal else expected
    close(gradient_factor(gradients, reduce, diagonal), expected)


@pytest.mark.parametrize("num", [1, 3, 40])
@pytest.mark.parametrize("name", CASES)
def test_products_with_columns(name: str, num: int):
    for gradient in dense(name)[0]:
        columns = draw(num, *gradient.shape)
        rows = gradient.rows(slice(None)).flatten(2)
        expected = rows @ columns.flatten(1).T
        close(gradient.products(columns), expected)
        positions = gradient.products_by_position(columns)
        if positions is not None:
            close(positions.sum(2), expected)


def orthogonal(groups: int, size: int) -> Tensor:
    return torch.linalg.qr(draw(groups, size, size))[0]


@pytest.mark.parametrize("standard", ["neither", "outputs", "inputs"])
@pytest.mark.parametrize("name, bias", JOINT)
def test_squares_in_a_basis(name: str, bias: bool, standard: str):
    gradients, x, g, _ = dense(name, bias)
    shape = gradients[0].kronecker_shape
    outputs = None if standard == "outputs" else orthogonal(shape.groups, shape.outputs)
    inputs = None if standard == "inputs" else orthogonal(shape.groups, shape.inputs + bias)
    expected = torch.einsum("vnsgo,nsgi->vngoi", g, x)
    expected = expected if outputs is None else outputs.mT @ expected
    expected = expected if inputs is None else expected @ inputs
    parts = Basis(shape, outputs, inputs, bias).of_gradients(gradients)
    close(sum(part[MOMENT] for part in parts), expected.square().sum((0, 1)))


def test_the_basis_of_a_transposed_use():
    torch.manual_seed(0)
    x, g = draw(SAMPLES, 2, 1, 3), draw(VECTORS, SAMPLES, 2, 1, 3)
    view = Entries.all([3, 3]).view
    transposed = view.undo_permutation((3, 3), (1, 0))
    gradient = OuterProducts(x, g, Entries(transposed, (3, 3)))
    outputs, inputs = orthogonal(1, 3), orthogonal(1, 3)
    basis = Basis(KroneckerShape(1, 3, 3, view), outputs, inputs, False)
    rows = torch.einsum("vnsgo,nsgi->vngio", g, x)
    parts = basis.of_gradients([gradient], is_alike=False)
    found = sum(part[MOMENT] for part in parts)
    close(found, (outputs.mT @ rows @ inputs).square().sum((0, 1)))
