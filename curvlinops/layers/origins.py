"""Tensors that are functions of parameters, such as parts, and gradients with respect to these."""

from collections.abc import Callable, Mapping

from torch import Tensor

from curvlinops.autodiff.backward import in_chunks, vjp_columns
from curvlinops.layers.capture import LookedUp
from curvlinops.layers.forms import (
    DenseGradient,
    PerSampleGradient,
    PulledBackGradient,
    SliceGradient,
)
from curvlinops.layers.outer import Arrangement, OuterProducts
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


def on_parameter(
    form: PerSampleGradient, tensor: Tensor, leaf: Tensor, lookup: LookedUp | None = None
) -> PerSampleGradient:
    """Return gradients with respect to a parameter of which a layer used a function.

    Args:
        form: The gradients with respect to the function's value.
        tensor: This value.
        leaf: The parameter.
        lookup: The lookup of which it is a function.
    """
    if lookup is not None and isinstance(form, DenseGradient):
        return on_parameter(_of_table(form, tensor, lookup), lookup.table, leaf)
    view = view_of(tensor, leaf)
    if view is leaf:
        return form
    place = Place.of(view, leaf)
    if place is not None and place.is_whole(leaf.numel()):
        order = sorted(range(view.ndim), key=lambda axis: -view.stride(axis))
        arrangement = Arrangement.of(view.shape, order)
        if isinstance(form, OuterProducts):
            return form.arranged(arrangement, leaf.shape)

        def arrange(rows: Tensor) -> Tensor:
            return arrangement.apply(rows, 2).reshape(*rows.shape[:2], *leaf.shape)

        return PulledBackGradient(form, arrange, leaf.shape)

    if place is not None:
        return SliceGradient(form, place, leaf.shape)

    return PulledBackGradient(form, _pull_back(tensor, leaf), leaf.shape)


def _pull_back(tensor: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what turns gradients ``[V, n, *tensor]`` into ``[V, n, *source]``."""
    if tensor is source:
        return lambda rows: rows
    chunks = in_chunks(lambda u: vjp_columns({"": tensor}, u, {"": source}), ANY_NUMBER)

    def pull_back(rows: Tensor) -> Tensor:
        out = rows.new_empty(*rows.shape[:2], *source.shape)
        for places, part in chunks({"": rows.flatten(0, 1)}, {"": tensor.dtype}):
            out.flatten(0, 1)[places] = part[""].to(rows.dtype)
        return out

    return pull_back


def _of_table(form: PerSampleGradient, tensor: Tensor, lookup: LookedUp) -> PerSampleGradient:
    """Return gradients with respect to a table that all samples read at the same indices."""
    rows = _pull_back(tensor, lookup.output)(form.rows(slice(None)))
    num_vectors, num_samples = rows.shape[:2]
    num_axes = len(lookup.use.lead)
    rows = lookup.use.split(rows.flatten(0, 1)).flatten(1, num_axes)

    def of_each_sample(x: Tensor) -> Tensor:
        return x.flatten(0, num_axes - 1).expand(num_samples, *[-1] * (x.ndim - num_axes + 1))

    return lookup.use.form(rows.unflatten(0, (num_vectors, num_samples)), of_each_sample)
