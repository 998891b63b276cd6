"""medconv/training/sampling.py: from which cases samples draw a class, and which labels cases lack."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.volumes import label_array, preprocessing_config, save, tiny

from medconv.data.preprocessing.pipeline import prepare
from medconv.targets.regions import RegionTargets
from medconv.training import sampling


def test_a_class_is_drawn_where_it_is_annotated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = tiny(tmp_path)
    label = label_array(2)
    save(dataset.cases[2].files[1], label * (label != 2))  # nothing of class 2 in the last case
    store = prepare(dataset, preprocessing_config(), tmp_path / "cache", 1)
    train = [dataset.cases[0], replace(dataset.cases[1], annotated=(1,)), dataset.cases[2]]
    caplog.set_level("INFO")
    drawn = sampling.draw_from(train, dataset.targets, dataset.class_names, store)
    assert drawn == [[0, 1, 2], [0]] and "of 3 training cases: big in 3, small in 1" in caplog.text
    assert sampling.draw_from(train[1:2], dataset.targets, dataset.class_names, store) == [[0], []]
    assert "data.balanced_sampling: no training case has a voxel of small" in caplog.text


def test_outputs_follow_from_annotated_label_values(tmp_path: Path) -> None:
    first, second, _ = tiny(tmp_path).cases
    dataset, train = tiny(tmp_path / "again"), [first, replace(second, annotated=(2,))]
    assert sampling.annotated([first], dataset.targets, dataset.class_names) is None
    found = sampling.annotated(train, dataset.targets, dataset.class_names)
    assert found == {"case_0": ((1, 2), (True, True, True)), "case_1": ((2,), (True, False, True))}
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), None, (1, 2))
    found = sampling.annotated(train, regions, dataset.class_names)
    assert found is not None and found["case_1"].outputs == (False, True)


def test_differences_between_cases_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    dataset = tiny(tmp_path)
    sampling.announce(dataset.cases, dataset)
    assert not caplog.text
    first, *others = dataset.cases
    sampling.announce([replace(first, annotated=(2,), weight=2.5), *others], dataset)
    assert "annotated, of 3 training cases: big in 2, small in 3" in caplog.text
    assert "training cases are drawn by weight: 1 of 2, 2.5 of 1" in caplog.text
