"""Images that are neither one NIfTI file nor DICOM: pairs, MGH, NRRD; the same volume in each, and what is
refused.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import AFFINE, SHAPE, image_array, label_array, rotation, save, save_raw, truncate

from medconv.data.io.images import (
    in_folder,
    read_array,
    read_image,
    read_label,
    stamp,
    stem,
    write_channels,
    write_label,
)

TURNED = np.eye(4)
TURNED[:3, :3] = rotation((10, -20, 30)) @ np.diag([0.7, 0.8, 3.0])
TURNED[:3, 3] = (-90, 12.5, 40)


def pair(path: Path, array: np.ndarray) -> Path:
    nib.save(nib.Nifti1Pair(array, TURNED), path.with_suffix(".img"))
    return path.with_suffix(".hdr")


def img(path: Path, array: np.ndarray) -> Path:
    return pair(path, array).with_suffix(".img")


def mgh(path: Path, array: np.ndarray) -> Path:
    nib.save(nib.MGHImage(array, TURNED), path.with_suffix(".mgh"))
    return path.with_suffix(".mgh")


def mgz(path: Path, array: np.ndarray) -> Path:
    nib.save(nib.MGHImage(array, TURNED), path.with_suffix(".mgz"))
    return path.with_suffix(".mgz")


def nrrd(path: Path, array: np.ndarray, axes: str = "left-posterior-superior", **header: Any) -> Path:
    """As 3D Slicer writes it, in left, posterior, superior; channels come first."""
    written = pytest.importorskip("nrrd", reason="the extra `nrrd`")
    signs = np.array([{"l": -1, "p": -1, "i": -1}.get(word[0], 1) for word in axes.split("-")])
    directions = (TURNED[:3, :3] * signs[:, None]).T
    if array.ndim == 4:
        array, directions = np.moveaxis(array, -1, 0), np.vstack([np.full(3, np.nan), directions])
    known = {"space": axes, "space directions": directions, "space origin": TURNED[:3, 3] * signs}
    kinds = ["list", *["domain"] * 3] if array.ndim == 4 else ["domain"] * 3
    content = {**known, "kinds": kinds, "encoding": "gzip", **header}
    written.write(str(path.with_suffix(".nrrd")), array, {k: v for k, v in content.items() if v is not None})
    return path.with_suffix(".nrrd")


def ras(path: Path, array: np.ndarray) -> Path:
    return nrrd(path, array, "right-anterior-superior")


WRITERS: dict[str, Callable[[Path, np.ndarray], Path]] = {
    "pair": pair, "img": img, "mgh": mgh, "mgz": mgz, "nrrd": nrrd, "nrrd in RAS": ras,
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("channels", [1, 2])
def test_the_same_volume_in_each_format(tmp_path: Path, kind: str, channels: int) -> None:
    volume = np.stack([image_array(seed) for seed in range(channels)], -1)
    volume = volume[..., 0] if channels == 1 else volume
    wanted, grid = read_image([save(tmp_path / "a.nii.gz", volume, TURNED)])
    path = WRITERS[kind](tmp_path / "a", volume)
    found, there = read_image([path])
    np.testing.assert_array_equal(found, wanted)
    assert there.shape == grid.shape and there.corner_distance(grid) < 1e-4
    assert stem(path) == "a"


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_written_for_it_lies_on_its_grid(tmp_path: Path, kind: str) -> None:
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


def test_one_slice_as_nrrd(tmp_path: Path) -> None:
    written = pytest.importorskip("nrrd", reason="the extra `nrrd`")
    header = {"space": "LPS", "space directions": [[0.5, 0, 0], [0, 0, 2]], "space origin": [1, 2, 3]}
    written.write(str(tmp_path / "a.nrrd"), np.ones((4, 5), np.int16), header)
    array, grid = read_array(tmp_path / "a.nrrd")
    assert array.shape == (4, 5, 1) and grid.spacing_mm == pytest.approx((0.5, 2, 1))
    np.testing.assert_allclose(grid.matrix @ (1, 1, 0, 1), (-1.5, -2, 5, 1))


def test_a_pair_is_one_image_of_its_folder(tmp_path: Path) -> None:
    path = pair(tmp_path / "a", image_array(0))
    save(tmp_path / "b.nii.gz", image_array(1))
    assert in_folder(tmp_path, "--input") == {"a": path, "b": tmp_path / "b.nii.gz"}
    before = stamp(path)
    assert stamp(path.with_suffix(".img")) == before
    os.utime(path.with_suffix(".img"), ns=(1, 1))  # the voxels are in the other file
    assert stamp(path) != before


def analyze(path: Path) -> Path:
    nib.save(nib.AnalyzeImage(image_array(0), AFFINE), path.with_suffix(".img"))
    return path.with_suffix(".hdr")


def empty(path: Path) -> Path:
    path.with_suffix(".nrrd").touch()
    return path.with_suffix(".nrrd")


def text(path: Path) -> Path:
    path.with_suffix(".nrrd").write_text("This is not an image.\n" * 50)
    return path.with_suffix(".nrrd")


def half_a_pair(path: Path) -> Path:
    made = pair(path, image_array(0))
    made.with_suffix(".img").unlink()
    return made


def changed_bit(path: Path) -> Path:
    """In a file that is not packed, where any byte decodes to something."""
    made = mgz(path, np.random.default_rng(0).integers(0, 256, (20, 20, 20)).astype(np.uint8))
    content = bytearray(gzip.compress(gzip.decompress(made.read_bytes()), compresslevel=0))
    content[len(content) // 2] ^= 1
    made.write_bytes(content)
    return made


def axis_without_direction(path: Path) -> Path:
    directions = np.vstack([np.full((2, 3), np.nan), np.eye(3)])
    kinds = ["list", "list", *["domain"] * 3]
    return nrrd(path, np.ones((2, 2, *SHAPE), np.int16), **{"space directions": directions, "kinds": kinds})


def elsewhere(path: Path) -> Path:
    """A header alone, which names another file for its voxels."""
    made = nrrd(path, image_array(0), encoding="raw")
    header, _, voxels = made.read_bytes().partition(b"\n\n")
    path.with_suffix(".raw").write_bytes(voxels)
    made.write_bytes(header + b"\ndata file: " + path.with_suffix(".raw").name.encode() + b"\n\n")
    return made


def in_units(path: Path, code: int) -> Path:
    return save_raw(
        path.with_suffix(".nii"), lambda header: header.__setitem__("xyzt_units", code + 8)
    )  # and seconds


FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Analyze": (
        analyze,
        "expected NIfTI or MGH, got .*Analyze.*, which does not store left and right",
    ),
    "half a pair": (half_a_pair, "damaged or truncated, its voxels cannot be read|not a readable NIfTI file"),
    "cut MGH": (
        lambda p: truncate(mgh(p, image_array(0))),
        "damaged or truncated, its voxels cannot be read",
    ),
    "a changed bit in MGZ": (changed_bit, "damaged or truncated, its voxels cannot be read .*CRC"),
    "missing NRRD": (lambda p: p.with_suffix(".nrrd"), "no such file"),
    "empty NRRD": (empty, r"the file is empty \(0 bytes\)"),
    "text as NRRD": (text, r"not a readable NRRD file \(.*\)"),
    "cut NRRD": (lambda p: truncate(nrrd(p, image_array(0))), r"not a readable NRRD file \(.*\)"),
    "NRRD without space": (
        lambda p: nrrd(p, image_array(0), **{"space": None, "space dimension": 3}),
        "its `space` must be left-posterior-superior or similar, got ''",
    ),
    "NRRD in scanner axes": (
        lambda p: nrrd(p, image_array(0), space="scanner-xyz"),
        "its `space` must be left-posterior-superior or similar, got 'scanner-xyz'",
    ),
    "NRRD in metres": (
        lambda p: nrrd(p, image_array(0), **{"space units": ["m", "m", "m"]}),
        "its `space units` must be mm, got m",
    ),
    "NRRD with its voxels elsewhere": (
        elsewhere,
        "its voxels are in another file, expected them in this one",
    ),
    "NIfTI in metres": (lambda p: in_units(p, 1), "its spacing is in metres, expected mm"),
    "NIfTI in microns": (lambda p: in_units(p, 3), "its spacing is in microns, expected mm"),
    "colour NRRD": (
        lambda p: nrrd(p, np.zeros((*SHAPE, 3), np.uint8), kinds=["RGB-color", *["domain"] * 3]),
        r"a colour image \(RGB-color.*\), expected grey values",
    ),
    "NRRD of five axes": (
        axis_without_direction,
        "expected 2 or 3 axes in space and up to one other, got 3 and 2",
    ),
    "singular NRRD": (
        lambda p: nrrd(p, image_array(0), **{"space directions": np.diag([1.0, 1.0, 0.0])}),
        "its affine is singular, so it has no spacing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_file_is_named_with_its_fault(tmp_path: Path, fault: str) -> None:
    if "NRRD" in fault:
        pytest.importorskip("nrrd", reason="the extra `nrrd`")
    make, message = FAULTS[fault]
    path = make(tmp_path / "scan")
    with pytest.raises(ValueError, match=message) as error:
        read_array(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_nrrd_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nrrd(tmp_path / "a", image_array(0))
    monkeypatch.setitem(sys.modules, "nrrd", None)
    with pytest.raises(ValueError) as error:
        read_array(path)
    assert str(error.value) == f"{path}: reading NRRD needs the package nrrd: pip install 'medconv[nrrd]'"


@pytest.mark.parametrize(("slope", "stored"), [(1 / 255, 255), (0.1, 10), (0.0039215684, 255)])
def test_a_scaled_integer_mask(tmp_path: Path, slope: float, stored: int) -> None:
    """0 and 255 with a slope of 1/255, as a float, read as 0 and 0.99999997."""

    def scaled(header: np.ndarray) -> None:
        header["scl_slope"], header["scl_inter"] = slope, 0

    mask = (label_array(0) > 0).astype(np.uint8)
    path = save_raw(tmp_path / "mask.nii.gz", scaled, (mask * stored).astype(np.int16))
    found = read_array(path)[0]
    assert slope == 0.1 or (found != np.rint(found)).any()
    np.testing.assert_array_equal(read_label(path)[0], mask)


def test_a_mask_between_whole_numbers_is_named_with_its_worst_value_and_place(tmp_path: Path) -> None:
    label = label_array(0).astype(np.float32)
    label[1, 0, 0], label[3, 2, 1], label[4, 4, 4] = 0.9995, 1.002, 0.75
    path = save(tmp_path / "mask.nii.gz", label)
    with pytest.raises(ValueError) as error:
        read_label(path)
    wanted = (
        "label values must be whole numbers, found 0.75 at voxel (4, 4, 4); within 0.001 of one "
        "they are rounded"
    )
    assert str(error.value) == f"{path}: {wanted}"
