"""Recurrent layers over sequences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def _without_fused_kernels() -> Iterator[None]:
    cudnn, onednn = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
    torch.backends.cudnn.enabled = torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled = cudnn, onednn


def _override(function: Callable) -> Callable:
    """Return a layer without the kernels of oneDNN and cuDNN.

    Those of oneDNN have no forward mode; those of cuDNN have neither that nor a double backward,
    and a backward pass in train mode only.
    """

    def layer(*args: Any) -> tuple:
        with _without_fused_kernels():
            return function(*args)

    return layer


RECURRENT: dict[Callable, Callable] = {
    function: _override(function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
