"""The shape of a patch: of the network's input, and as a box of the prepared image."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medconv.data.augmentation.blocks import Blocks


@dataclass(frozen=True)
class PatchShape:
    """Voxels of a patch.

    Args:
        size: along the axes that the network sees.
        slice_axis: with 2D patches from volumes, the axis across the slices; else None.
    """

    size: Sequence[int]
    slice_axis: int | None = None

    @property
    def box(self) -> tuple[int, ...]:
        """Voxels along every axis of the prepared image: 1 across the slices."""
        return self.box_of(self.size)

    def box_of(self, size: Sequence[int]) -> tuple[int, ...]:
        """Another size, such as a larger one to read, along every axis of the prepared image."""
        voxels = [int(count) for count in size]
        if self.slice_axis is not None:
            voxels.insert(self.slice_axis, 1)
        return tuple(voxels)

    def blocks_of(self, blocks: Blocks) -> Blocks:
        """Blocks of such a box along every axis of the prepared image."""
        if self.slice_axis is None:
            return blocks
        begin = np.insert(blocks.begin, self.slice_axis, 0, axis=1)
        end = np.insert(blocks.end, self.slice_axis, 1, axis=1)
        return Blocks(begin, end)

    def without_slice_axis_of(self, blocks: Blocks) -> Blocks:
        """The same blocks along the axes of `size`."""
        if self.slice_axis is None:
            return blocks
        return Blocks(
            np.delete(blocks.begin, self.slice_axis, axis=1), np.delete(blocks.end, self.slice_axis, axis=1)
        )

    def without_slice_axis(self, patch: np.ndarray) -> np.ndarray:
        """Shape: (channels, *box) -> (channels, *size)."""
        if self.slice_axis is None:
            return patch
        return patch.squeeze(1 + self.slice_axis)
