"""medconv/features/dicom/: volumes from series of slices, and headers."""

import io
from importlib.util import find_spec

import nibabel as nib
import numpy as np
import pytest
from helpers import dicoms
from helpers.dicoms import AXIAL, OBLIQUE, array, change, change_one, names, one, save, series, with_new_uid
from helpers.formats import assert_error_names
from PIL import Image

from medconv.data.datasets.folder import folder as folder_layout
from medconv.data.io import images
from medconv.data.io.images import read_array, read_image
from medconv.data.io.writing import write_channels, write_label
from medconv.data.preprocessing.check import check
from medconv.features.dicom import volumes
from medconv.features.dicom.files import is_dicom
from medconv.inference.inputs import find_cases


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE, (0, 1, 0, 0, 0, -1)])
def test_slices_are_sorted_and_spaced_by_their_positions(tmp_path, orientation):
    voxels = array()
    image, grid = read_array(series(tmp_path / "series", voxels, orientation))
    np.testing.assert_array_equal(image, voxels)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(orientation), atol=1e-6)
    # 6.5 mm from slice to slice, although each is 5 mm thick
    assert grid.spacing_mm == pytest.approx((0.7, 0.8, 6.5), abs=1e-6)
    assert read_array(names(tmp_path / "series")[2])[1] == grid  # a file stands for its series


@pytest.mark.parametrize("orientation", [AXIAL, OBLIQUE])
def test_itk_reads_the_same_voxels_and_grid(tmp_path, orientation):
    sitk = pytest.importorskip("SimpleITK", reason="only to compare with")
    folder = series(tmp_path / "series", array(), orientation)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    itk_image = reader.Execute()
    image, grid = read_array(folder)
    np.testing.assert_array_equal(image, sitk.GetArrayFromImage(itk_image).T)
    last_voxel = [n - 1 for n in grid.shape]
    itk_mm = np.array(itk_image.TransformIndexToPhysicalPoint(last_voxel)) * (-1, -1, 1)
    np.testing.assert_allclose(nib.affines.apply_affine(grid.matrix, last_voxel), itk_mm, atol=1e-4)


def test_nibabel_reads_the_same_slices_and_positions(tmp_path):
    from nibabel.nicom.dicomwrappers import wrapper_from_file

    folder = series(tmp_path / "series", array(), OBLIQUE)
    image, grid = read_array(folder)
    for path in folder.iterdir():
        slice_ = wrapper_from_file(path)
        z = next(z for z in range(5) if np.array_equal(image[:, :, z].T, slice_.get_data()))
        for row, column in ((0, 0), (6, 8)):
            nibabel_mm = nib.affines.apply_affine(slice_.affine, (row, column, 0)) * (-1, -1, 1)
            position_mm = nib.affines.apply_affine(grid.matrix, (column, row, z))
            np.testing.assert_allclose(position_mm, nibabel_mm, atol=1e-6)


def test_slope_and_intercept_of_each_slice_are_applied(tmp_path):
    def edit(content, z):
        content.RescaleSlope, content.RescaleIntercept = 0.5 + z, -1024 + z

    voxels = array()
    image, _ = read_array(series(tmp_path, voxels, edit=edit))
    np.testing.assert_allclose(image, voxels * (0.5 + np.arange(5)) + np.arange(-1024, -1019), rtol=1e-6)


def test_a_tilted_gantry_gives_a_sheared_affine(tmp_path):
    """Slices are shifted within their planes; positions agree with the headers, voxels keep their volume."""

    def tilt(content, z):
        content.ImagePositionPatient = [-20, 30.5 + 1.5 * z, -7.25 + 6.5 * z]

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
    assert [int(written.header[name]) for name in ("sform_code", "qform_code")] == [1, 0]  # no shear in qform
    dataset = folder_layout(str(tmp_path / "ct/*"), str(tmp_path / "labels/*.nii.gz"))
    (warning,) = check(dataset, workers=1).warnings
    assert warning == f"case a: {folder}: its axes are 13.0 degrees off a right angle; it is used as it is"


def test_a_single_slice_has_its_thickness_as_spacing(tmp_path):
    image, grid = read_array(series(tmp_path, array((9, 7, 1))))
    assert grid.shape == (9, 7, 1) and image.shape == (9, 7, 1)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(step_mm=5.0))


