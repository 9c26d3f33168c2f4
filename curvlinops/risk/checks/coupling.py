"""Finds models whose output for a sample depends on the other samples of its batch."""

from collections.abc import Hashable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import vjp
from curvlinops.support.autograd_graph import graph_nodes, precisions
from curvlinops.support.pytree import has_length, leaves
from curvlinops.support.warnings import warn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: Relative difference of outputs that rounding may explain: kernels may round differently for
#: another number of samples.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}
#: The same on accelerators, which may compute in TF32, and in half precision.
_TOLERANCE_TF32, _TOLERANCE_HALF = 1e-2, 0.1

_COUPLED = (
    "The model's output for a sample depends on the other samples of its batch, or the gradient "
    "that its hooks and custom functions make of it, so that"
)
_EXCEPTIONS = (
    "If only a sample's place in the batch matters, as for noise that the model draws with a seed "
    "of its own, or if a tensor in X that all samples share has as many entries as the batch has "
    "samples, pass check_deterministic=False."
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


def check(problem: Any, seen: Any) -> None:
    """Refuse samples that interact, as far as the first batch shows it, see ``interaction``.

    Args:
        problem: The ``BatchProblem``.
        seen: What was ``Observed`` on it.
    """
    known, model = problem.rules(SeenAlone), problem.model
    if known.knows(seen.operations) or _may_interact(problem):
        return
    if couples_samples(problem, seen.output):
        raise interaction(problem)
    if model.shards:  # processes meet here alone: in products, each has its own batches
        if seen.runs_users_code:
            check_gradients(problem)
        return
    # zeros hide what is behind them, such as the gate of a layer before the first step
    tensors = chain(*((*root.parameters(), *root.buffers()) for root in model.roots))
    are_any = [x.any().cpu() for x in (*model.params.values(), *tensors) if x.numel()]
    if bool(torch.stack(are_any).all()):
        known.note(seen.operations)


def interaction(problem: Any) -> ValueError:
    """Return the error that samples interact."""
    return ValueError(COUPLED if problem.risk.per_sample else COUPLED_BATCHES)


def _may_interact(problem: Any) -> bool:
    """Return whether one batch is all data, or the user was told that samples interact."""
    return problem.risk.is_all_data(problem.batch) or bool(_batch_norms(problem.model.roots))


class SeenAlone:
    """Remembers graphs in which samples had the same numbers alone, for all operators on a model.

    A graph is one of the same operations.
    """

    is_shared = True

    def __init__(self) -> None:
        self._graphs = set[Hashable]()

    def knows(self, graph: Hashable) -> bool:
        """Return whether samples are known to be independent in a graph."""
        return graph in self._graphs

    def note(self, graph: Hashable) -> None:
        """Remember that samples were independent in a graph."""
        self._graphs.add(graph)


def couples_samples(problem: Any, output: Tensor) -> bool:
    """Return whether the first or the last samples have other outputs alone than in their batch.

    Both ends: of a recurrence over samples, only later ones depend on others, and the sample with
    the largest entry of the batch may be at one of them.

    Args:
        problem: The model on the batch.
        output: Its output for the whole batch.

    Returns:
        ``False``, too, where the batch cannot be cut, or its parts have other numbers of rows; but
        of two or three samples, models that normalize over the batch refuse one alone.
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
        return num_samples <= 3 and taken == num
    if rows.shape[1:] != output.shape[1:]:  # a number for each pair of samples?
        axes = [taken if n == num_samples else n for n in output.shape[1:]]
        return len(rows) == taken and list(rows.shape[1:]) == axes
    is_cut = len(rows) == size * taken  # else something else than samples was cut
    return is_cut and differs(rows[: size * num], output[size * start :][: size * num], output)


def check_gradients(problem: Any) -> bool:
    """Refuse samples that meet in the backward pass, as hooks and custom functions may let them.

    Returns:
        Whether no gradient is zero: a zero hides what is in the backward pass behind it.
    """
    if _may_interact(problem):
        return False
    couples, is_complete = couples_gradients(problem)
    if couples:
        raise interaction(problem)
    return is_complete


def couples_gradients(problem: Any) -> tuple[bool, bool]:
    """Return whether samples meet in the backward pass, and whether no gradient is zero.

    The gradient of a random function of the output must be the sum of that of the first sample, and
    of that of the others, without the rest of their batch. Where the batch cannot be cut, it is.
    """
    num_samples, u, dtypes = problem.evident_samples or 0, list[Tensor](), set[torch.dtype]()

    def gradient(samples: slice) -> Mapping[str, Tensor | None] | None:
        leaves = problem.leaves()

        def of(output: Tensor) -> Mapping[str, Tensor | None] | None:
            if not u:  # of the whole batch
                u[:] = _randn_like(output).tensor_split(num_samples)
            rows = torch.cat(u[samples])
            dtypes.update((output.dtype, *precisions(graph_nodes(output), output)))
            is_cut = output.shape == rows.shape
            return vjp({"": output}, {"": rows}, leaves, retain=False) if is_cut else None

        return problem.output_alone(samples, num_samples, of, leaves)

    if num_samples < 2:
        return False, False
    ends = slice(0, num_samples), slice(0, 1), slice(1, num_samples)
    whole, *parts = map(gradient, ends)
    if whole is None or None in parts:
        return False, False
    dtypes.update(x.dtype for x in problem.model.params.values())
    tolerance = max(_tolerance(dtype, u[0]) for dtype in dtypes)
    errors, sizes, is_complete = [], [], True
    for name, x in whole.items():
        found = [0.0 if x is None else x.detach().double() for x in (x, *(p[name] for p in parts))]
        is_complete = is_complete and (x is None or bool(x.any()))
        errors.append(float(torch.as_tensor(found[0] - found[1] - found[2]).norm()))
        sizes.append(sum(float(torch.as_tensor(x).norm()) for x in found))
    slack = 0.01 * max(sizes, default=0.0)  # some gradients are zero but for rounding
    couples = any(e > tolerance * (size + slack) for e, size in zip(errors, sizes, strict=True))
    return couples, is_complete


def _randn_like(x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def differs(rows: Tensor, expected: Tensor, output: Tensor) -> bool:
    """Return whether rows of an output differ by more than rounding errors of all of it.

    A row that is not a number, where another one is expected, differs.
    """
    if rows.shape != expected.shape:
        return False
    tolerance = _tolerance(output.dtype, output)
    rows, expected, output = (x.detach().double() for x in (rows, expected, output))
    # masked entries are infinite
    equal = (rows == expected) | (rows.isnan() & expected.isnan())
    error = torch.where(equal, 0.0, rows - expected).norm()
    scale = torch.where(output.isfinite(), output, 0.0).norm()
    return bool(error) and not float(error / scale) <= tolerance


def _tolerance(dtype: torch.dtype, output: Tensor) -> float:
    if dtype == torch.float32 and not output.is_cpu:
        return _TOLERANCE_TF32
    return _TOLERANCES.get(dtype, _TOLERANCE_HALF)
