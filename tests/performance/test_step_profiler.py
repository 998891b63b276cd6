"""medconv/performance/step_profiler.py: phases of steps by a clock that the test moves."""

from types import SimpleNamespace

import pytest
import torch
from helpers import clock

from medconv.performance.step_profiler import PHASES, StepProfiler

# seconds of each phase of a step, in powers of two: their sums are exact
SECONDS = {
    "data_wait": 4.0,
    "copy_to_device": 0.5,
    "augmentation": 0.25,
    "forward": 1.0,
    "backward": 2.0,
    "optimizer": 0.25,
}


class Run:
    """A trainer's calls to its callbacks. Each step has 3 samples on each of 2 devices."""

    def __init__(self, profiler: StepProfiler, log_every_n_steps: int = 0) -> None:
        self.profiler, self.logged = profiler, list[dict[str, float]]()
        self.trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            world_size=2,
            global_step=0,
            log_every_n_steps=log_every_n_steps,
            sanity_checking=False,
        )
        self.task = SimpleNamespace(log=lambda name, value, **_: self.logged[-1].update({name: value}))
        profiler.on_fit_start(self.trainer, self.task)
        profiler.on_train_start(self.trainer, self.task)

    def step(self, **seconds: float) -> None:
        profiler, batch = self.profiler, {"image": torch.zeros(3)}
        ends = {
            "data_wait": lambda: profiler.mark("data_wait"),
            "copy_to_device": lambda: profiler.mark("copy_to_device"),
            "augmentation": lambda: profiler.on_train_batch_start(self.trainer, self.task, batch, 0),
            "forward": lambda: profiler.on_before_backward(self.trainer, self.task, None),
            "backward": lambda: profiler.on_after_backward(self.trainer, self.task),
            "optimizer": lambda: profiler.on_train_batch_end(self.trainer, self.task, None, batch, 0),
        }
        self.trainer.global_step += 1
        self.logged.append({})
        for phase, end in ends.items():
            clock.CLOCK.advance({**SECONDS, **seconds}[phase])
            end()

    def end(self) -> None:
        self.profiler.on_train_end(self.trainer, self.task)


@pytest.fixture(autouse=True)
def clock_of_the_test(monkeypatch):
    clock.use_in_runs(monkeypatch)


def test_the_time_between_marks_belongs_to_the_phase_that_ends():
    profiler = StepProfiler()
    run = Run(profiler)
    run.step()
    run.step(data_wait=8.0)
    clock.CLOCK.advance(2.0)
    profiler.on_validation_start(run.trainer, run.task)
    clock.CLOCK.advance(14.0)
    profiler.on_validation_end(run.trainer, run.task)
    run.end()
    totals = {phase: 2 * seconds for phase, seconds in SECONDS.items()}
    assert profiler.seconds == {**totals, "data_wait": 12.0, "logging": 2.0, "validation": 14.0}
    assert profiler.shares() == {phase: profiler.seconds[phase] / 36 for phase in PHASES}
    assert profiler.training_seconds == 22.0 and profiler.data_wait_share == 12 / 36
    assert profiler.samples == 12 and profiler.samples_per_second == 12 / 22


def test_without_a_step_nothing_is_measured():
    profiler = StepProfiler()
    assert profiler.shares() == {}
    assert profiler.data_wait_share is None and profiler.samples_per_second is None


def test_the_log_has_the_shares_since_the_last_time():
    run = Run(StepProfiler(), log_every_n_steps=2)
    run.step()
    run.step()
    run.step(data_wait=12.0)
    run.step(data_wait=12.0)
    assert [sorted(values) for values in run.logged[::2]] == [[], []]
    first, second = run.logged[1::2]
    assert first["perf/data_wait_share"] == 4 / 8 and first["perf/samples_per_second"] == 12 / 16
    assert second["perf/data_wait_share"] == 12 / 16 and second["perf/samples_per_second"] == 12 / 32


def test_a_resumed_run_goes_on_counting():
    before = StepProfiler()
    Run(before).step()
    after = StepProfiler()
    after.load_state_dict({**before.state_dict(), "wall_seconds": 1e6})
    Run(after).step()
    assert after.samples == 12 and after.seconds["forward"] == 2.0 and after.wall_seconds >= 1e6
