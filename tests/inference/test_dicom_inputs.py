"""`medconv predict` of DICOM: which cases a folder means, label maps on the grid of a series, and DICOM
SEG.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from helpers import dicoms, members
from helpers.members import call, refused

from medconv.data.case import Case
from medconv.data.io.images import read_array
from medconv.inference import predict
from medconv.inference.inputs import find_cases


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return members.train(tmp_path_factory.mktemp("dicom"))


def as_series(image: Path, folder: Path, **elements: Any) -> Path:
    """The voxels of an image as a scanner stores them: whole numbers with a slope."""
    voxels = np.asarray(nib.load(image).dataobj)
    known = {"PixelSpacing": [1.5, 1.0], "RescaleSlope": 0.01, "RescaleIntercept": -1}
    stored = np.rint((voxels + 1) * 100).astype(np.int16)
    return dicoms.series(folder, stored, step_mm=2.0, **{**known, **elements})


def as_nifti(series: Path, path: Path) -> Path:
    array, grid = read_array(series)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, grid.matrix), path)
    return path


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def test_a_series_is_predicted_as_the_same_volume_in_nifti_is(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = as_series(made[0] / "case_0.nii.gz", tmp_path / "scans/p1")
    image = as_nifti(series, tmp_path / "images/p1.nii.gz")
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out", "--save-probabilities") == 0
    assert call(monkeypatch, made[1], image, "--output", tmp_path / "other", "--save-probabilities") == 0
    for name in ("p1.nii.gz", "probabilities/p1.nii.gz"):
        np.testing.assert_array_equal(voxels(tmp_path / "out" / name), voxels(tmp_path / "other" / name))
        np.testing.assert_allclose(
            nib.load(tmp_path / "out" / name).affine, nib.load(image).affine, atol=1e-5
        )
    assert len(np.unique(voxels(tmp_path / "out/p1.nii.gz"))) > 1  # it found something


def study(root: Path) -> Path:
    """Two patients: one with a series in a folder, one with two in one folder, among them what is no case."""
    dicoms.series(root / "p1/se1", dicoms.array())
    dicoms.series(root / "p2", dicoms.array(), SeriesInstanceUID="1.2.1")
    for path in dicoms.series(
        root / "t2", dicoms.array(), SeriesInstanceUID="1.2.2", SeriesNumber=4, SeriesDescription="T2/flair"
    ).iterdir():
        path.rename(root / "p2" / f"b{path.name}")
    (root / "t2").rmdir()
    scout = dicoms.one(
        dicoms.array()[..., 0], ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"], SeriesInstanceUID="1.2.5"
    )
    dicoms.save(scout, root / "p2/scout")
    dicoms.save(
        dicoms.one(np.zeros((4, 4), np.uint8), Modality="SR", Rows=None, SeriesInstanceUID="1.2.6"),
        root / "sr/1",
    )
    dicoms.series(root / ".trash/old", dicoms.array())
    (root / "p1/notes.txt").write_text("a note")
    return root


def test_cases_of_a_folder_of_patients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    root = study(tmp_path / "study")
    found = {case.id: case.images for case in find_cases(root, 1)}
    assert list(found) == ["p1_se1", "p2_3_T1_mprage", "p2_4_T2_flair"]
    assert found["p1_se1"] == (root / "p1/se1",)
    assert f"{root / 'p2'}: skipped 1 such as scout: a localizer" in caplog.text
    assert f"{root / 'sr'}: skipped 1 such as 1: not an image (SR)" in caplog.text
    for case in ("p2_3_T1_mprage", "p2_4_T2_flair"):
        assert read_array(found[case][0])[0].shape == (9, 7, 5)
    assert [case.id for case in find_cases(root / "p1/se1", 1)] == ["se1"]
    monkey = Path.cwd()
    os.chdir(root / "p1/se1")
    try:
        assert [(case.id, case.images) for case in find_cases(Path(), 1)] == [("se1", (root / "p1/se1",))]
        Path("sub").mkdir()
        assert [case.id for case in find_cases(Path("sub/.."), 1)] == ["se1"]
    finally:
        os.chdir(monkey)
    (tmp_path / "list.json").write_text(
        json.dumps({"a": "study/p1/se1", "b": str(found["p2_4_T2_flair"][0])})
    )
    assert [read_array(case.images[0])[0].shape for case in find_cases(tmp_path / "list.json", 1)] == [
        (9, 7, 5)
    ] * 2


def test_folders_without_dicom_beside_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dicoms.series(tmp_path / "a/se", dicoms.array())
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a/se").iterdir():
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes()[132:])  # without a preamble
    assert [case.id for case in find_cases(tmp_path, 1)] == ["a_se"]
    (said,) = caplog.messages
    assert (
        said
        == f"--input {tmp_path}: skipped {tmp_path / 'b'}, no file there can be read as DICOM (DICM after "
        "128 bytes)"
    )


def test_files_called_by_their_uid(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a/1.2.840.5\nb/1.2.840.6\n")
    assert [case.id for case in find_cases(tmp_path / "list.txt", 1)] == ["1.2.840.5", "1.2.840.6"]


def test_a_tilted_gantry_is_warned_of(made: tuple[Path, Path], tmp_path: Path) -> None:
    array, matrix = voxels(made[0] / "case_0.nii.gz"), np.diag([1.0, 1.5, 2.0, 1.0])
    matrix[1, 2] = 0.5
    nib.save(nib.Nifti1Image(array, matrix), tmp_path / "a.nii.gz")
    given = predict.Predictor.load([made[1]]).read(Case("a", (tmp_path / "a.nii.gz",)))
    assert given.warning == "its axes are 14.0 degrees off a right angle; it is used as it is"


def test_radiographs_of_one_folder(tmp_path: Path) -> None:
    """Each is a case, called as its file; one that is broken is a case that fails alone."""
    files = {"a": "a.dcm", "1.2.3.4": "1.2.3.4", "1.2.3.5": "1.2.3.5"}
    for name in files.values():
        dicoms.radiograph(tmp_path / name, np.ones((6, 7), np.uint16))
    (tmp_path / "c.dcm").write_bytes(b"nothing")
    found = {case.id: case.images[0] for case in find_cases(tmp_path, 1)}
    assert found == {name: tmp_path / file for name, file in {**files, "c": "c.dcm"}.items()}
    assert read_array(found["1.2.3.4"])[0].shape == (7, 6, 1)
    with refused(r"c\.dcm: not a "):
        read_array(found["c"])


def test_series_of_several_modalities(tmp_path: Path) -> None:
    dicoms.series(tmp_path / "a", dicoms.array())
    dicoms.series(tmp_path / "b", dicoms.array(), Modality="PT")
    with refused(
        r"series of several modalities, MR \(such as a\), PT \(such as b\); expected one, or a list"
    ):
        find_cases(tmp_path, 1)


def test_series_that_would_be_called_the_same(tmp_path: Path) -> None:
    for number in range(2):
        for path in dicoms.series(
            tmp_path / f"x{number}", dicoms.array(), SeriesInstanceUID=f"1.2.{number}"
        ).iterdir():
            (tmp_path / "both").mkdir(exist_ok=True)
            path.rename(tmp_path / "both" / f"{number}{path.name}")
    with refused("two cases are called 3_T1_mprage; a JSON object gives them ids"):
        find_cases(tmp_path / "both", 1)


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with refused(r"no image there \(\.nii\.gz, .*\), nor DICOM below"):
        find_cases(tmp_path, 1)


def test_dicom_seg_refers_to_its_slices(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back by highdicom: each slice's segments are the label map's, and the SEG says where it lies."""
    highdicom = pytest.importorskip("highdicom", reason="the extra `dicomseg`")
    series = as_series(made[0] / "case_0.nii.gz", tmp_path / "p1")
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out", "--dicom-seg") == 0
    label = voxels(tmp_path / "out/p1.nii.gz")
    found = highdicom.seg.segread(tmp_path / "out/dicomseg/p1.dcm")
    assert [found.get_segment_description(n).segment_label for n in found.segment_numbers] == ["box", "hole"]
    uids = [dicoms.pydicom.dcmread(path).SOPInstanceUID for path in dicoms.names(series)]
    assert {uid for _, _, uid in found.get_source_image_uids()} == set(uids)
    frames = found.get_pixels_by_source_instance(
        uids, combine_segments=True, ignore_spatial_locations=False, assert_missing_frames_are_empty=True
    )
    np.testing.assert_array_equal(frames.transpose(2, 1, 0), label)
    volume = found.get_volume(combine_segments=True, allow_missing_positions=True)
    matrix = np.diag([-1, -1, 1, 1]) @ volume.affine
    place = np.linalg.inv(nib.load(tmp_path / "out/p1.nii.gz").affine) @ matrix  # from its voxels to ours
    there = nib.affines.apply_affine(place, np.argwhere(volume.array > 0))
    np.testing.assert_allclose(there, np.rint(there), atol=1e-3)
    assert {tuple(v) for v in np.rint(there).astype(int)} == {tuple(v) for v in np.argwhere(label > 0)}
    record = json.loads((tmp_path / "out/prediction.json").read_text())
    assert record["settings"]["dicom_seg"] is True


