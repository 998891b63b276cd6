"""Runs that are killed at any moment and started again by the same command end as one that was never
killed, bit for bit.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from lightning import Callback, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medconv.cli.entrypoint import guard
from medconv.data.loading import datamodule
from medconv.training.checkpoint import resumable_loop
from medconv.training.checkpoint.resumable_loop import ResumableEpochLoop
from medconv.utils import checkpoint_io, signals
from medconv.utils.exit_codes import DONE, INTERRUPTED, PREEMPTED

STEPS = [
    "data.num_workers=2",
    # seven batches: an epoch's last step has fewer of them where gradients are accumulated
    "data.samples_per_epoch=14",
    "trainer.max_steps=17",
    "run.checkpoint_interval=00:00:00:00",
    "model._target_=tests.integration.test_resuming.Dropping",
    "weight_averaging.begin=4",
    "weight_averaging.every=3",
    "+callbacks.beat._target_=tests.integration.test_resuming.Beat",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tiny", "medconv.sweeps.launch", "torch.utils.tensorboard"])
KILLED = -signal.SIGKILL


class Beat(Callback):
    """Adds a byte to a file for each training batch, and for each case that is validated. Args: pause:
    seconds for a case.
    """

    def __init__(self, path: str, pause: float = 0.0) -> None:
        self.path, self.pause = path, pause

    def on_train_batch_start(self, *args: Any) -> None:
        self._beat("t")

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._beat("v")
            time.sleep(self.pause)

    def _beat(self, what: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(what)


class Dropping(tiny.Net):
    """Draws random numbers in each forward pass of the training, as networks with dropout do."""

    def forward(self, image: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        return super().forward(torch.nn.functional.dropout(image, 0.3, self.training), *arguments, **settings)


def start(dataset: Path, folder: Path, settings: Sequence[str], **environment: str) -> Any:
    """A process that trains, from a server that has imported all: it begins at once."""
    process = SERVER.Process(target=_train, args=(dataset, folder, settings, environment))
    process.start()
    return process


def _train(dataset: Path, folder: Path, settings: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of the loaders' workers, as in the command
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's server ignores it
    beat = f"+callbacks.beat.path={beats(folder)}"
    sys.exit(guard(lambda: tiny.train(dataset, folder, *settings, beat) and DONE))


def beats(folder: Path) -> Path:
    return folder.with_suffix(".beats")


def wait_for(process: Any, folder: Path, number: int, kind: str = "tv") -> None:
    """Until the process has done so many more batches of a kind, or ended."""
    before = _counted(folder, kind)
    while process.is_alive() and _counted(folder, kind) < before + number:
        time.sleep(0.005)


def _counted(folder: Path, kind: str) -> int:
    text = beats(folder).read_text() if beats(folder).is_file() else ""
    return sum(text.count(letter) for letter in kind)


def train(dataset: Path, folder: Path, settings: Sequence[str], kills: int = 0, seed: int = 0) -> int:
    """One run to its end, killed up to so many times; returns how often it was."""
    rng, done = random.Random(seed), 0
    while True:
        process = start(dataset, folder, settings)
        if done < kills:
            wait_for(process, folder, rng.randint(1, 8))
            time.sleep(rng.random() * 0.05)
            process.kill()
        process.join(120)
        done += process.exitcode == KILLED
        if process.exitcode != KILLED:
            assert process.exitcode == DONE
            return done


def same(one: Any, other: Any, where: str = "") -> None:
    """Every tensor and value, to the last bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}.{index}")
    else:
        assert one == other, where


