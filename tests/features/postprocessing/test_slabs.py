"""Components are those of the whole label map."""

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
from medconv.features.postprocessing.extra import PostProcessing
from medconv.features.postprocessing.steps import Step, Steps
from medconv.inference.extras import Extra
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import LabelMapForward, Predictor
from medconv.inference.prepare import NamedImage, from_array, prepare
from medconv.inference.slab_answer import LabelMapScores
from medconv.targets.segmentation import SegmentationTargets

SIZE = (13, 17, 15)


@pytest.fixture(autouse=True)
def thin_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
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


def scores(
    models: list[LoadedModel],
    keeps_logits: bool,
    extras: Sequence[Extra] = (),
    logit_folder: Path | None = None,
    size: tuple[int, ...] = SIZE,
) -> LabelMapScores:
    forward = LabelMapForward(models, "cpu", extras)
    with torch.inference_mode():
        case_input = prepare(image(size), models, forward.preprocessings)
        return forward([case_input], keeps_logits, logit_folder)[0]


def test_components_are_those_of_the_whole_label_map() -> None:
    """They cross the borders of slabs."""
    one = model(0, 1.4)
    steps = Steps((Step("keep_largest", "a"),), one.targets)
    array = image().voxels[0]
    plain = Predictor([one])(array, spacing_mm=(1, 1, 1))
    processed = Predictor([one], extras=[PostProcessing(steps)])(array, spacing_mm=(1, 1, 1))
    grid = scores([one], False).crop.grid
    np.testing.assert_array_equal(processed, steps.apply(plain, grid, one.targets))
    assert (processed != plain).any()
