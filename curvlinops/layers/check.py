"""Checks of rules: the gradients of samples have to add up to autograd's gradient."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from curvlinops.autodiff.backward import vjp
from curvlinops.risk.batch_problem import BatchProblem
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


def autograd_sums(problem: BatchProblem, num_samples: int | None = None) -> dict[str, Tensor]:
    """Return autograd's gradients of a weighted sum of the output; runs the model once.

    Args:
        problem: The model on a batch.
        num_samples: The number of samples, which have the same weights as in ``sample_weights``.
            Default: each row of the output is one.
    """
    with problem.recording("once") as (_, leaves, output):
        u = probe(output.detach())
        u = weighted(u, sample_weights(num_samples or len(u), u))
        found = vjp({"": output}, {"": u}, leaves, retain=not problem.can_substitute)
    return {
        name: torch.zeros_like(leaf) if found[name] is None else found[name]
        for name, leaf in leaves.items()
    }


def disagreeing(
    names: Iterable[str],
    own: Tensors,
    summands: Tensors,
    truth: Tensors,
    dtype: torch.dtype,
    eps: float,
) -> list[str]:
    """Return the parameters for which two sums differ.

    Args:
        names: The parameters to compare.
        own: The rules' sums. Missing ones are zero.
        summands: The sums of the absolute values of the summands of ``own``.
        truth: Autograd's sums.
        dtype: The least precise one in which gradients are computed.
        eps: The relative rounding error of the output's dtype.
    """
    tolerance, tiny = tolerance_of(dtype), torch.finfo(torch.float32).tiny
    # sums that cancel leave rounding errors, also those of a softmax in float32
    noise = max(0.01 * tolerance, 2 * eps, 2 * torch.finfo(torch.float32).eps)
    sizes = {name: float(double_norm(found)) for name, found in truth.items()}
    slack = NOISE * rounding_of(dtype) * max(sizes.values(), default=0.0)
    wrong = []
    for name in names:
        zero = torch.zeros_like(truth[name])
        error = float(double_norm(own.get(name, zero).to(zero.device) - truth[name]))
        total = float(double_norm(summands.get(name, zero)))
        if not error <= tolerance * (sizes[name] + tiny) + noise * total + max(slack, 1e-12):
            wrong.append(name)
    return wrong


def reason_of(wrong: list[str], truth: Tensors, problem: BatchProblem, num_samples: int) -> str:
    """Return why rules and autograd differ for some parameters, given autograd's sums."""
    again = autograd_sums(problem, num_samples) if wrong else truth
    # random gradients differ by more than rounding
    if disagreeing(wrong, again, {}, truth, torch.float32, 0.0):
        return (
            "two passes over one batch differ, as with Dropout in train mode "
            "(check_deterministic=True names the module)"
        )
    return "its rule does not agree with autograd"
