"""medconv/features/mask_files: `medconv predict --masks`."""

import nibabel as nib
import numpy as np
import pytest
from helpers import members
from helpers.members import call

from medconv.utils.exit_codes import DONE, USER


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return members.train(tmp_path_factory.mktemp("masks"))


def voxels(path):
    return np.asarray(nib.load(path).dataobj)


def test_each_class_is_a_file_on_the_grid_of_the_image(trained, tmp_path, monkeypatch):
    images, checkpoint = trained
    output = tmp_path / "out"
    assert call(monkeypatch, checkpoint, images / "case_1.nii.gz", "--output", output, "--masks") == DONE
    label = nib.load(output / "case_1.nii.gz")
    files = sorted(path.name for path in (output / "masks/case_1").iterdir())
    assert files == ["box.nii.gz", "hole.nii.gz"]
    for value, name in enumerate(("box", "hole"), 1):
        mask = nib.load(output / "masks/case_1" / f"{name}.nii.gz")
        np.testing.assert_array_equal(np.asarray(mask.dataobj), np.asarray(label.dataobj) == value)
        np.testing.assert_array_equal(mask.affine, label.affine)
    assert (voxels(output / "masks/case_1/box.nii.gz") == 1).any()


def test_regions_are_masks_that_overlap(trained, tmp_path, monkeypatch):
    images, checkpoint = trained
    of_regions = members.variant(checkpoint, tmp_path / "regions.ckpt", members.regions)
    output = tmp_path / "out"
    assert call(monkeypatch, of_regions, images / "case_1.nii.gz", "--output", output, "--masks") == DONE
    label = voxels(output / "case_1.nii.gz")
    for name, values in {"a": (1, 2, 3), "b": (2, 3), "c": (3,)}.items():
        mask = voxels(output / f"masks/case_1/{name}.nii.gz")
        np.testing.assert_array_equal(mask, np.isin(label, values))


def test_masks_of_a_replaced_image_are_written_again(trained, tmp_path, monkeypatch):
    images, checkpoint = trained
    image = tmp_path / "in" / "a.nii.gz"
    image.parent.mkdir()
    image.write_bytes((images / "case_1.nii.gz").read_bytes())
    output = tmp_path / "out"
    arguments = (checkpoint, image.parent, "--output", output, "--masks")
    assert call(monkeypatch, *arguments) == DONE
    (output / "masks/a/.1234.box.nii.gz").touch()  # of a process that was killed
    (output / "masks/a/old.nii.gz").touch()
    image.write_bytes((images / "case_2.nii.gz").read_bytes())
    assert call(monkeypatch, *arguments, "--overwrite") == DONE
    assert sorted(path.name for path in (output / "masks/a").iterdir()) == ["box.nii.gz", "hole.nii.gz"]
    np.testing.assert_array_equal(voxels(output / "masks/a/box.nii.gz"), voxels(output / "a.nii.gz") == 1)


def test_a_class_that_is_no_file_name_is_refused(trained, tmp_path, monkeypatch, capsys):
    images, checkpoint = trained

    def rename(record):
        record["class_names"][1] = "left/right"
        record["targets"]["names"][0] = "left/right"

    renamed = members.variant(checkpoint, tmp_path / "renamed.ckpt", rename, seed=0)
    arguments = (renamed, images / "case_1.nii.gz", "--output", tmp_path / "out", "--masks")
    assert call(monkeypatch, *arguments) == USER
    assert "--masks: a class called 'left/right' cannot be the name of a file" in capsys.readouterr().err
