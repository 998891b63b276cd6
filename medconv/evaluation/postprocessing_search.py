"""Search for post-processing that improves Dice, on cases that the networks were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.inference.postprocessing import FOREGROUND, Step, bounding_box, component_volumes, values_of
from medconv.metrics.dice import ClassScores, dice
from medconv.metrics.statistics import holm, paired
from medconv.targets.segmentation import SegmentationTargets

LEVEL = 0.05  # significance level of a round's tests together
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
        box = bounding_box((self.prediction != 0) | (self.reference != 0)) or (slice(0, 1),) * 3
        return LabelledCase(self.prediction[box].copy(), self.reference[box].copy(), self.grid)


@dataclass(frozen=True)
class Verdict:
    """The effect of a step. before, after: Dice of its class; of the whole foreground, the mean over classes.

    Args: changed: number of cases. low, high: 95 % interval of the difference. p: corrected for the number of
        candidates. gain: in mean Dice over all classes. worse: classes whose mean Dice falls.
    """

    step: Step
    cases: int
    changed: int
    before: float
    after: float
    low: float | None
    high: float | None
    p: float
    gain: float
    worse: tuple[str, ...] = ()
    accepted: bool = False

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def helps(self) -> bool:
        return self.difference > 0 and (self.low or 0) > 0 and self.p < LEVEL and not self.worse

    @property
    def reason(self) -> str:
        if self.accepted:
            return "kept"
        if not self.changed:
            return "no: changes nothing"
        if self.difference <= 0:
            return "no: does not help"
        harmed = ", ".join(self.worse)
        return f"no: harms {harmed}" if harmed else f"no: could be chance (p = {self.p:.2g})"

    def plain(self) -> dict[str, Any]:
        keys = ("cases", "changed", "before", "after", "difference", "low", "high", "p")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Decision:
    """Args: accepted: in order. rejected: on top of the accepted ones. before, after: mean Dice per class."""

    accepted: tuple[Verdict, ...]
    rejected: tuple[Verdict, ...]
    before: ClassScores
    after: ClassScores


Load = Callable[[str], LabelledCase]
Progress = Callable[[Sequence[str], str], Iterable[str]]


def silent(cases: Sequence[str], what: str) -> Iterable[str]:
    return cases


def volumes(
    load: Load, cases: Sequence[str], targets: SegmentationTargets, progress: Progress = silent
) -> dict[str, np.ndarray]:
    """The volumes in mm^3 of all references' components, by class or region, and of the whole foreground."""
    by_label: dict[str, list[np.ndarray]] = {label: [] for label in _labels(targets)}
    for case in progress(cases, "measuring references"):
        sample = load(case)
        for label, values in _labels(targets).items():
            by_label[label].append(component_volumes(np.isin(sample.reference, values), sample.grid))
    return {label: np.sort(np.concatenate(arrays)) for label, arrays in by_label.items()}


def candidates(volumes: Mapping[str, np.ndarray], targets: SegmentationTargets) -> list[Step]:
    """The steps to try, for every class or region, and for the whole foreground if none of them covers it.

    Thresholds of `remove_small`: half the volume of the references' smallest component, that volume, and
    the 5th and 25th percentile of the volumes.
    """
    steps = []
    for label in _labels(targets):
        steps.append(Step("keep_largest", label))
        if len(sizes := volumes[label]):
            thresholds = (sizes[0] / 2, sizes[0], *np.percentile(sizes, _PERCENTILES))
            steps += [Step("remove_small", label, mm3) for mm3 in sorted({*map(_rounded_down, thresholds)})]
        if label != FOREGROUND:
            steps.append(Step("fill_holes", label))
    return steps