def test_several_echoes_of_a_single_slice_are_channels(tmp_path):
    voxels = [array((9, 7, 1), seed=seed) for seed in range(2)]
    (tmp_path / "both").mkdir()
    for number, echo in enumerate((4.6, 2.3)):
        series(
            tmp_path / str(number),
            voxels[number],
            edit=lambda content, z, echo=echo: setattr(content, "EchoTime", echo),
        )
        for path in (tmp_path / str(number)).iterdir():
            path.rename(tmp_path / "both" / f"{number}{path.name}")
    np.testing.assert_array_equal(read_image([tmp_path / "both"])[0], np.stack(voxels[::-1]))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("DiffusionBValue", (800.0, 0.0)),
        ("EchoTime", (4.6, 2.3)),
        ("EchoTime", ([1, 2], 2.3)),
        ("ImageType", (["A", "W"], ["A", "F"])),
    ],
)
def test_repeated_positions_are_channels(tmp_path, name, values):
    """In the order of the header values, not of the files."""
    voxels = [array(seed=seed) for seed in range(2)]
    for number, value in enumerate(values):
        series(
            tmp_path / str(number),
            voxels[number],
            edit=lambda content, z, value=value: setattr(content, name, value),
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


@pytest.mark.parametrize("syntax", ["RLELossless", "JPEGLSLossless"])
def test_compressed_series_are_decoded(tmp_path, syntax):
    uid = getattr(dicoms.pydicom.uid, syntax)
    if (
        not dicoms.pydicom.pixels.get_encoder(uid).is_available
        or not dicoms.pydicom.pixels.get_decoder(uid).is_available
    ):
        pytest.skip(f"no codec for {syntax} here")
    voxels = array((16, 12, 3))
    image, _ = read_array(series(tmp_path, voxels, edit=lambda content, z: content.compress(uid)))
    np.testing.assert_array_equal(image, voxels)


@pytest.mark.parametrize(("name", "uid"), [("JPEGLosslessProcess14_1", "70"), ("JPEG2000Lossless", "90")])
def test_series_compressed_by_gdcm_are_decoded(tmp_path, name, uid):
    """Archives use these syntaxes most; pydicom cannot write them."""
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


def everywhere(folder, **elements):
    paths = sorted(folder.iterdir())
    for path in paths:
        change(path, **elements)
    return paths[0]


def without_a_slice(folder):
    names(folder)[2].unlink()
    return folder


def out_of_line(folder):
    change_one(folder, ImagePositionPatient=[-17, 30.5, -0.75])
    return folder


def copied(folder):
    path = names(folder)[0]
    (folder / "ZZ.dcm").write_bytes(path.read_bytes())
    return folder / "ZZ.dcm"


def two_slices_at_one_position(folder):
    save(with_new_uid(names(folder)[1]), folder / "ZZ.dcm")
    return folder


def two_slices_at_each_position(folder):
    for number, path in enumerate(names(folder)):
        save(with_new_uid(path), folder / f"ZZ{number}.dcm")
    return folder


def cut(folder):
    path = names(folder)[1]
    path.write_bytes(path.read_bytes()[:-60])
    return path


def compressed_as(folder, syntax):
    path = names(folder)[1]
    content = dicoms.pydicom.dcmread(path)
    content.PixelData = dicoms.pydicom.encaps.encapsulate([b"\xff\x4f\xff\x51" + bytes(60)])
    content["PixelData"].VR, content.file_meta.TransferSyntaxUID = "OB", syntax
    content.save_as(path)
    return path


HTJ2K = "1.2.840.10008.1.2.4.201"  # the extra `dicom` has no decoder for it
BAD_SERIES = {
    "no pixels": (lambda f: change_one(f, PixelData=None), r"has no pixels \(7FE0,0010\), expected an image"),
    "pixels cut short": (
        cut,
        r"damaged or truncated, its pixels cannot be read \(.*(66 vs.* 126|fewer|less)",
    ),
    "a size that its pixels lack": (
        lambda f: names(everywhere(f, Rows=65535, Columns=65535).parent)[0],
        r"declares 65535 x 65535 x 5 x 1 voxels, which take about 240 GB to read; this machine|less than",
    ),
    "other size": (
        lambda f: change_one(f, Rows=9, Columns=7, PixelData=bytes(126)),
        r"columns and rows \(7, 9\), but \(9, 7\) in IM.*expected one value in a series",
    ),
    "other orientation": (
        lambda f: change_one(f, ImageOrientationPatient=[0, 1, 0, 0, 0, -1]),
        r"ImageOrientationPatient \(0, 1, 0, 0, 0, -1\), but \(1, 0, 0, 0, 1, 0\) in IM.*one value in a series",
    ),
    "other spacing": (
        lambda f: change_one(f, PixelSpacing=[0.8, 0.9]),
        r"PixelSpacing .*\(0\.9, 0\.8\), but \(0\.7, 0\.8\) in IM",
    ),
    "other modality": (
        lambda f: change_one(f, Modality="CT"),
        r"Modality 'CT', but 'MR' in IM.*expected one value in a series",
    ),
    "no orthogonal orientation": (
        lambda f: everywhere(f, ImageOrientationPatient=[1, 0, 0, 1, 0, 0]),
        r"ImageOrientationPatient \(1, 0, 0, 1, 0, 0\), expected unit vectors at a right angle",
    ),
    "no position": (
        lambda f: change_one(f, ImagePositionPatient=None),
        r"has no position \(ImagePositionPatient.*expected one in each of 5 slices",
    ),
    "no spacing": (lambda f: names(everywhere(f, PixelSpacing=None).parent)[0], "has no PixelSpacing"),
    "a missing slice": (
        without_a_slice,
        r"slices are missing or out of line: 13 mm from IM\d+\.dcm to IM\d+\.dcm, 6\.5 mm",
    ),
    "a slice out of line": (
        out_of_line,
        r"slices are missing or out of line: .* expected even steps along one line",
    ),
    "the same slice twice": (copied, r"the same image as IM\d+\.dcm \(SOPInstanceUID\), expected it once"),
    "two slices at one position": (
        two_slices_at_one_position,
        r"2 slices at the position of IM\d+\.dcm, 1 at that of IM\d+\.dcm; expected the same number",
    ),
    "two slices at each position": (
        two_slices_at_each_position,
        r"2 slices at each position, such as .* no header separates them; expected one, or different",
    ),
    "values in the upper bits": (
        lambda f: change_one(f, BitsStored=12, HighBit=15),  # compressed values have no upper bits
        r"its 12 bits of each value end at bit 15, expected 11 \(HighBit\)",
    ),
    "no decoder": (
        lambda f: compressed_as(f, HTJ2K),
        r"compressed as High-Throughput JPEG 2000.* and no decoder for it is installed; pip install "
        r"'medconv\[dicom\]' installs",
    ),
    "video": (
        lambda f: compressed_as(f, "1.2.840.10008.1.2.4.100"),
        "compressed as MPEG2 Main Profile .* and no decoder for it is installed",
    ),
}


@pytest.mark.parametrize("fault", BAD_SERIES)
def test_an_error_names_the_file_and_its_fault(tmp_path, fault):
    if fault == "no decoder" and dicoms.pydicom.pixels.get_decoder(HTJ2K).is_available:
        pytest.skip("this machine has a decoder for every syntax")
    make, message = BAD_SERIES[fault]
    folder = series(tmp_path / "series", array())
    assert_error_names(make(folder), message, folder)


def siemens(dataset, source, b_value):
    dataset.Manufacturer = "SIEMENS"
    if source == "private":
        block = dataset.private_block(0x0019, "SIEMENS MR HEADER", create=True)
        block.add_new(0x0C, "IS", str(b_value))
    else:
        dataset.SequenceName = f"*ep_b{b_value}{'t' if b_value else ''}"


@pytest.mark.parametrize("source", ["private", "sequence name"])
def test_b_values_of_siemens_separate_volumes(tmp_path, source):
    """By number: as text 1000 would come before 50."""
    voxels = {b: array(seed=b) for b in (1000, 0, 50)}
    for number, (b, volume) in enumerate(voxels.items()):
        series(tmp_path / f"{b}", volume, edit=lambda content, z, b=b: siemens(content, source, b))
        for path in (tmp_path / f"{b}").iterdir():
            (tmp_path / "all").mkdir(exist_ok=True)
            path.rename(tmp_path / "all" / f"{number}{path.name}")
    image, _ = read_image([tmp_path / "all"])
    np.testing.assert_array_equal(image, np.stack([voxels[b] for b in (0, 50, 1000)]))
    for choice, b in (("#2", 50), ("#b=50", 50), ("#b=1000", 1000), ("#b=0.0", 0)):
        chosen = tmp_path / f"all{choice}"
        np.testing.assert_array_equal(read_array(chosen)[0], voxels[b])
        assert images.stamp(chosen) == images.stamp(tmp_path / "all") and images.stem(chosen) == "all"
    write_label(tmp_path / "label.nii.gz", (voxels[50] > 0).astype(np.int16), tmp_path / "all#b=50")
    there = "#1 DiffusionBValue 0, #2 DiffusionBValue 50, #3 DiffusionBValue 1000"
    for choice in ("#b=70", "#0", "#4"):
        with pytest.raises(ValueError, match=f"all: no volumes are {choice}; there are {there}$"):
            read_array(tmp_path / f"all{choice}")


@pytest.mark.parametrize("kind", ["implicit", "unknown", "empty"])
def test_a_private_b_value_is_read_in_any_encoding(tmp_path, kind):
    """Archives often turn files into implicit VR, and private elements into UN or nothing."""
    voxels = {b: array(seed=b) for b in (1000, 50)}
    for b, volume in voxels.items():

        def edit(content, z, b=b):
            siemens(content, "private", b)
            if kind == "empty":
                siemens(content, "sequence name", b)
            if kind != "implicit":
                content[0x0019, 0x100C] = dicoms.pydicom.DataElement(
                    0x0019100C, "UN", b"" if kind == "empty" else f"{b:<4}".encode()
                )

        for path in series(tmp_path / f"{b}", volume, edit=edit).iterdir():
            content = dicoms.pydicom.dcmread(path)
            if kind == "implicit":
                content.file_meta.TransferSyntaxUID = dicoms.pydicom.uid.ImplicitVRLittleEndian
            (tmp_path / "all").mkdir(exist_ok=True)
            content.save_as(tmp_path / "all" / f"{b}{path.name}")
    for b, volume in voxels.items():
        np.testing.assert_array_equal(read_array(tmp_path / f"all#b={b}")[0], volume)


@pytest.mark.parametrize("implicit", [True, False])
def test_a_series_without_preamble_is_read(tmp_path, implicit):
    """As ACR-NEMA and some archives have it: elements from the first byte on."""
    voxels = array()
    for path in series(tmp_path, voxels).iterdir():
        content = dicoms.pydicom.dcmread(path)
        bare = dicoms.pydicom.Dataset({element.tag: element for element in content})
        bare.save_as(path, implicit_vr=implicit, little_endian=True, enforce_file_format=False)
        assert path.read_bytes()[128:132] != b"DICM"
    image, grid = read_array(tmp_path)
    np.testing.assert_array_equal(image, voxels)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(), atol=1e-6)


