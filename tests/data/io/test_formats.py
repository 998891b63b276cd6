"""medconv/data/io/formats.py: a format of one's own is read, found in folders and a template of results."""

import sys
from types import ModuleType

import numpy as np
import pytest
from helpers.formats import OBLIQUE
from helpers.volumes import image_array, label_array

from medconv import doors
from medconv.data.datasets.folder import folder
from medconv.data.io.formats import ImageFormat
from medconv.data.io.images import formats, in_folder, read_image, read_label, stamp, stem
from medconv.data.io.writing import write_label
from medconv.inference.inputs import find_cases


def read(path):
    with np.load(path) as file:
        return file["voxels"], file["affine"]


def grid(path):
    array, affine = read(path)
    return array.shape, affine


def save(path, voxels):
    path.parent.mkdir(exist_ok=True)
    np.savez(path, voxels=voxels, affine=OBLIQUE)
    return path


def enter(monkeypatch, suffix):
    """A package of the user's own brings a format of this suffix."""
    package = ModuleType("mine_with_format")
    package.FORMAT = ImageFormat(suffixes=(suffix,), read=read, grid=grid)
    package.IMAGE_FORMATS = ("mine_with_format:FORMAT",)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    doors.add_package(package.__name__)


@pytest.fixture
def entered(monkeypatch):
    enter(monkeypatch, ".scan.npz")


def test_a_format_that_entered_is_read_found_and_a_template_of_results(tmp_path, entered):
    image, label = save(tmp_path / "images/a.scan.npz", image_array(0)), tmp_path / "labels/a.scan.npz"
    save(label, label_array(0))
    np.testing.assert_array_equal(read_image([image])[0][0], image_array(0))
    np.testing.assert_array_equal(read_label(label)[0], label_array(0))
    assert stem(image) == "a" and stamp(image) == [image.stat().st_size, image.stat().st_mtime_ns]
    write_label(tmp_path / "a.nii.gz", label_array(1), image)
    written, its_grid = read_label(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(written, label_array(1))
    np.testing.assert_allclose(its_grid.matrix, OBLIQUE, atol=1e-5)
    assert in_folder(image.parent, "--input") == {"a": image}
    assert [case.images for case in find_cases(image.parent, 1)] == [(image,)]
    (case,) = folder(str(image.parent), str(label.parent)).cases
    assert (case.id, case.images, case.label) == ("a", (image,), label)


def test_faults_name_the_file(tmp_path, entered):
    with pytest.raises(ValueError, match=r"b\.scan\.npz: no such file"):
        read_image([tmp_path / "b.scan.npz"])
    with pytest.raises(ValueError, match=r"a\.scan\.npz: expected 2, 3 or 4 axes .*got shape \(3,\)"):
        read_image([save(tmp_path / "a.scan.npz", np.ones(3))])


@pytest.mark.parametrize("suffix", ["npz", ".nii", ".png", ".nrrd"])
def test_a_suffix_has_a_dot_and_one_format(monkeypatch, suffix):
    enter(monkeypatch, suffix)
    with pytest.raises(ValueError, match=rf"expected a dot and one format of each, got \['{suffix}'\]"):
        formats()


def test_formats_are_listed_in_messages(tmp_path, entered):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"no image there \(\.nii\.gz, .*\.nrrd, .*\.scan\.npz, .*\.png"):
        in_folder(tmp_path, "--input")
