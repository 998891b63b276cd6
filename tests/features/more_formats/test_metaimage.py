"""medconv/features/more_formats/metaimage.py: label maps, slices and faults; `test_images.py` compares it."""

from pathlib import Path

import numpy as np
import pytest
from helpers.formats import OBLIQUE, assert_error_names, mha, mhd, mhd_compressed
from helpers.volumes import image_array, label_array, truncate

from medconv.data.io.images import label_suffix, read_array, read_label, shape_and_affine
from medconv.data.io.writing import write_label

sitk = pytest.importorskip("SimpleITK", reason="the extra `itk`")


def test_a_label_map_is_written_as_mha_on_the_grid_of_its_image(tmp_path):
    path = mha(tmp_path / "a", image_array(0))
    write_label(tmp_path / "out.mha", label_array(0), path)
    label, grid = read_label(tmp_path / "out.mha")
    np.testing.assert_array_equal(label, label_array(0))
    assert grid.corner_distance(read_array(path)[1]) < 1e-4
    assert sitk.ReadImage(str(tmp_path / "out.mha")).GetPixelIDTypeAsString() == "8-bit unsigned integer"


def test_the_header_alone_gives_the_grid(tmp_path):
    shape, affine = shape_and_affine(mha(tmp_path / "a", image_array(0)))
    assert shape == image_array(0).shape
    np.testing.assert_allclose(affine, OBLIQUE, atol=1e-6)


def test_a_2d_image_is_one_slice(tmp_path):
    image = sitk.GetImageFromArray(np.arange(20, dtype=np.int16).reshape(4, 5))
    image.SetSpacing([0.5, 0.25])
    sitk.WriteImage(image, str(tmp_path / "a.mha"))
    array, grid = read_array(tmp_path / "a.mha")
    assert array.shape == (5, 4, 1) and array[1, 2, 0] == 11
    assert grid.spacing_mm == (0.5, 0.25, 1.0)


def test_predictions_have_the_format_that_all_images_have():
    first, second = Path("a.mha"), Path("b.mha")
    assert label_suffix([first, second]) == ".mha"
    assert label_suffix([first, Path("c.nii.gz")]) == ".nii.gz"
    assert label_suffix([Path("a.nrrd")]) == ".nii.gz"
    assert label_suffix([Path("a.jpg")]) == ".png"


def edited(path, old, new):
    file = mha(path, image_array(0))
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    return file


def uncompressed(path, old, new):
    file = mha(path, image_array(0))
    sitk.WriteImage(sitk.ReadImage(str(file)), str(file), False)
    file.write_bytes(file.read_bytes().replace(old, new))
    return file


def without_voxels(path):
    file = mhd(path, image_array(0))
    file.with_suffix(".raw").unlink()
    return file


BAD_FILES = {
    "missing": (lambda p: p.with_suffix(".mha"), "no such file"),
    "cut": (lambda p: truncate(mha(p, image_array(0))), "not a readable MetaImage file"),
    "cut in the header": (lambda p: truncate(mha(p, image_array(0)), 0.005), "has no ElementDataFile"),
    "voxels elsewhere": (
        lambda p: edited(p, b"= LOCAL", b"= /etc/passwd"),
        "its voxels must be in it .*, or in one file beside it, got /etc/passwd",
    ),
    "voxels in the folder above": (
        lambda p: edited(p, b"= LOCAL", b"= ../scan.raw"),
        "its voxels must be in it .*, or in one file beside it, got ../scan.raw",
    ),
    "voxels in many files": (lambda p: edited(p, b"= LOCAL", b"= LIST"), "in one file beside it, got LIST"),
    "without its voxels": (without_voxels, "in one file beside it, got scan.raw"),
    "promises too much": (
        lambda p: edited(p, b"DimSize = 12 14 10", b"DimSize = 30000 30000 30000"),
        "declares 30000 x 30000 x 30000 voxels, which take about 301749 GB to read; this machine has",
    ),
    "promises more": (
        lambda p: edited(p, b"DimSize = 12 14 10", b"DimSize = 12 14 50"),
        r"not a readable MetaImage file \(6720 bytes of voxels, the header of scan.mha declares 33600\)",
    ),
    "promises less": (
        lambda p: edited(p, b"DimSize = 12 14 10", b"DimSize = 12 14 5"),
        r"not a readable MetaImage file \(6720 bytes of voxels, the header of scan.mha declares 3360\)",
    ),
    "promises more, not compressed": (
        lambda p: uncompressed(p, b"DimSize = 12 14 10", b"DimSize = 12 14 50"),
        "not a readable MetaImage file",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_an_error_names_the_file_and_its_fault(tmp_path, fault):
    make, message = BAD_FILES[fault]
    assert_error_names(make(tmp_path / "scan"), message)


def test_voxels_of_another_size_than_the_header_says_are_refused(tmp_path):
    """SimpleITK would read the first of them: half of a file of int16, taken for int8, is an image too."""
    path = mhd(tmp_path / "scan", image_array(0).astype(np.int16))
    path.write_text(path.read_text().replace("MET_SHORT", "MET_CHAR"))
    voxels = path.with_suffix(".raw")
    with pytest.raises(
        ValueError, match=r"3360 bytes of voxels, the header of scan.mhd declares 1680"
    ) as error:
        read_array(path)
    assert str(error.value).startswith(f"{voxels}: ")


def test_compressed_voxels_beside_a_header_that_are_cut_off_are_refused(tmp_path):
    path = mhd_compressed(tmp_path / "scan", image_array(0))
    truncate(path.with_suffix(".zraw"))
    assert_error_names(path, "not a readable MetaImage file")
