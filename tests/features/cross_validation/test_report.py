"""medconv/features/cross_validation/report.py: table, JSON and CSV hold the numbers of the runs."""

import csv
import json

import numpy as np
import pytest
from helpers.cross_validations import summaries
from omegaconf import OmegaConf

from medconv.features.cross_validation import report as cross_validation_report
from medconv.features.cross_validation import results as cross_validation
from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.features.image_level.regression import RegressionTargets

CLASSES, NUMBERS = MulticlassTargets(("no", "yes")), RegressionTargets(("age",))


def test_the_summary_is_over_all_cases_of_all_folds(sweep):
    folder, output = sweep
    (entry,) = json.loads((folder / "cross_validation.json").read_text())["crossvalidations"]
    runs = summaries(folder)
    assert [(f["fold"], f["cases"], f["scores"]["dice"]) for f in entry["folds"]] == [
        (number, len(runs[number]["val/cases"]), pytest.approx(runs[number]["val/dice"])) for number in "012"
    ]
    rows = {case: row for number in "012" for case, row in runs[number]["val/cases"].items()}
    assert len(rows) == len(entry["cases"]) == 7
    assert {row["case"]: row["dice"] for row in entry["cases"]} == rows
    for name in ("box", "hole"):
        values = [row[name] for row in rows.values() if row[name] is not None]
        of_folds = [runs[number]["val/dice_per_class"][name] for number in "012"]
        statistics = entry["per_class"][name]
        assert statistics["dice"] == pytest.approx(np.mean(values)) and statistics["sd"] == pytest.approx(
            np.std(values, ddof=1)
        )
        assert statistics["mean_of_folds"] == pytest.approx(np.mean(of_folds)) and statistics["n"] == len(
            values
        )
    assert entry["mean"]["dice"] == pytest.approx(
        np.mean([entry["per_class"][n]["dice"] for n in ("box", "hole")])
    )
    assert entry["mean"]["mean_of_folds"] == pytest.approx(
        np.mean([runs[number]["val/dice"] for number in "012"])
    )
    assert entry["missing"] == {} and entry["warnings"] == []
    with (folder / "folds.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["case"]: float(row["dice/box"]) for row in table} == pytest.approx(
        {c: row["box"] for c, row in rows.items()}
    )
    assert (
        "cross-validation, 3 of 3 folds" in output
        and cross_validation_report.table(cross_validation.read(folder)[0]) in output
    )


def write_runs(home, targets, cases=12):
    """Three folds; the last one failed. Returns: outputs and values of the cases of the others."""
    rng = np.random.default_rng(0)
    values = (np.arange(cases) // 3 % 2).astype(float)[:, None]
    second = (0.4 * values + 0.6 * rng.random((cases, 1))).round(4)
    outputs = np.concatenate([1 - second, second], 1) if targets.kind == "multiclass" else 30 * second
    for fold in range(3):
        (run := home / f"run{fold}").mkdir(parents=True)
        own = {"class_counts": [4 + fold, 4 - fold], "num_train_cases": 8 + fold}
        standardised = {"means": [30.0 + fold], "stds": [1.0 + fold]} if targets == NUMBERS else {}
        loss = {
            "class_counts": own["class_counts"],
            "num_cases": 8 + fold,
        }  # computed from the training cases of the fold
        derived = {"targets": targets.plain() | standardised, "train_cases": f"8 cases, {fold}", **own}
        config = {"data": {"fold": fold, "num_folds": 3, "splits": None}, "derived": derived, "loss": loss}
        OmegaConf.save(OmegaConf.create(config), run / "config.yaml")
        rows = {
            f"c{i}": {"outputs": outputs[i].tolist(), "values": values[i].tolist()}
            for i in range(fold, cases, 3)
        }
        status = {"status": "done", "val/cases": rows} if fold < 2 else {"status": "failed"}
        (run / "summary.json").write_text(json.dumps(status))
    chosen = [i for i in range(cases) if i % 3 < 2]
    return outputs[chosen], values[chosen]


@pytest.mark.parametrize("targets", [CLASSES, NUMBERS], ids=lambda o: o.kind)
def test_scores_of_image_level_targets_are_over_all_cases_together(targets, tmp_path):
    outputs, values = write_runs(tmp_path, targets)
    (crossval,) = cross_validation.read(tmp_path)
    assert not any("preprocessed differently" in warning for warning in crossval.warnings)
    assert crossval.missing == {"2": "failed"} and crossval.targets == targets
    summary = cross_validation_report.plain(crossval)
    assert summary["mean"] == pytest.approx(image_level.measure(targets, outputs, values))
    assert [fold["cases"] for fold in summary["folds"]] == [4, 4]
    name = targets.metric_names[0]
    fold_scores = [fold["scores"][name] for fold in summary["folds"]]
    assert summary["mean_of_folds"][name] == pytest.approx(np.mean(fold_scores))
    text = cross_validation_report.table(crossval)
    assert (
        "2 of 3 folds" in text
        and f"{summary['mean'][name]:.4f}" in text
        and "without fold 2 (failed)" in text
    )
    content = json.loads(cross_validation_report.write(tmp_path, [crossval]).read_text())["crossvalidations"]
    assert content[0]["targets"] == targets.plain()
    with (tmp_path / cross_validation.CSV).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 8
        and float(rows[0][f"output/{targets.names[0]}"]) == content[0]["cases"][0]["outputs"][0]
    )
    assert cross_validation.read(tmp_path)[0].label == ""


def test_the_csv_has_the_columns_of_all_targets(tmp_path):
    for targets in (CLASSES, NUMBERS):
        write_runs(tmp_path / targets.kind, targets)
    crossvals = [cross_validation.read(tmp_path / kind)[0] for kind in ("multiclass", "regression")]
    cross_validation_report.write(tmp_path, crossvals)
    with (tmp_path / cross_validation.CSV).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert rows[0]["output/no"] and not rows[0]["output/age"]
    assert rows[-1]["output/age"] and not rows[-1]["output/no"]
