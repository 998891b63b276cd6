"""One convention for single slices: a network sees the same pixels alike, in whatever format they are stored."""

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers import small_runs, tiny
from helpers.dicoms import AXIAL, one, radiograph, save
from PIL import Image

import medconv
from medconv import config
from medconv.data.io.images import read_label
from medconv.inference.load import load
from medconv.training import run
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io

CORONAL = (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)
# From columns and rows of a DICOM slice to left, posterior, superior
_RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def _pixels(number):
    """A picture that no flip leaves alone: bright in its upper left corner. Shape: (20 rows, 24 columns)."""
    pixels = np.random.default_rng(number).normal(60, 10, (20, 24))
    pixels[2:9, 3:14] += 120
    return pixels.clip(0, 255).astype(np.uint8)


def _trained(folder, images, labels):
    settings = [
        "data=image_mask", f"data.images='{images}'", f"data.labels={labels}",
        f"data.cache_dir={folder / 'prepared'}", f"run.dir={folder / 'run'}", *small_runs.SMALL,
        "model.channels=[4,8]", "model.strides=[2]", "model.kernel_size=3",
    ]  # fmt: skip
    checked = config.validate(tiny.composed(*settings))
    run.train(checked, RunDir.of(checked, {}))
    return medconv.load(folder / "run/checkpoints/best.ckpt", device="cpu", progress=False)


def _write_masks(folder):
    for number in range(6):
        mask = np.zeros((20, 24), np.uint8)
        mask[2:9, 3:14] = 1
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(folder / f"p{number}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on pictures."""
    root = tmp_path_factory.mktemp("pictures")
    _write_masks(root / "masks")
    (root / "images").mkdir()
    for number in range(6):
        Image.fromarray(_pixels(number)).save(root / f"images/p{number}.png")
    _trained(root, f"{root}/images/", f"{root}/masks/")
    return root


def _dicom(orientation):
    def write(folder, pixels):
        elements = {
            "ImagePositionPatient": [-20.0, 30.5, -7.25],
            "ImageOrientationPatient": list(orientation),
            "PixelSpacing": [0.2, 0.2],
            "SliceThickness": 3,
        }
        return save(one(pixels.astype(np.int16), **elements), folder / "slice.dcm")

    return write


def _radiograph(folder, pixels):
    return radiograph(folder / "radiograph.dcm", pixels.astype(np.uint16))


def _nifti(axes):
    """The slice as a viewer shows it, axial, stored with axes in these directions."""

    def write(folder, pixels):
        image = nib.Nifti1Image(pixels.T[..., None].astype(np.float32), _RAS_FROM_LPS)
        transform = nib.orientations.ornt_transform(
            nib.io_orientation(image.affine), nib.orientations.axcodes2ornt(axes)
        )
        path = folder / f"{axes}.nii.gz"
        nib.save(image.as_reoriented(transform), path)
        return path

    return write


@pytest.mark.parametrize(
    "write",
    [
        _radiograph,
        *map(_dicom, (AXIAL, CORONAL, SAGITTAL)),
        *map(_nifti, ("RAS", "LPS", "LAS", "ARS", "PRI")),
    ],
    ids=["radiograph", "axial", "coronal", "sagittal", "RAS", "LPS", "LAS", "ARS", "PRI"],
)
def test_a_network_of_pictures_sees_the_same_pixels_in_every_format(trained, tmp_path, write):
    predictor = medconv.load(trained / "run/checkpoints/best.ckpt", device="cpu", progress=False)
    pixels = _pixels(100)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    _, expected = predictor.label_and_probabilities(tmp_path / "p.png")
    path = write(tmp_path, pixels)
    _, actual = predictor.label_and_probabilities(path)
    if path.suffix == ".gz":  # in its own axes, turned back as anybody would
        image = nib.Nifti1Image(np.moveaxis(actual, 0, -1), nib.load(path).affine)
        transform = nib.orientations.ornt_transform(
            nib.io_orientation(image.affine), nib.io_orientation(_RAS_FROM_LPS)
        )
        actual = np.moveaxis(np.asarray(image.as_reoriented(transform).dataobj), -1, 0)
    assert expected[1].std() > 0.01  # the network tells places apart
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_pixels_of_a_picture_are_an_array_with_its_affine(trained, tmp_path):
    predictor = medconv.load(trained / "run/checkpoints/best.ckpt", device="cpu", progress=False)
    Image.fromarray(_pixels(100)).save(tmp_path / "p.png")
    _, expected = predictor.label_and_probabilities(tmp_path / "p.png")
    _, actual = predictor.label_and_probabilities(_pixels(100).T, affine=_RAS_FROM_LPS)
    np.testing.assert_array_equal(actual, expected)


def test_radiographs_with_masks_that_are_pictures_train_as_pictures_do(tmp_path):
    _write_masks(tmp_path / "masks")
    for number in range(6):
        radiograph(tmp_path / f"images/p{number}.dcm", _pixels(number).astype(np.uint16))
    predictor = _trained(tmp_path, f"{tmp_path}/images/{{id}}.dcm", f"{tmp_path}/masks/")
    label, grid = read_label(tmp_path / "masks/p0.png", tmp_path / "images/p0.dcm")
    assert grid.spacing_mm == pytest.approx((0.1, 0.2, 1))  # of the radiograph
    assert label[3, 2, 0] == 1
    assert predictor(tmp_path / "images/p0.dcm").shape == label.shape


def test_a_checkpoint_of_before_the_convention_is_refused(trained, tmp_path):
    content = checkpoint_io.read(trained / "run/checkpoints/best.ckpt")
    del content["medconv"]["preprocessing"]["single_slices"]
    path = tmp_path / "old.ckpt"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"old\.ckpt: was trained on single slices when each format had"):
        load(path)


def test_its_pixels_are_used_as_they_are_and_the_log_says_so(trained, tmp_path, caplog):
    predictor = medconv.load(trained / "run/checkpoints/best.ckpt", device="cpu", progress=False)
    predictor(_radiograph(tmp_path, _pixels(3)))
    assert "radiograph.dcm: its pixels are used as they are, whatever their size in mm" in caplog.text
    nib.save(nib.Nifti1Image(_pixels(3).T.astype(np.float32), np.eye(4)), tmp_path / "flat.nii.gz")
    assert predictor(tmp_path / "flat.nii.gz").shape == (*_pixels(3).T.shape, 1)  # of two axes
    nib.save(nib.Nifti1Image(np.zeros((8, 8, 4), np.float32), np.eye(4)), tmp_path / "volume.nii.gz")
    for volume in (tmp_path / "volume.nii.gz", nib.load(tmp_path / "volume.nii.gz")):
        with pytest.raises(ValueError, match="the network is 2D, the image has shape"):
            predictor(volume)
    caplog.clear()
    Image.fromarray(_pixels(3)).save(tmp_path / "p.png")
    predictor(tmp_path / "p.png")
    assert caplog.text == ""
