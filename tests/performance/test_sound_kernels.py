"""medconv/performance/sound_kernels.py: against wider types, where PyTorch's own kernels are wrong."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medconv.convs.autograd import convolution
from medconv.convs.parametrization import CHANNELS_LAST
from medconv.performance.sound_kernels import use_sound_kernels

Convolve = Callable[..., Tensor]
# Function, spatial size, kernel, stride. But for the last three, wrong without these convolutions.
BF16 = {
    "two voxels deep": (F.conv3d, (2, 4, 4), 3, 1),
    "two voxels deep, our own backward": (convolution, (2, 4, 4), 3, 1),
    "wide kernel": (F.conv3d, (4, 4, 4), 5, 1),
    "strided to one voxel": (F.conv3d, (4, 4, 2), 3, 2),
    "strided to one pixel": (F.conv2d, (7, 2), 3, 2),
    "transposed": (F.conv_transpose3d, (2, 4, 4), 3, 1),
    "transposed from one pixel": (F.conv_transpose2d, (3, 1), 3, 2),
    "sound in 3D": (F.conv3d, (6, 4, 4), 3, 1),
    "sound in 2D": (F.conv2d, (8, 8), 3, 2),
    "one voxel": (F.conv3d, (1, 1, 1), 3, 1),
}


@pytest.fixture(autouse=True)
def sound():
    use_sound_kernels()


@pytest.mark.parametrize("name", BF16)
def test_bf16_gives_what_fp32_does(name):
    wanted = _pass(torch.float32, *BF16[name])
    for result, right in zip(_pass(torch.bfloat16, *BF16[name]), wanted, strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.float() - right).norm() < 0.01 * right.norm()


def test_strided_kernels_of_seven_voxels_give_in_fp32_what_they_do_in_fp64():
    case = (F.conv3d, (6, 4, 4), 7, 2)
    for result, right in zip(_pass(torch.float32, *case), _pass(torch.float64, *case), strict=True):
        assert result.dtype == torch.float32
        assert (result.double() - right).norm() < 1e-5 * right.norm()


@pytest.mark.parametrize("channels", [1, 12])
def test_a_flat_volume_gives_in_bf16_what_it_does_in_fp32(channels):
    torch.manual_seed(0)
    image, weight = torch.randn(1, channels, 1, 16, 16), torch.randn(8, channels, 3, 3, 3)
    right = F.conv3d(image, weight, padding=1)
    _leave_nan_in_freed_memory()
    result = F.conv3d(image.bfloat16(), weight.bfloat16(), padding=1)
    assert (result.float() - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize(
    ("convolve", "image", "weight", "settings"),
    [
        (F.conv3d, (1, 4, 2, 4, 5), (8, 4, 2, 3, 2), {"dilation": (3, 1, 3), "padding": (2, 1, 1)}),
        (F.conv_transpose3d, (2, 3, 1, 5, 9), (3, 1, 2, 3, 5), {"dilation": 2}),
        (F.conv_transpose3d, (2, 4, 3, 4, 5), (4, 3, 1, 7, 5), {"stride": (3, 1, 1)}),
    ],
)
def test_convolutions_that_end_python_in_bf16_give_what_they_do_in_fp32(convolve, image, weight, settings):
    torch.manual_seed(0)
    values = torch.randn(image), torch.randn(weight)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x, kernel = (value.to(dtype).requires_grad_() for value in values)
        output = convolve(x, kernel, **settings)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), (x, kernel))])
    for right, result in zip(*results, strict=True):
        assert (result.float() - right).norm() < 0.02 * right.norm()


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler"
)
def test_compiled_networks_get_gradients_in_the_layout_that_they_expect():
    """Of a strided 1x1 convolution of few channels, and of a transposed one to a single channel."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.Conv3d(4, 48, 1, stride=2),
        nn.ConvTranspose3d(48, 1, (3, 1, 3), stride=(2, 1, 2), padding=(1, 0, 1), output_padding=(1, 0, 1)),
    ).to(memory_format=torch.channels_last_3d)
    image = torch.randn(2, 1, 12, 10, 2).contiguous(memory_format=torch.channels_last_3d)
    parameters = list(network.parameters())
    compiled = torch.autograd.grad(torch.compile(network)(image).square().sum(), parameters)
    eager = torch.autograd.grad(network(image).square().sum(), parameters)
    for grad, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)
    torch.compiler.reset()


def test_a_transposed_convolution_to_one_channel_has_its_gradient_in_channels_last():
    torch.manual_seed(0)
    settings = {"stride": (2, 1, 2), "padding": (1, 0, 1), "output_padding": (1, 0, 1)}
    values = [torch.randn(2, 48, 6, 5, 1), torch.randn(48, 1, 3, 1, 3)]
    grads = []
    for dtype in (torch.float64, torch.float32):
        image, weight = (
            value.to(dtype).to(memory_format=torch.channels_last_3d).requires_grad_() for value in values
        )
        output = F.conv_transpose3d(image, weight, **settings)
        _leave_nan_in_freed_memory()
        grads.append(torch.autograd.grad(output.square().sum(), (image, weight)))
    for right, result in zip(*grads, strict=True):
        assert (result.double() - right).norm() < 1e-5 * right.norm()


def _leave_nan_in_freed_memory():
    for size in (16, 64, 200, 512, 1000, 4096, 2**15):
        torch.full((size,), float("nan"))


