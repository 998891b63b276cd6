"""medconv/data/io/images.py: the same volume in every format, label values, and written files."""

import os
import tracemalloc
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import formats
from helpers.formats import assert_error_names, set_fields
from helpers.volumes import AFFINE, SHAPE, image_array, label_array, save, save_raw

from medconv.data.io.images import in_folder, num_channels, read_array, read_image, read_label, stamp, stem
from medconv.data.io.writing import write_channels, write_label


@pytest.mark.parametrize(
    ("name", "expected"), [("a.nii.gz", "a"), ("a.nii", "a"), ("a.b_0000.nii.gz", "a.b_0000"), ("a.mha", "a")]
)
def test_stem_removes_the_suffix_of_the_format(name, expected):
    assert stem(Path("folder") / name) == expected


def test_the_stem_of_a_name_too_long_for_a_file_is_no_error():
    assert stem(Path(f"{'a' * 300}.x")) == "a" * 300


WRITERS = {
    "NIfTI header": formats.header_pair,
    "NIfTI voxels": formats.voxel_pair,
    "mgh": formats.mgh,
    "mgz": formats.mgz,
    "nrrd": formats.nrrd,
    "nrrd in RAS": formats.nrrd_in_ras,
    "mha": formats.mha,
    "mha of four axes": formats.mha_of_four_axes,
    "mhd": formats.mhd,
    "mhd, compressed": formats.mhd_compressed,
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("channels", [1, 2])
def test_each_format_gives_the_voxels_and_grid_of_nifti(tmp_path, kind, channels):
    volume = np.stack([image_array(seed) for seed in range(channels)], -1)
    volume = volume[..., 0] if channels == 1 else volume
    nifti, nifti_grid = read_image([save(tmp_path / "a.nii.gz", volume, formats.OBLIQUE)])
    path = WRITERS[kind](tmp_path / "a", volume)
    image, grid = read_image([path])
    np.testing.assert_array_equal(image, nifti)
    assert grid.shape == nifti_grid.shape and grid.corner_distance(nifti_grid) < 1e-4
    assert stem(path) == "a" and num_channels(path) == channels


@pytest.mark.parametrize("kind", WRITERS)
def test_results_are_written_on_the_grid_of_each_format(tmp_path, kind):
    path = WRITERS[kind](tmp_path / "a", image_array(0))
    write_label(tmp_path / "out.nii.gz", label_array(0), path)
    label, grid = read_label(tmp_path / "out.nii.gz")
    np.testing.assert_array_equal(label, label_array(0))
    assert grid.corner_distance(read_array(path)[1]) < 1e-4
    header = nib.load(tmp_path / "out.nii.gz").header
    assert [int(header[name]) for name in ("sform_code", "qform_code")] == [1, 1]
    np.testing.assert_allclose(header.get_qform(), header.get_sform(), atol=1e-4)
    assert header.get_xyzt_units()[0] == "mm" and header.get_data_dtype() == np.uint8
    write_channels(tmp_path / "both.nii.gz", [image_array(0)] * 2, 2, path)
    assert read_image([tmp_path / "both.nii.gz"])[1].corner_distance(grid) < 1e-4


def test_a_pair_is_one_image_and_its_stamp_covers_both_files(tmp_path):
    path = formats.header_pair(tmp_path / "a", image_array(0))
    save(tmp_path / "b.nii.gz", image_array(1))
    assert in_folder(tmp_path, "--input") == {"a": path, "b": tmp_path / "b.nii.gz"}
    before = stamp(path)
    assert stamp(path.with_suffix(".img")) == before
    os.utime(path.with_suffix(".img"), ns=(1, 1))  # the voxels are in the other file
    assert stamp(path) != before


def test_mhd_is_one_image_and_its_stamp_covers_its_voxels(tmp_path):
    path = formats.mhd(tmp_path / "a", image_array(0))
    assert in_folder(tmp_path, "--input") == {"a": path}
    before = stamp(path)
    os.utime(path.with_suffix(".raw"), ns=(1, 1))
    assert stamp(path) != before


def axes_in_one_plane(path):
    """None of them has length 0."""
    return save_raw(path, set_fields(srow_x=[1, 0, 1, 0], srow_y=[0, 1, 1, 0], srow_z=[0, 0, 0, 0]))


BAD_FILES = {
    "complex": (lambda p: save(p, image_array(0).astype(np.complex64)), "real numbers, got complex64"),
    "colour": (lambda p: save(p, np.zeros(SHAPE, [(c, "u1") for c in "RGB"])), "real numbers, got .*'R'"),
    "singular affine": (
        lambda p: save_raw(p, set_fields(srow_z=[0, 0, 0, 5])),
        "affine is singular, so it has no spacing.*5.0",
    ),
    "axes in one plane": (axes_in_one_plane, "affine is singular"),
    "NaN in the affine": (lambda p: save_raw(p, set_fields(srow_x=[np.nan] * 4)), "affine is singular"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_an_error_names_the_file_and_its_fault(tmp_path, fault):
    make, message = BAD_FILES[fault]
    assert_error_names(make(tmp_path / "scan.nii.gz"), message)


def test_a_spacing_in_micrometres_is_not_taken_for_a_singular_affine(tmp_path):
    path = save(tmp_path / "micro.nii.gz", image_array(0), np.diag([5e-4, 5e-4, 5e-4, 1]))
    assert read_array(path)[1].spacing_mm == pytest.approx((5e-4,) * 3)


def test_paths_may_have_spaces_and_letters_of_any_alphabet(tmp_path):
    path = save(tmp_path / "Größe und Übersicht" / "患者 1 é.nii.gz", image_array(0))
    np.testing.assert_array_equal(read_array(path)[0], image_array(0))
    written = path.with_name("маска 1.nii.gz")
    write_label(written, label_array(0).astype(np.int16), path)
    np.testing.assert_array_equal(read_label(written)[0], label_array(0))


def test_channels_are_read_from_separate_files_or_one_4d_file(tmp_path):
    channels = np.stack([image_array(i) for i in range(3)])
    single = [save(tmp_path / f"case_{i:04d}.nii.gz", channel) for i, channel in enumerate(channels)]
    together = save(tmp_path / "case.nii.gz", np.moveaxis(channels, 0, -1))
    for paths in (single, [together]):
        image, grid = read_image(paths)
        np.testing.assert_array_equal(image, channels)
        assert image.dtype == np.float32
        assert grid.shape == SHAPE and grid.spacing_mm == pytest.approx((1, 1.5, 2))


def test_a_2d_file_has_one_slice(tmp_path):
    image, grid = read_image([save(tmp_path / "flat.nii.gz", image_array(0, (12, 14)))])
    assert image.shape == (1, 12, 14, 1) and grid.shape == (12, 14, 1)
    label, _ = read_label(save(tmp_path / "label.nii.gz", label_array(0, (12, 14))))
    assert label.shape == (12, 14, 1)


@pytest.mark.parametrize("other", ["shape", "affine"])
def test_channels_on_different_grids_are_refused(tmp_path, other):
    first = save(tmp_path / "case_0000.nii.gz", image_array(0))
    shape, affine = ((12, 14, 9), AFFINE) if other == "shape" else (SHAPE, AFFINE @ np.diag([1, 1, 1.2, 1]))
    second = save(tmp_path / "case_0001.nii.gz", image_array(0, shape), affine)
    with pytest.raises(ValueError, match=rf"^{second}: .*{other}.*case_0000\.nii\.gz"):
        read_image([first, second])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_a_label_map_is_read_as_int16_from_any_type(tmp_path, dtype):
    label, grid = read_label(save(tmp_path / "label.nii.gz", label_array(0).astype(dtype)))
    assert label.dtype == np.int16 and label.shape == SHAPE == grid.shape
    np.testing.assert_array_equal(label, label_array(0))


def test_a_label_map_may_have_a_fourth_axis_of_length_1(tmp_path):
    label, _ = read_label(save(tmp_path / "label.nii.gz", label_array(0)[..., None]))
    np.testing.assert_array_equal(label, label_array(0))


def test_label_values_are_rounded_to_the_nearest_integer(tmp_path):
    label, _ = read_label(save(tmp_path / "label.nii.gz", label_array(0) - np.float32(1e-4)))
    np.testing.assert_array_equal(label, label_array(0))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, r"whole numbers, found 0\.5"),
        (-1, r"0\.\.32767, found -1\.0 to 2\.0"),
        (40000, r"0\.\.32767, found 0\.0 to 40000\.0"),
        (np.nan, "1 label values are not finite"),
        (np.inf, "1 label values are not finite"),
    ],
)
def test_an_invalid_label_value_is_named(tmp_path, value, message):
    label = label_array(0).astype(np.float32)
    label[0, 0, 0] = value
    path = save(tmp_path / "label.nii.gz", label)
    with pytest.raises(ValueError, match=message) as error:
        read_label(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_stray_value_of_a_renumbered_label_map_is_named_without_a_table_of_all_values(tmp_path):
    label = label_array(0).astype(np.uint32)
    label[0, 0, 0] = 2**32 - 1  # -1, once
    path = save(tmp_path / "label.nii.gz", label)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"label values must lie in 0\.\.32767, found 0 to 4294967295"):
        read_label(path, relabel=((0, 0), (1, 2), (2, 1)))
    assert tracemalloc.get_traced_memory()[1] < 1e8
    tracemalloc.stop()


