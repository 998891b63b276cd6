"""A cross-validation of three short runs, which several test files read."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import tiny
from helpers.processes import FORKED, Forked, is_running, until

from medconv.evaluation.folds import read_folds
from medconv.sweeps import run
from medconv.utils.exit_codes import DONE, PREEMPTED

STEPS = 8
SLOW = [
    f"trainer.max_steps={STEPS}",
    "augmentation._target_=helpers.tiny.SlowAugment",  # a tenth of a second for each step
    "callbacks=none",
]


class Sweep(NamedTuple):
    """The folder of its runs, and what it printed."""

    folder: Path
    output: str


def shared(folder: Path) -> Sweep:
    """The sweep in `folder`, trained if it is not there yet; another process that asks meanwhile waits."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (printed := folder / "printed").exists():
            folder.mkdir()
            output = _stopped_and_resumed(tiny.write_dataset(folder / "data"), folder)
            printed.write_text(output)
    return Sweep(folder / "runs/cv", printed.read_text())


def _stopped_and_resumed(dataset: Path, cwd: Path) -> str:
    """Three folds, stopped by SIGTERM in the second one and started again with the overrides in another
    order. Returns: the output of the second start.
    """
    home = cwd / "runs/cv"
    # No key twice: in another order another one would be the last, which counts.
    small = [o for o in tiny.overrides(dataset) if not o.startswith("trainer.max_steps=")]
    arguments = [*small, *SLOW, "run.name=cv", "data.fold=0,1,2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "subprocess", FORKED)
        first = Forked("-m", *arguments, cwd=cwd)
        until(lambda: len(list(home.glob("*/checkpoints/last.ckpt"))) == 2 or first.ended())
        os.kill(first.pid, signal.SIGTERM)
        code, output = first.wait()
        assert code == PREEMPTED, output
        assert "stopped by SIGTERM" in output
        jobs = (cwd / "job_pids").read_text().split()
        assert len(jobs) == 2 and not any(is_running(int(pid)) for pid in jobs)  # the third has not begun
        done, stopped = by_fold(home)["0"], by_fold(home)["1"]
        assert set(by_fold(home)) == {"0", "1"}
        assert json.loads((stopped / "summary.json").read_text())["status"] == "preempted"
        before = (done / "checkpoints/last.ckpt").stat().st_mtime_ns
        steps = len(tiny.losses(stopped))
        assert steps > 0
        code, output = Forked("-m", *arguments[::-1], cwd=cwd).wait()
    assert code == DONE, output
    assert (done / "checkpoints/last.ckpt").stat().st_mtime_ns == before
    assert by_fold(home)["1"] == stopped
    # It resumed from its checkpoint, in the same metrics.csv.
    assert STEPS <= len(tiny.losses(stopped)) <= STEPS + steps
    return output


def by_fold(home: Path) -> dict[str, Path]:
    """The run's folder of each fold."""
    return {fold.number: fold.folder.path for fold in read_folds(home)}


def summaries(home: Path) -> dict[str, dict[str, Any]]:
    return {number: json.loads((path / "summary.json").read_text()) for number, path in by_fold(home).items()}


def edit(path: Path, **changes: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_configs(home: Path, old: str, new: str) -> None:
    """Replace a text in the config of every run."""
    for path in by_fold(home).values():
        config = path / "config.yaml"
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))
