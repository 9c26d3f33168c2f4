"""Finds models whose output for a sample depends on the other samples of its batch."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import vjp
from curvlinops.support.autograd_graph import custom_functions, graph_nodes, precisions
from curvlinops.support.norms import double_norm, wide
from curvlinops.support.pytree import has_length, leaves
from curvlinops.support.rng import seeded
from curvlinops.support.torch_internals import strided_tensors
from curvlinops.support.warnings import warn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: Relative difference of outputs that rounding may explain: kernels may round differently for
#: another number of samples. At worst one rounds and the other does not. Seven networks (MLP, CNN,
#: transformers, 20 to 32 layers) differ so by 3e-3 to 2e-2 in bfloat16, and by 4e-4 to 2e-3 in
#: float16; a chaotic one by 5e-2 and 7e-3. In float32, parts of a batch differ by up to 8e-6.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.1}
#: The same in float32 on accelerators, which may compute in TF32. With products whose inputs were
#: rounded to its 10 bits on the CPU, the networks differ by 3e-4 to 1e-3, the chaotic one by 1e-2.
_TOLERANCE_TF32 = 1e-2

_COUPLED = (
    "The model's output for a sample depends on the other samples of its batch, or the gradient "
    "that its hooks and custom functions make of it, so that"
)
_EXCEPTIONS = (
    "If a tensor in X that all samples share has as many entries as the batch has samples, such as "
    "a grid of points, make it a buffer of the model. If only a sample's place in the batch "
    "matters, as for noise that the model draws with a seed of its own, pass "
    "check_deterministic=False."
)

COUPLED = (
    f"{_COUPLED} gradients of single samples are not defined. Let the model treat samples one by "
    "one; if rows of its output are parts of samples, such as tokens, give samples an axis in "
    f"front of them. {_EXCEPTIONS}"
)

COUPLED_BATCHES = (
    f"{_COUPLED} the result depends on how the data is split into batches. Let the model treat "
    f"samples one by one, or pass all samples as one batch, data=[(X, y)]. {_EXCEPTIONS}"
)


def report_batch_statistics(roots: Iterable[nn.Module], operator: str | None) -> None:
    """Warn that BatchNorm couples samples; refuse it for operators made of samples' gradients."""
    coupling = _batch_norms(roots)
    if not coupling:
        return
    names = ", ".join(map(repr, coupling))
    if all(coupling.values()):
        what, remedy = "BatchNorm in train mode", "Call model.eval() to use running statistics."
    else:
        what = "BatchNorm without running statistics"
        remedy = "Keep them with track_running_stats=True, and call model.eval()."
    if operator is not None:
        raise ValueError(
            f"{what} couples the samples of a batch (module {names}), but {operator} needs "
            f"gradients of single samples. {remedy}"
        )
    warn(
        f"{what} (module {names}): the result depends on how the data is split into batches. "
        f"{remedy}"
    )


def _batch_norms(roots: Iterable[nn.Module]) -> dict[str, bool]:
    """Return the modules that couple samples by name, and whether they could do without."""
    return {
        name or type(module).__name__: module.running_mean is not None
        for root in roots
        for name, module in root.named_modules()
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None)
    }


def check_interaction(problem: Any, seen: Any) -> None:
    """Refuse samples that interact, as far as the first batch shows it, see ``interaction``."""
    known, operations = problem.seen.alone, problem.functions.operations
    if operations in known or _may_interact(problem):
        return
    if couples_samples(problem, seen.output):
        raise interaction(problem)
    if seen.runs_users_code:
        check_gradients(problem, operations)
    if problem.model.shards:
        return
    # zeros hide what is behind them, such as the gate of a layer before the first step
    parts = chain(*map(strided_tensors, problem.model.tensors().values()))
    are_any = [x.any().cpu() for x in parts if x.numel() and not (x.is_meta or x.is_quantized)]
    if bool(torch.stack(are_any).all()):
        known.add(operations)


def interaction(problem: Any, where: str = "") -> ValueError:
    """Return the error that samples interact."""
    return ValueError((COUPLED if problem.risk.per_sample else COUPLED_BATCHES) + where)


def _may_interact(problem: Any) -> bool:
    """Return whether one batch is all data, or the user was told that samples interact."""
    return problem.risk.is_all_data(problem.batch) or bool(_batch_norms(problem.model.roots))


def couples_samples(problem: Any, output: Tensor) -> bool:
    """Return whether the first or the last samples have other outputs alone than in their batch.

    Both ends: of a recurrence over samples, only later ones depend on others, and the sample with
    the largest entry of the batch may be at one of them. It is not known where the batch cannot be
    cut, or its parts have other numbers of rows; but of two or three samples, models that normalize
    over the batch refuse one alone.
    """
    num_samples = problem.evident_samples
    if not num_samples or len(output) % num_samples or not len(output):
        return False
    # two samples are better, since models may treat one alone differently
    num = taken = 2 if num_samples > 3 else 1
    starts = [0, num_samples - num]
    if not all(has_length(x, num_samples) for x in leaves(problem.batch.X) if x.ndim):
        # the last sample of a part may get the entries of all samples behind it, as the last bag of
        # an EmbeddingBag with offsets does: then one more sample is taken
        taken, starts = num + 1, [0]
    return taken < num_samples and any(_couples(problem, output, x, num, taken) for x in starts)