def test_a_file_that_begins_with_its_meta_header_is_recognised(tmp_path):
    """With the elements of group 2, but neither the 128 bytes nor DICM before them; in any kind of name."""
    path = names(series(tmp_path / "series", voxels := array((9, 7, 1))))[0]
    (tmp_path / "bare").mkdir()
    (bare := tmp_path / "bare/IM1").write_bytes(path.read_bytes()[132:])
    assert is_dicom(bare) and is_dicom(tmp_path / "bare")
    np.testing.assert_array_equal(read_array(bare)[0], voxels)
    (case,) = find_cases(tmp_path / "bare", 1)
    np.testing.assert_array_equal(read_image(case.images)[0][0], voxels)
    bare.write_bytes(bytes(132) + path.read_bytes()[132:])
    assert not is_dicom(bare)


def test_jpeg_of_12_bits_is_read_or_names_its_decoder(tmp_path):
    """A file of a scanner, from pydicom's own tests; its scan ends at a frequency that the standard forbids."""
    content = dicoms.pydicom.dcmread(dicoms.pydicom.data.get_testdata_file("JPEG-lossy.dcm"))
    stream = bytearray(content.PixelData)
    stream[stream.index(b"\xff\xda") + 8] = 63
    content.PixelData = bytes(stream)
    content.save_as(path := tmp_path / "scan.dcm")
    assert (content.file_meta.TransferSyntaxUID, content.BitsStored) == ("1.2.840.10008.1.2.4.51", 12)
    if find_spec("libjpeg") is None:
        words = r"compressed as JPEG Extended.* 12 bits; pip install pylibjpeg pylibjpeg-libjpeg"
        assert_error_names(path, words)
    else:
        image, _ = read_array(path)
        assert image.shape == (256, 1024, 1) and (image.min(), image.max()) == (0, 264)  # above 8 bits


