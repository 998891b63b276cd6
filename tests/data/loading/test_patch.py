"""medconv/data/loading/patch.py: boxes of volumes for patches of two and three axes."""

import numpy as np
import pytest
import torch

from medconv.data.augmentation.blocks import Blocks
from medconv.data.loading.patch import collate_packed, pack, unpack


def random_blocks(size, seed):
    """Two blocks of an array, apart along the first axis."""
    rng = np.random.default_rng(seed)
    half = size[0] // 2
    begin = [rng.integers(0, np.array([half, *size[1:]]) - 1) for _ in range(2)]
    end = [rng.integers(first + 1, [half, *size[1:]], endpoint=True) for first in begin]
    shift = np.eye(1, len(size), dtype=int) * half
    return Blocks(np.stack([begin[0], begin[1] + shift[0]]), np.stack([end[0], end[1] + shift[0]]))


@pytest.mark.parametrize("size", [(9, 7), (8, 6, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_boxes_come_back_with_zeros_elsewhere(size, channels):
    rng = np.random.default_rng(0)
    samples, images, labels = [], [], []
    for number in range(3):
        image = rng.normal(size=(channels, *size)).astype(np.float32)
        label = rng.integers(1, 200, (1, *size)).astype(np.uint8)
        blocks = random_blocks(size, number)
        is_read = np.zeros(size, bool)
        for begin, end in zip(blocks.begin, blocks.end, strict=True):
            is_read[tuple(map(slice, begin, end))] = True
        bounds = torch.from_numpy(np.stack([blocks.begin, blocks.end], 1))
        arrays = {"image": pack(image, blocks), "label": pack(label, blocks)}
        samples.append({**arrays, "blocks": bounds, "sample": 7 + number})
        images.append(image * is_read)
        labels.append(label * is_read)
    batch = collate_packed(samples)
    assert batch["sample"].tolist() == [7, 8, 9]
    assert batch["image"].shape[1] == batch["label"].shape[1] == sum(map(np.count_nonzero, labels))
    for key, expected in (("image", images), ("label", labels)):
        boxes = unpack(batch[key], batch["blocks"], size, 3)
        assert torch.equal(boxes, torch.from_numpy(np.stack(expected)))


def test_a_sample_without_voxels_is_zero():
    """Its whole box lies beside the image."""
    nothing = Blocks(np.empty((0, 2), int), np.empty((0, 2), int))
    bounds = torch.empty(0, 2, 2, dtype=torch.int64)
    image = pack(np.ones((1, 4, 4), np.float32), nothing)
    batch = collate_packed([{"image": image, "label": image, "blocks": bounds, "sample": 0}] * 2)
    assert torch.equal(unpack(batch["image"], batch["blocks"], (3, 2), 2), torch.zeros(2, 1, 3, 2))
