"""medconv/data/io/images.py: what a NIfTI file holds, what is wrong with it in words, and how a label map
is written.
"""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import (
    AFFINE,
    SHAPE,
    image_array,
    label_array,
    rotation,
    save,
    save_raw,
    truncate,
    unprivileged,
)

from medconv.data.io.images import (
    read_array,
    read_header,
    read_image,
    read_label,
    stem,
    write_channels,
    write_label,
)


@pytest.mark.parametrize(
    ("name", "wanted"), [("a.nii.gz", "a"), ("a.nii", "a"), ("a.b_0000.nii.gz", "a.b_0000"), ("a.mha", "a")]
)
def test_stem(name: str, wanted: str) -> None:
    assert stem(Path("folder") / name) == wanted


def set_fields(**fields: object) -> Callable[[np.ndarray], None]:
    def edit(header: np.ndarray) -> None:
        for name, value in fields.items():
            header[name] = value

    return edit


def damage(path: Path) -> Path:
    """Overwrite the start of the compressed stream."""
    content = bytearray(path.read_bytes())
    content[30:60] = bytes(30)
    path.write_bytes(content)
    return path


def zero_bytes(path: Path) -> Path:
    path.touch()
    return path


def text(path: Path) -> Path:
    path.write_text("This is not an image.\n" * 50)
    return path


def zipped_text(path: Path) -> Path:
    path.write_bytes(gzip.compress(b"This is not an image.\n" * 50))
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def gifti(path: Path) -> Path:
    nib.save(nib.GiftiImage(), path.with_name("scan.gii"))
    return path.with_name("scan.gii")


def zero_spacing(path: Path) -> Path:
    return save_raw(path, set_fields(sform_code=0, qform_code=1, pixdim=[1, 1, 0, 2, 0, 0, 0, 0]))


def singular(path: Path) -> Path:
    return save_raw(path, set_fields(srow_z=[0, 0, 0, 5]))


def linked_axes(path: Path) -> Path:
    """Three axes of good length that lie in one plane."""
    return save_raw(path, set_fields(srow_x=[1, 0, 1, 0], srow_y=[0, 1, 1, 0], srow_z=[0, 0, 0, 0]))


BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda p: p, "no such file"),
    "folder": (folder, "a folder without a DICOM file, expected an image or a series"),
    "zero bytes": (zero_bytes, r"empty \(0 bytes\)"),
    "text": (text, r"not a readable NIfTI file \(.*not a gzip"),
    "zipped text": (zipped_text, "not a readable NIfTI file"),
    "wrong magic": (
        lambda p: save_raw(p, set_fields(magic=b"abc", sizeof_hdr=5)),
        "not a readable NIfTI file",
    ),
    "other format": (gifti, "expected NIfTI or MGH, got GiftiImage"),
    "unknown datatype": (lambda p: save_raw(p, set_fields(datatype=999)), "not a readable NIfTI file .*999"),
    "infinite intercept": (
        lambda p: save_raw(p, set_fields(scl_slope=1, scl_inter=np.inf)),
        "not a readable NIfTI file",
    ),
    "cut in the header": (lambda p: truncate(save(p, image_array(0)), 0.01), "not a readable NIfTI file"),
    "cut in the middle": (lambda p: truncate(save(p, image_array(0))), "damaged or truncated"),
    "overwritten": (
        lambda p: damage(save(p, image_array(0))),
        r"not a readable NIfTI file|damaged or truncated",
    ),
    "promises more": (
        lambda p: save_raw(p, set_fields(dim=[3, 12, 14, 50, 1, 1, 1, 1])),
        "damaged.*Expected 33600 bytes",
    ),
    "promises too much": (
        lambda p: save_raw(p, set_fields(dim=[3, 32767, 32767, 32767, 1, 1, 1, 1])),
        r"damaged or truncated.*\(\S",
    ),
    "negative size": (
        lambda p: save_raw(p, set_fields(dim=[3, 12, -14, 10, 1, 1, 1, 1])),
        r"one voxel.*\(12, -14, 10\)",
    ),
    "no voxels": (
        lambda p: save_raw(p, set_fields(dim=[3, 12, 0, 10, 1, 1, 1, 1])),
        r"at least one voxel.*\(12, 0, 10\)",
    ),
    "one axis": (lambda p: save(p, np.ones(5, np.float32)), r"2, 3 or 4 axes"),
    "five axes": (
        lambda p: save(p, np.ones((3, 3, 3, 2, 2), np.float32)),
        r"2, 3 or 4 axes .*\(3, 3, 3, 2, 2\)",
    ),
    "complex": (lambda p: save(p, image_array(0).astype(np.complex64)), "real numbers, got complex64"),
    "colour": (lambda p: save(p, np.zeros(SHAPE, [(c, "u1") for c in "RGB"])), "real numbers, got .*'R'"),
    "singular affine": (singular, "affine is singular, so it has no spacing.*5.0"),
    "axes in one plane": (linked_axes, "affine is singular"),
    "NaN in the affine": (lambda p: save_raw(p, set_fields(srow_x=[np.nan] * 4)), "affine is singular"),
    "zero spacing": (zero_spacing, "spacing is 0 mm along axis 1, expected more than 0"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_file_is_named_with_its_fault(tmp_path: Path, fault: str) -> None:
    make, message = BAD_FILES[fault]
    path = make(tmp_path / "scan.nii.gz")
    with pytest.raises(ValueError, match=message) as error:
        read_array(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)  # `check` has one line per fault


def test_no_permission(open_folder: Path) -> None:
    path = save(open_folder / "folder" / "scan.nii.gz", image_array(0))
    assert unprivileged(read_array, path) == ""
    path.chmod(0)
    assert unprivileged(read_array, path) == f"ValueError: {path}: no permission to read it"
    path.chmod(0o644)
    path.parent.chmod(0)
    assert unprivileged(read_array, path) == f"ValueError: {path}: no permission to read it"
    path.parent.chmod(0o755)


def test_damage_that_keeps_the_length_is_noticed(tmp_path: Path) -> None:
    """Where nothing is packed, as in noise, any byte decodes to something; only the checksum at the end
    tells.
    """
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 40)).astype(np.uint8)
    path = save(tmp_path / "scan.nii.gz", noise)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0))
    np.testing.assert_array_equal(read_array(path)[0], noise)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not np.array_equal(np.asanyarray(nib.load(path).dataobj), noise)  # what nibabel alone makes of it
    with pytest.raises(
        ValueError, match=r"scan\.nii\.gz: damaged or truncated, its voxels cannot be read \(CRC check failed"
    ):
        read_array(path)


def test_voxels_of_an_uncompressed_file_that_promises_more(tmp_path: Path) -> None:
    path = save_raw(tmp_path / "scan.nii", set_fields(dim=[3, 12, 14, 50, 1, 1, 1, 1]))
    assert read_header(path).shape == (12, 14, 50)  # the header alone is fine
    with pytest.raises(ValueError, match=r"scan\.nii: damaged or truncated"):
        read_array(path)


def test_one_slice_may_have_no_thickness(tmp_path: Path) -> None:
    fields = set_fields(sform_code=0, qform_code=1, pixdim=[1, 0.5, 0.7, 0, 0, 0, 0, 0])
    array, grid = read_array(save_raw(tmp_path / "flat.nii.gz", fields, np.ones((6, 7, 1), np.float32)))
    assert array.shape == (6, 7, 1)
    assert grid.spacing_mm == pytest.approx((0.5, 0.7, 1))


def test_zero_in_pixdim_does_not_matter_beside_an_sform(tmp_path: Path) -> None:
    path = save_raw(tmp_path / "scan.nii.gz", set_fields(sform_code=1, pixdim=[1, 0, 0, 0, 0, 0, 0, 0]))
    assert read_array(path)[1].spacing_mm == pytest.approx((1, 1.5, 2))


def test_micrometres_are_no_singular_affine(tmp_path: Path) -> None:
    path = save(tmp_path / "micro.nii.gz", image_array(0), np.diag([5e-4, 5e-4, 5e-4, 1]))
    assert read_array(path)[1].spacing_mm == pytest.approx((5e-4,) * 3)


