"""medconv/metrics/segmentation.py: all metrics of a case; missing classes, regions, voxels to ignore,
single slices.
"""

import numpy as np
import pytest
from helpers.three_classes import MM, SPACING, TARGETS, grid, labels
from reference import surfaces as oracle

from medconv.data.case import Grid
from medconv.metrics import segmentation, surface_distance
from medconv.metrics.dice import dice
from medconv.metrics.segmentation import (
    CORE_METRICS,
    LESION_METRICS,
    VOLUMES,
    ClassMasks,
    Metric,
    MetricSelection,
    measure,
)
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

DIAGONAL = np.sqrt(12**2 + 15**2 + 16**2)  # of 12 x 10 x 8 voxels


def test_metrics_equal_the_slow_implementation():
    a, b = labels(0), labels(1)
    rows = measure(a, b, grid(a), TARGETS, MM)
    assert list(rows) == [*(m.name for m in CORE_METRICS), *VOLUMES]
    assert rows["dice"] == dice(a, b, TARGETS)
    for value, name in enumerate(TARGETS.names, 1):
        mask, reference = a == value, b == value
        assert rows["hd95_mm"][name] == pytest.approx(oracle.hd95(mask, reference, SPACING))
        assert rows["asd_mm"][name] == pytest.approx(oracle.average_distance(mask, reference, SPACING))
        assert rows["volume_ml"][name] == pytest.approx(mask.sum() * 3 / 1000)
        assert rows["reference_volume_ml"][name] == pytest.approx(reference.sum() * 3 / 1000)
        assert rows["volume_error_ml"][name] == pytest.approx((mask.sum() - reference.sum()) * 3 / 1000)
        assert rows["volume_error"][name] == pytest.approx(mask.sum() / reference.sum() - 1)
    values = [value for row in rows.values() for value in row.values()]
    assert all(type(value) is float for value in values)


def test_each_class_has_its_own_tolerance():
    a, b = labels(0), labels(1)
    rows = [measure(a, b, grid(a), TARGETS, dict.fromkeys(MM, mm))["nsd"] for mm in (1.0, 2.0)]
    assert measure(a, b, grid(a), TARGETS, MM)["nsd"] == {
        "one": rows[0]["one"],
        "two": rows[1]["two"],
        "three": rows[0]["three"],
    }
    assert rows[0]["two"] < rows[1]["two"]


def test_missing_classes_have_no_value_or_the_worst():
    """In neither: no value. In one: the worst, and a relative volume error only where there is a volume to
    relate to.
    """
    a, b = np.zeros((2, 12, 10, 8), np.int16)
    a[3:5, 3:5, 3:5], b[6:8, 2:4, 2:6] = 1, 2
    rows = {
        name: {m: row[name] for m, row in measure(a, b, grid(a), TARGETS, MM).items()}
        for name in TARGETS.names
    }
    worst = {"dice": 0.0, "nsd": 0.0, "hd95_mm": pytest.approx(DIAGONAL), "asd_mm": pytest.approx(DIAGONAL)}
    expected = {
        **worst,
        "volume_error": None,
        "volume_error_ml": pytest.approx(0.024),
        "volume_ml": pytest.approx(0.024),
        "reference_volume_ml": 0.0,
    }
    # A metric that a file beside adds has its own test.
    assert {name: rows["one"][name] for name in expected} == expected
    expected = {
        **worst,
        "volume_error": -1.0,
        "volume_error_ml": pytest.approx(-0.048),
        "volume_ml": 0.0,
        "reference_volume_ml": pytest.approx(0.048),
    }
    assert {name: rows["two"][name] for name in expected} == expected
    assert rows["three"] == {
        **dict.fromkeys(m.name for m in CORE_METRICS),
        "volume_ml": 0.0,
        "reference_volume_ml": 0.0,
    }


def test_regions_are_unions_of_values():
    a, b = labels(2), labels(3)
    regions = RegionTargets(("lesion", "core"), ((1, 2, 3), (2, 3)), None, (1, 2))
    rows = measure(a, b, grid(a), regions, {"lesion": 1.0, "core": 1.0})
    union = LabelMapTargets(("lesion",), ((1,),))
    for name, values in (("lesion", (1, 2, 3)), ("core", (2, 3))):
        alone = measure(
            *(np.isin(label, values).astype(np.int16) for label in (a, b)), grid(a), union, {"lesion": 1.0}
        )
        assert {m: row[name] for m, row in rows.items()} == {m: row["lesion"] for m, row in alone.items()}


def test_ignored_voxels_count_nowhere():
    """Whatever is predicted there, and although their value is above all classes."""
    a, b = labels(4), labels(5)
    b[:5] = 9
    targets = LabelMapTargets(TARGETS.names, TARGETS.values, 9)
    rows = measure(a, b, grid(a), targets, MM)
    assert rows["dice"] == dice(a, b, targets)
    a[:5] = 1
    assert measure(a, b, grid(a), targets, MM) == rows
    known = measure(a[5:], b[5:], grid(a[5:]), TARGETS, MM)  # a cut there makes the same surfaces
    for metric, row in rows.items():
        assert row == pytest.approx(known[metric]), metric


