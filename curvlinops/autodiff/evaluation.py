"""The one context in which every forward pass and every backward pass runs."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import filterfalse
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff import overrides
from curvlinops.autodiff.model import Model
from curvlinops.autodiff.overrides.writes import Protected
from curvlinops.support.autograd_graph import leaf_variables
from curvlinops.support.pytree import copy_containers
from curvlinops.support.torch_internals import (
    backward_hooks,
    tensor_tables,
    uncached_parametrizations,
    with_attributes,
)
from curvlinops.support.torch_modes import without_compiler
from curvlinops.team.shards import WHOLE, Shards

#: The types of containers whose contents are restored.
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, set, deque})

#: A container, and the objects in it.
Contents = tuple[Collection, Collection]


class Evaluation:
    """Evaluates a model at given parameter values. The context can be entered again.

    The backward pass of a graph that was recorded in the context runs in the same context:
    activation checkpointing recomputes the forward pass there, which must meet the same
    parameters, buffers and kernels. No call may write to parameters of ``others``, modules of the
    loss, either. ``hooks`` gets the names of hooks on gradients.
    """

    def __init__(
        self,
        model: Model,
        values: Mapping[str, Tensor],
        differentiation: str,
        others: Sequence[nn.Module] = (),
        hooks: set[str] | None = None,
    ):
        self._model, self._values = model, values
        self._differentiation, self._hooks = differentiation, hooks
        modules, shards = [*model.modules, *others], model.shards
        self._protected = Protected(modules, model.params, shards.source_of)
        # refuses parameters that were replaced since the operator was built
        replacements = model.replacements(values)
        self._modules = IsolatedModules(model.modules, replacements, False, shards, values)

    @contextmanager
    def active(self) -> Iterator["Evaluation"]:
        """Enter the context."""
        model = self._model
        with (
            torch.enable_grad(),
            model.requiring_gradients(),
            self._modules.active(),
            model.shards.saved_by_number(),
            uncached_parametrizations(),
            overrides.active(
                self._differentiation, self._protected, model.shards.products, self._hooks
            ),
        ):
            yield self

    def of_graph(
        self, runs_python: Callable[[], bool]
    ) -> tuple[Callable[[], AbstractContextManager], tuple[Tensor, ...]]:
        """Return the context for backward passes, and the tensors that it keeps in memory.

        It is ``active``, with its copies of buffers, if these run the user's code, or the model is
        a closure; else nothing.
        """
        if not self._model.substitutable or runs_python():
            return self.active, self._modules.copies
        return nullcontext, ()

    def output(self, X: Any) -> Any:
        """Evaluate the model; inside ``active()`` only. Refuse writes to a parameter."""
        return self._model(self._values, copy_containers(X))


class IsolatedModules:
    """Modules that compute with other tensors in a context, which undoes all that they write.

    This concerns parameters, buffers, submodules, hooks and all other attributes, and the contents
    of lists, dictionaries and sets that are attributes. Buffers are copies; with ``keep_graphs``,
    those that require gradients, such as what the model computed in this very pass, are used
    themselves. Backward hooks, which observe the user's own backward passes, are gone, and hooks of
    ``fully_shard``. What was written in the first context is there again in each later one, since
    the backward pass may recompute the forward pass. Compiled modules run uncompiled. Children are
    among the modules, and ``replacements`` are by the ids of parameters.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        replacements: Mapping[int, Tensor] | None = None,
        keep_graphs: bool = False,
        shards: Shards = WHOLE,
        leaves: Mapping[str, Tensor] | None = None,
    ):
        self._containers: list[Collection] = []  # the dictionaries of attributes among them
        self._inside: list[Contents] = []
        self._is_new = True
        tensors, copies = dict(replacements or {}), dict[int, Tensor]()
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            attributes = vars(module)
            self._containers.append(attributes)
            self._containers += [x for x in attributes.values() if type(x) in _CONTAINERS]
            parameters, buffers = tensor_tables(module)
            for buffer in buffers.values():
                is_constant = buffer is not None and not (keep_graphs and buffer.requires_grad)
                if is_constant and id(buffer) not in tensors:
                    copy = with_attributes(buffer.detach().clone(), buffer)
                    tensors[id(buffer)] = copies[id(buffer)] = copy
            for table in filter(None, (parameters, buffers)):
                contents = {n: tensors.get(id(x), x) for n, x in dict.items(table)}
                gathering = shards.table(contents, leaves or {})
                if gathering is None:
                    self._inside.append((table, contents))
                else:
                    self._inside.append((attributes, attributes | {"_parameters": gathering}))
            self._inside += [(hooks, {}) for hooks in filter(None, backward_hooks(module))]
            self._inside += shards.hooks(module)
        self.copies = tuple(copies.values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter the context."""
        before = [(x, x.copy()) for x in filter(None, self._containers)]
        empty = [*filterfalse(None, self._containers)]
        try:
            _write(self._inside)
            with without_compiler():
                yield
        finally:
            changed = [contents for contents in before if _differ(*contents)]
            changed += [(x, ()) for x in filter(None, empty)]
            if self._is_new:
                self._inside, self._is_new = [(x, x.copy()) for x, _ in changed], False
            _write(changed)


def _write(contents: Iterable[Contents]) -> None:
    """Put objects into containers; a dictionary that has them already is not written to."""
    for container, values in contents:
        if isinstance(container, dict):
            for name in [name for name in container if name not in values]:
                del container[name]  # other threads may read what stays
            for name, value in dict(values).items():
                if container.get(name, container) is not value:
                    container[name] = value
            if list(container) == list(values):
                continue
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(values)


def _differ(container: Collection, contents: Collection) -> bool:
    """Return whether a container has other objects, or in another order, than it had."""
    if len(container) != len(contents) or any(map(is_not, container, contents)):
        return True
    return isinstance(container, dict) and any(map(is_not, container.values(), contents.values()))


# --- what an output depends on


def not_registered(name: str) -> ValueError:
    """Return the error that a parameter is used where it cannot be replaced."""
    return ValueError(
        f"The model, or its loss, uses parameter '{name}' by a reference that is not registered (a "
        "plain list, attribute or closure), where it cannot be replaced. Access it as an attribute "
        "of its module, or pass the model as a function X -> output with a list of params."
    )


def check_graph(
    nodes: Iterable[Any], model: Model, leaves: Mapping[str, Tensor], must_depend: bool = True
) -> None:
    """Check that a graph with these nodes can be differentiated with respect to the parameters.

    It must not use a parameter by a reference that is not registered, or something that an earlier
    evaluation computed, and perhaps it must reach one of the leaves, aliases of the parameters.
    """
    current, own, reached = {id(leaf) for leaf in leaves.values()}, model.replaced, False
    for variable in leaf_variables(nodes):
        if id(variable) in current:
            reached = True
        elif id(variable) in own:
            raise not_registered(own[id(variable)])
        elif hasattr(variable, "replaces"):
            raise ValueError(
                "The model, or its loss, keeps what it computed of parameter "
                f"'{variable.replaces}' in an earlier evaluation (by functools.lru_cache, in an "
                "input X that it changes, such as a cache of keys and values, or in a list inside "
                "of another container?), so that the output does not depend on the parameter "
                "itself. Compute it in each evaluation."
            )
    if must_depend and not reached:
        raise ValueError(
            "The model's output does not depend on any of the parameters. A closure must use the "
            "very tensors in params, and no part may run under torch.no_grad() or reentrant "
            "checkpointing."
        )
