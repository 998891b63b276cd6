"""medconv/training/callbacks/time_budget.py: how many steps fit into the time; whole runs are in tests/integration."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from medconv.training.callbacks.time_budget import TimeBudget, steps_between_validations
from medconv.training.optim.lr_schedulers import ProgressSchedule, cosine


def steps(schedule: ProgressSchedule, number: int) -> None:
    for _ in range(number):
        schedule.optimizer.step()
        schedule.step()


@pytest.mark.parametrize("limit", [100000.0, math.inf])
def test_a_resumed_run_with_more_time_extends_its_schedule_at_once(limit: float) -> None:
    """Otherwise the first step would take it from its old end to the new one."""
    earlier, schedule = (cosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)) for _ in range(2))
    for one in (earlier, schedule):
        one.set_length(limit)
    earlier.move_end(40)
    steps(earlier, 40)
    schedule.load_state_dict(earlier.state_dict())
    budget = TimeBudget(10)
    budget.load_state_dict({"seconds": 5, "spent": 5, "validation": 0.1, "total_steps": 40})
    configs = [SimpleNamespace(scheduler=schedule)]
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(owed=False))
    trainer: Any = SimpleNamespace(
        global_step=40, estimated_stepping_batches=limit, lr_scheduler_configs=configs, fit_loop=loop
    )
    budget.on_train_start(trainer, None)  # type: ignore[arg-type]
    steps(schedule, 5)
    assert schedule.progress == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("state", [{"limit": 100000.0}, {}])
def test_a_run_that_was_killed_before_the_first_estimate_goes_on_as_it_was(state: dict[str, float]) -> None:
    """Also from a checkpoint of a version that did not record the limit."""
    earlier, schedule = (cosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)) for _ in range(2))
    for one in (earlier, schedule):
        one.set_length(100000)
    steps(earlier, 3)
    schedule.load_state_dict(earlier.state_dict())
    budget = TimeBudget(100)
    budget.load_state_dict({"seconds": 100, "spent": 50, "validation": 0.1, "total_steps": None, **state})
    configs = [SimpleNamespace(scheduler=schedule)]
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(owed=False))
    trainer: Any = SimpleNamespace(
        global_step=3, estimated_stepping_batches=100000, lr_scheduler_configs=configs, fit_loop=loop
    )
    budget.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert schedule.state_dict() == earlier.state_dict()


def test_least_epochs_count_as_lightning_does() -> None:
    """The last batch of each epoch ends a step."""
    settings = {"num_training_batches": 3, "accumulate_grad_batches": 2, "min_steps": 30, "min_epochs": 20}
    assert TimeBudget._min_steps(SimpleNamespace(**settings)) == 40  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batches", "accumulate", "within", "epochs", "expected"),
    [
        (250, 1, 250, 1, 250),
        (250, 1, 250, 10, 2500),
        (100, 4, 100, 1, 25),
        (100, 1, 20, 1, 20),
        (100, 1, 30, None, 30),
    ],
)
def test_steps_between_validations(
    batches: int, accumulate: int, within: int, epochs: int | None, expected: float
) -> None:
    settings = {
        "num_training_batches": batches,
        "accumulate_grad_batches": accumulate,
        "val_check_batch": within,
    }
    trainer = SimpleNamespace(**settings, check_val_every_n_epoch=epochs)
    assert steps_between_validations(trainer) == expected


def test_a_resumed_run_leaves_time_for_validations() -> None:
    """Lightning does not know the number of validation batches until the first validation."""
    budget = TimeBudget(100.0)
    budget.load_state_dict({"seconds": 100.0, "spent": 0.0, "validation": 10.0, "total_steps": None})
    settings: Any = {"num_training_batches": 50, "accumulate_grad_batches": 1, "val_check_batch": 50}
    trainer: Any = SimpleNamespace(**settings, check_val_every_n_epoch=1, num_val_batches=[])
    assert budget._fitting(trainer, 1.0) == 80  # two validations


def test_as_many_steps_fit_as_leave_time_for_their_validations() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        left, step, validation = random.uniform(0, 100), random.uniform(0.1, 5), random.uniform(0, 10)
        between, seen = int(random.integers(1, 20)), int(random.integers(0, 40))
        budget = TimeBudget(left)
        spent = {"seconds": left, "spent": 0.0, "validation": validation, "total_steps": None}
        budget.load_state_dict(spent)
        budget._last_step = seen
        settings = {"num_training_batches": between, "accumulate_grad_batches": 1, "val_check_batch": between}
        trainer: Any = SimpleNamespace(**settings, check_val_every_n_epoch=1)
        steps = budget._fitting(trainer, step)
        # validations that these steps end or, as the run ends, begin
        taken = [
            n * step + validation * math.ceil((seen % between + n) / between) for n in (steps, steps + 1)
        ]
        assert taken[0] <= left + 1e-9 or steps == 0
        assert taken[1] > left - 1e-9