def test_one_slice_is_measured_in_2d():
    """As a volume, each voxel of one slice would lie on the surface."""
    a, b = labels(6, (20, 18)), labels(7, (20, 18))
    rows = measure(a[..., None], b[..., None], grid(a[..., None], 1.0, 1.5, 5.0), TARGETS, MM)
    for value, name in enumerate(TARGETS.names, 1):
        assert rows["hd95_mm"][name] == pytest.approx(oracle.hd95(a == value, b == value, (1.0, 1.5)))
        assert rows["volume_ml"][name] == pytest.approx((a == value).sum() * 7.5 / 1000)
    alone = measure(a[..., None], 0 * b[..., None], grid(a[..., None], 1.0, 1.5, 5.0), TARGETS, MM)
    assert alone["hd95_mm"]["one"] == pytest.approx(np.hypot(20, 27))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_along_any_axis_is_measured_in_2d(axis):
    a, b = labels(6, (20, 18)), labels(7, (20, 18))
    spacing = list(np.insert([1.0, 1.5], axis, 5.0))
    rows = measure(
        np.expand_dims(a, axis), np.expand_dims(b, axis), grid(np.expand_dims(a, axis), *spacing), TARGETS, MM
    )
    assert rows == measure(a[..., None], b[..., None], grid(a[..., None], 1.0, 1.5, 5.0), TARGETS, MM)


def test_volumes_on_a_sheared_grid_use_the_volume_of_its_voxels():
    """As a tilted gantry leaves them: the third axis leans, and is longer than the distance of the slices."""
    a = labels(0)
    affine = np.diag([*SPACING, 1])
    affine[1, 2] = 2.0
    rows = measure(a, a, Grid.of(a.shape, affine), TARGETS, MM)
    assert rows["volume_ml"]["one"] == pytest.approx((a == 1).sum() * 3 / 1000)


def test_metrics_of_masks_far_apart():
    """The box holds both, wherever they lie: 4 x 4 x 4 voxels, 20, 30 and 10 mm from each other."""
    a, b = np.zeros((2, 50, 60, 40), np.int16)
    a[2:6, 50:54, 30:34], b[22:26, 20:24, 20:24] = 1, 1
    row = {m: row["one"] for m, row in measure(a, b, grid(a, 1.0, 1.0, 1.0), TARGETS, MM).items()}
    assert row["hd95_mm"] == pytest.approx(oracle.hd95(a == 1, b == 1, (1, 1, 1)))
    assert (row["dice"], row["nsd"], row["volume_error"]) == (0.0, 0.0, 0.0)


def test_a_further_metric_is_measured_as_the_others(monkeypatch):
    """0 where a class is in one label map only, since higher is better; no value where it is in none."""

    def sensitivity(masks):
        return int((masks.prediction & masks.reference).sum()) / masks.sizes[1]

    monkeypatch.setattr(
        segmentation,
        "CORE_METRICS",
        [*CORE_METRICS, Metric("sensitivity", "Sensitivity", 1, sensitivity, "share found.")],
    )
    a, b = labels(0), labels(1)
    a[a == 3], b[b == 2] = 0, 0
    a[a == 2] = 0
    row = measure(a, b, grid(a), TARGETS, MM)["sensitivity"]
    assert row["one"] == ((a == 1) & (b == 1)).sum() / (b == 1).sum()
    assert row["two"] is None and row["three"] == 0.0


def test_lesions_are_measured_where_they_are_asked_for():
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
    assert list(rows) == [m.name for m in (*CORE_METRICS, *LESION_METRICS)]
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


def test_lesion_sensitivity_is_of_the_reference_and_precision_of_the_prediction():
    """One of four lesions is found, by one of two predictions."""
    a, b = np.zeros((2, 20, 10, 8), np.int16)
    for start in (0, 4, 8, 12):
        b[start : start + 2, 0:2, 0:2] = 1
    a[0:2, 0:2, 0:2], a[16:18, 0:2, 0:2] = 1, 1
    rows = measure(a, b, grid(a), TARGETS, MM, MetricSelection(0.5))
    assert (rows["lesion_sensitivity"]["one"], rows["lesion_precision"]["one"]) == (0.25, 0.5)


def test_centrelines_are_measured_where_they_are_asked_for():
    """A line that is found by half and beside which there is nothing; class two is missed."""
    a, b = np.zeros((2, 20, 10, 8), np.int16)
    b[0:20, 4, 4], b[0:4, 8, 0] = 1, 2
    a[0:10, 4, 4] = 1
    rows = measure(a, b, grid(a), TARGETS, MM, MetricSelection(centreline=True))
    assert rows["cldice"] == {"one": pytest.approx(2 / 3), "two": 0.0, "three": None}
    assert "cldice" not in measure(a, b, grid(a), TARGETS, MM)


def test_what_several_metrics_need_is_measured_once():
    prediction = np.zeros((12, 6, 6), bool)
    prediction[2:8, 2:4, 2:4] = True
    reference = np.roll(prediction, 1, 0)
    masks = ClassMasks(prediction, reference, (1.0, 2.0, 3.0), 6.0, tolerance_mm=1.0, lesion_iou=0.5)
    assert masks.sizes == (24, 24)
    assert surface_distance.hd95(masks.distances) == 1.0
    assert masks.lesions.overlaps == (5 / 7,)
    for line, mask in zip(masks.centrelines, (prediction, reference), strict=True):
        assert line.any() and not (line & ~mask).any()
    assert masks.distances is masks.distances and masks.centrelines is masks.centrelines
