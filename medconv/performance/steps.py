"""Where a step's time goes: samples a second, and the share of the time that waits for data."""

from __future__ import annotations

import time
from typing import Any

from lightning import Callback, LightningModule, Trainer


class StepTimer(Callback):
    """Logs `perf/samples_per_second` and `perf/data_wait_share`; keeps their totals for the summary.

    The wait is the time between the end of one batch and the start of the next, less validation. The first batch of an
    epoch counts as well: it is where a slow start of the workers shows.
    """

    def __init__(self) -> None:
        self.samples, self.seconds, self.wait = 0, 0.0, 0.0
        self._mark: float | None = None
        self._validating = 0.0
        self._recent = (0, 0.0, 0.0)

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None

    @property
    def data_wait_share(self) -> float | None:
        return self.wait / self.seconds if self.seconds else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._mark is not None
        now = time.perf_counter()
        self.wait += now - self._mark
        self.seconds += now - self._mark
        self._mark = now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._mark is not None
        now = time.perf_counter()
        self.seconds += now - self._mark
        self.samples += len(batch["image"]) * trainer.world_size
        self._mark = now
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._mark is not None:
            self._mark += time.perf_counter() - self._validating

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        samples, seconds, wait = self._recent
        span = self.seconds - seconds
        if span > 0:
            pl_module.log("perf/samples_per_second", (self.samples - samples) / span, rank_zero_only=True)
            pl_module.log("perf/data_wait_share", (self.wait - wait) / span, rank_zero_only=True)
        self._recent = (self.samples, self.seconds, self.wait)
