"""medconv/targets/ordinal.py: grades as steps, their probabilities and agreement, and a run from a table."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_runs
from torch import nn

from medconv.inference.load import load
from medconv.metrics import image_level
from medconv.targets import Targets
from medconv.targets.ordinal import OrdinalTargets
from medconv.training.losses.fit import FittedLoss
from medconv.training.losses.image_level import CrossEntropy, RegressionLoss

GRADES = OrdinalTargets(("none", "mild", "severe"))


def test_a_grade_is_the_steps_below_it() -> None:
    assert GRADES.num_outputs == 2 and GRADES.output_names == ("above none", "above mild")
    assert GRADES.encode(torch.tensor([[0.0], [1.0], [2.0]])).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert Targets.from_plain(GRADES.plain()) == GRADES
    assert GRADES.output_counts(np.array([[0.0], [1.0], [2.0], [2.0]])) == [3, 2]


def test_steps_become_probabilities_of_grades() -> None:
    logits = torch.tensor([[20.0, -20.0], [-1.0, 3.0]], dtype=torch.bfloat16)
    probabilities = GRADES.decode(logits)
    assert probabilities.shape == (2, 3) and probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
    torch.testing.assert_close(probabilities[0], torch.tensor([0.0, 1.0, 0.0]))
    below = float(torch.sigmoid(torch.tensor(-1.0)))  # the second step cannot be likelier than the first
    torch.testing.assert_close(probabilities[1], torch.tensor([1 - below, 0.0, below]))


def test_kappa_weighs_errors_by_their_squared_distance() -> None:
    """Against the table of observed and expected disagreements."""
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(3, size=50), rng.integers(3, size=50)
    predicted[:30] = truth[:30]
    outputs = np.eye(3)[predicted] * 0.8 + 0.05
    observed = np.zeros((3, 3))
    np.add.at(observed, (truth, predicted), 1)
    expected = np.outer(observed.sum(1), observed.sum(0)) / 50
    weights = np.subtract.outer(np.arange(3), np.arange(3)) ** 2
    scores = image_level.measure(GRADES, outputs, truth[:, None])
    assert scores["quadratic_kappa"] == pytest.approx(
        1 - (weights * observed).sum() / (weights * expected).sum()
    )
    assert scores["grade_error"] == pytest.approx(np.abs(truth - predicted).mean())
    same = image_level.measure(GRADES, outputs[:1], truth[:1, None])
    assert same["quadratic_kappa"] is None and same["accuracy"] == 1


def test_losses_of_labels_fit() -> None:
    for loss in (CrossEntropy(exclusive=False), nn.BCEWithLogitsLoss()):
        FittedLoss(loss, GRADES, 2)
    with pytest.raises(
        ValueError, match="RegressionLoss is for regression targets, .* has ordinal targets; use loss=bce"
    ):
        FittedLoss(RegressionLoss(), GRADES, 2)


def test_a_table_of_grades_trains(tmp_path: Path) -> None:
    table = small_runs.write_table(tmp_path / "table", {"label": "finding"})
    quick = ["trainer.max_steps=2", "callbacks=none", "logger=none", *small_runs.OURS]
    balanced = ["data.target_type=ordinal", "loss=bce", "loss.class_weights=balanced"]  # of the steps
    summary = small_runs.train(table, tmp_path / "run", *balanced, *quick)
    assert summary["score"]["name"] == "val/quadratic_kappa" and summary["val/grade_error"] is not None
    assert load(tmp_path / "run/checkpoints/last.ckpt").targets.kind == "ordinal"
    assert "val/temperature" not in (tmp_path / "run/summary.json").read_text()
