"""medconv/data/loading/patch.py: boxes of samples, and batches of them."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from medconv.data.augmentation.blocks import Blocks
from medconv.data.loading.patch import (
    augmented,
    collate_packed,
    fits,
    in_half_precision,
    pack,
    voxels_of,
    with_boxes,
)


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
    boxes = with_boxes(batch, size)
    assert torch.equal(boxes["image"], torch.from_numpy(np.stack(images)))
    assert torch.equal(boxes["label"], torch.from_numpy(np.stack(labels)))


def test_boxes_of_more_than_2_to_the_31_voxels_have_longer_numbers():
    """The last two voxels of the second sample of two, each of 2^31 voxels."""
    blocks = torch.tensor([[[1, 2**30 - 1, 0], [2, 2**30, 2]]])
    assert voxels_of(blocks, (2**30, 2), 2, 2).tolist() == [2**32 - 2, 2**32 - 1]


def test_a_sample_without_voxels_is_zero():
    """Its whole box lies beside the image."""
    nothing = Blocks(np.empty((0, 2), int), np.empty((0, 2), int))
    bounds = torch.empty(0, 2, 2, dtype=torch.int64)
    image = pack(np.ones((1, 4, 4), np.float32), nothing)
    batch = collate_packed([{"image": image, "label": image, "blocks": bounds, "sample": 0}] * 2)
    assert torch.equal(with_boxes(batch, (3, 2))["image"], torch.zeros(2, 1, 3, 2))


collate = partial(in_half_precision, default_collate)


def middle_voxel(batch):
    image = torch.stack([sample[:, sample.shape[1] // 2] for sample in batch["image"]])
    return {**batch, "image": image}


def sample_of(voxels, **more):
    return {"image": torch.arange(float(voxels))[None], "sample": voxels, **more}


def test_samples_of_one_size_are_stacked_before():
    batch = augmented(middle_voxel, [sample_of(5), sample_of(5)])
    assert batch["image"].tolist() == [[2.0], [2.0]] and batch["sample"].tolist() == [5, 5]


def test_samples_of_different_sizes_become_one_size():
    annotated = torch.tensor([True, False])
    batch = augmented(middle_voxel, [sample_of(n, annotated=annotated) for n in (5, 9)])
    assert batch["image"].tolist() == [[2.0], [4.0]] and batch["sample"] == [5, 9]
    assert torch.equal(batch["annotated"], torch.stack([annotated, annotated]))


def sample(image):
    return {"image": image, "label": torch.zeros(image.shape, dtype=torch.uint8)}


@pytest.mark.parametrize("largest", [2.0**-14, 1e-3, 1.0, 40.0, 65504.0])
def test_values_change_by_less_than_2_to_the_minus_11_of_the_largest(largest):
    image = torch.linspace(-largest, largest, 100_001)[None]
    sent = collate([sample(image)])["image"]
    assert sent.dtype == torch.float16
    assert float((sent[0].float() - image).abs().max()) <= largest * 2**-11


@pytest.mark.parametrize("values", [[65520.0, 1.0], [-7e4, 0.0], [3e-5, 1e-9], [torch.inf], [torch.nan, 1]])
def test_values_beyond_half_precision_stay_fp32(values):
    image = torch.tensor([values])
    sent = collate([sample(image)])["image"][0]
    assert sent.dtype == torch.float32
    assert torch.equal(sent, image) or torch.isnan(image).any()


@pytest.mark.parametrize("values", [[0.0, 0.0], []])
def test_nothing_to_round_fits(values):
    assert fits(torch.tensor([values]))


def test_a_sample_is_the_same_whatever_stands_beside_it():
    image = torch.rand(1, 5)
    alone = collate([sample(image)])["image"]
    beside = collate([sample(image), sample(torch.full((1, 5), 1e5))])["image"]
    assert beside.dtype == torch.float32
    assert torch.equal(beside[0], alone[0].float())
    assert not torch.equal(beside[0], image)


def test_the_samples_are_kept():
    """A dataset may hold its images in memory."""
    one = sample(torch.rand(1, 5))
    collate([one])
    assert one["image"].dtype == torch.float32


def test_packed_samples_take_three_bytes_a_voxel():
    samples = [
        {**sample(torch.rand(1, voxels)), "blocks": torch.tensor([[[0], [voxels]]]), "sample": number}
        for number, voxels in enumerate((7, 9))
    ]
    batch = in_half_precision(collate_packed, samples)
    assert batch["image"].nbytes + batch["label"].nbytes == 3 * (7 + 9)
