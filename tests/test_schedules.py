"""medconv/schedules.py: learning rates over a run whose end may move."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from medconv.schedules import ProgressSchedule, constant, cosine, poly


def make(build: Callable[..., ProgressSchedule], total: float, base: float = 0.1, **arguments) -> ProgressSchedule:
    schedule = build(torch.optim.SGD([nn.Parameter(torch.zeros(1))], base), **arguments)
    schedule.total_steps = total
    return schedule


def rates(schedule: ProgressSchedule, steps: int) -> list[float]:
    """The learning rate of each of the next optimizer steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("total", [1, 7, 1000])
def test_cosine_of_a_fixed_number_of_steps(total: int) -> None:
    schedule = make(cosine, total)
    expected = [0.1 * 0.5 * (1 + math.cos(math.pi * k / total)) for k in range(total + 1)]
    found = [*rates(schedule, total), schedule.get_last_lr()[0]]
    assert found == pytest.approx(expected, abs=1e-9)
    assert schedule.progress == pytest.approx(1, abs=1e-9)


def test_poly_and_constant() -> None:
    assert rates(make(poly, 10), 10) == pytest.approx([0.1 * (1 - k / 10) ** 0.9 for k in range(10)], abs=1e-9)
    assert rates(make(poly, 10, power=2.0), 10) == pytest.approx([0.1 * (1 - k / 10) ** 2 for k in range(10)], abs=1e-9)
    assert rates(make(constant, 10), 15) == [0.1] * 15


@pytest.mark.parametrize("ends", [(60, 80), (200, 50), (1000, 41)])
@pytest.mark.parametrize("build", [cosine, poly])
def test_a_moving_end_is_still_the_end(build: Callable[..., ProgressSchedule], ends: tuple[int, int]) -> None:
    schedule = make(build, 100)
    found = rates(schedule, 20)
    schedule.total_steps = ends[0]
    found += rates(schedule, 20)
    schedule.total_steps = ends[1]
    found += rates(schedule, ends[1] - 40)
    assert schedule.progress == pytest.approx(1, abs=1e-9)
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-9)
    assert all(later <= earlier for earlier, later in pairwise(found))
    assert found[19] == pytest.approx(rates(make(build, 100), 20)[-1], abs=1e-12)  # what was is not changed


def test_an_end_in_the_past_stays_at_the_end() -> None:
    schedule = make(cosine, 100)
    rates(schedule, 30)
    schedule.total_steps = 10
    assert rates(schedule, 5)[1:] == pytest.approx([0] * 4, abs=1e-12)
    assert schedule.progress == 1


def test_without_an_end_nothing_progresses() -> None:
    assert rates(make(cosine, math.inf), 5) == [0.1] * 5


def test_warmup_is_linear_and_multiplies_the_shape() -> None:
    found = rates(make(constant, 100, warmup_steps=4), 6)
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1], abs=1e-9)
    shape = rates(make(cosine, 100), 6)
    assert rates(make(cosine, 100, warmup_steps=4), 6) == pytest.approx(
        [s * f for s, f in zip(shape, [0.25, 0.5, 0.75, 1, 1, 1], strict=True)], abs=1e-9
    )


def test_warmup_is_at_most_a_fifth_of_the_run() -> None:
    found = rates(make(constant, 20, warmup_steps=1000), 8)
    assert found[1:] == pytest.approx([0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1], abs=1e-9)
    assert 0 < found[0] <= 0.025 + 1e-9


def test_every_group_keeps_its_own_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    schedule = cosine(torch.optim.SGD(groups, 0.5))
    schedule.total_steps = 10
    rates(schedule, 5)
    assert schedule.get_last_lr() == pytest.approx([0.05, 0.01], abs=1e-9)


def test_state_is_plain_numbers_and_continues_exactly(tmp_path: Path) -> None:
    whole = make(cosine, 40, warmup_steps=4)
    expected = rates(whole, 40)

    first = make(cosine, 40, warmup_steps=4)
    rates(first, 17)
    state = {"schedule": first.state_dict(), "optimizer": first.optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    for value in loaded["schedule"].values():
        assert all(type(v) in (int, float) for v in (value if isinstance(value, list) else [value]))

    second = make(cosine, 1000, warmup_steps=4)
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.load_state_dict(loaded["schedule"])
    assert second.total_steps == 40
    assert rates(second, 23) == pytest.approx(expected[17:], abs=1e-12)
