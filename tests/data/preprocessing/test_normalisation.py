"""medconv/data/preprocessing/normalisation.py: values that float32 cannot square, and no-data values."""

from pathlib import Path

import numpy as np
import pytest
from helpers.loaded_models import segmentation
from helpers.volumes import image_array, preprocessing_config, save, write_msd
from torch import nn

from medconv.data.case import Grid
from medconv.data.datasets.decathlon import msd
from medconv.data.preprocessing.fingerprint import check
from medconv.data.preprocessing.normalisation import normalise
from medconv.data.preprocessing.pipeline import prepare
from medconv.data.preprocessing.preprocess import preprocess
from medconv.inference.predictor import Predictor

LOWEST = float(np.finfo(np.float32).min)
STATISTICS = {"percentile_00_5": 9.0, "percentile_99_5": 16.0, "mean": 11.0, "std": 1.5}


@pytest.mark.parametrize("name", ["zscore", "rescale", "dataset", "ct"])
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_the_scale_of_an_image_changes_nothing(name: str, scale: float) -> None:
    image = image_array(0)
    expected = normalise(image, name, STATISTICS)
    scaled = {key: value * scale for key, value in STATISTICS.items()}
    found = normalise((image * np.float32(scale)).astype(np.float32), name, scaled)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_statistics_of_large_values_are_finite(tmp_path: Path) -> None:
    dataset = msd(write_msd(tmp_path))
    plain = check(dataset, 1).fingerprint.intensities[0]
    for number, case in enumerate(dataset.cases):
        save(case.images[0], image_array(number) * np.float32(1e30))
    large = check(dataset, 1).fingerprint.intensities[0]
    assert {key: value / 1e30 for key, value in large.items()} == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("value", [LOWEST, -LOWEST])
def test_a_no_data_value_is_an_error_of_the_case(tmp_path: Path, value: float) -> None:
    """In the check, in preparation and in prediction alike."""
    dataset = msd(write_msd(tmp_path))
    image = image_array(1)
    image[:2] = value
    path = save(dataset.cases[1].images[0], image)
    words = rf"case {dataset.cases[1].id}: {path}: .*values from .*3\.403e\+38.*280 voxels.*no-data value"
    with pytest.raises(ValueError, match=words):
        check(dataset, 1)
    with pytest.raises(ValueError, match=words):
        prepare(dataset, preprocessing_config((1, 1, 1)), tmp_path / "store", 1)
    with pytest.raises(ValueError, match=rf"{path}: .*no-data value"):
        Predictor([segmentation(nn.Conv3d(1, 2, 1))])(path)
    skipping = check(dataset, 1, skip=True)
    assert list(skipping.errors) == [dataset.cases[1].id]


def test_a_mask_with_rounding_errors_has_no_no_data_value() -> None:
    mask = np.zeros((4, 4, 4), np.float32)
    mask[1:], mask[2] = 1, np.float32(1) - np.float32(6e-8)
    assert len(np.unique(mask)) == 3
    assert normalise(mask, "rescale", {}).max() == 1
    mask[mask == 0] = LOWEST
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="no-data value"):
        normalise(mask, "rescale", {})


def test_values_that_become_one_are_an_error() -> None:
    image = image_array(0)
    with pytest.raises(ValueError, match=r"values from 9\..* to 1.* become .* by data\.normalisation=ct"):
        normalise(image, "ct", {**STATISTICS, "percentile_00_5": 100.0, "percentile_99_5": 200.0})


def test_splines_beyond_float32_are_an_error() -> None:
    image = np.where(np.indices((8, 8, 8)).sum(0) % 2, 3.4e38, -3.4e38).astype(np.float32)[None]
    config = preprocessing_config((0.7, 0.7, 0.7), normalisation="none")
    with pytest.raises(ValueError, match=r"values from -3\.4e\+38 to 3\.4e\+38 are not finite any more"):
        preprocess(image, Grid.of((8, 8, 8), np.eye(4)), config)


def test_zscore_nonzero_leaves_what_is_outside_the_mask() -> None:
    rng = np.random.default_rng(0)
    channel, mask = rng.normal(50, 10, (6, 7, 8)).astype(np.float32), np.zeros((6, 7, 8), bool)
    mask[1:5, 1:6, 2:7] = True
    channel[~mask] = 0
    normalised = normalise(channel, "zscore_nonzero", {}, mask)
    inside = channel[mask]
    np.testing.assert_allclose(normalised[mask], (inside - inside.mean()) / inside.std(), rtol=1e-5)
    assert not normalised[~mask].any()
    everywhere = np.ones_like(mask)
    np.testing.assert_array_equal(
        normalise(channel, "zscore_nonzero", {}, everywhere), normalise(channel, "zscore", {})
    )
    assert not normalise(np.zeros_like(channel), "zscore_nonzero", {}, np.zeros_like(mask)).any()
