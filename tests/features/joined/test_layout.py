"""medconv/features/joined/layout.py: datasets with labels of their own, by the names of their classes."""

import nibabel as nib
import numpy as np
import pytest
from helpers.volumes import (
    AFFINE,
    edit_json,
    image_array,
    label_array,
    preprocessing_config,
    save,
    write_msd,
    write_nnunet,
)
from nibabel.nifti1 import Nifti1Extension

from medconv.data.case_files import label_of
from medconv.data.io.label_values import contradictions
from medconv.data.io.raster import write_picture
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import fill_store
from medconv.data.preprocessing.examine import examine
from medconv.data.splits import grouped, split_cases
from medconv.features.joined.layout import joined


@pytest.fixture
def two(tmp_path):
    """`one` has big and small; `two` has a vessel as 1, small as 2 and unlabelled voxels as 9."""
    write_msd(tmp_path / "one", 2)
    other = edit_json(
        write_msd(tmp_path / "two"), labels={"0": "bg", "1": "vessel", "2": "Small", "9": "ignore"}
    )
    label = label_array(1)
    label[0] = 9
    save(other / "labelsTr/case_1.nii.gz", label)
    return {
        "one": {"layout": "msd", "root": str(tmp_path / "one")},
        "two": {"layout": "auto", "root": str(other), "rename": {"Small": "small"}},
    }


def test_a_class_in_two_spellings_is_an_error(two):
    del two["two"]["rename"]
    with pytest.raises(
        ValueError, match="entries: classes that differ in their .*: small and Small; `rename`"
    ):
        joined(two)


def test_classes_are_joined_by_name_and_cases_annotate_their_own(two, tmp_path, caplog):
    caplog.set_level("INFO")
    dataset = joined(two)
    assert dataset.name == "one_two" and dataset.class_names == ("background", "big", "small", "vessel")
    assert dataset.targets.ignore == 9
    assert {case.id: case.annotated for case in dataset.cases} == {
        **dict.fromkeys(("one_case_0", "one_case_1"), (1, 2)),
        **dict.fromkeys(("two_case_0", "two_case_1", "two_case_2"), (2, 3)),
    }
    assert "label values of the joined dataset, and of its predictions: 0 background, 1 big, 2" in caplog.text
    by_id = {case.id: case for case in dataset.cases}
    assert by_id["two_case_0"].own_id == "case_0"
    assert by_id["one_case_0"].relabel == ((0, 0), (1, 1), (2, 2))  # a vessel is not declared there
    expected = np.array([0, 3, 2])[label_array(1)]
    expected[0] = 9
    np.testing.assert_array_equal(label_of(by_id["two_case_1"])[0], expected)
    measured, warnings, _ = check(dataset, 1)
    (same_images,) = warnings
    assert "one_case_0 = two_case_0, one_case_1 = two_case_1" in same_images
    assert measured.class_voxels[4][1] == 0 < measured.class_voxels[4][3]
    store = fill_store(dataset, preprocessing_config(), tmp_path / "store", 1)
    np.testing.assert_array_equal(store.read("two_case_1").label, expected)


def test_groups_and_folds_know_the_joined_cases(two):
    cases = grouped(joined(two).cases, r"_(case_\d)")
    assert [case.group for case in cases] == ["case_0", "case_1", "case_0", "case_1", "case_2"]
    split = split_cases(cases, 0, 3)
    assert len(split.train) + len(split.val) == 5


def test_datasets_with_the_same_classes_lack_no_labels(two, tmp_path):
    again = {"layout": "folder", "images": f"{tmp_path}/one/imagesTr", "labels": f"{tmp_path}/one/labelsTr"}
    again["class_names"] = ["bg", "big", "small"]
    dataset = joined({"one": two["one"], "again": again})
    assert len(dataset.cases) == 4 and all(c.annotated is c.relabel is None for c in dataset.cases)


def test_a_value_that_its_own_dataset_does_not_declare_is_an_error(two):
    """3 is a class of the joined ones, but not of this one."""
    (case,) = (case for case in joined(two).cases if case.id == "two_case_0")
    save(case.files[1], label_array(0) + 1, AFFINE)
    save(case.files[0], image_array(0))
    (error,) = examine(case, joined(two)).errors
    assert error == f"{case.label}: label values [3] are not declared, expected 0, 1, 2, 9"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"two": None}, "entries.two=None: expected a `layout`, one of auto, folder"),
        ({"two": {"layout": "csv"}}, "entries.two=.*: expected a `layout`, one of"),
        ({"two": {"layout": "msd"}}, "entries.two: missing a required argument: 'root'; the keys of layout"),
        ({"two": {"layout": "msd", "root": "/nowhere"}}, "entries.two.root=/nowhere: no such folder"),
        ({"t_o": {"layout": "msd", "root": "/x"}}, "entries.t_o: names begin case ids"),
        ({"two": {"rename": {"big": "x"}}}, "entries.two.rename=.*: expected {CLASS: NAME} of vessel, Small"),
        ({"two": {"rename": {"Small": "vessel"}}}, "entries.two: every class needs a name of its own"),
    ],
)
def test_a_wrong_entry_is_named(two, changes, words):
    for name, change in changes.items():
        renames = isinstance(change, dict) and set(change) == {"rename"}
        two[name] = {**two[name], **change} if renames else change
    with pytest.raises(ValueError, match=f"^{words}"):
        joined(two)


