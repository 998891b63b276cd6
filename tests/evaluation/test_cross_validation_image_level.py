"""medconv/evaluation/cross_validation_image_level.py: classification and regression, from the summaries of
the runs.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from medconv.evaluation import cross_validation, cross_validation_report
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.multiclass import MulticlassTargets
from medconv.targets.regression import RegressionTargets

CLASSES, NUMBERS = MulticlassTargets(("no", "yes")), RegressionTargets(("age",))


def write_runs(home: Path, targets: ImageLevelTargets, cases: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Three folds; the last one failed. Returns: outputs and values of the cases of the others."""
    rng = np.random.default_rng(0)
    values = (np.arange(cases) // 3 % 2).astype(float)[:, None]
    second = (0.4 * values + 0.6 * rng.random((cases, 1))).round(4)
    outputs = np.concatenate([1 - second, second], 1) if targets.kind == "multiclass" else 30 * second
    for fold in range(3):
        (run := home / f"run{fold}").mkdir(parents=True)
        own = {
            "class_counts": [4 + fold, 4 - fold],
            "num_train_cases": 8 + fold,
        }
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
def test_scores_are_over_all_cases_together(targets: ImageLevelTargets, tmp_path: Path) -> None:
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
