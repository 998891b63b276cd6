"""The memory of a prediction: the estimate, and fewer workers where it does not fit."""

from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import loaded_models
from torch import nn

from medconv.data.case import Case
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference import predict, sliding_window
from medconv.inference.predict import Need, _need, fitting_workers
from medconv.inference.prepare import from_files
from medconv.inference.sliding_window import SlidingWindow

GB = 2**30


def member(spacing_mm=2.0):
    model = loaded_models.segmentation(nn.Conv3d(1, 2, 1))
    preprocessing = PreprocessingConfig(3, (spacing_mm,) * 3, ("none",), ({},))
    return replace(model, preprocessing=preprocessing, window=replace(model.window, patch_size=(8, 8, 8)))


@pytest.fixture
def case(tmp_path):
    """A volume of 32 x 40 x 64 voxels at 1 mm."""
    path = tmp_path / "ct.nii.gz"
    image = np.random.default_rng(0).normal(size=(32, 40, 64)).astype(np.float32)
    nib.save(nib.Nifti1Image(image, np.eye(4)), path)
    return Case("ct", (path,))


def test_the_planes_in_work_are_estimated_as_they_are(case):
    model = member()
    need = _need(case, [model], only_labels=True)
    assert need is not None and need.shape == (32, 40, 64)
    image = torch.nn.functional.interpolate(
        torch.from_numpy(from_files(case).voxels)[None], scale_factor=0.5, mode="trilinear"
    )[0]
    values = model.window.stream(model.network, image, axis=2, planes_at_once=2).num_values
    assert need.predicting - 4 * 32 * 40 * 64 == pytest.approx(4 * 2 * values, rel=0.3)


def test_networks_that_share_a_sum_take_no_more(case):
    one, folds, others = (
        _need(case, models, only_labels=True)
        for models in ([member()], [member()] * 5, [member(), member(1.0)])
    )
    assert one is not None and folds is not None and others is not None
    assert one == folds
    assert others.predicting > 4 * (one.predicting - 4 * 32 * 40 * 64)


def test_fewer_cases_are_loaded_at_once_where_memory_is_small(case, caplog):
    need = _need(case, [member()], only_labels=True)
    assert need is not None
    with caplog.at_level("INFO"):
        assert fitting_workers([case], [member()], 4, available=GB) == 4
        assert caplog.text == ""
        assert fitting_workers([case], [member()], 4, available=need.total(2) / 0.79) == 2
    assert (
        "for 32 x 40 x 64 voxels, the largest of the first 1 cases; 2 loaded at once, instead of 4"
        in caplog.text
    )
    assert "may kill" not in caplog.text
    assert fitting_workers([case], [member()], 4, available=GB / 1024) == 1
    assert caplog.records[-1].levelname == "WARNING"
    assert "1 loaded at once, instead of 4; this machine has 0.0 GB, and may kill" in caplog.text


def test_probabilities_that_are_written_take_memory(case):
    need = _need(case, [member()], only_labels=True)
    assert need is not None
    available = need.total(3) / 0.79
    assert fitting_workers([case], [member()], 3, available) == 3
    assert fitting_workers([case], [member()], 3, available, saves_probabilities=True) == 2


def test_quality_takes_the_planes_in_full_precision(case, monkeypatch):
    monkeypatch.setattr(sliding_window, "_HALF_ABOVE", 0)
    labels, quality = (_need(case, [member()], only_labels) for only_labels in (True, False))
    assert labels is not None and quality is not None
    assert quality.predicting - 4 * 32 * 40 * 64 == 2 * (labels.predicting - 4 * 32 * 40 * 64)
    available = (labels.total(3) + 1) / 0.8
    assert fitting_workers([case], [member()], 3, available) == 3
    assert fitting_workers([case], [member()], 3, available, only_labels=False) == 2


@pytest.mark.parametrize("name", ["a.nii.gz", "a.png"])
def test_a_file_that_cannot_be_read_is_left_to_the_prediction(tmp_path, name):
    (tmp_path / name).write_bytes(b"damaged")
    assert fitting_workers([Case("a", (tmp_path / name,))], [member()], 3, available=1.0) == 3


