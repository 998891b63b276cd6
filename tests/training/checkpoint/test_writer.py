"""medconv/training/checkpoint/writer.py and the run folder's choice of a checkpoint: written completely or not
at all; damage is noticed, and the previous checkpoint used.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.checkpoints import CONTENT, first, saved
from helpers.waiting import PATIENCE_S
from lightning import Callback, LightningModule, Trainer

from medconv.cli import main
from medconv.cli.entrypoint import guard
from medconv.config import ConfigError, RunConfig
from medconv.performance.step_profiler import StepProfiler
from medconv.targets.scores import CROSS_ENTROPY, DICE, MAE
from medconv.training.checkpoint import writer
from medconv.training.checkpoint.writer import AtomicCheckpointIO, CheckpointWriter, Ranking
from medconv.training.run_dir import RunDir
from medconv.utils import checkpoint_io
from medconv.utils.cluster import PeerLostError
from medconv.utils.exit_codes import DONE, USER
from medconv.utils.signals import RunInterrupted


def test_the_previous_checkpoint_is_kept(tmp_path):
    last = saved(tmp_path, 1, 2, 3)
    assert (first(last), first(last.with_name("previous.ckpt"))) == (3, 2)
    assert sorted(path.name for path in last.parent.iterdir()) == ["last.ckpt", "previous.ckpt"]


def test_the_name_of_a_checkpoint_is_on_disk_too(tmp_path, monkeypatch):
    """Else a power cut, or a disk that becomes read-only, undoes the rename of the last seconds."""
    flushed = []

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append((path.name, sorted(file.name for file in tmp_path.glob("**/*.ckpt"))))

    monkeypatch.setattr(os, "fsync", fsync)
    last = saved(tmp_path, 1)
    assert flushed[-1] == (last.parent.name, ["last.ckpt"])


def test_the_copy_is_made_before_training_continues(tmp_path):
    """The values at the time of the call are written, with strides and the versions of a module's state."""
    io, gate = AtomicCheckpointIO(), threading.Event()
    network = torch.nn.Conv3d(2, 2, 3).to(memory_format=torch.channels_last_3d)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    io._submit(gate.wait)  # the thread is busy
    io._pending.clear()
    io.save_checkpoint({**CONTENT, "state_dict": network.state_dict()}, tmp_path / "last.ckpt")
    with torch.no_grad():
        network.weight.zero_()
    gate.set()
    io.wait()
    state = checkpoint_io.read(tmp_path / "last.ckpt")["state_dict"]
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert state["weight"].stride() == network.weight.stride()
    assert state._metadata == network.state_dict()._metadata


def test_a_flipped_bit_or_a_missing_end_is_noticed(tmp_path):
    """Or it changes nothing, in a few bytes such as dates and the padding between parts."""
    last, rng = saved(tmp_path, 1), random.Random(0)
    intact, harmless = last.read_bytes(), 0
    places = [
        *range(200),
        *range(len(intact) - 600, len(intact)),
        *(rng.randrange(len(intact)) for _ in range(200)),
    ]
    for place in places:
        damaged = bytearray(intact)
        damaged[place] ^= 1 << rng.randrange(8)
        last.write_bytes(damaged)
        try:
            content = checkpoint_io.read(last)
        except ValueError:
            continue
        harmless += 1
        assert torch.equal(
            content["state_dict"]["weight"], torch.cat([torch.ones(1), torch.arange(1.0, 2000)])
        )
        assert content["curves"] == CONTENT["curves"]
    assert harmless < len(places) // 2
    for length in [0, 1, 100, *(rng.randrange(len(intact)) for _ in range(50)), len(intact) - 1]:
        last.write_bytes(intact[:length])
        with pytest.raises(ValueError, match=re.escape(str(last))):
            checkpoint_io.read(last)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path, caplog, damage):
    last = saved(tmp_path, 1, 2)
    if damage == "gone":  # as if killed between two renamings
        last.unlink()
    else:
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 255
        last.write_bytes(content if damage == "flip" else content[:-50])
    folder = RunDir(tmp_path)
    assert folder.resume_from() == last.with_name("previous.ckpt")
    assert "resuming from the previous checkpoint" in caplog.text and str(last) in caplog.text
    folder.begin(RunConfig())
    assert first(saved(tmp_path, 3)) == 3
    assert first(last.with_name("previous.ckpt")) == 1  # the damaged one did not become it


