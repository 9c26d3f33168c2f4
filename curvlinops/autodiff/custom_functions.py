"""Compares derivatives where autograd cannot be trusted: through custom functions, and hooks.

PyTorch cannot know whether the backward of a custom ``torch.autograd.Function`` can be
differentiated: it is any Python code. A backward that detaches, or uses what the forward kept
outside of the graph, gives a Hessian that lacks a part, without an error, and is still symmetric.
So does a hook that replaces a gradient, as in deep equilibrium models, and a fused loss that
computes its gradient in the forward pass.

Each parameter is compared by itself, with a tolerance that is measured, so that a small part of the
model, such as a gate or an adapter, counts like a large one.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError, Tensors
from curvlinops.support.norms import double_dot, double_norm
from curvlinops.support.torch_internals import without_torch_function
from curvlinops.support.warnings import warn

#: The smallest tolerance of products that are computed in two ways, relative to each parameter's.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}
#: The smallest tolerance of differences, relative to each parameter's.
_DIFFERENCES = {torch.float64: 1e-6, torch.float32: 3e-4}
#: Other step sizes are tried while the relative tolerance of differences is larger.
_GOOD = 1e-2
#: Differences with a larger relative tolerance do not tell whether a product is right.
_LARGEST = 0.2
#: Parameters whose gradients differ by less than this factor are compared together.
_SIMILAR = 30.0
#: The factors of the step sizes that are tried one after the other.
_STEPS = (1, 8, 64)
#: The number of directions along which a product must be wrong.
_NUM_DIRECTIONS = 3


# --- linear maps and their adjoints


def check_adjoint(
    jvp: Callable[[Tensors], Tensor],
    vjp: Callable[[Tensor], Tensors],
    inputs: Tensors,
    output: Tensor,
    dtypes: Iterable[torch.dtype],
    what: str,
) -> bool:
    """Compare functions that multiply by a matrix J and its transpose; say what differs, and why.

    ``<w, J v>`` is compared with ``<J^T w, v>`` for random w. The random v is scaled such that each
    input counts equally. The rounding error of ``J^T w`` is measured: it is linear in w, as is seen
    by much larger and smaller ones, and by their negatives. Like ``check_derivative``, it returns
    whether no gradient is zero, which hides what is wrong.
    """
    dtypes = {*dtypes}
    tolerance = max(_ROUNDING.get(dtype, 0.05) for dtype in dtypes)
    dots, sums, sizes, first = [], dict[str, Tensor](), dict[str, float](), dict[str, Tensor]()
    with without_torch_function():  # an evaluation watches what the model calls, not this
        w = list(_randn(output, 2, seed=0))
        w.append(w[0] + w[1])
    for one, sign in zip(w, (1, 1, -1), strict=True):
        grads = vjp(one)
        with without_torch_function():
            dots.append({n: double_dot(z, grads[n]) for n, z in directions(inputs, grads, seed=1)})
            sizes |= {name: float(double_norm(x)) for name, x in grads.items()}
            sums |= {name: sums.get(name, 0) + sign * x for name, x in grads.items()}
            first = first or grads
    far = 2.0 ** (4 if torch.float16 in dtypes else 10)  # a power of two changes no rounding
    for factor in (far, -1 / far):
        for name, x in vjp(factor * w[0]).items():
            with without_torch_function():
                error = float(double_norm(x / factor - first[name]))
                if not error <= tolerance * float(double_norm(first[name])):
                    raise NoDerivativeError(what)
    with without_torch_function():
        rounding = {name: float(double_norm(x)) for name, x in sums.items()}
        # an input whose gradient is zero but for rounding counts little
        limits = {n: max(size, 10 * rounding[n] / tolerance) for n, size in sizes.items()}
        scales = {name: 1 / limit for name, limit in limits.items() if limit > 1e-30}
        v = {name: scales[name] * z for name, z in directions(inputs, scales, seed=1)}
    if scales:
        noise = sum((scale * rounding[name]) ** 2 for name, scale in scales.items()) ** 0.5
        Jv = jvp(v)
        with without_torch_function():
            expected = (sum(scales[name] * float(d[name]) for name in scales) for d in dots)
            found = (float(double_dot(one, Jv)) for one in w)
            error = max(abs(x - y) for x, y in zip(found, expected, strict=True))
        if not error <= 10 * noise + tolerance * len(scales) ** 0.5:
            raise NoDerivativeError(what)
    return all(sizes.values())


def directions(like: Tensors, names: Container[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield random tensors for some names, one at a time, the same for the same seed."""
    for number, (name, x) in enumerate(like.items()):
        if name in names:
            yield name, _randn(x, 1, seed + 1000 * number)[0]


