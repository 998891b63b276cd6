"""medconv/evaluation/segmentation.py: folders of label maps, in JSON, CSV and as a table."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.label_maps import folders, label_of, save, save_spaced, with_names
from PIL import Image

from medconv.data.io.manifest import MANIFEST
from medconv.evaluation import segmentation
from medconv.evaluation.results import table, write
from medconv.targets.label_map import LabelMapTargets


def evaluate(*arguments, **options):
    """The content of the JSON file."""
    return segmentation.evaluate(*arguments, **options).result


def dices(result):
    return {name: values["dice"] for name, values in result["per_class"].items()}


def test_mean_is_over_cases_then_over_classes(tmp_path):
    """Class 2 is only in case a; class 1 is found in full in a, not at all in b."""
    predicted = {"a": label_of(4, 5), "b": label_of()}
    result = evaluate(*folders(tmp_path, predicted, {"a": label_of(4, 5), "b": label_of(7)}))
    assert dices(result) == {"1": 0.5, "2": 1.0}
    assert result["mean"]["dice"] == 0.75
    described = result["statistics"]["1"]["dice"]
    assert (described["n"], described["mean"], described["median"], described["low"]) == (2, 0.5, 0.5, 0.0)
    assert described["sd"] == pytest.approx(0.5**0.5)
    assert result["statistics"]["2"]["dice"]["n"] == 1
    assert result["per_class"]["1"]["hd95_mm"] == pytest.approx(
        math.hypot(6, 10, 12) / 2
    )  # the miss is the diagonal


def test_an_absent_class_is_none_and_null(tmp_path):
    """In neither label map: undefined. In one only: 0."""
    predicted, true_labels = {"a": label_of(4), "b": label_of(4, 3)}, {"a": label_of(4), "b": label_of(4)}
    predictions, references = folders(tmp_path, predicted, true_labels)
    with_names(predictions, "background", "one", "two", "three")
    evaluation = segmentation.evaluate(predictions, references)
    result = evaluation.result
    assert [row["dice"] for row in result["cases"]] == [
        {"one": 1.0, "two": None, "three": None},
        {"one": 1.0, "two": 0.0, "three": None},
    ]
    assert dices(result) == {"one": 1.0, "two": 0.0, "three": None}
    assert result["mean"]["dice"] == 0.5
    assert table(evaluation).splitlines()[3].split() == ["three", *"------", "0"]
    write(evaluation, tmp_path / "out" / "metrics.json")
    text = (tmp_path / "out" / "metrics.json").read_text()
    assert "NaN" not in text and json.loads(text) == result
    assert json.loads(text)["per_class"]["three"]["dice"] is None


def test_a_class_that_a_case_lacks_has_no_volume_with_or_without_names(tmp_path):
    predicted, true_labels = {"a": label_of(4), "b": label_of(4, 2)}, {"a": label_of(4), "b": label_of(4, 2)}
    predictions, references = folders(tmp_path, predicted, true_labels)
    first, second = segmentation.evaluate(predictions, references).result["cases"]
    assert second["volume_ml"]["2"] > 0
    assert first["volume_ml"]["2"] == first["reference_volume_ml"]["2"] == 0


def test_class_names_come_from_the_manifest_or_the_dataset(tmp_path):
    labels = {"a": label_of(3, 3)}
    predictions, references = folders(tmp_path, labels, labels)
    assert list(evaluate(predictions, references)["per_class"]) == ["1", "2"]
    meta = {"labels": {"0": "background", "1": "Anterior", "2": "Posterior"}}
    (tmp_path / "dataset.json").write_text(json.dumps(meta))
    assert list(evaluate(predictions, references)["per_class"]) == ["Anterior", "Posterior"]
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "front": 1, "back": 2}}))
    assert list(evaluate(predictions, references)["per_class"]) == ["front", "back"]
    with_names(predictions, "background", "x", "y")
    assert list(evaluate(predictions, references)["per_class"]) == ["x", "y"]


def test_missing_references_are_named(tmp_path):
    labels = {name: label_of(3) for name in ("a", "b", "c")}
    predictions, references = folders(tmp_path, labels, {"a": label_of(3), "other": label_of(1)})
    with pytest.raises(ValueError, match=rf"references {references}: no file there for b, c$"):
        evaluate(predictions, references)
    (references / "a.nii.gz").rename(references / "a_manual.nii.gz")
    expected = "no file there for a, b, c; it has a_manual, other; if names differ, give patterns with {id}"
    with pytest.raises(ValueError, match=expected):
        evaluate(predictions, references)


def test_a_value_that_predictions_alone_have_is_named(tmp_path):
    """Such as 255 in place of 1."""
    predicted = {"a": label_of(0, 4), "b": label_of(0, 5)}
    evaluation = segmentation.evaluate(*folders(tmp_path, predicted, {"a": label_of(3), "b": label_of(4)}))
    assert table(evaluation).splitlines()[-1] == "no reference has 2, which predictions have"


def test_references_without_a_prediction_are_reported(tmp_path):
    predictions, references = folders(tmp_path, {"a": label_of(3)}, {"a": label_of(3), "b": label_of(4)})
    evaluation = segmentation.evaluate(predictions, references)
    result = evaluation.result
    assert [row["case"] for row in result["cases"]] == ["a"]
    assert result["without_prediction"] == ["b"]
    assert table(evaluation).splitlines()[-1] == "1 of 2 references have no prediction and are not counted: b"


def test_regions_are_scored_and_ignored_voxels_are_not(tmp_path):
    predicted, true_labels = label_of(6, 4), label_of(4, 6)
    true_labels[-1] = 3
    predictions, references = folders(tmp_path, {"a": predicted}, {"a": true_labels})
    labels = {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels, "regions_class_order": [1, 2]}))
    assert dices(evaluate(predictions, references)) == {"whole": 1.0, "core": pytest.approx(2 * 4 / 10)}
    predicted[0, 0, 0] = 3
    save_spaced(predictions / "a.nii.gz", predicted)
    with pytest.raises(
        ValueError, match=rf"{predictions}/a\.nii\.gz: label value 3 is not declared, expected 0 to 2"
    ):
        evaluate(predictions, references)


def test_voxels_of_several_values_to_ignore_are_not_scored(tmp_path):
    """As the manifest beside the predictions says that training ignored them."""
    predicted, true_labels = label_of(6, 4), label_of(4, 6)
    true_labels.ravel()[4], true_labels.ravel()[5] = 7, 9  # what is wrong
    predictions, references = folders(tmp_path, {"a": predicted}, {"a": true_labels})
    targets = replace(LabelMapTargets.of_classes(("background", "one", "two"), 9), also_ignored=(7,))
    (predictions / MANIFEST).write_text(json.dumps({"targets": targets.plain()}))
    assert dices(evaluate(predictions, references)) == {"one": 1.0, "two": 1.0}
    (predictions / MANIFEST).write_text(json.dumps({"targets": replace(targets, also_ignored=()).plain()}))
    with pytest.raises(ValueError, match=rf"{references}/a\.nii\.gz: label value 7 is not declared"):
        evaluate(predictions, references)


def test_missing_and_empty_folders_are_refused(tmp_path):
    predictions, references = folders(tmp_path, {"a": label_of(1)}, {})
    with pytest.raises(ValueError, match=rf"references {references}: no image there \(\.nii\.gz, \.nii, "):
        evaluate(predictions, references)
    with pytest.raises(ValueError, match=rf"predictions={tmp_path}/gone: no such folder"):
        evaluate(tmp_path / "gone", references)


def test_two_label_maps_of_one_case_are_refused(tmp_path):
    predictions, references = folders(tmp_path, {"a": label_of(1), "b": label_of(1)}, {"a": label_of(1)})
    save_spaced(predictions / "b.nii", label_of(2))
    with pytest.raises(ValueError, match=rf"predictions {predictions}: more than one file for b$"):
        evaluate(predictions, references)


def test_suffixes_may_differ_and_hidden_files_are_skipped(tmp_path):
    predictions, references = folders(tmp_path, {"a": label_of(1)}, {})
    save_spaced(references / "a.nii", label_of(1))
    (predictions / ".partial.b.nii.gz").write_bytes(b"")
    assert evaluate(predictions, references)["mean"]["dice"] == 1


def test_predictions_and_references_by_pattern(tmp_path):
    """Names that differ, in one folder; classes come from beside the files."""
    for case in ("p_1", "p_2"):
        save(tmp_path / f"all/{case}_pred.nii.gz", label_of(4, 5))
        save(tmp_path / f"all/{case}_manual1.nii.gz", label_of(4, 5))
    save(tmp_path / "all/p_3_manual1.nii.gz", label_of(1))
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "ear": 1, "eye": 2}}))
    patterns = tmp_path / "all/{id}_pred.nii.gz", tmp_path / "all/{id}_manual1.nii.gz"
    result = evaluate(*patterns)
    assert [row["case"] for row in result["cases"]] == ["p_1", "p_2"]
    assert dices(result) == {"ear": 1.0, "eye": 1.0} and result["without_prediction"] == ["p_3"]
    assert result["predictions"] == str(patterns[0])


def test_a_class_that_a_reference_lacks_does_not_count(tmp_path):
    predicted = {case: label_of(4, 5) for case in ("a_1", "b_1", "b_2")}
    folders_ = folders(tmp_path, predicted, {case: label_of(4, 5 * (case == "a_1")) for case in predicted})
    assert dices(evaluate(*folders_)) == {"1": 1.0, "2": pytest.approx(1 / 3)}
    result = evaluate(*folders_, annotated=["b_*=1"])
    assert dices(result) == {"1": 1.0, "2": 1.0} and result["statistics"]["2"]["nsd"]["n"] == 1
    assert [row["volume_ml"]["2"] is None for row in result["cases"]] == [False, True, True]
    for option, words in (
        ("b_*=3", "no class '3'; there are 1, 2"),
        ("c=1", "no case matches c; the ids are a_1"),
        ("*_1=1", "case b_1 matches both "),
    ):
        with pytest.raises(ValueError, match=f"^annotated.*: {words}"):
            evaluate(*folders_, annotated=["b_*=1", option])


def test_a_class_that_a_reference_lacks_does_not_count_in_a_comparison(tmp_path):
    """Case b is annotated for class 1 alone, and both sets have some of class 2 there."""
    true_labels = {"a": label_of(4, 6), "b": label_of(4)}
    folders_ = folders(tmp_path, {"a": label_of(4, 3), "b": label_of(4, 5)}, true_labels)
    for case, label in {"a": label_of(4, 6), "b": label_of(4, 1)}.items():
        save_spaced(tmp_path / "other" / f"{case}.nii.gz", label)
    result = evaluate(*folders_, tmp_path / "other", annotated=["b=1"])
    assert [row["dice"]["2"] for row in result["compare"]["cases"]] == [1.0, None]
    assert result["compare"]["per_class"]["2"]["dice"] == 1.0
    assert result["comparison"]["2"]["dice"]["n"] == 1


def test_no_value_to_ignore_may_be_one_that_masks_use(tmp_path):
    """A picture of 0 and 255 is read as a mask of 0 and 1."""
    true_label = np.zeros((8, 9), np.uint8)
    true_label[2:5, 2:5] = 1
    for name in ("predictions", "labelsTr"):
        (tmp_path / name).mkdir()
        Image.fromarray(true_label).save(tmp_path / name / "a.png")
    targets = replace(LabelMapTargets.of_classes(("background", "one"), 9), also_ignored=(255,))
    (tmp_path / "predictions" / MANIFEST).write_text(json.dumps({"targets": targets.plain()}))
    with pytest.raises(
        ValueError, match=r"labelsTr/a\.png: the value to ignore must be below 100.* 0 and 255"
    ):
        evaluate(tmp_path / "predictions", tmp_path / "labelsTr")


def test_references_of_0_and_255_are_one_class_and_other_values_are_named(tmp_path):
    """As predictions of 0 and 1; what 255 means is decided for all references together."""
    for name, values in (("predictions", (1, 1)), ("references", (255, 255)), ("mixed", (255, 128))):
        (tmp_path / name).mkdir()
        for number, value in enumerate(values):
            pixels = np.zeros((8, 8), np.uint8)
            pixels[2:5, 1 : 4 + number] = value
            Image.fromarray(pixels).save(tmp_path / name / f"c{number}.png")
    result = evaluate(tmp_path / "predictions", tmp_path / "references")
    assert dices(result) == {"1": 1.0}
    with pytest.raises(ValueError, match=r"c0\.png holds 0, 255, .*c1\.png holds 0, 128"):
        evaluate(tmp_path / "predictions", tmp_path / "mixed")
