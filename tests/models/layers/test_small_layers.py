"""medconv/models/layers/: max pooling, blocks, and statistics of batch norms that are kept."""

import pytest
import torch
from monai.networks import nets
from torch import nn

from medconv.models.freeze import fix_statistics
from medconv.models.layers.max_pool import WindowMaxPool3d, swap_pools
from medconv.models.unet import ConvBlock
from medconv.training.callbacks.nonfinite_guard import RunningStatistics


@pytest.mark.parametrize(
    "settings", [{"kernel_size": 2}, {"kernel_size": (1, 2, 3)}, {"kernel_size": 3, "stride": 3}]
)
def test_values_and_gradients_are_those_of_max_pooling(settings):
    plain, swapped = nn.MaxPool3d(**settings), nn.Sequential(nn.MaxPool3d(**settings))
    assert swap_pools(swapped) == 1
    torch.manual_seed(0)
    image = torch.randn(2, 3, 7, 8, 9).relu()  # with many equal values
    results = []
    for pool in (plain, swapped):
        x = image.clone().requires_grad_()
        output = pool(x)
        output.backward(torch.arange(output.numel(), dtype=torch.float32).view_as(output))
        results.append((output.detach(), x.grad))
    for expected, value in zip(*results, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": 2, "ceil_mode": True},
    ],
)
def test_overlapping_or_padded_windows_are_not_swapped(settings):
    network = nn.Sequential(nn.MaxPool3d(**settings))
    assert swap_pools(network) == 0 and type(network[0]) is nn.MaxPool3d


def test_all_pools_of_monais_basicunet_are_swapped():
    network = nets.BasicUNet(3, 1, 2, (4, 4, 4, 4, 4, 4))
    assert swap_pools(network) == 4
    assert sum(isinstance(layer, WindowMaxPool3d) for layer in network.modules()) == 4


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm3d), ("instance", nn.InstanceNorm3d)])
def test_a_block_repeats_convolution_norm_and_leaky_relu(norm, kind):
    block = ConvBlock(3, [2, 4, 6], (3, 1, 5), norm)
    assert [type(layer) for layer in block] == [nn.Conv3d, kind, nn.LeakyReLU] * 2
    convs, norms = list(block)[::3], list(block)[1::3]
    assert [(conv.in_channels, conv.out_channels) for conv in convs] == [(2, 4), (4, 6)]
    assert all(conv.kernel_size == (3, 1, 5) and conv.padding == (1, 0, 2) for conv in convs)
    assert all(conv.bias is None for conv in convs)  # the norm has one
    assert [layer.bias.shape for layer in norms] == [(4,), (6,)]
    assert block(torch.randn(2, 2, 4, 3, 6)).shape == (2, 6, 4, 3, 6)


def test_a_block_can_be_sliced():
    block = ConvBlock(2, [1, 2, 3], (3, 3), "batch")
    assert list(block[3:]) == list(block)[3:] and block[-1] is list(block)[-1]


def network():
    conv = nn.Conv2d(1, 3, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(3), nn.InstanceNorm2d(3), nn.BatchNorm2d(3, affine=False))


@pytest.mark.parametrize(
    ("where", "restored"), [(None, True), (torch.tensor(True), True), (torch.tensor(False), False)]
)
def test_restore_undoes_the_forward_passes_since_now(where, restored):
    model = network()
    model(torch.randn(2, 1, 6, 6))
    statistics = RunningStatistics(model)
    before, saved = {name: value.clone() for name, value in model.named_buffers()}, statistics.now()
    model(torch.randn(2, 1, 6, 6) + 5)
    statistics.restore(saved, where)
    assert len(before) == 6
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]) == restored, name


def test_a_network_without_running_statistics_has_nothing_to_restore():
    statistics = RunningStatistics(nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3)))
    assert statistics.now() == []
    statistics.restore([])


def test_a_fixed_norm_stays_in_evaluation_mode_with_its_names_and_class():
    model = network()
    keys, before = list(model.state_dict()), model[1].running_mean.clone()
    for _ in range(2):  # the second call changes nothing
        fix_statistics(model[1])
    assert type(model[1]).__name__ == "FixedBatchNorm2d" and isinstance(model[1], nn.BatchNorm2d)
    model.train()(torch.randn(2, 1, 6, 6))
    assert not model[1].training and torch.equal(model[1].running_mean, before)
    assert model[3].training and int(model[3].num_batches_tracked) == 1
    assert list(model.state_dict()) == keys
