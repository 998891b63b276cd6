"""medconv/models/deep_supervision.py: heads on the coarser stages of our U-Net; the network itself
has none.
"""

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from medconv.models.deep_supervision import DeepSupervision
from medconv.models.unet import UNet
from medconv.performance.switches import apply_switches


def unet(spatial_dims=2, channels=(4, 6, 8, 10, 12)):
    torch.manual_seed(0)
    return UNet(spatial_dims, 1, 3, channels, (2,) * (len(channels) - 1), norm="instance")


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_all_stages_but_the_two_coarsest_have_logits(spatial_dims):
    network, image = unet(spatial_dims), torch.randn(1, 1, *[32] * spatial_dims)
    outputs = DeepSupervision(network, 3)(network, image)
    assert [tuple(o.shape) for o in outputs] == [(1, 3, *[n] * spatial_dims) for n in (32, 16, 8)]
    torch.testing.assert_close(outputs[0], network(image))


def test_each_head_reads_its_own_stage_of_the_decoder():
    network, image = unet(), torch.randn(1, 1, 32, 32)
    features = {}
    for i in (1, 2):
        network.decoder[i].register_forward_hook(lambda _, __, out, i=i: features.__setitem__(i, out))
    supervision = DeepSupervision(network, 3)
    _, *coarse = supervision(network, image)
    for i, logits in enumerate(coarse, start=1):
        torch.testing.assert_close(logits, supervision.heads[i - 1](features[i]))


def test_the_network_itself_is_unchanged():
    network, image = unet(), torch.randn(1, 1, 32, 32)
    keys = list(network.state_dict())
    supervision = DeepSupervision(network, 3)
    assert list(network.state_dict()) == keys and not any(
        "network" in key for key in supervision.state_dict()
    )
    assert isinstance(network.train()(image), Tensor) and isinstance(network.eval()(image), Tensor)


def test_the_gradient_of_a_head_reaches_only_its_own_stage_and_coarser_ones():
    network, image = unet(), torch.randn(1, 1, 32, 32)
    DeepSupervision(network, 3)(network, image)[-1].sum().backward()
    stages = {
        name.split(".")[1]
        for name, p in network.named_parameters()
        if "decoder" in name and p.grad is not None
    }
    assert stages == {"2", "3"}  # not the finer ones


def test_with_few_stages_there_are_no_heads():
    network = unet(channels=(4, 6, 8))
    assert len(DeepSupervision(network, 3)(network, torch.randn(1, 1, 32, 32))) == 1


def test_other_networks_are_refused_by_name():
    dynunet = DynUNet(2, 1, 3, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8])
    with pytest.raises(
        ValueError,
        match=r"^deep_supervision=true needs our own U-Net.*DynUNet; dynunet, mednext.* have heads of their own",
    ):
        DeepSupervision(dynunet, 3)


@pytest.mark.parametrize("activation_checkpointing", ["blocks", "pointwise"])
def test_checkpointing_changes_no_gradient(activation_checkpointing):
    image, gradients = torch.randn(2, 1, 32, 32), []
    for mode in ("none", activation_checkpointing):
        network = unet()
        supervision = DeepSupervision(network, 3)
        apply_switches(network, channels_last=True, fast_norm=True, activation_checkpointing=mode)
        torch.stack([o.square().mean() for o in supervision(network.train(), image)]).sum().backward()
        gradients.append([p.grad for p in nn.ModuleList([network, supervision]).parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
