"""medconv/convs/share.py: which kernels have the prior, what cannot be shared; tests/convs and
tests/integration/test_convolutions.py put it through what every convolution must do.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from medconv.convs import acs, ball, fold_convs, masked, smooth, spacing, swap_convs
from medconv.convs.factorised import separable
from medconv.convs.parametrization import UnsuitableLayerError
from medconv.convs.share import shared


def test_the_first_output_channels_have_the_prior():
    conv = nn.Conv3d(2, 10, 3, padding=1)
    before = conv.weight.detach().clone()
    shared(conv, ball, 0.3)  # without the eight corners
    corners = conv.weight.detach()[:, :, ::2, ::2, ::2].flatten(1)
    assert torch.equal(corners.abs().sum(1) == 0, torch.arange(10) < 3)
    assert torch.equal(conv.weight[3:], before[3:])


@pytest.mark.parametrize(("share", "outputs"), [(0.01, 1), (0.99, 3)])
def test_there_is_always_one_of_both(share, outputs):
    conv = shared(nn.Conv2d(1, 4, 3), ball, share)
    assert conv.get_parameter("parametrizations.weight.original0").shape[0] == outputs


def test_both_parts_learn():
    conv = shared(nn.Conv2d(2, 4, 3), ball, 0.5)
    conv(torch.randn(1, 2, 5, 5)).square().sum().backward()
    gradients = [parameter.grad for name, parameter in conv.named_parameters() if "original" in name]
    assert len(gradients) == 2 and all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize(
    "conv", [separable, partial(masked, mask=torch.rand(3, 3)), partial(spacing, spacing_mm=(1.0, 3.0))]
)
def test_what_cannot_be_shared_is_refused_by_the_layer_s_name(conv):
    network = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(ValueError, match=r"layer 0: share needs kernels of the layer's own size"):
        swap_convs(network, conv, share=0.5)


class Negative(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


def negative(conv):
    conv.__class__ = Negative
    return conv


def test_what_changes_the_class_is_refused():
    with pytest.raises(ValueError, match="share needs kernels of the layer's own size"):
        shared(nn.Conv2d(2, 4, 3), negative, 0.5)


def test_a_layer_with_one_output_stays():
    with pytest.raises(UnsuitableLayerError, match="two output channels"):
        shared(nn.Conv2d(4, 1, 3), ball, 0.5)


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=f"share must be a number, more than 0 and at most 1, got {share}"):
        swap_convs(nn.Sequential(nn.Conv2d(4, 4, 3)), ball, share=share)


def test_new_weights_alone_are_shared_too():
    conv = nn.Conv3d(2, 10, 3, padding=1)
    before = conv.weight.detach().clone()
    assert shared(conv, smooth, 0.3) is conv and not is_parametrized(conv)
    assert torch.equal((conv.weight == before).flatten(1).all(1), torch.arange(10) >= 3)


def test_folding_leaves_one_plain_kernel():
    network = nn.Sequential(nn.Conv3d(2, 6, 3), nn.ReLU(), nn.Conv3d(6, 4, 3))
    report = swap_convs(network, acs, share=0.5)
    image = torch.randn(1, 2, 6, 6, 6)
    folded = fold_convs(network)
    assert len(report.swapped) == 2 and all("parametrizations" not in name for name in folded.state_dict())
    torch.testing.assert_close(folded(image), network(image))
