"""The cases of a file, a folder or a list; DICOM is in test_dicom_inputs.py."""

import json
from pathlib import Path

import pytest
from helpers import members

from medconv.inference.inputs import find_cases


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def names_of(source: Path, num_channels: int) -> dict[str, list[str]]:
    return {case.id: [path.name for path in case.images] for case in find_cases(source, num_channels)}


@pytest.mark.parametrize("name", ["scan.nii.gz", "scan.nii"])
def test_a_single_file_is_a_case(tmp_path: Path, name: str) -> None:
    (case,) = find_cases(touch(tmp_path, name) / name, 1)
    assert (case.id, case.images, case.label) == ("scan", (tmp_path / name,), None)


def test_each_image_of_a_folder_is_a_case(tmp_path: Path) -> None:
    touch(tmp_path, "b.nii", "a.nii.gz", "notes.txt", "._a.nii.gz", ".partial.c.nii.gz")
    assert names_of(tmp_path, 1) == {"a": ["a.nii.gz"], "b": ["b.nii"]}


def test_channels_are_grouped_by_case(tmp_path: Path) -> None:
    touch(tmp_path, "a_0001.nii.gz", "a_0000.nii.gz", "b_c_0000.nii.gz", "b_c_0001.nii.gz")
    assert names_of(tmp_path, 2) == {
        "a": ["a_0000.nii.gz", "a_0001.nii.gz"],
        "b_c": ["b_c_0000.nii.gz", "b_c_0001.nii.gz"],
    }


def test_a_single_channel_may_have_its_number(tmp_path: Path) -> None:
    touch(tmp_path, "a_0000.nii.gz", "b_0000.nii.gz")
    assert names_of(tmp_path, 1) == {"a": ["a_0000.nii.gz"], "b": ["b_0000.nii.gz"]}


@pytest.mark.parametrize("names", [["case_0001"], ["hippocampus_1234"]])
def test_names_that_end_in_other_four_digits_are_cases(tmp_path: Path, names: list[str]) -> None:
    touch(tmp_path, *(f"{name}.nii.gz" for name in names))
    assert names_of(tmp_path, 1) == {name: [f"{name}.nii.gz"] for name in names}


@pytest.mark.parametrize("names", [["case_0000", "case_0001", "case_0002"], ["a_0000", "b"]])
def test_a_folder_with_a_first_channel_may_hold_only_channels(tmp_path: Path, names: list[str]) -> None:
    touch(tmp_path, *(f"{name}.nii.gz" for name in names))
    with pytest.raises(
        ValueError, match=r"every case needs channels 0 to 0|expected a name that ends in a channel number"
    ):
        find_cases(tmp_path, 1)


def test_4d_files_hold_several_channels(tmp_path: Path) -> None:
    touch(tmp_path, "BRATS_001.nii.gz", "BRATS_002.nii.gz")
    assert names_of(tmp_path, 4) == {"BRATS_001": ["BRATS_001.nii.gz"], "BRATS_002": ["BRATS_002.nii.gz"]}


def test_missing_channels_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a_0000.nii.gz", "a_0001.nii.gz", "b_0000.nii.gz", "c_0000.nii.gz", "c_0002.nii.gz")
    message = rf"^{tmp_path}: every case needs channels 0 to 1: b has \[0\]; c has \[0, 2\]$"
    with pytest.raises(ValueError, match=message):
        find_cases(tmp_path, 2)


def test_input_without_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"--input {tmp_path}/gone: no such file or folder"):
        find_cases(tmp_path / "gone", 1)
    touch(tmp_path, "notes.txt")
    with pytest.raises(ValueError, match=rf"--input {tmp_path}: no image there \(\.nii\.gz, \.nii, "):
        find_cases(tmp_path, 1)


@pytest.mark.parametrize("suffixes", [(".nii", ".nii.gz"), (".nii.gz", ".nii")])
def test_two_files_with_one_case_id_are_refused(tmp_path: Path, suffixes: tuple[str, str]) -> None:
    """Both results would be written to a.nii.gz."""
    touch(tmp_path, *(f"a{suffix}" for suffix in suffixes))
    with pytest.raises(ValueError, match=r"--input .*: more than one file for a$"):
        find_cases(tmp_path, 1)


def test_channels_are_listed_or_lie_beside_the_first_one(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a_0000.nii.gz\ta_0001.nii.gz\nb.nii.gz\n")
    cases = find_cases(tmp_path / "list.txt", 2)
    assert [(case.id, [path.name for path in case.images]) for case in cases] == [
        ("a", ["a_0000.nii.gz", "a_0001.nii.gz"]),
        ("b", ["b.nii.gz"]),
    ]
    for number in range(2):
        (tmp_path / f"a_{number:04d}.nii.gz").touch()
    (case,) = find_cases(tmp_path / "a_0000.nii.gz", 2)
    assert (case.id, len(case.images)) == ("a", 2)
    with members.refused(r"the network takes 3 channels, a_0002\.nii\.gz is not there"):
        find_cases(tmp_path / "a_0000.nii.gz", 3)


def test_a_case_has_the_same_id_in_a_folder_a_file_and_a_list(tmp_path: Path) -> None:
    path = tmp_path / "p_0000.nii.gz"
    path.touch()
    # Lists begin with the byte order mark that Windows writes.
    (tmp_path / "list.txt").write_text(f"\ufeff{path.name}\n", encoding="utf-8")
    (tmp_path / "list.json").write_text(f'\ufeff["{path.name}"]', encoding="utf-8")
    for source in (tmp_path, path, tmp_path / "list.txt", tmp_path / "list.json"):
        assert [(case.id, case.images) for case in find_cases(source, 1)] == [("p", (path,))]
    (tmp_path / "p_0001.nii.gz").touch()
    with members.refused(r"every case needs channels 0 to 0: p has \[0, 1\]"):
        find_cases(tmp_path, 1)
    path.unlink()
    assert [case.id for case in find_cases(tmp_path, 1)] == ["p_0001"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "a.json: not JSON"),
        ("a.json", "3", "a.json: expected an array of cases, or an object of case id to files"),
        ("a.json", "[[]]", "a case is a path, or an array of paths, one per channel; got []"),
        ("a.json", '{"a": 3}', "a case is a path, or an array of paths, one per channel; got 3"),
        ("a.json", '{"../a": "x.nii"}', "a case id names a file, of at most 200 bytes, and cannot be '../a'"),
        ("a.json", '{"": "x.nii"}', "and cannot be ''"),
        ("a.json", '["/"]', "and cannot be ''"),
        ("a.json", r'{"a\u0000": "x.nii"}', r"and cannot be 'a\x00'"),
        ("a.json", r'{"\ud800": "x.nii"}', r"and cannot be '\ud800'"),
        ("a.json", json.dumps({"é" * 150: "x.nii"}), "and cannot be 'éé"),
        ("a.json", '{"a": "x.nii", "a": "y.nii"}', "a.json: two cases are called a"),
        ("a.json", '["x/a.nii", "y/a.nii"]', "two cases are called a; a JSON object gives them ids"),
        ("a.txt", "# nothing\n", "a.txt: no case in it"),
    ],
)
def test_bad_lists_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        find_cases(tmp_path / name, 1)
    assert message in str(error.value)
