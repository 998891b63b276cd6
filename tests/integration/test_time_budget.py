"""Runs under `trainer.max_time`, by a clock that the test moves."""

import pytest
import torch
from helpers import clock, tiny
from torch import nn

from medconv.training.optim.lr_schedulers import cosine
from medconv.utils import checkpoint_io

LOGGED = ["callbacks=default"]  # with the learning rate


def learning_rates(run):
    return tiny.logged(run, "train/lr")


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    clock.use_in_runs(monkeypatch)


def test_a_time_budget_fits_the_schedule(dataset, tmp_path):
    settings = ["trainer.max_steps=-1", "trainer.max_time=00:00:00:03", "data.samples_per_epoch=40"]
    summary = tiny.train(dataset, tmp_path / "run", *settings, clock.ticks(0.1, 0.1))
    assert summary["status"] == "done"
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    budget = checkpoint["callbacks"]["TimeBudget"]
    assert budget["total_steps"] == checkpoint["global_step"] == summary["steps"]
    (schedule,) = checkpoint["lr_schedulers"]
    assert schedule["progress"] == pytest.approx(1.0, abs=0.05)
    assert schedule["_last_lr"][0] == pytest.approx(0.0, abs=1e-4)  # of 5e-3
    assert len(summary["val/cases"]) == 3  # the last validation belongs to the run


def test_a_time_budget_is_not_waited_for_by_a_few_slow_steps(dataset, tmp_path):
    settings = ["trainer.max_steps=-1", "trainer.max_time=00:00:00:03", clock.ticks(1.0)]
    summary = tiny.train(dataset, tmp_path / "run", *settings)
    assert summary["steps"] <= 3  # and not the five after which the first estimate is made otherwise


def test_a_slow_first_step_and_case_say_nothing_about_the_others(dataset, tmp_path):
    """They compile the network. Their time counts, as that of the cases before training does."""
    settings = ["trainer.max_steps=-1", "trainer.max_time=00:00:00:15", "data.samples_per_epoch=1000000"]
    summary = tiny.train(dataset, tmp_path / "run", *settings, clock.ticks(0.125, 0.125, more=5.0), *LOGGED)
    rates = learning_rates(tmp_path / "run")
    assert summary["steps"] == 35  # in 4.375 + 5 seconds; two cases take 5.25 before, three 0.375 after
    assert rates[10] > 0.8 * max(rates) and rates[-1] < 0.05 * max(rates)


def test_least_steps_belong_to_the_schedule(dataset, tmp_path):
    settings = ["trainer.max_steps=-1", "trainer.max_time=00:00:00:02", "trainer.min_steps=30"]
    settings += ["data.samples_per_epoch=20", clock.ticks(0.1), *LOGGED]
    assert tiny.train(dataset, tmp_path / "run", *settings)["steps"] == 30
    rates = learning_rates(tmp_path / "run")
    assert rates[20] > 0.1 * max(rates) > rates[-1]


def test_a_run_that_steps_ended_resumes_for_the_rest_of_its_time(dataset, tmp_path):
    timed = ["trainer.max_time=00:00:00:04", "data.samples_per_epoch=1000000", clock.ticks(0.125), *LOGGED]
    tiny.train(dataset, tmp_path / "short", *timed, "trainer.max_steps=10")
    last = f"run.resume={tmp_path / 'short/checkpoints/last.ckpt'}"
    summary = tiny.train(dataset, tmp_path / "long", *timed, "trainer.max_steps=-1", last)
    assert summary["steps"] == 32 and learning_rates(tmp_path / "long")[0] > 1e-3
    end = f"run.resume={tmp_path / 'long/checkpoints/last.ckpt'}"
    for time in ("00:00:00:04", "00:00:00:03"):
        arguments = [*timed, f"trainer.max_time={time}", "trainer.max_steps=-1", end]
        with pytest.raises(ValueError, match=r"for 4 of 4 seconds already; trainer\.max_time must be more"):
            tiny.train(dataset, tmp_path / "none", *arguments)


