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
from medconv.convs.parametrization import Prior, check_free, drawn, install, note_error

CROSS = "cross"


class MaskedPrior(Prior):
    """W = (mask * true weight)[:, channels]; the gradient reaches the true weight exactly.

    Shape: original (out, wide_in, *kernel_size) -> weight (out, in, *kernel_size).
    """

    mask: Tensor
    channels: Tensor | None

    def __init__(self, mask: Tensor, channels: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.register_buffer("channels", channels)
        self.leading = channels is not None and torch.equal(
            channels, torch.arange(len(channels), device=channels.device)
        )

    def forward(self, original: Tensor) -> Tensor:
        mask = self.mask
        if self.channels is not None:
            mask = mask if mask.shape[1] == 1 else mask[:, self.channels]
            # a view of the first ones, instead of a copy
            original = original[:, : len(self.channels)] if self.leading else original[:, self.channels]
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
    """A convolution that uses a part of its weight.

    Args:
        conv: the convolution to give the prior to, changed in place.
        mask: numbers, usually 0 and 1, as a tensor or nested lists, of shape kernel_size, or broadcast to the
            true weight (out, wide_in, *kernel_size). `cross`: the taps on the axes through the centre.
        weight: the true weight, with at least as many input channels as the convolution; None: a new one. An
            `nn.Parameter` is shared, not copied, so that several convolutions can learn parts of it.
        channels: the input channels of the true weight that it uses, in this order; None is the first ones.
        init_from_weights: keep the present weight (times the mask) instead of drawing one of its variance.
    Raises: ValueError: a mask or weight of the wrong shape, no such channels, an even kernel for `cross`.
    Weights: out * in * taps under a mask of 0 and 1 of the kernel's shape (cross: 7 of 27); else those of the
        true weight, of which masked ones get no gradient, but weight decay still shrinks them.
    """
    check_free(conv)
    shape = (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size)
    true = shape if weight is None else tuple(weight.shape)
    if len(true) != len(shape) or true[0] != shape[0] or true[2:] != shape[2:] or true[1] < shape[1]:
        raise ValueError(f"weight must have shape (out, wide_in >= in, *kernel_size) = {shape}, got {true}")
    values = _mask(mask, conv.kernel_size, true)
    of_taps = values.numel() == prod(conv.kernel_size) and set(values.flatten().tolist()) <= {0, 1}
    if of_taps and weight is None and channels is None:
        taps = torch.eye(values.numel())[:, values.flatten() == 1]
        return install(conv, LinearPrior(conv.kernel_size, taps[None]), init_from_weights)
    prior = MaskedPrior(values, _channels(channels, shape[1], true[1]))
    dense = conv.weight.detach().clone()
    prior.to(device=dense.device).train(conv.training)
    first = drawn(prior, dense) if weight is None and not init_from_weights else None
    if weight is not None:
        conv.weight = nn.Parameter(weight.detach().clone())
    parametrize.register_parametrization(conv, "weight", prior, unsafe=True)
    if isinstance(weight, nn.Parameter):
        conv.parametrizations.weight.original = weight
    elif weight is None and init_from_weights:
        note_error(conv, conv.weight, dense)
    elif first is not None:
        with torch.no_grad():
            conv.get_parameter("parametrizations.weight.original").copy_(first)
    layer: nn.Module = conv
    return layer


def cross(kernel_size: Sequence[int]) -> Tensor:
    """The taps on the axes through the centre: 7 of 27 in 3D. Shape: kernel_size, bool."""
    if any(k % 2 == 0 for k in kernel_size):
        raise ValueError(f"kernel_size must be odd along every axis for mask=cross, got {tuple(kernel_size)}")
    grids = torch.meshgrid(*[torch.arange(k) == k // 2 for k in kernel_size], indexing="ij")
    return torch.stack(grids).sum(0) >= len(kernel_size) - 1


def _mask(mask: str | Sequence[Any] | Tensor, kernel_size: Sequence[int], shape: Sequence[int]) -> Tensor:
    if isinstance(mask, str):
        if mask != CROSS:
            raise ValueError(f"mask must be `{CROSS}`, nested lists or a tensor, got {mask!r}")
        values = cross(kernel_size)
    else:
        values = mask if isinstance(mask, Tensor) else _nested(mask)
    wide = values.reshape(*[1] * (len(shape) - values.ndim), *values.shape)
    fits = wide.ndim == len(shape) and all(a in (1, b) for a, b in zip(wide.shape, shape, strict=True))
    if not fits or tuple(wide.shape[2:]) != tuple(kernel_size):
        raise ValueError(f"mask must have shape kernel_size = {tuple(kernel_size)}, or broadcast to the "
                         f"weight's {tuple(shape)}, got {tuple(values.shape)}")  # fmt: skip
    if not torch.isfinite(values).all() or not values.any():
        raise ValueError(f"mask must be finite, and not make every weight zero, got {values.tolist()}")
    return wide.float().clone()


def _nested(mask: Sequence[Any]) -> Tensor:
    try:
        return torch.tensor(mask, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mask must be numbers in nested lists of equal lengths: {error}") from error


def _channels(channels: Sequence[int] | None, count: int, wide: int) -> Tensor | None:
    if channels is None:
        return None if count == wide else torch.arange(count)
    index = sorted(channels)
    if len(set(index)) != len(index) or len(index) != count or index[0] < 0 or index[-1] >= wide:
        raise ValueError(
            f"channels must be {count} different numbers from 0 to {wide - 1}, got {list(channels)}"
        )
    return torch.tensor(list(channels))