def _pass(dtype, convolve, size, kernel, stride):
    """The output and the gradients of input, weight and bias; memory freed before is full of NaN."""
    torch.manual_seed(0)
    values = [torch.randn(2, 32, *size), 0.1 * torch.randn(32, 32, *[kernel] * len(size)), torch.randn(32)]
    x, weight, bias = (value.to(dtype).requires_grad_() for value in values)
    output = convolve(x, weight, bias, stride, kernel // 2)
    grad = torch.randn(output.shape).to(dtype)
    freed = [torch.full((2 * weight.numel(),), float("nan")) for _ in range(4)]
    del freed
    return [output, *torch.autograd.grad(output, (x, weight, bias), grad)]


def test_the_networks_of_a_run_have_them_and_leave_the_heap_as_it_is():
    """In a process of its own, since this one has them already; glibc's check of the heap would end it. On AVX2,
    torch's kernel for strided kernels of one voxel fails it.
    """
    code = (
        "import torch; from medconv.models.unet import UNet; from medconv.performance import switches\n"
        "def own(): return torch._C._dispatch_has_kernel_for_dispatch_key('aten::convolution_backward', 'CPU')\n"
        "before = own(); switches.apply_switches(UNet(2, 1, 2, (4, 8), (2,)), channels_last=False)\n"
        "print(before, own())\n"
        "layer = torch.nn.Conv2d(6, 12, 1, stride=2).to(memory_format=torch.channels_last)\n"
        "for _ in range(3):\n"
        "    x = torch.randn(4, 6, 16, 16).to(memory_format=torch.channels_last)\n"
        "    layer(x).sum().backward()"
    )
    checked = os.environ | {"MALLOC_CHECK_": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=checked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]


def test_a_gradient_that_nobody_needs_stays_none():
    x = torch.randn(2, 32, 2, 4, 4, dtype=torch.bfloat16)
    layer = nn.Conv3d(32, 32, 3, padding=1, bias=False, dtype=torch.bfloat16)
    layer(x).sum().backward()
    assert layer.weight.grad is not None and x.grad is None


@pytest.mark.parametrize("mean", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("groups", [1, 8, 32])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10), (torch.bfloat16, 2e-2)]
)
def test_group_norm_in_channels_last_gives_what_fp64_does(mean, groups, dtype, tolerance):
    torch.manual_seed(0)
    for size, layout in (((6, 7, 8), torch.channels_last_3d), ((9, 8), torch.channels_last)):
        image = (torch.randn(2, 32, *size) + mean).to(dtype)
        norm, wide = nn.GroupNorm(groups, 32), nn.GroupNorm(groups, 32).double()
        nn.init.normal_(norm.weight)
        wide.load_state_dict(norm.state_dict())
        x, x64 = image.contiguous(memory_format=layout).requires_grad_(), image.double().requires_grad_()
        norm = norm.double() if dtype == torch.float64 else norm
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = norm(x)
        grad = torch.randn(output.shape).to(output.dtype)
        output.backward(grad)
        wide(x64).backward(grad.double())
        assert output.is_contiguous(memory_format=layout) and output.dtype == dtype
        close(output, wide(x64), tolerance)
        close(x.grad, x64.grad, tolerance)
        close(norm.bias.grad, wide.bias.grad, tolerance)
        close(norm.weight.grad, wide.weight.grad, max(tolerance, 1e-3 if dtype == torch.float32 else 0))


@pytest.mark.parametrize("norm", [F.instance_norm, F.batch_norm])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("size", [(6, 5), (6, 1), (6, 5, 3)])
def test_norms_have_their_gradient_whatever_the_layout_of_image_and_gradient(norm, samples, size):
    torch.manual_seed(0)
    layouts = (torch.contiguous_format, CHANNELS_LAST[2 + len(size)])
    values, grad_values = torch.randn(2, samples, 4, *size).double()
    for image_layout, grad_layout in product(layouts, layouts):
        x64 = values.clone().requires_grad_()
        x = values.float().contiguous(memory_format=image_layout).requires_grad_()
        if norm is F.batch_norm:
            output, wide = norm(x, None, None, training=True), norm(x64, None, None, training=True)
        else:
            output, wide = norm(x), norm(x64)
        (grad,) = torch.autograd.grad(output, x, grad_values.float().contiguous(memory_format=grad_layout))
        close(grad, torch.autograd.grad(wide, x64, grad_values)[0], 1e-4)


def close(found, right, tolerance):
    assert (found.double() - right).abs().max() <= tolerance * right.abs().max()


def test_padding_does_not_bias_the_statistics_of_a_group_norm():
    image = torch.full((1, 8, 32, 32, 32), 0.123)
    image[..., :6, :6, :6] += torch.randn(6, 6, 6)
    norm = nn.GroupNorm(8, 8)
    close(
        norm(image.contiguous(memory_format=torch.channels_last_3d)),
        deepcopy(norm).double()(image.double()),
        1e-5,
    )


def test_group_norms_of_contiguous_and_empty_tensors_are_as_before():
    norm, x = nn.GroupNorm(4, 8), torch.randn(2, 8, 3, 4, 5)
    torch.testing.assert_close(norm(x.contiguous(memory_format=torch.channels_last_3d)), norm(x))
    assert norm(x[:0]).shape == (0, 8, 3, 4, 5)
