"""A prediction on the grid of the native content, a slab of planes at a time.

Of 105 classes on 512 x 512 x 700 voxels all planes would be 77 GB, and those of the prepared grid still 14.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from medconv.data.preprocessing.preprocess import CropInfo
from medconv.data.preprocessing.resampling import nearest

_VOXELS = 2**20  # of a slab on the native grid; 4 MiB for each array of one channel


@dataclass(frozen=True)
class Slab:
    """Neighbouring planes of the content.

    Args:
        first, stop: the planes.
        sources: the planes of a prediction that they are interpolated between, and those since the slab
            before.
    """

    first: int
    stop: int
    sources: slice


@dataclass(frozen=True)
class SlabGrid:
    """The slabs of an image, and how a prediction gets there.

    Args:
        crop_info: of the image.
        axis: of the planes, in canonical axes.
        source_length: planes of the prediction.
    """

    crop_info: CropInfo
    axis: int
    source_length: int

    @property
    def length(self) -> int:
        """Planes of the content."""
        return self.crop_info.content_shape[self.axis]

    @property
    def in_plane(self) -> tuple[int, int]:
        """Native voxels of a plane of the content."""
        first, second = (
            voxels for axis, voxels in enumerate(self.crop_info.content_shape) if axis != self.axis
        )
        return first, second

    def slabs(self) -> list[Slab]:
        """The slabs of the content, in order; their sources leave out no plane of the prediction."""
        planes = max(1, _VOXELS // prod(self.in_plane))
        slabs: list[Slab] = []
        source_stop = 0
        for first in range(0, self.length, planes):
            stop = min(first + planes, self.length)
            lower, upper, _ = self._neighbours(first, stop)
            source_first = min(int(lower[0]), source_stop)
            source_stop = int(upper[-1]) + 1 if stop < self.length else self.source_length
            slabs.append(Slab(first, stop, slice(source_first, source_stop)))
        return slabs

    @property
    def planes_at_once(self) -> int:
        """Planes of a prediction that a slab needs, at most."""
        planes: list[int] = [slab.sources.stop - slab.sources.start for slab in self.slabs()]
        return max(planes)

    def channels(self, logits: Sequence[Tensor] | Tensor, slab: Slab) -> Iterator[Tensor]:
        """One channel of the slab after the other.

        Shape: logits (outputs, planes of `slab.sources`, *in_plane) -> each (planes of the slab, *in_plane),
            float32. A picture has one axis in its planes there, and two here.
        """
        lower, upper, weights = self._neighbours(slab.first, slab.stop)
        first = logits[0]
        from_lower = _indices(lower - slab.sources.start, first)
        from_upper = _indices(upper - slab.sources.start, first)
        upper_share = torch.from_numpy(weights).to(first.device)[:, None, None]
        is_interpolated = bool(weights.any())
        for channel in logits:
            missing_axes = 3 - channel.ndim  # a picture is a volume of one slice
            source = channel.float().reshape(*channel.shape, *(1,) * missing_axes)
            planes = source.index_select(0, from_lower)
            if is_interpolated:
                planes = planes.lerp_(source.index_select(0, from_upper), upper_share)
            yield self._enlarged(planes)

    def _neighbours(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The planes of the prediction below and above each plane, and the weight of the one above."""
        if self.crop_info.nearest_axis == self.axis:
            planes = nearest(self.source_length, self.length)[first:stop]
            return planes, planes, np.zeros(stop - first, np.float32)
        # As in torch with `align_corners=False`: centres of voxels, and no extrapolation.
        centres = np.arange(first, stop) + 0.5
        positions = (centres * (self.source_length / self.length) - 0.5).clip(0, self.source_length - 1)
        lower = positions.astype(np.int64)
        upper = np.minimum(lower + 1, self.source_length - 1)
        return lower, upper, (positions - lower).astype(np.float32)

    def _enlarged(self, planes: Tensor) -> Tensor:
        """Shape: (planes, *in_plane) of the prediction -> of the content."""
        nearest_axis = self.crop_info.nearest_axis
        if nearest_axis is not None and nearest_axis != self.axis:
            # Counted in the planes, the axis before which the planes' own one is missing.
            in_plane_axis = nearest_axis if nearest_axis < self.axis else nearest_axis - 1
            voxels = planes.shape[1 + in_plane_axis]
            chosen = nearest(voxels, self.in_plane[in_plane_axis])
            planes = planes.index_select(1 + in_plane_axis, _indices(chosen, planes))
        if tuple(planes.shape[1:]) == self.in_plane:
            return planes
        resized = F.interpolate(planes[:, None], size=self.in_plane, mode="bilinear", align_corners=False)
        return resized[:, 0]


class ContentArray:
    """An array on the content's grid, (R, A, S), filled slab by slab."""

    def __init__(self, grid: SlabGrid, dtype: type) -> None:
        # Not touched before it is filled, so it takes no memory where it is not.
        self.array: np.ndarray = np.empty(grid.crop_info.content_shape, dtype)
        self._planes_first = np.moveaxis(self.array, grid.axis, 0)

    def put(self, slab: Slab, values: np.ndarray) -> None:
        """Shape: values (planes of the slab, *in_plane)."""
        self._planes_first[slab.first : slab.stop] = values


def _indices(indices: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(like.device)
