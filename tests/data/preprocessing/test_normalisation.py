"""medconv/data/preprocessing/normalisation.py: values that float32 cannot square, and no-data values."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.loaded_models import segmentation
from helpers.volumes import AFFINE, SHAPE, image_array, preprocessing_config, save, write_msd, write_nnunet
from torch import nn

from medconv.data.case import Grid
from medconv.data.datasets.dataset_json import msd, nnunet
from medconv.data.preprocessing import normalisation
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.normalisation import normalisation_for, normalise, range_error
from medconv.data.preprocessing.preprocess import PreprocessingConfig, preprocess_image
from medconv.inference.predictor import Predictor

LOWEST = float(np.finfo(np.float32).min)
STATISTICS = {"percentile_00_5": 9.0, "percentile_99_5": 16.0, "mean": 11.0, "std": 1.5}


def range_error_of(image):
    return range_error(image, float(image.min()), float(image.max()))


@pytest.mark.parametrize("name", ["zscore", "rescale", "dataset", "ct"])
@pytest.mark.parametrize("scale", [1e30, 1e-22, 1e-30])  # float32 holds few digits of the square of 1e-22
def test_the_scale_of_an_image_changes_nothing(name, scale):
    image = image_array(0)
    expected = normalise(image, name, STATISTICS)
    scaled = {key: value * scale for key, value in STATISTICS.items()}
    found = normalise((image * np.float32(scale)).astype(np.float32), name, scaled)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_statistics_of_large_values_are_finite(tmp_path):
    dataset = msd(write_msd(tmp_path))
    plain = check(dataset, 1).fingerprint.intensities[0]
    for number, case in enumerate(dataset.cases):
        save(case.images[0], image_array(number) * np.float32(1e30))
    large = check(dataset, 1).fingerprint.intensities[0]
    assert {key: value / 1e30 for key, value in large.items()} == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("value", [LOWEST, -LOWEST])
def test_a_no_data_value_is_an_error_of_the_case(tmp_path, value):
    """In the check, in preparation and in prediction alike."""
    dataset = msd(write_msd(tmp_path))
    image = image_array(1)
    image[:2] = value
    path = save(dataset.cases[1].images[0], image)
    words = rf"case {dataset.cases[1].id}: {path}: .*values from .*3\.403e\+38.*280 voxels.*no-data value"
    with pytest.raises(ValueError, match=words):
        check(dataset, 1)
    with pytest.raises(ValueError, match=words):
        fill_store(dataset, preprocessing_config((1, 1, 1)), tmp_path / "store", 1)
    with pytest.raises(ValueError, match=rf"{path}: .*no-data value"):
        Predictor([segmentation(nn.Conv3d(1, 2, 1))])(path)
    skipping = check(dataset, 1, skip=True)
    assert list(skipping.errors) == [dataset.cases[1].id]


def test_a_mask_with_rounding_errors_has_no_no_data_value():
    mask = np.zeros((4, 4, 4), np.float32)
    mask[1:], mask[2] = 1, np.float32(1) - np.float32(6e-8)
    assert len(np.unique(mask)) == 3
    assert normalise(mask, "rescale", {}).max() == 1
    mask[mask == 0] = LOWEST
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="no-data value"):
        normalise(mask, "rescale", {})


def test_values_that_become_one_are_an_error():
    image = image_array(0)
    with pytest.raises(ValueError, match=r"values from 9\..* to 1.* become .* by normalisation=ct"):
        normalise(image, "ct", {**STATISTICS, "percentile_00_5": 100.0, "percentile_99_5": 200.0})


def test_splines_beyond_float32_are_an_error():
    image = np.where(np.indices((8, 8, 8)).sum(0) % 2, 3.4e38, -3.4e38).astype(np.float32)[None]
    config = preprocessing_config((0.7, 0.7, 0.7), normalisation="none")
    with pytest.raises(ValueError, match=r"values from -3\.4e\+38 to 3\.4e\+38 are not finite any more"):
        preprocess_image(image, Grid.of((8, 8, 8), np.eye(4)), config)


def test_zscore_nonzero_leaves_what_is_outside_the_mask():
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


NAMES = ["zscore", "zscore_nonzero", "rescale", "dataset", "ct"]


def config_of(name, scale=1.0, channels=1):
    statistics = {key: value * scale for key, value in STATISTICS.items()}
    return PreprocessingConfig(3, (0.8, 1.5, 2.3), (name,) * channels, (statistics,) * channels)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resize", [None, (8, 9, 7)])
def test_the_scale_of_an_image_changes_nothing_once_it_is_resampled(name, resize):
    image, grid = image_array(0)[None], Grid.of(SHAPE, AFFINE)
    image[:, :2] = 0  # around the content
    large = image * np.float32(1e30)
    expected, found = (
        preprocess_image(voxels, grid, replace(config_of(name, scale), resize=resize))[0]
        for voxels, scale in ((image, 1.0), (large, 1e30))
    )
    assert expected.dtype == found.dtype == np.float32 and found.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("name", [*NAMES, "none"])
@pytest.mark.parametrize("value", [LOWEST, -1e8])
def test_a_no_data_value_is_refused_by_every_normalisation(name, value):
    """In the second channel; 1e8 is more than a million times as far away as the others are apart."""
    image = np.stack([image_array(0), image_array(1)])
    image[1, :2, :3] = value
    words = (
        rf"channel 1: values from {-abs(value):.4g} to 15.*: {value:.4g} \(60 voxels\) looks like a no-data"
    )
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        preprocess_image(image, Grid.of(SHAPE, AFFINE), config_of(name, channels=2))


def test_a_no_data_value_is_found_in_any_channel(tmp_path):
    dataset = nnunet(write_nnunet(tmp_path, 2))
    image = image_array(0)
    image[0] = LOWEST
    save(dataset.cases[0].images[1], image)
    with pytest.raises(ValueError, match=r"case case_0: .*140 voxels\) looks like a no-data value"):
        check(dataset, 1)


@pytest.mark.parametrize("value", [LOWEST, -LOWEST])
def test_a_no_data_value_that_was_interpolated_is_refused(tmp_path, value):
    """Resampled by another program: voxels at the edge have any value between, and all others become one."""
    dataset = msd(write_msd(tmp_path))
    image = image_array(1)
    image[:2], image[2] = value, value * np.linspace(0.1, 0.9, 140).reshape(14, 10)
    path = save(dataset.cases[1].images[0], image)
    words = (
        rf"case case_1: {path}: .*values from .*: -?3\.403e\+38 looks like a no-data value that resampling"
    )
    for run in (check, lambda *given: fill_store(given[0], config_of("rescale"), tmp_path / "store", 1)):
        with pytest.raises(ValueError, match=words):
            run(dataset, 1)
    image[:3] = 0
    assert not range_error_of(image) and not range_error_of(image * np.float32(1e30))


def test_few_values_and_a_large_empty_background_have_no_no_data_value():
    image = np.zeros((4, 5, 6), np.float32)
    image[1], image[2] = 1, 2
    np.testing.assert_allclose(normalise(image, "rescale", {}), image / 2)
    image[3, 0, :3] = -3e30, 5e30, 4e30  # most voxels have one value between
    assert np.isfinite(normalise(image[3:], "zscore", {})).all()


@pytest.mark.parametrize("name", [*NAMES, "none"])
def test_air_and_metal_are_no_no_data_values(name):
    image = image_array(0)
    image[0], image[1] = -32768, 30000
    assert np.isfinite(normalise(image, name, STATISTICS)).all() and not range_error_of(image)


def test_zscore_nonzero_normalises_holes_and_what_any_channel_has():
    """A ventricle of value 0 is part of the brain; channel 1 is 0 in half of it."""
    rng = np.random.default_rng(0)
    image = np.zeros((2, 10, 9, 8), np.float32)
    image[:, 2:8, 1:8, 1:7] = rng.normal(50, 10, (2, 6, 7, 6))
    image[:, 0, 0, 0] = 1  # keeps the border in the content
    image[:, 4:6, 3:5, 3:5] = 0
    image[1, 2:5] = 0
    inside = np.zeros((10, 9, 8), bool)
    inside[2:8, 1:8, 1:7] = inside[0, 0, 0] = True
    found, crop_info = preprocess_image(
        image,
        Grid.of((10, 9, 8), np.eye(4)),
        PreprocessingConfig(3, (1, 1, 1), ("zscore_nonzero",) * 2, ({},) * 2),
    )
    inside = inside[crop_info.slices]
    for channel, values in zip(found, image[(slice(None), *crop_info.slices)], strict=True):
        expected = (values[inside] - values[inside].mean()) / values[inside].std()
        np.testing.assert_allclose(channel[inside], expected, atol=1e-4)
        assert not channel[~inside].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_channel_becomes_one_finite_value(name):
    channel = np.full((4, 5, 6), 7, np.float32)
    found = normalise(channel, name, STATISTICS, np.ones(channel.shape, bool))
    assert np.isfinite(found).all() and found.min() == found.max()


def test_the_modality_selects_the_normalisation():
    names = normalisation_for(None, ("CT", "ct ", "T1", "MRI", "PET"))
    assert names == ("ct", "ct", "zscore", "zscore", "zscore")
    words = ("CT", "noNorm", "zscore", "rescale_to_0_1", "rgb_to_0_1", "something")
    assert normalisation_for(None, words) == ("ct", "none", "zscore", "rescale", "dataset", "zscore")
    assert normalisation_for(None, ("red", "green", "blue")) == ("dataset",) * 3
    assert normalisation_for(None, ("red", "green", "blue"), "zscore") == ("zscore",) * 3
    assert normalisation_for(None, ("CT", "T1"), "rescale") == ("ct", "zscore")
    assert normalisation_for("rescale", ("CT", "T1")) == ("rescale", "rescale")
    assert normalisation_for(["none", "ct"], ("CT", "T1")) == ("none", "ct")
    with pytest.raises(
        ValueError, match=r"normalisation needs one name, or one for each of 2 channels, got \('ct',\)"
    ):
        normalisation_for(["ct"], ("CT", "T1"))


@pytest.mark.parametrize("name", ["ct", "dataset", "zscore", "rescale"])
def test_pieces_are_normalised_as_the_whole(name, monkeypatch):
    image = image_array(0, (13, 6, 5))
    whole = normalise(image, name, STATISTICS)
    monkeypatch.setattr(normalisation, "_VALUES_AT_ONCE", 70)
    np.testing.assert_array_equal(normalise(image, name, STATISTICS), whole)
    if name == "ct":
        low, high = STATISTICS["percentile_00_5"], STATISTICS["percentile_99_5"]
        plain = (image.clip(low, high) - STATISTICS["mean"]) / STATISTICS["std"]
        np.testing.assert_array_equal(whole, plain)


def test_voxels_that_are_looked_at_first_decide_nothing_that_all_would_not():
    """A no-data value lies between the voxels of the first look, and one of them is far from the others."""
    image = image_array(0, (16, 16, 16))
    image[3, 5, 7] = -3e30
    assert "looks like a no-data value" in range_error_of(image)
    image[3, 5, 7] = image[0, 0, 0]
    image[8, 8, 8] = 1e9
    assert "looks like a no-data value" in range_error_of(image)
