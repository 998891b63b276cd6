"""medconv/features/nnunet/plans.py: nnU-Net's axes in ours, and plans that are refused."""

import json

import pytest
from helpers import nnunet_models as models

from medconv.features.nnunet.plans import read


def _changed(folder, change, inner):
    models.write_model(folder, "thick")
    plans = json.loads((folder / "plans.json").read_text())
    plans |= change
    plans["configurations"]["base"] |= inner
    (folder / "plans.json").write_text(json.dumps(plans))
    return folder


def test_axes_are_those_of_the_file(tmp_path):
    """The network of `turned` takes (Y, X, Z) of the file, ours (X, Y, Z)."""
    model = read(models.write_model(tmp_path, "turned"), "turned")
    settings = model.settings(models.MIRRORED["turned"] or ())
    assert settings["data"]["spacing_mm"] == [0.8, 1.0, 1.1]
    assert settings["data"]["patch_size"] == [8, 12, 12]
    assert settings["plan"]["strides"] == [[2, 2, 2], [1, 2, 2]]
    assert settings["task"]["mirror_axes"] == settings["augmentation"]["mirror_axes"] == [1, 2]
    assert settings["data"]["normalisation"] == ["zscore_nonzero"]
    assert model.spacing_range_mm == ((0.9, 1.8), (1.2, 2.4), (0.7, 1.4))
    assert model.num_cases == 3


def test_a_2d_network_takes_slices_across_the_last_axis_of_the_file(tmp_path):
    settings = read(models.write_model(tmp_path, "slices"), "slices").settings((0,))
    assert settings["data"]["slice_axis"] == 2
    assert settings["data"]["patch_size"] == [8, 12] and settings["task"]["mirror_axes"] == [1]


def test_pictures_have_no_slice_axis(tmp_path):
    models.write_model(tmp_path, "slices")
    plans = models.plans("slices") | {"original_median_shape_after_transp": [1, 12, 12]}
    (tmp_path / "plans.json").write_text(json.dumps(plans))
    assert read(tmp_path, "slices").slice_axis is None


@pytest.mark.parametrize(
    ("change", "inner", "expected"),
    [
        ({"image_reader_writer": "NaturalImage2DIO"}, {}, "image_reader_writer=NaturalImage2DIO is not supp"),
        ({}, {"previous_stage": "3d_lowres"}, "a cascade, after 3d_lowres, is not supported"),
        ({}, {"resampling_fn_data": "os.system"}, "resampling_fn_data=os.system is not supported"),
        ({}, {"preprocessor_name": "Mine"}, "preprocessor_name=Mine is not supported"),
        (
            {},
            {"normalization_schemes": ["Mine", "NoNormalization"]},
            "normalization_schemes: Mine is none of",
        ),
        ({"configurations": {}}, {}, "configuration thick is damaged"),
        ({"transpose_forward": [0, 0, 1]}, {}, "transpose_forward"),
        ({}, {"patch_size": None}, "configuration thick is damaged"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, inner, expected):
    if "configurations" in change:
        models.write_model(tmp_path, "thick")
        (tmp_path / "plans.json").write_text(json.dumps(models.plans("thick") | change))
    else:
        _changed(tmp_path, change, inner)
    with pytest.raises(ValueError, match=f"plans.json.*{expected}"):
        read(tmp_path, "thick")


def test_a_configuration_that_inherits_from_itself_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="inherits from itself"):
        read(_changed(tmp_path, {}, {"inherits_from": "thick"}), "thick")


def test_pictures_in_colour_are_divided_by_255(tmp_path):
    schemes = {"normalization_schemes": ["RGBTo01Normalization", "NoNormalization"]}
    model = read(_changed(tmp_path, {}, schemes), "thick")
    assert model.normalisation == ("dataset", "none")
    assert (model.intensities[0]["mean"], model.intensities[0]["std"]) == (0, 255)


def test_each_channel_has_its_own_intensities(tmp_path):
    """By number: with ten channels or more, the order of the names would be another one."""
    key = "foreground_intensity_properties_per_channel"
    measured = models.plans("thick")[key]["0"]
    channels = {str(channel): {**measured, "mean": float(channel)} for channel in reversed(range(11))}
    schemes = {"normalization_schemes": ["CTNormalization"] * 11, "use_mask_for_norm": [False] * 11}
    model = read(_changed(tmp_path, {key: channels}, schemes), "thick")
    assert [channel["mean"] for channel in model.intensities] == list(range(11))


def test_a_configuration_overrides_what_it_inherits(tmp_path):
    base = models.plans("thick")["configurations"]["base"]
    _changed(tmp_path, {}, {"batch_size": base.get("batch_size", 2)})
    plans = json.loads((tmp_path / "plans.json").read_text())
    plans["configurations"]["thick"] |= {"inherits_from": "base", "batch_size": 9}
    (tmp_path / "plans.json").write_text(json.dumps(plans))
    assert read(tmp_path, "thick").batch_size == 9
