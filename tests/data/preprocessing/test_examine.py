"""medconv/data/preprocessing/examine.py: what is measured of one case, and what is doubted in it."""

from itertools import groupby

import numpy as np
import pytest
from helpers.formats import set_fields
from helpers.loaded_models import segmentation
from helpers.volumes import AFFINE, image_array, label_array, save, save_raw, tiny, write_msd
from PIL import Image
from torch import nn

from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import msd
from medconv.data.per_case import with_source_spacing
from medconv.data.preprocessing.check import assumed_spacing, check, far_spacing, lost_spacing
from medconv.data.preprocessing.examine import (
    examine,
    header_doubts,
    is_no_data,
    repeated_slices,
    thickness_of,
    wrapped_negatives,
)
from medconv.inference.predictor import Predictor
from medconv.targets.label_map import LabelMapTargets


def test_report_keeps_a_sample_and_not_the_volume(tmp_path):
    """Reports of all cases are in memory at once."""
    dataset = tiny(tmp_path, 1)
    image, label = dataset.cases[0].files
    save(image, image_array(0, (40, 40, 40)))
    save(label, np.ones((40, 40, 40), np.uint8))
    sample = examine(dataset.cases[0], dataset).intensities
    assert sample is not None and sample.base is None
    assert 5_000 <= sample.size < 10_000


