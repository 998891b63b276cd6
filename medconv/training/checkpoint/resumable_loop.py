"""A training loop that can be stopped and resumed between any two optimizer steps, with identical results.

The position of a run is one number: its global batches so far (with accumulated gradients more than
optimizer steps). It determines the next samples
(`SampleOrder`), the epoch, and the random numbers, since the generators are seeded for each batch. So a
checkpoint needs no random state, and a resumed run computes exactly what an uninterrupted one computes.
"""

import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from medconv.data.loading.loader import SampleOrder
from medconv.training.checkpoint.writer import CheckpointWriter
from medconv.training.distributed import StopSync
from medconv.training.run_dir import is_inside
from medconv.utils.signals import RunInterrupted

# Names of `ResumableEpochLoop` that override nothing, or an attribute.
_NOT_LIGHTNINGS = ("max_steps", "owed", "_between_steps", "_is_accumulating", "_save_at_stop")
_STREAM = 2  # of the steps' random numbers, which seed other generators than the streams of `random_streams`


class ResumableEpochLoop(_TrainingEpochLoop):
    """Replaces Lightning's loop, which cannot resume exactly between any two steps.

    Checkpoints are written at the start of a batch, once everything that belongs to the last one is done
    (validation, logging, schedules, end of epoch) and no gradients are being accumulated; or, with `owed`,
    before a validation that is due.

    Args:
        trainer: whose loop it is.
        checkpoints: writes them.
        stops: shares stop signals with all ranks.
        postpones: whether a validation that is due is put off; rank 0's answer counts. None: never.
        bounds: `min_steps` and `max_steps`, as in Lightning's loop.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: CheckpointWriter,
        stops: StopSync,
        postpones: Callable[[Trainer], bool] | None,
        **bounds: Any,
    ) -> None:
        # Lightning's constructor sets `max_steps`, so these come first
        self._max_steps = -1
        self._owed = False  # a validation is due but not done
        self._validation_waits = False  # for the step of the batches that are being accumulated
        super().__init__(trainer, **bounds)
        self._checkpoints = checkpoints
        self._stops = stops
        self._postpones = postpones
        self._first_batch = 0  # at which the epoch begins
        # The same on all ranks:
        self._stop_signal = 0  # to stop for; 0: none
        self._save_is_due = False

    @property
    def max_steps(self) -> int:
        """No limit (-1) while the validation of the last step is owed."""
        validates_last_step = self._owed and self.global_step >= self._max_steps
        return -1 if validates_last_step else self._max_steps

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
        batches_per_epoch = int(self.trainer.num_training_batches)
        epoch, first_batch = divmod(total.processed, batches_per_epoch)
        # A validation at the end of an epoch belongs to that epoch
        if self._owed and first_batch == 0:
            epoch -= 1
            first_batch = batches_per_epoch
        if not is_inside(Path(str(self.trainer.ckpt_path)), self._checkpoints.folder):
            _check_not_finished(self.trainer, epoch, batches_per_epoch)
        fit_loop = self.trainer.fit_loop
        _set_counters(fit_loop.epoch_progress.total, epoch)
        _set_counters(fit_loop.epoch_progress.current, epoch)
        fit_loop._restarting = False
        self._restarting = False
        self.val_loop._restarting = False
        fit_loop.reset_restart_stage()
        self._first_batch = first_batch

    def reset(self) -> None:
        super().reset()
        first_batch = self._first_batch
        self._first_batch = 0
        _set_counters(self.batch_progress.current, first_batch)
        self.batch_progress.is_last_batch = first_batch == self.trainer.num_training_batches
        for loader in self.trainer.fit_loop._combined_loader.flattened:  # type: ignore[union-attr]
            if isinstance(loader.sampler, SampleOrder):  # Lightning replaces it for `trainer.overfit_batches`
                loader.sampler.first_batch = first_batch

    def advance(self, data_fetcher: Any) -> None:
        if self._owed:
            return  # the validation comes first
        self._between_steps()
        try:
            super().advance(data_fetcher)
        except RunInterrupted as stopped:  # no batch came
            self._save_at_stop(stopped, self._is_accumulating)
            raise

    def on_advance_end(self, data_fetcher: Any) -> None:
        try:
            super().on_advance_end(data_fetcher)
        except RunInterrupted as stopped:  # during validation
            self._owed = True
            self._save_at_stop(stopped, self._should_accumulate())
            raise
        self._owed = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), "owed": self._owed}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._owed = state_dict.get("owed", False)
        # Only a new run validates cases before training, as a check and to time them
        self.trainer.num_sanity_val_steps = 0

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        if self._owed:
            return True
        # Lightning would ask for `min_epochs` first, and this epoch is not counted yet
        if self.trainer.enable_validation and (
            _has_reached_a_limit(self.trainer) or _stops_now(self.trainer)
        ):
            return True
        due = super()._should_check_val_fx(data_fetcher)
        # By time, each rank decides by its own clock, so rank 0's decision counts
        if getattr(self.trainer, "_val_check_time_interval", None) is not None:
            due = bool(self.trainer.strategy.broadcast(due))
        due = due or self._validation_waits
        # After a step, so that the checkpoint that follows holds the weights that were validated
        self._validation_waits = due and self._should_accumulate()
        if self._validation_waits:
            return False
        if not due or self._postpones is None:
            return due
        return not self.trainer.strategy.broadcast(self._postpones(self.trainer))

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning does this in every batch; `StopSync` does it every few batches."""

    def _between_steps(self) -> None:
        """Save a checkpoint if one is due, and stop if requested, unless gradients are being accumulated."""
        signal, is_due = self._stops.agree(self.trainer, self._checkpoints.due)
        # Remembered, since most agreements may fall between accumulated batches
        self._stop_signal = self._stop_signal or signal
        self._save_is_due = self._save_is_due or is_due
        if self._is_accumulating:
            return
        self._checkpoints.io.check()
        if self._stop_signal:
            self._checkpoints.save_now(self.trainer)
            raise RunInterrupted(self._stop_signal, agreed=True)
        if self._save_is_due or self._checkpoints.validated:
            self._checkpoints.save(self.trainer)
            self._save_is_due = False

    @property
    def _is_accumulating(self) -> bool:
        """Whether gradients of batches before this one wait for their step."""
        return bool(self.batch_progress.current.ready % self.trainer.accumulate_grad_batches)

    def _save_at_stop(self, stopped: RunInterrupted, is_accumulating: bool) -> None:
        """All ranks write together: if one stops alone, the last checkpoint stays."""
        is_together = stopped.agreed or self.trainer.world_size == 1
        if is_together and not is_accumulating:
            self._checkpoints.save_now(self.trainer)


