"""DICOM as input of `medconv predict`, SEG and RTSTRUCT as its results, and datasets of series."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import dicoms, members
from helpers.dicoms import OBLIQUE, array
from helpers.members import call
from helpers.volumes import label_array
from helpers.volumes import save as save_nifti

from medconv.data.datasets.folder import folder as folder_layout
from medconv.data.io.images import read_array, read_label
from medconv.data.io.writing import write_label
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.data.preprocessing.store import Store
from medconv.features.dicom.files import is_dicom
from medconv.inference.inputs import find_cases

Predict = Callable[..., int]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return members.train(tmp_path_factory.mktemp("dicom"))


@pytest.fixture
def predict(trained, tmp_path, monkeypatch):
    """Runs `medconv predict` on an input, by default into `out`. Returns: its exit code."""

    def run(source, *options, output=tmp_path / "out"):
        return call(monkeypatch, trained[1], source, "--output", output, *options)

    return run


@pytest.fixture
def scan(trained, tmp_path):
    """A series of the first training image, in the folder p1."""
    return as_series(trained[0] / "case_0.nii.gz", tmp_path / "p1")


def as_series(image, folder, **elements):
    """The voxels of an image as a scanner stores them: whole numbers with a slope."""
    stored = np.rint((voxels(image) + 1) * 100).astype(np.int16)
    header = {"PixelSpacing": [1.5, 1.0], "RescaleSlope": 0.01, "RescaleIntercept": -1}
    return dicoms.series(folder, stored, step_mm=2.0, **{**header, **elements})


def voxels(path):
    return np.asarray(nib.load(path).dataobj)


def test_a_series_is_predicted_like_the_same_volume_in_nifti(predict, scan, tmp_path):
    image, grid = read_array(scan)
    nifti = save_nifti(tmp_path / "images/p1.nii.gz", image, grid.matrix)
    assert predict(scan, "--save-probabilities") == 0
    assert predict(nifti, "--save-probabilities", output=tmp_path / "of_nifti") == 0
    for name in ("p1.nii.gz", "probabilities/p1.nii.gz"):
        np.testing.assert_array_equal(voxels(tmp_path / "out" / name), voxels(tmp_path / "of_nifti" / name))
        affine = nib.load(tmp_path / "out" / name).affine
        np.testing.assert_allclose(affine, nib.load(nifti).affine, atol=1e-5)
    assert len(np.unique(voxels(tmp_path / "out/p1.nii.gz"))) > 1  # more than background


def test_dicom_seg_refers_to_the_slices_of_its_series(predict, scan, tmp_path):
    """highdicom reads the segments of each slice from the label map, and their positions in the patient."""
    highdicom = pytest.importorskip("highdicom", reason="the extra `dicomseg`")
    assert predict(scan, "--dicom-seg") == 0
    label = voxels(tmp_path / "out/p1.nii.gz")
    seg = highdicom.seg.segread(tmp_path / "out/dicomseg/p1.dcm")
    assert [seg.get_segment_description(n).segment_label for n in seg.segment_numbers] == ["box", "hole"]
    uids = [dicoms.pydicom.dcmread(path).SOPInstanceUID for path in dicoms.names(scan)]
    assert {uid for _, _, uid in seg.get_source_image_uids()} == set(uids)
    frames = seg.get_pixels_by_source_instance(
        uids, combine_segments=True, ignore_spatial_locations=False, assert_missing_frames_are_empty=True
    )
    np.testing.assert_array_equal(frames.transpose(2, 1, 0), label)
    volume = seg.get_volume(combine_segments=True, allow_missing_positions=True)
    affine = np.diag([-1, -1, 1, 1]) @ volume.affine
    to_label = np.linalg.inv(nib.load(tmp_path / "out/p1.nii.gz").affine) @ affine  # voxels to voxels
    places = nib.affines.apply_affine(to_label, np.argwhere(volume.array > 0))
    np.testing.assert_allclose(places, np.rint(places), atol=1e-3)
    assert {tuple(v) for v in np.rint(places).astype(int)} == {tuple(v) for v in np.argwhere(label > 0)}
    record = json.loads((tmp_path / "out/prediction.json").read_text())
    assert record["settings"]["dicom_seg"] is True


def test_contours_give_the_label_map_again(predict, scan, tmp_path):
    assert predict(scan, "--rtstruct") == 0
    contours = Path(f"{tmp_path / 'out/rtstruct/p1.dcm'}#roi=box;hole")
    label, _ = read_label(contours, scan)
    np.testing.assert_array_equal(label, voxels(tmp_path / "out/p1.nii.gz"))
    record = json.loads((tmp_path / "out/prediction.json").read_text())
    assert record["settings"]["rtstruct"] is True


def test_files_that_refer_to_a_series_need_one_and_their_package(
    trained, predict, scan, tmp_path, monkeypatch, capsys
):
    nifti = trained[0] / "case_0.nii.gz"
    for flag, name in {"--dicom-seg": "a DICOM SEG", "--rtstruct": "an RTSTRUCT"}.items():
        assert predict(nifti, flag) == 1
        error = f"error: {nifti}: {name} refers to a DICOM series, and this is not one\n"
        assert capsys.readouterr().err == error
    monkeypatch.setitem(sys.modules, "highdicom", None)
    assert predict(scan, "--dicom-seg") == 1
    error = f"error: {scan}: writing DICOM SEG needs the package highdicom: pip install 'medconv[dicomseg]'\n"
    assert capsys.readouterr().err == error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--dicom-seg", "no DICOM SEG can refer to it (Source images have no Frame Of Reference UID"),
        ("--rtstruct", "no RTSTRUCT can refer to it (has no FrameOfReferenceUID)"),
    ],
)
def test_a_series_without_needed_elements_is_named(trained, predict, tmp_path, capsys, flag, problem):
    pytest.importorskip("highdicom", reason="the extra `dicomseg`")
    series = as_series(trained[0] / "case_0.nii.gz", tmp_path / "p1", FrameOfReferenceUID=None)
    assert predict(series, flag) == 1
    errors = capsys.readouterr().err
    assert f"  case p1: {series}: {problem}" in errors
    assert "Traceback" not in errors and not list((tmp_path / "out").glob("*.nii.gz"))


def test_results_are_not_mixed_with_slices_or_with_those_of_changed_slices(predict, scan, tmp_path, capsys):
    assert predict(scan, output=scan) == 1
    assert "is the folder of the images" in capsys.readouterr().err
    assert predict(scan) == 0
    os.utime(next(scan.iterdir()), ns=(1, 1))
    assert predict(scan) == 1
    assert "holds case p1 predicted from an image that has changed since" in capsys.readouterr().err
    assert predict(scan, "--overwrite", "--dicom-seg") == 0
    assert (tmp_path / "out/dicomseg/p1.dcm").is_file()


def test_bad_series_are_named_and_the_others_are_predicted(trained, predict, tmp_path, capsys):
    """In one line each, without the warnings of libraries."""
    scans = tmp_path / "scans"
    for name in ("cut", "gap", "good", "text"):
        as_series(trained[0] / "case_0.nii.gz", scans / name)
    cut, gap, text = (dicoms.names(scans / name)[3] for name in ("cut", "gap", "text"))
    cut.write_bytes(cut.read_bytes()[:-200])
    gap.unlink()
    text.write_text("not an image")
    assert predict(scans) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 4 and "Traceback" not in errors
    for line in (
        "error: 3 of 4 cases could not be predicted",
        f"  case cut: {cut}: damaged or truncated, its pixels cannot be read (",
        f"  case gap: {scans}/gap: slices are missing or out of line: 4 mm from",
        f"  case text: {text}: not a DICOM file (no DICM after 128 bytes)",
    ):
        assert line in errors
    assert [path.name for path in (tmp_path / "out").glob("*.nii.gz")] == ["good.nii.gz"]


def test_series_with_b_values_are_channels_of_a_dataset(tmp_path):
    voxels = array()
    for b_value in (0, 800):
        dicoms.series(tmp_path / f"{b_value}", voxels, DiffusionBValue=b_value)
        for path in (tmp_path / f"{b_value}").iterdir():
            dicoms.save(dicoms.with_new_uid(path), tmp_path / "dwi/a" / f"{b_value}{path.name}")
    write_label(tmp_path / "labels/a.nii.gz", (voxels > 0).astype(np.int16), tmp_path / "dwi/a")
    dataset = folder_layout(str(tmp_path / "dwi/*"), str(tmp_path / "labels/*.nii.gz"))
    assert dataset.modalities == ("MRI", "MRI") and not check(dataset, workers=1).errors
    for pattern in (str(tmp_path / "dwi/*#b=800"), {"b800": str(tmp_path / "dwi/{id}#2")}):
        chosen = folder_layout(pattern, str(tmp_path / "labels/*.nii.gz"))
        assert chosen.cases[0].images == (
            tmp_path / f"dwi/a#{'2' if isinstance(pattern, dict) else 'b=800'}",
        )
        assert len(chosen.modalities) == 1 and not check(chosen, workers=1).errors
    for source in ("dwi", "dwi/a", "dwi/*"):  # of medconv predict --input
        (case,) = find_cases(tmp_path / f"{source}#b=0", 1)
        assert (case.id, case.images) == ("a", (tmp_path / "dwi/a#b=0",))
    with pytest.raises(ValueError, match=r"#2 takes a volume of a DICOM series, which .*a\.nii\.gz is not"):
        find_cases(tmp_path / "labels#2", 1)


def test_series_are_prepared_and_changed_ones_are_noticed(tmp_path):
    """As `data=folder` with a pattern that matches folders; `write_label` wrote the labels for the series."""
    for case in range(3):
        image = array((12, 14, 10), seed=case) + 400 * label_array(case).astype(np.int16)
        folder = dicoms.series(tmp_path / f"scans/p{case}/t1", image, OBLIQUE)
        write_label(tmp_path / f"labels/p{case}.nii.gz", label_array(case), folder)
    dataset = folder_layout(str(tmp_path / "scans/*/t1"), str(tmp_path / "labels/*.nii.gz"))
    assert [case.id for case in dataset.cases] == ["p0", "p1", "p2"] and is_dicom(dataset.cases[0].images[0])
    result = check(dataset, workers=1)
    assert not result.errors and not result.warnings and result.fingerprint.spatial_dims == 3
    config = PreprocessingConfig(3, (6.5, 0.8, 0.7), ("none",), ({},))
    store = fill_store(dataset, config, tmp_path / "cache", workers=1)
    assert isinstance(store, Store) and all(store.has(case) for case in dataset.cases)
    os.utime(next((tmp_path / "scans/p1/t1").iterdir()), ns=(1, 1))
    assert [store.has(case) for case in dataset.cases] == [True, False, True]


def test_a_label_on_another_grid_is_refused_and_a_turned_one_is_not(tmp_path):
    folder = dicoms.series(tmp_path / "scans/a", array())
    flipped = dicoms.affine() @ np.diag([1, -1, 1, 1.0])
    flipped[:3, 3] += dicoms.affine()[:3, 1] * 6
    save_nifti(tmp_path / "labels/a.nii.gz", np.ones((9, 7, 5), np.uint8), flipped)
    dataset = folder_layout(str(tmp_path / "scans/*"), str(tmp_path / "labels/*.nii.gz"))
    check(dataset, workers=1)
    flipped[:3, 3] += dicoms.affine()[:3, 1] / 2
    save_nifti(tmp_path / "labels/a.nii.gz", np.ones((9, 7, 5), np.uint8), flipped)
    with pytest.raises(
        ValueError,
        match=rf"a\.nii\.gz: its affine puts the volume's corners .* from where .*/{folder.name} has",
    ):
        check(dataset, workers=1)
