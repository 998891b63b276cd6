"""Which post-processing helps: every candidate against going without it, on cases that the networks were
not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.inference.postprocessing import WHOLE, Step, bounding_box, component_volumes
from medconv.metrics.dice import Row, dice
from medconv.metrics.statistics import holm, paired
from medconv.targets.segmentation import SegmentationTargets

LEVEL = 0.05  # of the test, over all candidates of a round together
_PERCENTILES = (5, 25)  # of the references' component volumes, as candidates for remove_small
_WORSE = 1e-9  # Dice; what rounding does


@dataclass(frozen=True)
class Sample:
    """A prediction and its reference. Shape: (X, Y, Z), or the part of `grid` that holds all foreground of
    both.
    """

    prediction: np.ndarray
    reference: np.ndarray
    grid: Grid

    def cropped(self) -> Sample:
        """The part that holds all foreground, which is all that steps and Dice look at."""
        box = bounding_box((self.prediction != 0) | (self.reference != 0)) or (slice(0, 1),) * 3
        return Sample(self.prediction[box].copy(), self.reference[box].copy(), self.grid)


@dataclass(frozen=True)
class Verdict:
    """What a step did. Dice of its class or region, or, of the whole foreground, the mean over all.

    Args: changed: cases. low, high: 95 % interval of the difference. p: of the test, corrected for the number
        of candidates. gain: of the mean over all classes. worse: classes whose mean falls.
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
    kept: bool = False

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def helps(self) -> bool:
        return self.difference > 0 and (self.low or 0) > 0 and self.p < LEVEL and not self.worse

    @property
    def reason(self) -> str:
        if self.kept:
            return "kept"
        if not self.changed:
            return "no: changes nothing"
        if self.difference <= 0:
            return "no: does not help"
        return (
            f"no: harms {', '.join(self.worse)}" if self.worse else f"no: could be chance (p = {self.p:.2g})"
        )

    def plain(self) -> dict[str, Any]:
        keys = ("cases", "changed", "before", "after", "difference", "low", "high", "p")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Decision:
    """Args: kept: in the order of the steps. rejected: beside all of these. before, after: mean Dice per
    class.
    """

    kept: tuple[Verdict, ...]
    rejected: tuple[Verdict, ...]
    before: Row
    after: Row


Load = Callable[[str], Sample]
Progress = Callable[[Sequence[str], str], Iterable[str]]


def silent(cases: Sequence[str], what: str) -> Iterable[str]:
    return cases


def volumes(
    load: Load, cases: Sequence[str], targets: SegmentationTargets, progress: Progress = silent
) -> dict[str, np.ndarray]:
    """The volumes in mm^3 of all references' components, by class or region, and of the whole foreground."""
    found: dict[str, list[np.ndarray]] = {}
    for case in progress(cases, "measuring references"):
        sample = load(case)
        for of, values in _parts(targets).items():
            found.setdefault(of, []).append(component_volumes(np.isin(sample.reference, values), sample.grid))
    return {of: np.sort(np.concatenate(parts)) for of, parts in found.items()}


def candidates(volumes: Mapping[str, np.ndarray], targets: SegmentationTargets) -> list[Step]:
    """What is tried: of every class or region, and of the whole foreground where that is something else.

    Components are removed below half the smallest component of the references, below that, and below their
    5th and 25th percentile.
    """
    steps = []
    for of in _parts(targets):
        steps.append(Step("keep_largest", of))
        if len(known := volumes[of]):
            sizes = {
                _rounded_down(mm3) for mm3 in (known[0] / 2, known[0], *np.percentile(known, _PERCENTILES))
            }
            steps += [Step("remove_small", of, mm3) for mm3 in sorted(sizes)]
        if of != WHOLE:
            steps.append(Step("fill_holes", of))
    return steps


def decide(
    load: Load,
    cases: Sequence[str],
    targets: SegmentationTargets,
    tried: Sequence[Step],
    progress: Progress = silent,
) -> Decision:
    """Add the step that helps most, again and again until none does.

    A step helps where its mean difference over the cases is positive, the bootstrap interval of it and a
    signed-rank test, corrected for the number of candidates, say that this is no chance, and no class's mean
    falls.
    """
    kept: list[Verdict] = []
    first: np.ndarray | None = None
    while True:
        left = [step for step in tried if step not in [verdict.step for verdict in kept]]
        scores, changed = _scores(
            load, progress(cases, f"trying step {len(kept) + 1}"), targets, [v.step for v in kept], left
        )
        first = scores[0] if first is None else first
        verdicts = _judged(scores, changed, left, targets)
        best = max((v for v in verdicts if v.helps), key=lambda v: v.gain, default=None)
        if best is None:
            return Decision(tuple(kept), tuple(verdicts), _means(first, targets), _means(scores[0], targets))
        kept.append(replace(best, kept=True))


