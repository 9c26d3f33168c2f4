"""Can the backward passes of the user's own autograd functions, and hooks, be differentiated?

PyTorch cannot know: they are any Python code. A backward that detaches, or uses what the forward
kept outside of the graph, gives a Hessian that misses a part, without an error, and is still
symmetric. So does a hook that replaces a gradient, as in deep equilibrium models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlinops.core.autodiff import gradient
from curvlinops.core.choice import Mode
from curvlinops.core.columns import norm
from curvlinops.core.graph import custom_functions, graph_nodes
from curvlinops.core.risk import BatchRisk
from curvlinops.core.space import Columns
from curvlinops.core.warn import warn


class Hooks(TorchFunctionMode):
    """Notes the hooks that model and loss register on tensors.

    Attributes:
        names: Their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and look at its arguments if it registers a hook."""
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            hook = (*args, *kwargs.values())[1]
            self.names.add(f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}")
        return func(*args, **kwargs)


def check_custom_functions(bound: BatchRisk, mode: Mode) -> None:
    """Compare a Hessian product with central differences of the gradient.

    Only for models with custom autograd functions or hooks on tensors (those on nodes of the graph,
    ``grad_fn.register_hook``, cannot be seen), and in float64, where differences are accurate and
    steps so short that kinks do not matter. Where a copy of the model in float64 does not work
    there is a warning; where differences are noisy, because a part of it computes in less, there is
    no verdict.

    Raises:
        RuntimeError: If the two differ.
    """
    with Hooks() as hooks, bound.recording("gradient") as (_, _, output):
        functions = custom_functions(graph_nodes(bound.loss_sum(output)[0])) | hooks.names
    if not functions:
        return
    try:
        try:
            product, slopes = _compare(bound, mode)
        except RuntimeError:  # tensors that the model makes may be of the default dtype
            with _double_by_default():
                product, slopes = _compare(bound, mode)
    except (RuntimeError, TypeError, ValueError) as error:  # whatever a float64 copy may meet
        warn(
            f"Whether the backward of the custom autograd functions and hooks {sorted(functions)} "
            f"can be differentiated could not be checked: {error} If it cannot, the Hessian is "
            "wrong.",
        )
        return
    noise = _distance(*slopes)
    if _distance(product, slopes[0]) > 1e-3 * norm(slopes[0]) + 10 * noise:
        names = ", ".join(sorted(functions))
        raise RuntimeError(
            "The Hessian product is not the derivative of the gradient: the backward of a custom "
            "autograd.Function, or a hook that changes gradients, is not differentiable (one of "
            f"{names}). Make it differentiable, or build the function from PyTorch operations. If "
            "the difference is meant, as in straight-through estimators, pass autodiff='reverse'."
        )


def _compare(bound: BatchRisk, mode: Mode) -> tuple[Columns, list[Columns]]:
    """Return a product, and central differences with two step sizes."""
    theta = {name: leaf.detach().double() for name, leaf in bound.leaves().items()}
    generator = torch.Generator(bound.space.device).manual_seed(0)
    twin = bound.in_double(theta)
    v = twin.space.randn(1, generator)
    # not along what derivatives take for a constant, such as rows of padding
    there = gradient(twin, twin.loss_sum)[1]
    v = {name: torch.where(there[name] == 0, 0.0, x) for name, x in v.items()}
    size = max(norm(theta), 1e-3) / max(norm(v), 1e-3)

    def shifted(step: float) -> Columns:
        twin = bound.in_double({name: x + step * v[name][0] for name, x in theta.items()})
        return gradient(twin, twin.loss_sum)[1]

    slopes = []
    for step in (1e-6 * size, 4e-6 * size):
        ahead, behind = shifted(step), shifted(-step)
        slopes.append({name: (ahead[name] - behind[name]) / (2 * step) for name in v})
    product = twin.space.zeros(1)
    mode.hessian(twin, twin.loss_seed)(v, product)
    return product, slopes


@contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _distance(one: Columns, two: Columns) -> float:
    return norm({name: one[name] - two[name] for name in one})
