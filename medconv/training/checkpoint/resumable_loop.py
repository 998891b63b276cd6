"""A training loop that can be stopped and resumed between any two optimizer steps, with identical results.

The position of a run is one number: its global batches so far. It determines the next samples
(`SampleOrder`), the epoch, and the random numbers, since the generators are seeded for each batch. So a
checkpoint needs no random state, and a resumed run computes exactly what an uninterrupted one computes.
"""

from __future__ import annotations

import random
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.plugins.environments import SLURMEnvironment

from medconv.training.checkpoint.writer import CheckpointWriter
from medconv.training.distributed.strategy import StopSync
from medconv.utils.signals import RunInterrupted, StopRequest

# Methods that this loop overrides. They are internal to Lightning: if it renamed one, the override would
# silently never be called.
_OVERRIDDEN = (
    "done",
    "update_restart_stage",
    "reset",
    "advance",
    "on_advance_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "_should_check_val_fx",
    "_broadcast_sigterm_tensor",
    "_should_accumulate",
)


class ResumableEpochLoop(_TrainingEpochLoop):
    """Replaces Lightning's loop, which cannot resume exactly between any two steps.

    Checkpoints are written at the start of a batch, once everything that belongs to the last one is done
    (validation, logging, schedules, end of epoch) and no gradients are being accumulated; or, with `owed`,
    before a validation that is due.
    Args: checkpoints: writes them. stop_request: signals that came. stop_sync: shares them with all ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: CheckpointWriter,
        stop_request: StopRequest,
        stop_sync: StopSync,
        **bounds: Any,
    ) -> None:
        self._max_steps, self._owed = -1, False  # owed: a validation is due but not done
        super().__init__(trainer, **bounds)
        self._checkpoints, self._stop_request, self._stop_sync = checkpoints, stop_request, stop_sync
        self._first = 0  # the batch at which the epoch begins
        self._stop, self._due = 0, False  # known to all ranks: the signal to stop for; whether to save

    @property
    def max_steps(self) -> int:
        """No limit (-1) while the validation of the last step is owed."""
        return -1 if self._owed and self.global_step >= self._max_steps else self._max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._max_steps = steps

    @property
    def done(self) -> bool:
        return not self._owed and super().done

    @property
    def owed(self) -> bool:
        """Whether a validation that was due when the checkpoint was written has not been done yet."""
        return self._owed

    def update_restart_stage(self) -> None:
        """Called before the first epoch. Sets all counters to the batch at which the run resumes."""
        self._restart_stage = RestartStage.NONE
        if not self._loaded_from_state_dict:
            return
        total: Any = self.batch_progress.total
        in_epoch = int(self.trainer.num_training_batches)
        epoch, first = divmod(total.processed, in_epoch)
        if self._owed and first == 0:
            epoch, first = epoch - 1, in_epoch
        fit = self.trainer.fit_loop
        for tracker in (fit.epoch_progress.total, fit.epoch_progress.current):
            tracker.ready = tracker.started = tracker.processed = tracker.completed = epoch  # type: ignore[attr-defined]
        fit._restarting = self._restarting = self.val_loop._restarting = False
        fit.reset_restart_stage()
        self._first = first

    def reset(self) -> None:
        super().reset()
        first, self._first = self._first, 0
        tracker: Any = self.batch_progress.current
        tracker.ready = tracker.started = tracker.processed = tracker.completed = first
        self.batch_progress.is_last_batch = first == self.trainer.num_training_batches
        for loader in self.trainer.fit_loop._combined_loader.flattened:  # type: ignore[union-attr]
            loader.begin_at(first)

    def advance(self, data_fetcher: Any) -> None:
        if self._owed:
            return  # the validation comes first
        self._between_steps()
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        try:
            super().on_advance_end(data_fetcher)
        except RunInterrupted:  # during validation
            self._owed = True
            if not self._should_accumulate():
                self._checkpoints.save_now(self.trainer)
            raise
        self._owed = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), "owed": self._owed}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._owed = state_dict.get("owed", False)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        due = self._owed or super()._should_check_val_fx(data_fetcher)
        by_time = getattr(self.trainer, "_val_check_time_interval", None) is not None  # by each rank's clock
        return bool(self.trainer.strategy.broadcast(due)) if by_time else due

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning does this in every batch; `StopSync` does it every few batches."""

    def _between_steps(self) -> None:
        """Save a checkpoint if one is due, and stop if requested, unless gradients are being accumulated."""
        stop, due = self._stop_sync.agree(self._stop or self._stop_request.number, self._checkpoints.due)
        # remembered, since most agreements may fall between accumulated batches
        self._stop, self._due = self._stop or stop, self._due or due
        if self.batch_progress.current.ready % self.trainer.accumulate_grad_batches:
            return
        self._checkpoints.io.check()
        if self._stop:
            self._checkpoints.save_now(self.trainer)
            raise RunInterrupted(self._stop, agreed=True)
        if self._due or self._checkpoints.validated:
            self._checkpoints.save(self.trainer)
            self._due = False


class PerStepSeeding(Callback):
    """Seeds the random numbers of each step, such as dropout's, from seed, rank and batch number.

    It runs before other callbacks and after the batch is loaded, since loaders draw random numbers too.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.fit_loop.total_batch_idx
        words = np.random.SeedSequence([self._seed, 2, trainer.global_rank, number]).generate_state(2)
        torch.manual_seed(int(words[0]))
        np.random.seed(words[1])
        random.seed(int(words[1]))


class StopDuringValidation(Callback):
    """Aborts a validation on all ranks if the run is told to stop; the resumed run repeats it.

    The loaders end early (`DataModule.stopped`); then all ranks stop before results are gathered. It is the
    last callback, since others restore the training's weights first.
    """

    def __init__(self, stop_request: StopRequest, stop_sync: StopSync) -> None:
        self._stop_request, self._stop_sync = stop_request, stop_sync

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_request.heard = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number, _ = self._stop_sync.now(self._stop_request.number, False)
        if number:
            raise RunInterrupted(number, agreed=True)


def install(
    trainer: Trainer, checkpoints: CheckpointWriter, stop_request: StopRequest, stop_sync: StopSync
) -> None:
    """Put the loop into a trainer. Signals and Slurm's requeue are then handled by medconv."""
    needed: list[tuple[Any, str]] = [(_TrainingEpochLoop, name) for name in _OVERRIDDEN]
    needed += [(trainer._signal_connector, "register_signal_handlers"), (trainer.fit_loop, "epoch_loop")]
    for owner, name in needed:
        if not hasattr(owner, name):
            raise ValueError(
                f"lightning {version('lightning')} has no {name}, which medconv needs; install one below 2.7"
            )
    old = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = ResumableEpochLoop(
        trainer, checkpoints, stop_request, stop_sync, min_steps=old.min_steps, max_steps=old.max_steps
    )
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False  # it would write a checkpoint from within the signal's handler