def table(decision: Decision) -> str:
    """A line for each step that was kept, in their order, then for those that were not, beside all of
    them.
    """
    lines = [
        f"{'operation':<32} {'of':<20} {'changed':>8} {'before':>7} {'after':>7} {'change':>8}  "
        f"{'95 % interval':<19} kept"
    ]
    for v in (*decision.kept, *decision.rejected):
        interval = "-" if v.low is None else f"{v.low:+.4f} to {v.high:+.4f}"
        numbers = f"{v.changed:>8} {v.before:7.4f} {v.after:7.4f} {v.difference:+8.4f}  {interval:<19}"
        lines.append(
            f"{v.step!s:<32} {'whole foreground' if v.step.of == WHOLE else v.step.of:<20} {numbers} "
            f"{v.reason}"
        )
    return "\n".join(lines)


def _scores(
    load: Load,
    cases: Iterable[str],
    targets: SegmentationTargets,
    taken: Sequence[Step],
    tried: Sequence[Step],
) -> tuple[np.ndarray, np.ndarray]:
    """Dice after the steps taken and, of row 1 + i, step i on top; and which steps changed which cases.

    Shape: (1 + steps, cases, classes), (steps, cases). Where prediction and reference are both without a
    class Dice is 1
    here: to take a false finding away counts in full.
    """
    scores, changed = [], []
    for case in cases:
        sample = load(case)
        label = sample.prediction
        for step in taken:
            label = step.apply(label, sample.grid, targets)
        labels = [label, *(step.apply(label, sample.grid, targets) for step in tried)]
        base = _dice(label, sample.reference, targets)
        scores.append(
            [base if other is label else _dice(other, sample.reference, targets) for other in labels]
        )
        changed.append([other is not label for other in labels[1:]])
    return np.moveaxis(np.array(scores, float), 0, 1), np.array(changed, bool).reshape(len(scores), -1).T


def _judged(
    scores: np.ndarray, changed: np.ndarray, tried: Sequence[Step], targets: SegmentationTargets
) -> list[Verdict]:
    """A verdict on each step. Shape: as `_scores` gives them."""
    before, compared = scores[0], []
    for step, after in zip(tried, scores[1:], strict=True):
        of = slice(None) if step.of == WHOLE else slice(i := targets.names.index(step.of), i + 1)
        compared.append((before[:, of].mean(1), after[:, of].mean(1)))
    tests = [paired(after.tolist(), before.tolist()) for before, after in compared]
    p = holm({str(i): test["p"] if changed[i].any() else None for i, test in enumerate(tests)})
    verdicts = []
    for i, (step, (own_before, own_after), test) in enumerate(zip(tried, compared, tests, strict=True)):
        per_class = (scores[1 + i] - before).mean(0)
        worse = tuple(name for name, change in zip(targets.names, per_class, strict=True) if change < -_WORSE)
        corrected = p[str(i)]
        verdicts.append(
            Verdict(
                step,
                len(own_before),
                int(changed[i].sum()),
                float(own_before.mean()),
                float(own_after.mean()),
                test["low"],
                test["high"],
                1.0 if corrected is None else corrected,
                float(per_class.mean()),
                worse,
            )
        )
    return verdicts


def _rounded_down(value: float) -> float:
    """To three digits; the component of just this size stays."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit * (1 + 1e-9)) * unit:.3g}")


def _dice(label: np.ndarray, reference: np.ndarray, targets: SegmentationTargets) -> list[float]:
    return [1.0 if value is None else value for value in dice(label, reference, targets).values()]


def _means(scores: np.ndarray, targets: SegmentationTargets) -> Row:
    return dict(zip(targets.names, scores.mean(0).tolist(), strict=True))


def _parts(targets: SegmentationTargets) -> dict[str, tuple[int, ...]]:
    """Classes or regions, and the whole foreground where none of them is all of it; with their label
    values.
    """
    parts = targets.by_name
    whole = tuple(sorted({value for values in targets.values for value in values}))
    return parts if any(set(values) == set(whole) for values in targets.values) else {**parts, WHOLE: whole}
