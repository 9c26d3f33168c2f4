"""Chooses the mode of differentiation for a model: the first that passes a dot-test."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Head, Problem, Seed, transposed_jacobian
from curvlinops.autodiff.evaluation import GraphError
from curvlinops.autodiff.model import Model
from curvlinops.autodiff.modes import Forward, Reverse
from curvlinops.linear_operator.space import Columns, dot, norm
from curvlinops.support.memory import lacks_memory
from curvlinops.support.rng import preserved_rng
from curvlinops.support.warnings import first_line

Mode = Reverse | Forward

#: Allowed discrepancy of a dot-test, relative to the products' norms, for parameters of a dtype.
#: Models may compute in less than that: Llama's norms in float32, under autocast in bfloat16.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.1}

#: Tests a mode on a batch with random vectors, and returns its discrepancy; ``None`` if all
#: derivatives vanish, so that there is nothing to compare.
DotTest = Callable[[Mode, Problem, Head], float | None]


class NoDerivativeError(RuntimeError):
    """PyTorch lacks a derivative of the model, in all modes."""


def allowed_modes(model: Model, autodiff: str, reverse: Reverse) -> list[Mode]:
    """Return the modes that may be used, reverse mode first."""
    if autodiff == "reverse" or (autodiff == "auto" and not model.substitutable):
        return [reverse]
    if not model.substitutable:
        raise ValueError(
            "autodiff='forward' needs a Module or a function (params, X) -> output; the "
            "parameters of a closure cannot carry tangents."
        )
    return [Forward()] if autodiff == "forward" else [reverse, Forward()]


def choose(modes: list[Mode], dot_test: DotTest, problem: Problem, head: Head) -> tuple[Mode, bool]:
    """Choose the first mode that runs and passes the test.

    Args:
        modes: The modes to choose from.
        dot_test: The test.
        problem: The model on a batch.
        head: A function of the output, for the test.

    Returns:
        The mode, and whether the test was possible: it is not if all derivatives vanish, or if none
        is a number. The mode is then the first one that runs.

    Raises:
        NoDerivativeError: If there is none, with the reasons and what to do.
    """
    dtypes = {leaf.dtype for leaf in problem.leaves().values()}
    if problem.facts.dtypes - {torch.float64}:  # float64 for parts of the model only
        dtypes.add(torch.float32)
    tolerance = max(_TOLERANCES[dtype] for dtype in dtypes)
    failures, undefined, cause = [], [], None
    for mode in modes:
        name = type(mode).__name__.lower()
        if isinstance(mode, Forward) and problem.facts.stops_gradients:
            failures.append("forward mode: differentiates what the model computes under no_grad")
            continue
        try:
            discrepancy = dot_test(mode, problem, head)
        except GraphError:
            raise
        except Exception as error:  # also of models that look at what a mode does
            if lacks_memory(error) or (mode is modes[-1] and not isinstance(error, RuntimeError)):
                raise
            failures.append(f"{name} mode: {first_line(error)}")
            cause = cause or error
            continue
        if discrepancy is None:
            return mode, False
        if discrepancy <= tolerance:
            return mode, True
        if math.isnan(discrepancy):
            undefined.append(mode)
        failures.append(f"{name} mode: fails its dot-test, off by {discrepancy:.1e}")
    if undefined:  # the check of the product names the parameter
        return undefined[0], False
    raise NoDerivativeError(_explain(failures, modes)) from cause


def symmetry_of_hessian(mode: Mode, problem: Problem, head: Head) -> float | None:
    """Compare ``<u, H v>`` with ``<v, H u>`` for random vectors.

    If both are zero, this test says nothing, and the adjoint of the Jacobian is tested instead.
    """
    u, v = _random(problem, 0), _random(problem, 1)
    seeds: list[Tensor] = []

    def recording(output: Tensor) -> tuple[Seed, Tensor]:
        (start, cotangent), terms = head(output)
        seeds.append((start if cotangent is None else cotangent).detach())
        return (start, cotangent), terms

    apply = mode.hessian(problem, recording)
    Hu, Hv = problem.space.zeros(1), problem.space.zeros(1)
    apply(u, Hu)
    apply(v, Hv)
    found = norm(Hv) + norm(Hu)
    if found == 0.0:
        return adjoint_of_jacobian(mode, problem, lambda output: (None, output.new_zeros(())))
    return abs(dot(u, Hv) - dot(v, Hu)) / (found + _noise(seeds[0]))


def adjoint_of_jacobian(mode: Mode, problem: Problem, head: Head) -> float | None:
    """Compare ``<w, J v>`` with ``<J^T w, v>``, whose ``J^T`` is ordinary backpropagation.

    Both come from one product ``J^T B J v`` with a B that stores its input and returns w. In
    forward mode ``J v`` is also compared with that of a pass without a graph, where models and
    kernels may take other paths. If all are zero, an ordinary backward pass must give zero, too.
    """
    v, Jw, noted, outputs = _random(problem, 0), problem.space.zeros(1), [], []

    def probe(output: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        generator = torch.Generator(output.device).manual_seed(1)
        w = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)

        def note(tangent: Tensor) -> Tensor:
            noted.extend([w, tangent[0]])
            return w.unsqueeze(0)

        outputs.append(output)
        return note, head(output)[1]

    with preserved_rng():  # the same Dropout in both
        mode.gauss_newton(problem, probe)(v, Jw)
    w, Jv = (tensor.to(problem.space.dtype) for tensor in noted)
    found, noise = float(Jv.norm()) + norm(Jw), _noise(outputs[0])
    if found == 0.0:
        apply, _ = transposed_jacobian(problem)
        apply(noted[0].unsqueeze(0), Jw)
        return norm(Jw) / (norm(Jw) + noise) if norm(Jw) else None
    scale = found + noise
    discrepancy = abs(float((w * Jv).sum()) - dot(Jw, v)) / scale
    if not isinstance(mode, Forward):
        return discrepancy
    alone = mode.jacobian(problem, lambda output: lambda tangent: tangent)(v)[0]
    return discrepancy + float((alone.to(problem.space.dtype) - Jv).norm()) / scale


def _random(problem: Problem, seed: int) -> Columns:
    generator = torch.Generator(problem.space.device).manual_seed(seed)
    return problem.space.randn(1, generator)


def _noise(value: Tensor) -> float:
    """Return a size below which derivatives may be rounding errors, and then are not tested."""
    info = torch.finfo(value.dtype)
    return info.eps**0.5 * float(value.double().norm()) + info.tiny


def _explain(failures: list[str], modes: list[Mode]) -> str:
    reasons = " ".join(failures)
    hints = []
    if all(isinstance(mode, Forward) for mode in modes):
        hints.append("choose autodiff='auto', which also tries reverse mode")
    if "attention" in reasons:
        hints.append(
            "call torch.nn.functional.scaled_dot_product_attention (whose math kernel is then "
            "used) instead of a fused attention kernel; in transformers, load the model with "
            "attn_implementation='eager' or 'sdpa'"
        )
    if "once_differentiable" in reasons or "custom" in reasons or "dot-test" in reasons:
        hints.append(
            "make the backward of each custom autograd.Function, and each hook that changes "
            "gradients, differentiable, or build the function from PyTorch operations"
        )
    hints.append("replace the operation by one composed of differentiable operations")
    return (
        "PyTorch lacks a derivative of this model that the product needs. "
        + "; ".join(failures)
        + ". What helps: "
        + ", or ".join(hints)
        + "."
    )
