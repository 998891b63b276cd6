"""Voxels without a label (`data.ignore_label`), from the check of the files to augmented patches."""

import json

import numpy as np
import pytest
import torch
from helpers.loading import patch_dataset
from helpers.volumes import AFFINE, edit_json, label_array, preprocessing_config, save, tiny, write_msd

from medconv.data.augmentation.augment import Augment
from medconv.data.datasets.dataset_json import msd
from medconv.data.preprocessing.check import check
from medconv.data.preprocessing.dataset_cache import cached_fingerprint, dataset_folder, fill_store
from medconv.data.preprocessing.examine import examine


def scribbled(root, ignore=3, num_cases=2):
    """A dataset whose cases have labels in two slices only; all other voxels have the value to ignore."""
    write_msd(root, num_cases)
    for i in range(num_cases):
        label = label_array(i)
        label[:, :, [0, 1, 2, 5, 6, 7, 8, 9]] = ignore
        save(root / f"labelsTr/case_{i}.nii.gz", label, AFFINE)
    return edit_json(root, labels={"0": "background", "1": "big", "2": "small", str(ignore): "ignore"})


def test_ignored_voxels_are_not_measured(tmp_path):
    dataset, complete = msd(scribbled(tmp_path / "some")), tiny(tmp_path / "all", 2)
    report = examine(dataset.cases[0], dataset)
    labelled = label_array(0)[:, :, 3:5]
    assert report.class_voxels == tuple(int((labelled == value).sum()) for value in range(3))
    assert not report.errors
    mean, expected = (check(d, 1).fingerprint.intensities[0]["mean"] for d in (dataset, complete))
    assert mean == pytest.approx(expected, rel=0.1)
    assert report.intensities is not None and report.intensities.shape[1] == (labelled > 0).sum()


def test_a_value_to_ignore_that_no_voxel_has_is_named(tmp_path):
    write_msd(tmp_path, 2)
    edit_json(tmp_path, labels={"0": "background", "1": "big", "2": "small", "9": "ignore"})
    warnings = check(msd(tmp_path), 1).warnings
    assert "no label map has a voxel of the value to ignore, 9" in warnings
    assert not check(msd(scribbled(tmp_path / "some")), 1).warnings


def test_a_value_that_is_not_declared_counts_for_no_class(tmp_path):
    write_msd(tmp_path, 1)
    label = label_array(0)
    expected = int((label == 2).sum())
    label[0, 0, 0] = 7
    save(tmp_path / "labelsTr/case_0.nii.gz", label, AFFINE)
    report = examine(msd(tmp_path).cases[0], msd(tmp_path))
    assert report.errors and report.class_voxels[2] == expected


def test_without_foreground_the_labelled_background_is_measured(tmp_path):
    root = scribbled(tmp_path)
    label = np.full_like(label_array(0), 3)
    label[:2] = 0
    save(root / "labelsTr/case_0.nii.gz", label, AFFINE)
    dataset = msd(root)
    report = examine(dataset.cases[0], dataset)
    assert report.intensities is not None and report.intensities.shape[1] == (label == 0).sum()


def test_a_dataset_without_a_labelled_voxel_is_refused(tmp_path):
    root = scribbled(tmp_path)
    for i in range(2):
        save(root / f"labelsTr/case_{i}.nii.gz", np.full_like(label_array(i), 3), AFFINE)
    with pytest.raises(
        ValueError,
        match=r"no case has a labelled voxel: every voxel of all label maps has the value to ignore",
    ):
        check(msd(root), 1)


@pytest.mark.parametrize(
    ("value", "message"), [(3, "every voxel has the value to ignore"), (0, "no foreground")]
)
def test_a_case_without_labels_or_foreground_gives_a_warning(tmp_path, value, message):
    root = scribbled(tmp_path)
    label = np.full_like(label_array(0), value)
    label[:2] = 3
    save(root / "labelsTr/case_0.nii.gz", label, AFFINE)
    dataset = msd(root)
    assert [message in warning for warning in examine(dataset.cases[0], dataset).warnings] == [True]


def test_an_undeclared_value_is_an_error_that_names_the_expected_ones(tmp_path):
    dataset = msd(scribbled(tmp_path, ignore=7))
    save(tmp_path / "labelsTr/case_0.nii.gz", label_array(0) + 2, AFFINE)
    assert (
        "[3, 4] are not declared, expected 0 to 2, and 7 to be ignored"
        in examine(dataset.cases[0], dataset).errors[0]
    )


@pytest.mark.parametrize("ignore", [3, 255, 300])
@pytest.mark.parametrize("spacing_mm", [(1.0, 1.5, 2.0), (1.5, 1.5, 1.5)])
def test_preprocessing_keeps_the_value_to_ignore(tmp_path, ignore, spacing_mm):
    root = scribbled(tmp_path / "data", 3)
    for i in range(2):
        label = label_array(i).astype(np.int16)
        label[:, :, 5:] = ignore
        save(root / f"labelsTr/case_{i}.nii.gz", label, AFFINE)
    dataset = msd(
        edit_json(root, labels={"0": "background", "1": "big", "2": "small", str(ignore): "ignore"})
    )
    entry = fill_store(dataset, preprocessing_config(spacing_mm), tmp_path / "cache", 1).read("case_0")
    assert set(np.unique(entry.label)) == {0, 1, 2, ignore}
    assert (entry.label == ignore).mean() == pytest.approx(0.5, abs=0.08)
    assert entry.label.dtype == (np.uint8 if ignore < 256 else np.int16)


