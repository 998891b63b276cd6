"""Packed samples: the blocks of their boxes, one behind the other, for augmentation on an accelerator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from medconv.data.augmentation.blocks import Blocks, whole

Sample = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class PackedReading:
    """What is read for a sample.

    Args:
        box_size: voxels, with the patch's centre.
        blocks: sample number to the blocks of that box; None: the whole box.
    """

    box_size: Sequence[int]
    blocks: Callable[[int], Blocks] | None = None

    def blocks_of(self, sample: int) -> Blocks:
        if self.blocks is None:
            return whole(self.box_size)
        return self.blocks(sample)


def pack(array: np.ndarray, blocks: Blocks) -> Tensor:
    """Blocks of an array, which lie inside of it. Shape: (channels, *spatial) -> (channels, voxels)."""
    packed = np.empty((len(array), blocks.voxels), array.dtype)
    first = 0
    for begin, end in zip(blocks.begin.tolist(), blocks.end.tolist(), strict=True):
        block = array[:, *map(slice, begin, end)]
        last = first + block[0].size
        packed[:, first:last].reshape(block.shape)[...] = block
        first = last
    return torch.from_numpy(packed)


def unpack(packed: Tensor, blocks: Tensor, box_size: Sequence[int], batch_size: int) -> Tensor:
    """The boxes of a batch, 0 where nothing was read; on the device, without waiting for it.

    Shape: packed (channels, voxels), blocks as `collate` makes them -> (batch_size, channels, *box_size).
    """
    channels, voxels = packed.shape
    begin, end = blocks.to(packed.device).unbind(1)
    size = end - begin
    # `output_size` is told, since asking the device for the sum would wait for it
    block_of_voxel = torch.repeat_interleave(size.prod(1), output_size=voxels)
    first_voxel = size.prod(1).cumsum(0) - size.prod(1)
    # a voxel's number within its block; dividing it by the block's edges, the last first, gives its position
    remainder = torch.arange(voxels, device=packed.device) - first_voxel[block_of_voxel]
    index = torch.zeros_like(remainder)
    stride = 1
    # From the last axis to the first, which is that of the samples
    for axis, edge in reversed(list(enumerate((batch_size, *box_size)))):
        length = size[block_of_voxel, axis]
        index += (begin[block_of_voxel, axis] + remainder % length) * stride
        remainder //= length
        stride *= edge
    boxes = packed.new_zeros((channels, stride))
    boxes[:, index] = packed
    return boxes.view(channels, batch_size, *box_size).transpose(0, 1)


def with_boxes(batch: Batch, box_size: Sequence[int]) -> Batch:
    """A batch of `collate` with image and label (batch, channels, *box_size) in place of blocks."""
    boxes = dict(batch)
    blocks = boxes.pop("blocks")
    for key in ("image", "label"):
        boxes[key] = unpack(batch[key], blocks, box_size, len(batch["sample"]))
    return boxes


def collate(samples: list[Sample]) -> Batch:
    """A batch of packed samples, whose voxels stand one behind the other.

    Shape: image (channels, voxels), label (1, voxels), blocks (blocks, 2, 1 + axes): begin and end in an
    array (batch, *box_size); the others as `default_collate` makes them.
    """
    blocks = []
    for number, sample in enumerate(samples):
        boxes = sample["blocks"]
        of_sample = torch.tensor([number, number + 1])
        blocks.append(torch.cat([of_sample.expand(len(boxes), 2)[..., None], boxes], 2))
    without_arrays = [_without_arrays(sample) for sample in samples]
    return {
        **default_collate(without_arrays),
        "image": torch.cat([sample["image"] for sample in samples], 1),
        "label": torch.cat([sample["label"] for sample in samples], 1),
        "blocks": torch.cat(blocks),
    }


def _without_arrays(sample: Sample) -> Sample:
    return {key: value for key, value in sample.items() if key not in ("image", "label", "blocks")}
