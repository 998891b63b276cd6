"""Intensity transforms, in place. A row is one channel of one sample.

On an accelerator the selected rows are changed as one stack; on a CPU one by one, without copies. The CPU
chooses them; what changes them, functions whose names end in `_`, are whole graphs to `torch.compile`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from medconv.data.augmentation import spatial
from medconv.utils.hardware import to_device

_TAIL = 3.0  # standard deviations at which a Gaussian is cut


def add_noise(image: Tensor, std: Tensor, seeds: Tensor) -> None:
    """Add Gaussian noise with one standard deviation for all channels of a sample.

    Shape: image (batch, channels, *spatial), std (batch,), seeds (batch,) int64.
    """
    generator = torch.Generator(image.device)
    for i in std.nonzero().flatten().tolist():
        noise = torch.empty_like(image[i]).normal_(generator=generator.manual_seed(int(seeds[i])))
        image[i].add_(noise, alpha=float(std[i]))


def soften(rows: Tensor, sigma: Tensor, resolution: Tensor) -> None:
    """Gaussian blur, then low resolution: both are linear along each axis, so one matrix per axis.

    Shape: rows (rows, *spatial); sigma (rows, axes) in voxels, 0 for none; resolution (rows, axes): share of
        the voxels, 1 for all. Down by nearest neighbour, up by linear interpolation.
    """
    for axis in range(rows.ndim - 1):
        n = rows.shape[1 + axis]
        mask = (sigma[:, axis] > 0) | (resolution[:, axis] < 1)
        for part, which in _chosen(rows, mask):
            matrix = _softening(n, sigma[which, axis], resolution[which, axis])
            multiply_(part, to_device(matrix, part.device), axis)


def scale_values(rows: Tensor, gain: Tensor, offset: Tensor) -> None:
    """value * gain + offset. Shape: rows (rows, *spatial), the others (rows,)."""
    for part, which in _chosen(rows, (gain != 1) | (offset != 0)):
        scale_(part, _there(part, gain[which]), _there(part, offset[which]))


def stretch(rows: Tensor, contrast: Tensor) -> None:
    """Contrast: scale values about the row's mean, clipped to its range. Shape: (rows, *spatial), (rows,)."""
    for part, which in _chosen(rows, contrast != 1):
        stretch_(part, _there(part, contrast[which]))


def bend(rows: Tensor, gamma: Tensor, inverted: bool) -> None:
    """Gamma: a power of the values scaled to 0..1, then mean and standard deviation are restored.

    Shape: rows (rows, *spatial), gamma (rows,), 1 for none. Args: inverted: apply it to the inverted values.
    """
    for part, which in _chosen(rows, gamma != 1):
        bend_(part, _there(part, gamma[which]), inverted)


def multiply_(rows: Tensor, matrix: Tensor, axis: int) -> None:
    """Multiply by one matrix per row along a spatial axis. Shape: (rows, *spatial), (rows, n, n)."""
    before, n = rows.shape[1 : 1 + axis].numel(), rows.shape[1 + axis]
    if axis == rows.ndim - 2:
        product = torch.bmm(rows.reshape(len(rows), before, n), matrix.mT)
    else:
        product = torch.matmul(matrix[:, None], rows.reshape(len(rows), before, n, -1))
    rows.copy_(product.reshape(rows.shape))


def scale_(rows: Tensor, gain: Tensor, offset: Tensor) -> None:
    """Shape: (rows, *spatial), the others (rows,), as in the functions below."""
    rows.mul_(_like(rows, gain)).add_(_like(rows, offset))


def stretch_(rows: Tensor, contrast: Tensor) -> None:
    (low, high), factor = _range(rows), _like(rows, contrast)
    rows.mul_(factor).add_(_mean(rows) * (1 / factor - 1))
    torch.maximum(torch.minimum(rows, high, out=rows), low, out=rows)


def bend_(rows: Tensor, gamma: Tensor, inverted: bool) -> None:
    low, high = _range(rows)
    mean, std = _moments(rows)
    width = (high - low).clamp(min=1e-7)
    rows.sub_(high if inverted else low).div_(-width if inverted else width).clamp_(min=0)
    rows.pow_(_like(rows, gamma))
    new_mean, new_std = _moments(rows)
    slope = std / new_std.clamp(min=1e-7) * (-1 if inverted else 1)
    rows.mul_(slope).add_(mean - slope * new_mean)


def _chosen(rows: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of a mask with their indices; changes to them are kept."""
    which = mask.nonzero().flatten()
    if spatial.one_by_one(rows.device):
        for i in which:
            yield rows[i : i + 1], i[None]
    elif len(which):
        there = to_device(which, rows.device)
        part = rows[there]
        yield part, which
        rows[there] = part


def _there(rows: Tensor, values: Tensor) -> Tensor:
    return to_device(values.to(rows.dtype), rows.device)


def _like(rows: Tensor, values: Tensor) -> Tensor:
    """One value per row, broadcastable to rows."""
    return values.reshape(-1, *(1,) * (rows.ndim - 1))


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(dim=tuple(range(1, rows.ndim)), keepdim=True)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row; several times faster than `torch.std`."""
    mean = _mean(rows)
    flat = (rows - mean).flatten(1)
    square = torch.linalg.vector_norm(flat, dim=1) ** 2 / flat.shape[1]
    return mean, _like(rows, square.sqrt())


def _range(rows: Tensor) -> tuple[Tensor, Tensor]:
    single = len(rows) == 1  # the whole is quicker
    low, high = torch.aminmax(rows) if single else torch.aminmax(rows.flatten(1), dim=1)
    return _like(rows, low), _like(rows, high)


def _softening(n: int, sigma: Tensor, resolution: Tensor) -> Tensor:
    """Shape: (rows,), (rows,) -> (rows, n, n)."""
    if bool((resolution == 1).all()):
        return _blur(n, sigma)
    coarse = _coarsen(n, resolution)
    return torch.bmm(coarse, _blur(n, sigma)) if bool(sigma.any()) else coarse


def _blur(n: int, sigma: Tensor) -> Tensor:
    """Gaussian weights between n voxels, cut at three standard deviations and normalised to sum 1."""
    away = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs()[None]
    wide = sigma[:, None, None].clamp(min=1e-3)
    weights = torch.exp(-0.5 * (away / wide) ** 2) * (away <= _TAIL * wide + 0.5)
    return weights / weights.sum(2, keepdim=True)


def _coarsen(n: int, resolution: Tensor) -> Tensor:
    """Nearest-neighbour sampling of n voxels to a share of them, then linear interpolation back."""
    kept = (n * resolution[:, None].double()).round().clamp(min=1).float()
    position = ((torch.arange(n) + 0.5) * kept / n - 0.5).clamp(min=0).minimum(kept - 1)
    lower = position.floor().minimum((kept - 2).clamp(min=0))
    matrix = torch.zeros(len(resolution), n, n)
    for step, weight in ((0, 1 - (position - lower)), (1, position - lower)):
        source = (((lower + step).minimum(kept - 1) + 0.5) * (n / kept)).floor().long()
        matrix.scatter_add_(2, source[:, :, None], weight[:, :, None])
    return matrix
