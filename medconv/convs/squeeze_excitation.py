"""`conv=se`: squeeze-and-excitation after a convolution."""

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from medconv.convs.parametrization import CONVS, Foldable

_ADAPTIVE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class SqueezeExcitation(Foldable, fold_is_tested=True):
    """Squeeze-and-excitation: scales each channel by a weight computed from the means over the whole image.

    Shape:
        (batch, channels, *spatial) -> the same.
    Args:
        spatial_dims: 1, 2 or 3.
        channels: of input and output.
        reduction: hidden channels are channels / reduction, at least 1.
    Source: Hu et al. 2018, arXiv:1709.01507.
    """

    def __init__(self, spatial_dims: int, channels: int, reduction: int) -> None:
        super().__init__()
        conv = CONVS[spatial_dims - 1]
        hidden_channels = max(1, channels // reduction)
        self.pool = _ADAPTIVE_POOLS[spatial_dims - 1](1)
        # The paper's linear layers, as 1x1 convolutions: no reshape between them and the image.
        self.reduce = conv(channels, hidden_channels, 1)
        self.activation = nn.ReLU()
        self.expand = conv(hidden_channels, channels, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x):  # type: ignore[no-untyped-def]  # fx copies annotations into code that `torch.save` cannot read
        squeezed = self.pool(x)
        hidden = self.activation(self.reduce(squeezed))
        return x * self.gate(self.expand(hidden))

    def folded(self) -> nn.Module:
        """The same, of torch modules only."""
        return fx.symbolic_trace(self)


def se(
    conv: Any,
    *,
    reduction: int = 8,
    inner: Callable[..., nn.Module] | None = None,
    init_from_weights: bool = False,
) -> nn.Module:
    """The convolution, then squeeze-and-excitation over its outputs.

    Args:
        conv: the convolution to wrap, kept as it is.
        reduction: hidden channels are out / reduction, at least 1.
        inner: another convolution of this package to put in its place first.
        init_from_weights: `inner` projects the present weight; without `inner` it is kept in any case.
    Returns:
        `nn.Sequential` of the convolution and the excitation.
    Raises:
        ValueError: reduction below 1.
    Weights: those of the convolution, and 2 * out^2 / reduction.
    """
    if reduction < 1:
        raise ValueError(f"reduction must be at least 1, got {reduction}")
    excitation: Any = SqueezeExcitation(len(conv.kernel_size), conv.out_channels, reduction)
    excitation.to(conv.weight.device, conv.weight.dtype)
    if inner is not None:
        conv = inner(conv, init_from_weights=True) if init_from_weights else inner(conv)
    return nn.Sequential(conv, excitation)
