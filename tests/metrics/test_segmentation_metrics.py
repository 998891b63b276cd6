"""medconv/metrics/segmentation_metrics.py: metrics of one's own, of lesions and of centrelines."""

import numpy as np
import pytest
from helpers.three_classes import MM, TARGETS, grid, labels

from medconv.metrics import segmentation_metrics
from medconv.metrics.class_masks import ClassMasks
from medconv.metrics.segmentation import VOLUMES, measure
from medconv.metrics.segmentation_metrics import LESION_METRICS, METRICS, Metric, MetricSelection


def test_a_further_metric_is_measured_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 where a class is in one label map only, since higher is better; no value where it is in none."""

    def sensitivity(masks: ClassMasks) -> float:
        return int((masks.prediction & masks.reference).sum()) / masks.sizes[1]

    monkeypatch.setattr(
        segmentation_metrics,
        "METRICS",
        [*METRICS, Metric("sensitivity", "Sensitivity", 1, sensitivity, "share found.")],
    )
    a, b = labels(0), labels(1)
    a[a == 3], b[b == 2] = 0, 0
    a[a == 2] = 0
    row = measure(a, b, grid(a), TARGETS, MM)["sensitivity"]
    assert row["one"] == ((a == 1) & (b == 1)).sum() / (b == 1).sum()
    assert row["two"] is None and row["three"] == 0.0


def test_lesions_are_measured_where_they_are_asked_for() -> None:
    """Two of three lesions are found, one of them by half, and one prediction is false; class two is missed,
    and of class three there is none.
    """
    a, b = np.zeros((2, 20, 10, 8), np.int16)
    b[0:4, 0:2, 0:2], b[6:10, 0:2, 0:2], b[12:16, 0:2, 0:2], b[0:2, 6:8, 0:2] = 1, 1, 1, 2
    a[0:4, 0:2, 0:2], a[6:8, 0:2, 0:2], a[18:20, 0:2, 0:2] = 1, 1, 1
    rows = {
        m: row
        for m, row in measure(a, b, grid(a), TARGETS, MM, MetricSelection(0.5)).items()
        if m not in VOLUMES
    }
    assert list(rows) == [m.name for m in (*METRICS, *LESION_METRICS)]
    one = {m.name: rows[m.name]["one"] for m in LESION_METRICS}
    assert one == {
        "lesion_f1": pytest.approx(2 / 3),
        "lesion_sensitivity": pytest.approx(2 / 3),
        "lesion_precision": pytest.approx(2 / 3),
        "panoptic_quality": pytest.approx(1.5 / 3),
    }
    assert measure(a, b, grid(a), TARGETS, MM, MetricSelection(0.51))["lesion_f1"]["one"] == pytest.approx(
        1 / 3
    )
    assert {m.name: (rows[m.name]["two"], rows[m.name]["three"]) for m in LESION_METRICS} == dict.fromkeys(
        one, (0.0, None)
    )
    assert "lesion_f1" not in measure(a, b, grid(a), TARGETS, MM)


def test_lesion_sensitivity_is_of_the_reference_and_precision_of_the_prediction() -> None:
    """One of four lesions is found, by one of two predictions."""
    a, b = np.zeros((2, 20, 10, 8), np.int16)
    for start in (0, 4, 8, 12):
        b[start : start + 2, 0:2, 0:2] = 1
    a[0:2, 0:2, 0:2], a[16:18, 0:2, 0:2] = 1, 1
    rows = measure(a, b, grid(a), TARGETS, MM, MetricSelection(0.5))
    assert (rows["lesion_sensitivity"]["one"], rows["lesion_precision"]["one"]) == (0.25, 0.5)


def test_centrelines_are_measured_where_they_are_asked_for() -> None:
    """A line that is found by half and beside which there is nothing; class two is missed."""
    a, b = np.zeros((2, 20, 10, 8), np.int16)
    b[0:20, 4, 4], b[0:4, 8, 0] = 1, 2
    a[0:10, 4, 4] = 1
    rows = measure(a, b, grid(a), TARGETS, MM, MetricSelection(centreline=True))
    assert rows["cldice"] == {"one": pytest.approx(2 / 3), "two": 0.0, "three": None}
    assert "cldice" not in measure(a, b, grid(a), TARGETS, MM)
