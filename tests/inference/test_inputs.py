"""The cases of a file, a folder or a list."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import members
from helpers.volumes import pixels, save, unprivileged

from medconv.data.io.images import read_array
from medconv.data.io.raster import write_picture
from medconv.inference.inputs import find_cases


def touch(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def names_of(source, num_channels):
    return {case.id: [path.name for path in case.images] for case in find_cases(source, num_channels)}


@pytest.mark.parametrize("name", ["scan.nii.gz", "scan.nii"])
def test_a_single_file_is_a_case(tmp_path, name):
    (case,) = find_cases(touch(tmp_path, name) / name, 1)
    assert (case.id, case.images, case.label) == ("scan", (tmp_path / name,), None)


def test_each_image_of_a_folder_is_a_case(tmp_path):
    touch(tmp_path, "b.nii", "a.nii.gz", "notes.txt", "._a.nii.gz", ".partial.c.nii.gz")
    assert names_of(tmp_path, 1) == {"a": ["a.nii.gz"], "b": ["b.nii"]}


def test_channels_are_grouped_by_case(tmp_path):
    touch(tmp_path, "a_0001.nii.gz", "a_0000.nii.gz", "b_c_0000.nii.gz", "b_c_0001.nii.gz")
    assert names_of(tmp_path, 2) == {
        "a": ["a_0000.nii.gz", "a_0001.nii.gz"],
        "b_c": ["b_c_0000.nii.gz", "b_c_0001.nii.gz"],
    }


def test_a_single_channel_may_have_its_number(tmp_path):
    touch(tmp_path, "a_0000.nii.gz", "b_0000.nii.gz")
    assert names_of(tmp_path, 1) == {"a": ["a_0000.nii.gz"], "b": ["b_0000.nii.gz"]}


def test_pictures_hold_all_colours_in_one_file(tmp_path):
    for name in ("a_0000.png", "b_0000.png"):
        write_picture(tmp_path / name, pixels(0, (8, 9, 3)))
    assert names_of(tmp_path, 3) == {"a": ["a_0000.png"], "b": ["b_0000.png"]}
    (case,) = find_cases(tmp_path / "a_0000.png", 3)
    assert (case.id, case.images, case.missing_channels) == ("a", (tmp_path / "a_0000.png",), ())


def test_files_with_the_names_of_the_training_are_cases_by_its_pattern(tmp_path, caplog):
    touch(tmp_path, "s1_t1.nii.gz", "s2_t1.nii.gz", "s1_seg.nii.gz", "notes.txt")
    with caplog.at_level("INFO", logger="medconv"):
        cases = find_cases(tmp_path, 1, image_patterns=("*_t1.nii.gz",))
    assert [(case.id, [path.name for path in case.images]) for case in cases] == [
        ("s1", ["s1_t1.nii.gz"]),
        ("s2", ["s2_t1.nii.gz"]),
    ]
    assert "2 images named as in training, *_t1.nii.gz" in caplog.text
    assert "skipped images with other names: s1_seg.nii.gz" in caplog.text


def test_files_with_other_names_than_those_of_the_training_are_cases_by_their_names(tmp_path):
    touch(tmp_path, "a.nii.gz", "b.nii.gz")
    cases = find_cases(tmp_path, 1, image_patterns=("*_t1.nii.gz",))
    assert [case.id for case in cases] == ["a", "b"]


def test_channels_are_found_by_the_patterns_of_the_training(tmp_path):
    for name in ("s1", "s2"):
        touch(tmp_path / name, "t1.nii.gz", "flair.nii.gz")
    by_pattern = ("{id}/t1.nii.gz", "{id}/flair.nii.gz")
    first, _ = find_cases(tmp_path, 2, image_patterns=by_pattern)
    assert (first.id, [path.name for path in first.images]) == ("s1", ["t1.nii.gz", "flair.nii.gz"])
    (tmp_path / "s2/flair.nii.gz").unlink()
    _, second = find_cases(tmp_path, 2, image_patterns=by_pattern)
    assert second.missing_channels == (1,) and len(second.images) == 1


def test_a_folder_may_lack_the_first_channel_of_all_cases(tmp_path):
    for name in ("p1_0001", "p1_0002", "p2_0001"):
        save(tmp_path / f"{name}.nii.gz", np.zeros((3, 3, 3), np.uint8))
    first, second = find_cases(tmp_path, 3, takes_missing=True)
    assert (first.id, first.missing_channels, second.id, second.missing_channels) == (
        "p1",
        (0,),
        "p2",
        (0, 2),
    )
    assert [case.id for case in find_cases(tmp_path, 3)] == ["p1_0001", "p1_0002", "p2_0001"]
    for name in ("p1_0001", "p1_0002", "p2_0001"):  # with all channels: a case each, whatever its number
        save(tmp_path / f"{name}.nii.gz", np.zeros((3, 3, 3, 3), np.uint8))
    cases = find_cases(tmp_path, 3, takes_missing=True)
    assert [case.id for case in cases] == ["p1_0001", "p1_0002", "p2_0001"]


def test_an_entry_of_a_list_that_lacks_its_first_channel_has_the_id_of_the_case(tmp_path):
    touch(tmp_path, "p1_0001.nii.gz", "p1_0002.nii.gz")
    (tmp_path / "list.json").write_text(json.dumps([[None, "p1_0001.nii.gz", "p1_0002.nii.gz"]]))
    (case,) = find_cases(tmp_path / "list.json", 3, takes_missing=True)
    assert (case.id, case.missing_channels) == ("p1", (0,))
    (tmp_path / "list.txt").write_text("p1_0001.nii.gz\t\tp1_0002.nii.gz\n")
    with pytest.raises(ValueError, match=r"list\.txt: expected files separated by one tab each"):
        find_cases(tmp_path / "list.txt", 3)


@pytest.mark.parametrize("names", [["case_0001"], ["hippocampus_1234"]])
def test_names_that_end_in_other_four_digits_are_cases(tmp_path, names):
    touch(tmp_path, *(f"{name}.nii.gz" for name in names))
    assert names_of(tmp_path, 1) == {name: [f"{name}.nii.gz"] for name in names}


@pytest.mark.parametrize("names", [["case_0000", "case_0001", "case_0002"], ["a_0000", "b"]])
def test_a_folder_with_a_first_channel_may_hold_only_channels(tmp_path, names):
    touch(tmp_path, *(f"{name}.nii.gz" for name in names))
    with pytest.raises(
        ValueError, match=r"a case has channels 0 to 0, but|expected a name that ends in a channel number"
    ):
        find_cases(tmp_path, 1)


def test_4d_files_hold_several_channels(tmp_path):
    touch(tmp_path, "BRATS_001.nii.gz", "BRATS_002.nii.gz")
    assert names_of(tmp_path, 4) == {"BRATS_001": ["BRATS_001.nii.gz"], "BRATS_002": ["BRATS_002.nii.gz"]}


def test_missing_channels_are_those_of_their_case(tmp_path):
    touch(tmp_path, "a_0000.nii.gz", "a_0001.nii.gz", "b_0000.nii.gz", "c_0001.nii.gz")
    cases = find_cases(tmp_path, 2)
    assert [(case.id, case.missing_channels) for case in cases] == [("a", ()), ("b", (1,)), ("c", (0,))]


def test_channels_that_no_network_has_are_named(tmp_path):
    touch(tmp_path, "a_0000.nii.gz", "a_0001.nii.gz", "c_0000.nii.gz", "c_0002.nii.gz")
    message = rf"^{tmp_path}: a case has channels 0 to 1, but c has \[0, 2\]; if these numbers count cases"
    with pytest.raises(ValueError, match=message):
        find_cases(tmp_path, 2)


def test_input_without_an_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"source {tmp_path}/gone: no such file or folder"):
        find_cases(tmp_path / "gone", 1)
    touch(tmp_path, "notes.txt")
    with pytest.raises(ValueError, match=rf"source {tmp_path}: no image there \(\.nii\.gz, \.nii, "):
        find_cases(tmp_path, 1)


def test_images_in_folders_of_classes_are_found_by_a_pattern(tmp_path):
    for name in ("yes/a.png", "no/b.png"):
        (tmp_path / name).parent.mkdir()
        touch(tmp_path, name)
    with pytest.raises(
        ValueError, match=rf"no image there .*; those in its folders are {tmp_path}/\*/{{id}}.png"
    ):
        find_cases(tmp_path, 1)
    assert {case.id for case in find_cases(tmp_path / "*/{id}.png", 1)} == {"a", "b"}


def test_a_label_called_case_is_no_id(tmp_path):
    touch(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text("path,case\na.png,0\nb.png,0\n")
    assert [case.id for case in find_cases(tmp_path / "t.csv", 1, ["case", "other"])] == ["a", "b"]
    (tmp_path / "t.csv").write_text("case,path\ns1,a.png\ns2,b.png\n")
    assert [case.id for case in find_cases(tmp_path / "t.csv", 1, ["label"])] == ["s1", "s2"]


def test_endings_in_capitals_are_not_skipped_silently(tmp_path):
    touch(tmp_path, "a.nii.gz", "B.NII.GZ", "c.Nii")
    with pytest.raises(
        ValueError, match=r"source .*: endings must be in small letters, rename B\.NII\.GZ, c\.Nii$"
    ):
        find_cases(tmp_path, 1)


@pytest.mark.parametrize("suffixes", [(".nii", ".nii.gz"), (".nii.gz", ".nii")])
def test_two_files_with_one_case_id_are_refused(tmp_path, suffixes):
    """Both results would be written to a.nii.gz."""
    touch(tmp_path, *(f"a{suffix}" for suffix in suffixes))
    with pytest.raises(ValueError, match=r"source .*: more than one file for a$"):
        find_cases(tmp_path, 1)


def test_channels_are_listed_or_lie_beside_the_first_one(tmp_path):
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
    (case,) = find_cases(tmp_path / "a_0000.nii.gz", 3)
    assert case.missing_channels == (2,)


def test_a_case_has_the_same_id_in_a_folder_a_file_and_a_list(tmp_path):
    path = tmp_path / "p_0000.nii.gz"
    path.touch()
    # Lists begin with the byte order mark that Windows writes.
    (tmp_path / "list.txt").write_text(f"\ufeff{path.name}\n", encoding="utf-8")
    (tmp_path / "list.json").write_text(f'\ufeff["{path.name}"]', encoding="utf-8")
    for source in (tmp_path, path, tmp_path / "list.txt", tmp_path / "list.json"):
        assert [(case.id, case.images) for case in find_cases(source, 1)] == [("p", (path,))]
    (tmp_path / "p_0001.nii.gz").touch()
    with members.refused(r"a case has channels 0 to 0, but p has \[0, 1\]"):
        find_cases(tmp_path, 1)
    path.unlink()
    assert [case.id for case in find_cases(tmp_path, 1)] == ["p_0001"]


@pytest.fixture
def dicoms():
    """The helpers that write DICOM; skips a test where pydicom is not installed."""
    return importlib.import_module("helpers.dicoms")


def test_each_series_of_a_study_is_a_case(dicoms, tmp_path, caplog):
    """Of two patients; one has two series in one folder, with a localizer."""
    caplog.set_level("INFO")
    study = tmp_path / "study"
    dicoms.series(study / "p1/se1", dicoms.array())
    (study / "p1/notes.txt").write_text("a note")
    dicoms.series(study / "p2", dicoms.array(), SeriesInstanceUID="1.2.1")
    t2 = {"SeriesInstanceUID": "1.2.2", "SeriesNumber": 4, "SeriesDescription": "T2/flair"}
    move_files(dicoms.series(tmp_path / "t2", dicoms.array(), **t2), study / "p2", "b")
    localizer = {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"], "SeriesInstanceUID": "1.2.5"}
    dicoms.save(dicoms.one(dicoms.array()[..., 0], **localizer), study / "p2/scout")
    report = {"Modality": "SR", "Rows": None, "SeriesInstanceUID": "1.2.6"}
    dicoms.save(dicoms.one(np.zeros((4, 4), np.uint8), **report), study / "sr/1")
    dicoms.series(study / ".trash/old", dicoms.array())
    images = {case.id: case.images for case in find_cases(study, 1)}
    assert list(images) == ["p1_se1", "p2_3_T1_mprage", "p2_4_T2_flair"]
    assert images["p1_se1"] == (study / "p1/se1",)
    assert f"{study / 'p2'}: skipped 1 such as scout: a localizer" in caplog.text
    assert f"{study / 'sr'}: skipped 1 such as 1: not an image (SR)" in caplog.text
    for case in ("p2_3_T1_mprage", "p2_4_T2_flair"):
        assert read_array(images[case][0])[0].shape == (9, 7, 5)
    series = {"a": "study/p1/se1", "b": str(images["p2_4_T2_flair"][0])}
    (tmp_path / "list.json").write_text(json.dumps(series))
    shapes = [read_array(case.images[0])[0].shape for case in find_cases(tmp_path / "list.json", 1)]
    assert shapes == [(9, 7, 5)] * 2


def test_series_beside_a_volume_are_not_left_out_silently(dicoms, tmp_path, caplog):
    dicoms.series(tmp_path / "p1/se", dicoms.array())
    dicoms.series(tmp_path / "p2/se", dicoms.array())
    dicoms.series(tmp_path / "p2/ct", dicoms.array(), SeriesInstanceUID="1.2.9", Modality="CT")
    (tmp_path / "labels").mkdir()
    touch(tmp_path, "converted.nii.gz", "labels/converted.nii.gz")
    assert [case.id for case in find_cases(tmp_path, 1)] == ["converted"]
    message = "DICOM series are not read, as volumes of another format stand beside their folders: p1, p2"
    assert caplog.messages == [f"source {tmp_path}: {message}"]


def move_files(source, target, prefix):
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        path.rename(target / f"{prefix}{path.name}")


def test_a_folder_of_one_series_gives_the_case_its_name(dicoms, tmp_path, monkeypatch):
    folder = dicoms.series(tmp_path / "p1/se1", dicoms.array())
    assert [case.id for case in find_cases(folder, 1)] == ["se1"]
    monkeypatch.chdir(folder)
    assert [(case.id, case.images) for case in find_cases(Path(), 1)] == [("se1", (folder,))]
    Path("sub").mkdir()
    assert [case.id for case in find_cases(Path("sub/.."), 1)] == ["se1"]


def test_a_folder_without_dicom_beside_others_is_named(dicoms, tmp_path, caplog):
    dicoms.series(tmp_path / "a/se", dicoms.array())
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a/se").iterdir():
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes()[1:])  # its mark is one byte too early
    assert [case.id for case in find_cases(tmp_path, 1)] == ["a_se"]
    message = f"skipped {tmp_path / 'b'}, no file there can be read as DICOM (DICM after 128 bytes)"
    assert caplog.messages == [f"source {tmp_path}: {message}"]


def test_a_file_named_by_its_uid_keeps_the_last_number(tmp_path):
    (tmp_path / "list.txt").write_text("a/1.2.840.5\nb/1.2.840.6\n")
    assert [case.id for case in find_cases(tmp_path / "list.txt", 1)] == ["1.2.840.5", "1.2.840.6"]


def test_each_radiograph_of_a_folder_is_a_case(dicoms, tmp_path):
    """Named as its file; a broken one is a case that fails alone."""
    files = {"a": "a.dcm", "1.2.3.4": "1.2.3.4", "1.2.3.5": "1.2.3.5"}
    for name in files.values():
        dicoms.radiograph(tmp_path / name, np.ones((6, 7), np.uint16))
    (tmp_path / "c.dcm").write_bytes(b"nothing")
    images = {case.id: case.images[0] for case in find_cases(tmp_path, 1)}
    assert images == {name: tmp_path / file for name, file in {**files, "c": "c.dcm"}.items()}
    assert read_array(images["1.2.3.4"])[0].shape == (7, 6, 1)
    with members.refused(r"c\.dcm: not a "):
        read_array(images["c"])


def test_series_of_several_modalities_are_refused(dicoms, tmp_path):
    dicoms.series(tmp_path / "a", dicoms.array())
    dicoms.series(tmp_path / "b", dicoms.array(), Modality="PT")
    with members.refused(
        r"series of several modalities, MR \(such as a\), PT \(such as b\); expected one, or a list"
    ):
        find_cases(tmp_path, 1)


def test_two_series_of_one_name_are_refused(dicoms, tmp_path):
    for number in range(2):
        folder = dicoms.series(tmp_path / f"{number}", dicoms.array(), SeriesInstanceUID=f"1.2.{number}")
        move_files(folder, tmp_path / "both", str(number))
    with members.refused("two cases are called 3_T1_mprage; a JSON object gives them ids"):
        find_cases(tmp_path / "both", 1)


def test_a_folder_without_any_image_is_refused(tmp_path):
    (tmp_path / "sub").mkdir()
    with members.refused(r"no image there \(\.nii\.gz, .*\), nor DICOM below"):
        find_cases(tmp_path, 1)


def test_a_folder_without_permission_is_named(dicoms, open_folder):
    dicoms.series(open_folder / "a", dicoms.array())
    find_cases(
        open_folder, 1
    )  # imports pydicom, whose files may be closed to a process without root's rights
    dicoms.series(open_folder / "b", dicoms.array()).chmod(0)
    error = f"ValueError: source {open_folder}: {open_folder / 'b'} cannot be read (Permission denied)"
    assert unprivileged(find_cases, open_folder, 1) == error


def test_a_pattern_names_the_cases(tmp_path):
    """As in training, so that predictions have the names of the references' case ids."""
    for name in ("21_training.nii.gz", "22_training.nii.gz", "21_mask.nii.gz"):
        (tmp_path / name).touch()
    cases = find_cases(tmp_path / "{id}_training.nii.gz", 1)
    assert {case.id: case.images for case in cases} == {
        number: (tmp_path / f"{number}_training.nii.gz",) for number in ("21", "22")
    }
    with pytest.raises(ValueError, match=r"source=.*\{id\}_t1\.nii\.gz: no file matches"):
        find_cases(tmp_path / "{id}_t1.nii.gz", 1)


def test_pictures_with_endings_in_capitals_are_not_skipped_silently(tmp_path):
    touch(tmp_path, "a.png", "b.Png")
    with pytest.raises(ValueError, match=r"endings must be in small letters, rename b\.Png$"):
        find_cases(tmp_path, 1)
    (tmp_path / "a.png").rename(tmp_path / "a.nii.gz")  # pictures beside volumes are not read
    assert [case.id for case in find_cases(tmp_path, 1)] == ["a"]


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
        ("a.txt", "# nothing\n", "a.txt: no cases found"),
    ],
)
def test_bad_lists_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        find_cases(tmp_path / name, 1)
    assert message in str(error.value)