def decide(
    load: Load,
    cases: Sequence[str],
    targets: SegmentationTargets,
    tried: Sequence[Step],
    progress: Progress = silent,
) -> Decision:
    """Greedy forward selection: add the step that helps most, until none helps.

    A step helps if its mean difference over the cases is positive, its bootstrap interval lies above 0, a
    signed-rank test corrected for the number of candidates is significant, and no class's mean falls.
    """
    accepted: list[Verdict] = []
    first: np.ndarray | None = None
    while True:
        steps = [verdict.step for verdict in accepted]
        remaining = [step for step in tried if step not in steps]
        bar = progress(cases, f"trying step {len(accepted) + 1}")
        scores, changed = _scores(load, bar, targets, steps, remaining)
        first = scores[0] if first is None else first
        verdicts = _verdicts(scores, changed, remaining, targets)
        best = max((v for v in verdicts if v.helps), key=lambda v: v.gain, default=None)
        if best is None:
            means = [dict(zip(targets.names, s.mean(0).tolist(), strict=True)) for s in (first, scores[0])]
            return Decision(tuple(accepted), tuple(verdicts), *means)
        accepted.append(replace(best, accepted=True))


def table(decision: Decision) -> str:
    """A line for each accepted step, in their order, then for each rejected one."""
    names = ("operation", "label", "changed", "before", "after", "change", "95 % interval", "kept")
    rows: list[tuple[str, ...]] = [names]
    for v in (*decision.accepted, *decision.rejected):
        label = "whole foreground" if v.step.label == FOREGROUND else v.step.label
        interval = "-" if v.low is None else f"{v.low:+.4f} to {v.high:+.4f}"
        scores = f"{v.before:.4f}", f"{v.after:.4f}", f"{v.difference:+.4f}"
        rows.append((str(v.step), label, str(v.changed), *scores, interval, v.reason))
    line = "{:<32} {:<20} {:>8} {:>7} {:>7} {:>8}  {:<19} {}"
    return "\n".join(line.format(*row) for row in rows)


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
    scores, changed = [], []
    for case in cases:
        sample = load(case)
        label = sample.prediction
        for step in accepted:
            label = step.apply(label, sample.grid, targets)
        labels = [label, *(step.apply(label, sample.grid, targets) for step in tried)]
        base = _dice(label, sample.reference, targets)
        scores.append([base if new is label else _dice(new, sample.reference, targets) for new in labels])
        changed.append([other is not label for other in labels[1:]])
    return np.moveaxis(np.array(scores, float), 0, 1), np.array(changed, bool).reshape(len(scores), -1).T


def _verdicts(
    scores: np.ndarray, changed: np.ndarray, tried: Sequence[Step], targets: SegmentationTargets
) -> list[Verdict]:
    """A verdict on each step. Shape: as `_scores` returns them."""
    tests = []
    for step, after in zip(tried, scores[1:], strict=True):
        own = slice(None) if step.label == FOREGROUND else [targets.names.index(step.label)]
        tests.append(paired(after[:, own].mean(1).tolist(), scores[0][:, own].mean(1).tolist()))
    p = holm({str(i): test["p"] if changed[i].any() else None for i, test in enumerate(tests)})
    verdicts = []
    for i, (step, test) in enumerate(zip(tried, tests, strict=True)):
        per_class = (scores[1 + i] - scores[0]).mean(0)
        verdicts.append(
            Verdict(
                step=step,
                cases=test["n"],
                changed=int(changed[i].sum()),
                before=test["mean_compare"],
                after=test["mean"],
                low=test["low"],
                high=test["high"],
                p=1.0 if (corrected := p[str(i)]) is None else corrected,
                gain=float(per_class.mean()),
                worse=tuple(
                    name for name, up in zip(targets.names, per_class, strict=True) if up < -_ROUNDING
                ),
            )
        )
    return verdicts


def _rounded_down(value: float) -> float:
    """Rounded down to three digits, so that a component of exactly this size is not removed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit * (1 + 1e-9)) * unit:.3g}")


def _dice(label: np.ndarray, reference: np.ndarray, targets: SegmentationTargets) -> list[float]:
    return [1.0 if value is None else value for value in dice(label, reference, targets).values()]


def _labels(targets: SegmentationTargets) -> dict[str, tuple[int, ...]]:
    """Classes or regions with their label values, and the whole foreground if none of them covers it."""
    foreground = values_of(FOREGROUND, targets)
    covered = any(set(values) == set(foreground) for values in targets.values)
    return targets.by_name if covered else {**targets.by_name, FOREGROUND: foreground}
