"""Records how a forward pass uses parameters."""

import dis
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, lru_cache
from math import prod
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from curvlinops.autodiff.scattering import leaf_of, stand_in, with_history
from curvlinops.autodiff.sharding import SavedParameter, Shards
from curvlinops.layers.batch_axis import Call, UseKey, candidates
from curvlinops.layers.decompositions import COMPOSED
from curvlinops.layers.gradients import Entries
from curvlinops.layers.rules import RULES, Rule, Use
from curvlinops.structured.layout import ParameterView
from curvlinops.support.autograd_graph import DIFFERENTIATING
from curvlinops.support.pytree import leaves, map_leaves
from curvlinops.support.torch_internals import (
    base_of,
    have_saved_tensor_hooks,
    in_transform,
    version_of,
)

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

# --- what is recorded


class ViewOf(NamedTuple):
    """A tensor as a view of entries of a parameter.

    Attributes:
        name: The parameter.
        shape: The parameter's shape.
        view: The same view of a tensor without numbers that has the parameter's shape.
    """

    name: str
    shape: tuple[int, ...]
    view: Tensor

    @classmethod
    @lru_cache(maxsize=4096)  # the same parameters come again with each batch
    def whole(cls, name: str, shape: tuple[int, ...]) -> "ViewOf":
        """Return the view of all entries."""
        return cls(name, tuple(shape), torch.empty(shape, device="meta"))

    def after(self, function: Callable[[Tensor], Any]) -> "list[ViewOf | None]":
        """Return the views that a function makes of this one, ``None`` where it makes a copy."""
        try:
            results = leaves(function(self.view))
        except (RuntimeError, NotImplementedError):  # there is no such view
            return []
        return [self._replace(view=x) if _base(x) is _base(self.view) else None for x in results]

    def entries(self, use: Use) -> Entries | None:
        """Return the entries in the order of a use's gradients.

        Returns:
            ``None`` if that is no view in which each entry occurs once.
        """
        view = self.view
        memory = tuple(view.shape), view.stride(), view.storage_offset()
        return _entries(self.name, self.shape, *memory, use.axes)


