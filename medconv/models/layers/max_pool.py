"""Max pooling with a deterministic backward pass, which `nn.MaxPool3d` lacks on CUDA."""

from math import prod

from torch import Tensor, nn


class WindowMaxPool3d(nn.MaxPool3d):
    """`nn.MaxPool3d` without overlap, as a maximum over an axis; the first of equal values gets the gradient.

    Shape:
        (batch, channels, D, H, W) -> (batch, channels, D // d, H // h, W // w) for a kernel of (d, h, w).
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *size = x.shape
        kernel_size = _triple(self.kernel_size)
        counts = [voxels // window for voxels, window in zip(size, kernel_size, strict=True)]
        # Voxels after the last whole window do not count.
        for axis, (count, window) in enumerate(zip(counts, kernel_size, strict=True)):
            x = x.narrow(2 + axis, 0, count * window)
        depth, height, width = kernel_size
        out_depth, out_height, out_width = counts
        split = x.reshape(batch, channels, out_depth, depth, out_height, height, out_width, width)
        by_window = split.permute(0, 1, 2, 4, 6, 3, 5, 7)  # what is inside of a window goes last
        windows = by_window.reshape(batch, channels, *counts, prod(kernel_size))
        return windows.max(-1).values


def swap_pools(network: nn.Module) -> int:
    """Make every suitable `nn.MaxPool3d` a WindowMaxPool3d, in place; returns their number."""
    pools = [layer for layer in network.modules() if type(layer) is nn.MaxPool3d and _suits(layer)]
    for layer in pools:
        layer.__class__ = WindowMaxPool3d
    return len(pools)


def _suits(layer: nn.MaxPool3d) -> bool:
    """Whether the windows lie side by side and the output is one tensor."""
    if layer.ceil_mode or layer.return_indices:
        return False
    is_disjoint = _triple(layer.kernel_size) == _triple(layer.stride)
    is_unpadded = _triple(layer.padding) == (0, 0, 0)
    is_undilated = _triple(layer.dilation) == (1, 1, 1)
    return is_disjoint and is_unpadded and is_undilated


def _triple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value,) * 3 if isinstance(value, int) else tuple(value)
