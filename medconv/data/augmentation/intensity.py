"""Intensity transforms, in place. A row is one channel of one sample.

On an accelerator the selected rows are changed as one stack; on a CPU one by one, without copies. The CPU
chooses them; what changes them, functions whose names end in `_`, are whole graphs to `torch.compile`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from medconv.data.augmentation import spatial
from medconv.utils.hardware import to_device

_TAIL = 3.0  # standard deviations at which a Gaussian is cut
_TINY = 1e-7  # a smaller range or deviation is a constant image; division by 0 is avoided


def add_noise(image: Tensor, std: Tensor, seeds: Tensor) -> None:
    """Add Gaussian noise with one standard deviation for all channels of a sample.

    Shape: image (batch, channels, *spatial), std (batch,), seeds (batch,) int64.
    """
    generator = torch.Generator(image.device)
    for i in std.nonzero().flatten().tolist():
        # by sample, so that noise does not depend on the rest of the batch
        generator.manual_seed(int(seeds[i]))
        noise = torch.empty_like(image[i]).normal_(generator=generator)
        image[i].add_(noise, alpha=float(std[i]))


def soften(rows: Tensor, sigma: Tensor, resolution: Tensor) -> None:
    """Gaussian blur, then low resolution: both are linear along each axis, so one matrix per axis.

    Low resolution is down by nearest neighbour, up by linear interpolation.

    Shape:
        rows (rows, *spatial).
        sigma (rows, axes): in voxels, 0 for none.
        resolution (rows, axes): share of the voxels, 1 for all.
    """
    for axis in range(rows.ndim - 1):
        num_voxels = rows.shape[1 + axis]
        mask = (sigma[:, axis] > 0) | (resolution[:, axis] < 1)
        for selected, indices in _chosen(rows, mask):
            matrix = _softening(num_voxels, sigma[indices, axis], resolution[indices, axis])
            multiply_(selected, to_device(matrix, selected.device), axis)


def change(rows: Tensor, mask: Tensor, transform_: Callable[..., None], *values: Tensor) -> None:
    """Change the rows of a mask by one of the functions below. Shape: (rows, *spatial), the others (rows,).

    Args:
        values: arguments of the function, one for each row.
    """
    for selected, indices in _chosen(rows, mask):
        transform_(selected, *(to_device(v[indices].to(rows.dtype), rows.device) for v in values))


def multiply_(rows: Tensor, matrix: Tensor, axis: int) -> None:
    """Multiply by one matrix per row along a spatial axis. Shape: (rows, *spatial), (rows, n, n)."""
    num_rows = len(rows)
    num_voxels = rows.shape[1 + axis]
    voxels_before = rows.shape[1 : 1 + axis].numel()
    if axis == rows.ndim - 2:  # the last axis: one product less to arrange
        product = torch.bmm(rows.reshape(num_rows, voxels_before, num_voxels), matrix.mT)
    else:
        product = torch.matmul(matrix[:, None], rows.reshape(num_rows, voxels_before, num_voxels, -1))
    rows.copy_(product.reshape(rows.shape))


def scale_(rows: Tensor, gain: Tensor, offset: Tensor) -> None:
    """value * gain + offset. Shape: (rows, *spatial), the others (rows,), as in the functions below."""
    rows.mul_(_like(rows, gain))
    rows.add_(_like(rows, offset))


def stretch_(rows: Tensor, contrast: Tensor) -> None:
    """Contrast: scale values about the row's mean, clipped to its range."""
    low, high = _range(rows)
    factor = _like(rows, contrast)
    # (value - mean) * factor + mean, with the mean of the scaled values
    rows.mul_(factor)
    rows.add_(_mean(rows) * (1 / factor - 1))
    torch.minimum(rows, high, out=rows)
    torch.maximum(rows, low, out=rows)


