"""medconv/data/io/nifti.py: NIfTI and MGH files, what is wrong with damaged ones, and scaled voxels."""

import gzip
import zlib

import nibabel as nib
import numpy as np
import pytest
from helpers.formats import assert_error_names, flip_a_bit, header_pair, mgh, mgz, set_fields
from helpers.volumes import AFFINE, SHAPE, image_array, save, save_raw, truncate, unprivileged

from medconv.data.io import nifti
from medconv.data.io.images import read_array, read_header
from medconv.data.io.nifti import read_into
from medconv.data.preprocessing.examine import header_doubts

CONTENT = np.random.default_rng(0).integers(0, 20, 5000).astype(np.uint8).tobytes()


def damage(path):
    """Overwrite the start of the compressed stream."""
    content = bytearray(path.read_bytes())
    content[30:60] = bytes(30)
    path.write_bytes(content)
    return path


def zero_bytes(path):
    path.touch()
    return path


def text(path):
    path.write_text("This is not an image.\n" * 50)
    return path


def zipped_text(path):
    path.write_bytes(gzip.compress(b"This is not an image.\n" * 50))
    return path


def folder(path):
    path.mkdir()
    return path


def gifti(path):
    nib.save(nib.GiftiImage(), path.with_name("scan.gii"))
    return path.with_name("scan.gii")


def zero_spacing(path):
    return save_raw(path, set_fields(sform_code=0, qform_code=1, pixdim=[1, 1, 0, 2, 0, 0, 0, 0]))


def with_unit(path, code):
    seconds = 8
    return save_raw(path.with_name("scan.nii"), set_fields(xyzt_units=code + seconds))


def analyze(path):
    nib.save(nib.AnalyzeImage(image_array(0), AFFINE), path.with_name("scan.img"))
    return path.with_name("scan.hdr")


def half_a_pair(path):
    header = header_pair(path.with_name("scan"), image_array(0))
    header.with_suffix(".img").unlink()
    return header


def changed_mgz(path):
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 20)).astype(np.uint8)
    return flip_a_bit(mgz(path.with_name("scan"), noise))


