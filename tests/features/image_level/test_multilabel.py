"""medconv/features/image_level/multilabel.py: cases of labels, and predictions."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from medconv.features.image_level import metrics as image_level
from medconv.features.image_level.losses import CrossEntropy
from medconv.features.image_level.multilabel import MultilabelTargets

FINDINGS = MultilabelTargets(("x", "y"))
VALUES = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])


def test_cases_are_counted_and_grouped_by_label_and_without_any():
    assert FINDINGS.class_counts(VALUES) == [1, 2]
    assert [group.tolist() for group in FINDINGS.balanced_groups(VALUES)] == [[0], [0, 1], [2]]


def test_a_validation_needs_a_label_with_both_answers():
    warning = "no validation case has x, so its AUC is undefined"
    assert FINDINGS.check_examples(VALUES[1:], "validation") == warning
    assert FINDINGS.check_examples(VALUES, "validation") is None
    with pytest.raises(ValueError, match="no label has both positive and negative validation cases"):
        FINDINGS.check_examples(VALUES[:1], "validation")
    with pytest.raises(ValueError, match="no training case has label x"):
        FINDINGS.check_examples(VALUES[1:], "training")


MISSING = np.array([[1.0, np.nan], [0.0, 1.0], [np.nan, 0.0], [1.0, 1.0], [0.0, np.nan]])
OUTPUTS = np.array([[0.9, 0.1], [0.6, 0.7], [0.99, 0.2], [0.4, 0.8], [0.2, 0.99]])


def test_metrics_leave_missing_findings_out():
    """They are the means of those of each label alone, over its known cases."""
    one = MultilabelTargets(("x",))
    alone = []
    for index in range(2):
        known = ~np.isnan(MISSING[:, index])
        columns = slice(index, index + 1)
        alone.append(image_level.measure(one, OUTPUTS[known, columns], MISSING[known, columns]))
    both = image_level.measure(FINDINGS, OUTPUTS, MISSING)
    for metric, value in both.items():
        assert value == pytest.approx(np.mean([row[metric] for row in alone])), metric
    other = OUTPUTS.copy()
    other[np.isnan(MISSING)] = 0.5
    assert image_level.measure(FINDINGS, other, MISSING) == both
    assert FINDINGS.per_name(other, MISSING) == FINDINGS.per_name(OUTPUTS, MISSING)
    assert FINDINGS.cross_entropy(other, MISSING) == FINDINGS.cross_entropy(OUTPUTS, MISSING)
    assert FINDINGS.fitted_temperature(other, MISSING) == FINDINGS.fitted_temperature(OUTPUTS, MISSING)
    assert FINDINGS.errors(OUTPUTS, MISSING).tolist() == pytest.approx([0.1, 0.6, 0.2, 0.6, 0.2])


def test_the_loss_leaves_missing_findings_out():
    label = torch.tensor(MISSING, dtype=torch.float32)
    outputs = torch.tensor(OUTPUTS, dtype=torch.float32, requires_grad=True)
    loss = FINDINGS.compare(CrossEntropy(exclusive=False), outputs, FINDINGS.encode(label))
    loss.backward()
    known = ~label.isnan()
    expected = (
        F.binary_cross_entropy_with_logits(outputs[known], label[known], reduction="sum") / label.numel()
    )
    assert float(loss) == pytest.approx(float(expected))
    assert outputs.grad is not None
    assert torch.equal(outputs.grad != 0, known)


def test_a_missing_finding_costs_nothing_with_smoothed_labels_too():
    label = torch.tensor(MISSING, dtype=torch.float32)
    outputs = torch.tensor(OUTPUTS, dtype=torch.float32)
    loss = CrossEntropy(exclusive=False, label_smoothing=0.1)
    known = ~label.isnan()
    expected = F.binary_cross_entropy_with_logits(outputs[known], 0.9 * label[known] + 0.05, reduction="sum")
    value = float(FINDINGS.compare(loss, outputs, FINDINGS.encode(label)))
    assert value == pytest.approx(float(expected) / label.numel(), rel=1e-5)


def test_a_missing_finding_is_neither_present_nor_absent():
    assert FINDINGS.class_counts(MISSING) == [2, 2]
    assert FINDINGS.output_counts(MISSING) == [round(2 * 5 / 4), round(2 * 5 / 3)]
    assert FINDINGS.label_text(MISSING[0].tolist()) == "x, y unknown"
    assert FINDINGS.cells_per_name(MISSING[0].tolist()) == ["1", "-"]
    assert FINDINGS.label_cells(MISSING[0].tolist()) == [1.0, None]
    assert FINDINGS.check_examples(MISSING, "validation") is None
    only_missing = np.array([[1.0, np.nan], [1.0, np.nan]])
    with pytest.raises(ValueError, match="no label has both positive and negative validation cases"):
        FINDINGS.check_examples(only_missing, "validation")


def test_plots_are_those_of_known_findings():
    other = OUTPUTS.copy()
    other[np.isnan(MISSING)] = 0.5
    pictures = FINDINGS.pictures(OUTPUTS, MISSING)
    for name, picture in FINDINGS.pictures(other, MISSING).items():
        assert np.array_equal(picture, pictures[name]), name


def test_cells_may_be_true_and_false():
    assert FINDINGS.parse({"x": "True", "y": "false"}) == (1, 0)
    with pytest.raises(ValueError, match="column 'y' must hold a finite number, got 'yes'"):
        FINDINGS.parse({"x": "1", "y": "yes"})


def test_the_error_of_a_case_is_that_of_its_worst_label():
    outputs = np.array([[0.9, 0.4], [0.2, 0.9], [0.3, 0.0]])
    assert FINDINGS.errors(outputs, VALUES).tolist() == pytest.approx([0.6, 0.2, 0.3])


def test_the_temperature_of_probabilities_that_were_rounded_to_1():
    """One of ten is wrong, so 0.9 is right; a float32 of 1 says no more than a logit of 17.3."""
    outputs = np.ones((10, 1))
    truth = np.array([[1.0]] * 9 + [[0.0]])
    findings = MultilabelTargets(("x",))
    temperature = findings.fitted_temperature(outputs, truth)
    assert temperature == pytest.approx(np.log(2.0**25) / np.log(9), rel=1e-3)
    assert findings.outputs_at_temperature(outputs, temperature) == pytest.approx(0.9, rel=1e-3)


def test_small_probabilities_keep_their_order():
    outputs = np.array([[1e-11], [2e-11], [1e-20]])
    scaled = MultilabelTargets(("x",)).outputs_at_temperature(outputs, 1.0)
    assert scaled == pytest.approx(outputs, rel=1e-6)


def test_cases_of_nan_have_no_part_in_the_temperature():
    nan = {"outputs": [float("nan"), 0.5], "values": [1.0, 0.0]}
    wrong = {"outputs": [0.99, 0.99], "values": [1.0, 0.0]}
    assert FINDINGS.scores.temperature({"a": nan}) == 1
    assert (
        FINDINGS.scores.temperature({"a": nan, "b": wrong}) == FINDINGS.scores.temperature({"b": wrong}) > 1
    )
    rows = FINDINGS.scores.at_temperature({"a": nan, "b": wrong}, 2.0)
    assert np.isnan(rows["a"]["outputs"][0]) and 0.5 < rows["b"]["outputs"][0] < 0.99
