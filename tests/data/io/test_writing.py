"""medconv/data/io/writing.py: label maps and channels on the grid of their image."""

import os

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import image_array, label_array, rotation, save
from PIL import Image

from medconv.data.io.images import read_array, read_label
from medconv.data.io.writing import write_channels, write_image, write_label


def test_a_written_label_map_has_the_grid_and_header_of_its_image(tmp_path):
    affine = np.eye(4)
    affine[:3, :3] = rotation((10, 20, 30)) @ np.diag([0.7, 0.8, 3.0])
    affine[:3, 3] = (-90, 12, 1e4)
    image = nib.Nifti1Image(image_array(0).astype(np.int16), affine)
    image.set_sform(affine, code=4)
    image.set_qform(affine, code=1)
    image.header.set_xyzt_units("mm", "sec")
    image.header["descrip"] = b"scanner"
    image.header["cal_max"] = 99
    image.header.set_intent("vector", allow_unknown=True)  # as ITK writes, and then reads of a label map
    image.header.set_slope_inter(0.25, 7)
    nib.save(image, tmp_path / "image.nii.gz")
    path = tmp_path / "out" / "deep" / "label.nii.gz"
    write_label(path, label_array(0).astype(np.int16), tmp_path / "image.nii.gz")
    source, written = nib.load(tmp_path / "image.nii.gz"), nib.load(path)
    np.testing.assert_array_equal(written.affine, source.affine)
    np.testing.assert_array_equal(written.get_qform(), source.get_qform())
    assert [int(written.header[k]) for k in ("sform_code", "qform_code")] == [4, 1]
    assert written.header.get_xyzt_units() == ("mm", "sec")
    assert written.header.get_intent()[0] == "none"
    assert written.get_data_dtype() == np.uint8 and float(written.header["cal_max"]) == 0
    np.testing.assert_array_equal(np.asanyarray(written.dataobj), label_array(0))
    assert [p.name for p in path.parent.iterdir()] == ["label.nii.gz"]  # no partial file is left


@pytest.mark.parametrize("name", ["image.nii.gz", "image.png"])
def test_an_axis_may_be_longer_than_nifti_1_has_it(tmp_path, name):
    shape = (40000, 2, 1)
    source = tmp_path / name
    if source.suffix == ".png":
        Image.fromarray(np.zeros(shape[1::-1], np.uint8)).save(source)
    else:
        nib.save(nib.Nifti2Image(np.zeros(shape, np.uint8), np.eye(4)), source)
    label = np.ones(shape, np.int16)
    write_label(tmp_path / f"out_{name}", label, source)
    np.testing.assert_array_equal(read_label(tmp_path / f"out_{name}")[0], label)
    write_image(tmp_path / "map.nii.gz", label, source)
    write_channels(tmp_path / "chances.nii.gz", [label, label], 2, source)
    assert nib.load(tmp_path / "map.nii.gz").shape == shape
    assert nib.load(tmp_path / "chances.nii.gz").shape == (*shape, 2)


def test_a_written_label_map_holds_more_than_255_classes(tmp_path):
    source = save(tmp_path / "image.nii.gz", image_array(0))
    label = label_array(0).astype(np.int16) * 150
    write_label(tmp_path / "label.nii.gz", label, source)
    np.testing.assert_array_equal(np.asanyarray(nib.load(tmp_path / "label.nii.gz").dataobj), label)


@pytest.mark.parametrize("shape", [(12, 14), (12, 14, 1), (12, 14, 10, 3)])
def test_a_written_label_map_has_the_spatial_shape_of_its_image(tmp_path, shape):
    source = save(tmp_path / "image.nii.gz", np.ones(shape, np.float32))
    label = label_array(0, (*shape, 1)[:3]).astype(np.int16)
    write_label(tmp_path / "label.nii.gz", label, source)
    assert nib.load(tmp_path / "label.nii.gz").shape == shape[:3]
    np.testing.assert_array_equal(read_label(tmp_path / "label.nii.gz")[0], label)


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("name", ["image.nii", "image.nii.gz"])
def test_written_channels_have_the_format_of_their_image(tmp_path, kind, name):
    nib.save(kind(image_array(0), np.diag([1, 2, 3, 1])), tmp_path / name)
    volumes = [image_array(seed) for seed in range(2)]
    write_channels(tmp_path / f"out_{name}", volumes, 2, tmp_path / name)
    image, grid = read_array(tmp_path / f"out_{name}")
    np.testing.assert_array_equal(image, np.stack(volumes, -1))
    assert grid.spacing_mm == (1, 2, 3) and type(nib.load(tmp_path / f"out_{name}")) is kind


def test_a_written_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    source, flushed = save(tmp_path / "image.nii.gz", image_array(0)), []
    sync = os.fsync

    def note(number):
        flushed.append((os.fstat(number).st_ino, {path.stat().st_ino for path in tmp_path.glob("[!.]*")}))
        sync(number)

    monkeypatch.setattr(os, "fsync", note)
    write_label(tmp_path / "label.nii.gz", label_array(0), source)
    write_channels(tmp_path / "channels.nii.gz", [image_array(0)], 1, source)
    written = [(tmp_path / f"{name}.nii.gz").stat().st_ino for name in ("label", "channels")]
    assert [file for file, _ in flushed] == written
    assert all(file not in named for file, named in flushed)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    source = save(tmp_path / "image.nii.gz", image_array(0))
    write_label(tmp_path / "label.nii.gz", label_array(0), source)
    before = (tmp_path / "label.nii.gz").read_bytes()

    def fail(image, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(nib, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_label(tmp_path / "label.nii.gz", label_array(1), source)
    assert (tmp_path / "label.nii.gz").read_bytes() == before
