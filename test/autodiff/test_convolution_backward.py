"""Convolutions with a double backward of their own, against PyTorch's."""

import pytest
import torch

from curvlinops.autodiff.overrides.convolution import CONVOLUTIONS

CASES = {
    "plain": (torch.conv2d, (2, 4, 5, 5), (3, 4, 3, 3), {}),
    "strided": (torch.conv2d, (2, 4, 6, 5), (3, 4, 3, 2), {"stride": (2, 1), "padding": 1}),
    "dilated": (torch.conv2d, (2, 2, 7, 7), (3, 2, 3, 3), {"dilation": 2}),
    "grouped": (torch.conv2d, (2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2, "padding": (1, 0)}),
    "depthwise": (torch.conv2d, (2, 4, 5, 5), (4, 1, 3, 3), {"groups": 4}),
    "same": (torch.conv2d, (2, 2, 5, 5), (3, 2, 2, 2), {"padding": "same"}),
    "unbatched": (torch.conv2d, (2, 5, 5), (3, 2, 3, 3), {}),
    "1d": (torch.conv1d, (2, 2, 7), (3, 2, 3), {"stride": 2}),
    "3d": (torch.conv3d, (2, 2, 3, 4, 4), (3, 2, 2, 2, 2), {"padding": 1}),
    "transposed 1d": (torch.conv_transpose1d, (2, 2, 4), (2, 3, 3), {"stride": 2}),
    "transposed 2d": (
        torch.conv_transpose2d,
        (2, 4, 3, 3),
        (4, 3, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2, "dilation": 2},
    ),
    "transposed 3d": (torch.conv_transpose3d, (1, 2, 2, 2, 2), (2, 1, 2, 2, 2), {}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # PyTorch pads even kernels by a copy
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_pytorchs(name: str, bias: bool):
    function, x_shape, w_shape, options = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [draw(x_shape), draw(w_shape)]
    out = function(*inputs, **options)
    if bias:
        inputs.append(
            draw((out.shape[-out.ndim + 1 if out.ndim < len(w_shape) else 1],))
            if out.ndim == len(w_shape)
            else draw((out.shape[0],))
        )
    results = []
    u = torch.randn(out.shape, generator=generator, dtype=torch.float64).requires_grad_()
    v = [draw(tuple(x.shape)) for x in inputs]
    for call in (function, CONVOLUTIONS[function]):
        out = call(*inputs, **options)
        first = torch.autograd.grad(out.sin(), inputs, u, create_graph=True)
        second = torch.autograd.grad(first, [*inputs, u], v, create_graph=True)
        third = ()
        if "output_padding" not in options:  # PyTorch has no third derivative of it
            total = sum(t.cos().sum() for t in second)
            third = torch.autograd.grad(total, inputs, retain_graph=True)
        stacked = [torch.stack([x, 2 * x]) for x in v]
        batched = torch.autograd.grad(first, [*inputs, u], stacked, is_grads_batched=True)
        torch.testing.assert_close([b[1] / 2 for b in batched], list(second))
        results.append([out, *first, *second, *third])
    torch.testing.assert_close(results[1], results[0])
