"""The model as a function of named parameters: a module, a function, or a closure."""

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.overrides.embedding import check_options
from curvlinops.autodiff.parameters import (
    check_complete,
    check_distinct,
    check_params,
    check_ties,
    find_ties,
    kind_of,
    named_parameters,
    read_params,
    spread_error,
    without_history,
)
from curvlinops.autodiff.used_modules import find_modules
from curvlinops.linear_operator.space import dtype_of_vectors
from curvlinops.support.arguments import MAPPINGS, nearest
from curvlinops.support.torch_internals import (
    distributed_tensors,
    tensor_tables,
    with_attributes,
    without_hooks,
)
from curvlinops.team.scattering import stand_in
from curvlinops.team.shards import WHOLE, shards_of

_OF_THE_LOSS = (
    "For a parameter of the loss, let a Module hold the model and this parameter, and return what "
    "a loss without parameters takes, such as logits times a temperature."
)


class Model(ABC):
    """A model and the parameters with respect to which it is differentiated.

    Attributes:
        source: The user's module or function.
        params: The user's parameters by name, in the user's order.
        as_list: Whether the user gave them as a list.
        module: The user's module, if the model is one.
        roots: The modules that the model is known to use.
        modules: These and all their children, as they were when a pass began.
        shards: The parameters that are sharded over processes, see ``shards_of``.
        substitutable: Whether the model can be evaluated at other tensors than the user's.
    """

    module: nn.Module | None = None
    shards = WHOLE
    substitutable = True

    def __init__(
        self,
        source: Any,
        params: dict[str, Tensor],
        given: Mapping[str, Tensor] | None = None,
        ties: Mapping[str, str] | None = None,
    ):
        check_complete({name: x for name, x in params.items() if not self.shards.is_sharded(x)})
        check_params(params)
        self.source, self.params, self.as_list = source, params, given is None
        self._given, self._ties = given, ties or {}
        self._kinds = {name: kind_of(param) for name, param in params.items()}
        self._find_modules()
        if self.module is None and distributed_tensors():
            for root in self.roots:
                check_complete(dict(root.named_parameters()))

    @abstractmethod
    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the model on ``X``; inside an ``Evaluation`` at these values only."""

    @property
    def replaced(self) -> dict[int, str]:
        """The names of the user's own tensors that are replaced in an evaluation, by id."""
        return {id(param): name for name, param in self.params.items()}

    def replacements(self, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return the tensors that replace the modules' parameters in an evaluation, by id."""
        return {}

    def requiring_gradients(self) -> AbstractContextManager:
        """Return a context in which the tensors in ``leaves`` require gradients."""
        return nullcontext()

    def leaves(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, or others, to differentiate with respect to.

        Those of sharded parameters have no values, see ``stand_in``.
        """
        sharded = self.shards.params
        # aliases, so that neither .grad, requires_grad nor hooks of the user's are touched
        leaves = {
            name: (stand_in if name in sharded else without_history)(param)
            for name, param in self.params.items()
        }
        if values is not None:
            leaves = {name: with_attributes(x, leaves[name]) for name, x in values.items()}
        for name, leaf in leaves.items():
            leaf.requires_grad_().replaces = name  # to know it if it turns up in a later evaluation
        return leaves

    def refresh(self) -> None:
        """Use the modules, and the tensors of the user's dictionary, as they are now."""
        params = self._read()
        for name, before in self._kinds.items():
            if (now := kind_of(params[name])) != before:
                now, before = (f"of shape {list(x)}, {t} on {at}" for x, t, at in (now, before))
                raise ValueError(
                    f"Parameter '{name}' is now {now}; it was {before} when the operator was "
                    "built. Build a new operator."
                )
        self.params = params
        self._find_modules()

    def _find_modules(self) -> None:
        """Find the modules that the model uses now, once for a pass over the data."""
        self._found = find_modules(self.source)
        self.roots, self.modules = [x[0] for x in self._found], [*chain(*self._found)]

    @property
    def train_flags(self) -> tuple[bool, ...]:
        """The train flag of each module."""
        return tuple([module.training for module in self.modules])

    def _read(self) -> dict[str, Tensor]:
        """Return the parameters that the user's dictionary has now."""
        if self._given is None:
            return self.params
        given = {n: self._given[n] for n in (*self.params, *self._ties) if n in self._given}
        for name, param in given.items():
            if not isinstance(param, Tensor):
                raise TypeError(f"'{name}' in params is now a {type(param).__name__}, no tensor.")
        params = {name: given.get(name, param) for name, param in self.params.items()}
        check_ties(params | given, {n: other for n, other in self._ties.items() if n in given})
        return params

    def to(self, device: torch.device | str) -> None:
        """Move the parameters, and the user's module, to another device."""
        self.params = self._read()
        self._move(device)
        if self._given and any(self._given[name] is not x for name, x in self.params.items()):
            self._given = None  # the user's tensors stay where they are
        self._kinds = {name: kind_of(param) for name, param in self.params.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and all tensors of modules by name, also those in no ``params``."""
        found, seen = dict(self.params), {id(x) for x in self.params.values()}
        for root in self.roots:
            for name, x in (*root.named_parameters(), *root.named_buffers()):
                if id(x) not in seen:
                    seen.add(id(x))
                    found[name if name not in found else f"{name} of {type(root).__name__}"] = x
        return found

    @abstractmethod
    def _move(self, device: torch.device | str) -> None:
        """Move the objects that ``to`` moves."""

    def pack(self, values: Mapping[str, Tensor]) -> list[Tensor] | dict[str, Tensor]:
        """Return tensors in the structure in which the user gave the parameters."""
        return list(values.values()) if self.as_list else dict(values)


class ModuleModel(Model):
    """A ``torch.nn.Module``, possibly wrapped for data parallelism or compiled."""

    def __init__(self, module: nn.Module, params: list[Tensor] | Mapping[str, Tensor]):
        check_modules(module)
        self.shards = shards_of(module)
        self._registered, self.module = named_parameters(module)
        buffers = dict(module.named_buffers())
        local = {n: x for n, x in self._registered.items() if not self.shards.is_sharded(x)}
        check_complete(local | buffers)
        registered, given = self._registered, None
        if not registered:
            raise ValueError(
                f"model_func is a {type(module).__name__}, which has no parameters. The model is "
                "the first argument, and the loss the second."
            )
        if isinstance(params, MAPPINGS):
            named, given = dict(params), params
            for name in [name for name in named if name not in registered]:
                kind = "a buffer of the model, not a parameter" if name in buffers else "unknown"
                near = nearest(name, registered)
                raise ValueError(f"'{name}' in params is {kind}. {near} {_OF_THE_LOSS}")
        else:
            names = {id(param): name for name, param in reversed(registered.items())}
            for i, param in enumerate(params):
                if id(param) not in names:
                    raise ValueError(
                        f"Entry {i} of params, of shape {list(param.shape)}, is not a parameter of "
                        "the model. Pass list(model.parameters()) of this very model, neither of a "
                        f"copy nor param.data. {_OF_THE_LOSS}"
                    )
            check_distinct(params, names)
            named = {names[id(param)]: param for param in params}
        ties = find_ties({name: registered[name] for name in named})
        check_ties(named, ties)
        untied = {name: param for name, param in named.items() if name not in ties}
        super().__init__(self.module, untied, given, ties)
        # name in `params` -> the module's own parameter
        self._targets = {name: registered[name] for name in self.params}
        self.shards.differentiate(self.params, dtype_of_vectors(self.params))
        for name, param in self.params.items():
            if param.shape != registered[name].shape:
                raise ValueError(
                    f"'{name}' in params has shape {list(param.shape)}, the model's parameter "
                    f"{list(registered[name].shape)}."
                )

    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the module."""
        return self.module(X)

    def _move(self, device: torch.device | str) -> None:
        # the module's parameters stay the same objects
        self.module.to(device)
        self.params = {
            name: param if param is self._targets[name] else param.to(device)
            for name, param in self.params.items()
        }

    @property
    def replaced(self) -> dict[int, str]:
        """The user's parameters, and all of the module's."""
        return super().replaced | {id(param): name for name, param in self._registered.items()}

    def replacements(self, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return the values, and constants for the parameters that are not differentiated."""
        self.shards.find()
        targets, sharded = self._targets, self.shards.params
        tensors = {
            id(x): with_attributes(values[n], x) for n, x in targets.items() if n not in sharded
        }
        tables = (tensor_tables(module)[0] for module in self._found[0])
        present = {id(x): x for table in tables for x in table.values() if x is not None}
        if missing := [name for name, x in targets.items() if id(x) not in present]:
            raise ValueError(
                f"The model's parameters {missing} were replaced by other tensors since the "
                "operator was built (by load_state_dict(assign=True), an assignment, or pruning). "
                "Build a new operator."
            )
        spread = distributed_tensors()
        if not self.shards and any(isinstance(x, spread) for x in present.values()):
            raise ValueError("The model was sharded since the operator was built. Build a new one.")
        constants = {
            k: without_history(x)
            for k, x in present.items()
            if k not in tensors and not isinstance(x, spread)
        }
        return tensors | constants


class FunctionalModel(Model):
    """A function ``(params, X) -> output`` of a dictionary of parameters."""

    def __init__(self, function: Callable, params: Mapping[str, Tensor]):
        super().__init__(function, dict(params), params)
        check_distinct(list(self.params.values()), {id(p): n for n, p in self.params.items()})

    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the function."""
        params = self.params
        return self.source({n: with_attributes(x, params[n]) for n, x in values.items()}, X)

    def _move(self, device: torch.device | str) -> None:
        self.params = {name: param.to(device) for name, param in self.params.items()}


class ClosureModel(Model):
    """A function ``X -> output`` that uses the very tensors in ``params``."""

    substitutable = False

    def __init__(self, function: Callable, params: list[Tensor]):
        super().__init__(function, {str(i): param for i, param in enumerate(params)})
        check_distinct(params, {id(param): str(i) for i, param in enumerate(params)})
        if computed := [i for i, param in enumerate(params) if not param.is_leaf]:
            raise ValueError(
                f"{computed} of params are computed from other tensors, as views of a flat one "
                "are. Pass the tensors that they are computed from, and let the function compute "
                "them."
            )

    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the closure."""
        return self.source(X)

    def _move(self, device: torch.device | str) -> None:
        for param in self.params.values():
            param.data = param.data.to(device)

    def __deepcopy__(self, memo: dict) -> "ClosureModel":
        """Share the tensors: the function, which is not copied, uses these."""
        return ClosureModel(self.source, list(self.params.values()))

    @property
    def replaced(self) -> dict[int, str]:
        """Return no tensors: the function uses the user's own."""
        return {}

    def leaves(self) -> dict[str, Tensor]:
        """Return the user's tensors, see ``requiring_gradients``."""
        return dict(self.params)

    @contextmanager
    def requiring_gradients(self) -> Iterator[None]:
        """Let the user's tensors require gradients, and keep their hooks from changing them."""
        params = list(self.params.values())
        flags = [param.requires_grad for param in params]
        try:
            with without_hooks(params):
                for param in params:
                    param.requires_grad_(True)
                yield
        finally:
            for param, requires_grad in zip(params, flags, strict=True):
                param.requires_grad_(requires_grad)


def wrap_model(model_func: Any, params: Any) -> Model:
    """Return the model that a user describes, see ``DataLinearOperator``."""
    params = read_params(params)
    if isinstance(model_func, nn.Module):
        return ModuleModel(model_func, params)
    if not callable(model_func):
        raise TypeError(
            f"model_func must be a Module or a function, got {type(model_func).__name__}."
        )
    if not isinstance(params, MAPPINGS):
        return ClosureModel(model_func, params)
    try:
        inspect.signature(model_func, follow_wrapped=False).bind(params, "X")
    except TypeError as error:
        raise TypeError(
            f"With a dictionary params, the function is called as f(params, X): {error}. For a "
            "function of X alone, pass a list of the tensors that it uses."
        ) from error
    except ValueError:  # it has no signature
        pass
    return FunctionalModel(model_func, params)


def check_modules(module: nn.Module) -> None:
    """Refuse a model with a module that cannot be differentiated, by the module's name."""
    library = sys.modules.get("torch.distributed.fsdp")  # imported by whoever spreads a module
    spread = () if library is None else library.FullyShardedDataParallel
    for name, child in module.named_modules():
        where = f"The model's module '{name}'" if name else "The model"
        if isinstance(child, spread):
            raise spread_error(f"{where} is FullyShardedDataParallel")
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(
                f"{where} is TorchScript, whose parameters cannot be replaced. "
                "Pass the original module."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag):
            kind = f"'{name}' ({type(child).__name__})"
            check_options(kind, child.max_norm, child.scale_grad_by_freq)


@contextmanager
def eval_mode(model_func: Any) -> Iterator[None]:
    """Clear the train flags of a model's modules, and restore each of them afterwards.

    ``train()`` and ``eval()`` are not called: what else a module does there, such as merging an
    adapter into its weights, need not be reversible.
    """
    modules = [*chain(*find_modules(model_func))]
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
