"""Facts about a model and its loss: those of an operator, and those that operators share."""

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlinops.autodiff.backward import NoDerivativeError
from curvlinops.autodiff.evaluation import not_registered
from curvlinops.losses.base import Loss
from curvlinops.support.autograd_graph import (
    DIFFERENTIATING,
    custom_functions,
    footprint,
    graph_nodes,
    has_hooks_on_saved,
    is_users,
    leaf_variables,
    least_precise,
    loses_graph,
    precisions,
)
from curvlinops.support.pytree import leaves
from curvlinops.support.refusals import lacks_memory
from curvlinops.support.torch_internals import in_transform, without_torch_function

#: PyTorch's complaints if a function differentiates a tensor that has no graph.
_NO_GRAPH = ("does not require grad", "not have been used in the graph")


class Rules:
    """Objects that remember what was found out, such as the rules of a model's layers.

    Operators on the model may share them.
    """

    def __init__(self, shared: dict[Hashable, Any]):
        self._shared, self._own = shared, dict[Hashable, Any]()

    def get(self, make: Any, *args: Hashable) -> Any:
        """Return ``make(*args)``, the same at each call: of all operators if it ``is_shared``."""
        key = (make, *args)
        if key not in self._own:
            self._own[key] = (
                self._shared.setdefault(key, make(*args)) if make.is_shared else make(*args)
            )
        return self._own[key]

    def forget(self) -> None:
        """Forget what this operator has learned or used."""
        for key in self._own:
            self._shared.pop(key, None)
        self._own.clear()


@dataclass
class ModelFacts:
    """The facts about a model, its loss, and the shapes of its data, as far as they are known."""

    #: The train flags with which the model was checked; ``None`` before.
    train_flags: tuple[bool, ...] | None = None
    rules: Rules | None = None  # of layers, once they are needed
    is_evaluated: bool = False  # so that the other facts are known
    graph_bytes: float = 0  # infinite if hooks replace what the graph saves
    precision: torch.dtype = torch.float64  # the least precise one in which gradients pass
    #: The names of hooks that model or loss register, which may change gradients.
    hooks: set[str] = field(default_factory=set)
    #: Whether the model differentiates itself, as meta-learning does, so that its parameters have
    #: to require gradients in each evaluation.
    differentiates: bool = False
    #: Whether the model computes with its parameters outside of the graph (``torch.no_grad``, or
    #: ``torch.autograd.grad`` without ``create_graph``). These are constants for backward passes,
    #: but forward mode would differentiate them.
    stops_gradients: bool = False
    #: Whether the loss depends on the parameters not only through the values of the output: it
    #: differentiates the output with respect to the input (a PINN), or uses the parameters itself
    #: (weight decay).
    loss_needs_graph: bool = False
    adds_up: bool = False  # the loss is the sum of its samples' losses, as far as was compared
    lacks_derivative: bool = False  # the model can be differentiated only once
    #: Hashes of the operations of graphs: their custom functions were compared.
    compared: set[int] = field(default_factory=set)

    def learn(self, watch: "Watch", output: Tensor, nodes: list[Any]) -> None:
        """Learn from the model's first evaluation, its output, and the nodes of its graph."""
        self.is_evaluated = True
        self.graph_bytes = inf if has_hooks_on_saved(nodes) else footprint([output], nodes=nodes)
        self.precision = least_precise(nodes, output)
        self.differentiates, self.stops_gradients = watch.differentiates, watch.stops_gradients


class Seen:
    """What any operator has seen of a model and its graphs, by hashes of their operations."""

    is_shared = True

    def __init__(self) -> None:
        self.alone = set[Hashable]()  # samples had the same numbers alone
        self.kept = set[tuple[int, bool]]()  # backward passes kept their own graph, by ``key``
        self.lacks_tangents = False  # forward mode fails on the model
        self.prefers_rows = dict[str, bool]()  # kept gradients are faster than a graph, by terms


