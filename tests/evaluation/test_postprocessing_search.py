"""Which post-processing is kept: where it helps, where it harms, where it could be chance."""

import numpy as np
import pytest

from medconv.data.case import Grid
from medconv.evaluation import postprocessing_search
from medconv.evaluation.postprocessing_search import Decision, Sample
from medconv.inference.postprocessing import FOREGROUND, Step
from medconv.targets.segmentation import SegmentationTargets

CLASSES = SegmentationTargets.of_classes(("background", "a", "b"))
CASES = [f"case_{i:02d}" for i in range(16)]
SHAPE = (20, 20, 10)


def reference() -> np.ndarray:
    """`a` of 180 voxels, `b` of 150, 3 mm^3 each."""
    label = np.zeros(SHAPE, np.int16)
    label[3:9, 3:9, 2:7], label[12:17, 12:17, 2:8] = 1, 2
    return label


def samples(
    spoil: dict[str, np.ndarray], references: dict[str, np.ndarray] | None = None
) -> dict[str, Sample]:
    grid = Grid.of(SHAPE, np.diag([1.0, 1.5, 2.0, 1.0]))
    known = references or {}
    return {
        case: Sample(spoil.get(case, reference()), known.get(case, reference()), grid).cropped()
        for case in CASES
    }


def decide(known: dict[str, Sample], *tried: Step, targets: SegmentationTargets = CLASSES) -> Decision:
    return postprocessing_search.decide(known.__getitem__, sorted(known), targets, tried)


def strays(count: int, value: int = 1) -> dict[str, np.ndarray]:
    """Predictions with a stray component of `value`, in the first `count` cases; a little larger from case
    to case.
    """
    spoilt = {}
    for i, case in enumerate(CASES[:count]):
        spoilt[case] = reference()
        spoilt[case][17:19, 1:4, 1 : 2 + i % 4] = value
    return spoilt


def test_what_helps_is_kept_with_its_evidence() -> None:
    known = samples(strays(14))
    decision = decide(known, Step("keep_largest", "a"), Step("keep_largest", "b"), Step("fill_holes", "a"))
    (kept,) = decision.accepted
    assert kept.step == Step("keep_largest", "a")
    before = [2 * 180 / (360 + np.count_nonzero(known[case].prediction == 1) - 180) for case in CASES]
    assert kept.before == pytest.approx(np.mean(before)) and kept.after == 1
    assert kept.difference == pytest.approx(1 - np.mean(before))
    assert kept.low is not None and kept.high is not None
    assert 0 < kept.low < kept.difference < kept.high
    assert (kept.cases, kept.changed) == (16, 14) and kept.p < 0.01
    assert decision.before == pytest.approx({"a": np.mean(before), "b": 1.0})
    assert decision.after == {"a": 1.0, "b": 1.0}
    assert [v.reason for v in decision.rejected] == ["no: changes nothing"] * 2
    assert postprocessing_search.table(decision).count("\n") == 3


def test_what_harms_is_not_kept() -> None:
    """Two parts in every reference, of which the prediction has both."""
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
def test_what_could_be_chance_is_not_kept(count: int, kept: bool) -> None:
    decision = decide(samples(strays(count)), Step("keep_largest", "a"), Step("fill_holes", "b"))
    assert bool(decision.accepted) == kept
    if not kept:
        assert decision.rejected[0].difference > 0
        assert decision.rejected[0].reason.startswith("no: could be chance (p = ")


def test_the_more_is_tried_the_more_is_asked() -> None:
    """Ten steps that change something: the chance that one of them looks well by chance is ten times that
    of one.
    """
    known = samples(strays(7))
    steps = [
        Step("remove_small", of, mm3)
        for of in ("a", FOREGROUND)
        for mm3 in (100.0, 101.0, 102.0, 103.0, 104.0)
    ]
    assert decide(known, steps[0]).accepted
    assert not decide(known, *steps).accepted


def test_a_step_that_helps_on_the_whole_and_harms_a_class_is_not_kept() -> None:
    """`b` has a small part in every reference, which falls with the strays of `a`."""
    parts = reference()
    parts[0, 0, :2] = 2
    spoilt = {case: np.maximum(label, parts) for case, label in strays(16).items()}
    known = samples(spoilt, dict.fromkeys(CASES, parts))
    (verdict,) = decide(known, Step("remove_small", FOREGROUND, 80.0)).rejected
    assert verdict.difference > 0 and verdict.low is not None and verdict.low > 0 and verdict.p < 0.001
    assert verdict.worse == ("b",) and verdict.reason == "no: harms b"
    helps = decide(known, Step("remove_small", "a", 80.0), Step("remove_small", FOREGROUND, 80.0))
    assert [v.step.label for v in helps.accepted] == ["a"]


