"""What is saved belongs to a model, a loss, data and options; others are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import Using
from torch import Tensor, nn

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator, write_factors
from curvlinops.influence import GradientStore
from curvlinops.support.rng import GeneratorStates


class Scaled(nn.Module):
    """A loss of the user's own, whose options are no numbers, strings or tensors."""

    def __init__(self, options: Any):
        super().__init__()
        self.options = options

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        scale = self.options() if callable(self.options) else np.asarray(self.options).sum()
        return float(scale) * nn.functional.cross_entropy(output, target)


@dataclass
class Item:
    """An X of tensors and numbers."""

    x: Any
    scale: float = 1.0


class World:
    """A model, a loss and data; changes make others of the same shapes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.activation, self.dropout = torch.tanh, 0.0
        self.layers = {"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 3)}
        self.model = Using(self.forward, **self.layers).double()
        self.model.register_buffer("shift", torch.zeros(4).double())
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(draw(*p.shape))
        self.x = [torch.randint(8, (n, 5), generator=generator) for n in (4, 3)]
        self.y = [torch.randint(3, (n, 5), generator=generator) for n in (4, 3)]
        self.wrap: Callable[[Tensor], Any] = lambda x: x
        self.unwrap: Callable[[Any], Tensor] = lambda X: X
        self.loss, self.options, self.columns = nn.CrossEntropyLoss(), dict[str, Any](), draw(51, 2)

    def forward(self, m: Any, X: Any) -> Tensor:
        h = self.activation(m.embed(self.unwrap(X)) + m.shift)
        return m.head(nn.functional.dropout(h, self.dropout)).flatten(0, 1)

    def build(self, cls: type) -> Any:
        data = [(self.wrap(x), y.flatten()) for x, y in zip(self.x, self.y, strict=True)]
        kfac = {"fisher_type": "empirical"} if cls is KFACLinearOperator else {}
        reduction = None if isinstance(self.loss, nn.CrossEntropyLoss) else "mean"
        options = {"check_deterministic": False, "reduction": reduction} | kfac | self.options
        return cls(self.model, self.loss, list(self.model.parameters()), data, **options)


def set_to(**values: Any) -> Callable[[World], None]:
    """Return what sets attributes of a world."""
    return lambda w: vars(w).update(values)


def fill(name: str, index: Any = ...) -> Callable[[World], Any]:
    """Return what changes numbers of a parameter or buffer in place."""
    return lambda w: w.model.state_dict()[name][index].add_(0.1)


def with_x(wrap: Callable, unwrap: Callable) -> Callable[[World], None]:
    return set_to(wrap=wrap, unwrap=unwrap)


STRINGS = with_x(
    lambda x: ["".join(map(str, row.tolist())) for row in x],
    lambda X: torch.tensor([list(map(int, row)) for row in X]),
)
ARRAYS = with_x(lambda x: Item(x.numpy()), lambda X: torch.as_tensor(X.x))
COUNTED = set_to(options={"batch_size_fn": lambda X: len(getattr(X, "x", X))})


def scaled(w: World, scale: float) -> None:
    w.wrap, w.unwrap = (lambda x: Item(x, scale)), lambda X: X.x
    w.activation = lambda h: torch.tanh(h * scale)


#: What makes the world that is saved of a plain one, and another one of that.
OTHERS: dict[str, tuple[list[Callable], Callable]] = {
    "activation": ([], set_to(activation=torch.sigmoid)),
    "a parameter": ([], fill("head.bias", 0)),
    "a row that the first batch does not use": ([], fill("embed.weight", 8)),
    "a buffer": ([], fill("shift")),
    "data": ([], lambda w: w.x.reverse() or w.y.reverse()),
    "a label": ([], lambda w: w.y[0].copy_((w.y[0] + 1) % 3)),
    "strings": ([STRINGS, COUNTED], lambda w: w.x[0].add_(1)),
    "NumPy": ([ARRAYS, COUNTED], lambda w: w.x.__setitem__(0, (w.x[0] + 1) % 8)),
    "a number in X": ([partial(scaled, scale=1.0), COUNTED], partial(scaled, scale=3.0)),
    "weights": ([], set_to(loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]).double()))),
    "smoothing": ([], set_to(loss=nn.CrossEntropyLoss(label_smoothing=0.1))),
    "ignored": ([], set_to(loss=nn.CrossEntropyLoss(ignore_index=7))),
    "list": ([set_to(loss=Scaled([1.0]))], set_to(loss=Scaled([0.3]))),
    "NumPy number": ([set_to(loss=Scaled(np.float32(1)))], set_to(loss=Scaled(np.float32(0.3)))),
    "function": ([set_to(loss=Scaled(lambda: 1.0))], set_to(loss=Scaled(lambda: 0.3))),
    "sample": ([], set_to(options={"batch_size_fn": lambda X: X.numel()})),
    "reduction": ([], set_to(loss=nn.CrossEntropyLoss(reduction="sum"))),
}


def by_file(one: World, two: World, folder: Path) -> Any:
    one.build(KFACLinearOperator).save(folder / "factors")
    K = two.build(KFACLinearOperator)
    K.load(folder / "factors")
    return K.trace()


def by_parts(one: World, two: World, folder: Path) -> Any:
    for world in (one, two):
        K = write_factors(world.build(KFACLinearOperator), folder / "factors", parts=2)
    return K.trace()


def by_merging(one: World, two: World, folder: Path) -> Any:
    K = two.build(KFACLinearOperator)
    K.merge(one.build(KFACLinearOperator))
    return K.trace()


def by_scores(one: World, two: World, folder: Path) -> Any:
    for world in (one, two):
        found = world.build(PerSampleGradientLinearOperator).scores(
            world.columns, out=folder / "scores"
        )
    return torch.tensor(np.asarray(found))


def by_gradients(one: World, two: World, folder: Path) -> Any:
    for world in (one, two):
        rows = world.build(PerSampleGradientLinearOperator)
        store = GradientStore.write(rows, folder / "gradients", rank=2)
    return store.scores(rows)


WAYS = {
    "gradients": by_gradients,
    "file": by_file,
    "parts": by_parts,
    "merge": by_merging,
    "scores": by_scores,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name: str, way: str, tmp_path: Path):
    prepare, change = OTHERS[name]
    one, two = World(), World()
    for world in (one, two):
        for step in prepare:
            step(world)
    change(two)
    if way == "merge" and name in ("data", "a label", "strings", "NumPy"):
        WAYS[way](one, two, tmp_path)  # data of its own
        return
    states = GeneratorStates()
    with pytest.raises(ValueError, match=r"differs in (?!.*differs)") as error:
        WAYS[way](one, two, tmp_path)
    assert len(str(error.value)) < 500
    assert states.are_current()


#: What makes the same of a world, in other words or with other rounding.
SAME: dict[str, Callable[[World], Any]] = {
    "nothing": lambda w: None,
    "another module": lambda w: setattr(w, "loss", Scaled((0.5, 0.5))),
    "rounded": lambda w: w.model.head.weight.data.mul_(1 + 1e-9),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("name", SAME)
def test_the_same_is_taken(name: str, dropout: float, way: str, tmp_path: Path):
    """Also with dropout, of which each evaluation takes the same draw."""
    one, two = World(), World()
    for world in (one, two):
        set_to(loss=Scaled([1.0]), dropout=dropout)(world)
    SAME[name](two)
    found = WAYS[way](one, two, tmp_path)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("others", [[0, 2], [1, 0]])
def test_other_rows(others: list[int], tmp_path: Path):
    """The rows are compared, not their places among those of the batches in use."""
    one, two = World(), World()
    one.options, two.options = {"subsampling": [0, 1]}, {"subsampling": others}
    with pytest.raises(ValueError, match="differs in subsampling"):
        by_scores(one, two, tmp_path)


def test_one_vector_and_one_column(tmp_path: Path):
    one, two = World(), World()
    one.columns, two.columns = one.columns[:, :1], two.columns[:, 0]
    with pytest.raises(ValueError, match="differs in one vector"):
        by_scores(one, two, tmp_path)
