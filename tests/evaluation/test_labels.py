"""medconv/evaluation/labels.py: classes and tolerances from untrusted files, and from options."""

import json

import numpy as np
import pytest

from medconv.data.io.manifest import MANIFEST
from medconv.evaluation import labels as evaluation_labels
from medconv.evaluation.labels import (
    agreed_targets,
    check_tolerances,
    numbered,
    renumbering,
    tolerance_of,
    tolerances,
)
from medconv.features.instances.targets import InstanceTargets
from medconv.features.raters.targets import SoftTargets
from medconv.metrics import dice
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

REGIONS = RegionTargets(("whole", "core"), ((1, 2, 3), (2, 3)), 4, (1, 2))


def targets_of(predictions, references):
    return agreed_targets([predictions], references)


def folders(tmp_path, record=None, labels=None):
    (tmp_path / "out").mkdir(exist_ok=True)
    if record is not None:
        (tmp_path / "out" / MANIFEST).write_text(record if isinstance(record, str) else json.dumps(record))
    if labels is not None:
        (tmp_path / "dataset.json").write_text(json.dumps(labels))
    return tmp_path / "out", tmp_path / "labelsTr"


def test_targets_come_from_the_manifest_then_from_the_dataset(tmp_path):
    assert targets_of(*folders(tmp_path)) is None
    regions = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
    targets = targets_of(*folders(tmp_path, labels={"labels": regions, "regions_class_order": [1, 2]}))
    assert targets == RegionTargets(("whole", "core"), ((1, 2), (2,)), 3, (1, 2))
    assert targets_of(*folders(tmp_path, {"class_names": ["background", "x"]})) == LabelMapTargets.of_classes(
        ("background", "x")
    )
    assert targets_of(*folders(tmp_path, {"class_names": ["old"], "targets": REGIONS.plain()})) == REGIONS
    # what a network of several raters predicts can be compared with what another one does
    soft = SoftTargets.of_classes(("background", "x")).plain()
    assert targets_of(*folders(tmp_path, {"targets": soft})) == LabelMapTargets.of_classes(
        ("background", "x")
    )


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_values_of_a_label_map_are_found_in_every_piece(order, monkeypatch):
    monkeypatch.setattr(dice, "_VOXELS_AT_ONCE", 7)
    label = np.random.default_rng(0).choice([0, 3, 105, 32767], (4, 5, 3)).astype(np.int16)
    label = np.asarray(label, order=order)
    assert evaluation_labels.values_in(label) == {0, 3, 105, 32767}
    assert evaluation_labels.values_in(label[:0]) == set()


def changed(**changes):
    return {"targets": {**REGIONS.plain(), **changes}}


@pytest.mark.parametrize(
    "record",
    [
        *(
            "{",
            "[]",
            "{}",
            "7",
            '{"class_names": 5}',
            '{"class_names": []}',
            '{"class_names": ["background"]}',
        ),
        *(
            '{"class_names": ["background", "a", "a"]}',
            '{"class_names": ["background", " "]}',
            '{"targets": null}',
            "[" * 100_000,
        ),
        *(
            changed(names=["whole"]),
            changed(names=["whole", 3]),
            changed(names=["a", "a"]),
            changed(names="ab"),
        ),
        *(
            changed(values=[[1], []]),
            changed(values=[[0], [1]]),
            changed(values=[[1], [40_000]]),
            changed(values=[[1], [True]]),
        ),
        *(
            changed(values=[1, 2]),
            changed(values={"1": 2}),
            changed(order=[1]),
            changed(order="12"),
            changed(order=[1, -2]),
        ),
        *(
            changed(ignore=0),
            changed(ignore="4"),
            changed(ignore=[4]),
            changed(ignore=3),
            {"targets": {"names": ["a"]}},
        ),
    ],
)
def test_a_damaged_manifest_is_an_error_with_its_path(tmp_path, record):
    predictions, references = folders(tmp_path, record)
    with pytest.raises(
        ValueError, match=rf"^{predictions}/{MANIFEST}: expected a JSON object whose `class_names` is a list"
    ):
        targets_of(predictions, references)


def test_a_manifest_that_is_not_text_is_refused(tmp_path):
    predictions, references = folders(tmp_path, {})
    (predictions / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="expected a JSON object"):
        targets_of(predictions, references)


