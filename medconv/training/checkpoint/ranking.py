"""Which validation of a run is the best so far."""

import math
from typing import Any

from medconv.targets.monitor import MonitoredMetric


class Ranking:
    """Ranks validations by the monitored metric, or by its running mean (`MonitoredMetric.smoothing`).

    Attributes:
        best: value of the metric at the best validation; None: there was no validation.
    """

    def __init__(self) -> None:
        self.best: float | None = None
        # Running means, in which larger is better: the last one, and that of the best validation
        self._mean: float | None = None
        self._best_mean: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "mean": self._mean, "best_mean": self._best_mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        # Earlier versions had no means
        self._mean = state_dict.get("mean")
        self._best_mean = state_dict.get("best_mean")

    def forget_best(self) -> None:
        """The next validation is the first one."""
        self.best = None
        self._mean = None
        self._best_mean = None

    def add(self, value: float, monitored: MonitoredMetric) -> bool:
        """Whether a validation is the best so far. Args: value: of the metric; NaN is the worst."""
        if math.isnan(value):
            # The worst value, in the metric's direction
            value = monitored.quality(-math.inf)
        quality = monitored.quality(value)
        mean = quality
        if math.isfinite(quality):
            if self._mean is not None:
                mean = monitored.smoothing * self._mean + (1 - monitored.smoothing) * quality
            self._mean = mean
        if self._best_mean is None and self.best is not None:
            self._best_mean = monitored.quality(self.best)
        if self._best_mean is not None and mean <= self._best_mean:
            return False
        self.best = value
        self._best_mean = mean
        return True
