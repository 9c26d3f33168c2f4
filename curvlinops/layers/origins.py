"""Tensors that are functions of parameters, such as parts, and gradients with respect to these."""

from collections.abc import Mapping

from torch import Tensor

from curvlinops.autodiff.backward import in_chunks, pull_columns
from curvlinops.layers.forms import Form, Mapped, Within
from curvlinops.layers.outer import Arrangement, Outer
from curvlinops.layers.place import Place
from curvlinops.layers.views import view_of
from curvlinops.support.autograd_graph import graph_nodes, leaf_variables

#: Those who ask know how many vectors the memory allows.
ANY_NUMBER = 2**31


def origins(tensor: Tensor, by_id: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the parameters of which a tensor is a function."""
    if id(tensor) in by_id:
        return {by_id[id(tensor)]: tensor}
    found = leaf_variables(graph_nodes(tensor))
    return {by_id[id(leaf)]: leaf for leaf in found if id(leaf) in by_id}


def on_parameter(form: Form, tensor: Tensor, leaf: Tensor) -> Form:
    """Return gradients with respect to a parameter of which a layer used a function."""
    view = view_of(tensor, leaf)
    if view is leaf:
        return form
    place = Place.of(view, leaf)
    if place is not None and place.is_whole(leaf.numel()):
        order = sorted(range(view.ndim), key=lambda axis: -view.stride(axis))
        arrangement = Arrangement.of(view.shape, order)
        if isinstance(form, Outer):
            return form.arranged(arrangement, leaf.shape)

        def arrange(rows: Tensor) -> Tensor:
            return arrangement.apply(rows, 2).reshape(*rows.shape[:2], *leaf.shape)

        return Mapped(form, arrange, leaf.shape)

    if place is not None:
        return Within(form, place, leaf.shape)

    chunks = in_chunks(lambda u: pull_columns({"": tensor}, u, {"": leaf}), ANY_NUMBER)

    def pull_back(rows: Tensor) -> Tensor:
        out = rows.new_empty(*rows.shape[:2], *leaf.shape)
        for places, part in chunks({"": rows.flatten(0, 1)}, {"": tensor.dtype}):
            out.flatten(0, 1)[places] = part[""].to(rows.dtype)
        return out

    return Mapped(form, pull_back, leaf.shape)
