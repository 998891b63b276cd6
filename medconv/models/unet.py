"""The U-Net of `model=customconv`, 2D and 3D; the convolutions are plain before `swap_convs`."""

from typing import Any

import torch
from torch import Tensor, nn

from medconv.models.encoder import Stages
from medconv.models.layers.blocks import conv_nd, conv_transpose_nd


class UNet(Stages):
    """Encoder, decoder and skips; its stages are joined down and up as in `Stages`.

    Shape: (batch, in_channels, *spatial) -> (batch, out_channels, *spatial), logits.
    Args:
        channels: one number per stage, finest first.
        strides: one per step between stages: int, or one int per axis (1 along an axis that is not pooled).
        kernel_size: odd, in voxels; one int, or per stage one int or one per axis.
        convs_per_stage: convolutions of a block, one number or one per stage; there is one block per stage
            and direction.
        norm: `batch` or `instance`.
        residual_blocks: of two convolutions, per stage of the encoder, in place of `convs_per_stage` there;
            entries beyond the stages are not used. None: none.
        strided: the first convolution of each coarser stage strides, as nnU-Net's; False: others join stages.
        Of `forward`: stages: how many of the decoder's coarser stages to return as well, after the logits,
            finest first, for `DeepSupervision`; 0: the logits alone.
    Raises: ValueError: lists that do not fit together; in `forward`, a size that `divisor` does not divide.
    Source: Ronneberger et al. 2015, arXiv:1505.04597; stages and activations as in Isensee et al. 2021,
        doi:10.1038/s41592-020-01008-z.
    """

    supports_deep_supervision = True

    def add_outputs(self, out_channels: int) -> None:
        up, pairs = conv_transpose_nd(len(self.divisor)), zip(self.channels, self.channels[1:], strict=False)
        self.up = nn.ModuleList(
            up(coarse, fine, step, stride=step)
            for (fine, coarse), step in zip(pairs, self._steps, strict=True)
        )
        self.decoder = nn.ModuleList(self.block(2 * fine, i) for i, fine in enumerate(self.channels[:-1]))
        self.head = conv_nd(len(self.divisor))(self.channels[0], out_channels, 1)

    def forward(self, x: Tensor, stages: int = 0) -> Any:
        *skips, x = self.features(x)
        coarser = []
        for up, block, skip in zip(reversed(self.up), reversed(self.decoder), reversed(skips), strict=True):
            coarser.append(x)
            x = block(torch.cat([skip, up(x)], 1))
        logits = self.head(x)
        return [logits, *coarser[: -1 - stages : -1]] if stages else logits