def test_ignored_pixels_are_left_out_of_the_intensities_of_pictures(tmp_path):
    """Such as the black frame of a photograph, which nobody labelled."""
    label = np.full((60, 60), 9, np.uint8)
    label[20:40, 20:40] = 0
    label[25:30, 25:30] = 1
    picture = np.where(label == 9, 0, 200).astype(np.uint8)
    for name, pixels in (("image", picture), ("label", label)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    case = Case("a", (tmp_path / "image.png",), tmp_path / "label.png")
    targets = LabelMapTargets(("one",), ((1,),), 9)
    dataset = Dataset("d", (case,), ("background", "one"), ("grey",), targets=targets)
    report = examine(case, dataset)
    assert not report.errors and set(report.intensities.ravel().tolist()) == {200}


def test_thickness_is_the_mean_length_of_runs():
    """Against a count voxel by voxel."""
    label = np.random.default_rng(0).integers(0, 4, (7, 6, 5)).astype(np.uint8)
    label[label == 3] = 9  # a value to ignore
    spacing_mm = (1.0, 0.5, 3.0)
    measured = thickness_of(label, np.bincount(label.ravel())[:3], spacing_mm)
    for value in range(3):
        for axis in range(3):
            runs = [
                len(list(run))
                for line in np.moveaxis(label, axis, -1).reshape(-1, label.shape[axis])
                for key, run in groupby(line)
                if key == value
            ]
            assert measured[value, axis] == pytest.approx(spacing_mm[axis] * np.mean(runs))


def test_a_ball_is_two_thirds_of_its_diameter_thick_and_small_ones_are_not_hidden():
    radius = 12
    axes = np.ogrid[-16:17, -16:17, -16:17]
    ball = (sum(axis**2 for axis in axes) < radius**2).astype(np.uint8)
    counts = np.bincount(ball.ravel())
    assert thickness_of(ball, counts, (1, 1, 1))[1] == pytest.approx([16, 16, 16], rel=0.05)
    specks = np.concatenate([ball, np.zeros((60, 33, 33), np.uint8)])
    specks[36::4, ::4, ::4] = 1  # single voxels
    assert thickness_of(specks, np.bincount(specks.ravel()), (1, 1, 1))[1].max() < 6


def test_repeated_slices_are_named(tmp_path):
    dataset = msd(write_msd(tmp_path))
    image = image_array(0)
    image[..., 4] = image[..., 3]
    image[..., 8] = image[..., 7] + np.float32(1e-3)
    path = save(dataset.cases[0].images[0], image)
    pairs = "slices 3 and 4 (equal), 7 and 8 (nearly equal) of 10 (third axis, from 0) repeat each other"
    assert check(dataset, 1).warnings == [f"case {dataset.cases[0].id}: {path}: {pairs}"]


def test_smooth_and_empty_slices_are_no_repetition():
    smooth = np.cumsum(image_array(0, (12, 14, 30)), axis=2)
    smooth[..., :3] = 0
    assert not list(repeated_slices(smooth[None]))
    assert not list(repeated_slices(image_array(0, (12, 14, 1))[None]))


def test_slices_of_a_shape_are_no_repetition():
    """Of the 1584 masks of AdrenalMNIST3D, one in eight has two slices that are equal or nearly so."""
    ball = np.stack([np.hypot(*np.mgrid[-8:9, -8:9]) < radius for radius in (3, 5, 6, 6, 5, 3)], axis=2)
    assert not list(repeated_slices(255 * ball[None].astype(np.float32)))
    shaded = 255 * ball + np.arange(17)[:, None, None].astype(np.float32)
    assert list(repeated_slices(shaded[None])) == [
        "slices 2 and 3 (equal) of 6 (third axis, from 0) repeat each other"
    ]


def test_unit_spacing_of_thin_volumes_is_suspicious(tmp_path):
    unit = (1.0, 1.0, 1.0)
    (warning,) = check(msd(write_msd(tmp_path, shape=(20, 60, 12), affine=np.eye(4))), 1).warnings
    assert "all 3 volumes have 1 x 1 x 1 mm, but 12 slices of 60 rows" in warning
    assert "so 1 x 1 x 7 mm is taken in its place" in warning
    assert "or set source_spacing_mm to the true spacing, such as" in warning
    assert not lost_spacing([(35, 50, 36)] * 2, [unit] * 2)
    assert not lost_spacing([(60, 60, 12)] * 2, [unit, (1.0, 1.0, 5.0)])
    assert not lost_spacing([(60, 60, 12), (60, 60, 50)], [unit] * 2)


def test_a_spacing_that_is_stated_is_not_doubted(tmp_path):
    dataset = msd(write_msd(tmp_path, shape=(20, 60, 12), affine=np.eye(4)))
    assert not check(with_source_spacing(dataset, [1, 1, 1]), 1).warnings


def test_the_few_slices_are_taken_to_be_thick_along_any_axis():
    unit = (1.0, 1.0, 1.0)
    assert assumed_spacing([(60, 12, 70), (60, 10, 70)], [unit] * 2) == [1.0, 7.0, 1.0]
    assert assumed_spacing([(60, 60)] * 2, [(1.0, 1.0)] * 2) is None


@pytest.mark.parametrize("value", [-32768.0, -1e8])
def test_a_no_data_value_of_small_range_is_named_once(tmp_path, value):
    """Also where it was interpolated: voxels at the edge have any value between."""
    dataset = msd(write_msd(tmp_path))
    for number, case in enumerate(dataset.cases[:2]):
        image = 100 * image_array(number).astype(np.float32)  # to about 1500, as in CT and MR
        image[:2], image[2] = value, value * np.linspace(0.1, 0.9, 140).reshape(14, 10)
        save(case.images[0], image)
    (warning,) = check(dataset, 1).warnings
    cases = ", ".join(case.id for case in dataset.cases[:2])
    assert warning.startswith(f"2 cases ({cases}): the lowest value ({value:.6g}) looks like a no-data value")


@pytest.mark.parametrize(
    "low_high", [(-1024, 3071), (-3024, 9), (-1, 1e-2), (0, 0), (-9, 0), (-32767, 32767)]
)
def test_values_of_images_are_no_no_data_values(low_high):
    assert not is_no_data(*low_high)


def test_nifti_without_orientation_is_named_once_per_dataset(tmp_path):
    dataset = msd(write_msd(tmp_path))
    for number, case in enumerate(dataset.cases[:2]):
        for path, array in zip(case.files, (image_array(number), label_array(number)), strict=True):
            save_raw(path, set_fields(sform_code=0, qform_code=0), array)
    (warning,) = check(dataset, 1).warnings
    first, second = (case.id for case in dataset.cases[:2])
    assert warning.startswith(f"2 cases ({first}, {second}): NIfTI files that do not say where left")
    predictor = Predictor([segmentation(nn.Conv3d(1, 2, 1))])
    for case, words in ((dataset.cases[0], "do not say where left"), (dataset.cases[2], None)):
        said = predictor.read(Case(case.id, case.images)).warning
        assert (words in said) if words else not said


def test_spacing_far_from_all_others_is_named():
    usual = [(0.6, 0.7, 5.0)] * 8
    spacings = [*usual, (62.5, 62.5, 500.0), (0.7, 0.6, 0.9)]
    cases = [f"case_{n}" for n in range(10)]
    (warning,) = far_spacing(cases, spacings)
    assert warning.startswith("2 cases (case_8, case_9): spacing 62.5 x 62.5 x 500 mm, where the median")
    assert "of all 10 cases is 0.6 x 0.7 x 5 mm" in warning
    assert far_spacing(cases[:8], usual) == []
    assert far_spacing([], []) == []  # every case has errors, which are what must be said
    assert far_spacing(cases[:3], [(1.0, 1.0), (2.0, 1.5), (0.5, 1.0)]) == []


def test_one_image_under_two_ids_is_named_whatever_its_format_and_axes(tmp_path):
    dataset = msd(write_msd(tmp_path, 5))
    images = [case.images[0] for case in dataset.cases]
    array = image_array(0).astype(np.int16)
    save(images[0], array)
    save(images[2], array.astype(np.float64))
    flipped = AFFINE @ np.diag([-1.0, 1, 1, 1])
    flipped[:3, 3] = (AFFINE @ [array.shape[0] - 1, 0, 0, 1])[:3]
    save(images[3], array[::-1], flipped)
    save(dataset.cases[3].label, label_array(3)[::-1], flipped)
    turned = AFFINE[:, [2, 0, 1, 3]]
    save(images[4], array.transpose(2, 0, 1), turned)
    save(dataset.cases[4].label, label_array(4).transpose(2, 0, 1), turned)
    result = check(dataset, 1)
    ids = [case.id for case in dataset.cases]
    (warning,) = result.warnings
    assert warning == (
        f"cases with the same image: {ids[0]} = {ids[2]} = {ids[3]} = {ids[4]}; where one of them is in "
        "validation or test, training skips the others"
    )
    contents = result.fingerprint.contents
    assert contents[0] == contents[2] == contents[3] == contents[4] != contents[1]


def test_constant_images_are_no_copies(tmp_path):
    dataset = msd(write_msd(tmp_path, 2))
    for case in dataset.cases:
        save(case.images[0], np.full_like(image_array(0), 3))
    result = check(dataset, 1)
    assert not any("more than once" in warning for warning in result.warnings)
    assert not any(result.fingerprint.contents)


def test_repeated_slices_are_found_where_a_piece_of_the_volume_ends():
    image = np.random.default_rng(0).normal(100, 30, (12, 14, 40)).astype(np.float32)
    for first in (15, 31):
        image[:, :, first + 1] = image[:, :, first]
    (warning,) = repeated_slices(image[None])
    assert "15 and 16 (equal), 31 and 32 (equal) of 40" in warning


def test_a_voxel_size_that_differs_from_the_sform_is_named(tmp_path):
    """Programs by ITK take the spacing from it, others from the sform."""
    path = save_raw(tmp_path / "a.nii", set_fields(pixdim=[1, 5, 5, 5, 0, 0, 0, 0]), image_array(0))
    assert list(header_doubts(path)) == [
        f"{path}: pixdim states 5 x 5 x 5 mm, sform 1 x 1.5 x 2 mm, which is used"
    ]
    assert list(header_doubts(save(tmp_path / "b.nii.gz", image_array(0)))) == []


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_bytes_that_the_header_does_not_describe_are_named(tmp_path, suffix):
    """A header of half the slices makes half an image, and one of int8 an image of the bytes of int16."""
    path = save_raw(tmp_path / f"a{suffix}", set_fields(dim=[3, 12, 14, 5, 1, 1, 1, 1]), image_array(0))
    (doubt,) = header_doubts(path)
    assert doubt.startswith(
        f"{path}: 3360 bytes follow the voxels that its header describes (12 x 14 x 5 of "
    )


def are_wrapped(values):
    return wrapped_negatives(values, values.min(), values.max())


def test_negative_values_stored_as_unsigned_ones_are_found():
    ct = np.array([-1000, -900, 0, 40, 300], np.int16)
    assert are_wrapped(ct.view(np.uint16).astype(np.float32))
    assert not are_wrapped(ct.astype(np.float32))
    assert not are_wrapped(np.array([0, 100, 65535, 65535], np.float32))  # a saturated detector
    assert not are_wrapped(np.linspace(0, 65535, 100, dtype=np.float32))
