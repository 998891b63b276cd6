"""Max pooling with a deterministic backward pass, which `nn.MaxPool3d` lacks on CUDA."""

from math import prod

from torch import Tensor, nn


class WindowMaxPool3d(nn.MaxPool3d):
    """`nn.MaxPool3d` without overlap, as a maximum over an axis; the first of equal values gets the gradient.

    Shape: (batch, channels, D, H, W) -> (batch, channels, D // d, H // h, W // w) for a kernel of (d, h, w).
    """

    def forward(self, x: Tensor) -> Tensor:
        kernel = _triple(self.kernel_size)
        counts = [n // k for n, k in zip(x.shape[2:], kernel, strict=True)]
        for axis, (count, size) in enumerate(zip(counts, kernel, strict=True)):
            x = x.narrow(2 + axis, 0, count * size)
        parts = [part for pair in zip(counts, kernel, strict=True) for part in pair]
        windows = x.reshape(*x.shape[:2], *parts).permute(0, 1, 2, 4, 6, 3, 5, 7)
        return windows.reshape(*x.shape[:2], *counts, prod(kernel)).max(-1).values


def swap_pools(network: nn.Module) -> int:
    """Make every suitable `nn.MaxPool3d` a WindowMaxPool3d, in place; returns their number."""
    pools = [layer for layer in network.modules() if type(layer) is nn.MaxPool3d and _suits(layer)]
    for layer in pools:
        layer.__class__ = WindowMaxPool3d
    return len(pools)


def _suits(layer: nn.MaxPool3d) -> bool:
    same = _triple(layer.kernel_size) == _triple(layer.stride)
    unpadded = _triple(layer.padding) == (0, 0, 0) and _triple(layer.dilation) == (1, 1, 1)
    return same and unpadded and not layer.ceil_mode and not layer.return_indices


def _triple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value,) * 3 if isinstance(value, int) else tuple(value)
