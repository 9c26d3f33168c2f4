"""Finds models whose output for a sample depends on the other samples of its batch."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import vjp
from curvlinops.autodiff.model import Model
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.autograd_graph import graph_nodes, precisions
from curvlinops.support.pytree import has_length, leaves
from curvlinops.support.torch_internals import strided_tensors
from curvlinops.support.warnings import warn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
#: Relative difference of outputs that rounding may explain.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-3}
#: Relative difference that rounding never explains, whatever kernels compute.
_MOST_ROUNDING = 0.1
#: The largest number of graphs of a model that are remembered.
_MOST_GRAPHS = 16

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


def report_batch_statistics(roots: Iterable[nn.Module], operator: str | None) -> bool:
    """Warn that BatchNorm couples samples; refuse it for operators made of samples' gradients.

    Returns:
        Whether it does.
    """
    coupling = {
        name or type(module).__name__: module.running_mean is not None
        for root in roots
        for name, module in root.named_modules()
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None)
    }
    if not coupling:
        return False
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
    return True


class SeenAlone:
    """Remembers of a model that samples had the same outputs alone, for all operators on it.

    That holds for a graph of the same operations, unless a tensor was all zero that no longer is,
    such as the gate of a layer before the first step.
    """

    is_shared = True

    def __init__(self) -> None:
        self._known: dict[int, set[str]] = {}  # from a graph to the tensors that were zero
        self._asked: tuple[int, set[str]] | None = None

    def knows(self, model: Model, graph: int) -> bool:
        """Return whether samples were evaluated alone; of sharded models, nothing is remembered."""
        if model.shards:
            return False
        zero = _zero_tensors(model.tensors())
        self._asked = graph, zero
        return graph in self._known and self._known[graph] <= zero

    def note(self) -> None:
        """Remember that samples were independent in the graph that was asked for."""
        if self._asked is not None and len(self._known) < _MOST_GRAPHS:
            self._known |= [self._asked]


def _zero_tensors(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors all of whose numbers are zero."""
    parts = [(name, x) for name, t in tensors.items() for x in strided_tensors(t.detach())]
    device = parts[0][1].device
    corners = torch.stack([x[(slice(4),) * x.ndim].any().to(device) for _, x in parts]).tolist()
    # most tensors show it in a corner
    are_any = zip(parts, corners, strict=True)
    return tensors.keys() - {name for (name, x), is_any in are_any if is_any or bool(x.any())}


def couples_samples(problem: BatchProblem, output: Tensor, num_alone: int) -> bool:
    """Return whether samples have other outputs alone than in their batch.

    Args:
        problem: The model on the batch.
        output: Its output for the whole batch, with equally many rows for each sample.
        num_alone: The numbers of samples that are compared, the first ones and the last ones, which
            must be others: of a recurrence over samples, only later ones depend on others, and the
            sample with the largest entry of the batch may be among the first or the last ones.

    Returns:
        ``False``, too, where the batch cannot be cut, or the model refuses a part of it.
    """
    num_samples = problem.samples_of(output)
    tensors = [x for x in leaves(problem.batch.X) if x.ndim]
    if not all(has_length(x, num_samples) for x in tensors):
        # the last sample of a part may get the entries of all samples behind it, as the last bag of
        # an EmbeddingBag with offsets does: then one more sample is taken
        taken, compared = range(num_alone + 1), range(num_alone)
        return len(taken) < num_samples and _couples(problem, output, taken, compared)
    ends = range(num_alone), range(num_samples - num_alone, num_samples)
    return any(_couples(problem, output, part, part) for part in ends)


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
    tolerance = max(_TOLERANCES.get(dtype, 1.5e-2) for dtype in dtypes)
    errors, sizes = [], []
    for name, x in whole.items():
        found = [x, *(part[name] for part in parts)]
        found = [torch.zeros(()) if x is None else x.detach().cpu().double() for x in found]
        errors.append(float((found[0] - found[1] - found[2]).norm()))
        sizes.append(sum(float(x.norm()) for x in found))
    slack = 0.01 * max(sizes, default=0.0)  # some gradients are zero but for rounding
    return any(e > tolerance * (size + slack) for e, size in zip(errors, sizes, strict=True))


def _couples(problem: BatchProblem, output: Tensor, taken: range, compared: range) -> bool:
    """Return whether some samples of a batch have other outputs alone.

    Kernels may round differently for another number of samples, in half precision and in TF32 by
    more than the tolerance. Then the samples have the same outputs in a batch of as many samples,
    which are copies of them. The same decides about batches of two or three, of which models that
    normalize over the batch refuse a single sample.
    """
    num_samples = problem.samples_of(output)
    size = len(output) // num_samples
    where = slice(size * compared.start, size * compared.stop)
    rows = problem.output_alone(slice(taken.start, taken.stop), num_samples)
    if rows is None:
        if num_samples > 3:
            return False
    elif list(rows.shape[1:]) != list(output.shape[1:]):  # a number for each pair of samples?
        axes = [len(taken) if n == num_samples else n for n in output.shape[1:]]
        return len(rows) == len(taken) and list(rows.shape[1:]) == axes
    elif len(rows) >= len(output):  # something else than samples was cut
        return False
    else:
        rows = rows[: size * len(compared)]
        if not differs(rows, output[where], output):
            return False
        is_large = not _difference(rows, output[where], output) <= _MOST_ROUNDING
        if is_large or len(taken) > len(compared):
            return True
    copies = [taken[(n - taken.start) % len(taken)] for n in range(num_samples)]
    again = problem.output_alone(copies, num_samples)
    if again is None:
        return rows is not None
    return differs(again[where], output[where], output)


def differs(rows: Tensor, expected: Tensor, output: Tensor) -> bool:
    """Return whether rows of an output differ by more than rounding errors of all of it.

    A row that is not a number, where another one is expected, differs.
    """
    tolerance = _TOLERANCES.get(output.dtype, 1.5e-2)
    return rows.shape == expected.shape and not _difference(rows, expected, output) <= tolerance


def _difference(rows: Tensor, expected: Tensor, output: Tensor) -> float:
    """Return the norm of the difference of rows, relative to that of the whole output."""
    rows, expected, output = (x.detach().double() for x in (rows, expected, output))
    # masked entries are infinite
    equal = (rows == expected) | (rows.isnan() & expected.isnan())
    error = torch.where(equal, 0.0, rows - expected).norm()
    scale = torch.where(output.isfinite(), output, 0.0).norm()
    return float(error / scale) if bool(error) else 0.0
