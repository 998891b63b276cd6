"""medconv/features/postprocessing/search.py and decision.py: which steps are kept, and why."""

from dataclasses import replace

import numpy as np
import pytest

from medconv.data.case import Grid
from medconv.features.postprocessing import search
from medconv.features.postprocessing.decision import Decision, Verdict, table
from medconv.features.postprocessing.search import LabelledCase
from medconv.features.postprocessing.steps import FOREGROUND, Step
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.regions import RegionTargets

CLASSES = LabelMapTargets.of_classes(("background", "a", "b"))
CASES = [f"case_{i:02d}" for i in range(16)]
SHAPE = (20, 20, 10)


def reference():
    """`a` of 180 voxels, `b` of 150, 3 mm^3 each."""
    label = np.zeros(SHAPE, np.int16)
    label[3:9, 3:9, 2:7], label[12:17, 12:17, 2:8] = 1, 2
    return label


def samples(predictions, references=None):
    grid = Grid.of(SHAPE, np.diag([1.0, 1.5, 2.0, 1.0]))
    labels = references or {}
    return {
        case: LabelledCase(predictions.get(case, reference()), labels.get(case, reference()), grid).cropped()
        for case in CASES
    }


def decide(cases, *steps, targets=CLASSES):
    return search.decide(cases.__getitem__, sorted(cases), targets, steps)


def strays(count, value=1):
    """Predictions with a stray component of `value`, in the first `count` cases; a little larger from case
    to case.
    """
    predictions = {}
    for i, case in enumerate(CASES[:count]):
        predictions[case] = reference()
        predictions[case][17:19, 1:4, 1 : 2 + i % 4] = value
    return predictions


def test_a_step_that_helps_is_kept_with_its_evidence():
    cases = samples(strays(14))
    decision = decide(cases, Step("keep_largest", "a"), Step("keep_largest", "b"), Step("fill_holes", "a"))
    (kept,) = decision.accepted
    assert kept.step == Step("keep_largest", "a")
    before = [2 * 180 / (360 + np.count_nonzero(cases[case].prediction == 1) - 180) for case in CASES]
    assert kept.before == pytest.approx(np.mean(before)) and kept.after == 1
    assert kept.difference == pytest.approx(1 - np.mean(before))
    assert kept.low is not None and kept.high is not None
    assert 0 < kept.low < kept.difference < kept.high
    assert (kept.cases, kept.changed) == (16, 14) and kept.p < 0.01
    assert decision.before == pytest.approx({"a": np.mean(before), "b": 1.0})
    assert decision.after == {"a": 1.0, "b": 1.0}
    assert [v.reason for v in decision.rejected] == ["no: changes nothing"] * 2
    assert table(decision).count("\n") == 3


def test_a_step_that_harms_is_not_kept():
    """Every reference has two parts, and so has the prediction."""
    two = reference()
    two[3:6, 12:17, 2:7] = 1
    everywhere = dict.fromkeys(CASES, two)
    decision = decide(
        samples(everywhere, everywhere), Step("keep_largest", "a"), Step("keep_largest", FOREGROUND)
    )
    assert not decision.accepted
    assert [v.reason for v in decision.rejected] == ["no: does not help"] * 2
    assert decision.before == decision.after == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(("count", "kept"), [(1, False), (4, False), (5, False), (8, True)])
def test_a_gain_that_could_be_chance_is_not_kept(count, kept):
    decision = decide(samples(strays(count)), Step("keep_largest", "a"), Step("fill_holes", "b"))
    assert bool(decision.accepted) == kept
    if not kept:
        assert decision.rejected[0].difference > 0
        assert decision.rejected[0].reason.startswith("no: could be chance (p = ")


def test_more_candidates_need_stronger_evidence():
    """One of ten steps looks good by chance ten times as often as a single step."""
    cases = samples(strays(7))
    steps = [
        Step("remove_small", of, mm3)
        for of in ("a", FOREGROUND)
        for mm3 in (100.0, 101.0, 102.0, 103.0, 104.0)
    ]
    assert decide(cases, steps[0]).accepted
    assert not decide(cases, *steps).accepted


