"""The Trainer's callback measures the model's matrix, and leaves the run as it is."""

import csv
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from problems import Problem
from tables import core
from torch import Tensor, nn
from training_runs import flags

from curvlinops import GGNLinearOperator, HessianLinearOperator
from curvlinops.integrations.transformers import problem

transformers = pytest.importorskip("transformers")
# some versions still call it at their import
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


def language_model() -> nn.Module:
    """Return a tiny model with dropout, in train mode, but for its last norm."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=4, n_layer=1, n_head=1, n_positions=8, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).double().train()
    model.transformer.ln_f.eval()
    return model


def batches(*sizes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(11, (n, 6), generator=generator) for n in sizes]
    return [{"input_ids": x, "labels": x} for x in ids]


def train(callback: Any, first: bool = True) -> tuple[list, Any]:
    """Train as the Trainer does: three steps, each with its events; return what is left."""
    from transformers.trainer_callback import (
        CallbackHandler,
        DefaultFlowCallback,
        TrainerControl,
        TrainerState,
    )

    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callbacks = [DefaultFlowCallback, *([callback] if callback else [])]
    handler = CallbackHandler(callbacks, model, None, optimizer, None)
    args = transformers.TrainingArguments.__new__(transformers.TrainingArguments)
    args.logging_first_step, args.logging_steps = False, 0
    for name in ("logging", "eval", "save"):
        setattr(args, f"{name}_strategy", transformers.trainer_utils.IntervalStrategy.NO)
    state, control = TrainerState(is_world_process_zero=first), TrainerControl()
    handler.on_train_begin(args, state, control)
    for batch in batches(2, 2, 2):
        handler.on_step_begin(args, state, control)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        state.epoch = state.global_step / 3
        handler.on_step_end(args, state, control)
    handler.on_train_end(args, state, control)
    left = [x.tolist() for x in model.state_dict().values()]
    return [left, flags(model), torch.get_rng_state().tolist()], state


@pytest.mark.parametrize("kind", core([GGNLinearOperator], [HessianLinearOperator]))
def test_the_model_is_measured_and_left_as_it_is(kind: type, tmp_path: Path):
    from curvlinops.integrations.trainer import CurvatureCallback

    path, data = tmp_path / "curvature.csv", batches(3, 2)
    callback = CurvatureCallback(data, path, operator=kind, every=2, num_matvecs=0, tol=1e-9)
    left, state = train(callback)
    assert left == train(None)[0]

    with path.open(newline="") as file:
        rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    assert [(row.pop("run"), row["step"]) for row in rows] == [(1, 0), (1, 2)]
    history = [
        {name.removeprefix("curvature/"): x for name, x in entry.items()}
        for entry in state.log_history
    ]
    # older versions of transformers have no epoch before the first step
    assert [entry.pop("epoch") or 0 for entry in history] == [0, 2 / 3]
    assert history == rows

    model, loss, params, pairs = problem(language_model().eval(), data)
    p = Problem(model, loss, params, list(pairs), mc=True)
    dense = reference.hessian(p) if kind is HessianLinearOperator else reference.ggn(p)
    assert rows[0]["loss"] == pytest.approx(reference.loss_value(p), rel=1e-9)
    largest = float(torch.linalg.eigvalsh(dense)[-1])
    assert rows[0]["sharpness"] == pytest.approx(largest, rel=1e-8)


def test_the_first_process_writes(tmp_path: Path):
    from curvlinops.integrations.trainer import CurvatureCallback

    path = tmp_path / "curvature.csv"
    callback = CurvatureCallback(batches(2), path, num_matvecs=0)
    _, state = train(callback, first=False)
    assert not path.exists() and len(state.log_history) == 1
