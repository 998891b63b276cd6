"""medconv/data/datasets/common.py and tables.py: errors of files, and cells of tables."""

import os

import pytest
from helpers.volumes import edit_json, write_msd

from medconv.data.datasets.common import read_json
from medconv.data.datasets.dataset_json import auto, msd, nnunet, targets_of
from medconv.data.datasets.tables import is_missing, spelling_error


@pytest.mark.parametrize("read", [auto, msd, nnunet, targets_of])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[" + b"9" * 5000 + b"]", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
    ],
)
def test_invalid_json_is_an_error(tmp_path, read, content, message):
    (tmp_path / "dataset.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'dataset.json'}: ")


@pytest.mark.parametrize("read", [auto, msd, nnunet])
def test_missing_root_or_dataset_json_is_an_error(tmp_path, read):
    for unset in (None, ""):
        with pytest.raises(ValueError, match=r"root is not set.*folder that holds dataset\.json"):
            read(unset)
    with pytest.raises(ValueError, match=rf"root={tmp_path}/gone: no such folder"):
        read(tmp_path / "gone")
    with pytest.raises(
        ValueError, match=rf"root={tmp_path}: no dataset\.json there; the folder holds nothing"
    ):
        read(tmp_path)
    (tmp_path / "imagesTr").mkdir()
    with pytest.raises(ValueError, match=r"no dataset\.json there; the folder holds imagesTr"):
        read(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"data=image_mask \(pictures\) and data=folder .* take data\.images"
    ):
        read(tmp_path)
    (tmp_path / "dataset.json").touch()
    with pytest.raises(ValueError, match=rf"dataset\.json: is a file; give its folder, {tmp_path}$"):
        read(tmp_path / "dataset.json")


def test_repeated_case_ids_are_named(tmp_path):
    entries = [
        {"image": f"{d}/{n}.nii.gz", "label": f"l/{n}.nii.gz"} for d, n in ("ax", "bx", "ay", "az", "bz")
    ]
    root = edit_json(write_msd(tmp_path, 1), training=entries)
    with pytest.raises(ValueError, match=r"dataset\.json: case ids that occur more than once: x, z$"):
        msd(root)


def test_huge_json_is_refused_unread(tmp_path):
    path = tmp_path / "plans.json"
    path.touch()
    os.truncate(path, 2**40)  # a hole, which takes no disk
    with pytest.raises(ValueError, match=r"plans\.json: 1048576 MB, expected JSON of at most 256 MB"):
        read_json(path)


@pytest.mark.parametrize(
    "cell", ["", "nan", "NaN", "NA", "n/a", "#N/A", "<NA>", "None", "NONE", "null", "nil"]
)
def test_words_for_no_value(cell):
    assert is_missing(cell)
    assert not is_missing(cell, [cell, "other"])
    assert is_missing(cell, ["other"])


@pytest.mark.parametrize("cell", ["0", "no", "normal", "nan1", "Nancy", "-"])
def test_other_words_are_values(cell):
    assert not is_missing(cell)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Benign", "benign"),
        ("left lung", "left_lung"),
        ("1", "1.0"),
        ("\uff21", "a"),
        ("caf\u00e9", "cafe\u0301"),
    ],
)
def test_spellings_of_one_class(first, second):
    error = spelling_error([first, "other", second, first])
    assert error == f"classes that differ in their spelling alone: {first} and {second}"


def test_different_classes_may_stand_side_by_side():
    assert spelling_error(["1", "2", "10", "II", "III", "benign", "benign 2"]) is None
