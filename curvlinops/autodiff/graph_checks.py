"""What do output and loss depend on, and through which graph?"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from curvlinops.autodiff.model import ClosureModel, Model
from curvlinops.support.autograd_graph import graph_nodes, leaf_variables
from curvlinops.support.fingerprint import Fingerprint, TooManyObjectsError
from curvlinops.support.memory import lacks_memory
from curvlinops.support.torch_internals import in_transform, without_torch_function

Tensors = Mapping[str, Tensor]

#: PyTorch's complaints if a function differentiates a tensor that has no graph.
_NO_GRAPH = ("does not require grad", "not have been used in the graph")
#: What differentiates inside of a model or a loss.
DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_REENTRANT = (
    "The model uses reentrant activation checkpointing, which supports neither autograd.grad nor "
    "second derivatives. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
)


class GraphError(ValueError):
    """A graph cannot be differentiated with respect to the parameters, whatever the mode."""


class Watch(TorchFunctionMode):
    """Watches what model and loss differentiate, and which hooks they register on tensors.

    Args:
        model: The user's model.
        leaves: The tensors by which the parameters are replaced.

    Attributes:
        differentiates: Whether they differentiate with respect to parameters.
        hooks: The names of the hooks, which may change gradients.

    Raises:
        ValueError: At its end, if they do so with respect to the user's own tensors, which were
            replaced, so that PyTorch finds no derivative, or zero; if they use parameters in a
            reentrant checkpoint, which leaves no trace in the graph if no input of it has one.
    """

    def __init__(self, model: Model, leaves: Tensors):
        super().__init__()
        self._own, self._leaves = own_names(model), {id(leaf) for leaf in leaves.values()}
        self._hidden: str | None = None
        self._reentrant = False
        self.differentiates = False
        self.hooks: set[str] = set()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and look at what it differentiates with respect to."""
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            hook = (*args, *kwargs.values())[1]
            self.hooks.add(f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}")
        if not torch.is_grad_enabled() and _requires_grad((*args, *kwargs.values())):
            self._reentrant = self._reentrant or _in_reentrant_checkpoint(sys._getframe())
        # transforms of torch.func need no tensors that require gradients
        if func in DIFFERENTIATING and not in_transform():
            # grad passes these on as a tuple, backward as it got them, perhaps as a generator
            for x in args[1] if func is torch.autograd.grad else (None,):
                self._hidden = self._own.get(id(x), self._hidden)
                if not isinstance(x, Tensor) or x.grad_fn is not None or id(x) in self._leaves:
                    self.differentiates = True
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Stop watching; raise the error that explains PyTorch's."""
        super().__exit__(kind, error, traceback)
        if self._reentrant:
            raise GraphError(_REENTRANT) from error
        if self._hidden is not None:
            raise GraphError(_explain(self._hidden)) from error


def check_graph(value: Tensor, model: Model, leaves: Tensors) -> None:
    """Check that a graph is one that can be differentiated with respect to the parameters.

    Args:
        value: Output or loss, evaluated with the parameters replaced by aliases, all others by
            constants.
        model: The user's model.
        leaves: These aliases.

    Raises:
        GraphError: If the value does not depend on the parameters, or uses a parameter by a
            reference that is not registered, or what an earlier evaluation made of it; if a closure
            has lost one.
    """
    current, used = {id(leaf): n for n, leaf in leaves.items()}, set()
    for variable in leaf_variables(graph_nodes(value)):
        if id(variable) in current:
            used.add(current[id(variable)])
        elif (name := own_names(model).get(id(variable))) is not None:
            raise GraphError(_explain(name))
        else:
            _check_replaced(variable)
    if not used:
        raise GraphError(
            "The model's output does not depend on any of the parameters. A closure must use the "
            "very tensors in params, and no part may run under torch.no_grad() or reentrant "
            "checkpointing."
        )
    if isinstance(model, ClosureModel):
        _check_held(model, used)


def check_memory(value: Tensor, leaves: Tensors) -> None:
    """Check that an output was not computed from what an earlier evaluation has left.

    Args:
        value: The output.
        leaves: The tensors by which the parameters were replaced in this evaluation.

    Raises:
        GraphError: If it was.
    """
    current = {id(leaf) for leaf in leaves.values()}
    for variable in leaf_variables(graph_nodes(value)):
        if id(variable) not in current:
            _check_replaced(variable)


def _check_replaced(variable: Tensor) -> None:
    """Refuse a tensor by which a parameter was replaced in an earlier evaluation."""
    if hasattr(variable, "replaces"):
        raise GraphError(
            "The model, or its loss, keeps what it computed of parameter "
            f"'{variable.replaces}' in an earlier evaluation (by functools.lru_cache, in an "
            "input X that it changes, such as a cache of keys and values, or in a list inside "
            "of another container?), so that the output does not depend on the parameter "
            "itself. Compute it in each evaluation."
        )


def _check_held(model: ClosureModel, used: set[str]) -> None:
    """Refuse a closure that does not use a parameter any more, and has no reference to it."""
    unused = model.held - used
    model.held |= used
    if not unused:  # models may use other parameters on other batches
        return
    with suppress(TooManyObjectsError):
        tensors = set(map(id, Fingerprint([model.source]).tensors))
        lost = {name for name in unused if id(model.params[name]) not in tensors}
        if lost:
            raise GraphError(
                f"The model no longer uses entries {sorted(map(int, lost))} of params, to which it "
                "referred before: other tensors are in their place, by which the operator does not "
                "differentiate. Change the tensors in params in place (W.copy_(new), "
                "optimizer.step()) or build a new operator."
            )


def _requires_grad(args: tuple) -> bool:
    # recurrent layers and torch.cat take lists
    nested = [part for arg in args for part in (arg if isinstance(arg, list | tuple) else (arg,))]
    return any(isinstance(part, Tensor) and part.requires_grad for part in nested)


def _in_reentrant_checkpoint(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def own_names(model: Model) -> dict[int, str]:
    """Return the names of the user's own tensors that are replaced in an evaluation, by id."""
    if not model.substitutable:
        return {}
    return {id(param): name for name, param in {**model.params, **model.registered}.items()}


def _explain(name: str) -> str:
    return (
        f"The model, or its loss, uses parameter '{name}' by a reference that is not registered (a "
        "plain list, attribute or closure), where it cannot be replaced. Access it as an attribute "
        "of its module, or pass the model as a function X -> output with a list of params."
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
    except Exception as error:
        if lacks_memory(error):
            raise
        return isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_GRAPH)
    used = {id(param) for param in (*leaves.values(), *params.values())}
    if any(id(variable) in used for variable in leaf_variables(graph_nodes(total))):
        return True
    # derivatives that count as zero where there is no graph
    with_graph = loss.sum(output.clone(), target)
    with without_torch_function():  # the loss reads no numbers here
        return not torch.allclose(total, with_graph, rtol=1e-4, atol=0.0, equal_nan=True)
