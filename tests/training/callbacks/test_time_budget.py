"""medconv/training/callbacks/time_budget.py: how many steps and validations fit into the time."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import clock
from torch import nn

from medconv.planning.limits import SIZES
from medconv.training.callbacks.time_budget import TimeBudget, ValidationBudget, steps_between_validations
from medconv.training.growing_patch import GrowingPatch
from medconv.training.optim.lr_schedulers import cosine


def steps(schedule, number):
    for _ in range(number):
        schedule.optimizer.step()
        schedule.step()


@pytest.mark.parametrize("limit", [100000.0, math.inf])
def test_a_resumed_run_with_more_time_extends_its_schedule_at_once(limit):
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
    trainer = SimpleNamespace(
        global_step=40, estimated_stepping_batches=limit, lr_scheduler_configs=configs, fit_loop=loop
    )
    budget.on_train_start(trainer, None)
    steps(schedule, 5)
    assert schedule.progress == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("state", [{"limit": 100000.0}, {}])
def test_a_run_that_was_killed_before_the_first_estimate_goes_on_as_it_was(state):
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
    trainer = SimpleNamespace(
        global_step=3, estimated_stepping_batches=100000, lr_scheduler_configs=configs, fit_loop=loop
    )
    budget.on_train_start(trainer, None)
    assert schedule.state_dict() == earlier.state_dict()


def test_least_epochs_count_as_lightning_does():
    """The last batch of each epoch ends a step."""
    settings = {"num_training_batches": 3, "accumulate_grad_batches": 2, "min_steps": 30, "min_epochs": 20}
    assert TimeBudget._min_steps(SimpleNamespace(**settings)) == 40


def test_a_resumed_run_leaves_time_for_validations():
    """Lightning does not know the number of validation batches until the first validation."""
    budget = TimeBudget(100.0)
    budget.load_state_dict({"seconds": 100.0, "spent": 0.0, "validation": 6.0, "total_steps": None})
    settings = {"num_training_batches": 50, "accumulate_grad_batches": 1, "val_check_batch": 50}
    trainer = SimpleNamespace(**settings, check_val_every_n_epoch=1, num_val_batches=[])
    assert budget._fitting(trainer, 1.0) == 88  # two validations


def test_as_many_steps_fit_as_leave_time_for_their_validations():
    random = np.random.default_rng(0)
    for _ in range(300):
        left = random.uniform(0, 100)
        step = random.uniform(0.1, 5)
        validation = random.uniform(0, 10)
        due_every = int(random.integers(1, 20))
        seen = int(random.integers(0, 40))
        budget = TimeBudget(left)
        spent = {"seconds": left, "spent": 0.0, "validation": validation, "total_steps": None}
        budget.load_state_dict(spent)
        settings = {
            "num_training_batches": due_every,
            "accumulate_grad_batches": 1,
            "val_check_batch": due_every,
        }
        trainer = SimpleNamespace(**settings, check_val_every_n_epoch=1)
        between = int(budget._validations.steps_between(trainer, step))  # most are postponed
        budget._last_step = seen
        budget._validations.last_step = seen - seen % between
        steps = budget._fitting(trainer, step)
        # validations that these steps end or, as the run ends, begin
        taken = [
            n * step + validation * math.ceil((seen % between + n) / between) for n in (steps, steps + 1)
        ]
        assert taken[0] <= left + 1e-9 or steps == 0
        assert taken[1] > left - 1e-9


def test_the_last_validation_is_never_postponed():
    budget = TimeBudget(1000.0, clock=clock.CLOCK)
    budget.load_state_dict({"seconds": 9.0, "spent": 0.0, "validation": 500.0, "total_steps": None})
    budget._began_at = clock.CLOCK()
    ending = SimpleNamespace(should_stop=True)
    assert not budget.postpones_validation(ending)
    going_on = SimpleNamespace(should_stop=False)
    assert budget.postpones_validation(going_on)


@pytest.mark.parametrize(
    ("size", "needed"), [("tiny", 100), ("small", 100), ("medium", 500), ("large", 1000)]
)
def test_too_few_steps_for_the_size_of_the_plan_are_a_warning(size, needed, caplog):
    """One second a step, and no validation."""
    expected = f"steps, plan.size={size} needs {needed} or more: raise trainer.max_time, stop other jobs"
    for seconds, is_warned in ((needed - 1, True), (needed, False)):
        caplog.clear()
        first_estimate(TimeBudget(float(seconds), SIZES[size], clock.CLOCK))
        assert (f"{seconds} {expected}" in caplog.text) is is_warned
        assert ("smaller plan.size" in caplog.text) is (is_warned and size != "tiny")  # there is none


@pytest.mark.parametrize(
    ("seconds", "views", "says"), [(4000, 100, True), (3999, 100, False), (4000, 99, False)]
)
def test_more_time_than_one_network_uses_is_said(seconds, views, says, caplog):
    """One second a step, and no validation."""
    caplog.set_level("INFO")
    first_estimate(TimeBudget(float(seconds), clock=clock.CLOCK, views=lambda steps: views * steps / seconds))
    assert ("each case will be seen 100 times" in caplog.text) is says


def first_estimate(budget, module=None, schedules=()):
    """That of a run whose five first steps took a second each."""
    strategy = SimpleNamespace(broadcast=lambda value: value)
    settings = {"num_training_batches": 10_000, "accumulate_grad_batches": 1, "val_check_batch": 10_000}
    limits = {"min_steps": None, "min_epochs": None, "check_val_every_n_epoch": 1}
    trainer = SimpleNamespace(
        **settings, **limits, strategy=strategy, lightning_module=module, lr_scheduler_configs=schedules
    )
    budget._began_at = clock.CLOCK()
    clock.CLOCK.advance(5.0)
    budget._step_seconds.extend([1.0] * 5)
    budget._last_step = 5
    budget._agree(trainer, {"image": torch.zeros(1, 1, 100, 100)})


def test_fewer_steps_are_expected_as_patches_grow(caplog):
    """The first ones have a quarter of the pixels, which takes 0.4 of the time; their mean speed is 1.49."""
    schedule = cosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    budget = TimeBudget(1000.0, clock=clock.CLOCK)
    module = SimpleNamespace(growing_patch=GrowingPatch((1, 1)))
    with caplog.at_level("INFO", logger="medconv"):
        first_estimate(budget, module, [SimpleNamespace(scheduler=schedule)])
    assert budget.total_steps == 1000
    assert budget.expected_steps == pytest.approx(5 + 995 * 0.4 * 1.487, abs=3)
    assert f"about {budget.expected_steps} steps fit into 1000 s, as patches grow" in caplog.text


def test_a_number_of_steps_that_the_time_does_not_reach_is_named(caplog):
    for max_steps, says in ((math.inf, False), (900.0, False), (2000.0, True)):
        caplog.clear()
        budget = TimeBudget(1000.0, clock=clock.CLOCK)
        budget._max_steps = max_steps
        with caplog.at_level("INFO", logger="medconv"):
            first_estimate(budget)
        assert ("trainer.max_time ends the run before its 2000 steps" in caplog.text) == says


@pytest.mark.parametrize(("seconds", "warns"), [(105.0, False), (130.0, True)])
def test_an_overrun_is_said(seconds, warns, caplog):
    budget = TimeBudget(100.0, clock=clock.CLOCK)
    budget._began_at = clock.CLOCK()
    budget._validations.seconds_each = 70.0
    clock.CLOCK.advance(seconds)
    budget.on_train_end(None, None)
    said = "training took 130 s, trainer.max_time is 100 s; the last validation took 70 s" in caplog.text
    assert said == warns


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
def test_steps_between_validations(batches, accumulate, within, epochs, expected):
    settings = {
        "num_training_batches": batches,
        "accumulate_grad_batches": accumulate,
        "val_check_batch": within,
    }
    trainer = SimpleNamespace(**settings, check_val_every_n_epoch=epochs)
    assert steps_between_validations(trainer) == expected


def budget_with(validation):
    """Of a run of 1000 s, by the tests' clock. Args: validation: seconds that each is known to take."""
    budget = ValidationBudget(1000.0, clock=clock.CLOCK)
    budget.seconds_each = validation
    return budget


