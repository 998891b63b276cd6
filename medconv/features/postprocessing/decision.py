"""Which post-processing steps are kept, why, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medconv.features.postprocessing.steps import FOREGROUND, Step
from medconv.metrics.dice import ClassScores

LEVEL = 0.05  # significance level of a round's tests together


@dataclass(frozen=True)
class Verdict:
    """The effect of a step.

    Args:
        step: the step.
        cases: number of cases.
        changed: number of cases that the step changes.
        before: Dice of its class without it; of the whole foreground, the mean over classes.
        after: the same with it.
        low: lower end of the 95 % interval of the difference; None: undefined.
        high: upper end.
        p: corrected for the number of candidates.
        gain: in mean Dice over all classes.
        worse: classes whose mean Dice falls.
        accepted: whether the step is kept.
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
        is_better = self.difference > 0 and (self.low or 0) > 0
        return is_better and self.p < LEVEL and not self.worse

    @property
    def reason(self) -> str:
        if self.accepted:
            return "kept"
        if not self.changed:
            return "no: changes nothing"
        if self.difference <= 0:
            return "no: does not help"
        if self.worse:
            return f"no: harms {', '.join(self.worse)}"
        return f"no: could be chance (p = {self.p:.2g})"

    def plain(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "changed": self.changed,
            "before": self.before,
            "after": self.after,
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "p": self.p,
        }


@dataclass(frozen=True)
class Decision:
    """The steps to keep.

    Args:
        accepted: in the order in which they are applied.
        rejected: each tried on top of the accepted ones.
        before: mean Dice per class without steps.
        after: mean Dice per class with the accepted ones.
    """

    accepted: tuple[Verdict, ...]
    rejected: tuple[Verdict, ...]
    before: ClassScores
    after: ClassScores


def table(decision: Decision) -> str:
    """A line for each accepted step, in their order, then for each rejected one."""
    template = "{:<32} {:<20} {:>8} {:>7} {:>7} {:>8}  {:<19} {}"
    titles = ("operation", "label", "changed", "before", "after", "change", "95 % interval", "kept")
    lines = [template.format(*titles)]
    for verdict in (*decision.accepted, *decision.rejected):
        # undefined for a single case
        has_interval = verdict.low is not None
        cells = (
            str(verdict.step),
            "whole foreground" if verdict.step.label == FOREGROUND else verdict.step.label,
            str(verdict.changed),
            f"{verdict.before:.4f}",
            f"{verdict.after:.4f}",
            f"{verdict.difference:+.4f}",
            f"{verdict.low:+.4f} to {verdict.high:+.4f}" if has_interval else "-",
            verdict.reason,
        )
        lines.append(template.format(*cells))
    return "\n".join(lines)
