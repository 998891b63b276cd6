"""medconv/data/datasets/dataset_json.py: Decathlon and nnU-Net folders are told apart."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.volumes import (
    CLASSES,
    SHAPE,
    edit_json,
    image_array,
    label_array,
    pixels,
    save,
    write_json,
    write_msd,
    write_nnunet,
)

from medconv.data.case_files import label_of
from medconv.data.datasets.dataset_json import auto, group_channels, msd, nnunet
from medconv.data.io.raster import write_picture
from medconv.data.preprocessing.check import check


def test_paths_may_be_those_of_windows(tmp_path):
    expected = msd(write_msd(tmp_path))

    entries = json.loads((tmp_path / "dataset.json").read_text())["training"]
    windows = [{key: text.replace("/", "\\") for key, text in entry.items()} for entry in entries]
    edit_json(tmp_path, training=windows)
    assert msd(tmp_path) == expected


def test_error_names_the_expected_keys(tmp_path):
    message = (
        r"dataset\.json: neither a Decathlon .*`modality`, `training`.*nor.*`channel_names`.*it "
        r"has \['name', 'tasks'\]"
    )
    with pytest.raises(ValueError, match=message):
        auto(write_json(tmp_path, {"name": "x", "tasks": []}))


def test_msd_reads_the_training_cases(tmp_path):
    dataset = msd(write_msd(tmp_path / "Task", 12))
    assert (dataset.name, dataset.class_names, dataset.modalities) == ("Tiny", CLASSES, ("MRI",))
    assert [case.id for case in dataset.cases] == sorted(f"case_{i}" for i in range(12))
    for case in dataset.cases:
        assert case.images == (tmp_path / f"Task/imagesTr/{case.id}.nii.gz",)
        assert case.label == tmp_path / f"Task/labelsTr/{case.id}.nii.gz"
        assert all(path.is_file() for path in case.files)


BAD_DECATHLON = {
    "no training": ({"training": None}, "`training` must list at least one case, got None"),
    "an nnU-Net": ({"training": None, "channel_names": {"0": "MRI"}}, "take data=nnunet"),
    "empty training": ({"training": []}, r"`training` must list at least one case, got \[\]"),
    "entry without label": ({"training": [{"image": "a.nii.gz"}]}, "needs the keys `image` and `label`"),
    "no modality": ({"modality": None}, "`modality` must map channel numbers to names"),
    "gap in modalities": ({"modality": {"0": "a", "2": "b"}}, "`modality` must map.*got.*'2': 'b'"),
    "no labels": ({"labels": None}, "`labels` must name the background and at least one class, got None"),
    "background only": (
        {"labels": {"0": "background"}},
        "`labels` must name the background and at least one",
    ),
    "gap in labels": ({"labels": {"0": "background", "1": "a", "3": "b"}}, r"without a gap.*got \[0, 1, 3\]"),
    "equal names": ({"labels": {"0": "background", "1": "a", "2": "a"}}, "a different name, got.*'a', 'a'"),
}


@pytest.mark.parametrize("fault", BAD_DECATHLON)
def test_an_invalid_decathlon_file_is_an_error(tmp_path, fault):
    changes, message = BAD_DECATHLON[fault]
    root = edit_json(write_msd(tmp_path), **changes)
    with pytest.raises(ValueError, match=message) as error:
        msd(root)
    assert str(error.value).startswith(f"{root / 'dataset.json'}: ")


def test_tiny_dataset_holds_every_class():
    """Else other tests would test nothing."""
    assert set(label_array(0).ravel()) == {0, 1, 2} and image_array(0).shape == SHAPE


def ids(cases):
    return [case.id for case in cases]


def test_nnunet_reads_cases_with_all_channels(tmp_path):
    dataset = nnunet(write_nnunet(tmp_path / "Dataset007_Tiny"))
    assert (dataset.name, dataset.class_names) == ("Dataset007_Tiny", CLASSES)
    assert dataset.modalities == ("T1", "FLAIR")
    assert ids(dataset.cases) == ["case_0", "case_1", "case_2"]
    for case in dataset.cases:
        assert [path.name for path in case.images] == [f"{case.id}_0000.nii.gz", f"{case.id}_0001.nii.gz"]
        assert case.label == tmp_path / f"Dataset007_Tiny/labelsTr/{case.id}.nii.gz"
        assert all(path.is_file() for path in case.files)


def test_nnunet_reads_the_cases_that_its_key_lists(tmp_path):
    """As nnU-Net does, wherever their files are: folders may hold others."""
    root = write_nnunet(tmp_path)
    channels = [f"imagesTr/case_1_{number:04d}.nii.gz" for number in range(2)]
    moved = (root / "labelsTr/case_1.nii.gz").rename(tmp_path / "elsewhere.nii.gz")
    listed = {"images": channels, "label": str(moved)}
    (case,) = nnunet(edit_json(root, dataset={"one": listed}, numTraining=1)).cases
    assert case.id == "one" and case.label == moved and all(path.is_file() for path in case.files)


@pytest.mark.parametrize(
    "entries", [[], {}, {"one": "a.nii"}, {"one": {"images": ["a.nii"], "label": "b.nii"}}]
)
def test_a_list_of_cases_of_another_form_is_refused(tmp_path, entries):
    root = edit_json(write_nnunet(tmp_path), dataset=entries)
    with pytest.raises(
        ValueError, match=r"dataset\.json: .*`dataset` must .*images: \[paths of 2 channels\], label: path"
    ):
        nnunet(root)


def test_nnunet_reads_uncompressed_files(tmp_path):
    root = edit_json(write_nnunet(tmp_path), file_ending=".nii", channel_names={"0": "T1"})
    save(root / "imagesTr/other_0000.nii", image_array(0))
    save(root / "labelsTr/other.nii", label_array(0))
    (case,) = nnunet(root).cases
    assert [path.name for path in case.files] == ["other_0000.nii", "other.nii"]


def test_nnunet_skips_hidden_files(tmp_path):
    """Archives packed on a Mac hold a `._NAME` beside each file."""
    root = write_nnunet(tmp_path, 2)
    (root / "imagesTr/._case_0_0000.nii.gz").write_bytes(b"\0\5\x16\7")
    assert ids(nnunet(root).cases) == ["case_0", "case_1"]


REGIONS = {"background": 0, "whole": [1, 2], "core": 2}
BAD_JSON = {
    "no channels": ({"channel_names": None}, "`channel_names` must map channel numbers"),
    "a Decathlon": ({"channel_names": None, "modality": {"0": "MRI"}}, "take data=msd"),
    "no labels": ({"labels": None}, "`labels` must name the background"),
    "gap in labels": ({"labels": {"background": 0, "a": 2}}, r"without a gap.*got \[0, 2\]"),
    "equal values": ({"labels": {"background": 0, "a": 1, "b": 1}}, r"each once, got \[0, 1, 1\]"),
    "regions without an order": (
        {"labels": REGIONS},
        r"need the key `regions_class_order`.*\['whole', 'core'\]",
    ),
    "a wrong order": (
        {"labels": REGIONS, "regions_class_order": [2, 2]},
        r"regions_class_order must give.*\[2, 2\]",
    ),
    "ignore within": ({"labels": {"background": 0, "ignore": 1, "a": 2}}, r"without a gap.*got \[0, 2\]"),
    "ignore alone": ({"labels": {"background": 0, "ignore": 1}}, "`ignore` must be above all classes"),
    "no values": (
        {"labels": {"background": 0, "a": []}},
        r"or for a region a list of them, got \{'a': \[\]\}",
    ),
    "words": ({"labels": {"background": 0, "a": "one"}}, r"a list of them, got \{'a': 'one'\}"),
    "file ending": ({"file_ending": ".bmp"}, r"file_ending must be one of .*, got '\.bmp'"),
}


@pytest.mark.parametrize("fault", BAD_JSON)
def test_invalid_dataset_json_is_an_error(tmp_path, fault):
    changes, message = BAD_JSON[fault]
    root = edit_json(write_nnunet(tmp_path), **changes)
    with pytest.raises(ValueError, match=message) as error:
        nnunet(root)
    assert str(error.value).startswith(f"{root / 'dataset.json'}: ")


@pytest.mark.parametrize("missing", ["case_1_0000.nii.gz", "case_1_0001.nii.gz"])
def test_missing_channel_is_an_error_of_its_case(tmp_path, missing):
    root = write_nnunet(tmp_path)
    (root / "imagesTr" / missing).unlink()
    channel = 1 - int(missing[-8])
    dataset = nnunet(root)  # `check` lists the errors of all cases
    assert ids(dataset.cases) == ["case_0", "case_1", "case_2"]
    error = f"{root / 'imagesTr'}: expected channels 0 to 1 of every case, found [{channel}]"
    assert dataset.errors == {"case_1": error}


def test_folder_without_images_is_an_error(tmp_path):
    root = write_nnunet(tmp_path, 0)
    with pytest.raises(ValueError, match=rf"{root}/imagesTr: no \*\.nii\.gz file there.*CASE_0000\.nii\.gz"):
        nnunet(root)


def test_group_channels_names_cases_with_further_channels():
    names = ["a_0000", "a_0001", "b_0000", "c_0000", "c_0001", "c_0002"]
    with pytest.raises(ValueError, match=r"channels 0 to 1, but c has \[0, 1, 2\]; if"):
        group_channels([Path(f"x/{name}.nii.gz") for name in names], 2)
    with pytest.raises(ValueError, match=r"x/a_1\.nii\.gz: .*channel number.*CASE_0000"):
        group_channels([Path("x/a_1.nii.gz")], 1)


def test_channels_are_sorted():
    files = [Path(f"a_{channel:04d}.nii.gz") for channel in (2, 0, 1)]
    assert group_channels(files, 3) == {"a": tuple(sorted(files))}


def test_cases_that_would_vanish_are_named(tmp_path, caplog):
    """nnU-Net #2346: 8 declared, 6 labels, an image with another ending, another one missing."""
    root = edit_json(write_nnunet(tmp_path, 6), numTraining=8)
    for channel in (0, 1):
        (root / f"imagesTr/case_2_{channel:04d}.nii.gz").rename(root / f"imagesTr/case_2_{channel:04d}.nii")
        (root / f"imagesTr/case_5_{channel:04d}.nii.gz").unlink()
    dataset = nnunet(root)
    assert len(dataset.cases) == 6
    for case_id in ("case_2", "case_5"):
        error = f"{root}/labelsTr/{case_id}.nii.gz: no image {case_id}_0000.nii.gz in {root}/imagesTr"
        assert dataset.errors[case_id] == error
    assert "not read, as file_ending is .nii.gz: case_2_0000.nii, case_2_0001.nii" in caplog.text
    assert "numTraining is 8, but there are 6 cases" in caplog.text


