"""The U-Net of `model=customconv`, 2D and 3D; the convolutions are plain before `swap_convs`."""

from typing import Any

import torch
from torch import Tensor, nn

from medconv.models.encoder import Stages
from medconv.models.layers.blocks import conv_nd, conv_transpose_nd


class UNet(Stages):
    """Encoder, decoder and skips; its stages are joined down and up as in `Stages`.

    Shape:
        (batch, in_channels, *spatial) -> (batch, out_channels, *spatial), logits.
    Args:
        spatial_dims: 2 or 3.
        in_channels: of the image.
        out_channels: one per class or region.
        channels: one number per stage, finest first.
        strides: one per step between stages: int, or one int per axis (1 along an axis that is not pooled).
        kernel_size: odd, in voxels; one int, or per stage one int or one per axis.
        convs_per_stage: convolutions of a block, one number or one per stage; there is one block per stage
            and direction.
        norm: `batch` or `instance`.
        residual_blocks: of two convolutions, per stage of the encoder, in place of `convs_per_stage` there;
            entries beyond the stages are not used. None: none.
        strided: the first convolution of each coarser stage strides, as nnU-Net's; False: convolutions of
            their own join the stages.
    Raises:
        ValueError: lists that do not fit together; in `forward`, a size that `divisor` does not divide.
    Source: Ronneberger et al. 2015, arXiv:1505.04597; stages and activations as in Isensee et al. 2021,
        doi:10.1038/s41592-020-01008-z. Unlike the first, convolutions are padded; unlike both, convolutions
        whose kernel is their stride lead down, unless `strided`.
    """

    supports_deep_supervision = True

    def add_outputs(self, out_channels: int) -> None:
        spatial_dims = len(self.divisor)
        up_conv = conv_transpose_nd(spatial_dims)
        self.up = nn.ModuleList()
        for stage, stride in enumerate(self.strides):
            fine, coarse = self.channels[stage : stage + 2]
            self.up.append(up_conv(coarse, fine, stride, stride=stride))
        self.decoder = nn.ModuleList()
        for stage, fine in enumerate(self.channels[:-1]):
            self.decoder.append(self.block(2 * fine, stage))  # the skip and what comes from below
        self.head = conv_nd(spatial_dims)(self.channels[0], out_channels, 1)

    def forward(self, x: Tensor, stages: int = 0) -> Any:
        """The logits, or a list of them and of coarser stages.

        Args:
            stages: how many of the decoder's coarser stages to return as well, after the logits, finest
                first, for `DeepSupervision`; 0: the logits alone.
        """
        *skips, x = self.features(x)
        coarser = []  # what the decoder has at each stage but the finest, coarsest first
        # Layers and skips are listed finest first, the decoder runs from the coarsest.
        stages_up = zip(reversed(self.up), reversed(self.decoder), reversed(skips), strict=True)
        for up, block, skip in stages_up:
            coarser.append(x)
            x = block(torch.cat([skip, up(x)], 1))
        logits = self.head(x)
        if not stages:
            return logits
        finest_first = coarser[::-1]
        return [logits, *finest_first[:stages]]
