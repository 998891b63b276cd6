"""medconv/features/nnunet/export_plans.py: what nnU-Net reads, in its axes and words, and what it cannot express."""

from dataclasses import replace

import pytest
from helpers import loaded_models

from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.features.nnunet import export_plans
from medconv.features.nnunet.network import NnUNet
from medconv.inference.sliding_window import SlidingWindow
from medconv.models.unet import UNet
from medconv.targets.regions import RegionTargets

MEASURED = {"percentile_00_5": 1.0, "percentile_99_5": 9.0, "mean": 5.0, "std": 2.0}


def _model(**preprocessing):
    """Of spacing 1 x 2 x 3 mm and patches of 8 x 12 x 16 voxels."""
    network = UNet(3, 1, 2, (4, 8), [(2, 1, 1)], strided=True)
    model = loaded_models.segmentation(network, (8, 12, 16))
    settings = {"normalisation": ("zscore",), "intensities": (MEASURED,), **preprocessing}
    return replace(model, preprocessing=PreprocessingConfig(3, (1.0, 2.0, 3.0), **settings))


def _plans(model):
    assert isinstance(model.network, UNet)
    return export_plans.plans(model, NnUNet.of_network(model.network), "Dataset001_A")


def test_axes_are_those_of_nnunet():
    plans = _plans(_model())
    assert plans["transpose_forward"] == plans["transpose_backward"] == [0, 1, 2]
    configuration = plans["configurations"]["3d_fullres"]
    assert configuration["spacing"] == [3.0, 2.0, 1.0] and configuration["patch_size"] == [16, 12, 8]
    assert configuration["architecture"]["arch_kwargs"]["strides"] == [[1, 1, 1], [1, 1, 2]]


@pytest.mark.parametrize(("slice_axis", "forward"), [(0, [2, 0, 1]), (1, [1, 0, 2]), (2, [0, 1, 2])])
def test_a_2d_network_takes_slices_across_its_axis(slice_axis, forward):
    model = loaded_models.segmentation(UNet(2, 1, 2, (4, 8), [(2, 1)], strided=True))
    preprocessing = PreprocessingConfig(2, (1.0, 2.0), ("none",), ({},), slice_axis=slice_axis)
    window = SlidingWindow((8, 12), slice_axis=slice_axis)
    plans = _plans(replace(model, preprocessing=preprocessing, window=window))
    assert plans["transpose_forward"] == forward
    assert [forward[axis] for axis in plans["transpose_backward"]] == [0, 1, 2]
    assert plans["configurations"]["2d"]["patch_size"] == [12, 8]
    assert plans["configurations"]["2d"]["spacing"] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "scheme", "masked", "low"),
    [
        ("zscore", "ZScoreNormalization", False, 1.0),
        ("zscore_nonzero", "ZScoreNormalization", True, 1.0),
        ("ct", "CTNormalization", False, 1.0),
        ("dataset", "CTNormalization", False, -3.4e38),  # clips nothing
        ("rescale", "RescaleTo01Normalization", False, 1.0),
        ("none", "NoNormalization", False, 1.0),
    ],
)
def test_normalisation_has_nnunets_names(name, scheme, masked, low):
    plans = _plans(_model(normalisation=(name,)))
    configuration = plans["configurations"]["3d_fullres"]
    assert configuration["normalization_schemes"] == [scheme]
    assert configuration["use_mask_for_norm"] == [masked]
    measured = plans["foreground_intensity_properties_per_channel"]["0"]
    assert measured["percentile_00_5"] == low and measured["mean"] == 5.0


@pytest.mark.parametrize(
    ("convention", "reader", "separate"),
    [
        (None, "NibabelIOWithReorient", False),
        ("nnunet_ras", "NibabelIOWithReorient", None),
        ("nnunet", "SimpleITKIO", None),
    ],
)
def test_orientation_and_resampling_follow_the_convention(convention, reader, separate):
    plans = _plans(_model(convention=convention))
    assert plans["image_reader_writer"] == reader and plans["medconv"]["convention"] == convention
    kwargs = plans["configurations"]["3d_fullres"]["resampling_fn_data_kwargs"]
    assert kwargs == {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": separate}


def test_each_channel_has_its_own_intensities():
    """nnU-Net clips none that `dataset` normalises, and those of CT at the percentiles."""
    other = {"percentile_00_5": -5.0, "percentile_99_5": 70.0, "mean": 30.0, "std": 4.0}
    plans = _plans(_model(normalisation=("dataset", "ct"), intensities=(MEASURED, other)))
    measured = plans["foreground_intensity_properties_per_channel"]
    assert measured == {"0": {**MEASURED, "percentile_00_5": -3.4e38, "percentile_99_5": 3.4e38}, "1": other}


def test_regions_are_drawn_in_their_order_and_not_by_value():
    names, values = ("whole", "core", "enhancing"), ((1, 2, 3), (1, 3), (3,))
    content = export_plans.dataset_json(
        replace(_model(), targets=RegionTargets(names, values, order=(2, 1, 3))), "A", 3
    )
    assert list(content["labels"]) == ["background", *names]
    assert content["regions_class_order"] == [2, 1, 3]


def test_regions_keep_their_order():
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), order=(1, 2))
    content = export_plans.dataset_json(replace(_model(), targets=regions), "Dataset001_A", 3)
    assert content["labels"] == {"background": 0, "whole": [1, 2], "core": [2]}
    assert content["regions_class_order"] == [1, 2]
    assert export_plans.dataset_json(_model(), "A", 3)["labels"] == {"background": 0, "a": 1}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"source_spacing_mm": [1, 1, 1]}, "which data.source_spacing_mm replaced in training"),
        ({"preprocessing": PreprocessingConfig(2, (1.0, 1.0), ("none",), ({},))}, "takes 2D images"),
        ({"preprocessing": PreprocessingConfig(3, (1.0,) * 3, ("none",), ({},), resize=(8,) * 3)}, "resize"),
        ({"targets": RegionTargets(("a", "b"), ((1,), (2,)), order=(1, 2))}, "without data.regions it would"),
    ],
)
def test_what_nnunet_cannot_express_is_named(change, expected):
    export_plans.check_preprocessing(_model())
    with pytest.raises(ValueError, match=f"the format nnunet is for .*{expected}"):
        export_plans.check_preprocessing(replace(_model(), **change))
