"""medconv/data/loading/patch.py: batches of samples of one size, and of different ones."""

from functools import partial

import pytest
import torch
from torch.utils.data import default_collate

from medconv.data.loading.patch import augmented, collate_packed, fits, in_half_precision

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
