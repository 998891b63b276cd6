"""medconv/models/outputs.py: one form for the outputs of all networks."""

import pytest
import torch
from monai.networks.nets import DynUNet, SegResNetDS
from torch import Tensor, nn

from medconv.models.outputs import evaluating, full_resolution, heads
from medconv.models.unet import UNet


def dynunet(spatial_dims):
    torch.manual_seed(0)
    arguments = {"deep_supervision": True, "deep_supr_num": 2, "filters": [4, 6, 8, 10]}
    return DynUNet(spatial_dims, 1, 3, [3] * 4, [1, 2, 2, 2], [2, 2, 2], **arguments)


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_dynunet_stacks_its_heads_while_training(spatial_dims):
    network, image = dynunet(spatial_dims), torch.randn(2, 1, *[16] * spatial_dims)
    stacked = network.train()(image)
    unstacked = heads(stacked, spatial_dims)
    assert [head.shape for head in unstacked] == [(2, 3, *[16] * spatial_dims)] * 3
    for i, head in enumerate(unstacked):
        assert torch.equal(head, stacked[:, i])
    assert not torch.allclose(unstacked[0], unstacked[1])

    logits = network.eval()(image)  # its instance norms do the same in both modes
    torch.testing.assert_close(unstacked[0], logits)
    assert torch.equal(full_resolution(logits), logits)
    (only_head,) = heads(logits, spatial_dims)
    assert torch.equal(only_head, logits)


def test_lists_of_heads_keep_their_order():
    network = SegResNetDS(
        spatial_dims=2, init_filters=8, blocks_down=(1, 1, 1), in_channels=1, out_channels=2, dsdepth=2
    )
    output = network.train()(torch.randn(1, 1, 16, 16))
    assert not isinstance(output, Tensor)
    in_order = heads(output, 2)
    assert [tuple(head.shape) for head in in_order] == [(1, 2, 16, 16), (1, 2, 8, 8)]
    assert full_resolution(output) is in_order[0] is output[0]


@pytest.mark.parametrize("spatial_dims", [2, 3])
def test_a_single_output_is_the_only_head(spatial_dims):
    output = UNet(spatial_dims, 1, 2, (4, 8), (2,))(torch.randn(1, 1, *[4] * spatial_dims))
    assert full_resolution(output) is output
    (only_head,) = heads(output, spatial_dims)
    assert only_head is output


@pytest.mark.parametrize(
    ("output", "got"), [({"out": 1}, "a dict"), (None, "a NoneType"), ((1, "x"), "a tuple of")]
)
def test_outputs_of_other_types_are_named(output, got):
    for function in (full_resolution, lambda each: heads(each, 2)):
        with pytest.raises(ValueError, match=f"model must return logits, or a list .* it returned {got}"):
            function(output)


def test_each_module_gets_its_mode_back():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(1).eval())
    with evaluating(network):
        assert not any(part.training for part in network.modules())
    assert [part.training for part in network.modules()] == [True, True, False]
