"""Runs that are killed at any moment and started again by the same command end as one that was never
killed, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import resuming, tiny
from helpers.resuming import STEPS, assert_the_same_run, last, start, status, train, wait_for
from helpers.waiting import until
from lightning import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from medconv.data.augmentation.augment import Augment
from medconv.utils import signals
from medconv.utils.exit_codes import INTERRUPTED, PREEMPTED


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(dataset, folder, STEPS)
    return folder


def test_a_run_that_was_killed_ends_as_one_that_was_not(dataset, whole, tmp_path):
    assert train(dataset, tmp_path / "run", STEPS, kills=2) == 2
    assert_the_same_run(whole, tmp_path / "run")


MANY = {
    "every batch": [],
    "accumulated": ["trainer.accumulate_grad_batches=2"],
    "validated within epochs": ["trainer.val_check_interval=3"],
    "every second": [
        "run.checkpoint_interval=00:00:00:01",
        "trainer.check_val_every_n_epoch=3",
        "data.num_workers=1",
    ],
    "by epochs, accumulated": [
        "trainer.accumulate_grad_batches=2",
        "trainer.max_steps=-1",
        "trainer.max_epochs=15",
    ],
    "by another optimizer and schedule": ["scheduler=step", "optimizer=adamw"],
    "with transforms of MONAI": ["augmentation=monai"],
    "accumulated and averaged at every step": [
        "trainer.accumulate_grad_batches=3",
        "weight_averaging.begin=1",
        "weight_averaging.every=1",
    ],
    "with classes drawn alike": ["sampler=balanced", "data.num_workers=1"],
    "in double precision": [
        "trainer.precision=64-true",
        "weight_averaging.begin=2",
        "weight_averaging.every=2",
    ],
    "with computed weights": ["conv=basis", "perf.activation_checkpointing=pointwise"],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MANY)
def test_runs_that_were_killed_often(dataset, tmp_path, how):
    """Eleven configurations, killed ten times each, in training, validation, writing, or starting."""
    settings = [*STEPS, "trainer.max_steps=60", *MANY[how]]
    train(dataset, tmp_path / "whole", settings)
    assert train(dataset, tmp_path / "run", settings, kills=10, seed=len(how)) == 10
    assert_the_same_run(tmp_path / "whole", tmp_path / "run")


class KilledOnce(Callback):
    """Kills this process in a hook, with all that it has logged on disk, unless a file says that it was killed."""

    def __init__(self, hook: str, path: str) -> None:
        self.path = Path(path)
        setattr(self, hook, self._kill)

    def _kill(self, trainer: Any, *_: Any) -> None:
        if self.path.exists():
            return
        self.path.touch()
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()
        trainer.strategy.checkpoint_io.wait()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "hook", [pytest.param("on_train_batch_start", marks=pytest.mark.slow), "on_train_end"]
)
def test_what_is_logged_before_or_after_all_steps_is_logged_once(dataset, whole, tmp_path, hook):
    """Kernels before the first step, of which there is a checkpoint, and pictures of the worst cases."""
    settings = [
        *STEPS,
        "+callbacks.killed._target_=tests.integration.test_resuming.KilledOnce",
        f"+callbacks.killed.hook={hook}",
        f"+callbacks.killed.path={tmp_path / 'killed'}",
    ]
    killed = start(dataset, tmp_path / "run", settings)
    killed.join()
    assert killed.exitcode == resuming.KILLED
    assert last(tmp_path / "run")["global_step"] == (0 if hook == "on_train_batch_start" else 16)
    train(dataset, tmp_path / "run", settings)
    assert_the_same_run(whole, tmp_path / "run")
    assert sum(tag.startswith("images/worst/") for tag in resuming.events(whole)) == 3


def test_told_to_stop_while_it_validates(dataset, whole, tmp_path):
    """By Slurm. The last validation, of the last step, is given up and done after the restart; the job is
    put back.
    """
    folder, requeued = tmp_path / "run", tmp_path / "requeued"
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {requeued}; cp {folder}/summary.json {tmp_path}/then.json\n')
    scontrol.chmod(0o755)
    environment = {"SLURM_JOB_ID": "4711", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    # at the first case of the third validation, after steps 7, 14 and 17
    told = ["+callbacks.beat.at=v7", "+callbacks.beat.signal=SIGUSR1"]
    process = start(dataset, folder, [*STEPS, *told], **environment)
    process.join()
    assert process.exitcode == PREEMPTED
    assert resuming.beats(folder).read_text().count("v") < 9  # the last validation was not completed
    assert requeued.read_text().split() == ["requeue", "4711"]
    assert json.loads((tmp_path / "then.json").read_text())["status"] == status(folder) == "preempted"
    assert last(folder)["global_step"] == 17
    train(dataset, folder, STEPS)
    assert_the_same_run(whole, folder)


def test_ctrl_c_keeps_the_step_and_a_second_one_does_not_wait(dataset, whole, tmp_path):
    folder = tmp_path / "run"
    settings = [*STEPS, "run.checkpoint_interval=00:01:00:00", "+callbacks.beat.signal=SIGINT"]
    once = start(dataset, folder, [*settings, "+callbacks.beat.at=t3"])
    once.join()
    assert (once.exitcode, status(folder)) == (INTERRUPTED, "interrupted")
    assert last(folder)["global_step"] == 3  # no other checkpoint was due
    twice = start(dataset, folder, [*settings, "+callbacks.beat.at=v1", "+callbacks.beat.pause=1e6"])
    stopping = "Stopping after this step"
    until(lambda: resuming.messages(folder).read_text().count(stopping) == 2)  # once in each process
    os.kill(twice.pid, signal.SIGINT)
    twice.join()
    assert (twice.exitcode, status(folder)) == (INTERRUPTED, "interrupted")
    assert last(folder)["global_step"] == 3
    train(dataset, folder, STEPS)
    assert_the_same_run(whole, folder)


def test_workers_outlive_a_killed_run_by_seconds(dataset, tmp_path):
    process = start(dataset, tmp_path / "run", [*STEPS, "trainer.max_steps=100000"])
    wait_for(process, tmp_path / "run", 1)
    workers = [
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    assert len(workers) >= 2
    process.kill()
    process.join()
    until(lambda: not any(Path(f"/proc/{pid}").is_dir() for pid in workers))


class Hanging(Augment):
    """A worker that hangs at a sample while a file exists, as at a dead network disk."""

    file = ""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if 12 in list(batch["sample"]) and Path(self.file).exists():
            time.sleep(600)
        return super().__call__(batch)


def hanging(file, **settings):
    augment = Hanging(**settings)
    augment.file = file
    return augment


@pytest.mark.slow
def test_a_signal_ends_a_run_whose_worker_hangs(dataset, whole, tmp_path):
    folder = tmp_path / "run"
    blocker = tmp_path / "blocker"
    blocker.touch()
    augment = [
        "augmentation._target_=tests.integration.test_resuming.hanging",
        f"+augmentation.file={blocker}",
    ]
    settings = [*STEPS, "run.checkpoint_interval=00:01:00:00", *augment]
    process = start(dataset, folder, settings)
    wait_for(process, folder, 6, "t")
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert (process.exitcode, status(folder)) == (PREEMPTED, "preempted")
    assert last(folder)["global_step"] == 6
    blocker.unlink()
    train(dataset, folder, settings)
    assert_the_same_run(whole, folder)


class Stopped(Callback):
    """Sends this process SIGTERM before it trains, and writes a file if the process goes on nevertheless."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_sanity_check_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        Path(self.path).touch()


def test_a_signal_before_the_first_batch_is_not_put_off(dataset, tmp_path):
    """As a run waits for other machines, workers or a compiler, and looks at no note."""
    settings = [
        "+callbacks.stopped._target_=tests.integration.test_resuming.Stopped",
        f"+callbacks.stopped.path={tmp_path / 'went_on'}",
    ]
    with pytest.raises(signals.RunInterrupted) as caught:
        tiny.train(dataset, tmp_path / "run", "logger=none", *settings)
    assert not caught.value.agreed and status(tmp_path / "run") == "preempted"
    assert not (tmp_path / "went_on").exists()
