"""Networks, each with an image and its number of blocks, for the tests of switches and checkpointing."""

import pytest
import torch
from monai.networks import nets

from medconv.models.unet import UNet

NETWORKS = {  # build, spatial axes, blocks
    "unet 2d": (lambda: UNet(2, 1, 2, (4, 8), (2,)), 2, 3),
    "unet 3d": (lambda: UNet(3, 1, 2, (4, 6, 8), (2, (1, 2, 2))), 3, 5),
    "monai unet": (
        lambda: nets.UNet(3, 1, 2, (4, 8), (2,), num_res_units=2, norm="batch", dropout=0.3),
        3,
        2,
    ),
    "monai dynunet": (
        lambda: nets.DynUNet(
            2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8], norm_name="batch", dropout=0.3
        ),
        2,
        5,
    ),
    "monai dynunet with heads": (
        lambda: nets.DynUNet(2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 6, 8], deep_supervision=True),
        2,
        5,
    ),
    "monai segresnet": (
        lambda: nets.SegResNet(
            3, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), norm="batch", dropout_prob=0.3
        ),
        3,
        3,
    ),
}


@pytest.fixture(params=NETWORKS)
def case(request):
    torch.manual_seed(0)
    build, spatial_dims, blocks = NETWORKS[request.param]
    return build(), torch.randn(2, 1, *[8] * spatial_dims), blocks
