"""What follows the scores of validations: schedules that need them, and callbacks that end a run early."""

from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

from medconv.training.run_dir import is_inside


class FollowScores(Callback):
    """Passes the monitored metric of each validation to a schedule with `needs_validation`."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if begins_from_another_run(trainer):
            for schedule in _following(trainer):
                schedule.forget_scores()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        for schedule in _following(trainer):
            schedule.validated(monitored_value(trainer, schedule.monitor, type(schedule).__name__))


def _following(trainer: Trainer) -> list[Any]:
    schedules: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    return [schedule for schedule in schedules if getattr(schedule, "needs_validation", False)]


def begins_from_another_run(trainer: Trainer) -> bool:
    """Whether the checkpoint to go on from is of another run's folder, whose scores may be of other cases."""
    if trainer.ckpt_path is None:
        return False
    return not is_inside(Path(trainer.ckpt_path), Path(trainer.default_root_dir) / "checkpoints")


def stopped_early(trainer: Trainer) -> dict[str, Any] | None:
    """Step and reason of a callback that ended the run, by its `stop_reason`; None: none did."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        reason = getattr(callback, "stop_reason", None)
        if reason:
            return {"step": trainer.global_step, "reason": reason}
    return None


def monitored_value(trainer: Trainer, monitor: str, reader: str) -> float:
    """Rank 0's value, since some metrics exist on rank 0 only.

    Args:
        monitor: name of the metric.
        reader: the class with the argument `monitor`, for the message.
    Raises:
        ValueError: no such metric.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    value, names = trainer.strategy.broadcast((metrics.get(monitor), sorted(metrics)))
    if value is None:
        raise ValueError(f"{reader}: monitor={monitor}: no such metric; there are {', '.join(names)}")
    return float(value)