BAD_FILES = {
    "missing": (lambda p: p, "no such file"),
    "folder": (folder, "a folder without a DICOM file, expected an image or a series"),
    "zero bytes": (zero_bytes, r"empty \(0 bytes\)"),
    "text": (text, r"is not compressed, as \.gz promises; rename it to scan\.nii, or copy it again"),
    "not compressed": (
        lambda p: save(p.with_name("scan.nii"), image_array(0)).rename(p),
        r"is not compressed, as \.gz promises; rename it to scan\.nii, or",
    ),
    "compressed": (
        lambda p: save(p, image_array(0)).rename(p.with_name("scan.nii")),
        r"is compressed \(gzip\); rename it to scan\.nii\.gz",
    ),
    "MGZ that is MGH": (
        lambda p: mgh(p, image_array(0)).rename(p.with_name("scan.mgz")),
        r"is not compressed, as \.mgz promises; rename it to scan\.mgh, or",
    ),
    "MGH that is MGZ": (
        lambda p: mgz(p, image_array(0)).rename(p.with_name("scan.mgh")),
        r"is compressed \(gzip\); rename it to scan\.mgz",
    ),
    "MGH cut in the header": (lambda p: truncate(mgh(p, image_array(0)), 0.01), "not a readable NIfTI file"),
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
        "damaged.*Expected 33600 bytes, got",
    ),
    "promises too much": (
        lambda p: save_raw(p, set_fields(dim=[3, 32767, 32767, 32767, 1, 1, 1, 1])),
        r"declares 32767 x 32767 x 32767 voxels, which take about \d+ GB to read; this machine has \d+ GB",
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
    "zero spacing": (zero_spacing, "spacing is 0 mm along axis 1, expected more than 0"),
    "spacing in metres": (lambda p: with_unit(p, 1), "its spacing is in metres, expected mm"),
    "spacing in microns": (lambda p: with_unit(p, 3), "its spacing is in microns, expected mm"),
    "Analyze": (analyze, "expected NIfTI or MGH, got .*Analyze.*, which does not store left and right"),
    "half a pair": (half_a_pair, "damaged or truncated, its voxels cannot be read|not a readable NIfTI file"),
    "cut MGH": (
        lambda p: truncate(mgh(p, image_array(0))),
        "damaged or truncated, its voxels cannot be read",
    ),
    "a changed bit in MGZ": (
        changed_mgz,
        "damaged or truncated, its voxels cannot be read .*incorrect data check",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_an_error_names_the_file_and_its_fault(tmp_path, fault):
    make, message = BAD_FILES[fault]
    assert_error_names(make(tmp_path / "scan.nii.gz"), message)


def test_a_quaternion_may_be_rounded(tmp_path):
    """The squares of its three numbers make 1.000002."""
    path = save_raw(
        tmp_path / "scan.nii",
        set_fields(qform_code=1, sform_code=0, quatern_b=0.7071075, quatern_c=0.7071075, quatern_d=0),
    )
    _, grid = read_array(path)
    expected = [[0, 1, 0], [1, 0, 0], [0, 0, -1]]
    np.testing.assert_allclose(grid.matrix[:3, :3] / grid.spacing_mm, expected, atol=1e-6)
    assert nib.Nifti1Header.quaternion_threshold < 1e-6  # the caller's own images are read as before
    assert not list(header_doubts(path))


def test_a_file_without_permission_is_named(open_folder):
    path = save(open_folder / "folder" / "scan.nii.gz", image_array(0))
    assert unprivileged(read_array, path) == ""
    path.chmod(0)
    assert unprivileged(read_array, path) == f"ValueError: {path}: no permission to read it"
    path.chmod(0o644)
    path.parent.chmod(0)
    assert unprivileged(read_array, path) == f"ValueError: {path}: no permission to read it"
    path.parent.chmod(0o755)


def test_damage_that_keeps_the_length_is_noticed(tmp_path):
    """By the checksum at the end: without compression, any byte decodes to something."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 40)).astype(np.uint8)
    path = save(tmp_path / "scan.nii.gz", noise)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0))
    np.testing.assert_array_equal(read_array(path)[0], noise)
    flip_a_bit(path)
    assert not np.array_equal(np.asanyarray(nib.load(path).dataobj), noise)  # nibabel alone notices nothing
    message = r"scan\.nii\.gz: damaged or truncated, its voxels cannot be read \(.*incorrect data check"
    with pytest.raises(ValueError, match=message):
        read_array(path)


def test_an_uncompressed_file_with_too_few_voxels_is_refused(tmp_path):
    path = save_raw(tmp_path / "scan.nii", set_fields(dim=[3, 12, 14, 50, 1, 1, 1, 1]))
    assert read_header(path).shape == (12, 14, 50)  # the header alone is fine
    with pytest.raises(ValueError, match=r"scan\.nii: damaged or truncated"):
        read_array(path)


def test_a_single_slice_may_have_no_thickness(tmp_path):
    fields = set_fields(sform_code=0, qform_code=1, pixdim=[1, 0.5, 0.7, 0, 0, 0, 0, 0])
    array, grid = read_array(save_raw(tmp_path / "flat.nii.gz", fields, np.ones((6, 7, 1), np.float32)))
    assert array.shape == (6, 7, 1)
    assert grid.spacing_mm == pytest.approx((0.5, 0.7, 1))


def test_zero_in_pixdim_is_ignored_if_there_is_an_sform(tmp_path):
    path = save_raw(tmp_path / "scan.nii.gz", set_fields(sform_code=1, pixdim=[1, 0, 0, 0, 0, 0, 0, 0]))
    assert read_array(path)[1].spacing_mm == pytest.approx((1, 1.5, 2))


def test_slope_and_intercept_of_the_header_are_applied(tmp_path):
    stored = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    path = save_raw(tmp_path / "scan.nii.gz", set_fields(scl_slope=0.5, scl_inter=-10), stored)
    np.testing.assert_allclose(read_array(path)[0], stored * 0.5 - 10)


def test_what_nibabel_says_names_the_file_once(tmp_path, caplog):
    path = save_raw(tmp_path / "scan.nii.gz", set_fields(pixdim=[1, -1, 1.5, 2, 0, 0, 0, 0]))
    for _ in range(2):
        read_array(path)
    said = [record.getMessage() for record in caplog.records if "pixdim" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{path}: pixdim[1,2,3] should be positive")


@pytest.mark.parametrize("slope", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [">i2", "<i2", "|u1", "<f4", ">f8"])
@pytest.mark.parametrize("name", ["scan.nii.gz", "scan.mgz"])
def test_compressed_voxels_are_those_of_nibabel(name, dtype, slope, tmp_path):
    values = np.random.default_rng(0).integers(0, 200, (5, 6, 7, 2))
    if name == "scan.mgz":
        nib.save(nib.MGHImage(values.astype("f4"), np.eye(4)), tmp_path / name)
    else:
        image = nib.Nifti1Image(values.astype(dtype), np.eye(4))
        image.header.set_slope_inter(slope, 1 - slope)
        nib.save(image, tmp_path / name)
    expected = np.asanyarray(nib.load(tmp_path / name).dataobj)
    array, _ = nifti.read(tmp_path / name)
    np.testing.assert_array_equal(array, expected)
    assert (array.dtype, array.flags.f_contiguous) == (expected.dtype, True)


def read(path, offset=0, count=5000):
    target = np.empty(count, np.uint8)
    read_into(target.data, path, offset)
    return target.tobytes()


@pytest.mark.parametrize("at_once", [7, 2**17])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("padding", [b"", b"\0" * 600])
def test_the_bytes_are_those_of_gzip(at_once, blocks, padding, tmp_path, monkeypatch):
    """Also of several blocks in a file, and with zeros behind it or between them."""
    monkeypatch.setattr(nifti, "_COMPRESSED_BYTES", at_once)
    monkeypatch.setattr(nifti, "_PIECE_BYTES", 100)
    path = tmp_path / "file.gz"
    length = -(-len(CONTENT) // blocks)
    parts = [CONTENT[first : first + length] for first in range(0, len(CONTENT), length)]
    path.write_bytes(b"".join(gzip.compress(part) + padding for part in parts))
    assert gzip.decompress(path.read_bytes()) == CONTENT == read(path)
    assert read(path, offset=352, count=1000) == CONTENT[352:1352]
    assert read(path, offset=4000, count=1000) == CONTENT[4000:]


@pytest.mark.parametrize("at_once", [1, 50, 2**17])
def test_a_damaged_file_is_an_error(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(nifti, "_COMPRESSED_BYTES", at_once)
    path = tmp_path / "file.gz"
    whole = gzip.compress(CONTENT)
    for cut in (len(whole) - 1, len(whole) - 8, len(whole) // 2, 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(EOFError, match="ends in the middle"):
            read(path)
    path.write_bytes(whole)
    with pytest.raises(EOFError, match="Expected 5001 bytes, got 5000"):
        read(path, count=5001)
    with pytest.raises(EOFError, match="Expected 10 bytes, got 0"):
        read(path, offset=6000, count=10)
    for damaged in (
        zlib.compress(CONTENT),
        whole[:-8] + b"\1" + whole[-7:],
        whole + b"more",
        b"no gzip",
        whole[:-1] + b"\1",
    ):
        path.write_bytes(damaged)
        with pytest.raises(zlib.error):
            read(path, count=10)


def test_little_is_decompressed_at_once(tmp_path, monkeypatch):
    """A file of zeros is a thousandth of its content."""
    monkeypatch.setattr(nifti, "_PIECE_BYTES", 100)
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(bytes(10**5)))
    assert max(len(piece) for piece in nifti._pieces(path)) == 100
