"""Convolutions with fewer operations in more launches: `bottleneck`, `separable`; and the wrapper `se`.

They are faster only if arithmetic is the limit, not memory traffic or launches; `medconv.convs.cost_model`
predicts this from sizes.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from medconv.convs.parametrization import Conv, Foldable, check_replaceable, note_error, rms


def bottleneck(
    conv: Conv,
    *,
    ratio: float = 0.25,
    channels: tuple[int, int] | int | None = None,
    init_from_weights: bool = False,
) -> nn.Module:
    """1x1 to few channels, a spatial convolution on those, 1x1 back; no norm or activation between.

    Args:
        conv: the convolution to replace; `groups` must be 1.
        ratio: intermediate channels as a share of the inputs and of the outputs.
        channels: instead of `ratio`: one number, or (after the first 1x1, after the spatial convolution).
        init_from_weights: start from the truncated Tucker-2 decomposition of the present weight.
    Returns: `nn.Sequential` of three plain convolutions; their product has the old weight's variance.
    Raises: ValueError: a grouped convolution, ratio not in (0, 1], channels below 1.
    Weights: in*a + a*b*k^N + b*out, against in*out*k^N.
    Source: Tucker 1966, doi:10.1007/BF02289464; for convolutions Kim et al. 2016, arXiv:1511.06530.
    """
    check_replaceable(conv, "bottleneck")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must lie in (0, 1], got {ratio}")
    if channels is None:
        channels = (max(1, round(conv.in_channels * ratio)), max(1, round(conv.out_channels * ratio)))
    a, b = (channels, channels) if isinstance(channels, int) else tuple(channels)
    if a < 1 or b < 1:
        raise ValueError(f"channels must be at least 1, got {(a, b)}")
    dense = conv.weight.detach()
    parts = nn.Sequential(
        _point(conv, conv.in_channels, a, False), _spatial(conv, a, b), _point(conv, b, conv.out_channels)
    )
    if init_from_weights:
        sizes = min(a, conv.in_channels), min(b, conv.out_channels)
        down, core, up = _tucker(dense.double().flatten(2), *sizes)
        _assign(parts, 0, down.t()[..., None])
        _assign(parts, 1, core)
        _assign(parts, 2, up[..., None])
    _finish(parts, conv, dense, init_from_weights)
    return parts


def separable(conv: Conv, *, depth_multiplier: int = 1, init_from_weights: bool = False) -> nn.Module:
    """Depthwise, then pointwise.

    Args:
        conv: the convolution to replace; `groups` must be 1.
        depth_multiplier: filters per input channel.
        init_from_weights: start from the present weight's singular value decomposition, input by input.
    Returns: `nn.Sequential` of two plain convolutions; their product has the old weight's variance.
    Raises: ValueError: a grouped convolution, depth_multiplier below 1.
    Weights: m*in*k^N + m*in*out, against in*out*k^N.
    Source: Chollet 2017, arXiv:1610.02357; no norm between the two here.
    """
    check_replaceable(conv, "separable")
    if depth_multiplier < 1:
        raise ValueError(f"depth_multiplier must be at least 1, got {depth_multiplier}")
    into, wide = conv.in_channels, conv.in_channels * depth_multiplier
    dense = conv.weight.detach()
    parts = nn.Sequential(_spatial(conv, into, wide, groups=into), _point(conv, wide, conv.out_channels))
    if init_from_weights:
        per_input = dense.double().flatten(2).transpose(0, 1)  # (in, out, taps)
        u, s, v = torch.linalg.svd(per_input, full_matrices=False)
        rank = min(depth_multiplier, s.shape[1])
        _assign(parts, 0, _padded(v[:, :rank], depth_multiplier).reshape(wide, 1, -1))
        points = _padded((u * s[:, None]).transpose(1, 2)[:, :rank], depth_multiplier).reshape(wide, -1)
        _assign(parts, 1, points.t()[..., None])
    _finish(parts, conv, dense, init_from_weights)
    return parts


class SqueezeExcitation(Foldable):
    """Squeeze-and-excitation: scales each channel by a weight computed from the means over the whole image.

    Shape: (batch, channels, *spatial) -> the same. Source: Hu et al. 2018, arXiv:1709.01507.
    """

    def __init__(self, spatial_dims: int, channels: int, reduction: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial_dims - 1]
        self.pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[spatial_dims - 1](1)
        self.reduce = conv(channels, max(1, channels // reduction), 1)
        self.activation = nn.ReLU()
        self.expand = conv(max(1, channels // reduction), channels, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x):  # type: ignore[no-untyped-def]  # fx copies annotations into code that `torch.save` cannot read
        return x * self.gate(self.expand(self.activation(self.reduce(self.pool(x)))))

    def folded(self) -> nn.Module:
        """The same, of torch modules only."""
        return fx.symbolic_trace(self)


def se(conv: Any, *, reduction: int = 8, inner: Callable[[nn.Module], nn.Module] | None = None) -> nn.Module:
    """The convolution, then squeeze-and-excitation over its outputs.

    Args:
        conv: the convolution to wrap, kept as it is.
        reduction: hidden channels are out / reduction, at least 1.
        inner: another convolution of this package to put in its place first.
    Returns: `nn.Sequential` of the convolution and the excitation.
    Raises: ValueError: reduction below 1.
    Weights: those of the convolution, and 2 * out^2 / reduction.
    """
    if reduction < 1:
        raise ValueError(f"reduction must be at least 1, got {reduction}")
    dims, channels, device = len(conv.kernel_size), conv.out_channels, conv.weight.device
    excitation: Any = SqueezeExcitation(dims, channels, reduction).to(device, conv.weight.dtype)
    return nn.Sequential(conv if inner is None else inner(conv), excitation)


def product_weight(parts: Any) -> Tensor:
    """The dense kernel (out, in, *kernel_size), float64, that a `bottleneck` or `separable` amounts to."""
    first, *between, last = (part.weight.detach().double().flatten(2) for part in parts)
    if between:
        dense = torch.einsum("ob,bak,ai->oik", last[..., 0], between[0], first[..., 0])
        return dense.view(*dense.shape[:2], *parts[1].kernel_size)
    split = (parts[0].in_channels, -1)  # inputs, and filters per input
    point, depth = last[..., 0].unflatten(1, split), first[:, 0].unflatten(0, split)
    dense = torch.einsum("oim,imk->oik", point, depth)
    return dense.view(*dense.shape[:2], *parts[0].kernel_size)


def _like(conv: Any, into: int, out: int, size: Any, **settings: Any) -> nn.Module:
    cls = next(c for c in type(conv).__mro__ if c in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return cls(into, out, size, device=conv.weight.device, dtype=conv.weight.dtype, **settings)


def _point(conv: Any, into: int, out: int, bias: bool | None = None) -> Any:
    """1x1; the last of a chain has the bias of the convolution that it replaces."""
    layer: Any = _like(conv, into, out, 1, bias=conv.bias is not None and bias is None)
    if layer.bias is not None:
        assert conv.bias is not None
        layer.bias.data.copy_(conv.bias.detach())
    return layer


def _spatial(conv: Conv, into: int, out: int, groups: int = 1) -> nn.Module:
    same: Any = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "padding_mode")}
    return _like(conv, into, out, conv.kernel_size, **same, groups=groups, bias=False)


def _tucker(dense: Tensor, a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated higher-order SVD of (out, in, taps). Returns: (in, a), (b, a, taps), (out, b)."""
    up = torch.linalg.svd(dense.flatten(1), full_matrices=False)[0][:, :b]
    down = torch.linalg.svd(dense.transpose(0, 1).flatten(1), full_matrices=False)[0][:, :a]
    return down, torch.einsum("oik,ob,ia->bak", dense, up, down), up