def test_without_a_whole_one_nothing_is_trained(tmp_path):
    saved(tmp_path, 1).write_bytes(b"")
    with pytest.raises(ValueError, match=r"last\.ckpt: damaged.*run\.resume=never starts a new run"):
        RunDir(tmp_path).resume_from()


def test_best_is_a_hard_link_that_stays_when_last_is_rewritten(tmp_path):
    io, last, best = AtomicCheckpointIO(), tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    for number in (1.0, 2.0, 3.0):
        if number < 3:
            io.link_next(best)
        io.save_checkpoint({**CONTENT, "state_dict": {"weight": torch.full((1,), number)}}, last)
    io.wait()
    assert (first(last), first(best), best.stat().st_nlink) == (3, 2, 2)  # with previous.ckpt
    assert len(list(tmp_path.iterdir())) == 3


def test_best_is_written_before_last(tmp_path):
    """A run that is killed between the two repeats the validation."""
    io, last, best = AtomicCheckpointIO(), tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    last.mkdir()  # cannot be replaced
    io.link_next(best)
    io.save_checkpoint(CONTENT, last)
    with pytest.raises(OSError, match="last.ckpt"):
        io.wait()
    assert checkpoint_io.read(best)["curves"] == CONTENT["curves"]
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "best.ckpt"}


def test_copies_have_the_type_of_the_original():
    tree = defaultdict(list, a=[torch.ones(1)])
    copied = writer.copied({"tree": tree, "counted": Counter("aab")})
    assert copied["counted"] == Counter("aab") and copied["tree"]["b"] == []
    assert torch.equal(copied["tree"]["a"][0], torch.ones(1)) and copied["tree"]["a"][0] is not tree["a"][0]


def test_a_run_that_resumes_from_another_has_a_best_of_its_own(dataset, tmp_path):
    """Also if it is worse than that of the other run. Its totals are those of all steps."""
    tiny.train(dataset, tmp_path / "one", "logger=none", "trainer.max_steps=2", "data.samples_per_epoch=4")
    content = checkpoint_io.read(tmp_path / "one/checkpoints/last.ckpt")
    content["callbacks"]["CheckpointWriter"].update(best=2.0, best_mean=2.0)
    torch.save(content, tmp_path / "x.ckpt")
    more = ["trainer.max_steps=4", f"run.resume={tmp_path / 'x.ckpt'}", "data.samples_per_epoch=4"]
    summary = tiny.train(dataset, tmp_path / "two", "logger=none", *more)
    assert summary["val/dice"] is not None
    callbacks = checkpoint_io.read(tmp_path / "two/checkpoints/best.ckpt")["callbacks"]
    assert callbacks["CheckpointWriter"]["best"] <= 1
    assert callbacks["StepProfiler"]["samples"] == 2 * 4
    assert summary["wall_seconds"] > content["callbacks"]["StepProfiler"]["wall_seconds"] > 0
    # a second start begins there again: what the first one left is not its best
    for name in ("best", "last"):
        torch.save(content, tmp_path / f"two/checkpoints/{name}.ckpt")
    RunDir(tmp_path / "two").write_summary(status="preempted")
    assert tiny.train(dataset, tmp_path / "two", "logger=none", *more)["val/dice"] == summary["val/dice"]


def test_without_hard_links_the_file_is_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(writer.os, "link", refuse)
    last = saved(tmp_path, 1, 2)
    assert (first(last), first(last.with_name("previous.ckpt"))) == (2, 1)


class Full(Callback):
    """From the third step on no file may be larger than so many bytes: writing a checkpoint fails midway."""

    def __init__(self, room: int) -> None:
        self.room = room

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, resource.RLIM_INFINITY))


