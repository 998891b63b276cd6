"""The U-Net of `model=customconv`, 2D and 3D, its encoder, and the blocks of both; torch only.

Convolutions are plain before `swap_convs`.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

_Builder = Callable[..., Any]
# By the number of spatial axes.
CONVS: dict[int, _Builder] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED_CONVS: dict[int, _Builder] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOLS: dict[int, _Builder] = {2: nn.AvgPool2d, 3: nn.AvgPool3d}
NORMS: dict[str, dict[int, _Builder]] = {
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "instance": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
}
_CONVS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NEGATIVE_SLOPE = 0.01  # of leaky ReLUs, as nnU-Net's


class ConvBlock(nn.Sequential):
    """Convolution, norm, leaky ReLU, as often as `channels` has steps.

    Shape:
        (batch, channels[0], *spatial) -> (batch, channels[-1], *spatial / stride).
    Args:
        spatial_dims: 2 or 3.
        channels: (in, hidden, ..., out).
        kernel_size: odd, in voxels, per axis; padding keeps the size.
        norm: `batch` or `instance`.
        stride: of the first convolution, per axis.
    """

    def __init__(
        self,
        spatial_dims: int,
        channels: Sequence[int],
        kernel_size: Sequence[int],
        norm: str,
        stride: int | Sequence[int] = 1,
    ) -> None:
        conv = CONVS[spatial_dims]
        padding = tuple(size // 2 for size in kernel_size)
        layers: list[nn.Module] = []
        # only the first convolution has the stride
        for in_channels, out_channels in pairwise(channels):
            layers.append(
                conv(
                    in_channels,
                    out_channels,
                    tuple(kernel_size),
                    stride=1 if layers else stride,
                    padding=padding,
                    bias=False,  # the norm after it has a shift
                )
            )
            layers.append(NORMS[norm][spatial_dims](out_channels, affine=True))
            layers.append(nn.LeakyReLU(_NEGATIVE_SLOPE, inplace=True))
        super().__init__(*layers)

    def __getitem__(self, index: Any) -> Any:
        """A layer; of a slice, a plain `nn.Sequential`: torch would call this class with the layers."""
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)


class ResidualBlock(nn.Module):
    """Two convolutions with norms, added to their input; then leaky ReLU. At first it passes its input on.

    The input is averaged over strides, and projected to other channels, as in nnU-Net's residual encoder.

    Shape:
        (batch, in_channels, *spatial) -> (batch, channels, *spatial / stride).
    Args:
        spatial_dims: 2 or 3.
        in_channels: of the input.
        channels: of both convolutions.
        kernel_size, norm, stride: as of `ConvBlock`.
    Source: He et al. 2016, arXiv:1512.03385; the last norm's scale begins at 0, Goyal et al. 2017,
        arXiv:1706.02677.
    """

    def __init__(
        self,
        spatial_dims: int,
        in_channels: int,
        channels: int,
        kernel_size: Sequence[int],
        norm: str,
        stride: int | Sequence[int] = 1,
    ) -> None:
        super().__init__()
        widths = [in_channels, channels, channels]
        block = ConvBlock(spatial_dims, widths, kernel_size, norm, stride)
        self.convs = block[:-1]  # the last activation comes after the sum
        self.skip = nn.Sequential()
        if stride not in (1, (1,) * spatial_dims):
            self.skip.append(_POOLS[spatial_dims](stride))
        if in_channels != channels:
            self.skip.append(CONVS[spatial_dims](in_channels, channels, 1, bias=False))
            self.skip.append(NORMS[norm][spatial_dims](channels, affine=True))
        self.activation = nn.LeakyReLU(_NEGATIVE_SLOPE, inplace=True)
        # the scale of the last norm: at first the block adds nothing to its input
        nn.init.zeros_(self.convs[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.skip(x) + self.convs(x))
        return result


class Stages(nn.Module):
    """Blocks of `convs_per_stage` convolutions, joined by convolutions whose kernel is their stride.

    Unlike a 3-kernel with stride 2 on an even grid, these keep mirror symmetry. The `conv` group may replace
    all convolutions with a wider kernel.

    Args:
        as of `UNet`; attributes keep them, per stage or step and axis.
    Raises:
        ValueError: lists that do not fit together; of `features`, a size that `divisor` does not divide.
    """

    default_conv = "smooth"  # the option of `conv` that these networks and subclasses are trained with

    def __init__(
        self,
        spatial_dims: int,
        in_channels: int,
        out_channels: int,
        channels: Sequence[int] = (32, 64, 128, 256),
        strides: Sequence[int | Sequence[int]] = (2, 2, 2),
        kernel_size: int | Sequence[int | Sequence[int]] = 3,
        convs_per_stage: int | Sequence[int] = 2,
        norm: str = "batch",
        residual_blocks: Sequence[int] | None = None,
        strided: bool = False,
    ) -> None:
        super().__init__()
        if spatial_dims not in CONVS:
            raise ValueError(f"spatial_dims must be 2 or 3, got {spatial_dims}")
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {sorted(NORMS)}, got {norm!r}")
        stages = len(channels)
        if len(strides) != stages - 1:
            raise ValueError(
                f"strides must have one entry fewer than channels ({stages}), got {len(strides)}"
            )
        self.channels = tuple(channels)
        self.strides = [_per_axis(stride, spatial_dims, "strides") for stride in strides]
        # what the size of an image must be divisible by, per axis
        self.divisor = tuple(prod(stride[axis] for stride in self.strides) for axis in range(spatial_dims))
        convs = [convs_per_stage] * stages if isinstance(convs_per_stage, int) else convs_per_stage
        if len(convs) != stages or min(convs) < 1:
            raise ValueError(f"convs_per_stage must be one number from 1, or {stages}, got {convs_per_stage}")
        self.convs_per_stage = tuple(convs)  # of each stage's block
        self.kernel_sizes = _kernels(kernel_size, stages, spatial_dims)
        self.norm = norm
        self.strided = strided
        self.residual_blocks = None if residual_blocks is None else tuple(residual_blocks[:stages])
        if residual_blocks is not None and len(residual_blocks) < stages:
            raise ValueError(
                f"residual_blocks must have {stages} entries or more, one per stage, "
                f"got {list(residual_blocks)}"
            )
        # The order of creation is part of a seeded run: encoder, then down, then what a network adds.
        self.encoder = self._encoder(in_channels)
        self.down = nn.ModuleList()  # what joins each stage to the next coarser one
        for stage, stride in enumerate(self.strides):
            if strided:
                self.down.append(nn.Identity())
            else:
                # kernel and stride are equal: windows do not overlap, so a flip of the image flips them
                fine, coarse = self.channels[stage : stage + 2]
                self.down.append(CONVS[spatial_dims](fine, coarse, stride, stride=stride))
        self.add_outputs(out_channels)
        # As nnU-Net does.
        for layer in self.modules():
            if isinstance(layer, _CONVS):
                nn.init.kaiming_normal_(layer.weight, a=_NEGATIVE_SLOPE)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def _encoder(self, in_channels: int) -> nn.ModuleList:
        """One block per stage; if `strided`, it changes channels and resolution itself."""
        encoder = nn.ModuleList()
        for stage, channels in enumerate(self.channels):
            # Without `strided`, `down` has changed resolution and channels already.
            stride: int | Sequence[int] = 1
            stage_in = in_channels if stage == 0 else channels
            if self.strided and stage > 0:
                stride = self.strides[stage - 1]
                stage_in = self.channels[stage - 1]
            if self.residual_blocks is None:
                encoder.append(self.block(stage_in, stage, stride))
            else:
                encoder.append(self.residual(stage_in, stage, self.residual_blocks[stage], stride))
        return encoder

    def block(self, in_channels: int, stage: int, stride: int | Sequence[int] = 1) -> ConvBlock:
        """The convolutions of a stage, in the encoder or the decoder."""
        out_channels = self.channels[stage]
        widths = [in_channels, *[out_channels] * self.convs_per_stage[stage]]
        return ConvBlock(len(self.divisor), widths, self.kernel_sizes[stage], self.norm, stride)

    def residual(
        self, in_channels: int, stage: int, blocks: int, stride: int | Sequence[int] = 1
    ) -> nn.Sequential:
        """Residual blocks; the first stage begins with a convolution from the image to its channels."""
        spatial_dims = len(self.divisor)
        channels = self.channels[stage]
        kernel_size = self.kernel_sizes[stage]
        layers = nn.Sequential()
        if stage == 0:
            layers.append(ConvBlock(spatial_dims, [in_channels, channels], kernel_size, self.norm))
            in_channels = channels
        layers.append(ResidualBlock(spatial_dims, in_channels, channels, kernel_size, self.norm, stride))
        for _ in range(blocks - 1):
            layers.append(ResidualBlock(spatial_dims, channels, channels, kernel_size, self.norm))
        return layers

    def add_outputs(self, out_channels: int) -> None:
        """Add what the network has beyond these stages."""
        raise NotImplementedError

    def features(self, x: Tensor) -> list[Tensor]:
        """The output of each stage, finest first.

        Shape:
            (batch, in_channels, *spatial) -> (batch, channels[i], *spatial / strides so far).
        Raises:
            ValueError: the spatial size is not divisible by `divisor`.
        """
        size = tuple(x.shape[2:])
        if len(size) != len(self.divisor) or any(
            voxels % divisor for voxels, divisor in zip(size, self.divisor, strict=True)
        ):
            raise ValueError(f"the spatial size must be divisible by {self.divisor} axis by axis, got {size}")
        outputs = [self.encoder[0](x)]  # at the image's resolution
        for down, block in zip(self.down, self.encoder[1:], strict=True):
            outputs.append(block(down(outputs[-1])))
        return outputs


def _per_axis(value: int | Sequence[int], spatial_dims: int, name: str) -> tuple[int, ...]:
    numbers = (value,) * spatial_dims if isinstance(value, int) else tuple(value)
    if len(numbers) != spatial_dims or any(number < 1 for number in numbers):
        raise ValueError(f"{name}: needs {spatial_dims} positive numbers, one per axis, got {value}")
    return numbers


def _kernels(
    kernel_size: int | Sequence[int | Sequence[int]], stages: int, spatial_dims: int
) -> list[tuple[int, ...]]:
    """The kernel size of each stage, one number per axis."""
    per_stage = [kernel_size] * stages if isinstance(kernel_size, int) else list(kernel_size)
    if len(per_stage) != stages:
        raise ValueError(
            f"kernel_size must be one number or have {stages} entries, one per stage, got {len(per_stage)}"
        )
    kernels = [_per_axis(size, spatial_dims, "kernel_size") for size in per_stage]
    if any(size % 2 == 0 for kernel in kernels for size in kernel):
        raise ValueError(f"kernel_size must be odd along every axis, got {kernel_size}")
    return kernels


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
        up_conv = TRANSPOSED_CONVS[spatial_dims]
        self.up = nn.ModuleList()
        for stage, stride in enumerate(self.strides):
            fine, coarse = self.channels[stage : stage + 2]
            self.up.append(up_conv(coarse, fine, stride, stride=stride))
        self.decoder = nn.ModuleList()
        for stage, fine in enumerate(self.channels[:-1]):
            self.decoder.append(self.block(2 * fine, stage))  # the skip and what comes from below
        self.head = CONVS[spatial_dims](self.channels[0], out_channels, 1)

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
