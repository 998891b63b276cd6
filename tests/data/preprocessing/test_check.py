"""medconv/data/preprocessing/check.py: faults and warnings of a dataset, all at once."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.formats import flip_a_bit, set_fields
from helpers.tiny import write_dataset
from helpers.volumes import (
    AFFINE,
    SHAPE,
    edit_json,
    image_array,
    label_array,
    rotation,
    save,
    save_raw,
    tiny,
    truncate,
    unprivileged,
    write_msd,
    write_nnunet,
)

from medconv.data.case import Case, Dataset
from medconv.data.datasets.dataset_json import auto, msd
from medconv.data.preprocessing import check as check_module
from medconv.data.preprocessing.check import Examined, check
from medconv.data.preprocessing.examine import CaseReport, examine

Make = Callable[[Path, Path], object]  # damages a case, given the paths of its image and label
FILE = "examined.jsonl"


def with_value(array, value, count=1):
    changed = array.astype(np.float32)
    changed.flat[:count] = value
    return changed


def image_voxels(array):
    return lambda image, label: save(image, array)


def label_voxels(array, affine=AFFINE):
    return lambda image, label: save(label, array, affine)


def image_header(**fields):
    return lambda image, label: save_raw(image, set_fields(**fields))


# How to damage the files of a case, which file is then named, and a pattern of the message
FAULTS = {
    "image_cut": (lambda i, m: truncate(i), "image", "damaged or truncated"),
    "label_cut": (lambda i, m: truncate(m), "label", "damaged or truncated|not a readable NIfTI"),
    "other_shape": (
        label_voxels(label_array(0, (12, 14, 9))),
        "label",
        r"shape \(12, 14, 9\) differs from that of .*/other_shape\.nii\.gz, \(12, 14, 10\)",
    ),
    "other_affine": (
        label_voxels(label_array(0), AFFINE + np.outer([0, 0, 1, 0], [0, 0, 0, 1])),
        "label",
        r"corners 0\.5 voxels from where .*/other_affine\.nii\.gz has them \(at most 0\.1 is allowed\)",
    ),
    "other_orientation": (
        label_voxels(label_array(0), np.diag([-1, 1.5, 2, 1])),
        "label",
        r"axes LAS against RAS; axes turned by 180, 0, 0 degrees",
    ),
    "undeclared": (
        label_voxels(with_value(label_array(0), 7)),
        "label",
        r"label values \[7\] are not declared, expected 0 to 2",
    ),
    "fractional": (label_voxels(with_value(label_array(0), 1.5)), "label", r"whole numbers, found 1\.5"),
    "image_nan": (
        image_voxels(with_value(image_array(0), [np.nan, np.inf, -np.inf], 3)),
        "image",
        "3 voxels are NaN or infinite, expected finite numbers",
    ),
    "four_axes": (
        image_voxels(np.stack([image_array(0)] * 3, axis=-1)),
        "image",
        "expected the channels MRI, found 3 channels",
    ),
    "label_gone": (lambda i, m: m.unlink(), "label", "no such file"),
    "image_gone": (lambda i, m: i.unlink(), "image", "no such file"),
    "negative_spacing": (
        image_header(sform_code=0, qform_code=1, pixdim=[1, 1, -1.5, 2, 0, 0, 0, 0]),
        "image",
        "spacing is -1.5 mm along axis 1, expected more than 0",
    ),
    "other_spacing": (
        label_voxels(label_array(0), AFFINE @ np.diag([1, 1, 1.1, 1])),
        "label",
        r"1 x 1.5 x 2.2 mm against 1 x 1.5 x 2",
    ),
    "bit": (lambda i, m: flip_a_bit(i), "image", r"damaged or truncated.*incorrect data check"),
}
GOOD = ("good_a", "good_b")


def write_faulty(root, names):
    cases = []
    for name in names:
        image = save(root / "imagesTr" / f"{name}.nii.gz", image_array(0))
        label = save(root / "labelsTr" / f"{name}.nii.gz", label_array(0))
        if name in FAULTS:
            FAULTS[name][0](image, label)
        cases.append(Case(name, (image,), label))
    return Dataset("Faulty", tuple(cases), ("background", "big", "small"), ("MRI",))


@pytest.fixture(scope="module")
def error_report(tmp_path_factory):
    """The error of `check` for a dataset with every fault, in a folder with spaces and non-ASCII letters."""
    dataset = write_faulty(tmp_path_factory.mktemp("data") / "Größe 患者", (GOOD[0], *FAULTS, GOOD[1]))
    with pytest.raises(ValueError) as error:
        check(dataset, 2)
    return str(error.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_with_case_and_file(error_report, fault):
    _, file, message = FAULTS[fault]
    (line,) = [line for line in error_report.splitlines() if line.startswith(f"  case {fault}: ")]
    folder = {"image": "imagesTr", "label": "labelsTr"}[file]
    assert re.search(rf"Größe 患者/{folder}/{fault}\.nii\.gz: .*({message})", line), line


def test_all_faults_are_reported_at_once(error_report):
    first, *lines = error_report.splitlines()
    assert first == f"dataset Faulty: {len(FAULTS)} errors in {len(FAULTS) + 2} cases"
    assert len(lines) == len(FAULTS)
    assert "good" not in error_report


def test_a_label_without_permission_is_a_fault(open_folder):
    dataset = write_faulty(open_folder, GOOD)
    assert dataset.cases[0].label is not None
    dataset.cases[0].label.chmod(0)
    error = unprivileged(check, dataset, 1)
    message = r"1 error in 2 cases\n  case good_a: .*labelsTr/good_a\.nii\.gz: no permission to read it$"
    assert re.search(message, error), error


def test_all_faults_of_a_case_are_listed(tmp_path):
    dataset = write_faulty(tmp_path, ("case",))
    image, label = dataset.cases[0].files
    save(image, np.stack([with_value(image_array(0), np.nan)] * 2, axis=-1))
    save(label, with_value(label_array(0), 9))
    assert [fault.split(": ", 1)[1] for fault in examine(dataset.cases[0], dataset).errors] == [
        "expected the channels MRI, found 2 channels",
        "2 voxels are NaN or infinite, expected finite numbers",
        "label values [9] are not declared, expected 0 to 2",
    ]


def test_channels_on_different_grids_are_a_fault(tmp_path):
    dataset = auto(write_nnunet(tmp_path, 1))
    save(dataset.cases[0].images[1], image_array(0), AFFINE @ np.diag([1, 1, 1.5, 1]))
    message = r"case case_0: .*case_0_0001\.nii\.gz: its affine .*case_0_0000\.nii\.gz"
    with pytest.raises(ValueError, match=message):
        check(dataset, 1)


def test_a_case_without_a_label_is_a_fault(tmp_path):
    dataset = tiny(tmp_path, 1)
    dataset = replace(dataset, cases=(replace(dataset.cases[0], label=None),))
    with pytest.raises(ValueError, match="case case_0: has no label, but training needs one"):
        check(dataset, 1)


@pytest.mark.parametrize(
    ("shape", "other", "message"),
    [
        (SHAPE, (12, 14, 1), "one slice only, while most cases are volumes"),
        (SHAPE[:2], SHAPE, "a volume, while most cases are one slice"),
    ],
)
def test_a_slice_among_volumes_or_a_volume_among_slices_is_a_fault(tmp_path, shape, other, message):
    dataset = msd(write_msd(tmp_path, 4, shape=shape, affine=AFFINE))
    image, label = dataset.cases[2].files
    save(image, image_array(0, other))
    save(label, label_array(0, other))
    with pytest.raises(ValueError, match=rf"1 error in 4 cases\n  case case_2: {message}"):
        check(dataset, 1)
    assert list(check(dataset, 1, skip=True).errors) == ["case_2"]


def test_a_damaged_file_does_not_make_slices_a_fault(tmp_path):
    dataset = tiny(tmp_path, shape=(12, 14, 1))
    truncate(dataset.cases[2].images[0])
    with pytest.raises(ValueError, match=r"1 error in 3 cases\n  case case_2: ") as error:
        check(dataset, 1)
    assert "one slice only" not in str(error.value)


def test_good_datasets_have_neither_faults_nor_warnings(tmp_path):
    volumes, channels = write_msd(tmp_path / "a"), write_nnunet(tmp_path / "b")
    slices = write_msd(tmp_path / "c", shape=(12, 14, 1))
    two_forms(volumes / "imagesTr/case_0.nii.gz", AFFINE)
    for root in (volumes, channels):
        assert check(auto(root), 2)[1] == []
    assert check(auto(slices), 2)[1] == [
        "no label map has a voxel of big, which nothing can be learned about"
    ]


def test_a_class_in_no_label_map_is_a_warning(tmp_path):
    root = edit_json(write_msd(tmp_path), labels={"0": "background", "1": "a", "2": "b", "3": "c"})
    assert check(auto(root), 1).warnings == [
        "no label map has a voxel of c, which nothing can be learned about"
    ]


def two_forms(path, qform):
    image = nib.Nifti1Image(image_array(0), AFFINE)
    image.set_sform(AFFINE, code=1)
    image.set_qform(qform, code=1)
    nib.save(image, path)


# How to change the files of a case, which file is then named, and the warning
WARNINGS = {
    "no_foreground": (label_voxels(np.zeros(SHAPE, np.uint8)), 1, "no foreground, every voxel is background"),
    "no_background": (label_voxels(np.ones(SHAPE, np.uint8)), 1, "no background, every voxel is foreground"),
    "zero": (image_voxels(np.zeros(SHAPE, np.float32)), 0, "a channel is constant"),
    "constant": (image_voxels(np.full(SHAPE, 5, np.float32)), 0, "a channel is constant"),
    "answer": (lambda i, m: shutil.copy(m, i), 0, "a channel has the values of the label map, so the answer"),
    "two_forms": (
        lambda i, m: two_forms(i, AFFINE + np.outer([0, 3, 0, 0], [0, 0, 0, 1])),
        0,
        "sform and qform differ by 2 voxels; the sform is used",
    ),
    "qform": (image_header(sform_code=1, qform_code=1, quatern_b=5), 0, "its qform cannot be read"),
}


@pytest.mark.parametrize("change", WARNINGS)
def test_what_is_odd_is_a_warning(tmp_path, change):
    make, file, message = WARNINGS[change]
    dataset = tiny(tmp_path)
    case = dataset.cases[0]
    make(*case.files)
    warnings = check(dataset, 1).warnings
    (warning,) = warnings if change != "answer" else [text for text in warnings if "the answer" in text]
    assert warning.startswith(f"case case_0: {case.files[file]}: {message}")


@pytest.mark.parametrize(("empty", "lines"), [(5, 5), (6, 1)])
def test_what_many_cases_have_is_one_line(empty, lines, tmp_path):
    """Such as those without a lesion, which screening has by the hundred."""
    dataset = tiny(tmp_path, 7)
    for case in dataset.cases[:empty]:
        save(case.label, np.zeros(SHAPE, np.uint8))
    warnings = [text for text in check(dataset, 1).warnings if "no foreground" in text]
    assert len(warnings) == lines
    if lines == 1:
        assert warnings[0] == (
            "6 cases (case_0, case_1, case_2, case_3, case_4, ...): no foreground, every voxel is background; "
            f"the first is {dataset.cases[0].label}"
        )


def test_files_of_one_case_with_the_same_doubt_are_all_named(tmp_path):
    dataset = tiny(tmp_path)
    case = dataset.cases[0]
    for path in case.files:
        affine = AFFINE + np.outer([0, 3, 0, 0], [0, 0, 0, 1])
        image = nib.load(path)
        image = nib.Nifti1Image(np.asarray(image.dataobj), AFFINE)
        image.set_sform(AFFINE, code=1)
        image.set_qform(affine, code=1)
        nib.save(image, path)
    named = [text for text in check(dataset, 1).warnings if "sform and qform differ" in text]
    assert [str(path) in text for path, text in zip(case.files, named, strict=True)] == [True, True]


@pytest.mark.parametrize("shape", [(1, 14, 10), (12, 1, 10)])
def test_one_slice_along_another_axis_is_an_error(tmp_path, shape):
    dataset = tiny(tmp_path)
    path = save(dataset.cases[2].images[0], image_array(2, shape))
    save(dataset.cases[2].label, label_array(2, shape))
    error = f"{path}: shape {shape}, expected several slices along each axis; a 2D image has its one slice "
    assert check(dataset, 1, skip=True).errors == {"case_2": [error + "along the third axis"]}


def test_oblique_files_agree_in_spite_of_single_precision(tmp_path):
    """NIfTI stores the affine in float32; a label written from the image's is the same grid."""
    affine = np.eye(4)
    affine[:3, :3] = rotation((20, -35, 10)) @ np.diag([0.7, 0.7, 3.3])
    affine[:3, 3] = (-12345.678, 9876.543, 1e5)
    check(tiny(tmp_path, 2, affine=affine), 1)


