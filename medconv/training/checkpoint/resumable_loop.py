"""A training loop that can be stopped and resumed between any two optimizer steps, with identical results.

The position of a run is one number: its global batches so far. It determines the next samples
(`SampleOrder`), the epoch, and the random numbers, since the generators are seeded for each batch. So a
checkpoint needs no random state, and a resumed run computes exactly what an uninterrupted one computes.
"""

import random
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from medconv.training.checkpoint.writer import CheckpointWriter
from medconv.training.distributed.strategy import StopSync
from medconv.utils.signals import RunInterrupted


class ResumableEpochLoop(_TrainingEpochLoop):
    """Replaces Lightning's loop, which cannot resume exactly between any two steps.

    Checkpoints are written at the start of a batch, once everything that belongs to the last one is done
    (validation, logging, schedules, end of epoch) and no gradients are being accumulated; or, with `owed`,
    before a validation that is due.
    Args: checkpoints: writes them. stops: shares stop signals with all ranks.
    """

    def __init__(
        self, trainer: Trainer, checkpoints: CheckpointWriter, stops: StopSync, **bounds: Any
    ) -> None:
        self._max_steps, self._owed = -1, False  # owed: a validation is due but not done
        super().__init__(trainer, **bounds)
        self._checkpoints, self._stops = checkpoints, stops
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
        if Path(str(self.trainer.ckpt_path)).resolve().parent != self._checkpoints.folder.resolve():
            _check_not_finished(self.trainer, epoch, in_epoch)
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
        stop, due = self._stops.agree(self.trainer, self._checkpoints.due)
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


class ResumableTrainer(Trainer):
    """Lightning's trainer with `ResumableEpochLoop`; signals and Slurm's requeue are left to medconv.

    Args: checkpoints, stops: for the loop. settings: of Lightning's trainer.
    Raises: ValueError: this version of Lightning lacks what is overridden.
    """

    def __init__(self, checkpoints: CheckpointWriter, stops: StopSync, **settings: Any) -> None:
        super().__init__(**settings)
        for owner, name in [*_overridden(), (self, "_signal_connector"), (self.fit_loop, "epoch_loop")]:
            if not hasattr(owner, name):
                needed = f"lightning {version('lightning')} has no {name}, which medconv needs"
                raise ValueError(f"{needed}; install one below 2.7")
        # Lightning makes both itself and has no argument for others
        self._signal_connector = _NoSignals(self)
        self.fit_loop.epoch_loop = ResumableEpochLoop(
            self, checkpoints, stops, min_steps=self.min_steps, max_steps=self.max_steps
        )


class _NoSignals(_SignalConnector):
    def register_signal_handlers(self) -> None:
        """Lightning's would write a checkpoint from within the handler of a signal."""


def _check_not_finished(trainer: Trainer, epoch: int, batches: int) -> None:
    """Epochs of another run may be longer. Args: epoch: of its checkpoint, in epochs of so many `batches`.

    Raises: ValueError: no epoch is left to train.
    """
    limit = -1 if trainer.max_epochs is None else trainer.max_epochs
    if 0 <= limit <= epoch:
        raise ValueError(
            f"run.resume={trainer.ckpt_path}: was trained for {epoch} epochs of {batches} batches, as "
            f"this run's have; trainer.max_epochs must be more than {epoch} to train on from it, got {limit}"
        )


def _overridden() -> Iterator[tuple[type, str]]:
    """Methods that are internal to Lightning: if it renamed one, ours would silently never be called."""
    own = ("max_steps", "owed", "_between_steps")
    for cls, parent in ((ResumableEpochLoop, _TrainingEpochLoop), (_NoSignals, _SignalConnector)):
        yield from ((parent, name) for name in vars(cls) if not name.startswith("__") and name not in own)
