"""scripts/gpu_checks/wide.py: equal to the plain convolution, forward and backward, in the same memory."""

import pytest
import torch
import torch.nn.functional as F

from gpu_checks.wide import wide_conv3d

LAST = torch.channels_last_3d


@pytest.mark.parametrize("width", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_plain_convolution(width):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 6, 8, dtype=torch.float64).to(memory_format=LAST)
    weight = torch.randn(4, 3, 3, 3, 3, dtype=torch.float64)
    grad = torch.randn(2, 4, 5, 6, 8, dtype=torch.float64)
    outputs = []
    for conv in (lambda a, b: F.conv3d(a, b, padding=1), lambda a, b: wide_conv3d(a, b, width)):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = conv(*leaves)
        outputs.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    assert outputs[1][0].is_contiguous(memory_format=LAST)
