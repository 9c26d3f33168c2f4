"""Patches of convolutions, their averages and second moments, against index patterns of einconv."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from einconv.conv_index_pattern import index_pattern
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from curvlinops.kfac_utils import extract_averaged_patches, extract_patches
from curvlinops.layers.covariance import (
    covariance_by_patches,
    covariance_by_shifts,
    input_covariance,
)
from curvlinops.layers.inputs import Patches
from curvlinops.layers.patches import Window, make_patches, patch_sums

#: of the kernel, the output and the input, as in an index pattern
LETTERS = ("aix", "bjy", "ckz")
FORMATS = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "samples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


def reference(x, kernel, stride, pads, dilation, groups):
    """Return ``[N, prod(O), G, C/G * prod(K)]`` from the index pattern of each axis."""
    x = F.pad(x, [p for pair in reversed(pads) for p in pair])
    patterns = [
        index_pattern(length, k, s, 0, d).to(x)
        for length, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    axes = LETTERS[: len(kernel)]
    kernels, outputs, inputs = ("".join(letters) for letters in zip(*axes, strict=True))
    terms = ",".join(k + o + i for k, o, i in axes)
    equation = f"ngd{inputs},{terms}->n{outputs}gd{kernels}"
    patches = torch.einsum(equation, x.unflatten(1, (groups, -1)), *patterns)
    return patches.flatten(1 + len(axes) + 1).flatten(1, len(axes))


def moments(patches):
    return torch.einsum("nogi,nogj->gij", patches, patches)


@st.composite
def problems(draw, max_stride=3):
    """Draw an input and the hyperparameters of a convolution that fits it."""
    dims = draw(st.integers(1, 3))
    axis = st.tuples(
        st.integers(1, 4 if dims < 3 else 2),  # kernel
        st.integers(1, max_stride),  # stride
        st.tuples(st.integers(-1, 3), st.integers(-2, 3)),  # padding
        st.integers(1, 3 if dims < 3 else 2),  # dilation
        st.integers(0, 8 if dims < 3 else 3),  # length beyond the first patch
    )
    kernel, stride, pads, dilation, more = zip(*(draw(axis) for _ in range(dims)), strict=True)
    shape = [
        max(d * (k - 1) + 1 + extra - sum(p), 1 + max(0, -p[0]) + max(0, -p[1]))
        for k, p, d, extra in zip(kernel, pads, dilation, more, strict=True)
    ]
    groups, width, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(n, groups * width, *shape, generator=generator, dtype=torch.float64)
    form = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    return form(x), kernel, stride, pads, dilation, groups


def close(actual, expected, tol=1e-12):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    scale = expected.abs().max() if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=float(tol * scale))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems())
def test_patches(problem):
    x, patches = problem[0], reference(*problem)
    window = Window.of(*problem)
    means = {extract_patches: patches.mean(2), extract_averaged_patches: patches.mean((1, 2))}
    for function, expected in means.items():
        if min(map(min, problem[3])) < 0:
            with pytest.raises(ValueError, match="padding must be at least 0"):
                function(*problem)
        else:
            close(function(*problem), expected)
    close(make_patches(x, window), patches)
    close(patch_sums(x, window), patches.sum(1))
    images = Patches(x.unsqueeze(1), window)
    assert images.shape == patches.shape
    close(images[:2], patches[:2])


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # PyTorch pads even kernels by a copy
@pytest.mark.parametrize("kernel", [(3,), (4, 3), (2, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name_is_pytorchs(kernel, padding):
    x = torch.randn(2, 3, *[9] * len(kernel), dtype=torch.float64)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64)
    convolution = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    out = convolution(x, weight, padding=padding, dilation=2)
    patches = extract_patches(x, kernel, 1, padding, 2, 1)
    close(patches @ weight.flatten(1).T, out.flatten(2).transpose(1, 2))
    close(extract_averaged_patches(x, kernel, 1, padding, 2, 1), patches.mean(1))


@pytest.mark.parametrize("function", [extract_patches, extract_averaged_patches])
def test_large_images(function):
    # one product for each axis, where small images need one in all
    x = torch.randn(2, 4, 20, 21, dtype=torch.float64)
    for form, groups in product(FORMATS.values(), (1, 2, 4)):
        expected = reference(x, (3, 2), (2, 1), [(1, 1), (2, 2)], (1, 2), groups).mean(2)
        expected = expected if function is extract_patches else expected.mean(1)
        close(function(form(x), (3, 2), (2, 1), (1, 2), (1, 2), groups), expected)


@pytest.mark.parametrize("function", [extract_patches, extract_averaged_patches])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(function, dtype):
    x = torch.randn(2, 64, 30, 30).to(dtype)
    result = function(x, 3, 1, 1, 1, 64)
    close(result, function(x.double(), 3, 1, 1, 1, 64).float(), 1e-5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems(), st.sampled_from([1, 7, 10**6]))
def test_moments(problem, positions):
    patches, window = reference(*problem), Window.of(*problem)
    close(input_covariance(problem[0], window), moments(patches))
    close(covariance_by_patches(problem[0], window, positions), moments(patches))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems(max_stride=1), st.sampled_from([1, 7, 10**6]))
def test_moments_by_shifts(problem, positions):
    window = Window.of(*problem)
    assume(window.size[0] >= window.reach(0, 1) - 1)
    close(covariance_by_shifts(problem[0], window, positions), moments(reference(*problem)))


@pytest.mark.parametrize("shape", [(16, 16, 20, 20), (2, 16, 9, 9)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_covariances_in_other_precisions(shape, groups):
    x = torch.randn(shape, dtype=torch.float64)
    window = Window.of(x, 3, 1, 1, 1, groups)
    covariance = input_covariance(x, window)
    close(covariance, moments(make_patches(x, window)))
    torch.testing.assert_close(covariance, covariance.mT, rtol=0, atol=0)
    close(input_covariance(x.float(), window), covariance.float(), 1e-5)
    close(input_covariance(x.half(), window), covariance.float(), 1e-2)


def test_nothing_cancels():
    # what no patch sees through a corner of the kernel is not subtracted again
    x = torch.randn(2, 16, 20, 20)
    x[:, :, -1] = 1e8
    window = Window.of(x, 3, 1, 0, 1, 1)
    expected = moments(make_patches(x.double(), window))[:, ::9, ::9].float()
    close(covariance_by_shifts(x, window, 10**6)[:, ::9, ::9], expected, 1e-6)


ERRORS = {
    "kernel too large": (
        ((1, 2, 3, 3), 5, 1, 0, 1, 1),
        "one spans 5 positions, and there are 3",
    ),
    "no positions": (((1, 2, 3, 0), 1, 1, 0, 1, 1), "axis 1"),
    "groups": (((1, 3, 4, 4), 2, 1, 0, 1, 2), "do not fall into 2 equal groups"),
    "no channels": (((1, 0, 4, 4), 2, 1, 0, 1, 1), "do not fall into 1 equal groups"),
    "stride": (((1, 2, 4, 4), 2, 0, 0, 1, 1), "stride must be at least 1"),
    "dilation": (((1, 2, 4, 4), 2, 1, 0, (1, 0), 1), "dilation must be at least 1"),
    "axes": (((1, 2, 4, 4), (2, 2, 2), 1, 0, 1, 1), "one for each axis"),
    "padding": (((1, 2, 4, 4), 2, 1, "full", 1, 1), "Unknown padding 'full'"),
    "crop": (((1, 2, 6, 6), 3, 1, -1, 1, 1), "padding must be at least 0, got -1"),
    "crop one side": (((1, 2, 6, 6), 3, 1, [(0, 1), (2, -1)], 1, 1), "padding must be at least 0"),
    "same and stride": (((1, 2, 4, 4), 2, 2, "same", 1, 1), "needs stride 1"),
    "no batch": (((3, 4), 2, 1, 0, 1, 1), r"Expected an input \[N, C, \*I\]"),
}


@pytest.mark.parametrize("function", [extract_patches, extract_averaged_patches])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(function, name):
    (shape, *arguments), message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(shape), *arguments)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="floating-point"):
        extract_patches(torch.zeros(1, 1, 4, dtype=torch.int64), 2, 1, 0, 1, 1)