def test_two_folders_must_have_the_same_classes(tmp_path):
    for name, classes in (
        ("a", ["background", "x"]),
        ("b", ["background", "x"]),
        ("c", ["background", "x", "y"]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(json.dumps({"class_names": classes}))
    assert agreed_targets(
        [tmp_path / "a", tmp_path / "b"], tmp_path / "labelsTr"
    ) == LabelMapTargets.of_classes(("background", "x"))
    (tmp_path / "unknown").mkdir()
    for order in (["unknown", "c"], ["c", "unknown"]):
        found = agreed_targets([tmp_path / name for name in order], tmp_path / "labelsTr")
        assert found == LabelMapTargets.of_classes(("background", "x", "y"))
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/c: its classes differ from those of {tmp_path}/a: x and x, y"
    ):
        agreed_targets([tmp_path / "a", tmp_path / "c"], tmp_path / "labelsTr")


def test_a_manifest_counts_more_than_what_the_references_declare(tmp_path):
    """Training may have made regions of the classes of dataset.json; another program states none."""
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "a": 1, "b": 2}}))
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "ours" / MANIFEST).write_text(json.dumps({"class_names": ["background", "whole"]}))
    for order in (["ours", "theirs"], ["theirs", "ours"]):
        found = agreed_targets([tmp_path / name for name in order], tmp_path / "labelsTr")
        assert found == LabelMapTargets.of_classes(("background", "whole"))
    found = agreed_targets([tmp_path / "theirs"], tmp_path / "labelsTr")
    assert found == LabelMapTargets.of_classes(("background", "a", "b"))


def test_references_of_another_numbering_are_matched_by_name(tmp_path):
    labels = {"labels": {"background": 0, "head": 1, "tail": 2}}
    record = {"class_names": ["background", "Tail", "body", "head"]}
    predictions, references = folders(tmp_path, record, labels)
    targets = targets_of(predictions, references)
    assert targets.names == ("Tail", "body", "head")
    assert renumbering(targets, references) == ((0, 0), (1, 3), (2, 1))
    assert renumbering(targets, tmp_path / "elsewhere/labelsTr") is None
    with pytest.raises(ValueError, match=r"gives tail another label value.* and names head, which these do"):
        renumbering(LabelMapTargets.of_classes(("background", "tail")), references)
    # one that lacks the last class has the values of the others
    assert renumbering(LabelMapTargets.of_classes(("background", "head", "tail", "body")), references) is None
    predictions, references = folders(tmp_path, record, {"labels": labels["labels"] | {"ignore": 3}})
    ignoring = LabelMapTargets.of_classes(record["class_names"], 9)
    assert renumbering(ignoring, references) == ((0, 0), (1, 3), (2, 1), (3, 9))
    # a file that is not needed may be of any form
    predictions, references = folders(tmp_path, record, {"labels": 3})
    assert targets_of(predictions, references) == targets and renumbering(targets, references) is None


def test_interior_and_border_of_objects_are_no_values_of_files(tmp_path):
    labels = {"labels": {"background": 0, "border": 1, "interior": 2}}
    predictions, references = folders(tmp_path, {"targets": InstanceTargets().plain()}, labels)
    assert targets_of(predictions, references) == InstanceTargets()
    assert renumbering(InstanceTargets(), references) is None


def test_classes_without_names_are_numbered():
    assert numbered([0, 10, 2]) == numbered(["10", "2"]) == LabelMapTargets(("2", "10"), ((2,), (10,)))


def test_a_tolerance_is_for_all_classes_or_for_one():
    assert tolerance_of(tolerances([]), ["a", "b=c"]) == {"a": 1.0, "b=c": 1.0}
    assert tolerance_of(tolerances(["2", "b=c=0.5"]), ["a", "b=c"]) == {"a": 2.0, "b=c": 0.5}
    with pytest.raises(ValueError, match=r"^tolerance_mm: no class 'livr'; there are liver, spleen$"):
        check_tolerances(tolerances(["livr=3"]), ["liver", "spleen"])


@pytest.mark.parametrize("option", ["", "wide", "liver=", "=3", "-1", "nan", "inf", "liver=-2"])
def test_unusable_tolerances_are_refused(option):
    with pytest.raises(
        ValueError, match=rf"^tolerance_mm {option}: expected millimetres, such as 2, or NAME=MM"
    ):
        tolerances([option])


def test_an_image_that_cannot_be_looked_at_is_not_shown(tmp_path):
    entry = {"images": [str(tmp_path / ("x" * 300))], "stamps": [None]}
    (tmp_path / "prediction.json").write_text(json.dumps({"cases": {"a": entry}}))
    assert evaluation_labels.recorded_images(tmp_path) == {}
