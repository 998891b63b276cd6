"""medconv/performance/sound_group_norm.py: against fp64, where the mean is much larger than the deviation."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from medconv.performance.sound_group_norm import use_sound_group_norm


@pytest.fixture(autouse=True)
def sound() -> None:
    use_sound_group_norm()


@pytest.mark.parametrize("mean", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("groups", [1, 8, 32])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10), (torch.bfloat16, 2e-2)]
)
def test_channels_last_gives_what_fp64_does(
    mean: float, groups: int, dtype: torch.dtype, tolerance: float
) -> None:
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


def close(found: Tensor, right: Tensor, tolerance: float) -> None:
    assert (found.double() - right).abs().max() <= tolerance * right.abs().max()


def test_padding_does_not_bias_the_statistics() -> None:
    image = torch.full((1, 8, 32, 32, 32), 0.123)
    image[..., :6, :6, :6] += torch.randn(6, 6, 6)
    norm = nn.GroupNorm(8, 8)
    close(
        norm(image.contiguous(memory_format=torch.channels_last_3d)),
        deepcopy(norm).double()(image.double()),
        1e-5,
    )


def test_contiguous_and_empty_tensors_are_as_before() -> None:
    norm, x = nn.GroupNorm(4, 8), torch.randn(2, 8, 3, 4, 5)
    torch.testing.assert_close(norm(x.contiguous(memory_format=torch.channels_last_3d)), norm(x))
    assert norm(x[:0]).shape == (0, 8, 3, 4, 5)
