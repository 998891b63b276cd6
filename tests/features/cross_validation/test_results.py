"""medconv/features/cross_validation/: folds that are there, missing, or do not belong together."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers.cross_validations import by_fold, edit, edit_configs, summaries

from medconv.features.cross_validation import report as cross_validation_report
from medconv.features.cross_validation import results as cross_validation
from medconv.features.cross_validation.folds import read_folds
from medconv.training import identity


def test_a_missing_fold_is_reported_with_the_number_of_remaining_cases(sweep_folder):
    runs = by_fold(sweep_folder)
    edit(runs["2"] / "summary.json", status="failed")
    shutil.rmtree(runs["0"])
    (crossval,) = cross_validation.read(sweep_folder)
    assert crossval.missing == {"0": "not there", "2": "failed"}
    count = len(summaries(sweep_folder)["1"]["val/cases"])
    assert (
        f"warning: without fold 0 (not there), 2 (failed): means are over {count} cases of fold 1"
        in cross_validation_report.table(crossval)
    )
    assert "1 of 3 folds" in cross_validation_report.table(crossval)
    edit(runs["1"] / "summary.json", status="running")
    assert cross_validation.read(sweep_folder) == []


def test_a_case_that_two_folds_validated_is_named(sweep_folder):
    path = by_fold(sweep_folder)["2"] / "summary.json"
    other = next(iter(summaries(sweep_folder)["0"]["val/cases"]))
    edit(
        path,
        **{"val/cases": {**summaries(sweep_folder)["2"]["val/cases"], other: {"box": 0.5, "hole": None}}},
    )
    (crossval,) = cross_validation.read(sweep_folder)
    assert f"{other} (fold 0 and 2): validated more than once, and counted as often" in crossval.warnings
    assert len(crossval.cases) == 8


def test_of_a_fold_trained_twice_the_later_run_counts(sweep_folder):
    first = by_fold(sweep_folder)["1"]
    shutil.copytree(first, sweep_folder / "again")
    rows = json.loads((first / "summary.json").read_text())["val/cases"]
    scores = {"val/cases": {case: {"box": 1.0, "hole": 1.0} for case in rows}}
    edit(sweep_folder / "again/summary.json", **scores)
    (crossval,) = cross_validation.read(sweep_folder)
    assert crossval.warnings == (f"fold 1 was trained twice; again counts, {first.name} does not",)
    assert crossval.folds[1].rows == scores["val/cases"]
    (sweep_folder / "again").rename(sweep_folder / "again.20260101-000000")  # as run.resume=never renames it
    assert cross_validation.read(sweep_folder)[0].warnings == ()


def test_the_run_of_a_fold_that_ended_last_counts_whatever_its_name(sweep_folder):
    first = by_fold(sweep_folder)["1"]
    for name, seconds in (("a", 1), ("z", 2)):
        summary = Path(shutil.copytree(first, sweep_folder / name)) / "summary.json"
        os.utime(summary, (seconds, seconds))
    (crossval,) = cross_validation.read(sweep_folder)
    assert crossval.folds[1].name == first.name
    assert crossval.warnings[-1] == f"fold 1 was trained twice; {first.name} counts, z does not"


def test_a_fold_that_is_there_is_not_looked_for_in_another_config(sweep_folder):
    runs = by_fold(sweep_folder)
    config = Path(shutil.copytree(runs["1"], sweep_folder / "other")) / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 7"))
    shutil.rmtree(runs["2"])
    warnings = [each.warnings for each in cross_validation.read(sweep_folder, min_folds=1)]
    assert len(warnings) == 2
    assert not any("another config" in warning for each in warnings for warning in each)


def test_folds_of_other_configs_are_not_averaged(sweep_folder):
    path = by_fold(sweep_folder)["2"] / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 7"))
    (crossval,) = cross_validation.read(sweep_folder)
    assert [fold.number for fold in crossval.folds] == ["0", "1"] and crossval.missing == {"2": "not there"}
    both = cross_validation.read(sweep_folder, min_folds=1)
    larger = next(crossval for crossval in both if len(crossval.folds) == 2)
    assert "fold 2 was trained with another config, and is not counted: seed=0 and 7" in larger.warnings


def test_folds_with_different_preprocessing_give_a_warning(sweep_folder):
    path = by_fold(sweep_folder)["1"] / "config.yaml"
    path.write_text(path.read_text().replace("  num_channels: 1\n", "  num_channels: 2\n"))
    (crossval,) = cross_validation.read(sweep_folder)
    assert crossval.warnings == (
        "fold 0 and fold 1: the data differs, or was preprocessed differently: derived.num_channels=1 and 2",
    )


def test_a_missing_splits_file_gives_a_warning(sweep_folder):
    edit_configs(sweep_folder, "  splits_file: null\n", "  splits_file: moved/splits.json\n")
    shutil.rmtree(by_fold(sweep_folder)["2"])
    (crossval,) = cross_validation.read(sweep_folder)
    assert crossval.warnings == (
        "data.splits_file=moved/splits.json cannot be read, so the number of folds is unknown; some may be "
        "missing",
    )


@pytest.mark.parametrize("names", [("kiste", "hole"), ("hole", "box"), ("box", "hole", "more")])
def test_folds_of_other_classes_are_not_averaged(sweep_folder, names):
    cases = summaries(sweep_folder)["1"]["val/cases"]
    edit(
        by_fold(sweep_folder)["1"] / "summary.json",
        **{"val/cases": {case: dict.fromkeys(names, 0.5) for case in cases}},
    )
    (crossval,) = cross_validation.read(sweep_folder)
    assert crossval.missing == {"1": f"other classes: {', '.join(names)}"}
    assert f"warning: without fold 1 (other classes: {', '.join(names)})" in cross_validation_report.table(
        crossval
    )


def test_skipped_cases_are_named(sweep_folder):
    edit(by_fold(sweep_folder)["1"] / "summary.json", skipped_cases={"case_8": "broken"})
    assert cross_validation.read(sweep_folder)[0].warnings == (
        "case_8: skipped by data.on_invalid_case=skip, so not validated",
    )


def test_a_skipped_case_is_not_said_to_lack_validation(sweep_folder):
    path = by_fold(sweep_folder)["1"] / "summary.json"
    rows = json.loads(path.read_text())["val/cases"]
    (left_out, *_) = rows
    validated = {case: row for case, row in rows.items() if case != left_out}
    edit(path, **{"val/cases": validated, "skipped_cases": {left_out: "broken"}})
    (warning,) = cross_validation.read(sweep_folder)[0].warnings
    assert warning.startswith(f"{left_out}: skipped by data.on_invalid_case=skip")


def test_cases_that_were_not_validated_are_named(sweep_folder):
    """As `trainer.limit_val_batches` has it."""
    path = by_fold(sweep_folder)["1"] / "summary.json"
    rows = json.loads(path.read_text())["val/cases"]
    (left_out, *_) = rows
    edit(path, **{"val/cases": {case: row for case, row in rows.items() if case != left_out}})
    (warning,) = cross_validation.read(sweep_folder)[0].warnings
    assert warning.startswith(f"fold 1: {left_out}: not validated, by trainer.limit_val_batches")


def test_two_cross_validations_in_one_folder_are_told_apart(sweep_folder):
    for number, path in by_fold(sweep_folder).items():
        other = Path(shutil.copytree(path, sweep_folder / f"other{number}")) / "config.yaml"
        other.write_text(other.read_text().replace("seed: 0", "seed: 7"))
    labels = {sweep_folder / f"other{number}": "seed=7" for number in "012"}
    crossvals = cross_validation.read(sweep_folder, labels)
    assert sorted(crossval.label for crossval in crossvals) == ["", "seed=7"]
    assert not any(crossval.warnings for crossval in crossvals)
    cross_validation_report.write(sweep_folder, crossvals)
    assert sorted(crossval.label for crossval in cross_validation.read(sweep_folder)) == [
        "",
        "seed=7",
    ]  # read back from the JSON
    assert "cross-validation, 3 of 3 folds: seed=7" in [
        cross_validation_report.table(crossval).splitlines()[0] for crossval in crossvals
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe", "not a readable config"),
        (b"data: {", "not a readable config"),
        (
            b"data: {fold: 0, splits_file: null, num_folds: null}",
            "data.num_folds must be a number of folds, got None",
        ),
        (b"data: {fold: 0, num_folds: 100000}", "data.num_folds must be a number of folds, got 100000"),
        (
            b"data: {fold: /../../precious, num_folds: 5}",
            "data.fold must be `all` or a number, got '/../../precious'",
        ),
        (b"data: {fold: '1*', num_folds: 5}", "data.fold must be `all` or a number, got '1*'"),
    ],
)
def test_an_unusable_config_is_an_error_with_its_path(content, expected, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(read_folds(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}/run/config.yaml: ") and expected in str(error.value)


def test_folds_of_changed_cases_differ(tmp_path):
    digests = {"a": 1, "b": 2, "c": 3}
    for number, changed in (("0", {}), ("1", {"b": 7}), ("2", {})):
        folder = tmp_path / number
        folder.mkdir()
        (folder / "config.yaml").write_text(f"data: {{fold: {number}, num_folds: 3}}")
        content = {**digests, **changed}
        val = {"abc"[int(number)]: content.pop("abc"[int(number)])}
        (folder / identity.CASES_FILE).write_text(json.dumps({"train": content, "val": val}))
    first, second, third = read_folds(tmp_path)
    assert first.differences(second) == ["other image, label, values or weight: b"]
    assert first.differences(third) == []
    (tmp_path / "2" / identity.CASES_FILE).unlink()  # as of earlier versions
    assert list(read_folds(tmp_path))[2].differences(second) == []
