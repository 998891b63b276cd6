"""medconv/targets/parse.py, and what voxels to ignore mean to checks, preparation and patches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.volumes import (
    AFFINE,
    edit_json,
    label_array,
    preprocessing_config,
    save,
    tiny,
    write_msd,
    write_nnunet,
)

from medconv.data.augmentation.augment import Augment
from medconv.data.datasets.common import class_names_of, targets_of
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.nnunet import nnunet
from medconv.data.loading.patch_dataset import PatchDataset
from medconv.data.preprocessing.fingerprint import check, examine
from medconv.data.preprocessing.pipeline import dataset_folder, fingerprint, prepare
from medconv.data.preprocessing.store import Store
from medconv.targets.segmentation import SegmentationTargets

REGIONS = {"background": 0, "whole": [1, 2], "small": 2, "ignore": 3}


def scribbled(root: Path, ignore: int = 3, num_cases: int = 2) -> Path:
    """Of each case nothing is known but two slices."""
    write_msd(root, num_cases)
    for i in range(num_cases):
        label = label_array(i)
        label[:, :, [0, 1, 2, 5, 6, 7, 8, 9]] = ignore
        save(root / f"labelsTr/case_{i}.nii.gz", label, AFFINE)
    return edit_json(root, labels={"0": "background", "1": "big", "2": "small", str(ignore): "ignore"})


def test_nnunets_regions_and_ignore(tmp_path: Path) -> None:
    root = edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=[1, 2])
    dataset = nnunet(root)
    assert dataset.class_names == ("background", "label 1", "small") == class_names_of(root)
    assert (
        dataset.targets
        == SegmentationTargets(("whole", "small"), ((1, 2), (2,)), (1, 2), 3)
        == targets_of(root)
    )
    assert dataset.num_values == 4


@pytest.mark.parametrize(
    "labels", [{"0": "background", "1": "big", "5": "ignore"}, {"background": 0, "big": 1, "ignore": 5}]
)
def test_ignore_is_a_value_and_no_class(tmp_path: Path, labels: dict[str, Any]) -> None:
    write, read = (write_msd, msd) if "0" in labels else (write_nnunet, nnunet)
    dataset = read(edit_json(write(tmp_path), labels=labels))
    assert (
        dataset.class_names == ("background", "big")
        and dataset.targets.ignore == 5
        and dataset.num_values == 6
    )


ASKED: list[tuple[Any, Any, Any, SegmentationTargets]] = [
    (None, None, None, SegmentationTargets.of_classes(["background", "big", "small"])),
    (None, None, 255, SegmentationTargets.of_classes(["background", "big", "small"], 255)),
    (None, None, 2, SegmentationTargets.of_classes(["background", "big"], 2)),
    (None, None, "small", SegmentationTargets.of_classes(["background", "big"], 2)),
    (
        {"all": ["big", 2], "small": "small"},
        [1, 2],
        None,
        SegmentationTargets(("all", "small"), ((1, 2), (2,)), (1, 2)),
    ),
    ({"a": 2, "b": [1]}, None, 9, SegmentationTargets(("a", "b"), ((2,), (1,)), (2, 1), 9)),
]


@pytest.mark.parametrize(("regions", "order", "ignore", "wanted"), ASKED)
def test_what_a_config_asks_for(
    tmp_path: Path, regions: Any, order: Any, ignore: Any, wanted: SegmentationTargets
) -> None:
    dataset = tiny(tmp_path).with_targets(regions, order, ignore)
    assert dataset.targets == wanted
    assert len(dataset.class_names) == (2 if wanted.ignore == 2 else 3)


def test_a_config_goes_before_the_dataset_and_keeps_what_it_does_not_name(tmp_path: Path) -> None:
    found = nnunet(edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=[1, 2]))
    assert found.with_targets(None, None, None).targets == found.targets
    assert found.with_targets(None, None, "ignore").targets == found.targets
    assert found.with_targets(None, None, 7).targets.ignore == 7
    assert found.with_targets({"small": [2]}, None, None).targets == SegmentationTargets(
        ("small",), ((2,),), (2,), 3
    )


@pytest.mark.parametrize(
    ("regions", "order", "ignore", "message"),
    [
        (
            {"a": [1, 3]},
            None,
            None,
            r"data\.regions: a must name different label values from 1 to 2: 3 is not a fore",
        ),
        ({"a": [0, 1]}, None, None, r"data\.regions: a must name .*: 0 is not a foreground value"),
        ({"a": [1, 1]}, None, None, r"data\.regions: a must name different .*got \[1, 1\]"),
        ({"a": []}, None, None, r"data\.regions: a must name .*got \[\]"),
        ({"a": ["bigg"]}, None, None, r"data\.regions: a: bigg is not a class; did you mean big\?"),
        ({"a": ["big", "small"]}, None, 2, r"data\.regions: a: small is not a class; the classes are big"),
        (
            {"a": [1, 9]},
            None,
            9,
            r"data\.regions: a must name .*: 9 is the value to ignore",
        ),
        (
            {"a": [1, 2], "b": [2]},
            None,
            None,
            r"data\.regions_order is needed, as a and b overlap: .*\['a', 'b'\]",
        ),
        (
            {"a": [1, 2], "b": [2]},
            [1],
            None,
            r"data\.regions_order must give each of \['a', 'b'\] .*, got \[1\]",
        ),
        ({"a": [1, 2], "b": [2]}, [2, 2], None, r"data\.regions_order must give .*, got \[2, 2\]"),
        (
            {"a": [1, 2], "b": [2]},
            [2, 1],
            None,
            r"data\.regions_order must give .*one that lies in it, got \[2, 1\]",
        ),
        (None, [1, 2], None, r"data\.regions_order=\[1, 2\] needs data\.regions, which is not set"),
        (None, None, 1, r"data\.ignore_label must be above all classes, from 2 \(small.*got 1, class big"),
        (None, None, 0, r"data\.ignore_label must be above.*got 0, class background"),
        (None, None, -1, r"data\.ignore_label must be above.*got -1, not a label value"),
        (None, None, 40000, r"data\.ignore_label must be above.*to 32767, got 40000"),
        (None, None, "smal", r"data\.ignore_label: smal is not a class; did you mean small\?"),
    ],
)
def test_what_a_config_cannot_ask_for(
    tmp_path: Path, regions: Any, order: Any, ignore: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(tmp_path).with_targets(regions, order, ignore)


def test_what_is_ignored_is_not_measured(tmp_path: Path) -> None:
    dataset, whole = msd(scribbled(tmp_path / "some")), tiny(tmp_path / "all", 2)
    report = examine(dataset.cases[0], dataset)
    known = label_array(0)[:, :, 3:5]
    assert (
        report.class_voxels == tuple(int((known == value).sum()) for value in range(3)) and not report.errors
    )
    found, other = check(dataset, 1).fingerprint, check(whole, 1).fingerprint
    assert found.intensities[0]["mean"] == pytest.approx(other.intensities[0]["mean"], rel=0.1)
    assert report.intensities is not None and report.intensities.shape[1] == (known > 0).sum()


def test_where_there_is_no_foreground_the_known_background_is_measured(tmp_path: Path) -> None:
    root = scribbled(tmp_path)
    label = np.full_like(label_array(0), 3)
    label[:2] = 0
    save(root / "labelsTr/case_0.nii.gz", label, AFFINE)
    dataset = msd(root)
    report = examine(dataset.cases[0], dataset)
    assert report.intensities is not None and report.intensities.shape[1] == (label == 0).sum()


def test_a_dataset_of_which_nothing_is_known(tmp_path: Path) -> None:
    root = scribbled(tmp_path)
    for i in range(2):
        save(root / f"labelsTr/case_{i}.nii.gz", np.full_like(label_array(i), 3), AFFINE)
    with pytest.raises(
        ValueError,
        match=r"no case has a labelled voxel: every voxel of all label maps has the value to ignore",
    ):
        check(msd(root), 1)


@pytest.mark.parametrize(
    "labels", [{**REGIONS, "small": 2_000_000_000}, {**REGIONS, "ignore": 2_000_000_000}]
)
def test_values_that_no_label_map_holds(tmp_path: Path, labels: dict[str, Any]) -> None:
    root = edit_json(write_nnunet(tmp_path), labels=labels, regions_class_order=[1, 2])
    with pytest.raises(
        ValueError, match=r"dataset\.json: label values must lie in 0 to 32767, got {'\w+': 2000000000}"
    ):
        nnunet(root)


@pytest.mark.parametrize("order", [[[1], [2]], ["1", "2"], "12", 1])
def test_an_order_that_is_none(tmp_path: Path, order: Any) -> None:
    root = edit_json(write_nnunet(tmp_path), labels=REGIONS, regions_class_order=order)
    with pytest.raises(
        ValueError, match=r"regions_class_order must give each of \['whole', 'small'\] a label value"
    ):
        nnunet(root)


def test_the_only_class_cannot_be_ignored(tmp_path: Path) -> None:
    dataset = msd(edit_json(write_msd(tmp_path), labels={"0": "background", "1": "box"}))
    with pytest.raises(
        ValueError, match=r"data\.ignore_label must be above all classes, from 2 to 32767, got 1, class box"
    ):
        dataset.with_targets(None, None, 1)


@pytest.mark.parametrize(
    ("value", "message"), [(3, "every voxel has the value to ignore"), (0, "no foreground")]
)
def test_warnings_of_labels_that_say_little(tmp_path: Path, value: int, message: str) -> None:
    root = scribbled(tmp_path)
    label = np.full_like(label_array(0), value)
    label[:2] = 3
    save(root / "labelsTr/case_0.nii.gz", label, AFFINE)
    dataset = msd(root)
    assert [message in warning for warning in examine(dataset.cases[0], dataset).warnings] == [True]


def test_another_value_is_a_fault_that_names_what_is_expected(tmp_path: Path) -> None:
    dataset = msd(scribbled(tmp_path, ignore=7))
    save(tmp_path / "labelsTr/case_0.nii.gz", label_array(0) + 2, AFFINE)
    assert (
        "[3, 4] are not declared, expected 0 to 2, and 7 to be ignored"
        in examine(dataset.cases[0], dataset).errors[0]
    )


@pytest.mark.parametrize("ignore", [3, 255, 300])
@pytest.mark.parametrize("spacing_mm", [(1.0, 1.5, 2.0), (1.5, 1.5, 1.5)])
def test_the_value_survives_preparation(tmp_path: Path, ignore: int, spacing_mm: tuple[float, ...]) -> None:
    root = scribbled(tmp_path / "data", 3)
    for i in range(2):
        label = label_array(i).astype(np.int16)
        label[:, :, 5:] = ignore
        save(root / f"labelsTr/case_{i}.nii.gz", label, AFFINE)
    dataset = msd(
        edit_json(root, labels={"0": "background", "1": "big", "2": "small", str(ignore): "ignore"})
    )
    entry = prepare(dataset, preprocessing_config(spacing_mm), tmp_path / "cache", 1).read("case_0")
    assert set(np.unique(entry.label)) == {0, 1, 2, ignore}
    assert (entry.label == ignore).mean() == pytest.approx(0.5, abs=0.08)
    assert entry.label.dtype == (np.uint8 if ignore < 256 else np.int16)


def test_places_are_those_of_what_is_known(tmp_path: Path) -> None:
    entry = prepare(msd(scribbled(tmp_path / "data")), preprocessing_config(), tmp_path / "cache", 1).read(
        "case_0"
    )
    rows, label = np.array(entry.foreground), np.array(entry.label)
    at = label[tuple(rows[:, 1:].T)]
    assert set(rows[:, 0]) == {0, 1, 2} and (np.diff(rows[:, 0]) >= 0).all()
    assert (at[rows[:, 0] > 0] == rows[rows[:, 0] > 0, 0]).all()
    assert set(at[rows[:, 0] == 0]) == {0, 1, 2} and (rows[:, 0] == 0).sum() == (label != 3).sum()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_every_patch_of_a_sparse_annotation_holds_some_of_it(tmp_path: Path, share: float) -> None:
    store = prepare(msd(scribbled(tmp_path / "data")), preprocessing_config(), tmp_path / "cache", 1)
    dataset = PatchDataset(store, ["case_0", "case_1"], (3, 3, 1), 0, share)
    labels = [dataset[i]["label"].numpy()[0] for i in range(60)]
    centres = np.array([label[1, 1, 0] for label in labels])
    assert all((label != 3).any() for label in labels)
    assert np.isin(centres, (1, 2)).mean() >= share - 0.1
    if share == 0:
        assert (centres == 0).any()


def test_a_store_without_such_voxels_is_the_same_as_ever(tmp_path: Path) -> None:
    """Nothing that was prepared before there was a value to ignore is prepared again."""
    dataset = tiny(tmp_path / "data", 2)
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    regions = dataset.with_targets({"all": [1, 2]}, None, None)
    assert prepare(regions, preprocessing_config(), tmp_path / "cache", 1).folder == store.folder
    ignoring = dataset.with_targets(None, None, 9)
    assert prepare(ignoring, preprocessing_config(), tmp_path / "cache", 1).folder != store.folder
    assert set(store.read("case_0").foreground[:, 0]) == {1, 2}


def test_findings_are_taken_anew_once_voxels_are_to_be_ignored(tmp_path: Path) -> None:
    dataset = msd(scribbled(tmp_path / "data"))
    folder = dataset_folder(tmp_path / "cache", dataset)
    found, _ = fingerprint(dataset, folder, 1)
    assert json.loads((folder / "fingerprint.json").read_text())["fingerprint"]["class_voxels"] == [
        list(c) for c in found.class_voxels
    ]
    again, _ = fingerprint(dataset.with_targets(None, None, 3), folder, 1)
    assert again == found
    with pytest.raises(ValueError, match=r"label values \[3\] are not declared"):
        fingerprint(dataset.with_targets(None, None, 4), folder, 1)


def test_augmentation_moves_the_value_as_any_other(tmp_path: Path) -> None:
    store: Store = prepare(
        msd(scribbled(tmp_path / "data", 255)), preprocessing_config(), tmp_path / "cache", 1
    )
    dataset = PatchDataset(store, ["case_0"], (8, 8, 6), 0, 0.5)
    augment = Augment(0, (1.0, 1.5, 2.0), (8, 8, 6), p={"rotation": 1.0, "scale": 1.0}, mirror_axes="all")
    samples = [dataset[i] for i in range(8)]
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("image", "label")} | {
        "sample": torch.arange(8)
    }
    assert set(augment(batch)["label"].unique().tolist()) == {0, 1, 2, 255}
