"""medconv/training/callbacks/thaw.py: frozen parameters stay to the last bit, then train; also if resumed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import resuming, tiny
from helpers.processes import Forked
from lightning import Callback

from medconv.config import ConfigError
from medconv.utils.exit_codes import DONE

HERE = "tests.training.callbacks.test_thaw"
SPY = "tests.training.callbacks.test_weight_averaging.Weights"
THAWED = 4  # steps before all parameters train
SETTINGS = [
    "trainer.max_steps=8",
    "init.freeze=['^(encoder|down)']",
    "init.thaw_at=0.5",
    "scheduler=constant",
    "scheduler.warmup_steps=1",
    "run.checkpoint_interval=00:00:00:00",
    "model.norm=batch",
]


class Break(Callback):
    """Ends the run with an error before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("broken")


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    spy = [f"+callbacks.spy._target_={SPY}", f"+callbacks.spy.path={folder}"]
    tiny.train(dataset, folder / "run", *SETTINGS, *spy)
    return folder


def test_frozen_parameters_stay_until_their_share_of_the_run_is_done(whole):
    after = [torch.load(whole / f"{step}.pt", weights_only=True) for step in range(1, 9)]
    for name in after[0]:
        moves = [not torch.equal(one[name], two[name]) for one, two in pairwise(after)]
        is_frozen = name.startswith(("encoder", "down"))
        # moves[k] is what step k + 2 did
        assert moves == [not is_frozen] * (THAWED - 1) + [True] * (len(after) - THAWED), name


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, THAWED)), 6])
def test_a_run_that_broke_ends_as_one_that_did_not(dataset, whole, tmp_path, step):
    broken = [f"+callbacks.break._target_={HERE}.Break", f"+callbacks.break.step={step}"]
    with pytest.raises(RuntimeError, match="broken"):
        tiny.train(dataset, tmp_path / "run", *SETTINGS, *broken)
    tiny.train(dataset, tmp_path / "run", *SETTINGS)
    resuming.assert_the_same_run(whole / "run", tmp_path / "run")


def test_the_learning_rate_warms_up_again_and_the_log_says_so(dataset, tmp_path, caplog):
    with caplog.at_level("INFO", logger="medconv"):
        settings = [*SETTINGS, "scheduler.warmup_steps=2", "trainer.max_steps=10", "callbacks=default"]
        tiny.train(dataset, tmp_path / "run", *settings)
    rates = tiny.logged(tmp_path / "run", "train/lr")
    full = rates[1]
    assert rates == pytest.approx([full / 2, full, full, full, full, full / 2, full, full, full, full])
    frozen = "14 of 24 parameters, 0.00431 of 0.0059 million weights, and the statistics of 4 batch norms"
    assert f"init.freeze: {frozen} stay as they are for 50% of the run (init.thaw_at)" in caplog.text
    assert caplog.text.count(f"init.thaw_at=0.5: from step 6 on, {frozen} train too; the learning") == 1


@pytest.mark.parametrize("setting", ["optimizer=sgd", "trainer.strategy=ddp"])
def test_parameters_thaw_with_momentum_and_with_one_process_of_ddp(dataset, tmp_path, setting):
    """Fused SGD takes no parameters without a momentum beside others; DDP waits for all gradients."""
    few = ["trainer.max_steps=4", "run.checkpoint_interval=00:01:00:00", f"run.dir={tmp_path / 'run'}"]
    code, output = Forked(*tiny.overrides(dataset, *SETTINGS, setting, *few), cwd=tmp_path).wait()
    assert code == DONE, output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["init.freeze=null"], r"init\.thaw_at=0\.5 needs init\.freeze"),
        (
            [
                "scheduler._target_=torch.optim.lr_scheduler.StepLR",
                "~scheduler.warmup_steps",
                "+scheduler.step_size=1",
            ],
            r"init\.thaw_at=0\.5 is a share of the run, but its progress is not known",
        ),
    ],
)
def test_settings_that_cannot_be_are_errors(dataset, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny.train(dataset, tmp_path / "run", *SETTINGS, *settings)
