"""Convolutions with fewer operations in more launches: `bottleneck` and `separable`.

They are faster only if arithmetic is the limit, not memory traffic or launches; `medconv.convs.cost_model`
predicts this from sizes.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from medconv.convs.parametrization import CONVS, Conv, check_replaceable, note_error, rms


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
    Returns:
        `nn.Sequential` of three plain convolutions; their product has the old weight's variance.
    Raises:
        ValueError: a grouped convolution, ratio not in (0, 1], channels below 1.
    Weights: in*a + a*b*k^N + b*out, against in*out*k^N.
    Source: Tucker 1966, doi:10.1007/BF02289464; for convolutions Kim et al. 2016, arXiv:1511.06530.
    """
    check_replaceable(conv, "bottleneck")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must lie in (0, 1], got {ratio}")
    narrow_in, narrow_out = _bottleneck_channels(conv, ratio, channels)
    dense = conv.weight.detach()
    chain = nn.Sequential(
        _pointwise(conv, conv.in_channels, narrow_in, is_last=False),
        _spatial(conv, narrow_in, narrow_out),
        _pointwise(conv, narrow_out, conv.out_channels, is_last=True),
    )
    if init_from_weights:
        # More channels than the weight's rank have nothing to approximate: their weights stay zero.
        rank_in = min(narrow_in, conv.in_channels)
        rank_out = min(narrow_out, conv.out_channels)
        down, core, up = _tucker(dense.double().flatten(2), rank_in, rank_out)
        _assign(chain[0], down.t()[..., None])
        _assign(chain[1], core)
        _assign(chain[2], up[..., None])
    _finish(chain, conv, dense, init_from_weights)
    return chain


def _bottleneck_channels(conv: Conv, ratio: float, channels: tuple[int, int] | int | None) -> tuple[int, int]:
    if channels is None:
        narrow_in = max(1, round(conv.in_channels * ratio))
        narrow_out = max(1, round(conv.out_channels * ratio))
    elif isinstance(channels, int):
        narrow_in = narrow_out = channels
    else:
        narrow_in, narrow_out = channels
    if narrow_in < 1 or narrow_out < 1:
        raise ValueError(f"channels must be at least 1, got {(narrow_in, narrow_out)}")
    return narrow_in, narrow_out


def separable(conv: Conv, *, depth_multiplier: int = 1, init_from_weights: bool = False) -> nn.Module:
    """Depthwise, then pointwise.

    Args:
        conv: the convolution to replace; `groups` must be 1.
        depth_multiplier: filters per input channel.
        init_from_weights: start from the present weight's singular value decomposition, input by input.
    Returns:
        `nn.Sequential` of two plain convolutions; their product has the old weight's variance.
    Raises:
        ValueError: a grouped convolution, depth_multiplier below 1.
    Weights: m*in*k^N + m*in*out, against in*out*k^N.
    Source: Chollet 2017, arXiv:1610.02357; no norm between the two here.
    """
    check_replaceable(conv, "separable")
    if depth_multiplier < 1:
        raise ValueError(f"depth_multiplier must be at least 1, got {depth_multiplier}")
    width = conv.in_channels * depth_multiplier
    dense = conv.weight.detach()
    chain = nn.Sequential(
        _spatial(conv, conv.in_channels, width, groups=conv.in_channels),
        _pointwise(conv, width, conv.out_channels, is_last=True),
    )
    if init_from_weights:
        depthwise, pointwise = _separated(dense.double().flatten(2), depth_multiplier)
        _assign(chain[0], depthwise)
        _assign(chain[1], pointwise)
    _finish(chain, conv, dense, init_from_weights)
    return chain


def product_weight(chain: Any) -> Tensor:
    """The dense kernel (out, in, *kernel_size), float64, that a `bottleneck` or `separable` amounts to."""
    weights = [layer.weight.detach().double().flatten(2) for layer in chain]
    if len(weights) == 3:
        # o, i: outputs and inputs; b, a: channels after and before the spatial convolution; k: taps
        down, core, up = weights
        dense = torch.einsum("ob,bak,ai->oik", up[..., 0], core, down[..., 0])
        return dense.view(*dense.shape[:2], *chain[1].kernel_size)
    # m: filters per input
    depthwise, pointwise = weights
    per_input = (chain[0].in_channels, -1)  # inputs, and filters per input
    mixing = pointwise[..., 0].unflatten(1, per_input)
    filters = depthwise[:, 0].unflatten(0, per_input)
    dense = torch.einsum("oim,imk->oik", mixing, filters)
    return dense.view(*dense.shape[:2], *chain[0].kernel_size)


