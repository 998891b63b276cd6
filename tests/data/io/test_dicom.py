"""medconv/data/io/dicom.py, series.py, frames.py: series as scanners and archives leave them, beside other
readers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import AXIAL, OBLIQUE, array, change, names, one, save, series
from helpers.volumes import label_array, unprivileged
from helpers.volumes import save as save_nifti

from medconv.data.case import Case
from medconv.data.datasets.folder import folder as folder_layout
from medconv.data.io.dicom_headers import is_dicom
from medconv.data.io.images import read_array, read_image, stamp, write_channels, write_label
from medconv.data.preprocessing.fingerprint import check
from medconv.data.preprocessing.pipeline import prepare
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.data.preprocessing.store import Store, signature
from medconv.inference.inputs import find_cases


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE, (0, 1, 0, 0, 0, -1)])
def test_a_series_is_sorted_by_place_and_spaced_by_places(
    tmp_path: Path, orientation: tuple[float, ...]
) -> None:
    voxels = array()
    found, grid = read_array(series(tmp_path / "series", voxels, orientation))
    np.testing.assert_array_equal(found, voxels)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(orientation), atol=1e-6)
    assert grid.spacing_mm == pytest.approx(
        (0.7, 0.8, 6.5), abs=1e-6
    )  # 6.5 mm from slice to slice, each 5 mm thick
    assert read_array(names(tmp_path / "series")[2])[1] == grid  # a file stands for its series


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE])
def test_the_last_voxel_is_where_itk_has_it(tmp_path: Path, orientation: tuple[float, ...]) -> None:
    sitk = pytest.importorskip("SimpleITK", reason="only to compare with")
    folder = series(tmp_path / "series", array(), orientation)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    other = reader.Execute()
    found, grid = read_array(folder)
    np.testing.assert_array_equal(found, sitk.GetArrayFromImage(other).T)
    last = [n - 1 for n in grid.shape]
    there = np.array(other.TransformIndexToPhysicalPoint(last)) * (-1, -1, 1)
    np.testing.assert_allclose(nib.affines.apply_affine(grid.matrix, last), there, atol=1e-4)


def test_each_slice_is_where_nibabel_has_it(tmp_path: Path) -> None:
    from nibabel.nicom.dicomwrappers import wrapper_from_file

    folder = series(tmp_path / "series", array(), OBLIQUE)
    found, grid = read_array(folder)
    for path in folder.iterdir():
        other = wrapper_from_file(path)
        z = next(z for z in range(5) if np.array_equal(found[:, :, z].T, other.get_data()))
        for row, column in ((0, 0), (6, 8)):
            there = nib.affines.apply_affine(other.affine, (row, column, 0)) * (-1, -1, 1)
            np.testing.assert_allclose(
                nib.affines.apply_affine(grid.matrix, (column, row, z)), there, atol=1e-6
            )


def test_slope_and_intercept_of_each_slice(tmp_path: Path) -> None:
    def edit(made: object, z: int) -> None:
        made.RescaleSlope, made.RescaleIntercept = 0.5 + z, -1024 + z

    voxels = array()
    found, _ = read_array(series(tmp_path, voxels, edit=edit))
    np.testing.assert_allclose(found, voxels * (0.5 + np.arange(5)) + np.arange(-1024, -1019), rtol=1e-6)


def test_a_tilted_gantry_is_a_sheared_affine(tmp_path: Path) -> None:
    """Slices keep their plane and wander in it: each first voxel is where the header has it, and the
    volume is true.
    """

    def tilt(made: object, z: int) -> None:
        made.ImagePositionPatient = [-20, 30.5 + 1.5 * z, -7.25 + 6.5 * z]

    folder = series(tmp_path / "ct/a", array(), edit=tilt)
    grid = read_array(folder)[1]
    for z in range(5):
        np.testing.assert_allclose(
            nib.affines.apply_affine(grid.matrix, (0, 0, z)), (20, -30.5 - 1.5 * z, -7.25 + 6.5 * z)
        )
    assert grid.voxel_mm3 == pytest.approx(0.7 * 0.8 * 6.5) and grid.shear == pytest.approx(12.99, abs=0.01)
    label = np.zeros(grid.shape, np.int16)
    label[2:5, 2:5, 1:3] = 1
    write_label(tmp_path / "labels/a.nii.gz", label, folder)
    written = nib.load(tmp_path / "labels/a.nii.gz")
    np.testing.assert_allclose(written.affine, grid.matrix, rtol=1e-6)
    assert (int(written.header["sform_code"]), int(written.header["qform_code"])) == (
        1,
        0,
    )  # a qform has no shear
    dataset = folder_layout(str(tmp_path / "ct/*"), str(tmp_path / "labels/*.nii.gz"))
    (warning,) = check(dataset, workers=1).warnings
    assert warning == f"case a: {folder}: its axes are 13.0 degrees off a right angle; it is used as it is"


def test_series_with_b_values_are_channels_of_a_dataset(tmp_path: Path) -> None:
    voxels = array()
    for b_value in (0, 800):
        series(tmp_path / f"{b_value}", voxels, DiffusionBValue=b_value)
        for path in (tmp_path / f"{b_value}").iterdir():
            save(change_uid(path), tmp_path / "dwi/a" / f"{b_value}{path.name}")
    write_label(tmp_path / "labels/a.nii.gz", (voxels > 0).astype(np.int16), tmp_path / "dwi/a")
    dataset = folder_layout(str(tmp_path / "dwi/*"), str(tmp_path / "labels/*.nii.gz"))
    assert dataset.modalities == ("MRI", "MRI") and not check(dataset, workers=1).errors


def test_a_lone_slice(tmp_path: Path) -> None:
    found, grid = read_array(series(tmp_path, array((9, 7, 1))))
    assert grid.shape == (9, 7, 1) and found.shape == (9, 7, 1)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(step_mm=5.0))  # nothing but its thickness is known


def test_radiographs_in_one_folder_are_images_by_themselves(tmp_path: Path) -> None:
    pixels = np.arange(42, dtype=np.uint16).reshape(6, 7)
    bright = dicoms.radiograph(tmp_path / "a.dcm", pixels)
    dark = dicoms.radiograph(
        tmp_path / "b.dcm", pixels, PhotometricInterpretation="MONOCHROME1", BitsStored=12, HighBit=11
    )
    found, grid = read_array(bright)
    np.testing.assert_array_equal(found[..., 0], pixels.T)
    assert grid.spacing_mm == pytest.approx((0.1, 0.2, 1)) and grid.orientation == "LPS"
    np.testing.assert_array_equal(read_array(dark)[0][..., 0], 4095 - pixels.T)  # white is high in both


@pytest.mark.parametrize(
    ("name", "values"),
    [("DiffusionBValue", (800.0, 0.0)), ("EchoTime", (4.6, 2.3)), ("ImageType", (["A", "W"], ["A", "F"]))],
)
def test_places_that_repeat_are_channels(tmp_path: Path, name: str, values: tuple) -> None:
    """In the order of what tells them apart, not of files."""
    voxels = [array(seed=seed) for seed in range(2)]
    for number, value in enumerate(values):
        series(
            tmp_path / str(number),
            voxels[number],
            edit=lambda made, z, value=value: setattr(made, name, value),
        )
        for path in (tmp_path / str(number)).iterdir():
            (tmp_path / "both").mkdir(exist_ok=True)
            path.rename(tmp_path / "both" / f"{number}{path.name}")
    image, grid = read_image([tmp_path / "both"])
    np.testing.assert_array_equal(image, np.stack(voxels[::-1]))
    np.testing.assert_allclose(grid.matrix, dicoms.affine(), atol=1e-6)
    write_channels(tmp_path / "out.nii.gz", image, 2, tmp_path / "both")
    np.testing.assert_array_equal(read_image([tmp_path / "out.nii.gz"])[0], image)
    assert read_image([tmp_path / "out.nii.gz"])[1].corner_distance(grid) < 1e-5


@pytest.mark.parametrize("b_values", [(0,), (0, 800)])
def test_an_enhanced_file_has_its_slices_in_any_order(tmp_path: Path, b_values: tuple[float, ...]) -> None:
    voxels = array()
    found, grid = read_array(dicoms.enhanced(tmp_path / "all.dcm", voxels, [3, 0, 4, 2, 1], b_values))
    wanted = np.stack([voxels * np.arange(1.0, 6.0) + n for n in range(len(b_values))], -1)
    np.testing.assert_array_equal(found, wanted[..., 0] if len(b_values) == 1 else wanted)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(), atol=1e-6)


def test_what_lies_beside_a_series(tmp_path: Path) -> None:
    """Localizers, reports, colour pictures and what exports add are left out."""
    voxels = array()
    series(tmp_path, voxels)
    for name in ("DICOMDIR", ".hidden", "notes.txt", "Thumbs.db"):
        (tmp_path / name).write_text("not an image")
    scout = array((16, 16, 1))
    save(
        one(scout[..., 0], ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"], SeriesInstanceUID="1.2.3"),
        tmp_path / "scout",
    )
    report = one(scout[..., 0], Modality="SR", SeriesInstanceUID="1.2.4", Rows=None)
    save(report, tmp_path / "report")
    picture = np.zeros((4, 4, 3), np.uint8)
    save(colour(picture), tmp_path / "screen")
    np.testing.assert_array_equal(read_array(tmp_path)[0], voxels)


def colour(picture: np.ndarray) -> object:
    rows, columns, _ = picture.shape
    return one(
        picture.reshape(rows, -1),
        Columns=columns,
        SamplesPerPixel=3,
        PlanarConfiguration=0,
        PhotometricInterpretation="RGB",
    )


@pytest.mark.parametrize("syntax", ["RLELossless", "JPEGLSLossless"])
def test_compressed_series(tmp_path: Path, syntax: str) -> None:
    uid = getattr(dicoms.pydicom.uid, syntax)
    if (
        not dicoms.pydicom.pixels.get_encoder(uid).is_available
        or not dicoms.pydicom.pixels.get_decoder(uid).is_available
    ):
        pytest.skip(f"no codec for {syntax} here")
    voxels = array((16, 12, 3))
    found, _ = read_array(series(tmp_path, voxels, edit=lambda made, z: made.compress(uid)))
    np.testing.assert_array_equal(found, voxels)


@pytest.mark.parametrize(("name", "uid"), [("JPEGLosslessProcess14_1", "70"), ("JPEG2000Lossless", "90")])
def test_series_that_gdcm_compressed(tmp_path: Path, name: str, uid: str) -> None:
    """What archives use most; pydicom does not write it."""
    gdcm = pytest.importorskip("gdcm", reason="the extra `dicom`")
    voxels = array((16, 12, 3))
    for path in series(tmp_path, voxels).iterdir():
        reader, change_to, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
        reader.SetFileName(str(path))
        assert reader.Read()
        change_to.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, name)))
        change_to.SetInput(reader.GetImage())
        assert change_to.Change()
        writer.SetFile(reader.GetFile())
        writer.SetImage(change_to.GetOutput())
        writer.SetFileName(str(path))
        assert writer.Write()
    assert dicoms.pydicom.dcmread(path).file_meta.TransferSyntaxUID == f"1.2.840.10008.1.2.4.{uid}"
    np.testing.assert_array_equal(read_array(tmp_path)[0], voxels)


def first(folder: Path, **elements: object) -> Path:
    """One of the slices, neither the first nor the last, changed."""
    return change(names(folder)[1], **elements)


def everywhere(folder: Path, **elements: object) -> Path:
    for path in sorted(folder.iterdir()):
        change(path, **elements)
    return folder


def two_series(folder: Path) -> Path:
    for path in names(folder)[3:]:
        change(path, SeriesInstanceUID="1.2.9", SeriesNumber=4, SeriesDescription="T2", Modality="CT")
    return folder


def without_a_slice(folder: Path) -> Path:
    names(folder)[2].unlink()
    return folder


def out_of_line(folder: Path) -> Path:
    first(folder, ImagePositionPatient=[-17, 30.5, -0.75])
    return folder


def copied(folder: Path) -> Path:
    path = names(folder)[0]
    (folder / "ZZ.dcm").write_bytes(path.read_bytes())
    return folder / "ZZ.dcm"


def twice_at_one_place(folder: Path) -> Path:
    save(change_uid(names(folder)[1]), folder / "ZZ.dcm")
    return folder


def change_uid(path: Path) -> object:
    made = dicoms.pydicom.dcmread(path)
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID = dicoms.generate_uid()
    return made


def all_twice(folder: Path) -> Path:
    for number, path in enumerate(names(folder)):
        save(change_uid(path), folder / f"ZZ{number}.dcm")
    return folder


def written_text(folder: Path) -> Path:
    path = names(folder)[1]
    path.write_text("This is not an image.\n" * 50)
    return path


def cut(folder: Path) -> Path:
    path = names(folder)[1]
    path.write_bytes(path.read_bytes()[:-60])
    return path


def cine(folder: Path) -> Path:
    for path in folder.iterdir():
        path.unlink()
    return save(
        one(np.zeros((3, 6, 7), np.uint8), NumberOfFrames=3, ImagePositionPatient=[0, 0, 0]),
        folder / "cine.dcm",
    )


def coloured(folder: Path) -> Path:
    for path in folder.iterdir():
        path.unlink()
    save(colour(np.zeros((4, 4, 3), np.uint8)), folder / "screen.dcm")
    return folder


def unreadable_codec(folder: Path, syntax: str = "1.2.840.10008.1.2.4.201") -> Path:
    """A syntax that none of the decoders of the extra reads."""
    path = names(folder)[1]
    made = dicoms.pydicom.dcmread(path)
    made.PixelData = dicoms.pydicom.encaps.encapsulate([b"\xff\x4f\xff\x51" + bytes(60)])
    made["PixelData"].VR, made.file_meta.TransferSyntaxUID = "OB", syntax
    made.save_as(path)
    return path


PLACE = r"expected one in each of 5 slices"
FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no pixels": (lambda f: first(f, PixelData=None), r"has no pixels \(7FE0,0010\), expected an image"),
    "pixels cut short": (
        cut,
        r"damaged or truncated, its pixels cannot be read \(.*66 vs.* 126|damaged or truncated.*fewer|less",
    ),
    "other size": (
        lambda f: first(f, Rows=9, Columns=7, PixelData=bytes(126)),
        r"columns and rows \(7, 9\), but \(9, 7\) in IM.*expected one value in a series",
    ),
    "other orientation": (
        lambda f: first(f, ImageOrientationPatient=[0, 1, 0, 0, 0, -1]),
        r"ImageOrientationPatient \(0, 1, 0, 0, 0, -1\), but \(1, 0, 0, 0, 1, 0\) in IM.*one value in a series",
    ),
    "other spacing": (
        lambda f: first(f, PixelSpacing=[0.8, 0.9]),
        r"PixelSpacing .*\(0\.9, 0\.8\), but \(0\.7, 0\.8\) in IM",
    ),
    "other modality": (
        lambda f: first(f, Modality="CT"),
        r"Modality 'CT', but 'MR' in IM.*expected one value in a series",
    ),
    "no orthogonal orientation": (
        lambda f: everywhere(f, ImageOrientationPatient=[1, 0, 0, 1, 0, 0]),
        r"ImageOrientationPatient \(1, 0, 0, 1, 0, 0\), expected unit vectors at a right angle",
    ),
    "no place": (
        lambda f: first(f, ImagePositionPatient=None),
        r"has no position \(ImagePositionPatient.*" + PLACE,
    ),
    "no spacing": (lambda f: everywhere(f, PixelSpacing=None), "has no PixelSpacing"),
    "slope of 0": (lambda f: first(f, RescaleSlope=0), "RescaleSlope is 0, so all values are equal"),
    "text": (written_text, r"not a DICOM file \(no DICM after 128 bytes\); expected only slices"),
    "two series": (
        two_series,
        r"2 series in one folder, expected one: (4 T2 \(CT, 2|3 T1 mprage \(MR, 3) slices, IM.*a file "
        r"selects its series",
    ),
    "a missing slice": (
        without_a_slice,
        r"slices are missing or out of line: 13 mm from IM\d+\.dcm to IM\d+\.dcm, 6\.5 mm",
    ),
    "a slice out of line": (
        out_of_line,
        r"slices are missing or out of line: .* expected even steps along one line",
    ),
    "a slice twice": (copied, r"the same image as IM\d+\.dcm \(SOPInstanceUID\), expected it once"),
    "one place twice": (
        twice_at_one_place,
        r"2 slices at the position of IM\d+\.dcm, 1 at that of IM\d+\.dcm; expected the same number",
    ),
    "all places twice": (
        all_twice,
        r"2 slices at each position, such as .* no header separates them; expected one, or different",
    ),
    "a cine": (cine, r"3 frames, of which 0 have a position in the patient; expected slices, not a cine"),
    "colour": (coloured, r"no slice of a volume there, .*1 such as screen\.dcm: a colour image \(RGB\)"),
    "no decoder": (
        unreadable_codec,
        r"compressed as High-Throughput JPEG 2000.* and no decoder for it is installed; pip install "
        r"'medconv\[dicom\]' installs",
    ),
    "a film": (
        lambda f: unreadable_codec(f, "1.2.840.10008.1.2.4.100"),
        "compressed as MPEG2 Main Profile .* and no decoder for it is installed",
    ),
    "a mosaic": (
        lambda f: first(f, ImageType=["ORIGINAL", "PRIMARY", "M", "MOSAIC"]),
        r"\(a Siemens mosaic, .* with dcm2niix\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_series_is_named_with_its_fault(tmp_path: Path, fault: str) -> None:
    if fault == "no decoder" and dicoms.pydicom.pixels.get_decoder("1.2.840.10008.1.2.4.201").is_available:
        pytest.skip("a decoder that reads everything is here")
    make, message = FAULTS[fault]
    folder = series(tmp_path / "series", array())
    path = make(folder)
    with pytest.raises(ValueError, match=message) as error:
        read_array(folder)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_folder_of_input_without_permission(open_folder: Path) -> None:
    series(open_folder / "a", array())
    find_cases(open_folder, 1)  # imports pydicom here: without root's rights it may be out of reach
    series(open_folder / "b", array()).chmod(0)
    expected = f"ValueError: --input {open_folder}: {open_folder / 'b'} cannot be read (Permission denied)"
    assert unprivileged(find_cases, open_folder, 1) == expected


def test_a_list_of_files_is_no_series(tmp_path: Path) -> None:
    (series(tmp_path, array()) / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    with pytest.raises(
        ValueError, match="DICOMDIR: a list of files, expected an image or a series; pass its folder"
    ):
        read_array(tmp_path / "DICOMDIR")


def test_a_folder_without_dicom(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a folder without a DICOM file, expected an image or a series"):
        read_array(tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = series(tmp_path / "series", array())
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError) as error:
        read_array(folder)
    assert (
        str(error.value) == f"{folder}: reading DICOM needs the package pydicom: pip install 'medconv[dicom]'"
    )


def test_a_slice_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    """Also one of the same size and an older time, and one that is taken away; another series beside it is
    not.
    """
    case = Case("a", (series(tmp_path / "a", array()),))
    before, by_file = stamp(case.images[0]), stamp(path := names(case.images[0])[1])
    os.utime(path, ns=(1, 1))
    assert stamp(case.images[0]) != before and signature(case)[0][1:] == stamp(case.images[0])
    assert stamp(path) != by_file
    before, by_file = stamp(case.images[0]), stamp(path)
    dicoms.radiograph(case.images[0] / "other.dcm", np.zeros((4, 4), np.uint8))
    assert stamp(case.images[0]) != before and stamp(path) == by_file
    names_left = [p for p in case.images[0].iterdir() if p not in (path, case.images[0] / "other.dcm")]
    names_left[0].unlink()
    assert stamp(path) != by_file


def test_series_are_prepared_and_a_changed_one_anew(tmp_path: Path) -> None:
    """`data=folder` with a pattern that folders match; the label is what `write_label` writes of the
    series.
    """
    for case in range(3):
        image = array((12, 14, 10), seed=case) + 400 * label_array(case).astype(np.int16)
        folder = series(tmp_path / f"scans/p{case}/t1", image, OBLIQUE)
        write_label(tmp_path / f"labels/p{case}.nii.gz", label_array(case), folder)
    dataset = folder_layout(str(tmp_path / "scans/*/t1"), str(tmp_path / "labels/*.nii.gz"))
    assert [case.id for case in dataset.cases] == ["p0", "p1", "p2"] and is_dicom(dataset.cases[0].images[0])
    found = check(dataset, workers=1)
    assert not found.errors and not found.warnings and found.fingerprint.spatial_dims == 3
    config = PreprocessingConfig(3, (6.5, 0.8, 0.7), ("none",), ({},))
    store = prepare(dataset, config, tmp_path / "cache", workers=1)
    assert isinstance(store, Store) and all(store.has(case) for case in dataset.cases)
    os.utime(next((tmp_path / "scans/p1/t1").iterdir()), ns=(1, 1))
    assert [store.has(case) for case in dataset.cases] == [True, False, True]


def test_a_label_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = series(tmp_path / "scans/a", array())
    flipped = dicoms.affine() @ np.diag([1, -1, 1, 1.0])
    flipped[:3, 3] += dicoms.affine()[:3, 1] * 6
    save_nifti(tmp_path / "labels/a.nii.gz", np.ones((9, 7, 5), np.uint8), flipped)
    dataset = folder_layout(str(tmp_path / "scans/*"), str(tmp_path / "labels/*.nii.gz"))
    with pytest.raises(
        ValueError, match=rf"a\.nii\.gz: its affine puts the volume's corners .* from where {folder.name} has"
    ):
        check(dataset, workers=1)
