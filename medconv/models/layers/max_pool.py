"""Max pooling with a deterministic backward pass, which `nn.MaxPool3d` lacks on CUDA."""

from math import prod

from torch import Tensor, nn


class WindowMaxPool3d(nn.MaxPool3d):
    """`nn.MaxPool3d` without overlap, as a maximum over an axis; the first of equal values gets the gradient.

    Shape:
        (batch, channels, D, H, W) -> (batch, channels, D // d, H // h, W // w) for a kernel of (d, h, w).
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, channels = x.shape[:2]
        kernel_size = _triple(self.kernel_size)
        out_size = []
        split_size = []
        for axis, window in enumerate(kernel_size, start=2):
            out_voxels = x.shape[axis] // window
            # Voxels after the last whole window do not count.
            x = x.narrow(axis, 0, out_voxels * window)
            out_size.append(out_voxels)
            split_size += [out_voxels, window]
        split = x.reshape(batch, channels, *split_size)
        # (N, C, D', d, H', h, W', w) -> (N, C, D', H', W', d, h, w): what is inside of a window goes last
        by_window = split.permute(0, 1, 2, 4, 6, 3, 5, 7)
        windows = by_window.reshape(batch, channels, *out_size, prod(kernel_size))
        return windows.max(-1).values


def swap_pools(network: nn.Module) -> int:
    """Make every suitable `nn.MaxPool3d` a WindowMaxPool3d, in place; returns their number."""
    swapped = 0
    for layer in network.modules():
        # not of subclasses, which may have a forward of their own
        if type(layer) is nn.MaxPool3d and _suits(layer):
            layer.__class__ = WindowMaxPool3d
            swapped += 1
    return swapped


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
