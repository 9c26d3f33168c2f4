"""Checks of what the rules find.

Gradients of samples have to add up to autograd's. Sums in which every sample has another weight
also show gradients that were assigned to the wrong sample.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Problem, pull
from curvlinops.layers.detection import NOISE, is_nonlinear, rounding_of, unrelated
from curvlinops.layers.layout import by_samples
from curvlinops.support.norms import double_norm

Tensors = Mapping[str, Tensor]


def probe(output: Tensor) -> Tensor:
    """Return random numbers in an output's shape, always the same on a device."""
    generator = torch.Generator(output.device).manual_seed(0)
    dtype = torch.promote_types(output.dtype, torch.float32)
    random = torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)
    return random.to(output.dtype)


def shares(num_samples: int, like: Tensor) -> Tensor:
    """Return weights of the samples that have nothing to do with those that tell them apart."""
    return 0.5 + unrelated(num_samples, 2, like)


def weighted(u: Tensor, r: Tensor) -> Tensor:
    """Return what is backpropagated, times weights ``[N]`` of the samples."""
    return u * r.reshape(-1, *(1,) * (u.ndim - 1))


def autograd_sums(
    problem: Problem, num_samples: int | None, then: Callable[[Tensor], Tensor] = torch.clone
) -> dict[str, Tensor]:
    """Return autograd's gradients of a weighted sum of the output, in a forward pass of its own.

    Args:
        problem: The model on a batch.
        num_samples: See ``RecordedBatch``.
        then: What happens to the samples' weights.
    """
    with problem.recording("once") as (_, leaves, output):
        output = by_samples(output, num_samples)
        u = weighted(probe(output.detach()), then(shares(len(output), output.detach())))
        found = pull({"": output}, {"": u}, leaves, retain=not problem.can_substitute)
    return {
        name: torch.zeros_like(leaf) if found[name] is None else found[name]
        for name, leaf in leaves.items()
    }


def disagreeing(
    names: Iterable[str],
    own: Tensors,
    summands: Tensors,
    truth: Tensors,
    tolerance: float,
    eps: float,
    slack: Mapping[str, float],
) -> list[str]:
    """Return the parameters for which two sums differ.

    Args:
        names: The parameters to compare.
        own: The rules' sums; what is not there is zero.
        summands: The sums of the absolute values of all that ``own`` is made of.
        truth: Autograd's sums.
        tolerance: The relative error of gradients.
        eps: That of the output's dtype.
        slack: How large a difference may be in any case.
    """
    # of what adds up to about zero, rounding errors are left, also those of a softmax in float32
    noise = max(0.01 * tolerance, 2 * eps, 2 * torch.finfo(torch.float32).eps)
    wrong = []
    for name in names:
        zero = torch.zeros_like(truth[name])
        size = float(double_norm(truth[name])) + torch.finfo(torch.float32).tiny
        error = float(double_norm(own.get(name, zero).to(zero.device) - truth[name]))
        total = float(double_norm(summands.get(name, zero)))
        if not error <= tolerance * size + noise * total + max(slack.get(name, 0.0), 1e-12):
            wrong.append(name)
    return wrong


def rounding(
    truth: Tensors, problem: Problem, num_samples: int | None, dtype: torch.dtype
) -> dict[str, float]:
    """Return the rounding errors of sums, which may come from larger ones, with some to spare.

    Args:
        truth: Autograd's sums.
        problem: The model on a batch.
        num_samples: See ``RecordedBatch``.
        dtype: The least precise one in which gradients are computed.
    """
    # they are not linear in what is backpropagated: two parts do not add up to the whole
    parts = [
        autograd_sums(problem, num_samples, lambda r: r * unrelated(len(r), 3, r)),
        autograd_sums(problem, num_samples, lambda r: r * (1 - unrelated(len(r), 3, r))),
    ]
    sizes = {name: float(double_norm(whole)) for name, whole in truth.items()}
    limit, found = NOISE * rounding_of(dtype) * max(sizes.values(), default=0.0), {}
    for name, whole in truth.items():
        difference = float(double_norm(whole - parts[0][name] - parts[1][name]))
        of_all = sizes[name] if is_nonlinear(difference, sizes[name]) else 0.0
        found[name] = min(10 * max(difference, of_all), limit)
    return found


def explained(
    wrong: list[str], truth: Tensors, problem: Problem, num_samples: int | None
) -> tuple[list[str], str]:
    """Return the parameters for which rules and autograd differ, and why.

    Args:
        wrong: These parameters.
        truth: Autograd's sums.
        problem: The model on a batch.
        num_samples: See ``RecordedBatch``.
    """
    again = autograd_sums(problem, num_samples) if wrong else truth
    # what is random differs by more than any rounding
    if disagreeing(wrong, again, {}, truth, 1e-2, 0.0, {}):
        return wrong, (
            "two passes over one batch differ, as with Dropout in train mode "
            "(check_deterministic=True names the module)"
        )
    return wrong, "its rule does not agree with autograd"
