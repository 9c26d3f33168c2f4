"""What a captured forward pass says of gradients, use by use."""

from collections.abc import Callable
from typing import NamedTuple

from curvlinops.layers.forms import PerSampleGradient


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
        open: Whether it is not known to which samples rows without a gradient belong.
        unsorted: Whether the gradients are those of one sample that has all rows of the batch,
            since it is not known to which samples they belong.
        shift: See ``Use``.
        elsewhere: See ``Use``.
    """

    key: Key
    name: str
    form: PerSampleGradient
    open: bool
    unsorted: bool
    shift: float | None
    elsewhere: bool