@pytest.fixture
def dataset(tmp_path):
    return msd(write_dataset(tmp_path / "data"))


@pytest.fixture
def read(monkeypatch):
    """The cases whose files were read."""
    names = []

    def noted(case, dataset):
        names.append(case.id)
        return examine(case, dataset)

    monkeypatch.setattr(check_module, "examine", noted)
    return names


def examine_all(dataset, folder):
    memory = Examined(dataset, folder)
    return [memory.examine(case) for case in dataset.cases]


def assert_same(reports, expected):
    for report, other in zip(reports, expected, strict=True):
        for field in fields(CaseReport):
            values = getattr(report, field.name), getattr(other, field.name)
            assert type(values[0]) is type(values[1])
            np.testing.assert_array_equal(*values)


def test_a_second_check_reads_nothing_and_says_the_same(dataset, tmp_path, read):
    first = examine_all(dataset, tmp_path)
    ids = [case.id for case in dataset.cases]
    assert read == ids
    assert_same(examine_all(dataset, tmp_path), first)
    assert read == ids
    assert_same(first, [examine(case, dataset) for case in dataset.cases])


def test_changed_files_and_other_classes_are_read_again(dataset, tmp_path, read):
    examine_all(dataset, tmp_path)
    read.clear()
    changed = dataset.cases[2]
    image = nib.load(changed.images[0])
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj) + 1, image.affine), changed.images[0])
    os.utime(changed.images[0], ns=(1, 1))
    reports = examine_all(dataset, tmp_path)
    assert read == [changed.id]
    assert_same(reports, [examine(case, dataset) for case in dataset.cases])
    examine_all(replace(dataset, modalities=("CT",)), tmp_path)
    assert len(read) == 1 + len(dataset.cases)