FULL = [
    "trainer.max_steps=8",
    "run.checkpoint_interval=00:00:00:00",
    "+callbacks.full._target_=tests.training.checkpoint.test_writer.Full",
]


def test_a_full_disk_ends_the_run_and_leaves_the_previous_checkpoint(dataset, tmp_path, capfd):
    settings = [*FULL, "+callbacks.full.room=30000", "logger=none"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        code = guard(lambda: DONE * bool(tiny.train(dataset, tmp_path / "run", *settings)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = tmp_path / "run/checkpoints/last.ckpt"
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("error", "Traceback"))]
    assert (code, lines) == (USER, [f"error: {last}: cannot be written (File too large)"])
    assert checkpoint_io.read(last)["global_step"] in (2, 3)
    assert {path.name for path in last.parent.iterdir()} == {"last.ckpt", "previous.ckpt"}


def _train(arguments, cwd, stderr):
    """The command, in a forked process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(stderr, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    sys.argv = ["medconv", "train", *arguments]
    sys.exit(guard(lambda: main.run(["train", *arguments])))


def test_if_nothing_can_be_written_the_error_is_one_line(dataset, tmp_path):
    """Neither logs nor the summary; the first file that fails is named."""
    arguments = tiny.overrides(dataset, *FULL, "+callbacks.full.room=1", f"run.dir={tmp_path / 'run'}")
    read, write = os.pipe()  # a file could not hold its messages
    process = multiprocessing.get_context("fork").Process(target=_train, args=(arguments, tmp_path, write))
    process.start()
    os.close(write)
    with os.fdopen(read) as pipe:
        stderr = pipe.read()
    process.join()
    assert process.exitcode == USER, stderr
    assert re.fullmatch(r"error: \S+/run(/\S+)?: cannot be written \(File too large\)\n", stderr)
    assert checkpoint_io.read(tmp_path / "run/checkpoints/last.ckpt")["global_step"] in (2, 3)


class Small:
    """A file with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

    def flush(self) -> None:
        """There is nothing to flush."""


@pytest.mark.parametrize("room", [0, 10, 100, 1000, 5000])
def test_the_error_of_a_failed_write_is_kept(room):
    """torch raises it only if the first bytes fail."""
    with pytest.raises(OSError, match="No space left"):
        checkpoint_io.save(CONTENT, Small(room))


def test_an_error_in_the_thread_is_raised(tmp_path):
    io = AtomicCheckpointIO()
    (tmp_path / "no folder").touch()
    io.save_checkpoint(CONTENT, tmp_path / "no folder/last.ckpt")
    with pytest.raises(OSError, match="no folder/last.ckpt"):
        io.wait()
    io.check()  # it is raised once


def test_a_write_that_fails_during_the_check_is_not_forgotten():
    class Late(Future):
        """Done at the second look."""

        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return self.looks > 1

    io, late = AtomicCheckpointIO(), Late()
    late.set_exception(OSError("no room"))
    io._pending.append(late)
    io.check()
    with pytest.raises(OSError, match="no room"):
        io.wait()


def _holds(folder, resume, ready):
    held = RunDir(folder, resume)  # as long as this is there
    held.begin(RunConfig())
    if os.fork():
        ready.set()
    time.sleep(600)  # the child, as a worker would, outlives a parent that is killed
    os._exit(0)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_is_of_one_run_at_a_time(tmp_path, resume):
    saved(tmp_path / "run", 1)
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    other = fork.Process(target=_holds, args=(tmp_path / "run", "auto", ready), daemon=True)
    other.start()
    assert ready.wait(PATIENCE_S)
    with pytest.raises(
        ConfigError, match=r"run: another process is training there; .*choose another run\.name"
    ):
        RunDir(tmp_path / "run", resume).begin(RunConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    worker = int(Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text())
    other.kill()
    other.join()
    with closing(RunDir(tmp_path / "run", resume)) as folder:
        folder.begin(RunConfig())
    os.kill(worker, signal.SIGKILL)


def test_a_best_that_is_damaged_hides_no_error(tmp_path):
    folder = RunDir(tmp_path)
    saved(tmp_path, 1).with_name("best.ckpt").write_bytes(b"")
    about = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")), world_size=1, global_step=3
    )
    for error, status in [
        (KeyError("the first"), "failed"),
        (PeerLostError("gone"), "preempted"),
        (RunInterrupted(), "preempted"),
    ]:
        with pytest.raises(type(error)), folder.recording(about, StepProfiler()):
            raise error
        assert folder.summary()["status"] == status and folder.summary()["steps"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "missing"),
        ("", "empty"),
        ("a: [", "damaged"),
        ("just text", "empty, or not a config"),
        ("a: 1", "empty, or not a config"),
    ],
)
def test_a_run_without_its_config_does_not_go_on(tmp_path, text, message):
    saved(tmp_path, 1)
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.yaml: {message}.*run\.resume=never starts a new run"):
        RunDir(tmp_path).earlier_plan()