def _randn(like: Tensor, num: int, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    options = {"dtype": like.dtype, "device": like.device, "generator": generator}
    return torch.randn(num, *like.shape, **options)


# --- derivatives and differences


class Gradient(NamedTuple):
    """A gradient as a function of some tensors, and its derivative."""

    at: Tensors
    near: Tensors  # where gradients have their usual size
    function: Callable[[Tensors], Tensors]  # returns the gradient at such tensors
    product: Callable[[Tensors], Tensors]  # multiplies some vectors by the derivative
    norms: Callable[[Tensors], Tensor]  # of parts of a gradient that are compared by themselves


def check_derivative(
    gradient: Gradient, dtypes: Iterable[torch.dtype], what: str, remedy: str
) -> bool:
    """Compare products with the derivative of a gradient with central differences.

    If it is computed with less than 32 bits, these are not accurate, and a warning says so. It
    returns whether no gradient is zero here alone, which hides what is wrong.
    """
    if others := {*dtypes} - _DIFFERENCES.keys():
        warn(f"{what} cannot be compared with differences in {others.pop()}. {remedy}")
        return True
    differences, unclear = _Differences(gradient, set(dtypes)), list[str]()
    for names in differences.groups():
        wrong: Tensor | bool = True
        for seed in range(_NUM_DIRECTIONS):
            errors, sizes, are_wrong, is_unclear = differences.along(names, seed)
            wrong = wrong & are_wrong
            if not bool(wrong.any()):
                break
        else:
            error = float((errors / sizes.maximum(errors))[wrong].max())
            raise RuntimeError(
                f"{what}{_along(names)} is off by {error:.1e} from central differences. {remedy}"
            )
        unclear += names if is_unclear else []
    if unclear:
        warn(
            f"{what}{_along(unclear)} could not be compared: differences are too inaccurate. "
            f"{remedy}"
        )
    here, near = differences.here, differences.near
    return not any(x.any() and not here[name].any() for name, x in near.items())


def _along(names: list[str]) -> str:
    """Return the names of parameters, for messages."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" along {', '.join(map(repr, names[:3]))}{more}" if names != [""] else ""


class _Differences:
    """Central differences of a gradient, which it has ``here``, and at tensors nearby."""

    def __init__(self, gradient: Gradient, dtypes: set[torch.dtype]):
        self._gradient, at, norms = gradient, gradient.at, gradient.norms
        self._smallest = max(_DIFFERENCES[dtype] for dtype in dtypes)
        self._eps = eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        rounded = {name: at[name] * (1 + eps * z) for name, z in directions(at, at, seed=1)}
        self.here, self.near = gradient.function(at), gradient.function(gradient.near)
        self._rounding = _minus(gradient.function(rounded), self.here)
        #: The rounding errors of gradients: measured, and at least that of their usual size.
        usual = torch.maximum(norms(self.here), norms(self.near).nan_to_num(nan=0.0))
        self._noise = torch.maximum(norms(self._rounding), eps * usual)

    def groups(self) -> Iterator[list[str]]:
        """Yield names of similar influence, the size of their gradients.

        Others would hide those of little influence. Gradients of rounding errors are zero.
        """
        sizes = {name: float(double_norm(self.near[name])) for name in self._gradient.at}
        zero = {n for n, size in sizes.items() if double_norm(self._rounding[n]) >= 0.1 * size}
        group = list[str]()
        for name in sorted(sizes.keys() - zero, key=lambda name: -sizes[name]):
            if group and sizes[name] * _SIMILAR < sizes[group[0]]:
                yield group
                group = []
            group.append(name)
        if group:
            yield group

    def along(self, names: list[str], seed: int) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Return errors, sizes and whether a product is wrong, by part, and if that is unclear."""
        at, near = self._gradient.at, self.near
        some = {name: at[name] for name in names}
        # not along entries whose gradient is zero by definition, such as rows of padding; others
        # may be zero by accident, but not at parameters nearby
        draws = directions(at, some, seed + 2)
        v = {name: torch.where(near[name] == 0, 0.0, z) for name, z in draws}
        product, best = self._gradient.product(v), None
        step = self._eps**0.4 * max(_mean_size(some), 0.1 * _mean_size(at), 1e-3)
        for factor in _STEPS:  # each part is compared with the best one
            found = self._differ(product, v, factor * step)
            best = found if best is None else torch.where(found[0] <= best[0], found, best)
            if bool((best[0] <= _GOOD).all()):
                break
        ratios, errors, tolerances, sizes, uncertainty, rounding, kinks = best
        is_off, is_told = errors > tolerances, (errors + sizes == 0) | (ratios <= _LARGEST)
        # what is zero but for rounding errors agrees with differences of rounding errors
        is_unclear = is_off | ~is_told & ~(uncertainty <= rounding)
        if len(at) == len(is_told):  # parts are the gradients of names, else they have none
            is_unclear = is_unclear[[number for number, name in enumerate(at) if name in names]]
        else:
            is_unclear = is_unclear[:0]
        are_unclear = bool(is_unclear.any()) or not bool(is_told.any())
        return errors, sizes, is_off & (errors > 2 * kinks), are_unclear

    def _differ(self, product: Tensors, v: Tensors, h: float) -> Tensor:
        """Compare with differences of widths 2h and h, and return what ``along`` reads."""
        at, function, norms = self._gradient.at, self._gradient.function, self._gradient.norms
        slopes = []
        for width in (2 * h, h):
            plus, minus = (
                function({**at, **{name: at[name] + step * z for name, z in v.items()}})
                for step in (width, -width)
            )
            slopes.append({n: (x - minus[n]) / (2 * width) for n, x in plus.items()})
        sizes, uncertainty = norms(slopes[1]), 3 * norms(_minus(*slopes))
        errors = torch.minimum(*(norms(_minus(product, slope)) for slope in slopes))
        rounding = 5 * self._noise / h + self._eps * norms(product).max()
        tolerances = rounding + torch.maximum(uncertainty, self._smallest * sizes)
        # slopes on both sides differ: differences of any width are their mean
        kinks = norms({n: x + minus[n] - 2 * self.here[n] for n, x in plus.items()}) / (2 * h)
        found = [errors, tolerances, sizes, uncertainty, rounding, kinks]
        found = [x.nan_to_num(nan=torch.inf, posinf=torch.inf) for x in found]
        ratios = (found[1] / found[2]).nan_to_num(nan=torch.inf)  # infinite where sizes are zero
        return torch.stack([ratios, *found])


def _minus(x: Tensors, y: Tensors) -> Tensors:
    return {name: one - y[name] for name, one in x.items()}


def _mean_size(tensors: Tensors) -> float:
    """Return the root mean square of all entries."""
    num = sum(x.numel() for x in tensors.values())
    return (sum(float(double_norm(x)) ** 2 for x in tensors.values()) / max(num, 1)) ** 0.5
