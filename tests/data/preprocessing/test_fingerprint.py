"""medconv/data/preprocessing/fingerprint.py: the statistics of a dataset."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.volumes import affine_of, image_array, label_array, save, tiny, write_nnunet

from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import auto
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.examine import CaseReport
from medconv.data.preprocessing.fingerprint import measure


def test_fingerprint_of_volumes(tmp_path):
    """Shapes are those of the content, axes and spacings canonical, intensities those of the foreground."""
    dataset = tiny(tmp_path, 2)
    image, label = image_array(1), label_array(1)
    image[[0, 1, -1]] = 0
    label[[0, 1, -1]] = 0
    # array axes run S to I, L to R, A to P
    affine = affine_of((2, 0, 1), (-1, 1, -1), (3, 0.5, 0.7), (1, 2, 3))
    for path, array in zip(dataset.cases[1].files, (image, label), strict=True):
        save(path, array, affine)
    fingerprint, _, _ = check(dataset, 2)
    assert fingerprint.spatial_dims == 3
    assert fingerprint.shapes == ((12, 14, 10), (14, 10, 9))
    np.testing.assert_allclose(fingerprint.spacings_mm, [(1, 1.5, 2), (0.5, 0.7, 3)], rtol=1e-6)
    for counts, array in zip(fingerprint.class_voxels, (label_array(0), label), strict=True):
        assert counts == tuple(np.bincount(array.ravel(), minlength=3))
    values = np.concatenate([image_array(0)[label_array(0) > 0], image[label > 0]])
    (statistics,) = fingerprint.intensities
    assert statistics["mean"] == pytest.approx(values.mean(), rel=1e-5)
    assert statistics["std"] == pytest.approx(values.std(), rel=1e-5)
    assert statistics["percentile_00_5"] == pytest.approx(np.percentile(values, 0.5), rel=1e-5)
    assert statistics["percentile_99_5"] == pytest.approx(np.percentile(values, 99.5), rel=1e-5)


def test_structures_are_as_thick_in_voxels_at_another_spacing(tmp_path):
    measured, _, _ = check(tiny(tmp_path, 2), 2)
    ones = replace(measured, spacings_mm=((1.0,) * 3,) * 2, thickness_mm=((4.0, 3.0, 2.0), (0.0,) * 3))
    stated = ones.at_spacing((1.0, 1.5, 7.0))
    assert stated.spacings_mm == ((1.0, 1.5, 7.0),) * 2
    assert stated.thickness_mm == ((4.0, 4.5, 14.0), (0.0,) * 3)


def test_fingerprint_of_slices_and_channels(tmp_path):
    fingerprint, _, _ = check(auto(write_nnunet(tmp_path, 2, shape=(12, 14, 1))), 1)
    assert fingerprint.spatial_dims == 2
    assert fingerprint.shapes == ((12, 14),) * 2
    np.testing.assert_allclose(fingerprint.spacings_mm, [(1, 1.5)] * 2)
    first, second = fingerprint.intensities
    assert second["mean"] - first["mean"] == pytest.approx(100, abs=1e-3)


@pytest.mark.realdata
def test_the_fingerprint_of_a_real_anisotropic_case(realdata):
    root = realdata / "spinalcord_t2s"
    if not root.is_dir():
        pytest.skip(f"{root} is absent")
    case = Case("cord", (root / "image.nii.gz",), root / "label.nii.gz")
    fingerprint, _, _ = check(Dataset("cord", (case,), ("background", "grey matter"), ("MRI",)), 1)
    assert fingerprint.spacings_mm[0] == pytest.approx((0.5, 0.5, 7.5), rel=0.01)
    assert fingerprint.class_voxels[0][1] > 0


def test_nothing_is_measured_of_test_cases_alone():
    tested = CaseReport(
        "a", flat=True, shape=(8, 8, 1), spacing_mm=(1, 1, 1), content="of an image-level case"
    )
    with pytest.raises(
        ValueError, match="every valid case is in the test split, expected at least one to train"
    ):
        measure([tested])


def test_the_fingerprint_has_the_median_thickness_of_the_cases_that_have_a_class():
    def report(*rows):
        shape = {"shape": (9, 9, 9), "spacing_mm": (1.0, 1.0, 1.0)}
        return CaseReport(
            "a", intensities=np.ones((1, 3)), thickness_mm=np.array([(9.0,) * 3, *rows]), **shape
        )

    absent = (0.0, 0.0, 0.0)
    reports = [
        report((2.0, 4.0, 6.0), absent),
        report((4.0, 4.0, 4.0), absent),
        report(absent, absent),
        report((6.0, 2.0, 5.0), absent),
    ]
    assert measure(reports).thickness_mm == ((4.0, 4.0, 5.0), absent)