def due_validations(budget, between):
    """The times of a run at which validations of 10 s, due every `between` seconds, are done."""
    start = clock.CLOCK()
    times = []
    while clock.CLOCK() - start < 1000.0:
        clock.CLOCK.advance(between)
        elapsed = clock.CLOCK() - start
        if budget.postpones(elapsed):
            continue
        times.append(elapsed)
        budget.begin()
        clock.CLOCK.advance(10.0)
        assert budget.end(len(times)) == 10.0
    return times


def test_validations_take_a_bounded_share_of_the_time(caplog):
    """Ten seconds each; every 20 seconds they would take a third."""
    budget = budget_with(10.0)
    with caplog.at_level("INFO"):
        times = due_validations(budget, 20.0)
    assert 0.12 < 10.0 * len(times) / 1000.0 <= 0.15
    assert caplog.text.count("a validation takes 10 s; validations are postponed") == 1
    # A resumed run goes on with the share of the time so far
    resumed = budget_with(None)
    resumed.load_state_dict(budget.state_dict())
    assert resumed.state_dict() == budget.state_dict()
    assert resumed._spent == 10.0 * len(times)


def test_validations_that_take_little_time_are_done_when_they_are_due():
    assert len(due_validations(budget_with(None), 100.0)) == 10


def test_a_last_validation_that_takes_long_is_said(caplog):
    assert budget_with(500.0).postpones(9.0)
    assert "the last validation takes 500 of the 1000 s of trainer.max_time" in caplog.text


