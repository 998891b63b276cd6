"""Draws the pictures of docs/convolutions.md: kernels of every convolution, `python docs/kernels.py`.

Blue is negative, white 0, red positive; each kernel is scaled to its own largest weight.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from medconv.convs import (
    acs,
    ball,
    basis,
    bottleneck,
    filter_bank,
    masked,
    separable,
    spacing,
    swap_convs,
    transform,
)
from medconv.convs.factorised import product_weight
from medconv.features.equivariance.equivariant import Equivariant

FOLDER = Path(__file__).parent / "images"
CELL = 72  # pixels of a kernel's longer side


def coloured(kernel: np.ndarray) -> np.ndarray:
    """(rows, columns) of -1 to 1 -> pixels, uint8."""
    fade = 1 - abs(kernel)[..., None]
    tint = np.where(kernel[..., None] > 0, np.array([178, 24, 43]), np.array([33, 102, 172]))
    scale = max(1, CELL // max(kernel.shape))
    return np.kron((255 * fade + tint * (1 - fade)).astype(np.uint8), np.ones((scale, scale, 1), np.uint8))


def row(kernels: Tensor) -> np.ndarray:
    """Kernels (number, rows, columns), or (number, rows, columns, slices) with its slices joined, side by
    side.
    """
    cells = []
    for kernel in kernels.detach().double().numpy():
        planes = kernel[..., None] if kernel.ndim == 2 else kernel
        planes = planes / (abs(planes).max() or 1.0)
        slices = [coloured(planes[..., s]) for s in range(planes.shape[-1])]
        cells.append(padded(np.concatenate([padded(d, 1, 170) for d in slices], 1), 5, 255))
    height = max(c.shape[0] for c in cells)
    return np.concatenate(
        [np.pad(c, ((0, height - c.shape[0]), (0, 0), (0, 0)), constant_values=255) for c in cells], 1
    )


def padded(picture: np.ndarray, width: int, value: int) -> np.ndarray:
    return np.pad(picture, ((width, width), (width, width), (0, 0)), constant_values=value)


def save(name: str, *rows_of_kernels: Tensor) -> None:
    rows = [row(kernels) for kernels in rows_of_kernels]
    width = max(r.shape[1] for r in rows)
    rows = [np.pad(r, ((0, 0), (0, width - r.shape[1]), (0, 0)), constant_values=255) for r in rows]
    FOLDER.mkdir(exist_ok=True)
    Image.fromarray(np.concatenate(rows)).quantize(64).save(FOLDER / f"{name}.png", optimize=True)


def conv(size: int = 7, into: int = 8, out: int = 8) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, padding=size // 2, bias=False)


def main() -> None:
    torch.manual_seed(1)
    save("none", conv().weight[0])
    for word in ("jet", "laplacian", "lines", "gabor"):
        save(f"bank-{word}", filter_bank(word, (9, 9), None, 1.6))
    save("transform", *(transform(conv(), sigma_mm=1.4).weight[o] for o in (0, 1)))
    save("basis", basis(conv(), sigma_mm=1.4).weight[0])
    save("ball", ball(conv()).weight[0], ball(conv(), spacing_mm=(1.0, 2.0), radius_mm=3.0).weight[0])
    own = basis(conv(5), sigma_mm=1.0).weight.detach()  # a smooth kernel to read off
    rows = []
    for voxel in ((1.0, 1.0), (0.5, 0.5), (0.5, 1.5)):
        plain = conv(5)
        plain.weight.data.copy_(own)
        rows.append(spacing(plain, spacing_mm=voxel, reference_mm=1.0, init_from_weights=True).weight[0, :5])
    save("spacing", *rows)
    save("masked", masked(conv(5)).weight[0])
    network = nn.Sequential(conv(5, 1, 8), conv(5, 8, 8), conv(5, 8, 1))
    swap_convs(network, Equivariant((1,)), example=torch.zeros(1, 1, 16, 16))
    save("mirror", network[0].weight[:, 0], network[1].weight[0], network[1].weight[1])
    network = nn.Sequential(conv(3, 1, 8), conv(3, 8, 8), conv(3, 8, 1))
    swap_convs(network, Equivariant((0,), ((0, 1),)), example=torch.zeros(1, 1, 16, 16))
    save("turns", network[0].weight[:, 0], network[1].weight[0])
    volume = nn.Conv3d(4, 9, 3, padding=1)
    save("acs", acs(volume).weight[[0, 3, 6], 0])
    for name, make in {"bottleneck": partial(bottleneck, channels=2), "separable": separable}.items():
        save(name, *(product_weight(make(conv(5)))[o] for o in (0, 1)))


if __name__ == "__main__":
    main()
