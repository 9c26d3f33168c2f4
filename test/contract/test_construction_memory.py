"""Construction needs the memory of one gradient of one batch, however many batches there are."""

import pytest
import torch
from contract import ALL
from live_bytes import LiveBytes
from test_memory import deep
from torch import Tensor, nn


@pytest.mark.parametrize("case", ALL)
def test_peak_of_construction(case: str):
    loss = nn.MSELoss()

    def build(model: nn.Module, X: Tensor, y: Tensor) -> None:
        losses = (loss,) if ALL[case].takes_loss else ()
        ALL[case].operator(model, *losses, list(model.parameters()), [(X, y)] * 3)

    build(*deep(10))  # a process keeps some tables
    model, X, y = deep(1000)
    gradient, _ = LiveBytes().peaks(
        lambda: torch.autograd.grad(loss(model(X), y), list(model.parameters()))
    )
    live = LiveBytes()
    assert max(live.peaks(lambda: build(model, X, y))) <= 1.3 * gradient
    assert live.now <= 1000
