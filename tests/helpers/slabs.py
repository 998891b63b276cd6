"""A small image and networks, whose answers by slabs are compared with those of all logits at once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import loaded_models
from torch import nn

from medconv.data.preprocessing import preprocess
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.extras import Extra
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import LabelMapForward
from medconv.inference.prepare import NamedImage, from_array, prepare
from medconv.inference.slab_answer import LabelMapScores
from medconv.targets.regions import RegionTargets
from medconv.targets.segmentation import SegmentationTargets

SIZE = (13, 17, 15)


@pytest.fixture(autouse=True)
def thin_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three planes; a test file that imports it has them in all of its tests."""
    monkeypatch.setattr(preprocess, "_VOXELS", 3 * SIZE[0] * SIZE[2])


def image(size: tuple[int, ...] = SIZE) -> NamedImage:
    array = np.random.default_rng(0).normal(0, 1, size).astype(np.float32)
    return from_array(array, 3, spacing_mm=(1, 1, 1))


def model(
    seed: int,
    spacing_mm: float,
    overlap: float = 0.5,
    mirror_axes: tuple[int, ...] = (),
    targets: SegmentationTargets | None = None,
) -> LoadedModel:
    torch.manual_seed(seed)
    network = nn.Conv3d(1, 2, 3, padding=1)
    loaded = loaded_models.segmentation(network)
    preprocessing = PreprocessingConfig(3, (spacing_mm,) * 3, ("none",), ({},))
    window = replace(loaded.window, patch_size=(8, 8, 8), overlap=overlap, mirror_axes=mirror_axes)
    targets = targets or loaded.targets
    return replace(loaded, preprocessing=preprocessing, window=window, targets=targets)


def regions(*seeds: int, spacing_mm: float = 1.4) -> list[LoadedModel]:
    targets = RegionTargets(("lesion", "core"), ((1, 2), (2,)), None, (1, 2))
    return [model(seed, spacing_mm, targets=targets) for seed in seeds]


def scores(
    models: list[LoadedModel],
    keeps_logits: bool,
    extras: Sequence[Extra] = (),
    logit_folder: Path | None = None,
    size: tuple[int, ...] = SIZE,
) -> LabelMapScores:
    forward = LabelMapForward(models, "cpu", extras=extras)
    with torch.inference_mode():
        case_input = prepare(image(size), models, forward.preprocessings)
        return forward([case_input], keeps_logits, logit_folder)[0]


ENSEMBLES = {
    "one": lambda: [model(0, 1.4)],
    "folds": lambda: [model(seed, 1.4) for seed in range(3)],
    "other windows": lambda: [model(0, 1.4), model(1, 1.4), model(2, 1.4, overlap=0.25)],
    "other spacing": lambda: [model(0, 1.4), model(1, 1.4), model(2, 0.8)],
    "finer": lambda: [model(0, 0.4)],
    "mirrored": lambda: [model(0, 1.4, mirror_axes=(0, 1, 2))],
    "mirrored folds": lambda: [model(seed, 1.4, mirror_axes=(0, 2)) for seed in range(2)],
    "regions": lambda: regions(3),
    "regions of folds": lambda: regions(3, 4),
    "regions, other spacing": lambda: [*regions(3), *regions(4, spacing_mm=0.8)],
}
