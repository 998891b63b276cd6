"""Writes checkpoints, `last.ckpt`, `previous.ckpt` and `best.ckpt`, atomically and in the background."""

import copy
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from medconv.targets.scores import DICE, MonitoredMetric
from medconv.training.checkpoint import BEST, LAST, LOG_SIZES, PREVIOUS
from medconv.training.log_files import measure_logs
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import flush_folder, replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints in a thread, from a copy of the tensors: to a temporary file, which is then renamed.

    torch's archive holds a CRC-32 of each of its parts, which `checkpoint_io.read` checks. The earlier
    `last.ckpt` becomes `previous.ckpt`. An error in the thread is raised by the next call.
    """

    def __init__(self) -> None:
        self._holds_back = False
        self._held: tuple[dict[str, Any], Path, Path | None] | None = None  # as the arguments of `_write`
        self._second_name: Path | None = None  # of the next checkpoint
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.wait()  # only one copy in memory at a time
        content = copied(checkpoint)
        second_name = self._second_name
        self._second_name = None
        if self._holds_back:
            self._held = (content, Path(path), second_name)
        else:
            self._submit(_write, content, Path(path), second_name)

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """A checkpoint that is saved inside waits in memory until `write_held`."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def link_next(self, path: Path) -> None:
        """Gives the next checkpoint a second name, by a hard link; FSDP passes no `storage_options`.

        It is linked first: a run that is killed in between resumes from the previous checkpoint, and finds
        the same best one again.
        """
        self._second_name = path

    def check(self) -> None:
        """Raises: the error of a write that has ended."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def wait(self) -> None:
        pending = self._pending
        self._pending = []  # an error is raised once
        for future in pending:
            future.result()

    def write_held(self, log_sizes: dict[str, int]) -> None:
        """Args: log_sizes: as from `measure_logs`."""
        if self._held is None:
            return
        content, path, second_name = self._held
        self._held = None
        _write({**content, LOG_SIZES: log_sizes}, path, second_name)

    def teardown(self) -> None:
        """Not the place for `write_held`: not every strategy of Lightning calls it."""
        self._thread.shutdown(wait=True)

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._pending.append(self._thread.submit(work, *arguments))


class CheckpointWriter(Callback):
    """Decides when a checkpoint is due: after each validation, and every few minutes.

    `ResumableEpochLoop` calls `save`, since the position of a run is one number only between two optimizer
    steps, or before a validation. All ranks call it, rank 0 writes.

    Args:
        folder: of the checkpoints, in the run's folder.
        io: writes them.
        every: seconds between checkpoints.
    """

    def __init__(self, folder: Path, io: AtomicCheckpointIO, every: float) -> None:
        self.folder = folder
        self.io = io
        self.every = every
        self._ranking = Ranking()
        # Whether there was a validation since the last checkpoint; the same on all ranks
        self.validated = False
        self._is_best = False  # the next checkpoint
        self._saved_at = time.monotonic()
        self._saved_batches = -1
        self._sizes_before_validation: dict[str, int] = {}  # of the logs, at the last one

    def state_dict(self) -> dict[str, Any]:
        return self._ranking.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ranking.load_state_dict(state_dict)

    @property
    def best(self) -> float | None:
        """Value of the monitored metric at the best checkpoint; None: there was no validation."""
        return self._ranking.best

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_saved(trainer)  # there is nothing new to save
        # A run resumed from another folder has no best checkpoint here
        if not (self.folder / BEST).is_file():
            self._ranking = Ranking()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            self._sizes_before_validation = self._measured(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.validated = True  # the loop saves at the start of the next batch, or at the end of training
        monitored: MonitoredMetric = getattr(pl_module, "monitored", DICE)
        score = float(trainer.callback_metrics.get(monitored.name, math.nan))
        if self._ranking.add(score, monitored):
            self._is_best = True
        best = self._ranking.best
        if best is not None and math.isfinite(best):
            # As Lightning numbers the other scores
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics({monitored.best_name: best}, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes the state before weight averaging replaces the weights, so this callback comes first.

        It is written once all callbacks have ended the training: if the run is killed before, it resumes from
        the checkpoint before it, and what they log at the end is logged then.
        """
        with self.io.holding_back():
            self._save_if_new(trainer)
        self.io.wait()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.io.write_held(self._log_sizes(trainer))
        trainer.strategy.barrier("checkpoint")  # all ranks may read it, to test the best one

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not trainer.is_global_zero:
            return
        checkpoint[LOG_SIZES] = self._log_sizes(trainer)

    @property
    def due(self) -> bool:
        """By this rank's clock."""
        return time.monotonic() - self._saved_at >= self.every

    def save(self, trainer: Trainer) -> None:
        if self._is_best:
            self.io.link_next(self.folder / BEST)
        # Without the optimizer's state it could not be resumed
        trainer.save_checkpoint(self.folder / LAST, weights_only=False)
        self.validated = False
        self._is_best = False
        self._note_saved(trainer)

    def save_now(self, trainer: Trainer) -> None:
        """Save before the run stops, unless the last checkpoint is up to date; wait until it is written."""
        self._save_if_new(trainer)
        self.io.wait()
        trainer.strategy.barrier("checkpoint")

    def _save_if_new(self, trainer: Trainer) -> None:
        if self.validated or _batches(trainer) != self._saved_batches:
            self.save(trainer)

    def _note_saved(self, trainer: Trainer) -> None:
        self._saved_at = time.monotonic()
        self._saved_batches = _batches(trainer)

    def _log_sizes(self, trainer: Trainer) -> dict[str, int]:
        """Sizes of the logs, to which a run that resumes cuts them."""
        # An aborted validation will be repeated, so its log entries are cut off
        validation_aborted = getattr(trainer.fit_loop.epoch_loop, "owed", False)
        return self._sizes_before_validation if validation_aborted else self._measured(trainer)

    def _measured(self, trainer: Trainer) -> dict[str, int]:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()
        return measure_logs(self.folder.parent)


