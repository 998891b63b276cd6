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
