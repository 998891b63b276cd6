"""Patches and their batches. A patch is a box of its prepared image.

A sample has one of two forms. Without an accelerator it is a crop, which the worker augments: as large as
augmentation needs, so that samples of a batch may differ in size (`augmented`). With one it is packed: the
blocks of its box that are visible, one behind the other (`collate_packed`, `with_boxes`); the box itself may
hold five times their voxels.

To a network that computes in half precision, images travel in it (`in_half_precision`): through shared
memory, pinned memory and the copy. Autocast to bf16 rounds its input eight times as coarsely, that to fp16 as
coarsely. On the accelerator they become fp32 again, before they are augmented.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from medconv.data.augmentation.blocks import Blocks, whole
from medconv.data.preprocessing.compressed import CompressedArray

Sample = dict[str, Any]
Batch = dict[str, Any]
_ONE_SIZE = ("annotated", "kept", "values")  # in samples of any size, and not augmented
_INT32 = 2**31
_LARGEST = torch.finfo(torch.float16).max  # 65504
_SMALLEST_NORMAL = torch.finfo(torch.float16).tiny  # 2^-14; smaller values have fewer digits


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


def crop(array: np.ndarray, corner: Sequence[int] | np.ndarray, size: Sequence[int]) -> np.ndarray:
    """A box of an array (channels, *spatial) as a copy, padded with 0 outside.

    Args:
        corner: first voxel along each axis; may be negative.
    """
    begin = np.array(corner)
    end = begin + size
    inside_begin = np.maximum(begin, 0)
    inside_end = np.minimum(end, array.shape[1:])
    inside = array[:, *map(slice, inside_begin.tolist(), inside_end.tolist())]
    if inside.shape[1:] == tuple(size):
        return np.array(inside)
    padded = np.zeros((len(array), *size), array.dtype)
    first = (inside_begin - begin).tolist()
    last = (inside_end - begin).tolist()
    padded[:, *map(slice, first, last)] = inside
    return padded


def augmented(augment: Callable[[Batch], Batch], samples: list[Sample]) -> Batch:
    """The augmented batch of samples, made in the worker."""
    if len({sample["image"].shape for sample in samples}) == 1:
        return augment(default_collate(samples))
    # Samples of different sizes (see `read_size`) stay lists, until augmentation makes them one size.
    batch = augment({key: [sample[key] for sample in samples] for key in samples[0]})
    stacked = {key: default_collate(batch[key]) for key in _ONE_SIZE if key in batch}
    return {**batch, **stacked}


def in_half_precision(collate: Callable[[list[Sample]], Batch], samples: list[Sample]) -> Batch:
    """The batch of samples whose images are rounded to fp16, if all of them fit.

    Args:
        collate: of samples; their images (channels, *spatial) all have one type.
    """
    images = [sample["image"] for sample in samples]
    halves = [image.half() if fits(image) else image for image in images]
    if any(half.dtype != torch.float16 for half in halves):
        # A sample must not depend on the batch that it is in, so those that fit are rounded here as well
        halves = [half.to(image.dtype) for half, image in zip(halves, images, strict=True)]
    return collate([{**sample, "image": half} for sample, half in zip(samples, halves, strict=True)])


def fits(image: Tensor) -> bool:
    """Whether rounding to fp16 changes no value by more than 2^-11 of the largest; false with NaN."""
    if image.numel() == 0:
        return True
    low, high = torch.aminmax(image)
    largest = max(-float(low), float(high))
    return largest == 0 or _SMALLEST_NORMAL <= largest <= _LARGEST


def pack(array: np.ndarray, blocks: Blocks) -> Tensor:
    """Blocks of an array, which lie inside of it. Shape: (channels, *spatial) -> (channels, voxels)."""
    if isinstance(array, CompressedArray) and blocks.voxels:
        # Once for all blocks, which are thinner than what is decompressed for each
        corner = blocks.begin.min(0)
        array = array[:, *map(slice, corner.tolist(), blocks.end.max(0).tolist())]
        blocks = blocks.shifted(-corner)
    packed = np.empty((len(array), blocks.voxels), array.dtype)
    first = 0
    for begin, end in zip(blocks.begin.tolist(), blocks.end.tolist(), strict=True):
        block = array[:, *map(slice, begin, end)]
        last = first + block[0].size
        packed[:, first:last].reshape(block.shape)[...] = block
        first = last
    return torch.from_numpy(packed)


def voxels_of(blocks: Tensor, box_size: Sequence[int], batch_size: int, voxels: int) -> Tensor:
    """Where the packed voxels stand in the boxes of a batch; on the device of `blocks`, not waiting for it.

    Shape: blocks as of `collate_packed` -> (voxels,), in an array (batch_size, *box_size) that is flat.
    """
    edges = (batch_size, *box_size)
    # Divisions in 64 bits take more instructions on a GPU; `packed-boxes` of scripts/gpu_check.py times both
    begin, end = blocks.to(torch.int32 if prod(edges) < _INT32 else torch.int64).unbind(1)
    size = end - begin
    count = size.prod(1, dtype=size.dtype)
    # `output_size` is told, since asking the device for the sum would wait for it
    block_of_voxel = torch.repeat_interleave(count, output_size=voxels)
    first_voxel = count.cumsum(0, dtype=size.dtype) - count
    # a voxel's number within its block; dividing it by the block's edges, the last first, gives its position
    remainder = torch.arange(voxels, dtype=size.dtype, device=size.device) - first_voxel[block_of_voxel]
    index = torch.zeros_like(remainder)
    stride = 1
    # From the last axis to the first, which is that of the samples
    for axis, edge in reversed(list(enumerate(edges))):
        length = size[block_of_voxel, axis]
        index += (begin[block_of_voxel, axis] + remainder % length) * stride
        remainder //= length
        stride *= edge
    return index.long()


def with_boxes(batch: Batch, box_size: Sequence[int]) -> Batch:
    """A batch of `collate_packed` with image and label (batch, channels, *box_size) in place of blocks.

    They are 0 where nothing was read.
    """
    boxes = dict(batch)
    blocks = boxes.pop("blocks").to(batch["image"].device)
    batch_size = len(batch["sample"])
    index = voxels_of(blocks, box_size, batch_size, batch["image"].shape[1])
    for key in ("image", "label"):
        packed = batch[key]
        whole_boxes = packed.new_zeros((len(packed), batch_size, *box_size))
        whole_boxes.view(len(packed), -1)[:, index] = packed
        boxes[key] = whole_boxes.transpose(0, 1)
    return boxes


def collate_packed(samples: list[Sample]) -> Batch:
    """A batch of packed samples, whose voxels stand one behind the other.

    Shape: image (channels, voxels), label (1, voxels), blocks (blocks, 2, 1 + axes): begin and end in an
    array (batch, *box_size); the others as `default_collate` makes them.
    """
    blocks = []
    for number, sample in enumerate(samples):
        boxes = sample["blocks"]
        of_sample = torch.tensor([number, number + 1])
        blocks.append(torch.cat([of_sample.expand(len(boxes), 2)[..., None], boxes], 2))
    arrays = ("image", "label", "blocks")
    without_arrays = [
        {key: value for key, value in sample.items() if key not in arrays} for sample in samples
    ]
    return {
        **default_collate(without_arrays),
        "image": torch.cat([sample["image"] for sample in samples], 1),
        "label": torch.cat([sample["label"] for sample in samples], 1),
        "blocks": torch.cat(blocks),
    }
