"""medconv/features/image_level/multiclass.py: classes from a table, their cases, and predictions."""

import numpy as np
import pytest
import torch
from helpers import small_runs
from torch import nn

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level import plots
from medconv.features.image_level.losses import CrossEntropy, RegressionLoss
from medconv.features.image_level.multiclass import MulticlassTargets, OrdinalTargets
from medconv.inference.load import load
from medconv.targets import Targets
from medconv.training.losses.fit import FittedLoss

CLASSES = MulticlassTargets(("x", "y", "z"))
GRADES = OrdinalTargets(("none", "mild", "severe"))


def test_classes_of_a_column_are_sorted_as_numbers_first():
    targets = MulticlassTargets.from_columns(["label"], [["10", "b", "9", "", "a"]], None)
    assert targets.names == ("9", "10", "a", "b")
    assert MulticlassTargets.from_columns(["label"], [["a"]], ["b", "a"]).names == ("b", "a")
    assert targets.parse({"label": "a"}) == (2.0,)
    with pytest.raises(ValueError, match=r"column 'label': 'c' is not a class; the classes are 9, 10, a, b"):
        targets.parse({"label": "c"})
    with pytest.raises(ValueError, match="column 'label' holds a, expected two classes or more"):
        MulticlassTargets.from_columns(["label"], [["a", ""]], None)


def test_cases_are_counted_and_grouped_by_class():
    values = np.array([[0.0], [1.0], [1.0]])
    assert CLASSES.class_counts(values) == [1, 2, 0]
    assert [group.tolist() for group in CLASSES.balanced_groups(values)] == [[0], [1, 2], []]
    with pytest.raises(ValueError, match="no training case has class z"):
        CLASSES.check_examples(values, "training")
    assert (
        CLASSES.check_examples(values, "validation") == "no validation case has z, so there is no score of it"
    )
    with pytest.raises(ValueError, match="no validation case has class x, z"):
        CLASSES.check_examples(values[1:], "validation")
    with pytest.raises(ValueError, match="multiclass names: b is there twice"):
        MulticlassTargets(("a", "b", "b"))


def test_labels_become_probabilities_of_classes():
    assert CLASSES.encode(torch.tensor([[2.0], [0.0]])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_the_error_of_a_case_is_the_missing_probability_of_its_class():
    outputs, truth = np.array([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]), np.array([[0.0], [2.0]])
    assert CLASSES.errors(outputs, truth).tolist() == pytest.approx([0.3, 0.75])
    assert CLASSES.prediction_cells(outputs[1]) == ["x"] and CLASSES.label_cells(truth[1].tolist()) == ["z"]


def test_cross_entropy_weighs_cases_by_half_and_classes_by_half():
    outputs = np.array([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25], [0.9, 0.05, 0.05], [0.6, 0.3, 0.1]])
    truth = np.array([[0.0], [2.0], [0.0], [0.0]])
    first, last = -np.log([0.7, 0.9, 0.6]), -np.log([0.25])
    of_cases, of_classes = np.concatenate([first, last]).mean(), (first.mean() + last.mean()) / 2
    entropy = CLASSES.cross_entropy(outputs, truth)["cross_entropy"]
    assert entropy == pytest.approx((of_cases + of_classes) / 2) and of_classes > 1.4 * of_cases


def test_a_grade_is_the_steps_below_it():
    assert GRADES.num_outputs == 2 and GRADES.output_names == ("above none", "above mild")
    assert GRADES.encode(torch.tensor([[0.0], [1.0], [2.0]])).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert Targets.from_plain(GRADES.plain()) == GRADES
    assert GRADES.output_counts(np.array([[0.0], [1.0], [2.0], [2.0]])) == [3, 2]


def test_steps_become_probabilities_of_grades():
    logits = torch.tensor([[20.0, -20.0], [-1.0, 3.0]], dtype=torch.bfloat16)
    probabilities = GRADES.decode(logits)
    assert probabilities.shape == (2, 3) and probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
    torch.testing.assert_close(probabilities[0], torch.tensor([0.0, 1.0, 0.0]))
    below = float(torch.sigmoid(torch.tensor(-1.0)))  # the second step cannot be likelier than the first
    torch.testing.assert_close(probabilities[1], torch.tensor([1 - below, 0.0, below]))


def test_kappa_weighs_errors_by_their_squared_distance():
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


def test_losses_of_labels_fit():
    for loss in (CrossEntropy(exclusive=False), nn.BCEWithLogitsLoss()):
        FittedLoss(loss, GRADES, 2)
    with pytest.raises(
        ValueError, match="RegressionLoss is for regression targets, .* has ordinal targets; use loss=bce"
    ):
        FittedLoss(RegressionLoss(), GRADES, 2)


def test_a_table_of_grades_trains(tmp_path):
    table = small_runs.write_table(tmp_path / "table", {"label": "finding"})
    quick = ["trainer.max_steps=2", "logger=none", *small_runs.OURS]
    balanced = ["data.target_type=ordinal", "loss=bce", "loss.class_weights=balanced"]  # of the steps
    summary = small_runs.train(table, tmp_path / "run", *balanced, *quick)
    assert summary["score"]["name"] == "val/quadratic_kappa" and summary["val/grade_error"] is not None
    assert load(tmp_path / "run/checkpoints/last.ckpt").targets.kind == "ordinal"
    assert "val/temperature" not in (tmp_path / "run/summary.json").read_text()


def test_the_rows_of_the_confusion_matrix_are_the_truth_and_curves_are_of_the_true_classes():
    outputs = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.8, 0.1]])
    truth = np.array([[0.0], [1.0], [1.0], [2.0]])
    pictures = CLASSES.pictures(outputs, truth)
    table = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]])
    np.testing.assert_array_equal(pictures["confusion"], plots.confusion(CLASSES.names, table))
    members = truth == np.arange(3)
    curves = list(zip(CLASSES.names, outputs.T, members.T, strict=True))
    np.testing.assert_array_equal(pictures["roc"], plots.roc(curves))
    np.testing.assert_array_equal(pictures["precision_recall"], plots.precision_recall(curves))


def test_a_saliency_map_is_of_the_step_into_the_predicted_grade():
    """The first grade has none, and is explained by the first step."""
    assert [GRADES.shown_output(np.roll([0.8, 0.1, 0.1], grade)) for grade in range(3)] == [0, 0, 1]
