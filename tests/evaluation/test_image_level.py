"""medconv/evaluation/image_level.py: scores of predictions against labels, from tables of both."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny
from helpers.image_level_tables import CLASSES, write_table, write_tables

from medconv.evaluation import image_level
from medconv.evaluation.image_level_report import write_report
from medconv.metrics import image_level as metrics


def test_scores_are_those_of_the_metrics(tmp_path: Path) -> None:
    predictions, labels, outputs, truth = write_tables(tmp_path)
    result = image_level.evaluate(predictions, labels)
    assert result["mean"] == metrics.measure(CLASSES, outputs, truth)
    assert result["intervals"]["auc"] == list(metrics.intervals(CLASSES, outputs, truth)["auc"])
    assert result["per_class"] == CLASSES.per_name(outputs, truth)
    part = image_level.evaluate(predictions, labels, part="test")
    assert (
        part["mean"] == metrics.measure(CLASSES, outputs[4:], truth[4:]) and part["cases"][0]["case"] == "c4"
    )
    json.dumps(result, allow_nan=False)


def test_without_a_manifest_the_labels_decide_the_kind_of_targets(tmp_path: Path) -> None:
    predictions = write_table(
        tmp_path / "p.csv", ["case", "a", "b"], ["x", 0.2, 0.9], ["y", 0.8, 0.1], ["z", 0.5, 0.6]
    )
    findings = write_table(tmp_path / "f.csv", ["case", "a", "b"], ["x", 0, 1], ["y", 1, 0], ["z", 1, 1])
    numbers = write_table(tmp_path / "n.csv", ["case", "a", "b"], ["x", 0.3, 1], ["y", 1, 0], ["z", 1, 1])
    assert image_level.evaluate(predictions, findings)["targets"]["kind"] == "multilabel"
    result = image_level.evaluate(predictions, numbers)
    assert result["targets"]["kind"] == "regression"
    assert result["mean"]["mae"] == pytest.approx(np.mean([0.1, 0.1, 0.2, 0.1, 0.5, 0.4]))
    assert "mean absolute error" in image_level.table(result) and "R2" in write_report(result, {})


def test_a_comparison_is_over_the_cases_of_both(tmp_path: Path) -> None:
    predictions, labels, outputs, truth = write_tables(tmp_path)
    others = np.array([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7], [0.6, 0.4], [0.2, 0.8]])
    rows = [[f"c{i}", "cat", *o] for i, o in enumerate(others)]
    second = write_table(tmp_path / "other.csv", ["case", "predicted", *CLASSES.names], *rows)
    result = image_level.evaluate(predictions, labels, second)
    assert result["comparison"] == metrics.paired(CLASSES, outputs[:5], others, truth[:5])
    assert result["compare"]["cases"] == 5 and "5 cases that both have" in write_report(result, {})


def test_the_command_evaluates_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predictions, labels, _, _ = write_tables(tmp_path)

    def call(*words: object) -> int:
        return tiny.call(monkeypatch, "evaluate", *words, "--output", tmp_path / "out/s.json")

    assert call("--predictions", predictions, "--labels", labels, "--split", "test") == 0
    output = capsys.readouterr().out
    assert output.startswith("8 cases of test\nAUC ") and "s.html" in output
    with (tmp_path / "out/s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 8
        and rows[0]["case"] == "c4"
        and rows[0]["truth/class"] == "cat"
        and "output/cat" in rows[0]
    )
    assert call("--predictions", predictions) == 1
    assert "are measured against --labels" in capsys.readouterr().err
    assert call("--predictions", tmp_path, "--references", tmp_path, "--split", "test") == 1
    assert "--split is for classification and regression" in capsys.readouterr().err
    assert call("--predictions", tmp_path) == 1
    assert "--references is needed" in capsys.readouterr().err
