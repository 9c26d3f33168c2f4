"""Records how a forward pass uses parameters."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from curvlinops.autodiff.graph_checks import DIFFERENTIATING
from curvlinops.layers.composed import COMPOSED, WRITING
from curvlinops.layers.uses import RULES, Rule, Use
from curvlinops.support.pytree import leaves
from curvlinops.support.torch_internals import in_transform

#: A function, and how often it was called before with something tracked.
Call = tuple[Callable, int]


class Change(IntEnum):
    """What to do about a call that has one row for all samples."""

    ENLARGE = 1
    FOLLOW = 2


class Called:
    """What a call returned, and what it read.

    Args:
        output: What it returned.
        inputs: The call's tensors that are not tracked.
        in_place: Whether the output was written to.

    Attributes:
        edge: Where the output's gradient passes, perhaps in another shape.
        shape: The output's shape.
        dtype: The output's dtype.
    """

    def __init__(self, output: Tensor, inputs: Iterable[Tensor], in_place: bool):
        self.shape, self.dtype = output.shape, output.dtype
        kept = list(inputs)
        # writing to a view takes its node out of the graph, but not that of what it is a view of
        self._entries: Tensor | None = None
        if output._is_view() and _covers(output, output._base):
            output = output._base
        elif output._is_view() and in_place and _lies_in(output, output._base):
            self._entries = _entries(output, output._base)
            output = output._base
        elif output._is_view():
            kept.append(output.detach())
        self.edge: GradientEdge = get_gradient_edge(output)
        self._versions = [(x, x._version) for x in kept if not x.is_inference()]

    def at_output(self, parts: Sequence[Tensor | None], u: Tensor) -> Tensor:
        """Return gradients at the output, ``[V, *shape]``.

        Args:
            parts: Those that pass the edge, of some vectors each; ``None`` if they are zero.
            u: What was backpropagated, ``[V, *]``.
        """
        if not parts or parts[0] is None:
            return u.new_zeros(u.shape[0], *self.shape, dtype=self.dtype)
        g = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._entries is not None:
            g = g.flatten(1)[:, self._entries]
        return g.reshape(g.shape[0], *self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether what passes the edge has the output's entries, in their order."""
        return self._entries is None

    @property
    def overwritten(self) -> bool:
        """Whether an input was written to after the call, or an output that is part of another."""
        return any(x._version != version for x, version in self._versions)


class Recorded(NamedTuple):
    """A use of a tracked tensor.

    Attributes:
        use: How it enters the output.
        function: What was called.
        tensor: The tensor as the call got it: a parameter, or a function of parameters.
        called: The call, the same for all tensors that it got.
    """

    use: Use
    function: Callable
    tensor: Tensor
    called: Called


