"""What a run is judged by: which number of its validations, and whether more is better. All that compares
asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.utils import get_object


@dataclass(frozen=True)
class MonitoredMetric:
    """A task's class has one as its `goal`. Args: name: as it is logged and written. words: for people."""

    name: str
    words: str
    higher_is_better: bool = True

    @property
    def mode(self) -> str:
        """As `stopping` and `scheduler` call it."""
        return "max" if self.higher_is_better else "min"

    def quality(self, value: float) -> float:
        """What is larger for the better of two values."""
        return value if self.higher_is_better else -value

    def plain(self) -> dict[str, str]:
        return {"name": self.name, "words": self.words, "mode": self.mode}


DICE = MonitoredMetric("val/dice", "Dice")
AUC = MonitoredMetric("val/auc", "AUC")
MAE = MonitoredMetric("val/mae", "mean absolute error", higher_is_better=False)


def of_task(target: str) -> MonitoredMetric:
    """Of a task's class, by its dotted name; Dice where it does not say."""
    return getattr(get_object(target), "goal", DICE)


def of_summary(summary: Mapping[str, Any]) -> MonitoredMetric:
    """Of the run that wrote a `summary.json`; Dice where that does not say."""
    said = summary.get("score")
    if not isinstance(said, Mapping) or not all(
        isinstance(said.get(key), str) for key in ("name", "words", "mode")
    ):
        return DICE
    return MonitoredMetric(said["name"], said["words"], said["mode"] != "min")
