"""medconv/convs/masked.py: masks, and parts of a wider weight, which gets their exact gradient."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from medconv.convs import fold_convs, masked


@pytest.mark.parametrize(
    "mask",
    [torch.rand(3, 3), torch.randint(0, 2, (3, 3, 3)), torch.rand(4, 1, 3, 3), torch.rand(4, 3, 3, 3)],
    ids=["of the kernel", "of inputs and kernel", "of outputs", "full"],
)
def test_the_weight_is_the_mask_times_the_parameter(mask):
    conv = masked(nn.Conv2d(3, 4, 3), mask=mask)
    parameter = conv.parametrizations.weight.original.detach()
    torch.testing.assert_close(conv.weight.detach(), parameter * mask)


@pytest.mark.parametrize("mask", ["cross", [[1, 0, 1], [0, 1, 0], [1, 0, 1]]])
def test_taps_that_a_mask_of_0_and_1_leaves_out_are_not_stored(mask):
    conv = masked(nn.Conv2d(3, 4, 3), mask=mask)
    values = torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 0]] if mask == "cross" else mask)
    parameter = conv.parametrizations.weight.original
    assert parameter.shape == (4, int(values.sum()), 3)
    torch.testing.assert_close(conv.weight[:, :, values == 1], parameter.transpose(1, 2))
    assert not conv.weight[:, :, values == 0].any()


@pytest.mark.parametrize(
    ("size", "taps"), [((3, 3, 3), 7), ((5, 3), 7), ((1, 3, 3), 5), ((1, 1, 3), 3), ((3,), 3)]
)
def test_a_cross_has_the_taps_on_its_axes(size, taps):
    conv = masked({1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(size)](1, 1, size))
    inside = conv.weight.detach()[0, 0] != 0
    assert int(inside.sum()) == taps
    for tap in inside.nonzero().tolist():
        assert sum(t != k // 2 for t, k in zip(tap, size, strict=True)) <= 1


@pytest.mark.parametrize("channels", [None, [0, 1, 2], [4, 0, 3]])
@pytest.mark.parametrize("mask", [torch.ones(3, 3), torch.rand(3, 3), torch.rand(4, 5, 3, 3)])
def test_a_part_of_a_wider_weight_has_the_exact_gradient(channels, mask):
    wide = nn.Parameter(torch.randn(4, 5, 3, 3))
    conv, image = (
        masked(nn.Conv2d(3, 4, 3, bias=False), mask=mask, weight=wide, channels=channels),
        torch.randn(2, 3, 5, 5),
    )
    expected = F.conv2d(image, (mask * wide)[:, channels if channels else slice(3)])
    torch.testing.assert_close(conv(image), expected)
    (gradient,) = torch.autograd.grad(expected.square().sum(), wide)
    conv(image).square().sum().backward()
    torch.testing.assert_close(wide.grad, gradient)
    torch.testing.assert_close(fold_convs(conv)(image), expected)


def test_several_convolutions_share_one_weight():
    wide = nn.Parameter(torch.randn(4, 6, 3, 3))
    first = masked(nn.Conv2d(2, 4, 3), mask=torch.ones(3, 3), weight=wide)
    second = masked(nn.Conv2d(6, 4, 3), mask=torch.ones(3, 3), weight=wide)
    pair = nn.ModuleList([first, second])
    assert sum(p is wide for p in pair.parameters()) == 1
    (first(torch.randn(1, 2, 4, 4)).sum() + second(torch.randn(1, 6, 4, 4)).sum()).backward()
    assert wide.grad is not None and bool((wide.grad[:, 5] != 0).all())
    copied = masked(nn.Conv2d(2, 4, 3), mask=torch.ones(3, 3), weight=wide.detach())
    assert not any(p is wide for p in copied.parameters())


def test_folded_parts_of_one_weight_are_separate():
    wide, image = nn.Parameter(torch.randn(4, 6, 3, 3)), torch.randn(1, 4, 8, 8)
    rows, columns = [[0, 0, 0], [1, 1, 1], [0, 0, 0]], [[0, 1, 0]] * 3
    parts = [masked(nn.Conv2d(4, 4, 3, padding=1), weight=wide, mask=mask) for mask in (rows, columns)]
    network = nn.Sequential(*parts)
    folded = fold_convs(network)
    torch.testing.assert_close(folded(image), network(image), rtol=1e-4, atol=1e-4)
    assert folded[0].weight is not folded[1].weight


def test_masked_weights_get_no_gradient():
    conv = masked(nn.Conv3d(2, 2, 3), weight=torch.randn(2, 2, 3, 3, 3))
    conv(torch.randn(1, 2, 4, 4, 4)).square().sum().backward()
    gradient = conv.parametrizations.weight.original.grad
    assert not gradient[..., 0, 0, 0].any() and gradient[..., 1, 1, 1].all()


def test_init_from_weights_keeps_the_unmasked_weights():
    plain = nn.Conv2d(2, 3, 3)
    conv = masked(deepcopy(plain), init_from_weights=True)
    assert torch.equal(conv.weight[..., 1, :], plain.weight[..., 1, :])
    lost = plain.weight.detach()[..., ::2, ::2]
    assert conv.approximation_error == pytest.approx(
        float(lost.norm() / plain.weight.detach().norm()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": "plane"}, r"mask must be `cross`, nested lists or a tensor, got 'plane'"),
        ({"mask": [[1, 0], [1]]}, r"mask must be numbers in nested lists of equal lengths"),
        ({"mask": torch.ones(5, 5)}, r"mask must have shape kernel_size = \(3, 3\).*got \(5, 5\)"),
        ({"mask": torch.ones(3)}, r"mask must have shape kernel_size = \(3, 3\).*got \(3,\)"),
        ({"mask": torch.ones(2, 3, 3, 3)}, r"\(4, 3, 3, 3\), got \(2, 3, 3, 3\)"),
        ({"mask": torch.zeros(3, 3)}, r"every weight zero"),
        ({"weight": torch.ones(4, 2, 3, 3)}, r"weight must have shape .*\(4, 3, 3, 3\), got \(4, 2, 3, 3\)"),
        (
            {"weight": torch.ones(4, 5, 3, 3), "channels": [0, 1]},
            r"channels must be 3 different numbers.*4, got \[0, 1\]",
        ),
        (
            {"weight": torch.ones(4, 5, 3, 3), "channels": [0, 1, 1]},
            r"3 different numbers from 0 to 4, got \[0, 1, 1\]",
        ),
        (
            {"weight": torch.ones(4, 5, 3, 3), "channels": [0, 1, 5]},
            r"3 different numbers from 0 to 4, got \[0, 1, 5\]",
        ),
    ],
)
def test_errors_name_the_argument_and_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        masked(nn.Conv2d(3, 4, 3), **arguments)


def test_a_cross_needs_an_odd_kernel():
    with pytest.raises(ValueError, match=r"kernel_size must be odd.*\(3, 4\)"):
        masked(nn.Conv2d(1, 1, (3, 4)))