def test_dicom_seg_of_an_enhanced_file(tmp_path: Path) -> None:
    highdicom = pytest.importorskip("highdicom", reason="the extra `dicomseg`")
    from medconv.data.io import dicom_seg

    source = dicoms.enhanced(tmp_path / "all.dcm", dicoms.array(), [3, 0, 4, 2, 1])
    label = (np.arange(9 * 7 * 5).reshape(9, 7, 5) % 3).astype(np.int16)
    dicom_seg.write(tmp_path / "out.dcm", label, source, ("background", "a", "b" * 80))
    found = highdicom.seg.segread(tmp_path / "out.dcm")
    uid = dicoms.pydicom.dcmread(source).SOPInstanceUID
    frames = found.get_pixels_by_source_frame(uid, [1, 2, 3, 4, 5], combine_segments=True)
    np.testing.assert_array_equal(frames.transpose(2, 1, 0), label[:, :, [3, 0, 4, 2, 1]])


def test_dicom_seg_holds_names_of_any_script(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="the extra `dicomseg`")
    from medconv.data.io import dicom_seg

    known = {"SpecificCharacterSet": "ISO_IR 100", "PatientName": "Müller^Jörg"}
    source = dicoms.series(tmp_path / "se", dicoms.array(), **known)
    dicom_seg.write(
        tmp_path / "out.dcm", np.ones((9, 7, 5), np.int16), source, ("background", "Läsion", "肝")
    )
    found = dicoms.pydicom.dcmread(tmp_path / "out.dcm")
    assert [segment.SegmentLabel for segment in found.SegmentSequence] == ["Läsion", "肝"]
    assert found.PatientName == "Müller^Jörg"