def _set_counters(tracker: Any, count: int) -> None:
    """Lightning counts batches and epochs that are ready, started, processed and completed."""
    tracker.ready = count
    tracker.started = count
    tracker.processed = count
    tracker.completed = count


class PerStepSeeding(Callback):
    """Seeds the random numbers of each step, such as dropout's, from seed, rank and batch number.

    It runs before other callbacks and after the batch is loaded, since loaders draw random numbers too.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batch_number = trainer.fit_loop.total_batch_idx
        entropy = [self._seed, _STREAM, trainer.global_rank, batch_number]
        torch_seed, python_seed = np.random.SeedSequence(entropy).generate_state(2)
        torch.manual_seed(int(torch_seed))
        np.random.seed(python_seed)
        random.seed(int(python_seed))


class ResumableTrainer(Trainer):
    """Lightning's trainer with `ResumableEpochLoop`; signals and Slurm's requeue are left to medconv.

    Raises:
        ValueError: this version of Lightning lacks what is overridden.
    """

    def __init__(
        self,
        checkpoints: CheckpointWriter,
        stops: StopSync,
        postpones: Callable[[Trainer], bool] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        needed: list[tuple[Any, str]] = []
        # Methods that are internal to Lightning: if it renamed one, ours would silently never be called
        for cls, parent in ((ResumableEpochLoop, _TrainingEpochLoop), (_NoSignals, _SignalConnector)):
            own = [name for name in vars(cls) if not name.startswith("__") and name not in _NOT_LIGHTNINGS]
            needed += [(parent, name) for name in own]
        for owner, name in [*needed, (self, "_signal_connector"), (self.fit_loop, "epoch_loop")]:
            if not hasattr(owner, name):
                raise ValueError(
                    f"lightning {version('lightning')} has no {name}, which medconv needs; install one "
                    "below 2.7"
                )
        # Lightning makes both itself and has no argument for others
        self._signal_connector = _NoSignals(self)
        self.fit_loop.epoch_loop = ResumableEpochLoop(
            self, checkpoints, stops, postpones, min_steps=self.min_steps, max_steps=self.max_steps
        )


class _NoSignals(_SignalConnector):
    def register_signal_handlers(self) -> None:
        """Lightning's would write a checkpoint from within the handler of a signal."""


def _check_not_finished(trainer: Trainer, epoch: int, batches_per_epoch: int) -> None:
    """Epochs of another run may be longer. Args: epoch: of its checkpoint, in epochs of this run.

    Raises: ValueError: no epoch is left to train.
    """
    limit = -1 if trainer.max_epochs is None else trainer.max_epochs
    if 0 <= limit <= epoch:
        raise ValueError(
            f"run.resume={trainer.ckpt_path}: was trained for {epoch} epochs of {batches_per_epoch} batches, "
            f"as this run's have; trainer.max_epochs must be more than {epoch} to continue from it, got "
            f"{limit}"
        )


class FinalValidation(Callback):
    """Makes Lightning validate after the last step, even in the middle of an epoch.

    Lightning alone stops at `max_steps` without a validation or a checkpoint.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_now(trainer):
            trainer.should_stop = True
            # Lightning has no other way to ask for a validation after this batch
            trainer.check_val_every_n_epoch = 1


def ends_now(trainer: Trainer) -> bool:
    """Whether a run ends after the present batch."""
    return trainer.should_stop or _has_reached_a_limit(trainer)


def _stops_now(trainer: Trainer) -> bool:
    """Whether a wish to stop is granted after this batch, with which the fewest epochs are done."""
    has_fewest_epochs = trainer.is_last_batch and trainer.current_epoch + 1 >= (trainer.min_epochs or 0)
    return trainer.should_stop and has_fewest_epochs and trainer.global_step >= (trainer.min_steps or 0)


def _has_reached_a_limit(trainer: Trainer) -> bool:
    """Whether the present batch is the last one by `max_epochs` or `max_steps`."""
    in_last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    ends_by_epochs = in_last_epoch and trainer.is_last_batch
    # Without a limit, max_steps is -1
    return ends_by_epochs or 0 <= trainer.max_steps <= trainer.global_step
