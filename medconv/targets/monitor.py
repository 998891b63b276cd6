"""The monitored metric: which validation metric ranks checkpoints and runs, and in which direction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MonitoredMetric:
    """The attribute `monitored` of targets.

    Args:
        name: as logged, such as val/dice.
        words: for messages.
        higher_is_better: False for errors and losses.
        smoothing: checkpoints are ranked by a running mean over validations, with this share of the earlier
            ones; 0: by the last validation alone.
    """

    name: str
    words: str
    higher_is_better: bool = True
    smoothing: float = 0.0

    @property
    def best_name(self) -> str:
        """The best value so far, as logged: that of the best checkpoint."""
        return f"{self.name}_best"

    @property
    def mode(self) -> str:
        """`max` or `min`, as early stopping and schedulers call it."""
        return "max" if self.higher_is_better else "min"

    def quality(self, value: float) -> float:
        """The value with the sign that makes larger better."""
        return value if self.higher_is_better else -value

    def plain(self) -> dict[str, str]:
        return {"name": self.name, "words": self.words, "mode": self.mode}


DICE = MonitoredMetric("val/dice", "Dice")
# Unlike an AUC it sees calibration: a network that orders few validation cases well may give all one class.
CROSS_ENTROPY = MonitoredMetric(
    "val/cross_entropy",
    "cross-entropy",
    higher_is_better=False,
    # The best of many validations of few cases may be an early one by chance
    smoothing=0.3,
)
MAE = MonitoredMetric("val/mae", "mean absolute error", higher_is_better=False)


def metric_of_summary(summary: Mapping[str, Any]) -> MonitoredMetric:
    """The metric of the run that wrote a `summary.json`; Dice if it names none."""
    score = summary.get("score")
    if not isinstance(score, Mapping):
        return DICE
    name = score.get("name")
    words = score.get("words")
    mode = score.get("mode")
    if not (isinstance(name, str) and isinstance(words, str) and isinstance(mode, str)):
        return DICE
    return MonitoredMetric(name, words, higher_is_better=mode != "min")
