"""medconv/convs/channel_transform.py: against two convolutions in plain loops, folded and in two launches, and which
of them it takes.
"""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from reference.convolution import convolve, dense_bank, fold, mix_channels, nearest_transform
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from medconv.convs import channel_transform, cost_model, fold_convs, gaussian_jet, transform

CONVS = {
    "1d": (nn.Conv1d(2, 3, 3, padding=1), {}, (7,)),
    "2d": (nn.Conv2d(3, 4, 3), {}, (5, 6)),
    "zero padding": (nn.Conv2d(2, 5, 3, padding=1), {"transform_channels": 4}, (4, 5)),
    "stride": (nn.Conv2d(2, 3, (5, 3), stride=(2, 1), padding=(2, 1)), {}, (6, 5)),
    "dilation": (nn.Conv2d(2, 3, 3, padding=2, dilation=2), {}, (6, 5)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), {}, (4, 5)),
    "reflect": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), {}, (4, 5)),
    "replicate": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate", bias=False), {}, (4, 5)),
    "3d in blocks": (nn.Conv3d(2, 12, 3, padding=1), {}, (3, 3, 3)),
    "3d anisotropic": (
        nn.Conv3d(2, 4, 3, stride=(1, 2, 2), padding=1),
        {"spacing_mm": (2.5, 0.5, 0.5)},
        (3, 4, 4),
    ),
    "3d flat kernel": (nn.Conv3d(2, 6, (1, 3, 3), padding=(0, 1, 1)), {"transform_channels": 3}, (2, 4, 4)),
    "3d circular": (nn.Conv3d(1, 2, 3, padding=1, padding_mode="circular", dilation=1), {}, (3, 3, 4)),
    "user bank": (nn.Conv2d(3, 4, 3, padding=1), {"transform_channels": 2, "bank": "random"}, (4, 4)),
}


def build(conv, seed=0, **arguments):
    torch.manual_seed(seed)
    if "bank" in arguments:
        width = arguments["transform_channels"]
        arguments["bank"] = torch.randn(conv.out_channels, width, *conv.kernel_size)
    return transform(deepcopy(conv), **arguments)


def prior_of(conv):
    return conv.parametrizations.weight[0]


def original_of(conv):
    return conv.parametrizations.weight.original


def bank_of(conv):
    prior = prior_of(conv)
    return dense_bank(prior.bank.double().numpy(), conv.kernel_size, prior.groups)


