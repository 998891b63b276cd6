"""medconv/inference/inputs.py: the cases of a file, a folder or a list; DICOM is in test_dicom_inputs.py."""

from pathlib import Path

import pytest

from medconv.inference.inputs import find_cases


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def found(source: Path, num_channels: int) -> dict[str, list[str]]:
    return {case.id: [path.name for path in case.images] for case in find_cases(source, num_channels)}


@pytest.mark.parametrize("name", ["scan.nii.gz", "scan.nii"])
def test_a_single_file_is_a_case(tmp_path: Path, name: str) -> None:
    (case,) = find_cases(touch(tmp_path, name) / name, 1)
    assert (case.id, case.images, case.label) == ("scan", (tmp_path / name,), None)


def test_a_folder_of_files(tmp_path: Path) -> None:
    touch(tmp_path, "b.nii", "a.nii.gz", "notes.txt", "._a.nii.gz", ".partial.c.nii.gz")
    assert found(tmp_path, 1) == {"a": ["a.nii.gz"], "b": ["b.nii"]}


def test_channels_of_a_case_belong_together(tmp_path: Path) -> None:
    touch(tmp_path, "a_0001.nii.gz", "a_0000.nii.gz", "b_c_0000.nii.gz", "b_c_0001.nii.gz")
    assert found(tmp_path, 2) == {
        "a": ["a_0000.nii.gz", "a_0001.nii.gz"],
        "b_c": ["b_c_0000.nii.gz", "b_c_0001.nii.gz"],
    }


def test_one_channel_with_its_number(tmp_path: Path) -> None:
    touch(tmp_path, "a_0000.nii.gz", "b_0000.nii.gz")
    assert found(tmp_path, 1) == {"a": ["a_0000.nii.gz"], "b": ["b_0000.nii.gz"]}


@pytest.mark.parametrize("names", [["case_0001"], ["hippocampus_1234"]])
def test_names_that_merely_end_in_four_digits(tmp_path: Path, names: list[str]) -> None:
    touch(tmp_path, *(f"{name}.nii.gz" for name in names))
    assert found(tmp_path, 1) == {name: [f"{name}.nii.gz"] for name in names}


@pytest.mark.parametrize("names", [["case_0000", "case_0001", "case_0002"], ["a_0000", "b"]])
def test_a_folder_with_a_first_channel_holds_channels_and_nothing_else(
    tmp_path: Path, names: list[str]
) -> None:
    touch(tmp_path, *(f"{name}.nii.gz" for name in names))
    with pytest.raises(
        ValueError, match=r"every case needs channels 0 to 0|expected a name that ends in a channel number"
    ):
        find_cases(tmp_path, 1)


def test_4d_files_hold_several_channels(tmp_path: Path) -> None:
    touch(tmp_path, "BRATS_001.nii.gz", "BRATS_002.nii.gz")
    assert found(tmp_path, 4) == {"BRATS_001": ["BRATS_001.nii.gz"], "BRATS_002": ["BRATS_002.nii.gz"]}


def test_missing_channels_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a_0000.nii.gz", "a_0001.nii.gz", "b_0000.nii.gz", "c_0000.nii.gz", "c_0002.nii.gz")
    message = rf"^{tmp_path}: every case needs channels 0 to 1: b has \[0\]; c has \[0, 2\]$"
    with pytest.raises(ValueError, match=message):
        find_cases(tmp_path, 2)


def test_input_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"--input {tmp_path}/gone: no such file or folder"):
        find_cases(tmp_path / "gone", 1)
    touch(tmp_path, "notes.txt")
    with pytest.raises(ValueError, match=rf"--input {tmp_path}: no image there \(\.nii\.gz, \.nii, "):
        find_cases(tmp_path, 1)


@pytest.mark.parametrize("suffixes", [(".nii", ".nii.gz"), (".nii.gz", ".nii")])
def test_two_files_of_one_name(tmp_path: Path, suffixes: tuple[str, str]) -> None:
    """Both would be written to a.nii.gz."""
    touch(tmp_path, *(f"a{suffix}" for suffix in suffixes))
    with pytest.raises(ValueError, match=r"--input .*: more than one file for a$"):
        find_cases(tmp_path, 1)
