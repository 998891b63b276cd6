"""medconv/models/outputs.py: one shape for what networks return."""

import pytest
import torch
from monai.networks.nets import DynUNet, SegResNetDS
from torch import Tensor

from medconv.models.outputs import full_resolution, heads
from medconv.models.unet import UNet


def dynunet(spatial_dims: int) -> DynUNet:
    torch.manual_seed(0)
    arguments = {"deep_supervision": True, "deep_supr_num": 2, "filters": [4, 6, 8, 10]}
    return DynUNet(spatial_dims, 1, 3, [3] * 4, [1, 2, 2, 2], [2, 2, 2], **arguments)


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_dynunet_stacks_its_heads_while_training(spatial_dims: int) -> None:
    network, image = dynunet(spatial_dims), torch.randn(2, 1, *[16] * spatial_dims)
    stacked = network.train()(image)
    found = heads(stacked, spatial_dims)
    assert [head.shape for head in found] == [(2, 3, *[16] * spatial_dims)] * 3
    for i, head in enumerate(found):
        assert torch.equal(head, stacked[:, i])
    assert not torch.allclose(found[0], found[1])

    logits = network.eval()(image)  # its instance norms do the same in both modes
    torch.testing.assert_close(found[0], logits)
    assert torch.equal(full_resolution(logits), logits)
    alone = heads(logits, spatial_dims)
    assert len(alone) == 1 and torch.equal(alone[0], logits)


def test_lists_of_heads_keep_their_order() -> None:
    network = SegResNetDS(
        spatial_dims=2, init_filters=8, blocks_down=(1, 1, 1), in_channels=1, out_channels=2, dsdepth=2
    )
    output = network.train()(torch.randn(1, 1, 16, 16))
    assert not isinstance(output, Tensor)
    found = heads(output, 2)
    assert [tuple(head.shape) for head in found] == [(1, 2, 16, 16), (1, 2, 8, 8)]
    assert full_resolution(output) is found[0] is output[0]


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_one_head_is_a_list_of_one(spatial_dims: int) -> None:
    output = UNet(spatial_dims, 1, 2, (4, 8), (2,))(torch.randn(1, 1, *[4] * spatial_dims))
    assert full_resolution(output) is output
    found = heads(output, spatial_dims)
    assert len(found) == 1 and found[0] is output