def _padded(values: Tensor, rows: int) -> Tensor:
    """Axis 1 padded with zeros, for a depth multiplier above the rank."""
    return torch.cat([values, values.new_zeros(len(values), rows - values.shape[1], values.shape[2])], 1)


def _assign(parts: Any, index: int, weight: Tensor) -> None:
    """Copy into the first rows and columns of a part's weight; the rest, beyond the rank, is zero."""
    layer = parts[index]
    full = torch.zeros_like(layer.weight.detach()).flatten(2)
    full[: weight.shape[0], : weight.shape[1]] = weight.to(full.dtype)
    layer.weight.data.copy_(full.view_as(layer.weight))


@torch.no_grad()
def _finish(parts: Any, conv: Conv, dense: Tensor, init_from_weights: bool) -> None:
    """Note the error of a projected weight, or draw new ones whose product has the old weight's variance."""
    parts.requires_grad_(conv.weight.requires_grad)
    if init_from_weights:
        note_error(parts, product_weight(parts), dense)
        return
    for part in parts:
        part.weight.normal_(std=prod(part.weight.shape[1:]) ** -0.5)
    if rms(dense) == 0:  # zero at the start: only the last step, or none would ever get a gradient
        parts[-1].weight.zero_()
        return
    gain = (rms(dense) / rms(product_weight(parts))) ** (1 / len(parts))
    for part in parts:
        part.weight.mul_(gain)