def rows(folder: Path) -> list[dict[str, str]]:
    """Of `metrics.csv`, without how long things took."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {k: v for k, v in row.items() if v and not k.startswith("perf/")} for row in csv.DictReader(file)
        ]


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    read.Reload()
    tags = [tag for tag in read.Tags()["scalars"] if not tag.startswith("perf/")]
    pictures = {tag: [(event.step, 0.0) for event in read.Images(tag)] for tag in read.Tags()["images"]}
    return {**pictures, **{tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}}


def assert_the_same_run(one: Path, other: Path) -> None:
    for name in ("last", "best"):
        a, b = (checkpoint_io.read(folder / f"checkpoints/{name}.ckpt") for folder in (one, other))
        for key in (
            "state_dict",
            "current_model_state",
            "averaging_state",
            "optimizer_states",
            "lr_schedulers",
            "global_step",
        ):
            same(a[key], b[key], f"{name} {key}")
        same(a["medconv"]["validation"], b["medconv"]["validation"], name)
        assert a["callbacks"].keys() == b["callbacks"].keys()
        for key in a["callbacks"].keys() - {"StepProfiler"}:  # how long things took
            same(a["callbacks"][key], b["callbacks"][key], f"{name} {key}")
    assert rows(one) == rows(other)
    assert events(one) == events(other)


def status(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["status"]


def last(folder: Path) -> dict[str, Any]:
    return checkpoint_io.read(folder / "checkpoints/last.ckpt")


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(dataset, folder, STEPS)
    return folder


def test_a_run_that_was_killed_ends_as_one_that_was_not(dataset: Path, whole: Path, tmp_path: Path) -> None:
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
        "trainer.max_epochs=4",
    ],
    "by another optimizer and schedule": ["scheduler=step", "optimizer=adamw"],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", MANY)
def test_runs_that_were_killed_often(dataset: Path, tmp_path: Path, how: str) -> None:
    """Six configurations, killed five times each, in training, validation, writing, or starting."""
    settings = [*STEPS, "trainer.max_steps=25", *MANY[how]]
    train(dataset, tmp_path / "whole", settings)
    assert train(dataset, tmp_path / "run", settings, kills=5, seed=len(how)) == 5
    assert_the_same_run(tmp_path / "whole", tmp_path / "run")


def test_told_to_stop_while_it_validates(dataset: Path, whole: Path, tmp_path: Path) -> None:
    """By Slurm. The last validation, of the last step, is given up and done after the restart; the job is
    put back.
    """
    folder, said = tmp_path / "run", tmp_path / "said"
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {said}; cp {folder}/summary.json {tmp_path}/then.json\n')
    scontrol.chmod(0o755)
    environment = {"SLURM_JOB_ID": "4711", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    process = start(dataset, folder, [*STEPS, "+callbacks.beat.pause=1"], **environment)
    wait_for(process, folder, 7, "v")  # the first case of the third validation, after steps 7, 14 and 17
    os.kill(process.pid, signal.SIGUSR1)
    begun = time.monotonic()
    process.join(60)
    assert time.monotonic() - begun < 10
    assert process.exitcode == PREEMPTED
    assert said.read_text().split() == ["requeue", "4711"]
    assert json.loads((tmp_path / "then.json").read_text())["status"] == status(folder) == "preempted"
    assert last(folder)["global_step"] == 17
    train(dataset, folder, STEPS)
    assert_the_same_run(whole, folder)


def test_ctrl_c_keeps_the_step_and_a_second_one_does_not_wait(
    dataset: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    once = start(dataset, folder, [*STEPS, "run.checkpoint_interval=00:01:00:00"])
    wait_for(once, folder, 3, "t")
    os.kill(once.pid, signal.SIGINT)
    once.join(60)
    assert (once.exitcode, status(folder)) == (INTERRUPTED, "interrupted")
    reached = last(folder)["global_step"]
    assert 3 <= reached <= 5  # no other checkpoint was due
    twice = start(
        dataset, folder, [*STEPS, "run.checkpoint_interval=00:01:00:00", "+callbacks.beat.pause=20"]
    )
    wait_for(twice, folder, 1, "v")
    os.kill(twice.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(twice.pid, signal.SIGINT)
    begun = time.monotonic()
    twice.join(60)
    assert time.monotonic() - begun < 10
    assert (twice.exitcode, status(folder)) == (INTERRUPTED, "interrupted")
    assert last(folder)["global_step"] == reached
    train(dataset, folder, STEPS)
    assert_the_same_run(whole, folder)


def test_workers_end_when_they_are_told_to_or_left_alone(dataset: Path, tmp_path: Path) -> None:
    """They heed SIGTERM of the main process, as multiprocessing ends what hangs, and outlive a killed one
    by seconds.
    """
    process = start(dataset, tmp_path / "run", [*STEPS, "trainer.max_steps=100000"])
    wait_for(process, tmp_path / "run", 1)
    workers = [
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    assert len(workers) >= 2
    process.kill()
    process.join(60)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").is_dir() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    worker = multiprocessing.get_context("fork").Process(target=_idle_worker, daemon=True)
    worker.start()
    time.sleep(0.5)
    os.kill(worker.pid or 0, signal.SIGINT)  # as a terminal sends it to all
    os.kill(worker.pid or 0, signal.SIGUSR1)
    worker.join(0.5)
    assert worker.is_alive()
    worker.terminate()
    worker.join(20)
    assert worker.exitcode == 0


def _idle_worker() -> None:
    datamodule._settle(0)
    time.sleep(60)


def test_a_signal_before_training_ends_the_process_at_once() -> None:
    for number in signals.PREEMPTING:
        with pytest.raises(signals.RunInterrupted) as caught, signals.raising():
            os.kill(os.getpid(), number)
        assert caught.value.number == number


class Told(Callback):
    """This process is told to stop before it trains, and leaves word when it goes on nevertheless."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_sanity_check_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        Path(self.path).touch()