def test_the_case_that_is_predicted_is_not_the_only_one():
    """Two are loaded at once and one waits, while the one before is written."""
    assert Need((1, 1, 1), loading=10.0, predicting=100.0, writing=1.0).total(2) == 131.0


def header_only(folder, shape, spacing_mm=1.0):
    header = nib.Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape(shape)
    header.set_sform(np.diag([spacing_mm] * 3 + [1.0]), code=1)
    path = folder / f"{shape[0]}_{shape[-1]}.nii"
    path.write_bytes(header.binaryblock + bytes(4))
    return Case(path.stem, (path,))


def test_the_largest_of_the_first_cases_counts(tmp_path, monkeypatch, caplog):
    cases = [header_only(tmp_path, (20, 20, length)) for length in (30, 50, *range(31, 37), 60)]
    monkeypatch.setattr(predict, "_WORTH_SAYING", 1)
    with caplog.at_level("INFO"):
        assert fitting_workers(cases, [member()], 2, available=GB) == 2
    assert "for 20 x 20 x 50 voxels, the largest of the first 8 cases" in caplog.text


def test_a_case_that_is_refused_takes_nothing(tmp_path):
    """Its header is larger than the machine, or its spacing is not that of the training."""
    huge = header_only(tmp_path, (30000, 30000, 30000))
    metres = header_only(tmp_path, (20, 20, 20), spacing_mm=1000.0)
    trained_at_1_mm = replace(member(), spacing_range_mm=((1.0, 1.0),) * 3)
    assert _need(huge, [member()], True) is None
    assert _need(metres, [member()], True) is not None
    assert _need(metres, [trained_at_1_mm], True) is None


def test_the_spacing_that_is_stated_counts_in_place_of_the_header_s(tmp_path):
    """It says how large the image becomes on the network's grid."""
    case = header_only(tmp_path, (20, 20, 20))
    of_header, stated = (
        _need(case, [replace(member(), source_spacing_mm=mm)], only_labels=True)
        for mm in (None, [4.0, 4.0, 4.0])
    )
    assert stated.loading == of_header.loading and stated.predicting > 4 * of_header.predicting


def test_the_need_follows_from_channels_windows_and_precision(case, tmp_path, monkeypatch):
    label_bytes = 4 * 32 * 40 * 64

    def planes_bytes(model, of=case, only_labels=True):
        need = _need(of, [model], only_labels)
        assert need is not None
        return need.predicting - label_bytes

    both = replace(member(), modalities=("CT", "PET"))
    one, two = (_need(case, [model], True) for model in (member(), both))
    assert one is not None and two is not None and two.loading == 2 * one.loading
    # One plane of 20 x 32 voxels on the network's grid, and no more than the 16 planes that there are.
    slices = replace(member(), window=SlidingWindow((8, 8), slice_axis=0))
    assert planes_bytes(slices) == pytest.approx(1.4 * 4 * 2 * 20 * 32)
    long = replace(member(), window=SlidingWindow((16, 20, 32)))
    assert planes_bytes(long) == 4 * 2 * 16 * 20 * 32
    full = planes_bytes(member())
    monkeypatch.setattr(sliding_window, "_HALF_ABOVE", 1)
    assert planes_bytes(member()) == full / 2
    assert planes_bytes(member(), only_labels=False) == full


def test_the_grid_is_that_of_the_turned_image(tmp_path):
    """An image whose axes are stored in another order is predicted at the same size."""
    array = np.zeros((64, 32, 40), np.float32)
    affine = np.array([[0, 1, 0, 0], [0, 0, 1, 0], [3, 0, 0, 0], [0, 0, 0, 1.0]])
    nib.save(nib.Nifti1Image(array, affine), tmp_path / "turned.nii")
    turned = _need(Case("turned", (tmp_path / "turned.nii",)), [member()], True)
    nib.save(nib.Nifti1Image(array.transpose(1, 2, 0), np.diag([1, 1, 3, 1.0])), tmp_path / "straight.nii")
    straight = _need(Case("straight", (tmp_path / "straight.nii",)), [member()], True)
    assert turned is not None and straight is not None
    assert turned.predicting == straight.predicting
