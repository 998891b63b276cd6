"""`scheduler=plateau`: the learning rate is lowered after validations without progress."""

import logging
import math
from typing import Any

from torch.optim import Optimizer

from medconv.training.optim.lr_schedulers import ProgressSchedule

log = logging.getLogger(__name__)


class PlateauSchedule(ProgressSchedule):
    """Lower after `patience` validations without progress, like torch's ReduceLROnPlateau.

    The same behaviour in torch has a `patience` smaller by one.

    Args:
        optimizer: whose learning rates are the base.
        warmup_steps: as in `ProgressSchedule`.
        monitor: name of the metric.
        mode: `max` if more is better, else `min`.
        patience: number of validations.
        min_delta: more than this beyond the best value is progress.
        factor: multiplies the learning rate.
        min_factor: lower limit, as a share of the base learning rate.
    Raises:
        ValueError: values out of range.
    """

    needs_validation = True

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int = 0,
        monitor: str = "val/dice",
        mode: str = "max",
        patience: int = 5,
        min_delta: float = 0.0,
        factor: float = 0.5,
        min_factor: float = 1e-3,
    ) -> None:
        check_patience(patience, min_delta, mode)
        if not 0 < factor < 1:
            raise ValueError(f"factor must lie between 0 and 1, got {factor}")
        if not 0 <= min_factor <= 1:
            raise ValueError(f"min_factor must be a share of the learning rate, 0 to 1, got {min_factor}")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.factor = factor
        self.min_factor = min_factor
        self.sign = 1 if mode == "max" else -1
        self.level = 1.0  # of the learning rate, as a share of the base
        self.best = -math.inf  # times sign, so that more is better
        self.waited = 0  # validations since the best one
        super().__init__(optimizer, lambda progress: self.level, warmup_steps)

    def validated(self, value: float) -> None:
        """Count a validation; a new learning rate applies from the next step on. NaN is no progress."""
        signed_value = self.sign * value
        if signed_value > self.best + self.min_delta:
            self.best = signed_value
            self.waited = 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            before = self.level
            self.level = max(self.min_factor, before * self.factor)
            self.waited = 0
            self._apply()
            if self.level < before:
                log.info("step %d: learning rate lowered to %.3g times the base", self.last_epoch, self.level)

    def forget_scores(self) -> None:
        self.best = -math.inf
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        keys = ("level", "best", "waited", "monitor", "sign")
        return {**super().state_dict(), **{key: getattr(self, key) for key in keys}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps no count of another metric; the state may be another schedule's."""
        saved_metric = (state_dict.get("monitor"), state_dict.get("sign"))
        if saved_metric != (self.monitor, self.sign):
            of_metric = ("best", "waited", "monitor", "sign")
            state_dict = {key: value for key, value in state_dict.items() if key not in of_metric}
        super().load_state_dict(state_dict)


def check_patience(patience: int, min_delta: float, mode: str) -> None:
    """Raises: ValueError: values out of range, of a plateau or of early stopping."""
    if type(patience) is not int or patience < 1:
        raise ValueError(f"patience must be a whole number of validations, 1 or more, got {patience}")
    if not 0 <= min_delta < math.inf:
        raise ValueError(f"min_delta must be 0 or more, got {min_delta}")
    if mode not in ("max", "min"):
        raise ValueError(f"mode must be max or min, got {mode}")
