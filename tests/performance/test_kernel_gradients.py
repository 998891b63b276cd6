"""medconv/performance/kernel_gradients.py: against torch's own in fp32, also on CPUs without AMX."""

import pytest
import torch
from torch.nn import functional as F

from medconv.convs.parametrization import CHANNELS_LAST
from medconv.performance import kernel_gradients
from medconv.performance.sound_kernels import use_sound_kernels

# Shapes of image and kernel, padding and dilation, for each way
CASES = {
    "_by_matrices": [
        ((2, 64, 8, 8), (64, 64, 3, 3), 1, 1),
        ((1, 72, 4, 5, 3), (64, 72, 3, 3, 3), 1, 1),
        ((2, 64, 9, 8, 6), (80, 64, 3, 1, 2), (2, 0, 1), (2, 1, 3)),
    ],
    "_by_pictures": [
        ((2, 5, 12, 10, 7), (6, 5, 3, 3, 1), (1, 1, 0), 1),
        ((1, 4, 12, 10, 5), (8, 4, 3, 2, 1), (2, 1, 0), (2, 1, 1)),
        ((2, 64, 20, 18, 3), (64, 64, 1, 1, 1), 0, 1),
    ],
    "_along_longest_axis": [
        ((2, 5, 12, 16, 7), (6, 5, 3, 3, 3), 1, 1),
        ((1, 4, 18, 9, 5), (8, 4, 3, 1, 2), (2, 0, 1), (2, 1, 3)),
    ],
    None: [
        ((2, 5, 12, 10, 9), (6, 5, 3, 3, 3), 1, 1),  # copies are not worth it
        ((2, 4, 32, 32, 16), (4, 4, 3, 3, 3), 1, 1),
        ((2, 64, 32, 32), (64, 64, 3, 3), 1, 1),
        ((2, 64, 4, 4, 4), (64, 64, 5, 5, 5), 2, 1),
    ],
}


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    use_sound_kernels()
    monkeypatch.setattr(kernel_gradients, "_HAS_TILES", True)


@pytest.mark.parametrize(("way", "case"), [(way, case) for way, cases in CASES.items() for case in cases])
def test_gradients_are_those_of_torch(way, case, monkeypatch):
    taken = []
    for name in filter(None, CASES):
        own = getattr(kernel_gradients, name)
        monkeypatch.setattr(
            kernel_gradients, name, lambda *args, own=own, name=name: taken.append(name) or own(*args)
        )
    own_grads = _gradients(torch.bfloat16, *case)
    assert taken == ([way] if way else [])
    for grad, expected in zip(own_grads, _gradients(torch.float32, *case), strict=True):
        assert (grad.float() - expected).norm() < 0.01 * expected.norm()
    monkeypatch.setattr(kernel_gradients, "_HAS_TILES", False)
    for grad, expected in zip(own_grads, _gradients(torch.bfloat16, *case), strict=True):
        assert grad.dtype == expected.dtype
        assert _layout(grad) == _layout(expected)  # on which compiled code relies


def test_other_convolutions_are_left_to_torch(monkeypatch):
    for name in filter(None, CASES):
        monkeypatch.delattr(kernel_gradients, name)
    _gradients(torch.float32, *CASES["_by_pictures"][0])
    image, kernel, padding, dilation = CASES["_by_matrices"][0]
    layer = torch.randn(image), torch.randn(kernel, requires_grad=True)
    x, weight = (each.bfloat16() for each in layer)
    for convolve, kind in (
        (F.conv2d, {"stride": 2}),
        (F.conv_transpose2d, {}),
        (F.conv2d, {}),  # not in channels-last
    ):
        convolve(x, weight, padding=padding, dilation=dilation, **kind).sum().backward()
    grouped = weight[:, :1].contiguous(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    F.conv2d(x, grouped, padding=padding, groups=64).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_slice", [False, True])
@pytest.mark.parametrize("size", [(8, 6), (8, 6, 5)])
def test_a_bias_of_a_transposed_convolution_is_a_sum(size, is_slice, dtype):
    asked = []

    def library(*arguments):
        asked.append(arguments[-1])
        return torch.ops.aten.convolution_backward(*arguments)

    layout = CHANNELS_LAST[2 + len(size)]
    twos, ones, zeros = [2] * len(size), [1] * len(size), [0] * len(size)
    grad = torch.randn(3, 6, *(2 * n for n in size))
    layer = [grad, torch.randn(3, 4, *size), torch.randn(4, 6, *twos)]
    layer = [each.to(dtype, memory_format=layout) for each in layer]
    if is_slice:  # of the gradient of what a skip connection was joined to
        layer[0] = torch.cat([layer[0], layer[0]], 1)[:, 6:]
    settings = [[6], twos, zeros, ones, True, zeros, 1]
    own = kernel_gradients.convolution_backward(library, *layer, *settings, [True, True, True])
    assert asked == [[True, True, False]]
    expected = torch.ops.aten.convolution_backward(
        *(each.double() for each in layer), *settings, [True, True, True]
    )
    for each, right in zip(own, expected, strict=True):
        assert each.dtype == dtype
        assert (each - right).norm() < (0.01 if dtype == torch.bfloat16 else 1e-5) * right.norm()
    contiguous = [each.contiguous() for each in layer]
    kernel_gradients.convolution_backward(library, *contiguous, *settings, [True, True, True])
    assert asked[1:] == [[True, True, True]]  # there the library is as fast


def _gradients(dtype, image, kernel, padding, dilation):
    """Of image, weight and bias."""
    torch.manual_seed(0)
    layout = CHANNELS_LAST[len(image)]
    values = [torch.randn(image).to(memory_format=layout), torch.randn(kernel).to(memory_format=layout)]
    values.append(torch.randn(kernel[0]))
    values = [value.to(dtype).requires_grad_() for value in values]
    convolve = F.conv2d if len(image) == 4 else F.conv3d
    output = convolve(*values, padding=padding, dilation=dilation)
    return torch.autograd.grad(output.square().sum(), values)


def _layout(tensor):
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