def test_a_validation_counts_with_its_own_time():
    """One of 15 s is due as soon as 85 s were trained."""
    budget = budget_with(15.0)
    assert budget.postpones(84.9) and not budget.postpones(85.0)
    budget.begin()
    clock.CLOCK.advance(20.0)
    budget.end(step=7)
    assert (budget.seconds_each, budget.last_step) == (20.0, 7)


def test_a_last_validation_that_takes_little_is_no_warning(caplog):
    caplog.set_level("WARNING", "medconv")  # whatever a test before has set
    assert budget_with(400.0).postpones(9.0)
    assert not caplog.text


def test_a_state_of_an_earlier_version_is_read():
    budget = budget_with(None)
    budget.load_state_dict({"validation": 5.0})
    assert (budget.seconds_each, budget.last_step) == (5.0, 0)
    assert not budget.postpones(100.0)


@pytest.mark.parametrize(("seconds_each", "expected"), [(None, 100), (10.0, 100), (40.0, 200), (100.0, 300)])
def test_postponed_validations_are_further_apart(seconds_each, expected):
    """Due every 100 steps of 2 s, which are 85 % of the time from 35.3 s for a validation on."""
    settings = {"num_training_batches": 100, "accumulate_grad_batches": 1, "val_check_batch": 100}
    trainer = SimpleNamespace(**settings, check_val_every_n_epoch=1)
    assert budget_with(seconds_each).steps_between(trainer, step_seconds=2.0) == expected


def trial(budget, cases, batch_seconds=(60.0, 10.0, 10.0), ranks=1, fitting=None, in_batches=False):
    """The trainer after a trial of three batches: 60 s, then 10 s each.

    Args:
        ranks: of the run.
        fitting: the number of batches that fit on rank 0; None: on this one.
        in_batches: whether a batch is several cases.
    """
    val_loop = SimpleNamespace(_max_batches=[cases])
    trainer = SimpleNamespace(
        num_val_batches=[cases],
        limit_val_batches=1.0,
        world_size=ranks,
        datamodule=SimpleNamespace(validates_batches=in_batches),
        strategy=SimpleNamespace(broadcast=lambda value: fitting or value),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=val_loop)),
    )
    budget.begin()
    for seconds in batch_seconds:
        clock.CLOCK.advance(seconds)
        budget.end_batch()
    budget.end_trial(trainer)
    return trainer


def test_a_validation_that_would_take_too_long_takes_the_first_batches(caplog):
    """Of 10 s each 40 fit into 40 % of 1000 s; the first batch, which starts workers, does not count."""
    trainer = trial(budget_with(None), 100)
    assert trainer.limit_val_batches == 40
    assert trainer.fit_loop.epoch_loop.val_loop._max_batches == [40]
    assert "all 100 batches would take 1000 of the 1000 s of trainer.max_time" in caplog.text