def test_a_step_that_helps_on_average_but_harms_a_class_is_not_kept():
    """`b` has a small part in every reference, which is removed with the strays of `a`."""
    parts = reference()
    parts[0, 0, :2] = 2
    predictions = {case: np.maximum(label, parts) for case, label in strays(16).items()}
    cases = samples(predictions, dict.fromkeys(CASES, parts))
    (verdict,) = decide(cases, Step("remove_small", FOREGROUND, 80.0)).rejected
    assert verdict.difference > 0 and verdict.low is not None and verdict.low > 0 and verdict.p < 0.001
    assert verdict.worse == ("b",) and verdict.reason == "no: harms b"
    helps = decide(cases, Step("remove_small", "a", 80.0), Step("remove_small", FOREGROUND, 80.0))
    assert [v.step.label for v in helps.accepted] == ["a"]


def test_a_false_positive_in_an_empty_reference_counts_fully():
    absent = reference()
    absent[absent == 2] = 0
    predictions = {case: absent.copy() for case in CASES}
    for i, label in enumerate(predictions.values()):
        label[15, 15, : 1 + i % 5] = 2
    cases = samples(predictions, dict.fromkeys(CASES, absent))
    (kept,) = decide(cases, Step("remove_small", "b", 20.0)).accepted
    assert (kept.before, kept.after) == (0, 1)


def test_steps_are_added_one_by_one_the_best_first():
    predictions = strays(16)
    for i, label in enumerate(predictions.values()):
        label[14, 14, 4 : 6 + i % 2] = 0  # a hole of `b`, which costs less than the strays of `a`
    decision = decide(
        samples(predictions),
        Step("fill_holes", "b"),
        Step("remove_small", "a", 100.0),
        Step("keep_largest", "a"),
    )
    assert [str(v.step) for v in decision.accepted] == ["remove_small below 100 mm^3", "fill_holes"]
    (rejected,) = decision.rejected
    assert rejected.reason == "no: changes nothing"  # any more
    assert decision.after == {"a": 1.0, "b": 1.0}


def test_ignored_voxels_do_not_count():
    ignored = reference()
    ignored[16:20, :5, :8] = 255
    cases = samples(strays(16), dict.fromkeys(CASES, ignored))
    decision = decide(
        cases,
        Step("keep_largest", "a"),
        targets=LabelMapTargets.of_classes(("background", "a", "b"), ignore=255),
    )
    assert decision.rejected[0].changed == 16 and decision.rejected[0].difference == 0


def test_thresholds_come_from_the_components_of_the_references():
    references = {}
    for i, case in enumerate(CASES):
        references[case] = reference()
        references[case][0, 0, : 1 + i % 3] = 2  # 3, 6 or 9 mm^3
    cases = samples({}, references)
    volumes = search.volumes(cases.__getitem__, CASES, CLASSES)
    assert volumes["a"].tolist() == pytest.approx([540] * 16)
    assert sorted(set(volumes["b"].round(6))) == [3, 6, 9, 450]
    assert len(volumes[FOREGROUND]) == 48
    steps = search.candidates(volumes, CLASSES)
    assert [str(s) for s in steps if s.label == "a"] == [
        *("keep_largest", "remove_small below 270 mm^3", "remove_small below 540 mm^3", "fill_holes")
    ]
    assert [s.min_mm3 for s in steps if s.label == "b" and s.min_mm3] == [
        1.5,
        3.0,
        6.0,
    ]  # half, smallest and 5 %, 25 %
    assert not [s for s in steps if s.label == FOREGROUND and s.operation == "fill_holes"]