def test_dicom_seg_where_there_is_none(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = made[0] / "case_0.nii.gz"
    assert call(monkeypatch, made[1], image, "--output", tmp_path / "out", "--dicom-seg") == 1
    assert (
        f"error: {image}: a DICOM SEG refers to a DICOM series, and this is not one\n"
        == capsys.readouterr().err
    )
    series = as_series(image, tmp_path / "p1")
    monkeypatch.setitem(sys.modules, "highdicom", None)
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out", "--dicom-seg") == 1
    wanted = (
        f"error: {series}: writing DICOM SEG needs the package highdicom: pip install 'medconv[dicomseg]'\n"
    )
    assert capsys.readouterr().err == wanted and not (tmp_path / "out").exists()


def test_a_series_that_lacks_what_seg_asks_for(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("highdicom", reason="the extra `dicomseg`")
    series = as_series(made[0] / "case_0.nii.gz", tmp_path / "p1", FrameOfReferenceUID=None)
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out", "--dicom-seg") == 1
    said = capsys.readouterr().err
    assert (
        f"  case p1: {series}: no DICOM SEG can refer to it (" in said and "no Frame Of Reference UID" in said
    )
    assert "Traceback" not in said and not list((tmp_path / "out").glob("*.nii.gz"))


def test_results_are_kept_apart_from_slices_and_of_changed_ones(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    series = as_series(made[0] / "case_0.nii.gz", tmp_path / "p1")
    assert call(monkeypatch, made[1], series, "--output", series) == 1
    assert "holds the images themselves" in capsys.readouterr().err
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out") == 0
    os.utime(next(series.iterdir()), ns=(1, 1))
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out") == 1
    assert "holds case p1 predicted from an image that has changed since" in capsys.readouterr().err
    assert call(monkeypatch, made[1], series, "--output", tmp_path / "out", "--overwrite", "--dicom-seg") == 0
    assert (tmp_path / "out/dicomseg/p1.dcm").is_file()
    shutil.rmtree(tmp_path / "out")


def test_bad_series_are_named_and_the_rest_is_done(
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line each, whatever libraries have to say of it."""
    image = made[0] / "case_0.nii.gz"
    for name in ("cut", "gap", "good", "text"):
        as_series(image, tmp_path / "scans" / name)
    cut, gap, text = (dicoms.names(tmp_path / "scans" / name)[3] for name in ("cut", "gap", "text"))
    cut.write_bytes(cut.read_bytes()[:-200])
    gap.unlink()
    text.write_text("not an image")
    assert call(monkeypatch, made[1], tmp_path / "scans", "--output", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 4 and "Traceback" not in said
    for line in (
        "error: 3 of 4 cases could not be predicted",
        f"  case cut: {cut}: damaged or truncated, its pixels cannot be read (",
        f"  case gap: {tmp_path}/scans/gap: slices are missing or out of line: 4 mm from",
        f"  case text: {text}: not a DICOM file (no DICM after 128 bytes)",
    ):
        assert line in said
    assert [path.name for path in (tmp_path / "out").glob("*.nii.gz")] == ["good.nii.gz"]
