"""Checks that a graph leads to the parameters."""

from collections.abc import Mapping

from torch import Tensor

from curvlinops.autodiff.model import Model
from curvlinops.support.autograd_graph import graph_nodes, leaf_variables

Tensors = Mapping[str, Tensor]


class GraphError(ValueError):
    """A graph cannot be differentiated with respect to the parameters, whatever the mode."""


def not_registered(name: str) -> GraphError:
    """Return the error that a parameter is used where it cannot be replaced."""
    return GraphError(
        f"The model, or its loss, uses parameter '{name}' by a reference that is not registered (a "
        "plain list, attribute or closure), where it cannot be replaced. Access it as an attribute "
        "of its module, or pass the model as a function X -> output with a list of params."
    )


def check_graph(value: Tensor, model: Model, leaves: Tensors, must_depend: bool = True) -> None:
    """Check that a graph is one that can be differentiated with respect to the parameters.

    Args:
        value: Output or loss, evaluated with the parameters replaced by aliases, all others by
            constants.
        model: The user's model.
        leaves: These aliases.
        must_depend: Whether the value must depend on one of them.

    Raises:
        GraphError: If the value does not depend on the parameters, or uses a parameter by a
            reference that is not registered, or something that an earlier evaluation computed.
    """
    current, own, reached = {id(leaf) for leaf in leaves.values()}, model.replaced, False
    for variable in leaf_variables(graph_nodes(value)):
        if id(variable) in current:
            reached = True
        elif id(variable) in own:
            raise not_registered(own[id(variable)])
        elif hasattr(variable, "replaces"):
            raise GraphError(
                "The model, or its loss, keeps what it computed of parameter "
                f"'{variable.replaces}' in an earlier evaluation (by functools.lru_cache, in an "
                "input X that it changes, such as a cache of keys and values, or in a list inside "
                "of another container?), so that the output does not depend on the parameter "
                "itself. Compute it in each evaluation."
            )
    if must_depend and not reached:
        raise GraphError(
            "The model's output does not depend on any of the parameters. A closure must use the "
            "very tensors in params, and no part may run under torch.no_grad() or reentrant "
            "checkpointing."
        )
