"""What do output and loss depend on, and through which graph?"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.core.graph import graph_nodes
from curvlinops.core.model import Model

Tensors = Mapping[str, Tensor]

#: PyTorch's complaints if a function differentiates a tensor that has no graph.
_NO_GRAPH = ("does not require grad", "not have been used in the graph")


def check_graph(value: Tensor, model: Model) -> None:
    """Check that a graph is one that can be differentiated with respect to the parameters.

    Args:
        value: Output or loss, evaluated with the parameters replaced by aliases, all others by
            constants.
        model: The user's model.

    Raises:
        ValueError: If the value does not depend on the parameters, was computed with reentrant
            checkpointing, or uses a parameter by a reference that is not registered.
    """
    if not value.requires_grad:
        raise ValueError(
            "The model's output does not depend on any of the parameters. A closure must use the "
            "very tensors in params, and no part may run under torch.no_grad() or reentrant "
            "checkpointing."
        )
    own = {}
    if model.substitutable:
        registered = {} if model.module is None else dict(model.module.named_parameters())
        own = {id(param): name for name, param in {**model.params, **registered}.items()}
    for node in graph_nodes(value):
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "The model uses reentrant activation checkpointing, which supports neither "
                "autograd.grad nor second derivatives. Pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint."
            )
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in own:
            raise ValueError(
                f"The model, or its loss, uses parameter '{own[id(variable)]}' by a reference that "
                "is not registered (a plain list, attribute or closure), where it cannot be "
                "replaced. Access it as an attribute of its module, or pass the model as a "
                "function X -> output with a list of params."
            )


def needs_graph(loss: Any, output: Tensor, target: Any, leaves: Tensors, params: Tensors) -> bool:
    """Return whether a loss depends on the parameters not only through the output's values.

    It may differentiate the output with respect to the input, or use the parameters itself.

    Args:
        loss: The loss.
        output: The model's output, with its graph.
        target: The batch's targets.
        leaves: The tensors by which the parameters were replaced to compute the output.
        params: The user's parameters.
    """
    try:
        # as what it sees usually: with a graph, but not the model's
        total = loss.sum(output.detach().requires_grad_().clone(), target)
    except RuntimeError as error:
        return any(words in str(error) for words in _NO_GRAPH)
    except Exception:
        return False
    used = {id(param) for param in (*leaves.values(), *params.values())}
    if any(id(getattr(node, "variable", None)) in used for node in graph_nodes(total)):
        return True
    # derivatives that count as zero where there is no graph
    with_graph = loss.sum(output.clone(), target)
    return not torch.allclose(total, with_graph, rtol=1e-4, atol=0.0, equal_nan=True)