def _like(
    conv: Any, in_channels: int, out_channels: int, kernel_size: int | Sequence[int], **settings: Any
) -> nn.Module:
    """A plain convolution of the same dimensions, device and type."""
    plain_class: Any = next(torch_class for torch_class in CONVS if isinstance(conv, torch_class))
    device, dtype = conv.weight.device, conv.weight.dtype
    layer: nn.Module = plain_class(
        in_channels, out_channels, kernel_size, device=device, dtype=dtype, **settings
    )
    return layer


def _pointwise(conv: Any, in_channels: int, out_channels: int, *, is_last: bool) -> nn.Module:
    """1x1; the last of a chain has the bias of the convolution that it replaces."""
    has_bias = is_last and conv.bias is not None
    layer = _like(conv, in_channels, out_channels, 1, bias=has_bias)
    if has_bias:
        layer.get_parameter("bias").data.copy_(conv.bias.detach())
    return layer


def _spatial(conv: Conv, in_channels: int, out_channels: int, groups: int = 1) -> nn.Module:
    """The layer of a chain that has the kernel and the geometry of the convolution."""
    return _like(
        conv,
        in_channels,
        out_channels,
        conv.kernel_size,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        padding_mode=conv.padding_mode,
        groups=groups,
        bias=False,
    )


def _tucker(dense: Tensor, rank_in: int, rank_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated higher-order SVD over inputs and outputs; taps stay as they are (Tucker-2).

    Shape:
        dense (out, in, taps) -> (in, rank_in), (rank_out, rank_in, taps), (out, rank_out).
    """
    by_output = dense.flatten(1)
    by_input = dense.transpose(0, 1).flatten(1)
    output_vectors, _, _ = torch.linalg.svd(by_output, full_matrices=False)
    input_vectors, _, _ = torch.linalg.svd(by_input, full_matrices=False)
    # The first ones carry most of the norm; the core is the weight in their coordinates.
    up = output_vectors[:, :rank_out]
    down = input_vectors[:, :rank_in]
    core = torch.einsum("oik,ob,ia->bak", dense, up, down)
    return down, core, up


def _separated(dense: Tensor, depth_multiplier: int) -> tuple[Tensor, Tensor]:
    """For each input the filters and their mixing that are nearest to its kernels, by truncated SVD.

    Shape:
        dense (out, in, taps) -> depthwise (in * m, 1, taps), pointwise (out, in * m, 1).
    """
    in_channels = dense.shape[1]
    width = in_channels * depth_multiplier
    per_input = dense.transpose(0, 1)  # (in, out, taps)
    u, s, v = torch.linalg.svd(per_input, full_matrices=False)  # one decomposition per input
    rank = min(depth_multiplier, s.shape[1])
    # the filters have unit norm, the mixing carries the singular values
    depthwise = _padded(v[:, :rank], depth_multiplier).reshape(width, 1, -1)
    scaled = (u * s[:, None]).transpose(1, 2)  # (in, rank, out)
    pointwise = _padded(scaled[:, :rank], depth_multiplier).reshape(width, -1)
    return depthwise, pointwise.t()[..., None]


def _padded(values: Tensor, rows: int) -> Tensor:
    """Axis 1 padded with zeros, for a depth multiplier above the rank."""
    batch, present_rows, columns = values.shape
    zeros = values.new_zeros(batch, rows - present_rows, columns)
    return torch.cat([values, zeros], 1)


def _assign(layer: Any, weight: Tensor) -> None:
    """Copy into the first rows and columns of a layer's weight; beyond the rank it is zero.

    Shape:
        weight (out, in, taps), with at most as many outputs and inputs as the layer.
    """
    full = torch.zeros_like(layer.weight.detach()).flatten(2)
    rows, columns = weight.shape[:2]
    full[:rows, :columns] = weight.to(full.dtype)
    layer.weight.data.copy_(full.view_as(layer.weight))


@torch.no_grad()
def _finish(chain: Any, conv: Conv, dense: Tensor, init_from_weights: bool) -> None:
    """Note the error of a projected weight, or draw new ones whose product has the old weight's variance."""
    chain.requires_grad_(conv.weight.requires_grad)
    if init_from_weights:
        note_error(chain, product_weight(chain), dense)
        return
    # He's initialisation up to a constant, which the gain below replaces
    for layer in chain:
        fan_in = prod(layer.weight.shape[1:])
        layer.weight.normal_(std=fan_in**-0.5)
    if rms(dense) == 0:
        # zero at the start, as last layers of residual blocks are: only the last step, or none would ever get
        # a gradient
        chain[-1].weight.zero_()
        return
    # the same factor for each layer, so that their product has the rms of the dense weight
    ratio = rms(dense) / rms(product_weight(chain))
    gain = ratio ** (1 / len(chain))
    for layer in chain:
        layer.weight.mul_(gain)