@pytest.mark.parametrize(("in_batches", "expected"), [(False, [40, 80, 27, 40]), (True, [40, 40, 40, 40])])
def test_on_other_devices_the_same_cases_are_validated(in_batches, expected):
    """Two ranks that validate 40 each validate 80: so do one, and three. Batches of one global size stay 40."""
    limits = []
    state = {}
    for ranks in (2, 1, 3, 2):
        budget = budget_with(None)
        if state:
            budget.load_state_dict(state)
        trainer = trial(budget, 100, ranks=ranks, fitting=40, in_batches=in_batches)
        limits.append(trainer.limit_val_batches)
        state = budget.state_dict()
    assert limits == expected


def test_a_time_between_validations_is_steps_at_the_speed_of_a_run():
    """`trainer.val_check_interval=00:00:05:00`; Lightning then counts no batches."""
    settings = {"val_check_batch": None, "check_val_every_n_epoch": None, "_val_check_time_interval": 300.0}
    trainer = SimpleNamespace(num_training_batches=10, accumulate_grad_batches=1, **settings)
    assert budget_with(None).steps_between(trainer, step_seconds=2.0) == 150
    assert budget_with(60.0).steps_between(trainer, step_seconds=2.0) == 300


def test_a_validation_that_fits_takes_all_batches(caplog):
    budget = budget_with(None)
    assert trial(budget, 30).limit_val_batches == 1.0
    assert budget.seconds_each == 300.0
    assert trial(budget_with(None), 40).limit_val_batches == 1.0
    all_in_any_case = ValidationBudget(1000.0, validates_all=True, clock=clock.CLOCK)
    assert trial(all_in_any_case, 100).limit_val_batches == 1.0
    all_in_any_case.load_state_dict({**budget.state_dict(), "val_batches": 3})
    assert trial(all_in_any_case, 100).limit_val_batches == 1.0
    assert not caplog.text


@pytest.mark.parametrize(("batch_seconds", "seconds_each"), [((), 0.0), ((10.0,), 300.0), ((60.0, 0.0), 0.0)])
def test_a_trial_of_few_batches_says_what_it_can(batch_seconds, seconds_each):
    budget = budget_with(None)
    assert trial(budget, 30, batch_seconds).limit_val_batches == 1.0
    assert budget.seconds_each == seconds_each


@pytest.mark.parametrize(("batch_seconds", "counted"), [((60.0, 10.0), 70.0), ((60.0, 500.0), 400.0)])
def test_the_cases_before_training_count_up_to_what_the_last_validation_may_take(batch_seconds, counted):
    budget = TimeBudget(1000.0, clock=clock.CLOCK)
    trainer = SimpleNamespace(
        sanity_checking=True,
        num_val_batches=[2],
        limit_val_batches=1.0,
        world_size=1,
        strategy=SimpleNamespace(broadcast=lambda value: value),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace(_max_batches=[2]))),
    )
    module = None
    budget.on_validation_start(trainer, module)
    for seconds in batch_seconds:
        clock.CLOCK.advance(seconds)
        budget.on_validation_batch_end()
    budget.on_validation_end(trainer, module)
    assert budget.spent == counted and budget.state_dict()["spent"] == counted


def test_one_batch_is_validated_in_any_case():
    assert trial(budget_with(None), 30, (500.0,)).limit_val_batches == 1


def test_rank_0_says_how_many_batches_fit():
    assert trial(budget_with(None), 100, ranks=2, fitting=2).limit_val_batches == 2


@pytest.mark.parametrize(
    ("existing", "ranks", "seconds", "limit"),
    [(100, 1, 400.0, 20), (7, 1, 140.0, 1.0), (20, 1, 400.0, 1.0), (4, 4, 80.0, 1.0), (0, 1, 40.0, 2)],
)
def test_a_resumed_run_that_is_longer_validates_more_batches(existing, ranks, seconds, limit):
    """Two batches took 40 s of 100; of 1000 s twenty fit, if each process has as many, and a validation is due."""
    budget = budget_with(None)
    counts = {"val_batches": 2, "val_batches_of_all": 2}
    budget.load_state_dict({**budget.state_dict(), "validation": 40.0, **counts})
    budget.begin_other_time(SimpleNamespace(num_val_batches=[existing], world_size=ranks, datamodule=None))
    assert budget.seconds_each == seconds
    assert trial(budget, existing, ranks=ranks).limit_val_batches == limit


def test_a_resumed_run_validates_as_many_batches_as_before():
    budget = budget_with(None)
    budget.load_state_dict({**budget.state_dict(), "val_batches": 3})
    assert trial(budget, 100).limit_val_batches == 3
