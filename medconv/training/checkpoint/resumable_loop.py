"""The loop over training batches, which can be left, and entered again, between any two optimizer steps.

Where a run stands is one number, of the global batches so far. It says which samples come next
(`data.patches.SampleOrder`),
which epoch it is, and what random numbers are drawn: their generators are seeded anew for each batch. So a
checkpoint holds no random state, and a run that goes on from one draws and computes what one that was never
stopped would have.
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

# What is Lightning's own, and no promise of it: where one of these has another name, ours would silently not
# be called.
_OF_THE_LOOP = (
    *(
        "done",
        "update_restart_stage",
        "reset",
        "advance",
        "on_advance_end",
        "on_save_checkpoint",
        "on_load_checkpoint",
    ),
    *("_should_check_val_fx", "_broadcast_sigterm_tensor", "_should_accumulate"),
)


class ResumableEpochLoop(_TrainingEpochLoop):
    """In place of Lightning's, which counts what was begun and what was done to find out where it was
    stopped.

    Checkpoints are made at the start of a batch, when all that the last one brought with it is done
    (validation, logging, schedules, the end of an epoch), and no gradients are accumulated; or, with `owed`,
    before a validation that is due.
    Args: keeper: makes the checkpoints. asked: what signals came.
    """

    def __init__(
        self,
        trainer: Trainer,
        keeper: CheckpointWriter,
        asked: StopRequest,
        agreement: StopSync,
        **bounds: Any,
    ) -> None:
        self._most, self._owed = -1, False  # max_steps; a validation is due but not done
        super().__init__(trainer, **bounds)
        self._keeper, self._asked, self._agreement = keeper, asked, agreement
        self._first = 0  # the batch to begin the epoch at
        self._stop, self._due = 0, False  # agreed on, until it is done: the signal to stop for; a checkpoint

    @property
    def max_steps(self) -> int:
        """None, while the last step is still to be validated."""
        return -1 if self._owed and self.global_step >= self._most else self._most

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._most = steps

    @property
    def done(self) -> bool:
        return not self._owed and super().done

    @property
    def owed(self) -> bool:
        """Whether a validation that was due when the checkpoint was made is still to be done."""
        return self._owed

    def update_restart_stage(self) -> None:
        """Called before the first epoch. The counters become what they are at the batch at which the run
        goes on.
        """
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
            return  # to the validation
        self._between_steps()
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        try:
            super().on_advance_end(data_fetcher)
        except RunInterrupted:  # while it validated
            self._owed = True
            if not self._should_accumulate():
                self._keeper.save_now(self.trainer)
            raise
        self._owed = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), "owed": self._owed}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._owed = state_dict.get("owed", False)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        due = self._owed or super()._should_check_val_fx(data_fetcher)
        by_time = getattr(self.trainer, "_val_check_time_interval", None) is not None  # of each rank's clock
        return bool(self.trainer.strategy.broadcast(due)) if by_time else due

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning would do this in every batch; `StopSync` does it now and then."""

    def _between_steps(self) -> None:
        """Make a checkpoint if one is due, and stop if that was asked for, unless gradients are being
        accumulated.
        """
        stop, due = self._agreement.agree(self._stop or self._asked.number, self._keeper.due)
        self._stop, self._due = (
            self._stop or stop,
            self._due or due,
        )  # most agreements may fall between gradients
        if self.batch_progress.current.ready % self.trainer.accumulate_grad_batches:
            return
        self._keeper.io.check()
        if self._stop:
            self._keeper.save_now(self.trainer)
            raise RunInterrupted(self._stop, agreed=True)
        if self._due or self._keeper.validated:
            self._keeper.save(self.trainer)
            self._due = False


class PerStepSeeding(Callback):
    """Random numbers of the training process, of dropout and the like, are a function of seed, rank and batch
    number.

    First of the callbacks, and once the batch is there: loaders draw a number where an iteration begins.
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
    """A validation during which the run is told to stop is given up, on all ranks, and repeated when the run
    goes on.

    The loaders end (`DataModule.stopped`); then, before results are gathered, all ranks leave. Last of the
    callbacks, since those before put the training's own weights back.
    """

    def __init__(self, asked: StopRequest, agreement: StopSync) -> None:
        self._asked, self._agreement = asked, agreement

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked.heard = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number, _ = self._agreement.now(self._asked.number, False)
        if number:
            raise RunInterrupted(number, agreed=True)


def install(trainer: Trainer, keeper: CheckpointWriter, asked: StopRequest, agreement: StopSync) -> None:
    """Put the loop into a trainer; signals are then ours, and Slurm's requeue, too."""
    known = [(_TrainingEpochLoop, name) for name in _OF_THE_LOOP]
    for owner, name in [
        *known,
        (trainer._signal_connector, "register_signal_handlers"),
        (trainer.fit_loop, "epoch_loop"),
    ]:
        if not hasattr(owner, name):
            raise ValueError(
                f"lightning {version('lightning')} has no {name}, which medconv builds on; take one below 2.7"
            )
    old = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = ResumableEpochLoop(
        trainer, keeper, asked, agreement, min_steps=old.min_steps, max_steps=old.max_steps
    )
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False  # it would write a checkpoint from within the signal's handler