def bend_(rows: Tensor, gamma: Tensor, inverted: bool = False) -> None:
    """Gamma: a power of the values scaled to 0..1, then mean and standard deviation are restored.

    Args:
        inverted: apply it to the inverted values.
    """
    low, high = _range(rows)
    mean, std = _moments(rows)
    width = (high - low).clamp(min=_TINY)
    # To 0..1, where 0 is the highest value if inverted.
    if inverted:
        rows.sub_(high).div_(-width)
    else:
        rows.sub_(low).div_(width)
    # rounding may leave values just below 0, of which a power is NaN
    rows.clamp_(min=0)
    rows.pow_(_like(rows, gamma))
    # Back to the mean and standard deviation from before.
    new_mean, new_std = _moments(rows)
    sign = -1 if inverted else 1
    slope = std / new_std.clamp(min=_TINY) * sign
    rows.mul_(slope)
    rows.add_(mean - slope * new_mean)


def _chosen(rows: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of a mask with their indices; changes to them are kept."""
    indices = mask.nonzero().flatten()
    if rows.device.type in spatial.ONE_BY_ONE:
        for i in indices:
            yield rows[i : i + 1], i[None]
    elif len(indices):
        on_device = to_device(indices, rows.device)
        selected = rows[on_device]  # a copy
        yield selected, indices
        rows[on_device] = selected


def _like(rows: Tensor, values: Tensor) -> Tensor:
    """One value per row, broadcastable to rows."""
    return values.reshape(-1, *(1,) * (rows.ndim - 1))


def _mean(rows: Tensor) -> Tensor:
    spatial_axes = tuple(range(1, rows.ndim))
    return rows.mean(dim=spatial_axes, keepdim=True)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row; several times faster than `torch.std`."""
    mean = _mean(rows)
    centred = (rows - mean).flatten(1)
    variance = torch.linalg.vector_norm(centred, dim=1) ** 2 / centred.shape[1]
    return mean, _like(rows, variance.sqrt())


def _range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest and highest value of each row."""
    if len(rows) == 1:  # without `dim` it is faster
        low, high = torch.aminmax(rows)
    else:
        low, high = torch.aminmax(rows.flatten(1), dim=1)
    return _like(rows, low), _like(rows, high)


def _softening(num_voxels: int, sigma: Tensor, resolution: Tensor) -> Tensor:
    """Shape: (rows,), (rows,) -> (rows, num_voxels, num_voxels)."""
    if bool((resolution == 1).all()):
        return _blur(num_voxels, sigma)
    coarse = _coarsen(num_voxels, resolution)
    if bool(sigma.any()):
        return torch.bmm(coarse, _blur(num_voxels, sigma))
    return coarse


def _blur(num_voxels: int, sigma: Tensor) -> Tensor:
    """Gaussian weights between voxels, cut at three standard deviations and normalised to sum 1."""
    positions = torch.arange(num_voxels)
    distance = (positions[:, None] - positions[None]).abs()[None]
    # rows without blur have sigma 0: so narrow a Gaussian leaves them as they are
    width = sigma[:, None, None].clamp(min=1e-3)
    weights = torch.exp(-0.5 * (distance / width) ** 2)
    weights = weights * (distance <= _TAIL * width + 0.5)
    return weights / weights.sum(2, keepdim=True)


def _coarsen(num_voxels: int, resolution: Tensor) -> Tensor:
    """Nearest-neighbour sampling of the voxels to a share of them, then linear interpolation back.

    Shape: (rows,) -> (rows, num_voxels, num_voxels).
    """
    coarse_voxels = (num_voxels * resolution[:, None].double()).round()
    coarse_voxels = coarse_voxels.clamp(min=1).float()
    last = coarse_voxels - 1
    # Of each voxel's centre, counted in coarse voxels.
    position = (torch.arange(num_voxels) + 0.5) * coarse_voxels / num_voxels - 0.5
    position = position.clamp(min=0).minimum(last)
    lower = position.floor().minimum((coarse_voxels - 2).clamp(min=0))
    upper_weight = position - lower
    matrix = torch.zeros(len(resolution), num_voxels, num_voxels)
    for step, weight in ((0, 1 - upper_weight), (1, upper_weight)):
        coarse = (lower + step).minimum(last)
        # The voxel that a coarse voxel was sampled from.
        source = ((coarse + 0.5) * (num_voxels / coarse_voxels)).floor().long()
        matrix.scatter_add_(2, source[:, :, None], weight[:, :, None])
    return matrix
