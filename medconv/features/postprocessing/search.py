"""Search for post-processing that improves Dice, on cases that the networks were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.features.postprocessing.decision import Decision, Verdict
from medconv.features.postprocessing.steps import FOREGROUND, Step, bounding_box, component_volumes, values_of
from medconv.metrics.dice import ClassScores, dice
from medconv.metrics.statistics import holm, paired
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.progress import track

_PERCENTILES = (5, 25)  # of the references' component volumes, as candidates for remove_small
_ROUNDING = 1e-9  # Dice; smaller differences are rounding errors


@dataclass(frozen=True)
class LabelledCase:
    """A prediction and its reference. Shape: (X, Y, Z), or the crop of `grid` with all foreground of both."""

    prediction: np.ndarray
    reference: np.ndarray
    grid: Grid

    def cropped(self) -> LabelledCase:
        """The crop with all foreground of both; steps and Dice depend on nothing else."""
        is_foreground = (self.prediction != 0) | (self.reference != 0)
        one_voxel = (slice(0, 1),) * 3
        box = bounding_box(is_foreground) or one_voxel
        # copies, so that the uncropped arrays are freed
        prediction = self.prediction[box].copy()
        reference = self.reference[box].copy()
        return LabelledCase(prediction, reference, self.grid)


Load = Callable[[str], LabelledCase]  # by case id


def volumes(load: Load, cases: Sequence[str], targets: SegmentationTargets) -> dict[str, np.ndarray]:
    """The volumes in mm^3 of all references' components, by class or region, and of the whole foreground."""
    labels = _labels(targets)
    by_label: dict[str, list[np.ndarray]] = {label: [] for label in labels}
    for case in track(cases, "measuring references"):
        sample = load(case)
        for label, values in labels.items():
            mask = np.isin(sample.reference, values)
            by_label[label].append(component_volumes(mask, sample.grid))
    return {label: np.sort(np.concatenate(arrays)) for label, arrays in by_label.items()}


def candidates(volumes: Mapping[str, np.ndarray], targets: SegmentationTargets) -> list[Step]:
    """The steps to try, for every class or region, and for the whole foreground if none of them covers it.

    Thresholds of `remove_small`: half the volume of the references' smallest component, that volume, and
    the 5th and 25th percentile of the volumes.
    """
    steps = []
    for label in _labels(targets):
        steps.append(Step("keep_largest", label))
        sizes_mm3 = volumes[label]
        if len(sizes_mm3):
            smallest = sizes_mm3[0]
            thresholds = (smallest / 2, smallest, *np.percentile(sizes_mm3, _PERCENTILES))
            rounded = {_rounded_down(threshold) for threshold in thresholds}
            steps += [Step("remove_small", label, mm3) for mm3 in sorted(rounded)]
        if label != FOREGROUND:
            steps.append(Step("fill_holes", label))
    return steps


def decide(load: Load, cases: Sequence[str], targets: SegmentationTargets, tried: Sequence[Step]) -> Decision:
    """Greedy forward selection: add the step that helps most, until none helps.

    A step helps if its mean difference over the cases is positive, its bootstrap interval lies above 0, a
    signed-rank test corrected for the number of candidates is significant, and no class's mean falls.
    """
    accepted: list[Verdict] = []
    first_scores: np.ndarray | None = None
    while True:
        steps = [verdict.step for verdict in accepted]
        remaining = [step for step in tried if step not in steps]
        bar = track(cases, f"trying step {len(accepted) + 1}")
        scores, changed = _scores(load, bar, targets, steps, remaining)
        if first_scores is None:
            first_scores = scores[0]
        verdicts = _verdicts(scores, changed, remaining, targets)
        helpful = [verdict for verdict in verdicts if verdict.helps]
        if not helpful:
            return Decision(
                accepted=tuple(accepted),
                rejected=tuple(verdicts),
                before=_class_means(first_scores, targets),
                after=_class_means(scores[0], targets),
            )
        best = max(helpful, key=lambda verdict: verdict.gain)
        accepted.append(replace(best, accepted=True))


def _class_means(scores: np.ndarray, targets: SegmentationTargets) -> ClassScores:
    """Shape: (cases, classes)."""
    return dict(zip(targets.names, scores.mean(0).tolist(), strict=True))