def _couples(problem: Any, output: Tensor, start: int, num: int, taken: int) -> bool:
    """Return whether some samples of a batch have other outputs if a part of it is taken."""
    num_samples = problem.evident_samples
    size = len(output) // num_samples
    rows = problem.output_alone(slice(start, start + taken), num_samples)
    if rows is None:
        return size == 1 and num_samples <= 3 and taken == num
    if rows.shape[1:] != output.shape[1:]:  # a number for each pair of samples?
        axes = [taken if n == num_samples else n for n in output.shape[1:]]
        return len(rows) == taken and list(rows.shape[1:]) == axes
    is_cut = len(rows) == size * taken  # else something else than samples was cut
    expected = output[size * start :][: size * num]
    return is_cut and differs(rows[: size * num], expected, output, problem.risk.facts.precision)


def check_gradients(problem: Any, operations: int) -> None:
    """Refuse samples that meet in the backward pass of a new graph, outside of an evaluation.

    Hooks and custom functions may let them. A zero gradient hides what is in the backward pass
    behind it. Processes that evaluate a sharded model together may have unequal batches: they
    compare the first one only, at construction.
    """
    known, facts = problem.seen.alone, problem.risk.facts
    is_late = problem.model.shards and facts.train_flags is not None
    key = (operations, *sorted(facts.hooks))
    if is_late or key in known or _may_interact(problem):
        return
    names, is_complete = couples_gradients(problem)
    if names:
        where = f" (They meet in the backward pass, in one of {', '.join(names)}.)"
        raise interaction(problem, where)
    if is_complete:
        known.add(key)


def couples_gradients(problem: Any) -> tuple[list[str], bool]:
    """Return the user's code in whose backward pass samples meet, and if no gradient is zero.

    The gradient of a random function of the output must be the sum of that of the first sample, and
    of that of the others, without the rest of their batch. Where the batch cannot be cut, it is.
    """
    num_samples, u, dtypes = problem.evident_samples or 0, list[Tensor](), set[torch.dtype]()
    names = set[str]()

    def gradient(samples: slice) -> Mapping[str, Tensor] | None:
        leaves = problem.leaves()

        def of(output: Tensor) -> Mapping[str, Tensor] | None:
            if not u:  # of the whole batch
                random = torch.empty_like(output).normal_(generator=seeded(output.device, 0))
                u[:] = random.tensor_split(num_samples)
            rows = torch.cat(u[samples])
            if output.shape != rows.shape:
                return None
            nodes = graph_nodes(output)
            names.update(custom_functions(nodes), problem.risk.facts.hooks)
            dtypes.update(precisions(nodes, output))
            grads = vjp({"": output}, {"": rows}, leaves, retain=False)
            return {name: wide(x.detach()) for name, x in grads.items() if x is not None}

        return problem.output_alone(samples, num_samples, of, leaves)

    if num_samples < 2:
        return [], False
    grads = [*map(gradient, (slice(0, num_samples), slice(0, 1), slice(1, num_samples)))]
    if None in grads:
        return [], False
    dtypes.update(x.dtype for x in problem.model.params.values())
    tolerance, errors = max(_tolerance(dtype, u[0]) for dtype in dtypes), list[tuple]()
    for name in set().union(*grads):
        whole, *parts = (x.get(name, u[0].new_zeros(())) for x in grads)
        sizes = [float(double_norm(x)) for x in (whole, *parts)]
        errors.append((float(double_norm(whole - sum(parts))), sum(sizes), sizes[0]))
    slack = 0.01 * max((size for _, size, _ in errors), default=0.0)  # zero but for rounding
    couples = any(error > tolerance * (size + slack) for error, size, _ in errors)
    return sorted(names) if couples else [], all(size for *_, size in errors)


def differs(rows: Tensor, expected: Tensor, output: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows of an output differ by more than its rounding errors in a dtype."""
    if rows.shape != expected.shape:
        return False
    error, scale = error_and_scale(rows, expected, output)
    return error != 0 and not error <= _tolerance(dtype, output) * scale


def error_and_scale(x: Tensor, expected: Tensor, whole: Tensor) -> tuple[float, float]:
    """Return the norms of an error and of the finite entries of a whole; infinities may be equal.

    Numbers that are not finite, where others are expected, are an error that is not finite.
    """
    equal = (x == expected) | (x.isnan() & expected.isnan())
    error = torch.where(equal, 0.0, x.detach() - expected.detach())
    scale = torch.where(whole.isfinite(), whole.detach(), 0.0)
    return float(double_norm(error)), float(double_norm(scale))


def _tolerance(dtype: torch.dtype, output: Tensor) -> float:
    if dtype == torch.float32 and not output.is_cpu:
        return _TOLERANCE_TF32
    return _TOLERANCES.get(dtype, 0.1)