@pytest.mark.parametrize("mm3", [209.7, 0.012345, 99999.0, 3.0, 0.3])
def test_a_threshold_does_not_exceed_its_component(mm3):
    thresholds = [
        s.min_mm3
        for s in search.candidates({"a": np.array([mm3])}, LabelMapTargets.of_classes(("_", "a")))
        if s.min_mm3
    ]
    assert len(thresholds) == 2
    assert thresholds[1] <= mm3 * (1 + 1e-9) and thresholds[1] == pytest.approx(mm3, rel=0.01)


def test_the_foreground_is_tried_unless_a_class_or_region_covers_it():
    one = LabelMapTargets.of_classes(("background", "a"))
    regions = RegionTargets(("whole", "core"), ((1, 2), (2,)), None, (1, 2))
    for targets, names in ((one, {"a"}), (regions, {"whole", "core"}), (CLASSES, {"a", "b", FOREGROUND})):
        volumes = search.volumes(samples({}).__getitem__, CASES[:1], targets)
        assert {step.label for step in search.candidates(volumes, targets)} == names


def test_an_absent_class_has_no_threshold():
    steps = search.candidates({"a": np.array([])}, LabelMapTargets.of_classes(("background", "a")))
    assert [step.operation for step in steps] == ["keep_largest", "fill_holes"]


def test_a_crop_changes_nothing():
    """Holes at the border of the crop, a hole in a slice of a volume, a case without any foreground."""
    rng = np.random.default_rng(0)
    label = rng.choice(3, SHAPE, p=[0.6, 0.2, 0.2]).astype(np.int16)
    label[:, :, :4] = 0
    label[:, :, 5:] = 0  # one slice of foreground
    grid = Grid.of(SHAPE, np.diag([1.0, 1.5, 2.0, 1.0]))
    whole = LabelledCase(label, np.zeros_like(label), grid)
    cropped = whole.cropped()
    assert cropped.prediction.shape[2] == 1
    for step in (Step("fill_holes", "a"), Step("keep_largest", "b"), Step("remove_small", FOREGROUND, 7.0)):
        of_crop, of_whole = (step.apply(s.prediction, s.grid, CLASSES) for s in (cropped, whole))
        assert np.array_equal(
            LabelledCase(of_whole, whole.reference, grid).cropped().prediction,
            of_crop[
                tuple(
                    slice(
                        *(lambda w: (w.min(), w.max() + 1))(
                            np.nonzero(of_crop.any(axis=tuple(a for a in range(3) if a != axis)))[0]
                        )
                    )
                    for axis in range(3)
                )
            ],
        )
    empty = LabelledCase(np.zeros_like(label), np.zeros_like(label), grid).cropped()
    assert empty.prediction.shape == (1, 1, 1)


HELPFUL = Verdict(
    step=Step("keep_largest", FOREGROUND),
    cases=9,
    changed=7,
    before=0.8,
    after=0.85,
    low=0.02,
    high=0.08,
    p=0.01,
    gain=0.05,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accepted": True}, "kept"),
        ({"changed": 0}, "no: changes nothing"),
        ({"after": 0.8}, "no: does not help"),
        ({"worse": ("liver", "spleen")}, "no: harms liver, spleen"),
        ({"p": 0.0734}, "no: could be chance (p = 0.073)"),
    ],
)
def test_a_verdict_says_why(changes, reason):
    verdict = replace(HELPFUL, **changes)
    assert verdict.reason == reason


def test_a_step_helps_if_it_is_better_significant_and_harms_no_class():
    assert HELPFUL.helps
    for changes in ({"after": 0.8}, {"low": -0.01}, {"low": None}, {"p": 0.06}, {"worse": ("liver",)}):
        assert not replace(HELPFUL, **changes).helps


def test_the_table_has_accepted_steps_first():
    undefined = replace(HELPFUL, low=None, high=None)
    accepted = replace(HELPFUL, accepted=True)
    lines = table(Decision((accepted,), (undefined,), before={}, after={})).splitlines()
    assert lines[0].split()[:3] == ["operation", "label", "changed"]
    assert "whole foreground" in lines[1] and "+0.0200 to +0.0800" in lines[1] and lines[1].endswith("kept")
    assert " +0.0500  - " in lines[2]
