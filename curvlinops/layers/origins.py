"""Tensors that are functions of parameters, such as parts, and gradients with respect to these."""

from collections.abc import Callable, Mapping

from torch import Tensor

from curvlinops.autodiff.backward import in_chunks, vjp_columns
from curvlinops.layers.capture import LookedUp, Recorded, ViewOf
from curvlinops.layers.forms import (
    DenseGradient,
    PerSampleGradient,
    PulledBackGradient,
)
from curvlinops.layers.uses import Sort, Use
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
    use: Use,
    g: Tensor,
    sort: Sort,
    source: Recorded | LookedUp,
    leaf: Tensor,
    lookup: LookedUp | None = None,
) -> PerSampleGradient:
    """Return gradients with respect to a parameter.

    Args:
        use: How a function of the parameter is used.
        g: Rows sorted by samples, see ``Use.form``.
        sort: Sorts others in the same way.
        source: Has the function's value, and says which entries of the parameter it has.
        leaf: The parameter.
        lookup: The lookup of which it is a function, row by row.
    """
    tensor = source.tensor
    entries = source.view_of and source.view_of.entries(use.layout, leaf.shape)
    if entries is not None:
        return use.form(g, sort, entries)
    whole = ViewOf.whole("", tensor.shape)
    form = use.form(g, sort, whole.entries(use.layout, tensor.shape))
    if lookup is not None and isinstance(form, DenseGradient):
        return _on_table(form, tensor, lookup, leaf)
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


def _on_table(
    form: PerSampleGradient, tensor: Tensor, lookup: LookedUp, leaf: Tensor
) -> PerSampleGradient:
    """Return gradients with respect to a table that all samples read at the same indices."""
    rows = _pull_back(tensor, lookup.output)(form.rows(slice(None)))
    num_vectors, num_samples = rows.shape[:2]
    num_axes = len(lookup.use.lead)
    rows = lookup.use.split(rows.flatten(0, 1)).flatten(1, num_axes)

    def of_each_sample(x: Tensor) -> Tensor:
        return x.flatten(0, num_axes - 1).expand(num_samples, *[-1] * (x.ndim - num_axes + 1))

    g = rows.unflatten(0, (num_vectors, num_samples))
    return on_parameter(lookup.use, g, of_each_sample, lookup, leaf)