def test_spaces_and_letters_of_other_alphabets(tmp_path: Path) -> None:
    path = save(tmp_path / "Größe und Übersicht" / "患者 1 é.nii.gz", image_array(0))
    np.testing.assert_array_equal(read_array(path)[0], image_array(0))
    written = path.with_name("маска 1.nii.gz")
    write_label(written, label_array(0).astype(np.int16), path)
    np.testing.assert_array_equal(read_label(written)[0], label_array(0))


def test_scaled_voxels_are_read_as_the_header_says(tmp_path: Path) -> None:
    stored = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    path = save_raw(tmp_path / "scan.nii.gz", set_fields(scl_slope=0.5, scl_inter=-10), stored)
    np.testing.assert_allclose(read_array(path)[0], stored * 0.5 - 10)


def test_image_of_one_file_per_channel_and_of_one_4d_file(tmp_path: Path) -> None:
    channels = np.stack([image_array(i) for i in range(3)])
    single = [save(tmp_path / f"case_{i:04d}.nii.gz", channel) for i, channel in enumerate(channels)]
    together = save(tmp_path / "case.nii.gz", np.moveaxis(channels, 0, -1))
    for paths in (single, [together]):
        image, grid = read_image(paths)
        np.testing.assert_array_equal(image, channels)
        assert image.dtype == np.float32
        assert grid.shape == SHAPE and grid.spacing_mm == pytest.approx((1, 1.5, 2))


def test_a_2d_file_has_one_slice(tmp_path: Path) -> None:
    image, grid = read_image([save(tmp_path / "flat.nii.gz", image_array(0, (12, 14)))])
    assert image.shape == (1, 12, 14, 1) and grid.shape == (12, 14, 1)
    label, _ = read_label(save(tmp_path / "label.nii.gz", label_array(0, (12, 14))))
    assert label.shape == (12, 14, 1)


@pytest.mark.parametrize("other", ["shape", "affine"])
def test_channels_on_different_grids(tmp_path: Path, other: str) -> None:
    first = save(tmp_path / "case_0000.nii.gz", image_array(0))
    shape, affine = ((12, 14, 9), AFFINE) if other == "shape" else (SHAPE, AFFINE @ np.diag([1, 1, 1.2, 1]))
    second = save(tmp_path / "case_0001.nii.gz", image_array(0, shape), affine)
    with pytest.raises(ValueError, match=rf"^{second}: .*{other}.*case_0000\.nii\.gz"):
        read_image([first, second])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_label_of_any_type(tmp_path: Path, dtype: type) -> None:
    label, grid = read_label(save(tmp_path / "label.nii.gz", label_array(0).astype(dtype)))
    assert label.dtype == np.int16 and label.shape == SHAPE == grid.shape
    np.testing.assert_array_equal(label, label_array(0))


def test_label_with_a_fourth_axis_of_one(tmp_path: Path) -> None:
    label, _ = read_label(save(tmp_path / "label.nii.gz", label_array(0)[..., None]))
    np.testing.assert_array_equal(label, label_array(0))


def test_label_that_is_off_by_a_rounding_error(tmp_path: Path) -> None:
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
def test_label_values_that_are_none(tmp_path: Path, value: float, message: str) -> None:
    label = label_array(0).astype(np.float32)
    label[0, 0, 0] = value
    path = save(tmp_path / "label.nii.gz", label)
    with pytest.raises(ValueError, match=message) as error:
        read_label(path)
    assert str(error.value).startswith(f"{path}: ")


def test_label_with_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "label.nii.gz", np.zeros((*SHAPE, 2), np.uint8))
    with pytest.raises(
        ValueError, match=r"label\.nii\.gz: .*one value per voxel, got shape \(12, 14, 10, 2\)"
    ):
        read_label(path)


