"""`conv=masked`: a weight times a mask, optionally for a subset of the weight's input channels.

A mask of 0 and 1 over the taps alone leaves masked taps out: they are neither stored nor trained.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from medconv.convs.linear import LinearPrior
from medconv.convs.parametrization import Prior, check_free, install

CROSS = "cross"


class MaskedPrior(Prior):
    """W = (mask * true weight)[:, channels]; the gradient reaches the true weight exactly.

    Shape:
        original (out, wide_in, *kernel_size) -> weight (out, in, *kernel_size).
    Args:
        mask: broadcasts to the original.
        channels: (in,), the inputs of the original that the weight has; None: all.
    """

    mask: Tensor
    channels: Tensor | None

    def __init__(self, mask: Tensor, channels: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.register_buffer("channels", channels)
        self.takes_first_channels = channels is not None and torch.equal(
            channels, torch.arange(len(channels), device=channels.device)
        )

    def forward(self, original: Tensor) -> Tensor:
        mask = self.mask
        if self.channels is not None:
            if mask.shape[1] > 1:
                mask = mask[:, self.channels]
            if self.takes_first_channels:  # a view instead of a copy
                original = original[:, : len(self.channels)]
            else:
                original = original[:, self.channels]
        with torch.autocast(original.device.type, enabled=False):
            return original * mask.to(original.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.detach().clone()


def masked(
    conv: Any,
    *,
    mask: str | Sequence[Any] | Tensor = CROSS,
    weight: Tensor | None = None,
    channels: Sequence[int] | None = None,
    init_from_weights: bool = False,
) -> nn.Module:
    """A convolution that uses only some entries of its weight.

    Args:
        conv: the convolution to give the prior to, changed in place.
        mask: numbers, usually 0 and 1, as a tensor or nested lists, of shape kernel_size, or broadcast to the
            true weight (out, wide_in, *kernel_size). `cross`: the taps on the axes through the centre.
        weight: the true weight, with at least as many input channels as the convolution; None: a new one. An
            `nn.Parameter` is shared, not copied, so that several convolutions can learn parts of it.
        channels: the input channels of the true weight that it uses, in this order; None is the first ones.
        init_from_weights: keep the present weight (times the mask) instead of drawing one of its variance.
    Raises:
        ValueError: a mask or weight of the wrong shape, no such channels, an even kernel for `cross`.
    Weights: out * in * taps under a mask of 0 and 1 of the kernel's shape (cross: 7 of 27); else those of the
        true weight, of which masked ones get no gradient, but weight decay still shrinks them.
    """
    check_free(conv)
    shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    true_shape = shape if weight is None else tuple(weight.shape)
    _check_true_shape(true_shape, shape)
    values = _mask(mask, conv.kernel_size, true_shape)
    if weight is None and channels is None and _selects_taps(values, conv.kernel_size):
        inside = values.flatten() == 1
        mixture = torch.eye(values.numel())[:, inside]  # (taps, taps under the mask)
        return install(conv, LinearPrior(conv.kernel_size, mixture[None]), init_from_weights)
    # Another mask, or channels of a wider weight: all of the true weight is stored.
    prior = MaskedPrior(values, _channels(channels, shape[1], true_shape[1]))
    if weight is None:
        return install(conv, prior, init_from_weights)
    prior.to(device=conv.weight.device).train(conv.training)
    return _install_on_weight(conv, prior, weight)


def cross(kernel_size: Sequence[int]) -> Tensor:
    """The taps on the axes through the centre: 7 of 27 in 3D.

    Shape:
        kernel_size, bool.
    Raises:
        ValueError: an even kernel axis, which has no centre.
    """
    if any(size % 2 == 0 for size in kernel_size):
        raise ValueError(f"kernel_size must be odd along every axis for mask=cross, got {tuple(kernel_size)}")
    # along each axis the one tap at the centre
    is_central = [torch.arange(size) == size // 2 for size in kernel_size]
    grids = torch.meshgrid(*is_central, indexing="ij")
    return torch.stack(grids).sum(0) >= len(kernel_size) - 1  # off the centre along one axis at most


def _install_on_weight(conv: Any, prior: MaskedPrior, weight: Tensor) -> nn.Module:
    """Put the prior on a weight that may have more inputs, and that other convolutions may share."""
    conv.weight = nn.Parameter(weight.detach().clone())
    parametrize.register_parametrization(conv, "weight", prior, unsafe=True)
    # `register_parametrization` keeps a tensor of its own; this shares the caller's.
    if isinstance(weight, nn.Parameter):
        conv.parametrizations.weight.original = weight
    layer: nn.Module = conv
    return layer


def _check_true_shape(true_shape: Sequence[int], shape: Sequence[int]) -> None:
    fits = (
        len(true_shape) == len(shape)
        and true_shape[0] == shape[0]
        and true_shape[1] >= shape[1]
        and true_shape[2:] == shape[2:]
    )
    if not fits:
        raise ValueError(
            f"weight must have shape (out, wide_in >= in, *kernel_size) = {shape}, got {true_shape}"
        )


def _selects_taps(values: Tensor, kernel_size: Sequence[int]) -> bool:
    """Whether the mask is 0 and 1 and the same for all channels, so that masked taps need no storage."""
    is_per_tap = values.numel() == prod(kernel_size)
    return is_per_tap and set(values.flatten().tolist()) <= {0, 1}


def _mask(mask: str | Sequence[Any] | Tensor, kernel_size: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The mask with as many axes as a weight of this shape, to which it broadcasts."""
    if isinstance(mask, str):
        if mask != CROSS:
            raise ValueError(f"mask must be `{CROSS}`, nested lists or a tensor, got {mask!r}")
        values = cross(kernel_size)
    else:
        values = mask if isinstance(mask, Tensor) else _nested(mask)
    missing_axes = len(shape) - values.ndim
    # Axes are added in front: a mask of the kernel's shape is the same for all channels.
    wide = values.reshape(*[1] * missing_axes, *values.shape)
    broadcasts = wide.ndim == len(shape) and all(
        size in (1, full_size) for size, full_size in zip(wide.shape, shape, strict=True)
    )
    if not broadcasts or tuple(wide.shape[2:]) != tuple(kernel_size):
        raise ValueError(
            f"mask must have shape kernel_size = {tuple(kernel_size)}, or broadcast to the "
            f"weight's {tuple(shape)}, got {tuple(values.shape)}"
        )
    if not torch.isfinite(values).all() or not values.any():
        raise ValueError(f"mask must be finite, and not make every weight zero, got {values.tolist()}")
    return wide.float().clone()


def _nested(mask: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(mask, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mask must be numbers in nested lists of equal lengths: {error}") from error


def _channels(channels: Sequence[int] | None, count: int, wide_count: int) -> Tensor | None:
    """The indices of `count` input channels of the true weight; None: all of them, in order."""
    if channels is None:
        return None if count == wide_count else torch.arange(count)
    index = sorted(channels)
    is_distinct = len(set(index)) == len(index)
    is_in_range = bool(index) and index[0] >= 0 and index[-1] < wide_count
    if len(index) != count or not is_distinct or not is_in_range:
        raise ValueError(
            f"channels must be {count} different numbers from 0 to {wide_count - 1}, got {list(channels)}"
        )
    return torch.tensor(list(channels))