def _scores(
    load: Load,
    cases: Iterable[str],
    targets: SegmentationTargets,
    accepted: Sequence[Step],
    tried: Sequence[Step],
) -> tuple[np.ndarray, np.ndarray]:
    """Dice after the accepted steps (row 0), after step i on top of them (row 1 + i); which cases it changed.

    Shape: (1 + steps, cases, classes), (steps, cases). If neither prediction nor reference has a class,
    Dice is 1 here, so that removing a false positive counts fully.
    """
    scores = []
    changed = []
    for case in cases:
        sample = load(case)
        label = sample.prediction
        for step in accepted:
            label = step.apply(label, sample.grid, targets)
        case_scores = [_dice(label, sample.reference, targets)]
        case_changed = []
        for step in tried:
            processed = step.apply(label, sample.grid, targets)
            is_changed = processed is not label  # a step returns its input if it changes nothing
            score = _dice(processed, sample.reference, targets) if is_changed else case_scores[0]
            case_scores.append(score)
            case_changed.append(is_changed)
        scores.append(case_scores)
        changed.append(case_changed)
    # from (cases, steps, ...) to (steps, cases, ...)
    step_scores = np.moveaxis(np.array(scores, float), 0, 1)
    step_changed = np.array(changed, bool).reshape(len(scores), -1).T
    return step_scores, step_changed


def _verdicts(
    scores: np.ndarray, changed: np.ndarray, tried: Sequence[Step], targets: SegmentationTargets
) -> list[Verdict]:
    """A verdict on each step. Shape: as `_scores` returns them."""
    before = scores[0]
    tests = [
        _paired_test(step, after, before, targets) for step, after in zip(tried, scores[1:], strict=True)
    ]
    p_values = {}  # a step that changes nothing is no test
    for index, test in enumerate(tests):
        p_values[str(index)] = test["p"] if changed[index].any() else None
    corrected = holm(p_values)
    verdicts = []
    for index, (step, test) in enumerate(zip(tried, tests, strict=True)):
        class_gains = (scores[1 + index] - before).mean(0)
        p = corrected[str(index)]
        verdicts.append(
            Verdict(
                step=step,
                cases=test["n"],
                changed=int(changed[index].sum()),
                before=test["mean_compare"],
                after=test["mean"],
                low=test["low"],
                high=test["high"],
                p=1.0 if p is None else p,
                gain=float(class_gains.mean()),
                worse=_worse_classes(class_gains, targets),
            )
        )
    return verdicts


def _paired_test(
    step: Step, after: np.ndarray, before: np.ndarray, targets: SegmentationTargets
) -> dict[str, Any]:
    """Dice of the step's class, or the mean over classes. Shape: (cases, classes)."""
    classes: slice | list[int] = slice(None)
    if step.label != FOREGROUND:
        classes = [targets.names.index(step.label)]
    after_means = after[:, classes].mean(1)
    before_means = before[:, classes].mean(1)
    return paired(after_means.tolist(), before_means.tolist())


def _worse_classes(class_gains: np.ndarray, targets: SegmentationTargets) -> tuple[str, ...]:
    named_gains = zip(targets.names, class_gains, strict=True)
    return tuple(name for name, gain in named_gains if gain < -_ROUNDING)


def _rounded_down(value: float) -> float:
    """Rounded down to three digits, so that a component of exactly this size is not removed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    # 1e-9: a value of three digits must not fall below them by a rounding error
    units = math.floor(value / unit * (1 + 1e-9))
    return float(f"{units * unit:.3g}")


def _dice(label: np.ndarray, reference: np.ndarray, targets: SegmentationTargets) -> list[float]:
    scores = dice(label, reference, targets)
    return [1.0 if score is None else score for score in scores.values()]


def _labels(targets: SegmentationTargets) -> dict[str, tuple[int, ...]]:
    """Classes or regions with their label values, and the whole foreground if none of them covers it."""
    foreground = values_of(FOREGROUND, targets)
    if any(set(values) == set(foreground) for values in targets.values):
        return targets.by_name
    return {**targets.by_name, FOREGROUND: foreground}