def test_a_signal_before_the_first_batch_is_not_put_off(dataset: Path, tmp_path: Path) -> None:
    """As a run waits for other machines, workers or a compiler, and looks at no note."""
    told = [
        "+callbacks.told._target_=tests.integration.test_resuming.Told",
        f"+callbacks.told.path={tmp_path / 'went_on'}",
    ]
    with pytest.raises(signals.RunInterrupted) as caught:
        tiny.train(dataset, tmp_path / "run", "logger=none", *told)
    assert not caught.value.agreed and status(tmp_path / "run") == "preempted"
    assert not (tmp_path / "went_on").exists()


def test_signals_are_noted_once_somebody_looks_at_the_note() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
    try:
        _note_signals()
    finally:
        signal.signal(signal.SIGINT, before)


def _note_signals() -> None:
    asked = signals.StopRequest()
    with pytest.raises(KeyboardInterrupt), asked.noted():
        os.kill(os.getpid(), signal.SIGINT)
    asked.heard = True
    with asked.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.number == signal.SIGUSR1  # the job is put back, though it is told to end as well
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def layout_that_stops(agreed: bool, **_: Any) -> None:
    raise signals.RunInterrupted(signal.SIGTERM, agreed)


@pytest.mark.parametrize("agreed", [True, False])
def test_a_process_that_lightning_started_ends_well_where_all_do(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    """Else Lightning kills the first, which may still be writing; where it ends alone the first must be
    told.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    layout = [
        "data.layout._target_=tests.integration.test_resuming.layout_that_stops",
        f"+data.layout.agreed={agreed}",
    ]
    with pytest.raises(SystemExit) as caught:
        tiny.train(dataset, tmp_path / "run", *layout)
    assert isinstance(caught.value, signals.RunInterrupted) != agreed
    assert agreed == (caught.value.code == DONE)


def test_what_is_not_there_of_lightnings_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its own names that the loop replaces, which would otherwise silently not be called."""
    own = {"owed", "max_steps", "_between_steps"}
    assert {name for name in vars(ResumableEpochLoop) if not name.startswith("__")} - own <= set(
        resumable_loop._OF_THE_LOOP
    )
    trainer: Any = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.delattr(_TrainingEpochLoop, "_should_check_val_fx")
    with pytest.raises(ValueError, match=r"lightning [\d.]+ has no _should_check_val_fx.*below 2\.7"):
        resumable_loop.install(trainer, *([None] * 3))  # type: ignore[arg-type]


def test_what_slurm_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    signals.requeue()  # no job
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    signals.requeue()
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'slurm_requeue: disabled' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    signals.requeue()
    assert ["No such file" in caplog.messages[0], "disabled" in caplog.messages[1], len(caplog.messages)] == [
        True,
        True,
        2,
    ]


def test_a_job_is_put_back_so_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose time is up each time before it has done anything."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for most, restarts in (("", "49"), ("", "50"), ("3", "2"), ("3", "3")):
        monkeypatch.setenv("MAX_RESTARTS", most)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        signals.requeue()
    assert (tmp_path / "said").read_text() == "requeue 12\n" * 2
    assert [m for m in caplog.messages if "MAX_RESTARTS" in m][1].startswith(
        "Slurm has started job 12 again 3 times"
    )
