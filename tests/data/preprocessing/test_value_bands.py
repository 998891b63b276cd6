"""medconv/data/preprocessing/value_bands.py: images whose values are far from all others."""

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medconv.data.preprocessing.value_bands import (
    Band,
    are_hounsfield,
    band_of,
    even_step,
    far_cases,
    percentiles,
)

USUAL = [[-1000.0 + case, -800.0, 0.0, 50.0, 300.0 + 5 * case] for case in range(6)]


@pytest.mark.parametrize(
    ("row", "is_far"),
    [
        ([-1000, -800, 0, 50, 300], False),
        ([-1000, -100, 40, 60, 330], False),  # less air in it
        ([24, 224, 1024, 1074, 1324], True),  # 1024 too high
        ([-2024, -1824, -1024, -974, -724], True),
        ([24, -800, 0, 50, 300], False),  # only one percentile is beyond all others
        ([0, 0.05, 0.25, 0.27, 0.33], True),  # scaled to 0 to 1
        ([-9000, -8000, 0, 500, 3000], True),
        ([7, 7, 7, 7, 7], False),  # constant, which is said elsewhere
        ((), False),  # the case lacks the channel
    ],
)
def test_far_is_shifted_or_scaled_as_a_whole(row, is_far):
    band = band_of(USUAL)
    assert band is not None
    assert band.far(row) == is_far


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([-1000, -1000, -90, 40, 120], True),  # an abdomen with air around
        ([-1024, -900, -850, -700, 30], True),  # lungs
        ([-3024, -1000, -100, 40, 600], True),  # a head, padded outside the scanner's circle
        ([-110, -60, 30, 50, 90], False),  # cropped to soft tissue: nobody can tell
        ([24, 24, 934, 1064, 1144], False),  # 1024 too high
        ([0, 40, 300, 500, 900], False),
        ([-4000, -2000, 0, 2000, 4000], False),  # phases
        ([-900, -40, 0, 40, 900], False),  # velocities, in mm/s
        ([-2, -1, 0, 1, 2], False),
        ([-1000, -1000, -1000, -1000, -1000], False),
        ([-30000, -30000, -1000, 40, 120], False),
        ([-1024, -1024, 131, 246, 421], False),  # MR, filled with a value
        ([-2000, 214, 342, 486, 772], False),
        ([-2045, -2030, -1284, -601, 384], False),  # signed MR
    ],
)
def test_the_values_of_ct_are_known_where_each_image_has_them(row, expected):
    abdomen = [-1000, -1000, -90, 40, 120]
    assert are_hounsfield([abdomen, row, ()]) == expected
    assert not are_hounsfield([]) and not are_hounsfield([()])


def test_with_few_others_nothing_is_known():
    band = band_of(USUAL[:3])
    assert band is not None
    assert not band.far([value + 1e6 for value in USUAL[0]])


def test_a_case_is_compared_with_all_others_but_itself():
    shifted = [value + 1024 for value in USUAL[2]]
    rows = [*USUAL[:4], shifted, *USUAL[4:], ()]
    ((index, others),) = far_cases(rows)
    assert index == 4
    assert others == band_of(USUAL)
    assert far_cases(USUAL) == []
    assert far_cases([()] * 6) == []


def test_a_band_survives_a_file():
    band = band_of(USUAL)
    assert band is not None
    assert Band.from_plain(band.plain()) == band


@pytest.mark.parametrize("shape", [(400, 400, 60), (100, 100, 100), (256, 256, 9), (200, 200, 33)])
def test_samples_are_of_all_slices(shape):
    """Every n-th voxel is of one slice where n is a multiple of their number."""
    image = np.broadcast_to(np.arange(shape[2], dtype=np.float32), (1, *shape))
    step = even_step(np.prod(shape), 5000)
    assert len(np.unique(image.reshape(1, -1)[:, ::step])) == shape[2]
    assert 11550 / even_step(11550, 5000) >= 5000
    (row,) = percentiles(image)
    assert row == pytest.approx(np.percentile(np.arange(shape[2]), (5, 25, 50, 75, 95)), abs=1.01)


def test_percentiles_are_those_of_each_channel():
    image = np.stack([np.arange(101.0).reshape(1, 101, 1), np.full((1, 101, 1), 3.0)]).astype(np.float32)
    assert percentiles(image, missing=[1]) == ((5.0, 25.0, 50.0, 75.0, 95.0), ())


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("DRIVE/images/*.tif", 20),
        ("DSB2018/images/*.png", 40),  # fluorescence and stained tissue
        ("Task04_Hippocampus/imagesTr/*.nii.gz", 208),  # of scales that differ by 1000
        ("Dataset027_ACDC/imagesTr/*.nii.gz", 20),
    ],
)
def test_real_sets_have_no_false_alarm(pattern, count, realdata):
    """None of them is checked so by default, but for pictures: their normalisation adapts to each image."""
    rows = []
    for path in sorted(realdata.glob(pattern))[:count]:
        if path.suffix == ".gz":
            image = np.asarray(nib.load(path).dataobj, np.float32)[None]
        else:
            image = np.moveaxis(np.asarray(Image.open(path).convert("RGB"), np.float32), -1, 0)
        rows.append(percentiles(image))
    assert len(rows) == count
    assert [far_cases(list(of_channel)) for of_channel in zip(*rows, strict=True)] == [[]] * len(rows[0])
