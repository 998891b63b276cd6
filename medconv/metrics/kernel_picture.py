"""A picture of a layer's kernels: blue is negative, white 0, red positive."""

import numpy as np

_BLUE = np.array([33, 102, 172], float)
_RED = np.array([178, 24, 43], float)
_GREY = 170  # of the frame of a slice
_SLICE_PIXELS = 48  # minimum of a slice's longer side
_GAP_PIXELS = 8  # between kernels
_MAX_ROWS = 4  # output channels
_MAX_COLUMNS = 4  # input channels


def kernel_picture(weight: np.ndarray) -> np.ndarray:
    """One row per output channel, one column per input channel, at most four of each, evenly spaced.

    The slices of a 3D kernel along its last axis are side by side. All share one scale: the largest absolute
    weight shown.

    Shape: weight (out_channels, in_channels, *kernel), 2 or 3 kernel axes -> (height, width, 3) uint8.
    """
    kernels = weight[_evenly_spaced(weight.shape[0], _MAX_ROWS)][
        :, _evenly_spaced(weight.shape[1], _MAX_COLUMNS)
    ]
    largest = float(np.abs(kernels).max()) or 1.0
    rows = []
    for row in kernels / largest:
        rows.append(np.concatenate([_framed(kernel) for kernel in row], 1))
    return np.concatenate(rows, 0)


def _evenly_spaced(length: int, at_most: int) -> np.ndarray:
    return np.linspace(0, length - 1, min(length, at_most)).round().astype(int)


def _framed(kernel: np.ndarray) -> np.ndarray:
    """Shape: (rows, columns) or (rows, columns, slices), from -1 to 1 -> pixels."""
    slices = [kernel] if kernel.ndim == 2 else list(np.moveaxis(kernel, -1, 0))
    frame = ((1, 1), (1, 1), (0, 0))
    panels = [np.pad(_coloured(values), frame, constant_values=_GREY) for values in slices]
    gap = ((0, _GAP_PIXELS), (0, _GAP_PIXELS), (0, 0))
    return np.pad(np.concatenate(panels, 1), gap, constant_values=255)


def _coloured(values: np.ndarray) -> np.ndarray:
    strength = np.abs(values)[..., None]
    colour = np.where(values[..., None] > 0, _RED, _BLUE)
    pixels = (255 * (1 - strength) + colour * strength).astype(np.uint8)
    scale = -(-_SLICE_PIXELS // max(values.shape))  # rounded up
    return np.kron(pixels, np.ones((scale, scale, 1), np.uint8))
