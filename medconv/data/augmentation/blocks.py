"""How much of an image a rotated patch needs: the box around it, and the blocks of that box which it shows.

The box around a rotated patch holds up to five times its voxels. Blocks that follow the patch hold little
more than it, so that little is read, sent between processes and copied to an accelerator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Voxels of a block along all axes but the last, along which it is as long as needed: an eighth of the patch,
# for blocks are of little use where they are as large as the patch, and many small ones take long to copy.
_EDGES = (2, 8)
_FAR = 2**30  # beyond any voxel
_ROUNDING = 0.01  # voxels by which a device's float32 positions may be off


@dataclass(frozen=True)
class Blocks:
    """Boxes of an array without common voxels.

    Shape: begin (blocks, axes): first voxels; end (blocks, axes): those after the last ones.
    """

    begin: np.ndarray
    end: np.ndarray

    @property
    def voxels(self) -> int:
        """Their number."""
        return int((self.end - self.begin).prod(1).sum())

    def shifted(self, voxels: Sequence[int] | np.ndarray) -> "Blocks":
        """The same boxes elsewhere. Args: voxels: along each axis."""
        return Blocks(self.begin + voxels, self.end + voxels)

    def inside(self, shape: Sequence[int]) -> "Blocks":
        """What of them lies in an array of this shape."""
        begin = np.maximum(self.begin, 0)
        end = np.minimum(self.end, shape)
        has_voxels = (begin < end).all(1)
        return Blocks(begin[has_voxels], end[has_voxels])


def whole(size: Sequence[int]) -> Blocks:
    """One block: an array of this size."""
    return Blocks(np.zeros((1, len(size)), int), np.array([size]))


def visible(
    matrix: np.ndarray,
    shift: np.ndarray,
    patch_size: Sequence[int],
    box_size: Sequence[int],
    displacement: np.ndarray,
) -> Blocks:
    """All voxels of a box that interpolation needs for a patch of its middle.

    The patch's voxel at p from its centre shows the box's at matrix @ p + shift from the common centre.

    Args:
        patch_size, box_size: in voxels.
        displacement: by which an elastic deformation adds to positions at most, in voxels along each axis.
    """
    begins, ends = _rows(matrix, shift, patch_size, box_size, displacement)
    is_empty = begins >= ends
    position = np.indices(begins.shape)
    firsts = [*position, begins]
    lasts = [*(position + 1), ends]
    edge = int(np.clip(min(patch_size[:-1]) // 8, *_EDGES))
    block_begin = [_per_block(np.minimum, np.where(is_empty, _FAR, first), edge) for first in firsts]
    block_end = [_per_block(np.maximum, np.where(is_empty, -_FAR, last), edge) for last in lasts]
    blocks = Blocks(np.stack(block_begin, 1), np.stack(block_end, 1))
    return blocks.inside(box_size)


def _rows(
    matrix: np.ndarray,
    shift: np.ndarray,
    patch_size: Sequence[int],
    box_size: Sequence[int],
    displacement: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """For each row along the last axis: the first voxel that is needed, and the one after the last.

    Shape: (*box_size without its last axis) each.
    """
    # from positions in the box back to positions in the patch, whose limits are known
    inverse = np.linalg.inv(matrix)
    # A neighbour that is interpolated from is less than a voxel away along each axis.
    margin = 1 + _ROUNDING + displacement
    limit = (np.array(patch_size) - 1) / 2 + abs(inverse) @ margin
    centre = (np.array(box_size) - 1) / 2 + shift
    begins = np.zeros(box_size[:-1])
    ends = np.full(box_size[:-1], float(box_size[-1]))
    for axis, far in enumerate(limit):
        # The patch's position along this axis, of the row's point next to the centre
        along = _sum_along(inverse[axis, :-1], centre[:-1], box_size[:-1])
        slope = inverse[axis, -1]
        # the row runs parallel to this face of the patch: all of it is inside, or none
        if abs(slope) * box_size[-1] < _ROUNDING:
            ends[abs(along) > far + _ROUNDING] = 0
            continue
        reach = far / abs(slope)
        middle = centre[-1] - along / slope
        begins = np.maximum(begins, np.ceil(middle - reach))
        ends = np.minimum(ends, np.floor(middle + reach) + 1)
    return begins.astype(int), ends.astype(int)


def _sum_along(factors: np.ndarray, centre: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Factors times the distance from the centre, summed over the axes. Shape: (*size)."""
    total = np.zeros(size)
    for axis, voxels in enumerate(size):
        distance = factors[axis] * (np.arange(voxels) - centre[axis])
        total += distance.reshape(-1, *(1,) * (len(size) - 1 - axis))
    return total


def _per_block(reduce: Any, values: np.ndarray, edge: int) -> np.ndarray:
    """One value for every `edge` values along each axis. Shape: (*rows) -> (blocks,)."""
    for axis, length in enumerate(values.shape):
        values = reduce.reduceat(values, np.arange(0, length, edge), axis=axis)
    return values.reshape(-1)
