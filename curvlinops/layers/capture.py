"""Records how a forward pass uses parameters."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from curvlinops.layers.batch_axis import Call, candidates
from curvlinops.layers.decompositions import COMPOSED, WRITING
from curvlinops.layers.gradients import Entries
from curvlinops.layers.rules import RULES, Rule, Use
from curvlinops.structured.layout import ParameterView
from curvlinops.support.autograd_graph import DIFFERENTIATING
from curvlinops.support.pytree import leaves, map_leaves
from curvlinops.support.torch_internals import base_of, in_transform, version_of

#: Functions that take only shape, dtype and device from their tensor.
_FACTORIES = {
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(torch.rand_like, torch.randn_like),
}

#: Functions whose results have the same entries, perhaps in another dtype or order of memory.
_COPIES = {
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.clone, torch.clone, Tensor.contiguous),
    *(Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16),
}

#: Functions that take only shape or dtype from their second tensor.
_LIKE = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}


class ViewOf(NamedTuple):
    """A tensor as a view of entries of a parameter.

    Attributes:
        name: The parameter.
        view: The same view of a tensor without numbers that has the parameter's shape.
    """

    name: str
    view: Tensor

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "ViewOf":
        """Return the view of all entries."""
        return cls(name, torch.empty(shape, device="meta"))

    def after(self, function: Callable[[Tensor], Any]) -> "list[ViewOf | None]":
        """Return the views that a function makes of this one, ``None`` where it makes a copy."""
        try:
            found = leaves(function(self.view))
        except (RuntimeError, NotImplementedError):  # there is no such view
            return []
        return [ViewOf(self.name, x) if _base(x) is _base(self.view) else None for x in found]

    def entries(self, layout: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Entries | None:
        """Return the entries in another order.

        Args:
            layout: Brings them into this order.
            shape: The parameter's shape.

        Returns:
            ``None`` if that is no view in which each entry occurs once.
        """
        found = self.after(layout)
        view = ParameterView.of_tensor(self.name, found[0].view) if found and found[0] else None
        return None if view is None else Entries(view, tuple(shape))


class CallOutput:
    """The output of a call, and the tensors that the call read.

    Args:
        output: The output.
        inputs: The call's tensors that are not tracked.

    Attributes:
        edge: The edge of the graph that the output's gradient passes, perhaps in another shape.
        shape: The output's shape.
        dtype: The output's dtype.
    """

    def __init__(self, output: Tensor, inputs: Iterable[Tensor]):
        self.shape, self.dtype = output.shape, output.dtype
        kept = list(inputs)
        # writing to a view takes its node out of the graph, but not the node of its base
        base = base_of(output)
        if base is not None and _covers(output, base):
            output = base
        elif base is not None:
            kept.append(output.detach())
        self.edge: GradientEdge = get_gradient_edge(output)
        self._versions = [(x, version_of(x)) for x in kept if not x.is_inference()]

    def at_output(self, parts: Sequence[Tensor | None], u: Tensor) -> Tensor:
        """Return gradients at the output, ``[V, *shape]``.

        Args:
            parts: Gradients that pass the edge, of some vectors each; ``None`` if they are zero.
            u: The vectors that were backpropagated, ``[V, *]``.
        """
        if not parts or parts[0] is None:
            return u.new_zeros(u.shape[0], *self.shape, dtype=self.dtype)
        g = parts[0] if len(parts) == 1 else torch.cat(parts)
        return g.reshape(g.shape[0], *self.shape)

    @property
    def overwritten(self) -> bool:
        """Whether an input was written to after the call, or an output that is part of another."""
        return any(version_of(x) != version for x, version in self._versions)


class RecordedUse(NamedTuple):
    """A use of a tracked tensor.

    Attributes:
        use: The way in which the output depends on it.
        tensor: The tensor as the call got it: a parameter, or a function of parameters.
        view_of: Its entries of a parameter, ``None`` if it is another function.
        lookup: The lookup in a table of which it is a function, row by row.
        output: The call's output, the same for all tensors that it got.
    """

    use: Use
    tensor: Tensor
    view_of: ViewOf | None
    lookup: "LookedUp | None"
    output: CallOutput


class LookedUp(NamedTuple):
    """A lookup in a table at constant indices, such as those of positions.

    Attributes:
        output: The rows that were looked up, a function of the table.
        use: The way in which these depend on the table.
        tensor: The table: a parameter, or a function of parameters.
        view_of: Its entries of a parameter, ``None`` if it is another function.
    """

    output: Tensor
    use: Use
    tensor: Tensor
    view_of: ViewOf | None


class _Tensors:
    """A set of tensors; one that is written to leaves it."""

    def __init__(self, tensors: Iterable[Tensor] = ()):
        self._entries: dict[int, tuple[ref, int]] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors as they are now."""
        self._entries |= {id(x): (ref(x), version_of(x)) for x in tensors}

    def was_added(self, x: Any) -> bool:
        """Return whether a tensor was ever added."""
        return id(x) in self._entries and self._entries[id(x)][0]() is x

    def __contains__(self, x: Any) -> bool:
        return self.was_added(x) and self._entries[id(x)][1] == version_of(x)