def test_written_label_has_the_image_grid_and_header(tmp_path: Path) -> None:
    affine = np.eye(4)
    affine[:3, :3] = rotation((10, 20, 30)) @ np.diag([0.7, 0.8, 3.0])
    affine[:3, 3] = (-90, 12, 1e4)
    image = nib.Nifti1Image(image_array(0).astype(np.int16), affine)
    image.set_sform(affine, code=4)
    image.set_qform(affine, code=1)
    image.header.set_xyzt_units("mm", "sec")
    image.header["descrip"] = b"scanner"
    image.header["cal_max"] = 99
    image.header.set_slope_inter(0.25, 7)
    nib.save(image, tmp_path / "image.nii.gz")
    path = tmp_path / "out" / "deep" / "label.nii.gz"
    write_label(path, label_array(0).astype(np.int16), tmp_path / "image.nii.gz")
    source, written = nib.load(tmp_path / "image.nii.gz"), nib.load(path)
    np.testing.assert_array_equal(written.affine, source.affine)
    np.testing.assert_array_equal(written.get_qform(), source.get_qform())
    assert [int(written.header[k]) for k in ("sform_code", "qform_code")] == [4, 1]
    assert written.header.get_xyzt_units() == ("mm", "sec")
    assert written.get_data_dtype() == np.uint8 and float(written.header["cal_max"]) == 0
    np.testing.assert_array_equal(np.asanyarray(written.dataobj), label_array(0))
    assert [p.name for p in path.parent.iterdir()] == ["label.nii.gz"]  # no partial file is left


def test_written_label_of_many_classes(tmp_path: Path) -> None:
    source = save(tmp_path / "image.nii.gz", image_array(0))
    label = label_array(0).astype(np.int16) * 150
    write_label(tmp_path / "label.nii.gz", label, source)
    np.testing.assert_array_equal(np.asanyarray(nib.load(tmp_path / "label.nii.gz").dataobj), label)


@pytest.mark.parametrize("shape", [(12, 14), (12, 14, 1), (12, 14, 10, 3)])
def test_written_label_of_2d_and_4d_images(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = save(tmp_path / "image.nii.gz", np.ones(shape, np.float32))
    label = label_array(0, (*shape, 1)[:3]).astype(np.int16)
    write_label(tmp_path / "label.nii.gz", label, source)
    assert nib.load(tmp_path / "label.nii.gz").shape == shape[:3]
    np.testing.assert_array_equal(read_label(tmp_path / "label.nii.gz")[0], label)


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("name", ["image.nii", "image.nii.gz"])
def test_written_channels(tmp_path: Path, kind: type, name: str) -> None:
    nib.save(kind(image_array(0), np.diag([1, 2, 3, 1])), tmp_path / name)
    volumes = [image_array(seed) for seed in range(2)]
    write_channels(tmp_path / f"out_{name}", volumes, 2, tmp_path / name)
    found, grid = read_array(tmp_path / f"out_{name}")
    np.testing.assert_array_equal(found, np.stack(volumes, -1))
    assert grid.spacing_mm == (1, 2, 3) and type(nib.load(tmp_path / f"out_{name}")) is kind


def test_written_files_are_on_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, flushed = save(tmp_path / "image.nii.gz", image_array(0)), []
    sync = os.fsync

    def note(number: int) -> None:
        flushed.append((os.fstat(number).st_ino, {path.stat().st_ino for path in tmp_path.glob("[!.]*")}))
        sync(number)

    monkeypatch.setattr(os, "fsync", note)
    write_label(tmp_path / "label.nii.gz", label_array(0), source)
    write_channels(tmp_path / "channels.nii.gz", [image_array(0)], 1, source)
    assert [file for file, _ in flushed] == [
        (tmp_path / f"{n}.nii.gz").stat().st_ino for n in ("label", "channels")
    ]
    assert all(file not in named for file, named in flushed)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "image.nii.gz", image_array(0))
    write_label(tmp_path / "label.nii.gz", label_array(0), source)
    before = (tmp_path / "label.nii.gz").read_bytes()

    def fail(image: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(nib, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_label(tmp_path / "label.nii.gz", label_array(1), source)
    assert (tmp_path / "label.nii.gz").read_bytes() == before
