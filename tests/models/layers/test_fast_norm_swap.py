"""medconv/models/layers/fast_norm.py: a network with exchanged norms is the same network."""

from copy import deepcopy

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from medconv.models.layers.fast_norm import ChannelsLastNorm, swap_norms
from medconv.models.unet import UNet

FORMAT = {4: torch.channels_last, 5: torch.channels_last_3d}
NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def drawn(shape):
    x = 2 + 3 * torch.randn(shape, dtype=torch.float64)
    return x.contiguous(memory_format=FORMAT[len(shape)]).requires_grad_()


def dynunet():
    return DynUNet(
        3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(4, 8, 8), norm_name=("INSTANCE", {"affine": True})
    )


def medconv_unet(dims, norm="instance"):
    return UNet(dims, 1, 2, (4, 6, 8), (2, 2), norm=norm)


# Network, its axes, the number of norms, and of those fused with an activation.
NETWORKS = {
    "dynunet": (dynunet, 3, 10, 0),
    "unet 3d": (lambda: medconv_unet(3), 3, 10, 10),
    "unet 2d": (lambda: medconv_unet(2), 2, 10, 10),
    "unet 3d, batch norm": (lambda: medconv_unet(3, "batch"), 3, 10, 10),
    "unet 2d, batch norm": (lambda: medconv_unet(2, "batch"), 2, 10, 10),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_swapped_network_is_the_same_network(name, training):
    torch.manual_seed(3)
    build, dims, norms, fused = NETWORKS[name]
    plain = build().double().train(training).to(memory_format=FORMAT[dims + 2])
    for p in plain.parameters():
        p.data += 0.1 * torch.randn_like(p)
    network = deepcopy(plain)
    parameters, modules = dict(network.named_parameters()), dict(network.named_modules())
    assert swap_norms(network) == norms

    assert list(network.state_dict()) == list(plain.state_dict())
    assert all(p is parameters[n] for n, p in network.named_parameters())
    assert list(modules) == [n for n, _ in network.named_modules()]
    assert all(m.training == training for m in network.modules())
    assert not any(type(m) in NORMS for m in network.modules())
    assert (
        sum(isinstance(m, ChannelsLastNorm) and m.negative_slope == 0.01 for m in network.modules()) == fused
    )
    assert sum(isinstance(m, nn.Identity) for m in network.modules()) == fused + sum(
        isinstance(m, nn.Identity) for m in plain.modules()
    )
    assert all(isinstance(m, NORMS) for m in network.modules() if isinstance(m, ChannelsLastNorm))

    x = drawn((2, 1, *[16] * dims)[: dims + 2])
    for copy in (network, deepcopy(network)):
        copy.load_state_dict(plain.state_dict())
        output, expected = copy(x), plain(x)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
        grads = [
            torch.autograd.grad(y.square().mean(), [x, *n.parameters()], allow_unused=True)
            for y, n in ((output, copy), (expected, plain))
        ]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-6, atol=1e-9)
    assert swap_norms(network) == 0
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def test_norms_with_running_statistics_and_subclasses_are_not_swapped():
    class Own(nn.InstanceNorm2d):
        pass

    network = nn.Sequential(
        nn.InstanceNorm2d(3, track_running_stats=True), nn.ReLU(), Own(3), nn.ReLU(), nn.InstanceNorm1d(3)
    )
    kinds = [type(m) for m in network]
    assert swap_norms(network) == 0
    assert [type(m) for m in network] == kinds


class Block(nn.Sequential):
    """A subclass of `nn.Sequential`, as `ConvBlock` is."""


def twice(norm, act):
    return [Block(norm, act), Block(nn.Conv2d(2, 2, 1), act)]


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](self[1](x))


KEPT = {
    "activation elsewhere too": lambda: twice(nn.InstanceNorm2d(2), nn.ReLU()),
    "norm elsewhere too": lambda: [Block(n := nn.InstanceNorm2d(2), nn.ReLU()), Block(n, nn.Conv2d(2, 2, 1))],
    "activation hooked": lambda: [Block(nn.InstanceNorm2d(2), hooked(nn.ReLU()))],
    "norm hooked": lambda: [Block(hooked(nn.InstanceNorm2d(2)), nn.ReLU())],
    "forward of its own": lambda: [Reversed(nn.InstanceNorm2d(2), nn.ReLU())],
    "a plain sequential, which others may walk through": lambda: [
        nn.Sequential(nn.InstanceNorm2d(2), nn.ReLU())
    ],
    "something between": lambda: [Block(nn.InstanceNorm2d(2), nn.Conv2d(2, 2, 1), nn.ReLU())],
    "another activation": lambda: [Block(nn.InstanceNorm2d(2), nn.ELU())],
    "no sequential": lambda: [nn.ModuleList([nn.InstanceNorm2d(2), nn.ReLU()])],
}


@pytest.mark.parametrize("name", KEPT)
def test_an_activation_that_cannot_be_fused_stays(name):
    network = nn.ModuleList(KEPT[name]())
    before = dict(network.named_modules(remove_duplicate=False))
    assert swap_norms(network) == 1
    assert all(m is before[n] for n, m in network.named_modules(remove_duplicate=False))
    assert all(m.negative_slope is None for m in network.modules() if isinstance(m, ChannelsLastNorm))


def test_a_shared_block_is_fused_once_also_in_a_later_call():
    block = Block(nn.InstanceNorm2d(2), nn.LeakyReLU(0.2))
    network = Block(block, nn.Conv2d(2, 2, 1), block).double()
    x = drawn((2, 2, 5, 4))
    expected = network(x)
    assert swap_norms(network, fuse=False) == 1 and isinstance(block[1], nn.LeakyReLU)
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-10)
    assert swap_norms(network) == 0 and isinstance(block[1], nn.Identity) and "0.2" in repr(block[0])
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-10)


def test_batch_norms_stay_where_the_trainer_replaces_them():
    """`nn.SyncBatchNorm` knows no activation, so nothing is fused into them."""
    network = nn.Sequential(Block(nn.BatchNorm3d(2), nn.ReLU()), Block(nn.InstanceNorm3d(2), nn.ReLU()))
    assert swap_norms(network, keep_batch_norms=True) == 1
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    assert type(synced[0][0]) is nn.SyncBatchNorm and isinstance(synced[0][1], nn.ReLU)
    assert isinstance(synced[1][0], ChannelsLastNorm)
