"""Finds models whose output for a sample depends on the other samples of its batch."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import vjp
from curvlinops.autodiff.model import Model
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.repeats import Observed
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


def check(problem: BatchProblem, seen: Observed) -> None:
    """Refuse samples that interact, as far as the batch shows it, unless one batch is all data.

    The first and the last ones must have the same outputs without the rest of their batch. For
    quantities of single samples, they never may interact.
    """
    risk, known = problem.risk, problem.rules(SeenAlone)
    if risk.is_all_data(problem.batch) or _batch_norms(problem.model.roots):  # the user was told
        return
    if known.knows(seen.operations):
        return
    if problem.samples_of(seen.output) == problem.evident_samples and (
        couples_samples(problem, seen.output)
        or (seen.runs_users_code and couples_gradients(problem, seen.output))
    ):
        raise ValueError(COUPLED if risk.per_sample else COUPLED_BATCHES)
    known.note(problem.model, seen.operations)


class SeenAlone:
    """Remembers graphs in which samples had the same outputs alone, for all operators on a model.

    A graph is one of the same operations.
    """

    is_shared = True

    def __init__(self) -> None:
        self._graphs = set[int]()

    def knows(self, graph: int) -> bool:
        """Return whether samples are known to be independent in a graph."""
        return graph in self._graphs

    def note(self, model: Model, graph: int) -> None:
        """Remember that samples were independent in a graph.

        Not if a parameter is zero, such as the gate of a layer before the first step, which hides
        what is behind it, or sharded.
        """
        if model.shards:
            return
        own = (x for root in model.roots for x in root.parameters())
        are_any = [x.any().cpu() for x in (*model.params.values(), *own) if not x.is_meta]
        if bool(torch.stack(are_any).all()):
            self._graphs.add(graph)


def couples_samples(problem: BatchProblem, output: Tensor) -> bool:
    """Return whether the first or the last samples have other outputs alone than in their batch.

    Both ends: of a recurrence over samples, only later ones depend on others, and the sample with
    the largest entry of the batch may be at one of them.

    Args:
        problem: The model on the batch.
        output: Its output for the whole batch, with equally many rows for each sample.

    Returns:
        ``False``, too, where the batch cannot be cut, or the model refuses a part of it; but of two
        or three samples, models that normalize over the batch refuse one alone.
    """
    num_samples = problem.samples_of(output)
    # two samples are better, since models may treat one alone differently
    num = taken = 2 if num_samples > 3 else 1
    starts = [0, num_samples - num]
    if not all(has_length(x, num_samples) for x in leaves(problem.batch.X) if x.ndim):
        # the last sample of a part may get the entries of all samples behind it, as the last bag of
        # an EmbeddingBag with offsets does: then one more sample is taken
        taken, starts = num + 1, [0]
    return taken < num_samples and any(_couples(problem, output, x, num, taken) for x in starts)


def _couples(problem: BatchProblem, output: Tensor, start: int, num: int, taken: int) -> bool:
    """Return whether some samples of a batch have other outputs if a part of it is taken."""
    num_samples = problem.samples_of(output)
    size = len(output) // num_samples
    rows = problem.output_alone(slice(start, start + taken), num_samples)
    if rows is None:
        return num_samples <= 3 and taken == num
    if rows.shape[1:] != output.shape[1:]:  # a number for each pair of samples?
        axes = [taken if n == num_samples else n for n in output.shape[1:]]
        return len(rows) == taken and list(rows.shape[1:]) == axes
    is_cut = len(rows) < len(output)  # else something else than samples was cut
    return is_cut and differs(rows[: size * num], output[size * start :][: size * num], output)


def couples_gradients(problem: BatchProblem, output: Tensor) -> bool:
    """Return whether samples interact in the backward pass, as hooks may let them.

    The gradient of a random function of the output must be the sum of that of the first sample, and
    of that of the others, without the rest of their batch. Where the batch cannot be cut, it is.
    """
    num_samples = problem.samples_of(output)
    if num_samples < 2:
        return False
    generator = torch.Generator(output.device).manual_seed(0)
    options = {"dtype": output.dtype, "device": output.device, "generator": generator}
    u = torch.randn(num_samples, len(output) // num_samples, *output.shape[1:], **options)
    dtypes = {x.dtype for x in (output, *problem.leaves().values())}

    def gradient(samples: slice) -> Mapping[str, Tensor | None] | None:
        leaves, rows = problem.leaves(), u[samples].flatten(0, 1)

        def of(output: Tensor) -> Mapping[str, Tensor | None] | None:
            is_cut = output.shape == rows.shape
            dtypes.update(precisions(graph_nodes(output), output))
            return vjp({"": output}, {"": rows}, leaves, retain=False) if is_cut else None

        return problem.output_alone(samples, num_samples, of, leaves)

    ends = slice(0, num_samples), slice(0, 1), slice(1, num_samples)
    whole, *parts = map(gradient, ends)
    if whole is None or None in parts:
        return False
    tolerance = max(_tolerance(dtype, output) for dtype in dtypes)
    errors, sizes, zero = [], [], output.new_zeros(())
    for name, x in whole.items():
        found = [zero if x is None else x for x in (x, *(part[name] for part in parts))]
        found = [x.detach().cpu().double() for x in found]
        errors.append(float((found[0] - found[1] - found[2]).norm()))
        sizes.append(sum(float(x.norm()) for x in found))
    slack = 0.01 * max(sizes, default=0.0)  # some gradients are zero but for rounding
    return any(e > tolerance * (size + slack) for e, size in zip(errors, sizes, strict=True))


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