def test_jpeg_of_the_same_syntax_with_8_bits_is_read(tmp_path):
    if not dicoms.pydicom.pixels.get_decoder(volumes._JPEG_12_BIT).is_available:
        pytest.skip("no decoder of JPEG here")
    ramp = np.add.outer(np.arange(24), 5 * np.arange(32)).astype(np.uint8)
    path = names(series(tmp_path, ramp.T[..., None]))[0]
    Image.fromarray(ramp).save(picture := io.BytesIO(), "JPEG", quality=95)
    content = dicoms.pydicom.dcmread(path)
    content.PixelData = dicoms.pydicom.encaps.encapsulate([picture.getvalue()])
    content["PixelData"].VR, content.file_meta.TransferSyntaxUID = "OB", volumes._JPEG_12_BIT
    content.save_as(path)
    np.testing.assert_allclose(read_array(path)[0][..., 0], ramp.T, atol=3)


def test_a_private_copy_of_classic_headers_in_the_frames_says_nothing(tmp_path):
    """Philips's, whose public elements have other values."""
    voxels = array()
    path = dicoms.enhanced(tmp_path / "all.dcm", voxels, [0, 1, 2, 3, 4])
    expected = read_array(path)
    header = dicoms.pydicom.dcmread(path)
    for z, frame in enumerate(header.PerFrameFunctionalGroupsSequence):
        block = frame.private_block(0x2005, "Philips MR Imaging DD 005", create=True)
        copy = dicoms.item(ImagePositionPatient=[7, 0, 3 * z], RescaleSlope=1, RescaleIntercept=0)
        block.add_new(0x0F, "SQ", copy)
    header.save_as(path)
    image, grid = read_array(path)
    np.testing.assert_array_equal(image, expected[0])
    np.testing.assert_array_equal(grid.matrix, expected[1].matrix)