def test_folders_of_version_1_are_read(tmp_path):
    """Their `dataset.json` is a Decathlon's, their images have a number for each channel."""
    root = write_nnunet(tmp_path)
    entries = [
        {"image": f"./imagesTr/case_{i}.nii.gz", "label": f"./labelsTr/case_{i}.nii.gz"} for i in range(3)
    ]
    labels = {str(value): name for value, name in enumerate(CLASSES)}
    as_version_2 = nnunet(root)
    edit_json(
        root,
        channel_names=None,
        file_ending=None,
        modality={"0": "T1", "1": "FLAIR"},
        labels=labels,
        training=entries,
    )
    assert nnunet(root) == auto(root) == as_version_2
    with pytest.raises(ValueError, match=r"names of nnU-Net \(CASE_0000.nii.gz\).*take data=nnunet"):
        msd(root)


def test_pictures_hold_all_colours_in_one_file(tmp_path):
    labels = {"background": 0, "road": 1}
    channels = {"0": "R", "1": "G", "2": "B"}
    root = write_json(tmp_path, {"channel_names": channels, "labels": labels, "file_ending": ".png"})
    for name in ("imagesTr", "labelsTr"):
        (root / name).mkdir()
    write_picture(root / "imagesTr/a_0000.png", pixels(0, (8, 9, 3)))
    write_picture(root / "labelsTr/a.png", pixels(1) // 128 * 255)
    dataset = nnunet(root)
    assert not dataset.errors and dataset.modalities == ("red", "green", "blue")  # as of other pictures
    words = {"0": "rgb_to_0_1", "1": "rgb_to_0_1", "2": "rgb_to_0_1"}  # nnU-Net's, for a normalisation
    assert nnunet(edit_json(root, channel_names=words)).modalities == tuple(words.values())
    assert check(dataset, 1).fingerprint.shapes == ((9, 8),)
    assert sorted(np.unique(label_of(dataset.cases[0])[0]).tolist()) == [0, 1]
    with pytest.raises(ValueError, match="case a: .*expected channels 0 to 1 of every case"):
        check(nnunet(edit_json(root, channel_names={"0": "R", "1": "G"})), 1)


def test_names_in_another_unicode_form_are_the_same(tmp_path):
    """A Mac writes `é` as `e` and an accent."""
    root = edit_json(write_nnunet(tmp_path, 0), channel_names={"0": "T1"})
    save(root / "imagesTr/ren\u00e9_0000.nii.gz", image_array(0))
    save(root / "labelsTr/rene\u0301.nii.gz", label_array(0))
    dataset = nnunet(root)
    assert ids(dataset.cases) == ["ren\u00e9"] and not dataset.errors
    check(dataset, 1)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = write_nnunet(tmp_path) / "dataset.json"
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert len(nnunet(tmp_path).cases) == 3
