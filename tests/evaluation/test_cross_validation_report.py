"""medconv/evaluation/cross_validation_report.py: table, JSON and CSV hold the numbers of the runs."""

import csv
import json

import numpy as np
import pytest
from helpers.cross_validations import Sweep, summaries

from medconv.evaluation import cross_validation, cross_validation_report


def test_the_summary_is_over_all_cases_of_all_folds(sweep: Sweep) -> None:
    folder, output = sweep
    (entry,) = json.loads((folder / "cross_validation.json").read_text())["crossvalidations"]
    runs = summaries(folder)
    assert [(f["fold"], f["cases"], f["mean"]) for f in entry["folds"]] == [
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