@pytest.mark.parametrize("b_values", [(0,), (0, 800)])
def test_an_enhanced_file_may_have_its_frames_in_any_order(tmp_path, b_values):
    voxels = array()
    image, grid = read_array(dicoms.enhanced(tmp_path / "all.dcm", voxels, [3, 0, 4, 2, 1], b_values))
    volumes = np.stack([voxels * np.arange(1.0, 6.0) + n for n in range(len(b_values))], -1)
    np.testing.assert_array_equal(image, volumes[..., 0] if len(b_values) == 1 else volumes)
    np.testing.assert_allclose(grid.matrix, dicoms.affine(), atol=1e-6)


def text(folder):
    path = names(folder)[1]
    path.write_text("This is not an image.\n" * 50)
    return path


def cine(folder):
    for path in folder.iterdir():
        path.unlink()
    return save(
        one(np.zeros((3, 6, 7), np.uint8), NumberOfFrames=3, ImagePositionPatient=[0, 0, 0]),
        folder / "cine.dcm",
    )


BAD_HEADERS = {
    "text": (text, r"not a DICOM file \(no DICM after 128 bytes\); expected only slices"),
    "slope of 0": (lambda f: change_one(f, RescaleSlope=0), "RescaleSlope is 0, so all values are equal"),
    "cine": (cine, r"3 frames, of which 0 have a position in the patient; expected slices, not a cine"),
    "mosaic": (
        lambda f: change_one(f, ImageType=["ORIGINAL", "PRIMARY", "M", "MOSAIC"]),
        r"\(a Siemens mosaic, .* with dcm2niix\)",
    ),
}


@pytest.mark.parametrize("fault", BAD_HEADERS)
def test_an_error_of_a_header_names_its_file(tmp_path, fault):
    make, message = BAD_HEADERS[fault]
    folder = series(tmp_path / "series", array())
    assert_error_names(make(folder), message, folder)


@pytest.mark.parametrize(
    ("header", "mm"),
    [
        ({"SpacingBetweenSlices": 6.5, "SliceThickness": 5}, 6.5),
        ({"SpacingBetweenSlices": -6.5, "SliceThickness": 5}, 5),
        ({}, 1),
    ],
)
def test_a_single_slice_is_as_thick_as_the_distance_to_the_next_would_be(header, mm, tmp_path):
    position = {"ImagePositionPatient": [0, 0, 0], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0]}
    pixels = np.arange(12, dtype=np.int16).reshape(3, 4)
    path = save(one(pixels, PixelSpacing=[0.8, 0.7], **position, **header), tmp_path / "a.dcm")
    _, affine = volumes.read(path)
    np.testing.assert_allclose(np.abs(np.diag(affine)), [0.7, 0.8, mm, 1])


def test_signed_values_in_which_the_highest_is_black_are_inverted_within_their_range(tmp_path):
    pixels = np.array([[-32768, -1, 0, 32767]], np.int16)
    path = save(one(pixels, PhotometricInterpretation="MONOCHROME1", PixelSpacing=[1, 1]), tmp_path / "a.dcm")
    values, _ = volumes.read(path)
    assert values[:, 0, 0].tolist() == [32767, 0, -1, -32768]


def test_slices_a_few_micrometres_apart_are_no_repeated_positions(tmp_path):
    """Of a micro-CT; what counts as one position is at most a tenth of a pixel."""
    voxels = array()
    image, grid = read_array(series(tmp_path / "series", voxels, step_mm=0.008, PixelSpacing=[0.009, 0.009]))
    np.testing.assert_array_equal(image, voxels)
    assert grid.spacing_mm == pytest.approx((0.009, 0.009, 0.008), rel=1e-3)
