"""The convolution block of our own networks, and the N-d classes it is made of; torch only."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

_Builder = Callable[..., nn.Module]
_NORM = {"batch": "BatchNorm", "instance": "InstanceNorm"}


def conv_nd(spatial_dims: int) -> _Builder:
    """`nn.Conv2d` or `nn.Conv3d`. Raises: ValueError: spatial_dims is neither 2 nor 3."""
    return _of_torch("Conv", spatial_dims)


def conv_transpose_nd(spatial_dims: int) -> _Builder:
    """`nn.ConvTranspose2d` or `nn.ConvTranspose3d`. Raises: ValueError: spatial_dims is neither 2 nor 3."""
    return _of_torch("ConvTranspose", spatial_dims)


def norm_nd(name: str, spatial_dims: int, channels: int) -> nn.Module:
    """A norm with learned scale and shift. Raises: ValueError: `name` is neither `batch` nor `instance`."""
    if name not in _NORM:
        raise ValueError(f"norm must be one of {sorted(_NORM)}, got {name!r}")
    return _of_torch(_NORM[name], spatial_dims)(channels, affine=True)


class ConvBlock(nn.Sequential):
    """Convolution, norm, leaky ReLU, as often as `channels` has steps.

    Shape: (batch, channels[0], *spatial) -> (batch, channels[-1], *spatial).
    Args: channels: (in, hidden, ..., out). kernel_size: odd, in voxels, per axis; padding keeps the size.
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
        layers: list[nn.Module] = []
        conv, padding = conv_nd(spatial_dims), tuple(k // 2 for k in kernel_size)
        for into, out in pairwise(channels):
            settings: dict[str, Any] = {"stride": 1 if layers else stride, "padding": padding, "bias": False}
            layers.append(conv(into, out, tuple(kernel_size), **settings))
            layers += [norm_nd(norm, spatial_dims, out), nn.LeakyReLU(0.01, inplace=True)]
        super().__init__(*layers)

    def __getitem__(self, index: Any) -> Any:
        """A layer; of a slice, a plain `nn.Sequential`: torch would call this class with the layers."""
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)


class ResidualBlock(nn.Module):
    """Two convolutions with norms, added to their input; then leaky ReLU. At first it passes its input on.

    Shape: (batch, in_channels, *spatial) -> (batch, channels, *spatial), divided by the stride.
    Args: kernel_size, norm, stride: as of `ConvBlock`. The input is averaged over strides, and projected to
        other channels, as in nnU-Net's residual encoder.
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
        self.convs = ConvBlock(spatial_dims, widths, kernel_size, norm, stride)[:-1]
        self.skip = nn.Sequential()
        if stride not in (1, (1,) * spatial_dims):
            self.skip.append(_of_torch("AvgPool", spatial_dims)(stride))
        if in_channels != channels:
            self.skip.append(conv_nd(spatial_dims)(in_channels, channels, 1, bias=False))
            self.skip.append(norm_nd(norm, spatial_dims, channels))
        self.activation = nn.LeakyReLU(0.01, inplace=True)
        nn.init.zeros_(self.convs[-1].weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(self.skip(x) + self.convs(x))
        return result


def _of_torch(name: str, spatial_dims: int) -> _Builder:
    if spatial_dims not in (2, 3):
        raise ValueError(f"spatial_dims must be 2 or 3, got {spatial_dims}")
    builder: _Builder = getattr(nn, f"{name}{spatial_dims}d")
    return builder