def test_masks_of_0_and_255_are_joined_in_any_order(tmp_path):
    """Each dataset has matched its own values."""
    mask = np.zeros((8, 8), np.uint8)
    mask[2:5, 2:6] = 1
    for name, factor in (("polyp", 1), ("tool", 255), ("again", 255)):
        for kind, pixels in (("images", mask * 90), ("masks", mask * factor)):
            (tmp_path / name / kind).mkdir(parents=True)
            write_picture(tmp_path / name / kind / "a.png", pixels)
    for names in (("polyp", "tool"), ("tool", "polyp"), ("tool", "again"), ("again", "polyp", "tool")):
        entries = {
            name: {
                "layout": "image_mask",
                "root": str(tmp_path / name),
                "images": "images",
                "labels": "masks",
                "class_names": ["background", "polyp" if name == "again" else name],
            }
            for name in names
        }
        dataset = joined(entries)
        for case in dataset.cases:
            own = dataset.class_names.index({"again": "polyp"}.get(case.id[:-2], case.id[:-2]))
            np.testing.assert_array_equal(label_of(case)[0][..., 0], mask.T * own)


def table_of(names):
    labels = "".join(f'<Label Key="{value}">{name}</Label>' for value, name in names.items())
    return f"<CaretExtension><LabelTable>{labels}</LabelTable></CaretExtension>".encode()


def test_a_renamed_class_may_have_the_name_of_another_in_its_files(tmp_path):
    """`tumor` is that of the kidney in b; files of a call their own so, which is renamed."""
    for name, organ in (("a", "liver"), ("b", "kidney")):
        names = {1: organ, 2: "tumor"}
        write_msd(tmp_path / name, 2)
        edit_json(tmp_path / name, labels={"0": "background", "1": organ, "2": "tumor"})
        for number in range(2):
            path = save(tmp_path / name / f"labelsTr/case_{number}.nii.gz", label_array(number))
            image = nib.load(path)
            image.header.extensions.append(Nifti1Extension(0, table_of(names)))
            nib.save(image, path)
    entries = {name: {"layout": "msd", "root": str(tmp_path / name)} for name in ("a", "b")}
    entries["a"]["rename"] = {"tumor": "liver_tumor"}
    dataset = joined(entries)
    for case in dataset.cases:
        label, _ = label_of(case)
        assert not contradictions(case.label, case.relabel, dataset.class_names, case.annotated)
        assert dataset.class_names[label.max()] == ("liver_tumor" if case.id.startswith("a") else "tumor")


@pytest.mark.parametrize("names", [("FLAIR", "T1"), ("T2", "T1")])  # T1 alone is elsewhere, too
def test_another_order_of_channels_is_refused(tmp_path, names):
    roots = [write_nnunet(tmp_path / name) for name in ("a", "b")]
    edit_json(roots[1], channel_names=dict(zip("01", names, strict=True)))
    entries = {root.name: {"layout": "nnunet", "root": str(root)} for root in roots}
    with pytest.raises(
        ValueError,
        match=rf"entries\.b: its channels are {', '.join(names)}; .* expected the same, in the same",
    ):
        joined(entries)


def test_what_cannot_be_joined_is_refused(two, tmp_path):
    with pytest.raises(ValueError, match="entries=None: expected at least two datasets"):
        joined(None)
    channels = {"layout": "nnunet", "root": str(write_nnunet(tmp_path / "more"))}
    with pytest.raises(ValueError, match="entries.more: its channels are T1, FLAIR; entries.one has MRI"):
        joined({**two, "more": channels})
    labels = {"background": 0, "whole": [1, 2], "small": 2}
    edit_json(tmp_path / "more", labels=labels, regions_class_order=[1, 2])
    with pytest.raises(ValueError, match="entries.more: has regions"):
        joined({**two, "more": channels})
    with pytest.raises(
        ValueError, match="ignore_label: .* joined datasets.* set ignore_label in each of entries"
    ):
        joined(two).with_targets(regions=None, regions_order=None, ignore_label=12)


def test_several_values_to_ignore_of_all_classes_in_order_are_read(two):
    entries = {name: {**two["one"], "ignore_label": [3, 9]} for name in ("one", "again")}
    relabel = joined(entries).cases[0].relabel
    assert relabel is not None and dict(relabel)[9] == dict(relabel)[3] == 3


def test_entries_may_have_several_values_to_ignore(two):
    two["one"]["ignore_label"] = [7, 8]
    case = joined(two).cases[0]
    label = label_array(0)
    label[0], label[1] = 7, 8
    save(case.files[1], label)
    label[:2] = 9
    np.testing.assert_array_equal(label_of(case)[0], label)
