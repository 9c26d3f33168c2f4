"""Warnings that name the user's line."""

import contextlib
import sys
import warnings
from pathlib import Path

import scipy
import torch

#: Where warnings are not attributed to: this package, what calls it on behalf of the user, context
#: managers, and constructors that dataclasses generate.
_LIBRARIES = (
    *(str(Path(file).parent) for file in (Path(__file__).parent, scipy.__file__, torch.__file__)),
    contextlib.__file__,
    "<string>",
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that is attributed to the innermost line outside of the libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or what it is if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
