"""The U-Net of `model=customconv`, 2D and 3D: plain here, its convolutions replaced by `medconv.convs.swap_convs`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from medconv.layers import ConvBlock, conv_nd, conv_transpose_nd


class UNet(nn.Module):
    """Encoder, decoder and skips; each stage is one block of `convs_per_stage` convolutions.

    Stages are joined by convolutions whose kernel is their stride, down and up: unlike a 3-kernel with stride 2
    on an even grid they keep mirror symmetry. All convolutions with a wider kernel are the `conv` group's to replace.

    Shape: (batch, in_channels, *spatial) -> (batch, out_channels, *spatial), logits.
    Args:
        channels: one number per stage, finest first; the attribute keeps them.
        strides: one per step between stages: int, or one int per axis (1 along an axis that is not pooled).
        kernel_size: odd, in voxels; one int, or per stage one int or one per axis.
        norm: `batch` or `instance`.
        Of `forward`: stages: how many of the decoder's coarser stages to return as well, after the logits, finest first, for
            `DeepSupervision`; 0: the logits alone.
    Raises: ValueError: lists that do not fit together; in `forward`, a size that `divisor` does not divide.
    Source: Ronneberger et al. 2015, arXiv:1505.04597; stages and activations as in Isensee et al. 2021,
        doi:10.1038/s41592-020-01008-z.
    """

    def __init__(
        self,
        spatial_dims: int,
        in_channels: int,
        out_channels: int,
        channels: Sequence[int] = (32, 64, 128, 256),
        strides: Sequence[int | Sequence[int]] = (2, 2, 2),
        kernel_size: int | Sequence[int | Sequence[int]] = 3,
        convs_per_stage: int = 2,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if len(strides) != len(channels) - 1:
            raise ValueError(f"strides must have one entry fewer than channels ({len(channels)}), got {len(strides)}")
        steps = [_per_axis(s, spatial_dims, "strides") for s in strides]
        kernels = _kernels(kernel_size, len(channels), spatial_dims)
        self.channels = tuple(channels)
        self.divisor = tuple(prod(step[axis] for step in steps) for axis in range(spatial_dims))

        def block(into: int, stage: int) -> ConvBlock:
            return ConvBlock(spatial_dims, [into, *[channels[stage]] * convs_per_stage], kernels[stage], norm)

        down, up = conv_nd(spatial_dims), conv_transpose_nd(spatial_dims)
        self.encoder = nn.ModuleList([block(in_channels, 0), *(block(c, i + 1) for i, c in enumerate(channels[1:]))])
        self.down = nn.ModuleList(
            down(fine, coarse, s, stride=s) for fine, coarse, s in zip(channels, channels[1:], steps, strict=False)
        )
        self.up = nn.ModuleList(
            up(coarse, fine, s, stride=s) for fine, coarse, s in zip(channels, channels[1:], steps, strict=False)
        )
        self.decoder = nn.ModuleList(block(2 * fine, i) for i, fine in enumerate(channels[:-1]))
        self.head = down(channels[0], out_channels, 1)
        self.apply(_initialise)

    def forward(self, x: Tensor, stages: int = 0) -> Any:
        self._check(x)
        x = self.encoder[0](x)
        skips, coarser = [], []
        for down, block in zip(self.down, self.encoder[1:], strict=True):  # type: ignore[arg-type]
            skips.append(x)
            x = block(down(x))
        for up, block, skip in zip(reversed(self.up), reversed(self.decoder), reversed(skips), strict=True):  # type: ignore[call-overload]
            coarser.append(x)
            x = block(torch.cat([skip, up(x)], 1))
        logits = self.head(x)
        return [logits, *coarser[: -1 - stages : -1]] if stages else logits

    def _check(self, x: Tensor) -> None:
        size = tuple(x.shape[2:])
        if len(size) != len(self.divisor) or any(s % d for s, d in zip(size, self.divisor, strict=True)):
            raise ValueError(f"the spatial size must be divisible by {self.divisor} axis by axis, got {size}")


def _per_axis(value: int | Sequence[int], spatial_dims: int, name: str) -> tuple[int, ...]:
    axes = (value,) * spatial_dims if isinstance(value, int) else tuple(value)
    if len(axes) != spatial_dims or any(a < 1 for a in axes):
        raise ValueError(f"{name}: needs {spatial_dims} positive numbers, one per axis, got {value}")
    return axes


def _kernels(kernel_size: int | Sequence[int | Sequence[int]], stages: int, spatial_dims: int) -> list[tuple[int, ...]]:
    per_stage = [kernel_size] * stages if isinstance(kernel_size, int) else list(kernel_size)
    if len(per_stage) != stages:
        raise ValueError(f"kernel_size must be one number or have {stages} entries, one per stage, got {len(per_stage)}")
    kernels = [_per_axis(k, spatial_dims, "kernel_size") for k in per_stage]
    if any(k % 2 == 0 for kernel in kernels for k in kernel):
        raise ValueError(f"kernel_size must be odd along every axis, got {kernel_size}")
    return kernels


def _initialise(layer: nn.Module) -> None:
    if isinstance(layer, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        nn.init.kaiming_normal_(layer.weight, a=0.01)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
