"""KFAC on random small nets, against the dense reference."""

from typing import Any

import kfac_reference
import pytest
import torch
from contract import error, matrix
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import Problem
from torch import Tensor, nn

from curvlinops import EKFACLinearOperator, KFACLinearOperator


class Flat(nn.Module):
    """A net that ends with one vector per sample, or per position."""

    def __init__(self, net: nn.Module, pooled: bool):
        super().__init__()
        self.net, self._pooled = net, pooled

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x).movedim(1, -1)  # [N, *, C]
        return out.flatten(1, -2).mean(1) if self._pooled else out


@st.composite
def convolution(draw: Any, dims: int, inputs: int) -> nn.Module:
    """A convolution of small images."""
    groups = draw(st.sampled_from([g for g in (1, 2) if inputs % g == 0]))
    outputs = groups * draw(st.integers(1, 2))
    bias, kernel = draw(st.booleans()), draw(st.integers(1, 3))
    stride, padding = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    if draw(st.booleans()):
        kind = getattr(nn, f"ConvTranspose{dims}d")
        extra = draw(st.integers(0, stride - 1))
        return kind(inputs, outputs, kernel + 1, stride, padding, extra, groups, bias)
    mode = draw(st.sampled_from(["zeros", "circular", "replicate"]))
    kind = getattr(nn, f"Conv{dims}d")
    return kind(inputs, outputs, kernel, stride, padding, 1, groups, bias, mode)


@st.composite
def problem(draw: Any) -> Problem:
    """Two convolutions with a nonlinearity, and perhaps a pooled output."""
    torch.manual_seed(draw(st.integers(0, 100)))
    dims, channels = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    layers = []
    for _ in range(draw(st.integers(1, 2))):
        layer = draw(convolution(dims, channels))
        channels = layer.out_channels
        layers += [layer, draw(st.sampled_from([nn.Tanh, nn.ReLU]))()]
    model = Flat(nn.Sequential(*layers[:-1]), draw(st.booleans())).double()
    length = {1: (5,), 2: (4, 5)}[dims]
    first = layers[0].in_channels
    X = [torch.randn(n, first, *length).double() for n in draw(st.sampled_from([(3,), (1, 2)]))]
    try:
        data = [(x, torch.randn_like(model(x))) for x in X]
    except RuntimeError as error:
        # the image has become too small
        small = "Kernel size can't be greater", "Output size is too small"
        assume(not any(text in str(error) for text in small))
        raise
    reduction = draw(st.sampled_from(["mean", "sum"]))
    params = list(model.parameters())
    return Problem(model, nn.MSELoss(reduction=reduction), params, data, mc=True)


def check(p: Problem, reduce: bool, joint: bool, fisher: str) -> None:
    if p.data[0][1][0].numel() > 20:  # as many backward passes, and the reference takes many more
        fisher = "empirical"
    expected = kfac_reference.kfac(p, fisher, reduce=reduce, joint=joint)
    options = {
        "fisher_type": fisher,
        "exact": fisher == "type-2",
        "kfac_approx": "reduce" if reduce else "expand",
        "separate_weight_and_bias": not joint,
        "check_deterministic": False,
    }
    arguments = (p.model, p.loss, p.params, p.data)
    found = KFACLinearOperator(*arguments, **options)
    assert error(matrix(found), expected) <= 1e-9
    # all eigenbases have the trace of the exact block
    trace = kfac_reference.kfac(p, fisher, corrected=True).trace()
    assert error(EKFACLinearOperator(*arguments, **options).trace(), trace) <= 1e-9


ARGUMENTS = {
    "p": problem(),
    "reduce": st.booleans(),
    "joint": st.booleans(),
    "fisher": st.sampled_from(["empirical", "type-2"]),
}


@settings(max_examples=10, deadline=None, derandomize=True)
@given(**ARGUMENTS)
def test_some_convolutional_nets(p: Problem, reduce: bool, joint: bool, fisher: str):
    check(p, reduce, joint, fisher)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(**ARGUMENTS)
def test_many_convolutional_nets(p: Problem, reduce: bool, joint: bool, fisher: str):
    check(p, reduce, joint, fisher)