def _batches(trainer: Trainer) -> int:
    """Global batches of the run so far: its position."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def copied(value: Any) -> Any:
    """A copy with its tensors on the CPU, so that training can go on while it is written."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        # Keeps class and attributes, such as the versions of a state dict
        duplicate = copy.copy(value)
        for key, item in value.items():
            duplicate[key] = copied(item)
        return duplicate
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def _write(content: dict[str, Any], path: Path, second_name: Path | None) -> None:
    """Raises: OSError: names the path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            with partial.open("wb") as file:
                checkpoint_io.save(content, file)
                file.flush()
                os.fsync(file.fileno())  # before it is renamed
            if path.name == LAST and path.is_file():
                _link(path, path.with_name(PREVIOUS))
            if second_name is not None:
                _link(partial, second_name)
        flush_folder(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise


def _link(path: Path, second_name: Path) -> None:
    """Gives a file a second name, which may replace another file."""
    if second_name.is_file() and second_name.samefile(path):
        # Renaming a hard link to another of the same file does nothing
        return
    with replacing(second_name, durable=True) as partial:
        partial.unlink(missing_ok=True)
        try:
            os.link(path, partial)
        except OSError:  # some file systems have no hard links
            shutil.copyfile(path, partial)


@dataclass
class Ranking:
    """Ranks validations by the monitored metric, or by its running mean (`MonitoredMetric.smoothing`).

    Args:
        best: value of the metric at the best validation; None: there was no validation.
    """

    best: float | None = None
    # Running means, in which larger is better: the last one, and that of the best validation
    _mean: float | None = None
    _best_mean: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "mean": self._mean, "best_mean": self._best_mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self._mean = state_dict["mean"]
        self._best_mean = state_dict["best_mean"]

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
        if self._best_mean is not None and mean <= self._best_mean:
            return False
        self.best = value
        self._best_mean = mean
        return True
