"""medconv/training/optim/lr_schedulers.py: learning rates over a run whose length may change."""

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from medconv.training.optim.lr_schedulers import (
    PlateauSchedule,
    ProgressSchedule,
    constant,
    cosine,
    exponential,
    multi_step,
    one_cycle,
    poly,
    step,
)


def make(
    build: Callable[..., ProgressSchedule], total: float, base: float = 0.1, **arguments
) -> ProgressSchedule:
    schedule = build(torch.optim.SGD([nn.Parameter(torch.zeros(1))], base), **arguments)
    schedule.set_length(total)
    return schedule


def rates(schedule: ProgressSchedule, steps: int) -> list[float]:
    """The learning rate of each of the next optimizer steps."""
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return learning_rates


@pytest.mark.parametrize("total", [1, 7, 1000])
def test_cosine_follows_its_formula(total: int) -> None:
    schedule = make(cosine, total)
    expected = [0.1 * 0.5 * (1 + math.cos(math.pi * k / total)) for k in range(total + 1)]
    learning_rates = [*rates(schedule, total), schedule.get_last_lr()[0]]
    assert learning_rates == pytest.approx(expected, abs=1e-9)
    assert schedule.progress == pytest.approx(1, abs=1e-9)


def test_poly_and_constant_follow_their_formulas() -> None:
    assert rates(make(poly, 10), 10) == pytest.approx(
        [0.1 * (1 - k / 10) ** 0.9 for k in range(10)], abs=1e-9
    )
    assert rates(make(poly, 10, power=2.0), 10) == pytest.approx(
        [0.1 * (1 - k / 10) ** 2 for k in range(10)], abs=1e-9
    )
    assert rates(make(constant, 10), 15) == [0.1] * 15