@pytest.mark.parametrize("two", [False, True], ids=["folded", "two launches"])
@pytest.mark.parametrize("name", CONVS)
def test_equals_a_1x1_convolution_and_then_the_bank(name, two, monkeypatch):
    monkeypatch.setattr(channel_transform, "prefers_two_launches", lambda *_: two)
    plain, arguments, size = CONVS[name]
    conv = build(plain, **arguments)
    image = torch.randn(2, conv.in_channels, *size)
    mixed = mix_channels(image.double().numpy(), original_of(conv).detach().double().numpy())
    expected = convolve(mixed, bank_of(conv), conv.stride, conv.padding, conv.dilation, conv.padding_mode)
    if conv.bias is not None:
        expected += conv.bias.detach().double().numpy().reshape(-1, *[1] * len(size))
    np.testing.assert_allclose(conv(image).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("out", "width", "groups", "spatial_dims"),
    [(6, 6, 1, 2), (8, 8, 2, 2), (7, 5, 1, 2), (24, 12, 3, 3), (20, 5, 5, 3)],
)
def test_each_output_of_a_block_has_different_filters_of_the_bank(out, width, groups, spatial_dims):
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims](3, out, 3)
    prior = prior_of(transform(conv, transform_channels=width))
    jet = gaussian_jet(conv.kernel_size).flatten(1)
    assert prior.groups == groups and prior.bank.shape == (out, width // groups, 3**spatial_dims)
    for o in range(out):
        for t in range(width // groups):
            torch.testing.assert_close(prior.bank[o, t], jet[(o % (out // groups) + t) % len(jet)])


def test_spacing_reaches_the_bank():
    prior = prior_of(transform(nn.Conv2d(2, 6, 3), spacing_mm=(1.0, 3.0)))
    torch.testing.assert_close(prior.bank[0, 0], gaussian_jet((3, 3), (1.0, 3.0))[0].flatten())


def test_a_bank_of_the_user_is_used_unchanged():
    bank = torch.randn(4, 2, 3, 5)
    conv = transform(nn.Conv2d(3, 4, (3, 5)), transform_channels=2, bank=bank)
    np.testing.assert_array_equal(bank_of(conv), bank.double().numpy())


@pytest.mark.parametrize("name", ["2d", "3d in blocks", "user bank"])
def test_the_folded_kernel_passes_gradcheck(name):
    plain, arguments, _ = CONVS[name]
    conv = build(plain, **arguments).double()
    original = original_of(conv).detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(prior_of(conv), (original,))


@pytest.mark.parametrize("name", ["2d", "3d in blocks", "3d anisotropic", "3d flat kernel", "user bank"])
def test_init_from_weights_is_the_least_squares_projection(name):
    plain, arguments, _ = CONVS[name]
    conv = build(plain, init_from_weights=True, **arguments)
    weight, bank = plain.weight.detach().double().numpy(), bank_of(conv)
    nearest = fold(nearest_transform(weight, bank), bank)
    assert not np.allclose(nearest, weight, atol=1e-3)  # else the projection changes nothing
    np.testing.assert_allclose(conv.weight.detach().numpy(), nearest, atol=1e-5)


@pytest.mark.parametrize("name", ["2d", "3d in blocks"])
def test_weight_is_computed_in_fp32_inside_autocast(name):
    plain, arguments, size = CONVS[name]
    conv = build(plain, **arguments)
    expected = conv.weight
    with torch.autocast("cpu", torch.bfloat16):
        inside = conv.weight
        output = conv(torch.randn(1, conv.in_channels, *size))
    assert inside.dtype == torch.float32 and torch.equal(inside, expected)
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_weight_follows_its_network_into_other_precisions(dtype):
    conv = build(CONVS["2d"][0])
    expected = conv.weight.detach()
    conv.to(dtype)
    assert conv.weight.dtype == dtype and conv(torch.randn(1, 3, 4, 4, dtype=dtype)).dtype == dtype
    assert fold_convs(conv).weight.dtype == dtype
    torch.testing.assert_close(conv.weight.float(), expected, rtol=0.02, atol=0.02)


def test_only_the_transform_and_the_bias_are_learned():
    conv = build(CONVS["user bank"][0], transform_channels=2, bank="random")
    assert {name: tuple(p.shape) for name, p in conv.named_parameters()} == {
        "bias": (4,),
        "parametrizations.weight.original": (2, 3),
    }


@pytest.mark.parametrize(
    ("conv", "arguments", "message"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), {}, r"groups=1, got 2"),
        (nn.Conv2d(2, 2, 2), {}, r"kernel_size must be odd.*\(2, 2\)"),
        (nn.Conv3d(2, 2, 3), {"spacing_mm": (1.0, 1.0)}, r"spacing_mm must have 3 numbers.*\(1\.0, 1\.0\)"),
        (nn.Conv2d(2, 2, 3), {"spacing_mm": (1.0, -2.0)}, r"spacing_mm.*positive.*\(1\.0, -2\.0\)"),
        (
            nn.Conv2d(2, 2, 3),
            {"bank": torch.ones(2, 3, 3)},
            r"bank must have shape.*\(2, 2, 3, 3\), got \(2, 3, 3\)",
        ),
        (
            nn.Conv2d(2, 4, 3),
            {"bank": torch.ones(4, 4, 3, 3), "transform_channels": 2},
            r"bank.*\(4, 2, 3, 3\), got \(4, 4, 3",
        ),
        (nn.Conv2d(2, 2, 3), {"transform_channels": 0}, r"transform_channels must be at least 1, got 0"),
    ],
)
def test_errors_name_the_argument_and_its_value(conv, arguments, message):
    with pytest.raises(ValueError, match=message):
        transform(conv, **arguments)
    assert not parametrize.is_parametrized(conv)


@pytest.mark.parametrize(
    ("dims", "channels", "size", "two"),
    [
        (3, 64, (20, 28, 20), True),
        (3, 256, (5, 7, 5), True),
        (2, 32, (256, 256), False),
        (2, 256, (32, 32), True),
    ],
)
@pytest.mark.parametrize("has_amx", [True, False])
def test_the_choice_agrees_with_measurements(dims, channels, size, two, has_amx, monkeypatch):
    """On two cores with AMX, bf16: `python scripts/benchmark.py convs`, docs/benchmarks.md.

    AVX-512 alone is slower at both ways, and takes the same.
    """
    monkeypatch.setattr(cost_model, "_HAS_AMX", has_amx)
    conv = transform({2: nn.Conv2d, 3: nn.Conv3d}[dims](channels, channels, 3, padding=1))
    image = torch.empty(2, channels, *size, dtype=torch.bfloat16)
    assert channel_transform.prefers_two_launches(conv, prior_of(conv), image) == two


def test_folded_and_two_launches_have_equal_gradients(monkeypatch):
    conv, gradients = build(CONVS["3d in blocks"][0]), []
    image = torch.randn(2, 2, 4, 4, 4)
    for two in (False, True):
        monkeypatch.setattr(channel_transform, "prefers_two_launches", lambda *_, two=two: two)
        gradients.append(torch.autograd.grad(conv(image).square().sum(), list(conv.parameters())))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("in_channels", [1, 4])
def test_the_two_launches_have_kernels_in_the_layers_memory_format(in_channels, monkeypatch):
    """A GPU's convolution takes its format from the strides of image and kernel, so a kernel with one input
    channel, or of 1x1x1 voxels, needs those of channels-last.
    """
    layer = transform(nn.Conv3d(in_channels, 8, 3, padding=1), transform_channels=8)
    for each in (layer, layer.parametrizations.weight[0]):
        each.to(memory_format=torch.channels_last_3d)
    kernels = []
    convolve = F.conv3d
    monkeypatch.setattr(
        F, "conv3d", lambda x, weight, *more: kernels.append(weight) or convolve(x, weight, *more)
    )
    image = torch.rand(1, in_channels, 4, 4, 4)
    channel_transform.in_two_launches(layer, image)
    assert len(kernels) == 2
    assert all(kernel.stride()[1] == 1 for kernel in kernels)
    assert all(kernel.stride()[-1] == kernel.shape[1] for kernel in kernels)


def test_a_further_parametrization_of_the_weight_is_applied_too(monkeypatch):
    conv, image = transform(nn.Conv2d(8, 8, 3, padding=1)), torch.randn(1, 8, 6, 6)
    parametrize.register_parametrization(conv, "weight", Double())
    monkeypatch.setattr(channel_transform, "prefers_two_launches", lambda *_: True)
    torch.testing.assert_close(conv(image), F.conv2d(image, conv.weight, conv.bias, padding=1))


class BackwardCalls(TorchDispatchMode):
    """The kernel size of each convolution's backward pass, and which gradients it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.calls.append((*args[2].shape[2:], list(args[-1])))
        return func(*args, **(kwargs or {}))


def test_two_launches_compute_no_gradient_of_the_fixed_bank():
    layer = transform(nn.Conv2d(2, 3, 3, bias=True))
    image = torch.rand(1, 2, 6, 6, requires_grad=True)
    output = channel_transform.in_two_launches(layer, image).sum()
    with BackwardCalls() as backward:
        output.backward()
    # with a bias in the second one, oneDNN would compute the bank's gradient, too
    assert backward.calls == [(3, 3, [True, False, False]), (1, 1, [True, True, False])]
    assert layer.bias.grad.tolist() == [16.0, 16.0, 16.0]


def test_the_sigma_of_the_bank_grows_with_the_voxels_of_a_layer():
    def bank(**arguments):
        return transform(nn.Conv2d(4, 6, 5), bank="jet", **arguments).parametrizations.weight[0].bank

    torch.testing.assert_close(bank(sigma_mm=0.7, scale=2.0), bank(sigma_mm=1.4))
    assert not torch.equal(bank(sigma_mm=0.7, scale=2.0), bank(sigma_mm=0.7))
