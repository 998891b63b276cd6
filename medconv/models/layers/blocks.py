"""The convolution block of our own networks, and the N-d classes it is made of; torch only."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

_Builder = Callable[..., nn.Module]
# By the number of spatial axes.
CONVS: dict[int, _Builder] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED_CONVS: dict[int, _Builder] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOLS: dict[int, _Builder] = {2: nn.AvgPool2d, 3: nn.AvgPool3d}
NORMS: dict[str, dict[int, _Builder]] = {
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "instance": {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d},
}
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