def test_a_run_that_is_given_more_time_trains_on(dataset, tmp_path):
    timed = ["trainer.max_steps=-1", "data.samples_per_epoch=1000000", "logger=none"]
    timed += [clock.ticks(0.1, 0.1)]
    tiny.train(dataset, tmp_path / "short", *timed, "trainer.max_time=00:00:00:02")
    last = tmp_path / "short/checkpoints/last.ckpt"
    first = checkpoint_io.read(last)["global_step"]
    tiny.train(dataset, tmp_path / "long", *timed, "trainer.max_time=00:00:00:05", f"run.resume={last}")
    content = checkpoint_io.read(tmp_path / "long/checkpoints/last.ckpt")
    assert first > 5 and content["global_step"] > 1.5 * first
    assert (
        content["callbacks"]["TimeBudget"]["seconds"] == 5 and content["lr_schedulers"][0]["progress"] > 0.9
    )


def test_a_run_bounded_by_steps_and_time_resumes_at_its_learning_rate(dataset, tmp_path):
    """Its end is an estimate; the config's unchanged number of steps does not move it."""
    both = ["trainer.max_steps=100000", "trainer.max_time=00:00:00:02", "data.samples_per_epoch=1000000"]
    tiny.train(dataset, tmp_path / "run", *both, "logger=none", clock.ticks(0.1, 0.1))
    state = checkpoint_io.read(tmp_path / "run/checkpoints/last.ckpt")["lr_schedulers"][0]
    assert state["total_steps"] < 100000 and state["progress"] > 0.9
    schedule = cosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    schedule.set_length(100000)
    schedule.load_state_dict(state)
    assert schedule.progress == state["progress"]


def test_validations_but_the_last_are_put_off_where_they_would_take_too_long(dataset, tmp_path):
    """Three cases take 1.5 seconds and are due every second."""
    settings = ["trainer.max_steps=-1", "trainer.max_time=00:00:00:15", "data.samples_per_epoch=10"]
    summary = tiny.train(dataset, tmp_path / "run", *settings, clock.ticks(0.2, 0.5))
    scores = tiny.logged(tmp_path / "run", "val/dice")
    assert len(scores) == 2  # the last one included
    assert summary["steps"] == pytest.approx((15 - 2 * 1.5) / 0.2, abs=10)
    assert summary["status"] == "done"


def test_a_validation_that_would_take_most_of_the_time_takes_the_first_cases(dataset, tmp_path, caplog):
    """Three cases take 15 of 30 seconds; two take 10. Of a longer run that goes on from it, three fit."""
    timed = ["trainer.max_time=00:00:00:30", "data.samples_per_epoch=1000000", clock.ticks(0.5, 5.0)]
    first = tiny.train(dataset, tmp_path / "run", *timed, "trainer.max_steps=10")
    expected = (
        "a validation of all 3 batches would take 15 of the 30 s of trainer.max_time, so only the first 2"
    )
    assert expected in caplog.text
    last = f"run.resume={tmp_path / 'run/checkpoints/last.ckpt'}"
    longer = ["trainer.max_time=00:00:00:45", "trainer.max_steps=-1", last]
    summary = tiny.train(dataset, tmp_path / "resumed", *timed, *longer)
    assert len(summary["val/cases"]) == 3 and len(first["val/cases"]) == 2
    # Two cases before training and after the first steps, three at the end
    assert summary["steps"] == pytest.approx((45 - 2 * 10 - 15) / 0.5, abs=4)
    caplog.clear()
    all_cases = ["trainer.max_steps=10", "trainer.limit_val_batches=1.0"]
    assert len(tiny.train(dataset, tmp_path / "all", *timed, *all_cases)["val/cases"]) == 3
    assert "so only the first" not in caplog.text
