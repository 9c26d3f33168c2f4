"""Records of the curvature through a training run of Hugging Face's ``Trainer``.

This module needs transformers: ``pip install 'curvlinops[transformers]'``.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from curvlinops.autodiff.model import eval_mode
from curvlinops.integrations.transformers import problem
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.hessian import HessianLinearOperator
from curvlinops.training.monitor import CurvatureMonitor

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "CurvatureCallback needs transformers: pip install 'curvlinops[transformers]'."
    ) from error


class CurvatureCallback(TrainerCallback):
    """A callback of Hugging Face's ``Trainer`` that has a ``CurvatureMonitor``.

    It measures before the first step and every few steps after. The numbers also go to
    ``trainer.state.log_history``, with the names ``curvature/sharpness``, and so on. With several
    processes, all measure, and the first one writes.

    Args:
        loader: The batches on which the curvature is measured, as in ``problem``: dictionaries,
            with labels. A list of one or two is enough for a log.
        path: A CSV file, see ``CurvatureMonitor``.
        writer: TensorBoard's writer, see ``CurvatureMonitor``.
        operator: The class of the matrix, such as ``GGNLinearOperator``, or another function of
            model, loss, parameters and data that returns one. Models that are sharded over
            processes need one with a ``process_group``.
        task: The task of the model, as in ``problem``.
        **options: Further options of ``CurvatureMonitor``.

    Raises:
        ValueError: At the beginning of the training, if model and batches make no ``problem``.
    """

    def __init__(
        self,
        loader: Iterable[Mapping[str, Any]],
        path: str | Path | None = None,
        writer: Any = None,
        *,
        operator: Callable[..., DataLinearOperator] = HessianLinearOperator,
        task: str | None = None,
        **options: Any,
    ):
        self.loader, self.operator, self.task = loader, operator, task
        self.outputs, self.options = (path, writer), options
        self.monitor: CurvatureMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any):
        """Build the operator, and measure."""
        with eval_mode(model):
            A = self.operator(*problem(model, self.loader, self.task))
        outputs = self.outputs if state.is_world_process_zero else ()
        self.monitor = CurvatureMonitor(A, *outputs, **self.options)
        self._log(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any):
        """Measure, if it is time."""
        self._log(state)

    def _log(self, state: Any) -> None:
        """Measure, if it is time, and add the numbers to the trainer's history."""
        numbers = self.monitor.log(state.global_step)
        if numbers is not None:
            named = {f"curvature/{name}": number for name, number in numbers.items()}
            state.log_history.append(named | {"epoch": state.epoch, "step": state.global_step})
