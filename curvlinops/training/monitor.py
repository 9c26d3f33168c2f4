"""Records of the curvature through training."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curvlinops.algorithms.eigsh import eigsh
from curvlinops.algorithms.xtrace import xtrace
from curvlinops.autodiff.model import eval_mode
from curvlinops.landscape.by_layer import by_layer
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.support.arguments import check_count


class CurvatureMonitor:
    """Measures sharpness, trace and spectra of layers every few steps of a training run.

    The model is in eval mode while it is measured. Parameters, ``.grad``, train flags and random
    numbers are left as they are: the run is the same, bit for bit, as without a monitor.

    A measurement has these numbers, in units of the loss:

    - ``loss``: the loss over all data of the operator.
    - ``sharpness``, ``eigenvalue_2``, ...: the largest eigenvalues, in descending order.
    - ``trace``, ``trace_error``: an estimate of the trace by ``xtrace``, with its standard error.
      Its random vectors are the same at each step.
    - The same numbers, except the loss, for the diagonal block of each layer: ``0/sharpness`` for
      the layer ``0``.

    Args:
        A: A symmetric operator that follows the model, such as a Hessian or a GGN of a few batches.
        path: A CSV file, with the run, the step and a measurement in each row. Rows are written at
            once. A file that exists is continued: each monitor is a run, numbered from 1.
        writer: Takes the numbers as ``writer.add_scalar("curvature/sharpness", number, step)``:
            a ``torch.utils.tensorboard.SummaryWriter``, or an object of your own.
        every: The number of steps from one measurement to the next.
        k: The number of eigenvalues, for the matrix and for each layer.
        num_matvecs: The number of products for each trace, at least six. Zero: no traces.
        by: The layers, as in ``by_layer``: ``"module"``, ``"parameter"``, or a dictionary from
            labels to names and globs. Default: no layers.
        tol: The largest residual of an eigenpair, relative to the eigenvalue.
        seed: Seeds the random vectors.

    Raises:
        TypeError: If ``A`` is no such operator; the factors of KFAC do not follow the model.
        ValueError: If a number is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops import GGNLinearOperator
        >>> from curvlinops.training import CurvatureMonitor
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 2)).eval()
        >>> data = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> monitor = CurvatureMonitor(G, every=10)
        >>> [step for step in range(25) if monitor.log(step)]
        [0, 10, 20]
    """

    def __init__(
        self,
        A: DataLinearOperator,
        path: str | Path | None = None,
        writer: Any = None,
        *,
        every: int = 100,
        k: int = 1,
        num_matvecs: int = 30,
        by: str | Mapping[str, str | Sequence[str]] | None = None,
        tol: float = 1e-2,
        seed: int = 0,
    ):
        is_snapshot = isinstance(A, KroneckerFactoredLinearOperator)
        if not isinstance(A, DataLinearOperator) or not A.self_adjoint or is_snapshot:
            raise TypeError(
                "A must be a symmetric operator on data that follows the model, such as a "
                f"HessianLinearOperator or a GGNLinearOperator, got {type(A).__name__}."
            )
        self.operator, self.writer, self.by, self.tol, self.seed = A, writer, by, tol, seed
        self.path = None if path is None else Path(path)
        self.every, self.k = check_count("every", every), check_count("k", k)
        self.num_matvecs = check_count("num_matvecs", num_matvecs, at_least=0)
        if 0 < self.num_matvecs < 6:
            raise ValueError(
                f"num_matvecs must be 0 (no traces), or at least 6, got {num_matvecs}."
            )
        self._run: int | None = None

    def log(self, step: int) -> dict[str, float] | None:
        """Measure, and write the numbers, if ``step`` is a multiple of ``every``.

        Args:
            step: The number of steps of the optimizer so far.

        Returns:
            The measurement; ``None`` at other steps.

        Raises:
            ValueError: If the file has other columns, or the loss is not finite.
        """
        if step % self.every:
            return None
        numbers = self.measure()
        if self.path is not None:
            self._run = _append(self.path, self._run, {"step": step} | numbers)
        if self.writer is not None:
            for name, number in numbers.items():
                self.writer.add_scalar(f"curvature/{name}", number, step)
        return numbers

    def measure(self) -> dict[str, float]:
        """Return a measurement of the model as it is, without writing it."""
        A = self.operator
        with eval_mode(A.model_func), A.linearized():
            numbers = {"loss": float(A.gradient_and_loss()[1])} | self._measure(A)
            layers = {} if self.by is None else by_layer(A, self._measure, by=self.by)
        layered = {f"{label}/{name}": x for label, xs in layers.items() for name, x in xs.items()}
        return numbers | layered

    def _measure(self, A: TorchLinearOperator) -> dict[str, float]:
        """Return the numbers of a matrix, or of the block of a layer."""
        k = min(self.k, A.shape[0])
        largest = eigsh(A, k, which="LA", tol=self.tol, seed=self.seed).eigenvalues.tolist()[::-1]
        names = ["sharpness", *(f"eigenvalue_{i}" for i in range(2, k + 1))]
        numbers = dict(zip(names, largest, strict=True))
        if self.num_matvecs:
            trace, error = xtrace(A, self.num_matvecs, return_error=True, seed=self.seed)
            numbers |= {"trace": float(trace), "trace_error": float(error)}
        return numbers


def _append(path: Path, run: int | None, row: dict[str, float]) -> int:
    """Add a row to a CSV file, which begins with the names of its columns; return its run."""
    columns = ["run", *row]
    with path.open("a+", newline="") as file:
        file.seek(0)
        header, *rows = [*csv.reader(file)] or [None]
        if header not in (None, columns):
            raise ValueError(
                f"{path} has the columns {', '.join(header)}, but the measurement has "
                f"{', '.join(columns)}. Choose another path, or delete the file."
            )
        if run is None:
            run = int(rows[-1][0]) + 1 if rows else 1
        new = [run, *row.values()]
        csv.writer(file).writerows([columns, new] if header is None else [new])
    return run
