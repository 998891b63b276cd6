"""A cross-validation of three short runs, which several test files read."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import tiny
from helpers.processes import FORKED, Forked, is_running
from helpers.stopped import stopped

from medconv.features.cross_validation.folds import read_folds
from medconv.features.sweeps import run
from medconv.utils.exit_codes import DONE, PREEMPTED

STEPS = 8


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
    for fold in (0, 2):  # these do not stop the sweep
        (cwd / f"stopped{fold}").touch()
    # No key twice: in another order another one would be the last, which counts.
    small = [o for o in tiny.overrides(dataset) if not o.startswith("trainer.max_steps=")]
    stop = stopped(f"{cwd}/stopped${{data.fold}}", number=signal.SIGTERM, step=6, to_parent=True)
    steps = f"trainer.max_steps={STEPS}"
    arguments = [*small, steps, "callbacks=none", stop, "run.name=cv", "data.fold=0,1,2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "subprocess", FORKED)
        code, output = Forked("-m", *arguments, cwd=cwd).wait()
        assert code == PREEMPTED, output
        assert "stopped by SIGTERM" in output
        jobs = (cwd / "job_pids").read_text().split()
        assert len(jobs) == 2 and not any(is_running(int(pid)) for pid in jobs)  # the third has not begun
        run_0, run_1 = by_fold(home)["0"], by_fold(home)["1"]
        assert set(by_fold(home)) == {"0", "1"}
        assert json.loads((run_1 / "summary.json").read_text())["status"] == "preempted"
        before = (run_0 / "checkpoints/last.ckpt").stat().st_mtime_ns
        assert len(tiny.losses(run_1)) == 7  # the step was kept
        code, output = Forked("-m", *arguments[::-1], cwd=cwd).wait()
    assert code == DONE, output
    assert (run_0 / "checkpoints/last.ckpt").stat().st_mtime_ns == before
    assert by_fold(home)["1"] == run_1
    assert len(tiny.losses(run_1)) == STEPS  # it resumed from its checkpoint, in the same metrics.csv
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
