"""Private handles of PyTorch. A version that lacks one that products need cannot be imported."""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.utils import parametrize

#: Nested containers: ``tree_flatten``, ``tree_unflatten``, ``tree_leaves``, ``tree_is_leaf``.
pytree = importlib.import_module("torch.utils._pytree")
#: A context in which no ``TorchFunctionMode`` or tensor subclass sees calls.
without_torch_function = torch._C.DisableTorchFunction


def input_metadata(node: Any, number: int = 0) -> Any:
    """Return ``shape`` and ``dtype`` of the gradient of one of a node's outputs."""
    return node._input_metadata[number]


def saved_values(node: Any) -> list[Any]:
    """Return the values that a node has saved; tensors are their attribute ``data``."""
    read, _ = _saved_by(type(node))
    return [x for one in read(node)[2:] for x in (one if type(one) in (list, tuple) else (one,))]


@functools.cache
def node_facts(kind: type) -> Callable[[Any], list]:
    """Return a function of nodes of a kind that returns all about one that is no tensor.

    These are shapes and dtypes of its outputs, saved arguments such as axes, and which saved
    tensors hooks have replaced.
    """
    saved, plain = _saved_by(kind)

    def facts(node: Any) -> list:
        found = [plain(node)]  # loops, which take less time than comprehensions
        for output in node._input_metadata:
            found += output.shape, output.dtype
        for one in saved(node)[2:]:
            for x in one if type(one) in (list, tuple) else (one,):
                value = getattr(x, "data", None)
                found.append(None if value is None else isinstance(value, Tensor))
        return found

    return facts


@functools.cache
def _saved_by(kind: type) -> list[attrgetter]:
    """Return what reads the tensors that a kind of node has saved, and its other arguments."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved")]
    saved = [name for name in dir(kind) if name.startswith("_saved_")]
    plain = [name for name in saved if f"_raw{name}" not in raw]
    return [attrgetter("__doc__", "__doc__", *names) for names in (raw, plain)]  # always tuples


def function_of(node: Any) -> type:
    """Return the ``torch.autograd.Function`` of a node with a Python backward pass."""
    return type(node)._forward_cls


run_backward = torch.autograd.graph._engine_run_backward


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Compute parametrized weights anew from the parameters in use, see ``parametrize.cached``."""
    cached = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = cached


# --- modules


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all their children, each once, faster than ``nn.Module.modules``."""
    modules, stack = {}, list(reversed([*roots]))
    while stack:
        module = stack.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            if module._modules:
                stack += [x for x in reversed([*module._modules.values()]) if x is not None]
    return list(modules.values())


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dictionaries in which a module has its own parameters and buffers."""
    return module._parameters, module._buffers


def backward_hooks(module: nn.Module) -> tuple[dict, dict]:
    """Return the dictionaries in which a module has hooks on backward passes."""
    return module._backward_hooks, module._backward_pre_hooks


def original_module(module: nn.Module) -> nn.Module:
    """Return the module that was passed to ``torch.compile``, or the module itself."""
    return getattr(module, "_orig_mod", module)


# --- sharded modules

_FSDP, _PARALLEL = "torch.distributed.fsdp._fully_shard.", "torch.distributed.tensor."


def distributed_tensors() -> tuple[type, ...]:
    """Return the class of tensors that are spread over processes, or nothing if there are none."""
    library = sys.modules.get("torch.distributed.tensor")  # imported by whoever spreads a tensor
    return () if library is None else (library.DTensor,)


def is_fsdp_hook(hook: Any) -> bool:
    """Return whether a hook on a module is one of ``torch.distributed.fsdp.fully_shard``."""
    return _is_from(_FSDP, hook)


def is_tensor_parallel_hook(hook: Any) -> bool:
    """Return whether a hook on a module is one of ``torch.distributed.tensor.parallel``."""
    return _is_from(_PARALLEL, hook)