def test_the_store_lists_the_places_of_labelled_voxels(tmp_path):
    store = fill_store(msd(scribbled(tmp_path / "data")), preprocessing_config(), tmp_path / "cache", 1)
    entry = store.read("case_0")
    rows, label = np.array(entry.foreground), np.array(entry.label)
    classes, labels_there = rows[:, 0], label[tuple(rows[:, 1:].T)]
    assert set(classes) == {0, 1, 2} and (np.diff(classes) >= 0).all()
    assert (labels_there[classes > 0] == classes[classes > 0]).all()
    assert set(labels_there[classes == 0]) == {0, 1, 2} and (classes == 0).sum() == (label != 3).sum()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_every_patch_of_a_sparse_annotation_has_labelled_voxels(tmp_path, share):
    store = fill_store(msd(scribbled(tmp_path / "data")), preprocessing_config(), tmp_path / "cache", 1)
    dataset = patch_dataset(store, ["case_0", "case_1"], (3, 3, 1), foreground_share=share)
    labels = [dataset[i]["label"].numpy()[0] for i in range(60)]
    centres = np.array([label[1, 1, 0] for label in labels])
    assert all((label != 3).any() for label in labels)
    assert np.isin(centres, (1, 2)).mean() >= share - 0.1
    if share == 0:
        assert (centres == 0).any()


def test_without_ignored_voxels_the_store_stays_the_same(tmp_path):
    """Stores from before there was a value to ignore are used again."""
    dataset = tiny(tmp_path / "data", 2)
    store = fill_store(dataset, preprocessing_config(), tmp_path / "cache", 1)
    regions = dataset.with_targets(regions={"all": [1, 2]}, regions_order=None, ignore_label=None)
    assert fill_store(regions, preprocessing_config(), tmp_path / "cache", 1).folder == store.folder
    ignoring = dataset.with_targets(regions=None, regions_order=None, ignore_label=9)
    assert fill_store(ignoring, preprocessing_config(), tmp_path / "cache", 1).folder != store.folder
    assert set(store.read("case_0").foreground[:, 0]) == {1, 2}


def test_a_new_value_to_ignore_measures_the_files_again(tmp_path):
    dataset = msd(scribbled(tmp_path / "data"))
    folder = dataset_folder(tmp_path / "cache", dataset)
    measured, _ = cached_fingerprint(dataset, folder, 1)
    written = json.loads((folder / "fingerprint.json").read_text())["fingerprint"]
    assert written["class_voxels"] == [list(voxels) for voxels in measured.class_voxels]
    assert (
        cached_fingerprint(dataset.with_targets(regions=None, regions_order=None, ignore_label=3), folder, 1)[
            0
        ]
        == measured
    )
    with pytest.raises(ValueError, match=r"label values \[3\] are not declared"):
        cached_fingerprint(dataset.with_targets(regions=None, regions_order=None, ignore_label=4), folder, 1)


def test_augmentation_moves_the_value_to_ignore_like_a_class(tmp_path):
    store = fill_store(msd(scribbled(tmp_path / "data", 255)), preprocessing_config(), tmp_path / "cache", 1)
    dataset = patch_dataset(store, ["case_0"], (8, 8, 6))
    augment = Augment(0, (1.0, 1.5, 2.0), (8, 8, 6), p={"rotation": 1.0, "scale": 1.0}, mirror_axes="all")
    samples = [dataset[i] for i in range(8)]
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("image", "label")} | {
        "sample": torch.arange(8)
    }
    assert set(augment(batch)["label"].unique().tolist()) == {0, 1, 2, 255}


def test_several_values_to_ignore_are_one_in_checks_and_stores(tmp_path):
    """Label maps with 3 and 255, of which neither is a class."""
    root = write_msd(tmp_path / "data", 2)
    label = label_array(0)
    label[:, :, 5:8], label[:, :, 8:] = 3, 255
    save(root / "labelsTr/case_0.nii.gz", label, AFFINE)
    dataset = msd(root).with_targets(regions=None, regions_order=None, ignore_label=[3, 255])
    report = examine(dataset.cases[0], dataset)
    assert not report.errors and not report.warnings
    assert report.class_voxels == tuple(int((label == value).sum()) for value in range(3))
    for config in (preprocessing_config(), preprocessing_config((1.5, 1.5, 1.5))):
        entry = fill_store(dataset, config, tmp_path / "cache", 1).read("case_0")
        assert set(np.unique(entry.label)) == {0, 1, 2, 3}
        assert (entry.label == 3).mean() == pytest.approx(0.5, abs=0.08)
    label[0, 0, 0] = 4
    save(root / "labelsTr/case_0.nii.gz", label, AFFINE)
    words = r"label values \[4\] are not declared, expected 0, 1, 2, 3, 255"
    with pytest.raises(ValueError, match=rf"case_0: .*case_0\.nii\.gz: {words}"):
        check(dataset, 1)