@lru_cache(maxsize=4096)  # the same layers come again with each batch
def _entries(
    name: str,
    parameter: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    axes: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Entries | None:
    whole = ViewOf.whole(name, (prod(parameter),))
    view: ViewOf | None = whole._replace(view=whole.view.as_strided(shape, strides, offset))
    if axes is not None:
        new_shape, order = axes
        (view,) = view.after(lambda x: x.reshape(new_shape).permute(order)) or [None]
    entries = ParameterView.of_tensor(name, view.view) if view else None
    return None if entries is None else Entries(entries, parameter)


class CallOutput:
    """The output of a call, and the tensors that the call read.

    Only tensors that are still in memory are watched. A tensor that no rule keeps may be freed, and
    may be written to.

    Args:
        output: The output.
        inputs: The call's tensors that are not tracked.

    Attributes:
        edge: The edge of the graph that the output's gradient passes, perhaps in another shape.
        shape: The output's shape.
        dtype: The output's dtype.
    """

    def __init__(self, output: Tensor, inputs: Sequence[Tensor]):
        self.shape, self.dtype = output.shape, output.dtype
        self._view: Tensor | None = None
        read = list(inputs)
        # writing to a view takes its node out of the graph, but not the node of its base
        base = base_of(output)
        if base is not None and _covers(output, base):
            output = base
        elif base is not None:
            self._view = output.detach()
            read.append(self._view)
        self.edge: GradientEdge = get_gradient_edge(output)
        self._versions = [(ref(x), version_of(x)) for x in read if not x.is_inference()]

    def at_output(self, gradients: Sequence[Tensor | None], u: Tensor) -> Tensor:
        """Return gradients at the output, ``[V, *shape]``.

        Args:
            gradients: What passes the edge, for some vectors each; ``None`` if it is zero.
            u: The vectors that were backpropagated, ``[V, *]``.
        """
        if not gradients or gradients[0] is None:
            return u.new_zeros(u.shape[0], *self.shape, dtype=self.dtype)
        g = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        return g.reshape(g.shape[0], *self.shape)

    def is_tensor(self, x: Tensor) -> bool:
        """Return whether a tensor with a graph is the output."""
        edge = get_gradient_edge(x)
        same = edge.node is self.edge.node and edge.output_nr == self.edge.output_nr
        return same and x.shape == self.shape

    @property
    def overwritten(self) -> bool:
        """Whether a watched input, or an output that is a view, was written to after the call."""
        alive = ((x(), version) for x, version in self._versions)
        return any(x is not None and version_of(x) != version for x, version in alive)


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

    @property
    def entries(self) -> Entries | None:
        """The entries of a parameter that the table has, in the order of gradients."""
        return self.view_of and self.view_of.entries(self.use)


@dataclass(eq=False)
class RecordedUse:
    """A use of a parameter, or of a function of parameters, in a forward pass.

    Attributes:
        call: The call.
        argument: The position or the name of the argument.
        use: The way in which the call's output depends on it.
        tensor: The argument that the model passed: a parameter, or a function of parameters. One
            that was gathered has no values here.
        copy: The copy without history that the call got. Autograd's gradient with respect to it
            is the sum of this use's gradients. One of a gathered tensor has no values here.
        is_gathered: Whether the argument is a view of a parameter that was gathered.
        view_of: Its entries of a parameter, ``None`` if it is another function.
        lookup: The lookup whose rows the tensor is a function of, row by row; ``None`` without one.
        output: The call's output, the same for all tensors that it got.
        origins: The parameters of which the tensor is a function, by name.
        rows: The axes of the rows as a pattern that shows the samples, see ``batch_axis.fits``.
            ``None`` if no axis numbers the samples, or none is known yet.
        possible: All patterns that are possible, if there are others. They differ in rows without a
            gradient.
    """

    call: Call
    argument: int | str
    use: Use
    tensor: Tensor
    copy: Tensor
    is_gathered: bool
    view_of: ViewOf | None
    lookup: LookedUp | None
    output: CallOutput
    origins: dict[str, Tensor] = field(default_factory=dict)
    rows: str | None = None
    possible: tuple[str, ...] = ()

    @property
    def key(self) -> UseKey:
        """What identifies the use from one batch to the next."""
        return UseKey(self.call, self.argument, tuple(self.origins))

    @cached_property
    def entries(self) -> Entries | None:
        """The entries of a parameter that the tensor is, in the order of gradients."""
        return self.view_of and self.view_of.entries(self.use)


# --- recording


class Role(Enum):
    """What a tensor is while a forward pass is recorded."""

    #: A tensor of the batch, or computed of such tensors.
    DATA = auto()
    #: A tensor that depends neither on data nor on parameters.
    CONSTANT = auto()
    #: A parameter, or a function of parameters and constants.
    FUNCTION = auto()


class _Origin(NamedTuple):
    """The call that returned a tensor, and the tensor's position among all that it returned."""

    function: Callable
    args: tuple
    kwargs: dict
    position: int


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of a tensor.

    Attributes:
        tensor: A weak reference to it.
        version: Its version, ``None`` if writing to it changes nothing here.
        role: Its role in this version; a constant or function that was written to is data.
        view: For a function of parameters: its entries of one, if it is a view.
        origin: The call that returned the function.
        recomputed: The same function, computed again from recorded calls.
        released: The same function without values, if it is a view of a gathered parameter.
    """

    tensor: ref
    version: int | None
    role: Role
    view: ViewOf | None = None
    origin: _Origin | None = None
    recomputed: Tensor | None = None
    released: Tensor | None = None


class Capture(TorchFunctionMode):
    """Records how parameters, and functions of parameters and constants, meet data.

    A call that ``RULES`` know gets copies of its parameters without history. If the output's graph
    still reaches a parameter, one of its uses was not recorded.

    A call without data returns a constant, or a function of parameters, for example the embeddings
    of positions. Such a function may have a row for each sample, as an expanded class token has. If
    such a tensor meets data in a call without an axis of length N, the calls that made it are
    replayed and recorded, with constants as data, so that its expansion becomes the use.

    Views of gathered parameters are not kept. In their places are tensors with the same history and
    without values, and if calls are replayed, the parameters are gathered again.

    Args:
        parameters: The parameters.
        data: The tensors of the batch; if there are none, no tensor is known to be constant.
        num_samples: How many samples the batch has; ``None`` if that is not evident.
        shards: The parameters that are gathered when the model reads them.

    Attributes:
        uses: The recorded uses, in the order of the calls.
        has_replaced: Whether a call was replaced by a composition of others.

    Raises:
        RuntimeError: While the model runs, if it differentiates: calls do not show then how
            parameters enter.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        data: Sequence[Tensor],
        num_samples: int | None,
        shards: Shards | None = None,
    ):
        super().__init__()
        self._shards = shards
        self._released: dict[int, tuple[Tensor, SavedParameter]] = {}
        self._knows_data = bool(data)
        self._known: dict[int, _Known] = {}
        for x in data:
            self._know(x, Role.DATA)
        for name, x in parameters.items():
            self._know(x, Role.FUNCTION, ViewOf.whole(name, x.shape)).version = None
        self._num_samples = num_samples
        self._calls: Counter[Callable] = Counter()
        self._inside: set[tuple] = set()
        self.uses: list[RecordedUse] = []
        self.has_replaced = False

    # --- roles

    def _know(
        self, x: Tensor, role: Role, view: ViewOf | None = None, origin: _Origin | None = None
    ) -> _Known:
        version = None if role is Role.DATA else version_of(x)
        known = self._known[id(x)] = _Known(ref(x), version, role, view, origin)
        return known

    def _function(self, x: Any) -> _Known | None:
        """Return what is known of a function of parameters, ``None`` for anything else."""
        known = self._known.get(id(x))
        if known is None or known.role is not Role.FUNCTION or known.tensor() is not x:
            return None
        return known if known.version in (None, version_of(x)) else None

    def role(self, x: Tensor) -> Role:
        """Return the role of a tensor."""
        known = self._known.get(id(x))
        if known is not None and known.tensor() is x:
            return known.role if known.version in (None, version_of(x)) else Role.DATA
        if (read := self._function(leaf_of(x))) is not None:  # of this evaluation
            self._know(x, Role.FUNCTION, read.view).version = None
            return Role.FUNCTION
        is_computed = x.requires_grad and not x.is_leaf and leaf_of(x) is None
        if is_computed or not self._knows_data:
            return Role.DATA
        return self._know(x, Role.CONSTANT).role

    # --- calls

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
        roles = [self.role(x) for x in tensors]
        read = roles[1:] if func in _FACTORIES else roles[: 1 if func in _LIKE else None]
        without_data = Role.DATA not in read
        if Role.FUNCTION not in roles or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            self._note_output(out, without_data, tensors, roles)
            return out
        rule = RULES.get(func)
        inner = func if rule else _composition(func) or _without_question(func)
        only_functions = all(role is Role.FUNCTION for role in read)
        if without_data and (inner is func or only_functions):
            return self._follow(func, args, kwargs)
        if _is_constant_index(func, args):
            return self._follow(func, args, kwargs)
        if rule is not None:
            return self._record(func, rule, args, kwargs)
        call = (func, *map(id, tensors))
        if inner is func or call in self._inside:  # it would call itself through this mode
            args, kwargs = self._with_data(args, kwargs)
            return func(*args, **kwargs)
        self.has_replaced |= func in COMPOSED
        self._inside.add(call)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self._inside.discard(call)

    def _note_output(
        self, out: Any, without_data: bool, tensors: list[Tensor], roles: list[Role]
    ) -> None:
        """Note the roles of what a call without functions of parameters returned."""
        if not without_data:
            for x in leaves(out):
                if not x.requires_grad:
                    self._know(x, Role.DATA)
        elif self._knows_data:
            # the call may have written to a constant
            constants = (x for x, role in zip(tensors, roles, strict=True) if role is Role.CONSTANT)
            for x in (*constants, *leaves(out)):
                self._know(x, Role.CONSTANT)

    def _record(self, func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
        constant: dict[int, Tensor] = {}

        def freeze(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) not in constant:
                constant[id(x)] = x.detach().clone() if rule.in_place else x.detach()
            return constant[id(x)]

        uses = rule(tuple(freeze(x) for x in args), {key: freeze(x) for key, x in kwargs.items()})
        arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        functions = {key: self._function(arguments[key]) for key in uses}
        recorded = {key: arguments[key] for key, known in functions.items() if known is not None}
        if not recorded or (rule.in_place and (0 in recorded or _is_partial_view(args[0]))):
            return func(*args, **kwargs)
        unfit = {key: x for key, x in recorded.items() if not self._fits(uses[key])}
        if self._num_samples == 1:  # a tensor with all axes may have a row for the sample
            num_axes = max(1, *(x.ndim for x in constant.values()))
            unfit |= {k: x for k, x in recorded.items() if x.ndim == num_axes and len(x) == 1}
        data = {key: self.as_data(x) for key, x in unfit.items()}
        if any(x is not unfit[key] for key, x in data.items()):
            args = tuple(data.get(position, x) for position, x in enumerate(args))
            with self:
                return func(*args, **{key: data.get(key, x) for key, x in kwargs.items()})
        call = func, self._calls[func]
        self._calls[func] += 1
        copies, given = dict[int | str, Tensor](), dict[int | str, Tensor]()
        sources = {key: self._without_values(x) for key, x in recorded.items()}
        for key, x in recorded.items():
            values = x.detach()
            if sources[key] is x:
                copies[key] = given[key] = values.requires_grad_()
            else:  # the graph keeps the copy
                copies[key] = stand_in(x).requires_grad_()
                given[key] = with_history(values, copies[key])
        args = tuple(given.get(position, x) for position, x in enumerate(args))
        out = func(*args, **{key: given.get(key, x) for key, x in kwargs.items()})
        output = CallOutput(out, list(constant.values()))
        for key, x in recorded.items():
            view, lookup, source = functions[key].view, self._lookup(x), sources[key]
            is_gathered = source is not x
            self.uses.append(
                RecordedUse(
                    *(call, key, uses[key], source, copies[key], is_gathered, view, lookup, output)
                )
            )
        return out

    def _without_values(self, x: Any) -> Any:
        """Return a view of a gathered parameter without its memory, anything else unchanged."""
        if self._shards is None or (known := self._function(x)) is None:
            return x
        if known.released is None and (saved := self._shards.saved(x)) is not None:
            known.released = leaf_of(x)
            if known.released is None:
                known.released = with_history(stand_in(x), x)
                self._know(known.released, Role.FUNCTION, known.view, known.origin)
            self._released[id(known.released)] = known.released, saved
        return x if known.released is None else known.released

    def _with_values(self, x: Any) -> Any:
        """Return the view of a gathered parameter of which ``x`` is the result without memory."""
        if id(x) not in self._released:
            return x
        source, saved = self._released[id(x)]
        known, values = self._function(source), with_history(self._shards.restored(saved), source)
        self._know(values, Role.FUNCTION, known.view, known.origin)
        return values

    def _fits(self, use: Use) -> bool:
        """Return whether the axes that number a use's rows may number samples."""
        if not self._num_samples:
            return any(length > 1 for length in use.row_shape)
        if self._num_samples == 1:
            return 1 in use.row_shape
        return bool(candidates(use.row_shape, self._num_samples))

    def as_data(self, x: Any) -> Any:
        """Return a function of parameters as data, if it may have a row for each sample.

        The tensor is computed again: calls that repeat parameters, or in which they meet constants
        with rows for samples, are recorded. Where there are none, it is the same tensor.
        """
        known = self._function(x)
        if known is None or known.origin is None:
            return x
        if known.recomputed is None:
            known.recomputed = self._recompute(x, known.origin)
        return known.recomputed

    def _recompute(self, x: Tensor, origin: _Origin) -> Tensor:
        func, args, kwargs, position = origin
        args, kwargs = map_leaves((args, kwargs), self._with_values)
        rule = None if _is_constant_index(func, args) else RULES.get(func)
        repeats = any(self._function(y) is None for y in leaves((args, kwargs)))
        uses = rule(args, kwargs).values() if rule and (repeats or rule.repeats) else ()
        if any(self._fits(use) for use in uses):
            return leaves(self._record(func, rule, args, kwargs))[position]
        new_args, new_kwargs = self._with_data(args, kwargs)
        before, after = leaves((args, kwargs)), leaves((new_args, new_kwargs))
        if all(old is new for old, new in zip(before, after, strict=True)):
            return x
        with self:
            return leaves(func(*new_args, **new_kwargs))[position]

    def _with_data(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return a call's arguments ``as_data``."""
        return map_leaves((args, kwargs), self.as_data)

    def _lookup(self, x: Tensor) -> LookedUp | None:
        """Return the lookup in a table of which a tensor is a function, row by row."""
        while (known := self._function(x)) is not None and known.origin is not None:
            func, args, kwargs, _ = known.origin
            if func is torch.embedding:
                (use,) = RULES[func](args, kwargs).values()
                table = self._function(args[0])
                return LookedUp(x, use, args[0], None if table is None else table.view)
            sources = [y for y in leaves((args, kwargs)) if self._function(y) is not None]
            if len(sources) != 1 or sources[0].shape != x.shape:
                return None
            (x,) = sources
        return None

    def _follow(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Make a call without data, and note the roles of what it returns."""
        out = func(*args, **kwargs)
        inputs = {id(x) for x in leaves((args, kwargs))}
        views = self._views_after(func, args, kwargs, out)
        if self._shards is not None:
            args, kwargs = map_leaves((args, kwargs), self._without_values)
        for position, x in enumerate(leaves(out)):
            if not x.requires_grad:
                if self._knows_data:
                    self._know(x, Role.CONSTANT)
            elif x.is_floating_point() and self._function(x) is None:
                if id(x) in inputs:  # the call has written to it
                    self._know(x, Role.FUNCTION)
                else:
                    origin = _Origin(func, args, kwargs, position)
                    self._know(x, Role.FUNCTION, views[position], origin)
        return out

    def _views_after(
        self, func: Callable, args: tuple, kwargs: dict, out: Any
    ) -> "list[ViewOf | None]":
        """Return the views of parameters that a call without data returned."""
        outputs = leaves(out)
        sources = [x for x in leaves((args, kwargs)) if self._function(x) is not None]
        unknown: list[ViewOf | None] = [None] * len(outputs)
        if len(sources) != 1 or (view := self._function(sources[0]).view) is None:
            return unknown
        (source,) = sources
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


def _composition(func: Callable) -> Callable | None:
    """Return the composition of other calls that takes a call's place.

    Hooks on saved tensors, as in checkpoints, expect the same calls when these are repeated.
    """
    return None if have_saved_tensor_hooks() else COMPOSED.get(func)


def _base(x: Tensor) -> Tensor:
    """Return the tensor of which another one is a view, or the tensor itself."""
    base = base_of(x)
    return x if base is None else base


def _is_constant_index(func: Callable, args: tuple) -> bool:
    """Return whether a call reads an index without axes and masks, as in ``experts[i]``."""
    indices = leaves(args[1]) if func is Tensor.__getitem__ else None
    return indices is not None and not any(x.ndim or x.dtype == torch.bool for x in indices)


def _covers(view: Tensor, base: Tensor) -> bool:
    """Return whether a view has all entries of a tensor with a gradient, in their order."""
    same = view.is_contiguous() and view.numel() == base.numel() and view.dtype == base.dtype
    return same and base.is_contiguous() and base.requires_grad


def _is_partial_view(x: Tensor) -> bool:
    """Return whether a tensor is a view of some entries of another one."""
    base = base_of(x)
    return base is not None and not (x.is_contiguous() and x.numel() == base.numel())


_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _without_question(func: Callable) -> Callable:
    """Return a Python function such that the calls inside of it can be watched.

    Functions of PyTorch ask whether a mode overrides them, and then call themselves through that
    mode. The returned function gets "no" as the answer. It has the global names of this moment. A
    function that assigns to global names is returned unchanged.
    """
    if not isinstance(func, FunctionType) or not _asks(func.__code__):
        return func
    names = {**func.__globals__, **dict.fromkeys(_QUESTIONS, lambda *args: False)}
    inner = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


@lru_cache(maxsize=1024)
def _asks(code: CodeType) -> bool:
    if not set(_QUESTIONS) & set(code.co_names):
        return False
    return not any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(code))