def _is_from(package: str, function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(package)


def fsdp_policy(module: nn.Module) -> Any:
    """Return the ``MixedPrecisionPolicy`` with which a module was sharded, if it was."""
    return module._get_fsdp_state()._mp_policy if _fsdp_modules([module]) else None


def fsdp_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtypes to which ``fully_shard`` casts parameters when it gathers them, by id."""
    dtypes = {}
    for child in _fsdp_modules(module.modules()):
        state = child._get_fsdp_state()
        dtype = state._mp_policy.param_dtype
        # PyTorch 2.13 has several groups
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for info in (x._module_info for group in groups if group for x in group.fsdp_params):
            # the table may gather what is read
            parameter = dict.__getitem__(info.module._parameters, info.param_name)
            if dtype is not None and parameter.is_floating_point():
                dtypes[id(parameter)] = dtype
    return dtypes


def reshard(module: nn.Module) -> None:
    """Free parameters that ``fully_shard`` keeps whole from a forward to a backward pass."""
    for child in _fsdp_modules(module.modules()):
        child.reshard()


def _fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    library = sys.modules.get("torch.distributed.fsdp")
    return [] if library is None else [x for x in modules if isinstance(x, library.FSDPModule)]


def forward_hooks(module: nn.Module) -> tuple[dict, dict]:
    """Return the dictionaries in which a module has hooks on forward passes."""
    return module._forward_hooks, module._forward_pre_hooks


# --- tensors


def version_of(tensor: Tensor) -> int | None:
    """Return the version counter of a tensor; ``None`` for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def with_attributes(values: Tensor, param: Tensor) -> Tensor:
    """Give a tensor the class and the attributes of the parameter or buffer that it replaces."""
    if attributes := vars(param):
        vars(values).update({n: x for n, x in attributes.items() if n not in vars(values)})
    if isinstance(param, nn.Parameter):
        values._is_param = True  # for isinstance(values, nn.Parameter)
    return values


def has_hooks(tensor: Tensor) -> bool:
    """Return whether there are hooks on the gradient of a tensor."""
    return bool(tensor._backward_hooks)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep hooks on tensors from changing gradients."""
    hooks = [(tensor, tensor._backward_hooks) for tensor in tensors]
    try:
        for tensor, _ in hooks:
            tensor._backward_hooks = None
        yield
    finally:
        for tensor, saved in hooks:
            tensor._backward_hooks = saved


def strided_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors of which a sparse or nested one consists; a dense one is its own."""
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that wraps others
        held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [x for part in held if isinstance(part, Tensor) for x in strided_tensors(part)]
    if (layout := tensor.layout) is torch.strided:
        return [] if tensor._is_zerotensor() else [tensor]
    if layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


# --- modes


@functools.cache
def prepare_forward_mode() -> None:
    """Import what the first use of forward mode imports, without PyTorch's own warnings.

    It warns of PyTorch's own ``torch.jit.script``. It takes 0.1 s, so not at the import of this.
    """
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")


#: ``torch.compiler.disable`` without the import of the compiler, which takes a second.
disable_compiler = torch._disable_dynamo
#: The function that ``torch.nn.utils.parametrizations.weight_norm`` calls.
weight_norm = getattr(torch, "_weight_norm", None)
_will_run = torch._C._will_engine_execute_node
_transforms = torch._C._functorch.peek_interpreter_stack


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` is active."""
    return _transforms() is not None


def kernel_in_python(func: Any, args: tuple) -> Any:
    """Return Python code for an operator that calls functions, such as ``torch.cond`` and ``scan``.

    Autograd records what these functions compute. The operator itself differentiates graphs of
    them, which only the compiler finds if they use other tensors than their arguments. Other
    functions, and transforms of ``torch.func``, have none.
    """
    kernels = getattr(func, "py_kernels", None)
    if not kernels or not any(map(callable, args)) or in_transform():
        return None
    return kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)


def wanted_gradients(ctx: Any) -> list[bool]:
    """Return for which inputs of a custom function the running backward pass needs gradients.

    ``ctx.needs_input_grad`` says which inputs require gradients at all; a backward pass for some
    of the inputs of a graph needs less.
    """
    return [node is not None and _is_wanted(node) for node, _ in ctx.next_functions]


def _is_wanted(node: Any) -> bool:
    try:
        return _will_run(node)
    except RuntimeError:  # a leaf, for which it is not implemented
        return True


# --- nodes of autograd's graph


def shape_of_output(node: Any, number: int = 0) -> tuple[int, ...]:
    """Return the shape of one of the outputs that a node had in the forward pass."""
    return tuple(node._input_metadata[number].shape)


def saved(node: Any, name: str) -> Any:
    """Return an argument or a tensor that a node has saved for its backward pass."""
    value = getattr(node, f"_saved_{name}")
    if isinstance(value, int):
        return signed(value)
    is_list = isinstance(value, tuple) and all(isinstance(x, int) for x in value)
    return tuple(map(signed, value)) if is_list else value


def signed(value: int) -> int:
    """Nodes say -1 as 2 ** 64 - 1."""
    return value - 2**64 if value >= 2**63 else value


def saved_axes(node: Any, name: str, ndim: int) -> tuple[int, ...]:
    """Return a saved axis, or several, of a tensor with ``ndim`` axes. No axes: all of them."""
    axes = saved(node, name)
    axes = (axes,) if isinstance(axes, int) else axes or range(ndim)
    return tuple(x % max(ndim, 1) for x in axes)


def can_be_called(node: Any) -> bool:
    """Return whether ``gradients_of_inputs`` may call a node.

    Functions that PyTorch itself has in Python, such as those that communicate, may do more than
    compute gradients. So may those in C++ that are not generated with PyTorch.
    """
    if not isinstance(node, BackwardCFunction):
        return "::" not in node.name() or node.name() == "torch::autograd::CopySlices"
    module = function_of(node).__module__
    is_users = not module.startswith("torch.") or module.startswith("torch._library.")
    return is_users and len(node._input_metadata) == 1


def gradients_of_inputs(node: Any, gradient: Tensor, number: int = 0) -> list[Tensor | None]:
    """Let a node compute its inputs' gradients from that of one output, as in ``next_functions``.

    Gradients of other outputs are zero. If the node fails, this is a RuntimeError.
    """
    is_custom = isinstance(node, BackwardCFunction)
    gradients: list[Tensor | None] = [None] * len(node._input_metadata)
    gradients[number] = gradient
    try:
        with torch.no_grad():
            found = node.apply(gradient) if is_custom else node(*gradients)
    except Exception as error:  # neither was written for being called like this
        raise RuntimeError(f"{node.name()} failed") from error
    found = list(found) if isinstance(found, tuple) else [found]
    if is_custom:  # it also returns something for arguments that are no tensors
        needed = (
            x for x, is_needed in zip(found, node.needs_input_grad, strict=False) if is_needed
        )
        found = [
            None if source is None else next(needed, None) for source, _ in node.next_functions
        ]
    for k, (source, output) in enumerate(node.next_functions):
        shape = None if source is None else shape_of_output(source, output)
        if found[k] is not None and shape not in (None, found[k].shape):
            found[k] = found[k].sum_to_size(shape)  # as autograd does for what was broadcast
    return found
