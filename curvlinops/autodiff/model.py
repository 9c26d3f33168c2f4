"""The model as a function of named parameters: a module, a function, or a closure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.module_checks import check_modules
from curvlinops.autodiff.parameters import (
    UserDictionary,
    check_complete,
    check_distinct,
    check_params,
    is_named,
    named_parameters,
    read_params,
    with_attributes,
    without_history,
    without_ties,
)
from curvlinops.autodiff.used_modules import find_modules
from curvlinops.support.torch_internals import modules_of, tensor_tables, without_hooks


class Model(ABC):
    """A model and the parameters with respect to which it is differentiated.

    Attributes:
        source: The user's module or function.
        params: The user's parameters by name, in the user's order.
        as_list: Whether the user gave them as a list.
        module: The user's module, if the model is one.
        roots: All modules that the model is known to use.
        substitutable: Whether the model can be evaluated at other tensors than the user's.
        registered: All parameters of the module, by every name, when the operator was built.
        differentiates: Whether it is known to differentiate with respect to parameters itself, as
            meta-learning does, so that these have to require gradients in each evaluation.
    """

    module: nn.Module | None = None
    substitutable = True
    differentiates = False
    registered: Mapping[str, Tensor] = {}

    def __init__(
        self, source: Any, params: dict[str, Tensor], dictionary: UserDictionary | None = None
    ):
        check_params(params)
        self.source, self.params, self._dictionary = source, params, dictionary
        self.roots = find_modules(source)
        self._shapes = {name: param.shape for name, param in params.items()}
        self.as_list = dictionary is None

    @abstractmethod
    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the model on ``X``; inside an ``Evaluation`` at these values only."""

    def replacements(self, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return what replaces parameters of modules in an evaluation, by the parameters' ids."""
        return {}

    def requiring_gradients(self) -> AbstractContextManager:
        """Return a context in which the tensors in ``leaves`` require gradients."""
        return nullcontext()

    def leaves(self) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, to differentiate with respect to."""
        # aliases, so that neither .grad, requires_grad nor hooks of the user's are touched
        leaves = {n: without_history(param).requires_grad_() for n, param in self.params.items()}
        for name, leaf in leaves.items():
            leaf.replaces = name  # to know it if it turns up in a later evaluation
        return leaves

    def follow(self, moves: bool = False) -> None:
        """Use what the user's dictionary has now, and refuse other kinds and shapes."""
        if self._dictionary is not None:
            self._dictionary.update(self.params, moves)
        for name, shape in self._shapes.items():
            if self.params[name].shape != shape:
                raise ValueError(
                    f"Parameter '{name}' has shape {list(self.params[name].shape)}; it had "
                    f"{list(shape)} when the operator was built. Build a new operator."
                )

    def constants(self) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, for a pass that nobody differentiates."""
        leaves = self.leaves()
        if self.differentiates:
            return leaves
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def dependencies(self) -> list:
        """Return everything that the output depends on, apart from the input."""
        return [self.params, self.source]

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move the parameters, and the user's module, to another device."""

    def pack(self, values: Mapping[str, Tensor]) -> list[Tensor] | dict[str, Tensor]:
        """Return tensors in the structure in which the user gave the parameters."""
        return list(values.values()) if self.as_list else dict(values)


class ModuleModel(Model):
    """A ``torch.nn.Module``, possibly wrapped for data parallelism or compiled."""

    def __init__(self, module: nn.Module, params: Iterable[Tensor] | Mapping[str, Tensor]):
        check_modules(module)
        registered, self.module = named_parameters(module)
        check_complete({**registered, **dict(module.named_buffers())})
        user = params
        if not is_named(params):
            names = {id(param): name for name, param in reversed(registered.items())}
            params = list(params)
            for i, param in enumerate(params):
                if id(param) not in names:
                    raise ValueError(
                        f"Entry {i} of params, of shape {list(param.shape)}, is not a parameter of "
                        f"the model. Its parameters are {list(registered)}."
                    )
            check_distinct(params, names)
            params = {names[id(param)]: param for param in params}
        params = dict(params)
        for name in params:
            if name not in registered:
                buffers = dict(module.named_buffers())
                kind = "a buffer of the model, not a parameter" if name in buffers else "unknown"
                raise ValueError(
                    f"'{name}' in params is {kind}. The model's parameters are {list(registered)}."
                )
        identities = {name: registered[name] for name in params}
        dictionary = UserDictionary(user, identities) if is_named(user) else None
        super().__init__(self.module, without_ties(params, registered), dictionary)
        # name in `params` -> the module's own parameter
        self.registered = registered
        self._targets = {name: registered[name] for name in self.params}
        for name, param in self.params.items():
            if param.shape != registered[name].shape:
                raise ValueError(
                    f"'{name}' in params has shape {list(param.shape)}, the model's parameter "
                    f"{list(registered[name].shape)}."
                )

    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the module."""
        return self.module(X)

    def to(self, device: torch.device | str) -> None:
        """Move the module, whose parameters stay the same objects, and values of its own."""
        self.follow(moves=True)
        self.module.to(device)
        self.params = {
            name: param if param is self._targets[name] else param.to(device)
            for name, param in self.params.items()
        }

    def replacements(self, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return the values, and constants for the parameters that are not differentiated."""
        targets = self._targets
        tensors = {id(x): with_attributes(values[n], x) for n, x in targets.items()}
        tables = (tensor_tables(module)[0] for module in modules_of([self.module]))
        present = {id(x): x for table in tables for x in table.values() if x is not None}
        if missing := [name for name, x in targets.items() if id(x) not in present]:
            raise ValueError(
                f"The model's parameters {missing} were replaced by other tensors since the "
                "operator was built (by load_state_dict(assign=True), an assignment, or pruning). "
                "Build a new operator."
            )
        constants = {k: without_history(x) for k, x in present.items() if k not in tensors}
        return tensors | constants


class FunctionalModel(Model):
    """A function ``(params, X) -> output`` of a dictionary of parameters."""

    def __init__(self, function: Callable, params: Mapping[str, Tensor]):
        dictionary = UserDictionary(params, {name: name for name in params})
        super().__init__(function, dict(params), dictionary)
        check_distinct(list(self.params.values()), {id(p): n for n, p in self.params.items()})

    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the function."""
        params = self.params
        return self.source({n: with_attributes(x, params[n]) for n, x in values.items()}, X)

    def to(self, device: torch.device | str) -> None:
        """Move the parameters."""
        self.follow(moves=True)
        self.params = {name: param.to(device) for name, param in self.params.items()}


class ClosureModel(Model):
    """A function ``X -> output`` that uses the very tensors in ``params``."""

    substitutable = False

    def __init__(self, function: Callable, params: Iterable[Tensor]):
        params = list(params)
        super().__init__(function, {str(i): param for i, param in enumerate(params)})
        check_distinct(params, {id(param): str(i) for i, param in enumerate(params)})
        if computed := [i for i, param in enumerate(params) if not param.is_leaf]:
            raise ValueError(
                f"{computed} of params are computed from other tensors, as views of a flat one "
                "are. Pass the tensors that they are computed from, and let the function compute "
                "them."
            )
        self.held: set[str] = set()  # those that the function was seen to refer to

    def __call__(self, values: Mapping[str, Tensor], X: Any) -> Any:
        """Evaluate the closure."""
        return self.source(X)

    def to(self, device: torch.device | str) -> None:
        """Move the values of the user's tensors."""
        for param in self.params.values():
            param.data = param.data.to(device)

    def __deepcopy__(self, memo: dict) -> "ClosureModel":
        """Share the tensors: the function, which is not copied, uses these."""
        return ClosureModel(self.source, self.params.values())

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
    """Return the model that a user describes by ``model_func`` and ``params``.

    Raises:
        TypeError: If they are not of a kind described in ``DataLinearOperator``.
        ValueError: If ``params`` is empty, has an entry twice, or one that the model lacks.
    """
    params = read_params(params)
    if isinstance(model_func, nn.Module):
        return ModuleModel(model_func, params)
    if not callable(model_func):
        raise TypeError(
            f"model_func must be a Module or a function, got {type(model_func).__name__}."
        )
    return (FunctionalModel if is_named(params) else ClosureModel)(model_func, params)


def train_flags(roots: Iterable[nn.Module]) -> tuple[bool, ...]:
    """Return which modules, children included, are in train mode."""
    return tuple(module.training for module in modules_of(roots))
