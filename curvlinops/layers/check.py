"""Checks of rules: the gradients of samples have to add up to autograd's gradient."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvlinops.support.norms import double_norm

Tensors = Mapping[str, Tensor]

#: Relative error up to which two gradients agree that were computed in a dtype. With the samples
#: of another axis, about half of the rows have another sign.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 2e-2}

#: The largest rounding error to expect in a gradient, in rounding errors of the largest one.
NOISE = 20


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative error up to which two gradients agree."""
    return TOLERANCES.get(dtype, 0.15)


def rounding_of(dtype: torch.dtype) -> float:
    """Return the rounding error of what kernels compute, in float32 also for half precision."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def probe(output: Tensor) -> Tensor:
    """Return random numbers in an output's shape, always the same on a device."""
    generator = torch.Generator(output.device).manual_seed(0)
    dtype = torch.promote_types(output.dtype, torch.float32)
    random = torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)
    return random.to(output.dtype)


def sample_weights(num_samples: int, like: Tensor) -> Tensor:
    """Return distinct weights of the samples, with random signs, of which both occur."""
    generator = torch.Generator().manual_seed(171_000 + num_samples)
    sizes = 0.5 + torch.rand(num_samples, generator=generator, device="cpu")
    order = torch.randperm(num_samples, generator=generator, device="cpu")
    return (sizes * (1 - 2 * (order % 2))).to(like.dtype).to(like.device)


def weighted(u: Tensor, r: Tensor) -> Tensor:
    """Return backpropagated vectors ``[N * S, *]`` times the samples' weights ``[N]``."""
    r = r.repeat_interleave(len(u) // max(len(r), 1))
    return u * r.reshape(-1, *(1,) * (u.ndim - 1))


def norms(tensors: Tensors) -> dict[str, float]:
    """Return the norm of each tensor, in float64."""
    return {name: float(double_norm(x)) for name, x in tensors.items()}


def disagreeing(
    sums: Tensors,
    summands: Callable[[], Tensors],
    truth: Tensors,
    sizes: Mapping[str, float],
    dtype: torch.dtype,
    eps: float,
) -> list[str]:
    """Return the parameters for which two sums differ.

    Args:
        sums: The rules' sums. Missing ones are zero.
        summands: Returns the sums of the absolute values of the summands of ``sums``; called only
            if errors are not small anyway.
        truth: Autograd's sums.
        sizes: Their norms.
        dtype: The least precise one in which gradients are computed.
        eps: The relative rounding error of the output's dtype.
    """
    tolerance, tiny = tolerance_of(dtype), torch.finfo(torch.float32).tiny
    slack = max(NOISE * rounding_of(dtype) * max(sizes.values(), default=0.0), 1e-12)
    bounds = {name: tolerance * (size + tiny) + slack for name, size in sizes.items()}
    errors = dict(sizes)
    for name in sums.keys() & truth.keys():
        errors[name] = float(double_norm(sums[name].to(truth[name].device) - truth[name]))
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    if not wrong:
        return []
    # sums that cancel leave rounding errors, also those of a softmax in float32
    noise = max(0.01 * tolerance, 2 * eps, 2 * torch.finfo(torch.float32).eps)
    absolute = summands()
    totals = norms({name: absolute[name] for name in wrong if name in absolute})
    return [n for n in wrong if not errors[n] <= bounds[n] + noise * totals.get(n, 0.0)]
