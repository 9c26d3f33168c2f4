"""Views of parameters, of which layers may use copies: in another dtype or order of memory."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.support.torch_internals import input_metadata

#: Nodes of graphs whose results have the same entries in the same places,
_COPIES = {"ToCopyBackward0", "CloneBackward0", "AliasBackward0"}

#: the same entries in another shape,
_RESHAPED = {
    *("ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
}

#: and some of the entries: the function, and what the node saves of its arguments.
_VIEWS = {
    "TBackward0": (torch.t,),
    "TransposeBackward0": (torch.transpose, "dim0", "dim1"),
    "PermuteBackward0": (torch.permute, "dims"),
    "SelectBackward0": (torch.select, "dim", "index"),
    "SliceBackward0": (torch.ops.aten.slice, "dim", "start", "end", "step"),
    "SplitBackward0": (torch.split, "split_size", "dim"),
    "SplitWithSizesBackward0": (torch.split, "split_sizes", "dim"),
    "UnbindBackward0": (torch.unbind, "dim"),
}


def view_of(tensor: Tensor, leaf: Tensor) -> Tensor:
    """Return the view of a parameter of which a tensor is a copy, if its graph shows that.

    Args:
        tensor: The parameter, or a function of it.
        leaf: The parameter.

    Returns:
        The view, in the parameter's dtype and memory; else, the tensor.
    """
    node, number, steps = tensor.grad_fn, tensor.output_nr, []
    while getattr(node, "variable", None) is not leaf:
        if node is None or node.name() not in _COPIES | _RESHAPED | _VIEWS.keys():
            return tensor
        steps.append((node, number))
        ((node, number),) = node.next_functions
    # the derivative of a cast between real and complex numbers is not one
    dtypes = {leaf.dtype, *(input_metadata(own, index).dtype for own, index in steps)}
    if tensor.device != leaf.device or any(dtype.is_complex for dtype in dtypes):
        return tensor
    with torch.no_grad():
        view = leaf
        for own, index in reversed(steps):
            view = _after(own, index, view)
    return view


def _after(node: Any, number: int, x: Tensor) -> Tensor:
    """Return the result of a node, without a copy where there can be a view."""
    name = node.name()
    if name in _COPIES:
        return x
    if name in _RESHAPED:
        return x.reshape(input_metadata(node, number).shape)
    function, *saved = _VIEWS[name]
    found = function(x, *(_signed(getattr(node, f"_saved_{argument}")) for argument in saved))
    return found if isinstance(found, Tensor) else found[number]


def _signed(saved: Any) -> Any:
    """Return numbers that a node saves, which it shows without their signs."""
    if isinstance(saved, int):
        return (saved + 2**63) % 2**64 - 2**63
    return saved if saved is None else [_signed(one) for one in saved]
