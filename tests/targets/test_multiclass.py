"""medconv/targets/multiclass.py: classes from a table, their cases, and predictions."""

import numpy as np
import pytest
import torch

from medconv.targets.multiclass import MulticlassTargets

CLASSES = MulticlassTargets(("x", "y", "z"))


def test_classes_of_a_column_are_sorted_as_numbers_first() -> None:
    targets = MulticlassTargets.from_columns(["label"], [["10", "b", "9", "", "a"]], None)
    assert targets.names == ("9", "10", "a", "b")
    assert MulticlassTargets.from_columns(["label"], [["a"]], ["b", "a"]).names == ("b", "a")
    assert targets.parse({"label": "a"}) == (2.0,)
    with pytest.raises(ValueError, match=r"column 'label': 'c' is not a class; the classes are 9, 10, a, b"):
        targets.parse({"label": "c"})
    with pytest.raises(ValueError, match="column 'label' holds a, expected two classes or more"):
        MulticlassTargets.from_columns(["label"], [["a", ""]], None)


def test_cases_are_counted_and_grouped_by_class() -> None:
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


def test_labels_become_probabilities_of_classes() -> None:
    assert CLASSES.encode(torch.tensor([[2.0], [0.0]])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_the_error_of_a_case_is_the_missing_probability_of_its_class() -> None:
    outputs, truth = np.array([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]), np.array([[0.0], [2.0]])
    assert CLASSES.errors(outputs, truth).tolist() == pytest.approx([0.3, 0.75])
    assert CLASSES.prediction_cells(outputs[1]) == ["x"] and CLASSES.label_cells(truth[1].tolist()) == ["z"]


def test_cross_entropy_weighs_cases_by_half_and_classes_by_half() -> None:
    outputs = np.array([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25], [0.9, 0.05, 0.05], [0.6, 0.3, 0.1]])
    truth = np.array([[0.0], [2.0], [0.0], [0.0]])
    first, last = -np.log([0.7, 0.9, 0.6]), -np.log([0.25])
    of_cases, of_classes = np.concatenate([first, last]).mean(), (first.mean() + last.mean()) / 2
    entropy = CLASSES.cross_entropy(outputs, truth)["cross_entropy"]
    assert entropy == pytest.approx((of_cases + of_classes) / 2) and of_classes > 1.4 * of_cases
