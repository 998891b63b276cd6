"""Samplers, datasets of patches and data modules without a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medconv.data.case import Case
from medconv.data.loading.datamodule import DataModule, LoaderSettings
from medconv.data.loading.patch import PatchShape
from medconv.data.loading.patch_dataset import PatchDataset
from medconv.data.loading.samplers import ForegroundSampler, Sampler, TrainingCases
from medconv.data.loading.samples import Patches
from medconv.data.preprocessing.store import Store
from medconv.data.splits import DataSplit
from medconv.features.image_level import samples as samples_of_images


def cases_of(ids: Sequence[str], weights: Sequence[float] | None = None) -> list[Case]:
    weights = weights or [1.0] * len(ids)
    return [
        Case(case_id, (Path(f"{case_id}.nii.gz"),), weight=weight)
        for case_id, weight in zip(ids, weights, strict=True)
    ]


def training_cases(
    cases: Sequence[Case],
    patch_size: Sequence[int] | None = None,
    slice_axis: int | None = None,
    class_indices: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> TrainingCases:
    """Args: patch_size: None for whole images with values."""
    images = samples_of_images if patch_size is None else None
    return TrainingCases(cases, PatchShape(patch_size or (), slice_axis), lambda: class_indices, seed, images)


def patch_dataset(
    store: Store,
    ids: Sequence[str],
    patch_size: Sequence[int],
    seed: int = 0,
    foreground_share: float = 0.5,
    slice_axis: int | None = None,
    sampler: Sampler | None = None,
    **settings: Any,
) -> PatchDataset:
    """Args: sampler: None for the default one."""
    if sampler is None:
        sampler = ForegroundSampler(
            training_cases(cases_of(ids), patch_size, slice_axis, seed=seed), foreground_share
        )
    return PatchDataset(store, ids, sampler, PatchShape(patch_size, slice_axis), **settings)


def data_module(
    store: Store,
    train: Sequence[Case],
    val: Sequence[Case],
    patch_size: Sequence[int],
    augment: Any,
    foreground_share: float = 0.5,
    **loader: Any,
) -> DataModule:
    """Args: loader: of `LoaderSettings`."""
    image_level = bool(train) and train[0].values is not None
    cases = training_cases(train, None if image_level else patch_size) if train else None
    drawn = (ForegroundSampler(cases, foreground_share) if cases else None, augment)
    samples = samples_of_images.Images(*drawn) if image_level else Patches(*drawn, PatchShape(patch_size))
    return DataModule(store, DataSplit([*train], [*val], []), samples, LoaderSettings(**loader))