class _Origin(NamedTuple):
    """The call that returned a tensor, and its place among all that this call returned."""

    function: Callable
    args: tuple
    kwargs: dict
    place: int


class Capture(TorchFunctionMode):
    """Records how parameters, and functions of parameters and constants, meet data.

    A call that ``RULES`` know gets copies of its parameters without history. If the output's graph
    still reaches a parameter, one of its uses was not recorded.

    Data are the tensors of a batch, and tensors that are computed of them; all others are constant.
    A call without data returns a constant, or a function of parameters, for example the embeddings
    of positions. Such a function may have a row for each sample, as an expanded class token has. If
    it meets data in a call that shows no axis of samples, the calls that made it are repeated and
    recorded, with constants as data.

    Args:
        leaves: The parameters.
        data: The tensors of the batch; if there are none, no tensor is known to be constant.
        num_samples: How many samples the batch has; ``None`` if that is not evident.

    Attributes:
        uses: The recorded uses, in the order of the calls.

    Raises:
        RuntimeError: While the model runs, if it differentiates: calls do not show then how
            parameters enter.
    """

    def __init__(
        self, leaves: Mapping[str, Tensor], data: Sequence[Tensor], num_samples: int | None
    ):
        super().__init__()
        self._leaves = {id(leaf) for leaf in leaves.values()}
        self._knows_data, self._data = bool(data), _Tensors(data)
        self._constants, self._functions = _Tensors(), _Tensors()
        self._views = {id(x): ViewOf.whole(name, x.shape) for name, x in leaves.items()}
        self._origins: dict[int, _Origin] = {}
        self._recomputed: dict[int, Tensor] = {}
        self._num_samples = num_samples
        self._calls: Counter[Callable] = Counter()
        self._inside: set[tuple] = set()
        self.uses: dict[tuple[Call, int | str], RecordedUse] = {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and record it if a parameter meets data."""
        kwargs = kwargs or {}
        if func in DIFFERENTIATING:
            raise RuntimeError("it computes gradients itself")
        if in_transform():
            return func(*args, **kwargs)
        tensors = leaves((args, kwargs))
        tracked = [x for x in tensors if self.follows(x)]
        constant = [x for x in tensors if self._is_constant(x)]
        read = tensors[1:] if func in _FACTORIES else tensors[: 1 if func in _LIKE else None]
        without_data = self.without_data(read)
        if not torch.is_grad_enabled() or not tracked:
            out = func(*args, **kwargs)
            if not without_data:
                self._data.add(x for x in leaves(out) if not x.requires_grad)
            elif self._knows_data:
                self._constants.add([*constant, *leaves(out)])
            return out
        if func in WRITING:
            return WRITING[func](self, *args, **kwargs)
        rule = RULES.get(func)
        inner = func if rule else COMPOSED.get(func) or _unwrapped(func)
        if without_data and (inner is func or len(tracked) == len(read)):
            return self._follow(func, args, kwargs)
        if _selects(func, args):
            return self._follow(func, args, kwargs)
        if rule is not None:
            return self._record(func, rule, args, kwargs)
        call = (func, *map(id, tensors))
        if inner is func or call in self._inside:  # it would call itself through this mode
            args, kwargs = self._with_data(args, kwargs)
            return func(*args, **kwargs)
        self._inside.add(call)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self._inside.discard(call)

    def _record(self, func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
        constant = {}

        def freeze(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in constant:
                constant[id(x)] = x.detach().clone() if rule.in_place else x.detach()
            return constant[id(x)]

        known = rule(tuple(freeze(x) for x in args), {key: freeze(x) for key, x in kwargs.items()})
        places: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        recorded = {key: places[key] for key in known if self.follows(places[key])}
        if not recorded or (rule.in_place and (0 in recorded or _is_part(args[0]))):
            return func(*args, **kwargs)
        unfit = {key: x for key, x in recorded.items() if not self._fits(known[key])}
        if self._num_samples == 1:  # a tensor with all axes may have a row for the sample
            num_axes = max(1, *(x.ndim for x in constant.values()))
            unfit |= {k: x for k, x in recorded.items() if x.ndim == num_axes and len(x) == 1}
        data = {key: self.as_data(x) for key, x in unfit.items()}
        if any(x is not unfit[key] for key, x in data.items()):
            args = tuple(data.get(place, x) for place, x in enumerate(args))
            with self:
                return func(*args, **{key: data.get(key, x) for key, x in kwargs.items()})
        call = func, self._calls[func]
        self._calls[func] += 1
        copies = {key: x.detach().requires_grad_() for key, x in recorded.items()}
        args = tuple(copies.get(place, x) for place, x in enumerate(args))
        kwargs = {key: copies.get(key, x) for key, x in kwargs.items()}
        out = func(*args, **kwargs)
        output = CallOutput(out, constant.values())
        for key, tensor in recorded.items():
            view, lookup = self._views.get(id(tensor)), self._lookup(tensor)
            self.uses[call, key] = RecordedUse(known[key], tensor, view, lookup, output)
        return out

    def _fits(self, use: Use) -> bool:
        """Return whether the axes that number a use's rows may number samples."""
        if not self._num_samples:
            return bool(use.row_shape)
        if self._num_samples == 1:
            return 1 in use.row_shape
        return bool(candidates(use.row_shape, self._num_samples))

    def follows(self, x: Any) -> bool:
        """Return whether a tensor is a parameter or a function of parameters and constants."""
        return id(x) in self._leaves or x in self._functions

    def without_data(self, *trees: Any) -> bool:
        """Return whether all tensors in containers are constants, parameters or their functions."""
        return all(self.follows(x) or self._is_constant(x) for x in leaves(trees))

    def _is_constant(self, x: Tensor) -> bool:
        if self._constants.was_added(x):
            return x in self._constants
        is_computed = x.requires_grad and not x.is_leaf
        if not self._knows_data or is_computed or self._data.was_added(x) or self.follows(x):
            return False
        self._constants.add([x])
        return True

    def written(self, x: Tensor) -> None:
        """Follow a tensor into which parameters, or functions of them, were written."""
        self._origins.pop(id(x), None)
        self._recomputed.pop(id(x), None)
        self._views.pop(id(x), None)
        self._functions.add([x])

    def as_data(self, x: Any) -> Any:
        """Return a function of parameters as data, if it may have a row for each sample.

        The tensor is computed again: calls that repeat parameters, or in which they meet constants
        with rows for samples, are recorded. Where there are none, it is the same tensor.
        """
        if id(x) not in self._origins or not self.follows(x):
            return x
        if id(x) not in self._recomputed:
            self._recomputed[id(x)] = self._recompute(x, self._origins[id(x)])
        return self._recomputed[id(x)]

    def _recompute(self, x: Tensor, origin: _Origin) -> Tensor:
        func, args, kwargs, place = origin
        rule = None if _selects(func, args) else RULES.get(func)
        repeats = any(not self.follows(y) for y in leaves((args, kwargs)))
        uses = rule(args, kwargs).values() if rule and (repeats or rule.repeats) else ()
        if any(self._fits(use) for use in uses):
            return leaves(self._record(func, rule, args, kwargs))[place]
        new_args, new_kwargs = self._with_data(args, kwargs)
        before, after = leaves((args, kwargs)), leaves((new_args, new_kwargs))
        if all(old is new for old, new in zip(before, after, strict=True)):
            return x
        with self:
            return leaves(func(*new_args, **new_kwargs))[place]

    def _with_data(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return a call's arguments ``as_data``."""
        return map_leaves((args, kwargs), self.as_data)

    def _lookup(self, x: Tensor) -> LookedUp | None:
        """Return the lookup in a table of which a tensor is a function, row by row."""
        while id(x) in self._origins:
            func, args, kwargs, _ = self._origins[id(x)]
            if func is torch.embedding:
                (use,) = RULES[func](args, kwargs).values()
                return LookedUp(x, use, args[0], self._views.get(id(args[0])))
            sources = [y for y in leaves((args, kwargs)) if self.follows(y)]
            if len(sources) != 1 or sources[0].shape != x.shape:
                return None
            (x,) = sources
        return None

    def _follow(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Make a call without data, and track what it returns."""
        out = func(*args, **kwargs)
        inputs = {id(x) for x in leaves((args, kwargs))}
        views = self._views_after(func, args, kwargs, out)
        for place, x in enumerate(leaves(out)):
            if not x.requires_grad:
                self._constants.add([x] if self._knows_data else [])
            elif x.is_floating_point() and not self.follows(x):
                self.written(x)
                if id(x) not in inputs:
                    self._origins[id(x)] = _Origin(func, args, kwargs, place)
                    self._views[id(x)] = views[place]
        return out

    def _views_after(
        self, func: Callable, args: tuple, kwargs: dict, out: Any
    ) -> "list[ViewOf | None]":
        """Return the views of parameters that a call without data returned."""
        outputs, sources = leaves(out), [x for x in leaves((args, kwargs)) if self.follows(x)]
        unknown: list[ViewOf | None] = [None] * len(outputs)
        source = sources[0] if len(sources) == 1 else None
        view = self._views.get(id(source))
        if source is None or view is None:
            return unknown
        if func in _COPIES and outputs:
            # the derivative of a cast between real and complex numbers is not one
            same = source.is_floating_point() and outputs[0].device == source.device
            return [view] if same else unknown
        if any(_base(x) is not _base(source) for x in outputs):
            return unknown

        def view_without_numbers(x: Tensor) -> Any:
            new_args, new_kwargs = map_leaves((args, kwargs), lambda y: x if y is source else y)
            return func(*new_args, **new_kwargs)

        return view.after(view_without_numbers) or unknown


def _base(x: Tensor) -> Tensor:
    """Return the tensor of which another one is a view, or the tensor itself."""
    base = base_of(x)
    return x if base is None else base


def _selects(func: Callable, args: tuple) -> bool:
    """Return whether a call reads the same for all samples, as the weight of one expert."""
    indices = leaves(args[1]) if func is Tensor.__getitem__ else None
    return indices is not None and not any(x.ndim or x.dtype == torch.bool for x in indices)


def _covers(view: Tensor, base: Tensor) -> bool:
    """Return whether a view has all entries of a tensor with a gradient, in their order."""
    same = view.is_contiguous() and view.numel() == base.numel() and view.dtype == base.dtype
    return same and base.is_contiguous() and base.requires_grad


def _is_part(x: Tensor) -> bool:
    """Return whether a tensor is a view of some entries of another one."""
    base = base_of(x)
    return base is not None and not (x.is_contiguous() and x.numel() == base.numel())


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_UNWRAPPED: dict[Callable, Callable] = {}


def _unwrapped(func: Callable) -> Callable:
    """Return a Python function such that the calls inside of it can be watched.

    PyTorch's own would ask whether someone watches, and then call themselves through the watcher.
    """
    if not isinstance(func, FunctionType) or not set(_CHECKS) & set(func.__code__.co_names):
        return func
    if func not in _UNWRAPPED:
        names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *args: False)}
        inner = FunctionType(
            func.__code__, names, func.__name__, func.__defaults__, func.__closure__
        )
        inner.__kwdefaults__ = func.__kwdefaults__
        _UNWRAPPED[func] = inner
    return _UNWRAPPED[func]
