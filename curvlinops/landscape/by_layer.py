"""Quantities of the diagonal blocks of a matrix, layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from curvlinops.algorithms.submatrix import SubmatrixLinearOperator
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import match_names

Result = TypeVar("Result")


def by_layer(
    A: TorchLinearOperator,
    function: Callable[..., Result],
    *args: Any,
    by: str | Mapping[str, str | Sequence[str]] = "module",
    **options: Any,
) -> dict[str, Result]:
    """Apply a function to the diagonal block of each layer, such as a trace or a spectrum.

    Products differentiate the model with respect to the layer only, and all of them share one
    ``A.linearized()``.

    Args:
        A: A square operator on named parameters.
        function: A function of an operator, such as ``xtrace``, ``eigsh``, or
            ``lanczos_approximate_spectrum``.
        *args: Further arguments of the function.
        by: The layers. ``"module"``: the parameters that a module has itself, such as weight and
            bias. ``"parameter"``: each parameter. Or a dictionary from labels to names and globs
            of parameters or modules, such as ``{"attention": "*.attn"}``.
        **options: Keyword arguments of the function.

    Returns:
        The function's results, by the name of the module or parameter, or by label.

    Raises:
        TypeError: If ``A`` is no operator of this package, or ``function`` not callable.
        ValueError: If ``A`` is not square or has no names, ``by`` is none of these, or a name is
            unknown. Errors of the function name the layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops import GGNLinearOperator, by_layer, xtrace
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> data = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> list(by_layer(G, xtrace, 10, seed=0))
        ['0', '2']
    """
    if not isinstance(A, TorchLinearOperator):
        raise TypeError(f"A must be an operator of this package, got {type(A).__name__}.")
    if not callable(function):
        raise TypeError(
            "function must be a function of an operator, such as xtrace, got "
            f"{type(function).__name__}."
        )
    if A.domain.is_flat or A.domain.names != A.codomain.names:
        raise ValueError(
            f"Only a square operator on named parameters has layers, got {A!r}. Pass a "
            "Hessian, or a SubmatrixLinearOperator with names."
        )
    results = {}
    with A.linearized():
        for label, names in _layers(A.domain.names, by).items():
            block = SubmatrixLinearOperator(A, names, names)
            try:
                results[label] = function(block, *args, **options)
            except Exception as error:
                error.add_note(f"In the layer {label!r}, of dimension {block.shape[0]}.")
                raise
    return results


def _layers(names: list[str], by: Any) -> dict[str, list[str]]:
    """Return the names of the parameters in each layer."""
    if isinstance(by, Mapping):
        patterns = {key: [x] if isinstance(x, str) else list(x) for key, x in by.items()}
        return {key: match_names(names, some, f"by[{key!r}]") for key, some in patterns.items()}
    if by == "parameter":
        return {name: [name] for name in names}
    if by != "module":
        raise ValueError(
            f"by must be 'module', 'parameter', or a dictionary from labels to names, got {by!r}."
        )
    layers: dict[str, list[str]] = {}
    for name in names:
        # parameters without a module are layers themselves
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers
