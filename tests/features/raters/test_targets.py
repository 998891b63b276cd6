"""medconv/features/raters/targets.py: labels that are probabilities, rows of validation against several raters."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from medconv.features.raters.targets import SoftTargets
from medconv.targets import Targets
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.scores import ValidatedCase

CLASSES = SoftTargets.of_classes(["background", "a", "b"])


def validated(raters, logits, annotated=None):
    """A case whose prepared grid is the native one."""
    present = [label_map for label_map in raters if label_map is not None]
    label = torch.stack([torch.tensor(np.mean([m == value for m in present], 0)) for value in (1, 2)])
    probabilities = torch.cat([1 - label.sum(0, keepdim=True), label])
    reference = probabilities.argmax(0).numpy()
    prediction = logits.argmax(0).numpy()
    return ValidatedCase(prediction, reference, raters, logits[None], label[None], annotated)


def two_raters():
    first = np.zeros((6, 5, 4), np.int16)
    first[1:4, 1:3] = 1
    first[4:, 3:] = 2
    second = first.copy()
    second[3, 1:3] = 0
    return first, second


def test_it_is_a_label_map_whose_background_has_the_rest():
    label = torch.tensor([[[[0.25, 0.5]], [[0.25, 0.5]]]], dtype=torch.float16)
    assert CLASSES.encode(label).dtype == torch.float32
    assert CLASSES.reference(label).tolist() == [[[[0.5, 0.0]], [[0.25, 0.5]], [[0.25, 0.5]]]]
    assert Targets.from_plain(CLASSES.plain()) == CLASSES
    assert CLASSES.num_outputs == 3 and CLASSES.default_loss == "soft_dice_ce"


def test_its_answers_are_those_of_a_network_that_was_trained_on_label_maps():
    """So that the two can be averaged, and compared by `evaluate`."""
    plain = LabelMapTargets.of_classes(["background", "a", "b"])
    assert CLASSES.of_answers == plain == plain.of_answers
    assert CLASSES.description == plain.description


def test_random_labels_are_probabilities():
    label = CLASSES.random_labels(2, (4, 4))
    assert label.shape == (2, 2, 4, 4)
    assert label.min() >= 0 and label.sum(1).max() <= 1


def test_the_marginal_of_hard_labels_is_that_of_label_maps():
    logits = torch.randn(2, 3, 4, 5)
    label = torch.randint(3, (2, 1, 4, 5))
    annotated = torch.tensor([[True, True, False], [True, True, True]])
    plain = LabelMapTargets.of_classes(["background", "a", "b"])
    expected, expected_label = plain.marginal(logits, label, annotated)
    one_hot = F.one_hot(label[:, 0], 3).movedim(-1, 1).float()
    merged, reference = CLASSES.marginal(logits, one_hot, annotated)
    torch.testing.assert_close(merged, expected)
    assert torch.equal(reference.argmax(1, keepdim=True), expected_label)


def test_the_network_that_predicts_the_share_of_raters_is_calibrated_and_one_of_them_is_not():
    first, second = two_raters()
    mean = validated([first, second], torch.zeros(3, 6, 5, 4)).label[0]
    shares = torch.cat([1 - mean.sum(0, keepdim=True), mean])
    perfect = CLASSES.scores.row(validated([first, second], shares.clamp(min=1e-9).log()))
    assert perfect["brier"] == pytest.approx([0, 0], abs=1e-6)
    assert perfect["calibration_error"] == pytest.approx([0, 0], abs=1e-4)
    one_hot = F.one_hot(torch.tensor(first).long(), 3).movedim(-1, 0).float()
    sure = CLASSES.scores.row(validated([first, second], 50 * one_hot))
    # in the box of all but the first plane: one plane of two rows was drawn by one rater alone
    assert sure["brier"] == pytest.approx([0.25 * 2 / 20, 0], abs=1e-6)
    assert sure["calibration_error"] == pytest.approx([0.5 * 2 / 20, 0], abs=1e-6)
    assert sure["rater_dice"] == [1.0, pytest.approx((0.8 + 1) / 2)]


def test_scores_are_those_of_the_consensus_and_of_each_rater():
    first, second = two_raters()
    one_hot = F.one_hot(torch.tensor(second).long(), 3).movedim(-1, 0).float()
    rows = {
        "one": CLASSES.scores.row(validated([first, second], 50 * one_hot)),
        "two": CLASSES.scores.row(validated([first, None], 50 * one_hot)),
    }
    # of two raters the background wins, so the consensus is the second one
    assert rows["one"]["dice"] == [1.0, 1.0] and rows["two"]["dice"] == [0.8, 1.0]
    summary = CLASSES.scores.summary(rows)
    assert summary["dice"] == pytest.approx(0.95)
    assert summary["rater_dice"] == pytest.approx([0.9, 1.0])
    logged = CLASSES.scores.logged(rows, {"one": 0.1, "two": 0.3})
    assert logged["cross_entropy"] == pytest.approx(0.2)
    assert logged["rater_dice/2"] == 1.0 and logged["dice/a"] == pytest.approx(0.9)
    assert logged["brier"] == summary["brier"] > 0
    table = dict(CLASSES.scores.table({f"val/{name}": value for name, value in summary.items()}))
    assert table["mean, against rater 1"] == pytest.approx(0.9)
    assert CLASSES.scores.case_cells(rows["two"])["dice/a"] == 0.8
    assert CLASSES.scores.case_entry(rows["two"])["rater_dice"] == [pytest.approx(0.9), None]
    assert CLASSES.scores.over_folds([rows])["mean"]["dice"] == pytest.approx(0.95)


def test_of_a_class_that_is_not_annotated_nothing_is_defined():
    first, second = two_raters()
    row = CLASSES.scores.row(validated([first, second], torch.zeros(3, 6, 5, 4), (True, False, True)))
    assert row["dice"][0] is None and row["brier"][0] is None and row["brier"][1] is not None


def test_a_class_that_is_not_annotated_is_not_compared_with_any_rater():
    """Class `a` differs from the first rater's, `b` is that of both."""
    first, second = two_raters()
    one_hot = F.one_hot(torch.tensor(second).long(), 3).movedim(-1, 0).float()
    row = CLASSES.scores.row(validated([first, second], 50 * one_hot, (True, False, True)))
    assert row["rater_dice"] == [1.0, 1.0]


def test_calibration_is_of_the_box_around_what_is_more_probable_than_background():
    """The reference lacks the first plane; the network sees `a` in two of its voxels."""
    first, _ = two_raters()
    shares = F.one_hot(torch.tensor(first).long(), 3).movedim(-1, 0).float()
    briers = []
    for probability in (0.4, 0.6):
        shares[0, 0, 2, :2], shares[1, 0, 2, :2] = 1 - probability, probability
        briers += CLASSES.scores.row(validated([first], shares.clamp(min=1e-9).log()))["brier"]
    # of a: without the plane, and in all six planes of 4 x 4 voxels
    assert briers == pytest.approx([0, 0, 2 * 0.6**2 / (6 * 4 * 4), 0], abs=1e-6)


def test_without_any_foreground_there_is_no_calibration():
    empty = np.zeros((3, 3, 3), np.int16)
    surely_background = torch.tensor([50.0, 0, 0]).view(3, 1, 1, 1).expand(3, 3, 3, 3)
    row = CLASSES.scores.row(validated([empty], surely_background))
    assert row == {
        "dice": [None, None],
        "rater_dice": [None],
        "brier": [None, None],
        "calibration_error": [None, None],
    }
    assert CLASSES.scores.summary({"case": row})["brier"] is None
