"""What a captured forward pass says of gradients, use by use."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from curvlinops.layers.forms import Form


class Key(NamedTuple):
    """Identifies a use from one batch to the next.

    Attributes:
        index: How often the function was called before with a parameter.
        place: The argument.
        call: The function.
        names: The parameters.
    """

    index: int
    place: int | str
    call: Callable
    names: tuple[str, ...]


class Part(NamedTuple):
    """The gradients that a use contributes to a parameter.

    Attributes:
        key: The use.
        name: The parameter.
        form: The gradients.
        rows: How many rows of the layer's output belong to each sample, ``[N]``; ``None`` if all
            samples have as many.
        open: Whether it is not known to which samples rows without a gradient belong.
        shift: See ``Use``.
        elsewhere: See ``Use``.
    """

    key: Key
    name: str
    form: Form
    rows: Tensor | None
    open: bool
    shift: float | None
    elsewhere: bool
