"""medconv/training/optim/lr_schedulers.py: learning rates over a run whose length may change."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers.schedules import make, rates, rates_of_torch
from torch import nn
from torch.optim import lr_scheduler as lr

from medconv.training.optim.lr_schedulers import constant, cosine, poly


@pytest.mark.parametrize("total", [10, 40, 997])
def test_schedules_equal_those_of_torch(total):
    for ours, torchs, settings in (
        (cosine, lr.CosineAnnealingLR, {"T_max": total}),
        (poly, lr.PolynomialLR, {"total_iters": total, "power": 0.9}),
        (partial(poly, power=2.0), lr.PolynomialLR, {"total_iters": total, "power": 2.0}),
        (constant, lr.ConstantLR, {"factor": 1}),
    ):
        expected = rates_of_torch(torchs, total, **settings)
        assert rates(make(ours, total), total) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ends", [(60, 80), (200, 50), (1000, 41)])
@pytest.mark.parametrize("build", [cosine, poly])
def test_a_schedule_ends_at_0_although_the_end_moves(build, ends):
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


def test_an_end_in_the_past_ends_the_schedule():
    schedule = make(cosine, 100)
    rates(schedule, 30)
    schedule.set_length(10)
    assert rates(schedule, 5)[1:] == pytest.approx([0] * 4, abs=1e-12)
    assert schedule.progress == 1


def test_without_an_end_the_rate_is_constant():
    assert rates(make(cosine, math.inf), 5) == [0.1] * 5


def test_warmup_is_linear_and_multiplies_the_shape():
    shape = rates(make(cosine, 100), 6)
    assert rates(make(cosine, 100, warmup_steps=4), 6) == pytest.approx(
        [s * f for s, f in zip(shape, [0.25, 0.5, 0.75, 1, 1, 1], strict=True)], abs=1e-9
    )


def test_warmup_is_at_most_a_fifth_of_the_run():
    learning_rates = rates(make(constant, 20, warmup_steps=1000), 8)
    assert learning_rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1], abs=1e-9)


def test_every_group_keeps_its_own_rate():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    schedule = cosine(torch.optim.SGD(groups, 0.5))
    schedule.set_length(10)
    rates(schedule, 5)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.01], abs=1e-9)


def test_state_is_plain_numbers_and_continues_exactly(tmp_path):
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


def resumed(state, total, base=0.1):
    schedule = make(cosine, total, base)
    schedule.load_state_dict(state)
    return schedule


def test_an_extended_run_resumes_at_its_step_of_the_longer_schedule():
    ended = make(cosine, 10)
    rates(ended, 10)
    longer = resumed(ended.state_dict(), 40)
    assert longer.progress == pytest.approx(0.25)
    learning_rates = rates(longer, 30)
    assert learning_rates == pytest.approx(
        [0.1 * 0.5 * (1 + math.cos(math.pi * k / 40)) for k in range(10, 40)], abs=1e-9
    )


def test_a_run_that_goes_on_without_a_number_of_steps_begins_its_schedule_anew():
    """Such as one with a time limit after one that its steps ended; else its rates would be those of the end."""
    ended = make(cosine, 10)
    rates(ended, 10)
    longer = resumed(ended.state_dict(), math.inf)
    assert longer.progress == 0
    longer.move_end(30)
    assert rates(longer, 20) == pytest.approx(
        [0.1 * 0.5 * (1 + math.cos(math.pi * k / 20)) for k in range(20)]
    )


def test_the_state_of_a_schedule_of_torch_is_taken():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert resumed(lr.StepLR(optimizer, 2).state_dict(), 10).progress == 0


def test_a_resumed_run_takes_its_learning_rate_from_the_config():
    first = make(cosine, 10, base=0.1)
    before = rates(first, 4)
    second = resumed(first.state_dict(), 10, base=0.001)
    assert rates(second, 6) == pytest.approx([r / 100 for r in rates(first, 6)]) and before[0] == 0.1


@pytest.mark.parametrize("configured", [20.0, math.inf])
def test_a_resumed_run_keeps_the_end_that_a_time_budget_set(configured):
    """With `trainer.max_time` alone or with `trainer.max_steps`; also if it is resumed twice."""
    first = make(cosine, configured)
    rates(first, 5)
    first.move_end(14)
    rates(first, 2)
    first.move_end(12)
    second = resumed(first.state_dict(), configured)
    assert rates(resumed(second.state_dict(), configured), 5) == pytest.approx(rates(first, 5))
    assert resumed(second.state_dict(), 28).progress == pytest.approx(7 / 28)  # extended


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (partial(poly, power=-1), "power must be 0 or more, got -1"),
        (partial(cosine, warmup_steps=-5), "warmup_steps must be 0 or more, got -5"),
    ],
)
def test_numbers_out_of_range_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
