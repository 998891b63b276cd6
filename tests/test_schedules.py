"""medconv/schedules.py: learning rates over a run whose end may move."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch import nn

from medconv import checkpoint
from medconv.callbacks import steps_between_validations
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

    second = make(cosine, math.inf, warmup_steps=4)  # as under a time budget, whose length the state holds
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.load_state_dict(loaded["schedule"])
    assert second.total_steps == 40
    assert rates(second, 23) == pytest.approx(expected[17:], abs=1e-12)


def continued(state: dict, total: float, base: float = 0.1) -> ProgressSchedule:
    schedule = make(cosine, total, base)
    schedule.load_state_dict(state)
    return schedule


def test_a_run_that_is_made_longer_goes_on_at_its_place_in_the_longer_one() -> None:
    ended = make(cosine, 10)
    rates(ended, 10)
    longer = continued(ended.state_dict(), 40)
    assert longer.progress == pytest.approx(0.25)
    found = rates(longer, 30)
    assert found == pytest.approx([0.1 * 0.5 * (1 + math.cos(math.pi * k / 40)) for k in range(10, 40)], abs=1e-9)


def test_the_config_says_the_learning_rate_of_a_run_that_goes_on() -> None:
    begun = make(cosine, 10, base=0.1)
    before = rates(begun, 4)
    other = continued(begun.state_dict(), 10, base=0.001)
    assert rates(other, 6) == pytest.approx([r / 100 for r in rates(begun, 6)]) and before[0] == 0.1


def test_a_moving_end_is_kept_by_a_run_that_goes_on() -> None:
    """Under `trainer.max_time` the length is not in the config."""
    begun = make(cosine, 20)
    rates(begun, 5)
    begun.total_steps = 12
    assert rates(continued(begun.state_dict(), math.inf), 7) == pytest.approx(rates(begun, 7))


@pytest.mark.parametrize(
    ("batches", "accumulate", "within", "epochs", "expected"),
    [(250, 1, 250, 1, 250), (250, 1, 250, 10, 2500), (100, 4, 100, 1, 25), (100, 1, 20, 1, 20), (100, 1, 30, None, 30)],
)
def test_steps_from_one_validation_to_the_next(
    batches: int, accumulate: int, within: int, epochs: int | None, expected: float
) -> None:
    settings = {"num_training_batches": batches, "accumulate_grad_batches": accumulate, "val_check_batch": within}
    trainer = SimpleNamespace(**settings, check_val_every_n_epoch=epochs)
    assert steps_between_validations(trainer) == expected


def test_a_run_that_is_given_more_time_trains_on(tmp_path: Path) -> None:
    dataset = tiny.write_dataset(tmp_path / "dataset")
    timed = ["trainer.max_steps=-1", "data.samples_per_epoch=1000000", "logger=none", "callbacks=none"]
    tiny.train(dataset, tmp_path / "short", *timed, "trainer.max_time=00:00:00:02")
    last = tmp_path / "short/checkpoints/last.ckpt"
    first = checkpoint.read(last)["global_step"]
    tiny.train(dataset, tmp_path / "long", *timed, "trainer.max_time=00:00:00:05", f"run.resume={last}")
    content = checkpoint.read(tmp_path / "long/checkpoints/last.ckpt")
    assert content["global_step"] > 1.5 * first
    assert content["callbacks"]["TimeBudget"]["seconds"] == 5 and content["lr_schedulers"][0]["progress"] > 0.9