VALUES = (0.5, 0.1, 0.4, 0.2, 0.15, 0.3)
MEANS = (0.5, 0.22, 0.346, 0.2438, 0.17814, 0.263442)  # 0.7 of each value, 0.3 of the mean before


def best_of(metric, *values, ranking=None):
    """The best value after each validation."""
    ranking = ranking or Ranking()
    best = []
    for value in values:
        before = ranking.best
        is_best = ranking.add(value, metric)
        assert is_best or ranking.best == before
        best.append(ranking.best)
    return best


def test_dice_and_errors_rank_each_validation():
    assert best_of(DICE, 0.5, 0.9, math.nan, 0.8) == [0.5, 0.9, 0.9, 0.9]
    assert best_of(MAE, math.nan, 5, 3, math.inf, 4) == [math.inf, 5, 3, 3, 3]


def test_cross_entropy_ranks_by_the_running_mean():
    """A single low value at the start of a run is no reason to keep that checkpoint."""
    lowest = [VALUES[MEANS.index(min(MEANS[:count]))] for count in range(1, 7)]
    assert best_of(CROSS_ENTROPY, *VALUES) == lowest == [0.5, 0.1, 0.1, 0.1, 0.15, 0.15]
    assert best_of(CROSS_ENTROPY, math.nan, 0.5, math.nan, 0.1)[1:] == [0.5, 0.5, 0.1]


def test_a_ranking_that_goes_on_ranks_as_one_that_never_stopped():
    for count in range(1, 6):
        first, second = Ranking(), Ranking()
        best_of(CROSS_ENTROPY, *VALUES[:count], ranking=first)
        second.load_state_dict(first.state_dict())
        assert best_of(CROSS_ENTROPY, *VALUES[count:], ranking=second)[-1] == pytest.approx(0.15)


@pytest.mark.parametrize("has_best", [False, True])
def test_a_run_from_the_checkpoint_of_another_folder_ranks_anew(tmp_path, has_best):
    """There is no best checkpoint here, with which its validations could be compared."""
    writer = CheckpointWriter(tmp_path, AtomicCheckpointIO(), every=60)
    writer.load_state_dict({"best": 0.1, "mean": 0.1, "best_mean": 0.1})
    if has_best:
        (tmp_path / "best.ckpt").touch()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    writer.on_train_start(trainer, LightningModule())
    assert writer.best == (0.1 if has_best else None)


def test_a_validation_that_scores_less_leaves_the_best_checkpoint(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path, AtomicCheckpointIO(), every=60)
    plugins = [writer.io]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, plugins=plugins)
    module = LightningModule()
    trainer.strategy.connect(module)
    are_best = []
    for score in (0.5, 0.9, 0.8, 0.95):
        monkeypatch.setattr(Trainer, "callback_metrics", {DICE.name: score})
        writer.on_validation_end(trainer, module)
        writer.save(trainer)
        writer.io.wait()
        are_best.append((tmp_path / "best.ckpt").samefile(tmp_path / "last.ckpt"))
    assert are_best == [True, True, False, True]
