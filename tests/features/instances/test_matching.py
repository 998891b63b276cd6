"""medconv/features/instances/matching.py: average precision, panoptic quality and counts."""

import numpy as np
import pytest

from medconv.features.instances.matching import THRESHOLDS, means_of, row_of, scores_of


def a_case():
    """A prediction with one object of IoU 1, one of 0.6, and a wrong one; the reference misses none of 3."""
    reference = np.zeros((10, 10), np.int16)
    reference[0:2, 0:5] = 1
    reference[4:6, 0:5] = 9
    reference[8:10, 0:5] = 4
    prediction = np.zeros_like(reference)
    prediction[0:2, 0:5] = 2
    prediction[4:6, 0:3] = 1
    prediction[0:3, 7:10] = 5
    return prediction, reference


def test_a_case_by_hand():
    row = row_of(*a_case())
    assert row["reference"] == 3
    assert row["predicted"] == 3
    assert row["matched"] == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert row["overlaps"] == pytest.approx(1.6)
    scores = scores_of(row)
    assert scores["ap50"] == pytest.approx(2 / 4)  # matched, over matched, missed and wrong
    assert scores["ap75"] == pytest.approx(1 / 5)
    assert scores["ap"] == pytest.approx((3 * 2 / 4 + 6 * 1 / 5) / 9)
    assert scores["pq"] == pytest.approx(1.6 / 3)
    assert scores["dice"] == pytest.approx(2 * 16 / (25 + 30))


def test_a_case_without_objects_is_undefined():
    empty = np.zeros((4, 4), np.int16)
    assert set(scores_of(row_of(empty, empty)).values()) == {None}


def test_a_wrong_object_in_an_empty_image_counts():
    prediction = np.eye(4, dtype=np.int16)
    assert scores_of(row_of(prediction, np.zeros_like(prediction)))["ap"] == 0


def test_means_are_over_cases_with_objects():
    empty = np.zeros((4, 4), np.int16)
    prediction, reference = a_case()
    means = means_of([row_of(prediction, reference), row_of(reference, reference), row_of(empty, empty)])
    assert means["ap50"] == pytest.approx((0.5 + 1) / 2)
    assert means["ap_per_threshold"] == pytest.approx([0.75] * 3 + [0.6] * 6)
    assert len(means["ap_per_threshold"]) == len(THRESHOLDS)
    assert means["ap50_pooled"] == pytest.approx(5 / 7)  # 2 and 3 matched, of 4 and 3
    assert means["reference_objects"] == 6
    assert means["predicted_objects"] == 6