class Capture(TorchFunctionMode):
    """Watches parameters, and functions of parameters alone, while a model runs.

    A call that ``RULES`` know gets copies of its parameters without history. What the graph still
    connects with the parameters afterwards is what was not recorded.

    Args:
        leaves: The parameters.
        changes: What to do about calls with one row for all samples: let their input have one for
            each, or take their output for a function of the parameters alone.
        num_samples: How many.

    Attributes:
        uses: Recorded uses, in the order of the calls.
        has_hooks: Whether the model registered hooks on tensors, which may change gradients.

    Raises:
        RuntimeError: While the model runs, if it differentiates: calls do not show then how
            parameters enter.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        changes: Mapping[Call, Change] | None = None,
        num_samples: int = 1,
    ):
        super().__init__()
        self._tracked: dict[int, Tensor] = {id(leaf): leaf for leaf in leaves.values()}
        self._changes, self._num_samples = dict(changes or {}), num_samples
        self._calls: Counter[Callable] = Counter()
        self._inside: set[tuple] = set()
        self.uses: dict[tuple[Call, int | str], Recorded] = {}
        self.has_hooks = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and record it if it uses a tracked tensor."""
        kwargs = kwargs or {}
        if func in DIFFERENTIATING:
            raise RuntimeError("it computes gradients itself")
        self.has_hooks |= func is Tensor.register_hook
        tensors = leaves((args, kwargs))
        tracked = [x for x in tensors if id(x) in self._tracked]
        if not tracked or not torch.is_grad_enabled() or in_transform():
            return func(*args, **kwargs)
        rule = RULES.get(func)
        alone = len(tracked) == len(tensors) and not (rule and rule.repeats)
        if alone or (func is Tensor.__getitem__ and _selects(args[1])):
            return self._follow(func(*args, **kwargs))
        if rule is not None:
            return self._record(func, rule, args, kwargs)
        if func in WRITING:
            return WRITING[func](self, *args, **kwargs)
        inner = COMPOSED.get(func) or _unwrapped(func)
        call = (func, *map(id, tensors))
        if inner is func or call in self._inside:  # it still asks whether someone watches
            return func(*args, **kwargs)
        self._inside.add(call)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self._inside.discard(call)

    def _record(self, func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
        index = func, self._calls[func]
        self._calls[func] += 1
        change = self._changes.get(index)
        if change is Change.FOLLOW or (change and (rule.reads or rule.repeats)):
            out = func(*args, **kwargs)
            # what other parameters enter by uses of their own would be lost
            return out if self._meets_others(args, kwargs) else self._follow(out)
        if change is Change.ENLARGE:
            args, kwargs = self._enlarge(args, kwargs)
        constant = {}

        def freeze(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in constant:
                constant[id(x)] = x.detach().clone() if rule.in_place else x.detach()
            return constant[id(x)]

        known = rule(tuple(freeze(x) for x in args), {key: freeze(x) for key, x in kwargs.items()})
        places: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        recorded = {key: places[key] for key in known if id(places[key]) in self._tracked}
        if (rule.in_place and 0 in recorded) or not recorded:
            return func(*args, **kwargs)
        copies = {key: x.detach().requires_grad_() for key, x in recorded.items()}
        args = tuple(copies.get(place, x) for place, x in enumerate(args))
        kwargs = {key: copies.get(key, x) for key, x in kwargs.items()}
        out = func(*args, **kwargs)
        called = Called(out, constant.values(), rule.in_place)
        for key, tensor in recorded.items():
            self.uses[index, key] = Recorded(known[key], func, tensor, called)
        return out

    def _enlarge(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give the call's first tensor that is not tracked a row for each sample."""

        def enlarged(x: Any) -> Any:
            if not done and isinstance(x, Tensor) and id(x) not in self._tracked:
                done.append(x)
                axis = x.shape.index(1) if x.ndim > 1 and 1 in x.shape else None
                if axis is None:
                    return x.expand(self._num_samples, *x.shape)
                return x.expand(*x.shape[:axis], self._num_samples, *x.shape[axis + 1 :])
            return x

        done: list[Tensor] = []
        args = tuple(enlarged(x) for x in args)
        return args, {key: enlarged(x) for key, x in kwargs.items()}

    def _meets_others(self, args: tuple, kwargs: dict) -> bool:
        """Return whether a call's constants depend on parameters."""
        others = (x for x in leaves((args, kwargs)) if id(x) not in self._tracked)
        return any(x.requires_grad for x in others)

    def follows(self, x: Any) -> bool:
        """Return whether a tensor is a parameter or a function of parameters alone."""
        return id(x) in self._tracked

    def follow_into(self, target: Tensor, value: Any) -> None:
        """Follow what is about to be written into a constant, or into such a function."""
        if self.follows(value) and not target.requires_grad:
            self._tracked[id(target)] = target
        elif isinstance(value, Tensor) and value.requires_grad and not self.follows(value):
            self._tracked.pop(id(target), None)

    def _follow(self, out: Any) -> Any:
        """Track and return what is computed from tracked tensors alone."""
        for x in leaves(out):
            if x.is_floating_point() and x.requires_grad:
                self._tracked[id(x)] = x
        return out


def _selects(index: Any) -> bool:
    """Return whether an index reads the same for all samples, as the number of an expert does."""
    return not any(x.ndim or x.dtype == torch.bool for x in leaves(index))


def _covers(view: Tensor, base: Tensor) -> bool:
    """Return whether a view has all entries of a tensor, in their order."""
    same = view.is_contiguous() and view.numel() == base.numel()
    return same and _lies_in(view, base)


def _lies_in(view: Tensor, base: Tensor) -> bool:
    """Return whether a view has some entries of a tensor with a gradient."""
    return base.is_contiguous() and base.requires_grad and base.dtype == view.dtype


def _entries(view: Tensor, base: Tensor) -> Tensor:
    """Return which entries of a contiguous tensor a view of it has."""
    places = torch.arange(base.numel(), device=base.device)
    start = view.storage_offset() - base.storage_offset()
    return places.as_strided(view.shape, view.stride(), start)


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_UNWRAPPED: dict[Callable, Callable] = {}


class _Unwatched(ModuleType):
    """PyTorch, or one of its modules, where nobody watches calls."""

    def __init__(self, module: ModuleType):
        super().__init__(module.__name__)
        self.__module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__module, name)
        if name in _CHECKS:
            return lambda *args: False
        return _Unwatched(value) if value is torch.overrides else value


def _unwrapped(func: Callable) -> Callable:
    """Return a Python function such that the calls inside of it can be watched.

    PyTorch's own, and users' that follow its protocol, would ask whether someone watches, and then
    call themselves through the watcher.
    """
    if not isinstance(func, FunctionType) or not set(_CHECKS) & set(func.__code__.co_names):
        return func
    if func not in _UNWRAPPED:
        names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *args: False)}
        for name, value in func.__globals__.items():
            if value is torch or value is torch.overrides:
                names[name] = _Unwatched(value)
        inner = FunctionType(
            func.__code__, names, func.__name__, func.__defaults__, func.__closure__
        )
        inner.__kwdefaults__ = func.__kwdefaults__
        _UNWRAPPED[func] = inner
    return _UNWRAPPED[func]
