"""The encoder that our networks share, and the image-level network made of it (`model=encoder`)."""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from medconv.models.layers.blocks import ConvBlock, ResidualBlock, conv_nd


class Stages(nn.Module):
    """Blocks of `convs_per_stage` convolutions, joined by convolutions whose kernel is their stride.

    Unlike a 3-kernel with stride 2 on an even grid, these keep mirror symmetry. The `conv` group may replace
    all convolutions with a wider kernel.
    Args: as of `UNet`; the attribute `channels` keeps them.
    Raises: ValueError: lists that do not fit together; of `features`, a size that `divisor` does not divide.
    """

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
        if len(strides) != len(channels) - 1:
            raise ValueError(
                f"strides must have one entry fewer than channels ({len(channels)}), got {len(strides)}"
            )
        steps = [_per_axis(s, spatial_dims, "strides") for s in strides]
        self.channels = tuple(channels)
        self.divisor = tuple(prod(step[axis] for step in steps) for axis in range(spatial_dims))
        convs = [convs_per_stage] * len(channels) if isinstance(convs_per_stage, int) else convs_per_stage
        if len(convs) != len(channels) or min(convs) < 1:
            raise ValueError(
                f"convs_per_stage must be one number from 1, or {len(channels)}, got {convs_per_stage}"
            )
        self._steps = steps
        self._block = (tuple(convs), _kernels(kernel_size, len(channels), spatial_dims), norm)
        if residual_blocks is not None and len(residual_blocks) < len(channels):
            raise ValueError(
                f"residual_blocks must have {len(channels)} entries or more, one per stage, "
                f"got {list(residual_blocks)}"
            )
        first = [in_channels, *(channels if strided else channels[1:])]
        block_strides = [1, *(steps if strided else [1] * len(steps))]
        self.encoder = nn.ModuleList(
            self.block(c, stage, stride)
            if residual_blocks is None
            else self.residual(c, stage, residual_blocks[stage], stride)
            for stage, (c, stride) in enumerate(zip(first, block_strides, strict=False))
        )
        joins = zip(channels, channels[1:], steps, strict=False)
        self.down = nn.ModuleList(
            nn.Identity() if strided else conv_nd(spatial_dims)(fine, coarse, s, stride=s)
            for fine, coarse, s in joins
        )
        self.add_outputs(out_channels)
        self.apply(initialise)

    def block(self, in_channels: int, stage: int, stride: int | Sequence[int] = 1) -> ConvBlock:
        convs, kernels, norm = self._block
        channels = [in_channels, *[self.channels[stage]] * convs[stage]]
        return ConvBlock(len(self.divisor), channels, kernels[stage], norm, stride)

    def residual(
        self, in_channels: int, stage: int, blocks: int, stride: int | Sequence[int] = 1
    ) -> nn.Sequential:
        """Residual blocks; the first stage begins with a convolution from the image to its channels."""
        (_, kernels, norm), channels, dims = self._block, self.channels[stage], len(self.divisor)
        stem = [] if stage else [ConvBlock(dims, [in_channels, channels], kernels[stage], norm)]
        into, kernel = in_channels if stage else channels, kernels[stage]
        first = ResidualBlock(dims, into, channels, kernel, norm, stride)
        more = (ResidualBlock(dims, channels, channels, kernel, norm) for _ in range(blocks - 1))
        return nn.Sequential(*stem, first, *more)

    def add_outputs(self, out_channels: int) -> None:
        """Add what the network has beyond these stages."""
        raise NotImplementedError

    def features(self, x: Tensor) -> list[Tensor]:
        """The output of each stage, finest first.

        Shape: (batch, in_channels, *spatial) -> (batch, channels[i], *spatial).
        """
        size = tuple(x.shape[2:])
        if len(size) != len(self.divisor) or any(s % d for s, d in zip(size, self.divisor, strict=True)):
            raise ValueError(f"the spatial size must be divisible by {self.divisor} axis by axis, got {size}")
        outputs = [self.encoder[0](x)]
        for down, block in zip(self.down, self.encoder[1:], strict=True):
            outputs.append(block(down(outputs[-1])))
        return outputs


class Encoder(Stages):
    """The encoder of our U-Net, global average pooling, and a linear layer.

    The linear layer is a 1x1 convolution, which `conv=mirror` can make invariant to flips.

    Shape: (batch, in_channels, *spatial) -> (batch, out_channels), logits.
    Args: as of `UNet`. Raises: ValueError: as of `Stages`.
    """

    def add_outputs(self, out_channels: int) -> None:
        self.head = conv_nd(len(self.divisor))(self.channels[-1], out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.features(x)[-1].mean(list(range(2, x.ndim)), keepdim=True))
        return x.flatten(1)


def initialise(layer: nn.Module) -> None:
    """Initialise the convolutions of our own networks, for `Module.apply`."""
    if isinstance(layer, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        nn.init.kaiming_normal_(layer.weight, a=0.01)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _per_axis(value: int | Sequence[int], spatial_dims: int, name: str) -> tuple[int, ...]:
    axes = (value,) * spatial_dims if isinstance(value, int) else tuple(value)
    if len(axes) != spatial_dims or any(a < 1 for a in axes):
        raise ValueError(f"{name}: needs {spatial_dims} positive numbers, one per axis, got {value}")
    return axes


def _kernels(
    kernel_size: int | Sequence[int | Sequence[int]], stages: int, spatial_dims: int
) -> list[tuple[int, ...]]:
    per_stage = [kernel_size] * stages if isinstance(kernel_size, int) else list(kernel_size)
    if len(per_stage) != stages:
        raise ValueError(
            f"kernel_size must be one number or have {stages} entries, one per stage, got {len(per_stage)}"
        )
    kernels = [_per_axis(k, spatial_dims, "kernel_size") for k in per_stage]
    if any(k % 2 == 0 for kernel in kernels for k in kernel):
        raise ValueError(f"kernel_size must be odd along every axis, got {kernel_size}")
    return kernels
