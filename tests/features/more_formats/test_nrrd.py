"""medconv/features/more_formats/nrrd.py: single slices and faults; `test_images.py` compares NRRD with other formats."""

import sys

import numpy as np
import pytest
from helpers.formats import assert_error_names, nrrd
from helpers.volumes import SHAPE, image_array, truncate

from medconv.data.io.images import read_array

pynrrd = pytest.importorskip("nrrd", reason="the extra `nrrd`")


def test_a_single_slice_is_1_mm_thick(tmp_path):
    header = {"space": "LPS", "space directions": [[0.5, 0, 0], [0, 0, 2]], "space origin": [1, 2, 3]}
    pynrrd.write(str(tmp_path / "a.nrrd"), np.ones((4, 5), np.int16), header)
    array, grid = read_array(tmp_path / "a.nrrd")
    assert array.shape == (4, 5, 1) and grid.spacing_mm == pytest.approx((0.5, 2, 1))
    np.testing.assert_allclose(grid.matrix @ (1, 1, 0, 1), (-1.5, -2, 5, 1))


def empty(path):
    path.with_suffix(".nrrd").touch()
    return path.with_suffix(".nrrd")


def text(path):
    path.with_suffix(".nrrd").write_text("This is not an image.\n" * 50)
    return path.with_suffix(".nrrd")


def axis_without_direction(path):
    directions = np.vstack([np.full((2, 3), np.nan), np.eye(3)])
    kinds = ["list", "list", *["domain"] * 3]
    return nrrd(path, np.ones((2, 2, *SHAPE), np.int16), **{"space directions": directions, "kinds": kinds})


def voxels_in_another_file(path):
    file = nrrd(path, image_array(0), encoding="raw")
    header, _, voxels = file.read_bytes().partition(b"\n\n")
    path.with_suffix(".raw").write_bytes(voxels)
    file.write_bytes(header + b"\ndata file: " + path.with_suffix(".raw").name.encode() + b"\n\n")
    return file


def too_large(path):
    file = nrrd(path, image_array(0), encoding="gzip")
    sizes = " ".join(map(str, SHAPE)).encode()
    file.write_bytes(file.read_bytes().replace(b"sizes: " + sizes, b"sizes: 30000 30000 30000"))
    return file


BAD_FILES = {
    "missing": (lambda p: p.with_suffix(".nrrd"), "no such file"),
    "empty": (empty, r"the file is empty \(0 bytes\)"),
    "text": (text, r"not a readable NRRD file \(.*\)"),
    "promises too much": (
        too_large,
        "declares 30000 x 30000 x 30000 voxels, which take about 301749 GB to read; this machine has",
    ),
    "cut": (lambda p: truncate(nrrd(p, image_array(0))), r"not a readable NRRD file \(.*\)"),
    "no space": (
        lambda p: nrrd(p, image_array(0), **{"space": None, "space dimension": 3}),
        "its `space` must be left-posterior-superior or similar, got ''",
    ),
    "scanner axes": (
        lambda p: nrrd(p, image_array(0), space="scanner-xyz"),
        "its `space` must be left-posterior-superior or similar, got 'scanner-xyz'",
    ),
    "metres": (
        lambda p: nrrd(p, image_array(0), **{"space units": ["m", "m", "m"]}),
        "its `space units` must be mm, got m",
    ),
    "voxels in another file": (
        voxels_in_another_file,
        "its voxels are in another file, expected them in this one",
    ),
    "colour": (
        lambda p: nrrd(p, np.zeros((*SHAPE, 3), np.uint8), kinds=["RGB-color", *["domain"] * 3]),
        r"a colour image \(RGB-color.*\), expected grey values",
    ),
    "five axes": (axis_without_direction, "expected 2 or 3 axes in space and up to one other, got 3 and 2"),
    "singular affine": (
        lambda p: nrrd(p, image_array(0), **{"space directions": np.diag([1.0, 1.0, 0.0])}),
        "its affine is singular, so it has no spacing",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_an_error_names_the_file_and_its_fault(tmp_path, fault):
    make, message = BAD_FILES[fault]
    assert_error_names(make(tmp_path / "scan"), message)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = nrrd(tmp_path / "a", image_array(0))
    monkeypatch.setitem(sys.modules, "nrrd", None)
    with pytest.raises(ValueError) as error:
        read_array(path)
    assert str(error.value) == f"{path}: reading NRRD needs the package nrrd: pip install 'medconv[nrrd]'"