@pytest.mark.parametrize(("slope", "stored"), [(1 / 255, 255), (0.1, 10), (0.0039215684, 255)])
def test_a_scaled_integer_mask_is_read_as_0_and_1(tmp_path, slope, stored):
    """0 and 255 with a slope of 1/255, as a float, read as 0 and 0.99999997."""
    mask = (label_array(0) > 0).astype(np.uint8)
    fields = set_fields(scl_slope=slope, scl_inter=0)
    path = save_raw(tmp_path / "mask.nii.gz", fields, (mask * stored).astype(np.int16))
    values = read_array(path)[0]
    assert slope == 0.1 or (values != np.rint(values)).any()
    np.testing.assert_array_equal(read_label(path)[0], mask)


def test_an_error_names_the_worst_label_value_and_its_voxel(tmp_path):
    label = label_array(0).astype(np.float32)
    label[1, 0, 0], label[3, 2, 1], label[4, 4, 4] = 0.9995, 1.002, 0.75
    path = save(tmp_path / "mask.nii.gz", label)
    with pytest.raises(ValueError) as error:
        read_label(path)
    message = (
        "label values must be whole numbers, found 0.75 at voxel (4, 4, 4); within 0.001 of one "
        "they are rounded"
    )
    assert str(error.value) == f"{path}: {message}"


def test_a_label_map_with_channels_is_refused(tmp_path):
    path = save(tmp_path / "label.nii.gz", np.zeros((*SHAPE, 2), np.uint8))
    message = r"label\.nii\.gz: .*one value per voxel, got shape \(12, 14, 10, 2\)"
    with pytest.raises(ValueError, match=message):
        read_label(path)
