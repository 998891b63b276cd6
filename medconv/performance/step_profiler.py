"""Step profiler: the time of each phase of a step; always on, cheap, never synchronises with the device.

Lightning's hooks and the loader set marks that divide a step into phases. On a CPU a mark is a time; on CUDA
it is an event in the stream, which is read after the device has passed it.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer

# in the order of a step
PHASES = (
    "data_wait",
    "copy_to_device",
    "augmentation",
    "forward",  # the network and the loss
    "backward",
    "optimizer",
    "logging",  # callbacks, loggers and Lightning itself
    "validation",
)


@dataclass(frozen=True)
class _Mark:
    """The end of a phase.

    Args:
        phase: the name of the one that ends.
        time: of the clock: seconds, or an event of CUDA.
    """

    phase: str
    time: Any


class StepProfiler(Callback):
    """Share of training time per phase, in TensorBoard as `perf/…_share`, and totals for the summary.

    Checkpoints hold the totals, so a resumed run counts all its steps, except those after its checkpoint.

    Args:
        ranges: also name the phases for torch.profiler and, on CUDA, as NVTX ranges.
        started_at: start of the run in this process by `time.monotonic`; None: now.
    """

    def __init__(self, ranges: bool = False, started_at: float | None = None) -> None:
        self.seconds: Counter[str] = Counter()
        self.samples = 0
        self._started_at = time.monotonic() if started_at is None else started_at
        self._earlier_seconds = 0.0  # of the run, before this process
        self._ranges = ranges
        self._open_range: ExitStack | None = None
        self._clock: Any = None
        # samples and marks of steps that are not added up yet
        self._pending: deque[tuple[int, list[_Mark]]] = deque()
        self._marks: list[_Mark] = []  # of this step; the first is the end of the step before
        # samples and seconds when they were last logged
        self._logged: tuple[int, Mapping[str, float]] = (0, Counter())

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": dict(self.seconds), "samples": self.samples, "wall_seconds": self.wall_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = Counter(state["seconds"])
        self.samples = state["samples"]
        self._earlier_seconds = state["wall_seconds"]
        self._logged = (self.samples, self.seconds.copy())

    @property
    def wall_seconds(self) -> float:
        """From the start of the run to now, preprocessing included."""
        return self._earlier_seconds + time.monotonic() - self._started_at

    @property
    def fit_seconds(self) -> float:
        """Seconds of all steps and validations, which `trainer.max_time` counts."""
        return sum(self.seconds.values())

    @property
    def training_seconds(self) -> float:
        """Seconds of all steps, without validation."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "validation")

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.training_seconds if self.training_seconds else None

    @property
    def data_wait_share(self) -> float | None:
        return self.shares().get("data_wait")

    def shares(self) -> dict[str, float]:
        """Phase to its share of all time, validation included."""
        total = self.fit_seconds
        if not total:
            return {}
        return {phase: self.seconds[phase] / total for phase in PHASES}

    def mark(self, phase: str) -> None:
        """End a phase: the time since the last mark belongs to it. Before and after training none counts."""
        if self._clock is not None:
            self._marks.append(_Mark(phase, self._clock.now()))
            if self._ranges:
                self._name_next(phase)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = _CudaClock() if trainer.strategy.root_device.type == "cuda" else _Clock()
        self._marks = [_Mark("", self._clock.now())]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.mark("augmentation")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self.mark("forward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mark("backward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.mark("optimizer")
        self._queue(len(batch["image"]) * trainer.world_size)
        self._settle()
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._log(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mark("logging")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.mark("validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mark("logging")
        self._queue(0)
        self._clock.wait()
        self._settle()
        self._clock = None
        self._name_next(None)

    def _queue(self, samples: int) -> None:
        """End a step."""
        self._pending.append((samples, self._marks))
        # the end of this step is where the next one begins
        self._marks = self._marks[-1:]

    def _settle(self) -> None:
        """Add up the steps that the device has finished."""
        while self._pending:
            samples, marks = self._pending[0]
            # asking does not wait for the device; the step is added up after a later one
            if not self._clock.passed(marks[-1].time):
                return
            self._pending.popleft()
            self.samples += samples
            for before, mark in pairwise(marks):
                self.seconds[mark.phase] += self._clock.between(before.time, mark.time)

    def _log(self, pl_module: LightningModule) -> None:
        """Log what has been added up since the last time."""
        logged_samples, logged_seconds = self._logged
        seconds = {phase: self.seconds[phase] - logged_seconds[phase] for phase in PHASES}
        total = sum(seconds.values())
        training = total - seconds["validation"]
        if total > seconds["validation"]:
            speed = (self.samples - logged_samples) / training
            pl_module.log("perf/samples_per_second", speed, rank_zero_only=True)
            for phase, value in seconds.items():
                pl_module.log(f"perf/{phase}_share", value / total, rank_zero_only=True)
        self._logged = (self.samples, self.seconds.copy())

    def _name_next(self, ended: str | None) -> None:
        """Close the present range of the profilers and open the next."""
        if self._open_range is not None:
            self._open_range.close()
            self._open_range = None
        if ended:
            name = f"medconv/{_phase_after(ended)}"
            self._open_range = ExitStack()
            self._open_range.enter_context(torch.profiler.record_function(name))
            if isinstance(self._clock, _CudaClock):
                self._open_range.enter_context(torch.cuda.nvtx.range(name))


def _phase_after(ended: str) -> str:
    """The phase that begins when another ends; validation interrupts the logging of a step."""
    if ended == "validation":
        return "logging"
    step_phases = PHASES[: PHASES.index("validation")]
    return step_phases[(step_phases.index(ended) + 1) % len(step_phases)]


class _Clock:
    """Clock of a CPU, where all work is done when a call returns."""

    now = staticmethod(time.perf_counter)

    def passed(self, mark: float) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is pending on a CPU."""

    def between(self, before: float, after: float) -> float:
        return after - before


class _CudaClock:
    """Clock of the current CUDA stream: a mark is passed when the device has finished all work before it."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait(self) -> None:
        torch.cuda.synchronize()

    def between(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        return float(before.elapsed_time(after)) / 1000
