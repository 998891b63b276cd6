"""medconv/features/more_schedules/schedules.py: the curves are those of torch, for a run of any length."""

import math
import re

import pytest
from helpers.schedules import make, rates, rates_of_torch
from torch.optim import lr_scheduler as lr

from medconv.features.more_schedules.schedules import exponential, multi_step, one_cycle, step


@pytest.mark.parametrize("total", [10, 40, 997])
def test_schedules_equal_those_of_torch(total):
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


@pytest.mark.parametrize("build", [step, multi_step, exponential, one_cycle])
def test_all_schedules_have_a_warmup(build):
    shape = rates(make(build, 100), 8)
    warm = rates(make(build, 100, warmup_steps=4), 8)
    assert warm == pytest.approx(
        [s * f for s, f in zip(shape, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], strict=True)], abs=1e-9
    )


def test_milestones_move_with_the_end_of_the_run():
    schedule = make(step, 100, step_fraction=0.5)
    rates(schedule, 20)
    schedule.set_length(40)
    assert rates(schedule, 20) == pytest.approx(
        [0.1] * 8 + [0.01] * 12
    )  # half of the run: 0.2 + 0.8 * 8/20 > 0.5


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
    ],
)
def test_invalid_arguments_are_named(build, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make(build, 10, **arguments)
