"""Checks of rules: the gradients of samples have to add up to autograd's gradient."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.support.norms import double_norm

#: Relative error up to which two gradients agree that were computed in a dtype. With the samples
#: of another axis, about half of the rows have another sign.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 2e-2}

#: The largest error of a gradient that cancels, in rounding errors of the largest gradient, where
#: two backward passes are compared.
NOISE = 20


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative error up to which two gradients agree."""
    return TOLERANCES.get(dtype, 0.15)


def probe(output: Tensor) -> Tensor:
    """Return random numbers in an output's shape, always the same on a device."""
    generator = torch.Generator(output.device).manual_seed(0)
    dtype = torch.promote_types(output.dtype, torch.float32)
    random = torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)
    return random.to(output.dtype)


class Comparison:
    """Compares sums of parameters' gradients with autograd's, one stack after the other.

    They are computed in a least precise ``dtype``; ``eps`` is the rounding error of the output's.
    """

    def __init__(self, dtype: torch.dtype, eps: float):
        self._dtype, self._tolerance = dtype, tolerance_of(dtype)
        # sums that cancel leave rounding errors, also those of a softmax in float32
        self._noise = max(0.01 * self._tolerance, 2 * eps, 2 * torch.finfo(torch.float32).eps)
        #: The norms of autograd's sums.
        self.sizes: dict[str, float] = {}
        self._errors: dict[str, float] = {}
        self._bounds: dict[str, float] = {}
        self._loose = set[str]()

    def add(
        self,
        stack: Mapping[str, Any],
        sums: Tensor,
        truth: Tensor,
        summands: Callable[[Mapping[str, Any]], Tensor] | None = None,
        of_two_passes: Collection[str] = (),
    ) -> None:
        """Compare sums ``[L, *shape]``; those of absolute ``summands`` bound larger errors.

        A large gradient hides no wrong small one, but ``of_two_passes``, gradients that cancel
        within the model differ by rounding errors of others.
        """
        self._loose.update(of_two_passes)
        both = truth, sums.to(truth.device) - truth
        norms = (double_norm(x.reshape(len(x), -1), 1) for x in both)
        for key, size, error in zip(stack, *(x.tolist() for x in norms), strict=True):
            bound = self._tolerance * (size + torch.finfo(torch.float32).tiny)
            if not error <= bound and summands is not None:
                bound += self._noise * float(double_norm(summands({key: stack[key]})))
            self.sizes[key], self._errors[key], self._bounds[key] = size, error, bound

    def wrong(self) -> list[str]:
        """Return the parameters whose sums differ."""
        # kernels round to float32 also for half precision
        rounding = min(torch.finfo(x).eps for x in (self._dtype, torch.float32))
        slack = max(NOISE * rounding * max(self.sizes.values(), default=0.0), 1e-12)
        bounds = {k: bound + slack * (k in self._loose) for k, bound in self._bounds.items()}
        return [k for k, error in self._errors.items() if not error <= bounds[k]]
