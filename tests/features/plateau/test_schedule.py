"""medconv/features/plateau/schedule.py: the learning rate falls as torch's does, and resumes."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.schedules import make, rates
from torch import nn
from torch.optim import lr_scheduler as lr

from medconv.features.plateau.schedule import PlateauSchedule
from medconv.training.callbacks.validated import FollowScores
from medconv.training.optim.lr_schedulers import cosine

SCORES = [0.1, 0.2, 0.2, 0.205, 0.3, 0.3, 0.29, 0.3, 0.31, 0.1, math.nan, 0.2, 0.2, 0.2]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_plateau_equals_that_of_torch(mode):
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


def test_plateau_resumes_from_its_state():
    def rates_after(schedule, scores):
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


@pytest.mark.parametrize(("folder", "best"), [("run", 0.9), ("another", -math.inf)])
def test_plateau_forgets_the_scores_of_another_run(folder, best, tmp_path):
    schedule = make(PlateauSchedule, 100)
    schedule.validated(0.9)
    trainer = SimpleNamespace(
        ckpt_path=tmp_path / folder / "checkpoints/last.ckpt",
        default_root_dir=tmp_path / "run",
        lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)],
    )
    FollowScores().on_train_start(trainer, None)
    assert schedule.best == best


def test_plateau_resumes_after_another_schedule_or_another_metric():
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, "patience must be a whole number of validations, 1 or more, got 0"),
        ({"mode": "up"}, "mode must be max or min, got up"),
        ({"min_delta": -1}, "min_delta must be 0 or more, got -1"),
        ({"min_factor": 2}, "min_factor must be a share of the learning rate, 0 to 1, got 2"),
        ({"factor": 1}, "factor must lie between 0 and 1, got 1"),
    ],
)
def test_invalid_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make(PlateauSchedule, 10, **arguments)


def test_it_has_a_warmup():
    assert rates(make(PlateauSchedule, 100, warmup_steps=4), 5) == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1]
    )