def test_a_false_finding_where_there_is_nothing_counts_in_full() -> None:
    absent = reference()
    absent[absent == 2] = 0
    spoilt = {case: absent.copy() for case in CASES}
    for i, label in enumerate(spoilt.values()):
        label[15, 15, : 1 + i % 5] = 2
    known = samples(spoilt, dict.fromkeys(CASES, absent))
    (kept,) = decide(known, Step("remove_small", "b", 20.0)).accepted
    assert (kept.before, kept.after) == (0, 1)


def test_steps_are_added_one_after_another_the_best_first() -> None:
    spoilt = strays(16)
    for i, label in enumerate(spoilt.values()):
        label[14, 14, 4 : 6 + i % 2] = 0  # a hole of `b`, which costs less than the strays of `a`
    decision = decide(
        samples(spoilt), Step("fill_holes", "b"), Step("remove_small", "a", 100.0), Step("keep_largest", "a")
    )
    assert [str(v.step) for v in decision.accepted] == ["remove_small below 100 mm^3", "fill_holes"]
    (rejected,) = decision.rejected
    assert rejected.reason == "no: changes nothing"  # any more
    assert decision.after == {"a": 1.0, "b": 1.0}


def test_voxels_to_ignore_do_not_count() -> None:
    ignored = reference()
    ignored[16:20, :5, :8] = 255
    known = samples(strays(16), dict.fromkeys(CASES, ignored))
    decision = decide(
        known,
        Step("keep_largest", "a"),
        targets=SegmentationTargets.of_classes(("background", "a", "b"), ignore=255),
    )
    assert decision.rejected[0].changed == 16 and decision.rejected[0].difference == 0


def test_candidates_come_from_the_references() -> None:
    references = {}
    for i, case in enumerate(CASES):
        references[case] = reference()
        references[case][0, 0, : 1 + i % 3] = 2  # 3, 6 or 9 mm^3
    known = samples({}, references)
    volumes = postprocessing_search.volumes(known.__getitem__, CASES, CLASSES)
    assert volumes["a"].tolist() == pytest.approx([540] * 16)
    assert sorted(set(volumes["b"].round(6))) == [3, 6, 9, 450]
    assert len(volumes[FOREGROUND]) == 48
    steps = postprocessing_search.candidates(volumes, CLASSES)
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
def test_a_threshold_is_not_above_the_component_it_stands_for(mm3: float) -> None:
    found = [
        s.min_mm3
        for s in postprocessing_search.candidates(
            {"a": np.array([mm3])}, SegmentationTargets.of_classes(("_", "a"))
        )
        if s.min_mm3
    ]
    assert len(found) == 2
    assert found[1] <= mm3 * (1 + 1e-9) and found[1] == pytest.approx(mm3, rel=0.01)


def test_the_whole_foreground_is_tried_where_no_class_or_region_is_all_of_it() -> None:
    one = SegmentationTargets.of_classes(("background", "a"))
    regions = SegmentationTargets(("whole", "core"), ((1, 2), (2,)), (1, 2))
    for targets, names in ((one, {"a"}), (regions, {"whole", "core"}), (CLASSES, {"a", "b", FOREGROUND})):
        volumes = postprocessing_search.volumes(samples({}).__getitem__, CASES[:1], targets)
        assert {step.label for step in postprocessing_search.candidates(volumes, targets)} == names


def test_of_an_absent_class_no_threshold_is_tried() -> None:
    steps = postprocessing_search.candidates(
        {"a": np.array([])}, SegmentationTargets.of_classes(("background", "a"))
    )
    assert [step.operation for step in steps] == ["keep_largest", "fill_holes"]


def test_a_crop_changes_nothing() -> None:
    """Holes at the border of the crop, a hole in a slice of a volume, a case without any foreground."""
    rng = np.random.default_rng(0)
    label = rng.choice(3, SHAPE, p=[0.6, 0.2, 0.2]).astype(np.int16)
    label[:, :, :4] = 0
    label[:, :, 5:] = 0  # one slice of foreground
    grid = Grid.of(SHAPE, np.diag([1.0, 1.5, 2.0, 1.0]))
    whole = Sample(label, np.zeros_like(label), grid)
    cropped = whole.cropped()
    assert cropped.prediction.shape[2] == 1
    for step in (Step("fill_holes", "a"), Step("keep_largest", "b"), Step("remove_small", FOREGROUND, 7.0)):
        ours, theirs = (step.apply(s.prediction, s.grid, CLASSES) for s in (cropped, whole))
        assert np.array_equal(
            Sample(theirs, whole.reference, grid).cropped().prediction,
            ours[
                tuple(
                    slice(
                        *(lambda w: (w.min(), w.max() + 1))(
                            np.nonzero(ours.any(axis=tuple(a for a in range(3) if a != axis)))[0]
                        )
                    )
                    for axis in range(3)
                )
            ],
        )
    empty = Sample(np.zeros_like(label), np.zeros_like(label), grid).cropped()
    assert empty.prediction.shape == (1, 1, 1)