def test_cases_with_errors_are_read_again(dataset, tmp_path, read):
    broken = dataset.cases[1]
    broken.images[0].write_bytes(b"damaged")
    for _ in range(2):
        reports = examine_all(dataset, tmp_path)
        assert [bool(report.errors) for report in reports] == [False, True, *[False] * 5]
    assert read == [*(case.id for case in dataset.cases), broken.id]


def test_a_stopped_check_goes_on(dataset, tmp_path, read):
    """Its last line was cut; what is no line of ours is left out."""
    expected = examine_all(dataset, tmp_path)
    lines = (tmp_path / FILE).read_bytes().split(b"\n")[1:]
    assert len(lines) == len(dataset.cases)
    (tmp_path / FILE).write_bytes(b"\xff\n{}\n" + b"\n".join(lines[:3]) + b"\n" + lines[3][:90])
    read.clear()
    assert_same(examine_all(dataset, tmp_path), expected)
    assert read == [case.id for case in dataset.cases[3:]]
    read.clear()
    assert_same(examine_all(dataset, tmp_path), expected)
    assert read == []


def test_a_cache_that_cannot_be_written_is_no_error(dataset, tmp_path, read):
    (tmp_path / "file").touch()
    for _ in range(2):
        examine_all(dataset, tmp_path / "file")
    assert len(read) == 2 * len(dataset.cases)
