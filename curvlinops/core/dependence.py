"""What do output and loss depend on, and through which graph?"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from curvlinops.core.containers import leaves
from curvlinops.core.graph import graph_nodes, leaf_variables
from curvlinops.core.memory import lacks_memory
from curvlinops.core.model import ClosureModel, Model
from curvlinops.core.protection import modules_of
from curvlinops.core.torch_internals import in_transform
from curvlinops.core.walk import walk

Tensors = Mapping[str, Tensor]

#: PyTorch's complaints if a function differentiates a tensor that has no graph.
_NO_GRAPH = ("does not require grad", "not have been used in the graph")
#: What differentiates inside of a model or a loss.
DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_REENTRANT = (
    "The model uses reentrant activation checkpointing, which supports neither autograd.grad nor "
    "second derivatives. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
)
#: What reads numbers into Python, or has outputs of as many rows as numbers say.
_READING = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__contains__", "__format__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero"),
    *("equal", "allclose", "nonzero", "argwhere", "masked_select", "repeat_interleave"),
    *("unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc"),
    *("_pack_padded_sequence", "pack_padded_sequence", "where", "masked_scatter"),
}


class Watch(TorchFunctionMode):
    """Watches whether model and loss hide parameters, or differentiate with respect to them.

    Args:
        model: The user's model.
        leaves: The tensors by which the parameters are replaced.

    Attributes:
        differentiates: Whether they do.
        reads: Whether what they do may depend on numbers in tensors.

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
        self.reads = any(
            isinstance(module, torch.jit.ScriptModule)  # it does not show what it does
            for module in modules_of(model.roots)
        )

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and look at what it differentiates with respect to."""
        kwargs = kwargs or {}
        self.reads = self.reads or _reads(func, (*args, *kwargs.values()))
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
            raise ValueError(_REENTRANT) from error
        if self._hidden is not None:
            raise ValueError(_explain(self._hidden)) from error


def check_graph(value: Tensor, model: Model, leaves: Tensors) -> None:
    """Check that a graph is one that can be differentiated with respect to the parameters.

    Args:
        value: Output or loss, evaluated with the parameters replaced by aliases, all others by
            constants.
        model: The user's model.
        leaves: These aliases.

    Raises:
        ValueError: If the value does not depend on the parameters, or uses a parameter by a
            reference that is not registered, or what an earlier evaluation made of it; if a closure
            has lost one.
    """
    own, current, used = own_names(model), {id(leaf): n for n, leaf in leaves.items()}, set()
    for variable in leaf_variables(graph_nodes(value)):
        if id(variable) in current:
            used.add(current[id(variable)])
        elif id(variable) in own:
            raise ValueError(_explain(own[id(variable)]))
        elif hasattr(variable, "replaces"):
            raise ValueError(
                "The model, or its loss, keeps what it computed of parameter "
                f"'{variable.replaces}' in an earlier evaluation (by functools.lru_cache, in an "
                "input X that it changes, such as a cache of keys and values, or in a list inside "
                "of another container?), so that the output does not depend on the parameter "
                "itself. Compute it in each evaluation."
            )
    if not used:
        raise ValueError(
            "The model's output does not depend on any of the parameters. A closure must use the "
            "very tensors in params, and no part may run under torch.no_grad() or reentrant "
            "checkpointing."
        )
    if isinstance(model, ClosureModel):
        _check_held(model, used)


def _check_held(model: ClosureModel, used: set[str]) -> None:
    """Refuse a closure that held parameters before, and neither holds nor uses them now."""
    parts = {id(part) for part in walk(model.source) if isinstance(part, Tensor)}
    held = {name for name, param in model.params.items() if id(param) in parts}
    lost = model.held - held - used
    if lost:
        raise ValueError(
            f"The model no longer uses entries {sorted(map(int, lost))} of params, to which it "
            "referred before: other tensors are in their place, by which the operator does not "
            "differentiate. Change the tensors in params in place (W.copy_(new), optimizer.step()) "
            "or build a new operator."
        )
    model.held |= held


def _reads(func: Callable, args: tuple) -> bool:
    """Return whether a call reads numbers, or is told by some how long something is."""
    name = getattr(func, "__name__", "")
    if name == "where":
        return len(args) == 1
    if name in ("detach", "clone"):
        return False
    if name in _READING:
        return True
    if name in ("__getitem__", "__setitem__"):
        parts = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        ends = ((x.start, x.stop, x.step) for x in parts if isinstance(x, slice))
        if any(isinstance(end, Tensor) for slices in ends for end in slices):
            return True
        if any(x.dtype == torch.bool for x in leaves(args[1])):
            return True
    counts = (x for x in leaves(args) if x.ndim == 0 and not x.is_floating_point())
    return next(counts, None) is not None


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
    registered = {} if model.module is None else dict(model.module.named_parameters())
    return {id(param): name for name, param in {**model.params, **registered}.items()}


def own_ids(model: Model) -> set[int]:
    """Return the ids of the parameters, and of the module's others if there is one.

    Unlike ``own_names``, also those that cannot be replaced.
    """
    found = set(map(id, model.params.values()))
    for module in [] if model.module is None else modules_of([model.module]):
        found.update(map(id, module._parameters.values()))
    return found


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
    with torch._C.DisableTorchFunction():  # the loss reads no numbers here
        return not torch.allclose(total, with_graph, rtol=1e-4, atol=0.0, equal_nan=True)
