"""medconv/data/faults.py: an error in a loader worker names the case, keeps its traceback, and says one thing to a user."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from makers import recipe
from makers import tiny as tiny_dataset

from medconv import commands
from medconv.data import faults
from medconv.data.datamodule import DataModule
from medconv.data.prepare import prepare


class Failing:
    """An augmentation that fails at one sample. Args: how: to fail. The others are whatever a config has."""

    def __init__(self, sample: int, how: str, **ignored: Any) -> None:
        self.sample, self.how = sample, how

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.sample in batch["sample"].tolist():
            if self.how in ("SIGKILL", "SIGTERM", "SIGSEGV"):
                os.kill(os.getpid(), getattr(signal, self.how))
            kinds = {"ValueError": ValueError, "TypeError": TypeError, "MemoryError": MemoryError}
            raise kinds[self.how]("the rotation went wrong")
        return batch


def module(folder: Path, augment: Any, workers: int) -> DataModule:
    dataset = tiny_dataset(folder / "data", 3)
    store = prepare(dataset, recipe(), folder / "cache", 1)
    settings: dict[str, Any] = {"seed": 0, "batch_size": 2, "samples_per_epoch": 8, "foreground_share": 0.5}
    return DataModule(store, dataset.cases, [], (6, 5, 4), augment, num_workers=workers, **settings)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind"), [("ValueError", ValueError), ("TypeError", RuntimeError), ("MemoryError", ValueError)]
)
def test_an_error_in_the_augmentation_names_sample_and_case(tmp_path: Path, workers: int, how: str, kind: type) -> None:
    """The second sample of its batch; a ValueError stays the user's fault, anything else ours."""
    loader = module(tmp_path, Failing(5, how), workers).train_dataloader()
    case = loader.dataset.dataset.case_of(5)
    said = {
        "ValueError": "the rotation went wrong",
        "TypeError": "TypeError: the rotation went wrong",
        "MemoryError": "no memory left in a loader worker (the rotation went wrong); fewer data.num_workers or smaller batches help",
    }[how]
    with pytest.raises(kind) as caught:
        list(loader)
    if workers:
        loader._iterator._shutdown_workers()  # as the trainer does; left to the garbage collector it takes 10 seconds
    assert str(caught.value) == f"case {case} (training sample 5): {said}"
    cause = str(caught.value.__cause__)
    assert "Traceback (most recent call last)" in cause and "in __call__\n    raise kinds[self.how]" in cause


def test_an_error_that_only_whole_batches_make_names_the_first(tmp_path: Path) -> None:
    def only_together(batch: dict[str, Any]) -> dict[str, Any]:
        if len(batch["sample"]) > 1 and 4 in batch["sample"].tolist():
            raise ValueError("too many")
        return batch

    loader = module(tmp_path, only_together, 0).train_dataloader()
    with pytest.raises(ValueError, match=r"\(training sample 4\): too many"):
        list(loader)


def command(dataset: Path, folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    """A run with two workers, one of which ends in this way at sample 5."""
    augment = ["augment._target_=test_faults.Failing", "+augment.sample=5", f"+augment.how={how}"]
    arguments = [*tiny.overrides(dataset), "data.num_workers=2", f"run.dir={folder}", *augment]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return tiny.command("train.py", *arguments, cwd=folder.parent, env=environment)


def test_a_users_fault_is_one_message_and_the_traceback_is_in_the_log(dataset: Path, tmp_path: Path) -> None:
    done = command(dataset, tmp_path / "run", "ValueError")
    assert done.returncode == commands.USER, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert len(lines) == 1 and lines[0].startswith("error: case case_"), done.stderr
    assert lines[0].endswith("(training sample 5): the rotation went wrong")
    log = (tmp_path / "run/train.log").read_text()
    assert "ValueError: the rotation went wrong" in log and "in __call__" in log and "Traceback" in log


def test_a_killed_worker_is_one_message_that_says_what_helps(dataset: Path, tmp_path: Path) -> None:
    """By the signal of the out-of-memory killer."""
    done = command(dataset, tmp_path / "run", "SIGKILL")
    assert done.returncode == commands.USER, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == 1, done.stderr
    assert "was killed, most likely because memory ran out" in done.stderr
    assert "data.num_workers (now 2)" in done.stderr and "data.prefetch_factor (now 2)" in done.stderr


def test_a_worker_that_is_told_to_stop_preempts_the_run(dataset: Path, tmp_path: Path) -> None:
    """A cluster tells all processes of a job at once; the workers may hear it first."""
    done = command(dataset, tmp_path / "run", "SIGTERM")
    assert done.returncode == commands.PREEMPTED, done.stderr
    assert done.stderr.splitlines()[-1] == "stopped by SIGTERM; the same command goes on", done.stderr


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", ("12", "Killed")),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", ("12, 13", "Killed")),
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that", ("12", "Bus error")),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_what_torch_says_of_dead_workers(said: str, found: tuple[str, str] | None) -> None:
    assert faults.ended_worker(RuntimeError(said)) == found
    outer = RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly")
    outer.__cause__ = RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. ")
    assert faults.ended_worker(outer) == ("12", "Bus error")


def test_advice_is_for_what_memory_did_alone() -> None:
    settings = {"num_workers": 4, "prefetch_factor": 2, "batch_size": 8, "patch_size": [96, 96, 96]}
    assert "/dev/shm" in str(faults.advice("1", "Bus error", settings))
    assert "data.patch_size (now [96, 96, 96])" in str(faults.advice("1", "Killed", settings))
    assert faults.advice("1", "Segmentation fault", settings) is None