class UserFunctions:
    """The user's own autograd functions and hooks in the graph of a forward pass."""

    def __init__(self, facts: ModelFacts, seen: Seen):
        self._facts, self._seen, self._are_compared = facts, seen, False
        self._names = set[str]()
        #: The dtypes in which gradients pass the graph, if it has such functions.
        self.precisions: frozenset[torch.dtype] = frozenset()
        #: A hash of the graph's operations.
        self.operations = 0

    def note(self, nodes: list[Any], output: Tensor) -> None:
        """Note those among the nodes of the graph of an output."""
        hooks = self._facts.hooks
        self.operations = hash((self.operations, *(node.name() for node in nodes), *sorted(hooks)))
        if (found := custom_functions(nodes)) or hooks:
            self._names |= found
            self.precisions |= precisions(nodes, output)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return sorted(self._names | self._facts.hooks)

    @property
    def uncompared(self) -> list[str]:
        """Their names, if the graph is new."""
        are_known = self._are_compared or self.operations in self._facts.compared
        return [] if are_known else self.names

    def key(self, cotangent: Tensor | None) -> tuple[int, bool]:
        """Return the key in ``Seen.kept`` of a backward pass that begins with a cotangent."""
        return self.operations, cotangent is not None and cotangent.requires_grad

    @contextmanager
    def keeping_graph(self, output: Tensor, cotangent: Tensor | None) -> Iterator[None]:
        """Watch a backward pass that is differentiated, if its graph is new.

        A node that loses its graph, as that of sparse tensors does, is refused: products would lack
        a part.
        """
        if (key := self.key(cotangent)) in self._seen.kept:
            yield
            return
        lost: list[str] = []

        def watch(node: Any, returned: tuple, given: tuple) -> None:
            with without_torch_function():
                if loses_graph(node, returned, given):
                    lost.append(node.name())

        # the user's functions are compared
        nodes = [x for x in graph_nodes(output) if not is_users(x) and x.next_functions]
        handles = [node.register_hook(partial(watch, node)) for node in nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if lost:
            raise NoDerivativeError(
                f"PyTorch's backward of {lost[0]} has no derivative, and raises no error, so that "
                "products would lack a part. Replace the operation by one whose backward is "
                "differentiable, such as dense tensors in place of sparse ones."
            )
        self._seen.kept.add(key)

    def were_compared(self, is_complete: bool) -> None:
        """Remember that those of this graph were compared; for other graphs if it ``is_complete``.

        It is not if a gradient is zero: a zero in a layer behind, as in an adapter before its first
        step, hides the function.
        """
        self._are_compared = True
        if is_complete:
            self._facts.compared.add(self.operations)


class Watch(TorchFunctionMode):
    """Watches the calls of the model and of the loss; for the attributes see ``ModelFacts``.

    It refuses to differentiate with respect to tensors that were ``replaced`` (their names by id),
    where PyTorch would find no derivative, or zero, and to sharded ones; and a loss whose backward
    pass would add to the gradients of parameters.
    """

    def __init__(self, replaced: dict[int, str]):
        super().__init__()
        self._replaced = replaced
        self.differentiates = self.stops_gradients = self.is_in_loss = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and note how it uses gradients."""
        kwargs = kwargs or {}
        inputs = args[1] if func is torch.autograd.grad else ()
        if lost := [self._replaced[id(x)] for x in inputs if id(x) in self._replaced]:
            raise not_registered(lost[0])
        if self.is_in_loss and func in (Tensor.backward, torch.autograd.backward):
            raise ValueError(
                "The loss calls backward(). Leave that out: it returns its value, which operators "
                "differentiate. For a derivative that is a part of the loss, call "
                "torch.autograd.grad(..., create_graph=True)."
            )
        given = leaves((args, kwargs)) if func in DIFFERENTIATING else ()
        if any(hasattr(x, "gathered_from") for x in given):  # see ``Shards.read``
            raise NotImplementedError(
                "The model differentiates with respect to a sharded parameter itself, which is not "
                "supported. Leave the parameter out of sharding: fully_shard(..., ignored_params)."
            )
        result = func(*args, **kwargs)
        if func in DIFFERENTIATING and not in_transform():
            self.differentiates = True
            self.stops_gradients |= not kwargs.get("create_graph", False)
        elif not torch.is_grad_enabled() and any(x.is_floating_point() for x in leaves(result)):
            self.stops_gradients |= any(x.requires_grad for x in leaves((args, kwargs)))
        return result


def needs_graph(
    loss: Loss, output: Tensor, target: Any, parameters: set[int], functions: UserFunctions
) -> bool:
    """Return whether a loss depends on the parameters, given by ids, also beside the output.

    If it does not, the user's functions in it are noted.
    """
    try:  # a graph as usual, but not the model's
        alone = loss.sum(output.detach().requires_grad_().clone(), target)
    except RuntimeError as error:  # it differentiates the output
        if lacks_memory(error) or not any(words in str(error) for words in _NO_GRAPH):
            raise
        return True
    nodes = graph_nodes(alone)
    used = leaf_variables(nodes)
    if any(id(variable) in parameters or hasattr(variable, "replaces") for variable in used):
        return True
    # derivatives that count as zero where there is no graph
    with_graph = loss.sum(output.clone(), target)
    with without_torch_function():  # the loss reads no numbers here
        if not torch.allclose(alone, with_graph, rtol=1e-4, atol=0.0, equal_nan=True):
            return True
    functions.note(nodes, alone)
    return False


#: The rules of each model, by the key that they depend on.
_RULES: weakref.WeakKeyDictionary[Any, dict[Hashable, dict]] = weakref.WeakKeyDictionary()

#: The largest number of keys that are remembered for a model.
_MOST_KEYS = 16


def rules_of(source: Any, key: Hashable) -> Rules:
    """Return the rules of a model's layers.

    So a new operator for each step or batch does not have to find them again. All that they depend
    on is in the key. They must not refer to the model.
    """
    try:
        entries = _RULES.setdefault(source, {})
    except TypeError:  # an object without weak references
        return Rules({})
    if key not in entries and len(entries) >= _MOST_KEYS:
        del entries[next(iter(entries))]
    return Rules(entries.setdefault(key, {}))
