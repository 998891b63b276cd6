"""medconv/data/loading/collate.py: samples of one size, and of different ones."""

from typing import Any

import torch

from medconv.data.loading.collate import Augmenting, only_item


def middle_voxel(batch: dict[str, Any]) -> dict[str, Any]:
    image = torch.stack([sample[:, sample.shape[1] // 2] for sample in batch["image"]])
    return {**batch, "image": image}


def sample_of(voxels: int, **more: Any) -> dict[str, Any]:
    return {"image": torch.arange(float(voxels))[None], "sample": voxels, **more}


def test_samples_of_one_size_are_stacked_before() -> None:
    batch = Augmenting(middle_voxel)([sample_of(5), sample_of(5)])
    assert batch["image"].tolist() == [[2.0], [2.0]] and batch["sample"].tolist() == [5, 5]


def test_samples_of_different_sizes_become_one_size() -> None:
    annotated = torch.tensor([True, False])
    batch = Augmenting(middle_voxel)([sample_of(n, annotated=annotated) for n in (5, 9)])
    assert batch["image"].tolist() == [[2.0], [4.0]] and batch["sample"] == [5, 9]
    assert torch.equal(batch["annotated"], torch.stack([annotated, annotated]))


def test_the_only_item_is_the_batch() -> None:
    assert only_item([sample_of(3)])["sample"] == 3