def rates_of_torch(build: Callable[..., Any], steps: int, **arguments: Any) -> list[float]:
    """The curve of one of torch's schedulers."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    schedule, learning_rates = build(optimizer, **arguments), []
    for _ in range(steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return learning_rates


@pytest.mark.parametrize("total", [10, 40, 997])
def test_schedules_equal_those_of_torch(total: int) -> None:
    every = total // 10 * 3
    for ours, (torchs, arguments) in (
        (
            make(step, total, step_fraction=every / total, gamma=0.2),
            (lr.StepLR, {"step_size": every, "gamma": 0.2}),
        ),
        (
            make(multi_step, total, milestones=[every / total, 0.9], gamma=0.5),
            (lr.MultiStepLR, {"milestones": [every, math.ceil(0.9 * total)], "gamma": 0.5}),
        ),
        (make(exponential, total, final=0.01), (lr.ExponentialLR, {"gamma": 0.01 ** (1 / total)})),
        (make(cosine, total), (lr.CosineAnnealingLR, {"T_max": total})),
        (make(poly, total), (lr.PolynomialLR, {"total_iters": total, "power": 0.9})),
        (
            make(one_cycle, total, pct_start=0.25),
            # torch counts the first and the last step, and its phases from the first one
            (
                lr.OneCycleLR,
                {"max_lr": 0.1, "total_steps": total + 1, "pct_start": (0.25 * total + 1) / (total + 1)},
            ),
        ),
    ):
        expected = rates_of_torch(torchs, total, **arguments)
        assert rates(ours, total) == pytest.approx(expected, abs=1e-9), torchs


@pytest.mark.parametrize("build", [step, multi_step, exponential, one_cycle, PlateauSchedule])
def test_all_schedules_have_a_warmup(build: Callable[..., ProgressSchedule]) -> None:
    shape = rates(make(build, 100), 8)
    warm = rates(make(build, 100, warmup_steps=4), 8)
    assert warm == pytest.approx(
        [s * f for s, f in zip(shape, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], strict=True)], abs=1e-9
    )


def test_milestones_move_with_the_end_of_the_run() -> None:
    schedule = make(step, 100, step_fraction=0.5)
    rates(schedule, 20)
    schedule.set_length(40)
    assert rates(schedule, 20) == pytest.approx(
        [0.1] * 8 + [0.01] * 12
    )  # half of the run: 0.2 + 0.8 * 8/20 > 0.5


SCORES = [0.1, 0.2, 0.2, 0.205, 0.3, 0.3, 0.29, 0.3, 0.31, 0.1, math.nan, 0.2, 0.2, 0.2]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_plateau_equals_that_of_torch(mode: str) -> None:
    scores = [s if mode == "max" else -s for s in SCORES]
    ours = make(PlateauSchedule, 100, mode=mode, patience=3, min_delta=0.01, factor=0.5, min_factor=0.2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    torchs = lr.ReduceLROnPlateau(
        optimizer, mode, factor=0.5, patience=2, threshold=0.01, threshold_mode="abs", min_lr=0.02
    )
    learning_rates, expected = [], []
    for score in scores:
        ours.validated(score)
        torchs.step(score)
        learning_rates += rates(ours, 2)
        expected += [optimizer.param_groups[0]["lr"]] * 2
    assert learning_rates == pytest.approx(expected) and learning_rates[-1] == pytest.approx(0.02)


def test_plateau_resumes_from_its_state() -> None:
    def rates_after(schedule: ProgressSchedule, scores: list[float]) -> list[float]:
        learning_rates = []
        for score in scores:
            assert isinstance(schedule, PlateauSchedule)
            schedule.validated(score)
            learning_rates += rates(schedule, 1)
        return learning_rates

    expected = rates_after(make(PlateauSchedule, 100, patience=2), SCORES)
    for split in range(1, len(SCORES)):
        first, second = make(PlateauSchedule, 100, patience=2), make(PlateauSchedule, 100, patience=2)
        rates_after(first, SCORES[:split])
        second.load_state_dict(first.state_dict())
        assert rates_after(second, SCORES[split:]) == pytest.approx(expected[split:])


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (step, {"step_fraction": 30}, "step_fraction must lie between 0 and 1, got 30"),
        (step, {"gamma": 0}, "gamma must be positive, got 0"),
        (
            multi_step,
            {"milestones": [0.9, 0.5]},
            "milestones must be a list of rising shares of the run, got [0.9, 0.5]",
        ),
        (multi_step, {"milestones": [100, 200]}, "milestones must lie between 0 and 1, got 100"),
        (exponential, {"final": 0}, "final must be positive, got 0"),
        (one_cycle, {"pct_start": 1}, "pct_start must lie between 0 and 1, got 1"),
        (
            PlateauSchedule,
            {"patience": 0},
            "patience must be a whole number of validations, 1 or more, got 0",
        ),
        (PlateauSchedule, {"mode": "up"}, "mode must be max or min, got up"),
        (PlateauSchedule, {"min_delta": -1}, "min_delta must be 0 or more, got -1"),
        (
            PlateauSchedule,
            {"min_factor": 2},
            "min_factor must be a share of the learning rate, 0 to 1, got 2",
        ),
    ],
)
def test_invalid_arguments_are_named(
    build: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make(build, 10, **arguments)


@pytest.mark.parametrize("ends", [(60, 80), (200, 50), (1000, 41)])
@pytest.mark.parametrize("build", [cosine, poly])
def test_a_schedule_ends_at_0_although_the_end_moves(
    build: Callable[..., ProgressSchedule], ends: tuple[int, int]
) -> None:
    schedule = make(build, 100)
    learning_rates = rates(schedule, 20)
    schedule.set_length(ends[0])
    learning_rates += rates(schedule, 20)
    schedule.set_length(ends[1])
    learning_rates += rates(schedule, ends[1] - 40)
    assert schedule.progress == pytest.approx(1, abs=1e-9)
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-9)
    assert all(later <= earlier for earlier, later in pairwise(learning_rates))
    assert learning_rates[19] == pytest.approx(rates(make(build, 100), 20)[-1], abs=1e-12)


def test_an_end_in_the_past_ends_the_schedule() -> None:
    schedule = make(cosine, 100)
    rates(schedule, 30)
    schedule.set_length(10)
    assert rates(schedule, 5)[1:] == pytest.approx([0] * 4, abs=1e-12)
    assert schedule.progress == 1


def test_without_an_end_the_rate_is_constant() -> None:
    assert rates(make(cosine, math.inf), 5) == [0.1] * 5


def test_warmup_is_linear_and_multiplies_the_shape() -> None:
    learning_rates = rates(make(constant, 100, warmup_steps=4), 6)
    assert learning_rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1], abs=1e-9)
    shape = rates(make(cosine, 100), 6)
    assert rates(make(cosine, 100, warmup_steps=4), 6) == pytest.approx(
        [s * f for s, f in zip(shape, [0.25, 0.5, 0.75, 1, 1, 1], strict=True)], abs=1e-9
    )


def test_warmup_is_at_most_a_fifth_of_the_run() -> None:
    learning_rates = rates(make(constant, 20, warmup_steps=1000), 8)
    assert learning_rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1], abs=1e-9)


def test_every_group_keeps_its_own_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    schedule = cosine(torch.optim.SGD(groups, 0.5))
    schedule.set_length(10)
    rates(schedule, 5)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.01], abs=1e-9)


def test_state_is_plain_numbers_and_continues_exactly(tmp_path: Path) -> None:
    uninterrupted = make(cosine, 40, warmup_steps=4)
    expected = rates(uninterrupted, 40)

    first = make(cosine, math.inf, warmup_steps=4)
    first.move_end(40)
    rates(first, 17)
    state = {"schedule": first.state_dict(), "optimizer": first.optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    for value in loaded["schedule"].values():
        assert all(type(v) in (int, float) for v in (value if isinstance(value, list) else [value]))

    second = make(cosine, math.inf, warmup_steps=4)  # a time budget: the state holds its length
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.load_state_dict(loaded["schedule"])
    assert second.total_steps == 40
    assert rates(second, 23) == pytest.approx(expected[17:], abs=1e-12)


def resumed(state: dict, total: float, base: float = 0.1) -> ProgressSchedule:
    schedule = make(cosine, total, base)
    schedule.load_state_dict(state)
    return schedule


def test_an_extended_run_resumes_at_its_step_of_the_longer_schedule() -> None:
    ended = make(cosine, 10)
    rates(ended, 10)
    longer = resumed(ended.state_dict(), 40)
    assert longer.progress == pytest.approx(0.25)
    learning_rates = rates(longer, 30)
    assert learning_rates == pytest.approx(
        [0.1 * 0.5 * (1 + math.cos(math.pi * k / 40)) for k in range(10, 40)], abs=1e-9
    )


def test_a_run_that_goes_on_without_a_number_of_steps_begins_its_schedule_anew() -> None:
    """Such as one with a time limit after one that its steps ended; else its rates would be those of the end."""
    ended = make(cosine, 10)
    rates(ended, 10)
    longer = resumed(ended.state_dict(), math.inf)
    assert longer.progress == 0
    longer.move_end(30)
    assert rates(longer, 20) == pytest.approx(
        [0.1 * 0.5 * (1 + math.cos(math.pi * k / 20)) for k in range(20)]
    )


def test_the_state_of_a_schedule_of_torch_is_taken() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert resumed(lr.StepLR(optimizer, 2).state_dict(), 10).progress == 0


def test_a_resumed_run_takes_its_learning_rate_from_the_config() -> None:
    first = make(cosine, 10, base=0.1)
    before = rates(first, 4)
    second = resumed(first.state_dict(), 10, base=0.001)
    assert rates(second, 6) == pytest.approx([r / 100 for r in rates(first, 6)]) and before[0] == 0.1


@pytest.mark.parametrize("configured", [20.0, math.inf])
def test_a_resumed_run_keeps_the_end_that_a_time_budget_set(configured: float) -> None:
    """With `trainer.max_time` alone or with `trainer.max_steps`; also if it is resumed twice."""
    first = make(cosine, configured)
    rates(first, 5)
    first.move_end(14)
    rates(first, 2)
    first.move_end(12)
    second = resumed(first.state_dict(), configured)
    assert rates(resumed(second.state_dict(), configured), 5) == pytest.approx(rates(first, 5))
    assert resumed(second.state_dict(), 28).progress == pytest.approx(7 / 28)  # extended


def test_plateau_resumes_after_another_schedule_or_another_metric() -> None:
    """It forgets the best value of another metric, and keeps the learning rate."""
    first = make(cosine, 20)
    rates(first, 5)
    schedule = make(PlateauSchedule, 20)
    schedule.load_state_dict(first.state_dict())
    assert isinstance(schedule, PlateauSchedule)
    assert (schedule.last_epoch, schedule.level, schedule.best) == (5, 1.0, -math.inf)
    for score in (0.9, 0.8, 0.8):
        schedule.patience = 2
        schedule.validated(score)
    for other, best in (
        ({}, 0.9),
        ({"monitor": "val/cross_entropy", "mode": "min"}, -math.inf),
        ({"mode": "min"}, -math.inf),
    ):
        later = make(PlateauSchedule, 20, **other)
        later.load_state_dict(schedule.state_dict())
        assert isinstance(later, PlateauSchedule) and (later.level, later.best) == (0.5, best)
