"""A sweep: every job a fresh process in a folder of its own, then a table, and a summary over folds.

A fresh process is what lets a job use several devices (Lightning starts their processes from the command line) and leaves
the rest of a sweep alone when a job fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig

from medconv import commands, folds
from medconv.runfolder import RunFolder, short_hash

# What launchers leave behind, which would make a sweep's next job believe that it is a rank of the last one.
_LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
_ALSO_TOLD = 2.0  # seconds for a job to end by a Ctrl-C that the terminal sent to it as well


@dataclass
class Job:
    """One config of a sweep. Args: flags: where its config comes from, such as `--config-dir`. code: its exit code."""

    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    home: Path
    code: int | None = None

    @classmethod
    def of(cls, composed: DictConfig, settings: Any) -> Job:
        """From a composed config and Hydra's settings."""
        options = {"command-line": "--config-dir", "main": "--config-path"}
        sources = [(options[s.provider], s.path) for s in settings.runtime.config_sources if s.provider in options]
        pairs = [*sources, ("--config-name", settings.job.config_name)]
        searched = [o for o in settings.overrides.hydra if _key(o) == "hydra.searchpath"]
        flags = (*(flag for pair in pairs for flag in pair), *searched)
        return cls(tuple(str(o) for o in settings.overrides.task), flags, _home(composed))

    @property
    def folder(self) -> RunFolder:
        """The same for the same overrides in any order, so that the same sweep finds its runs again."""
        return RunFolder(self.home / short_hash(sorted(self.overrides)))

    @property
    def command(self) -> list[str]:
        run_dir = str(self.folder.path).replace("\\", "\\\\").replace("'", "\\'")
        return [sys.executable, "-m", "medconv.train", *self.flags, *self.overrides, f"run.dir='{run_dir}'"]


def run(jobs: Sequence[Job]) -> int:
    """Run the jobs one after another; a job that fails leaves the others alone. Returns: the exit code.

    Raises: KeyboardInterrupt, SIGTERMException: the sweep, or a job, was stopped; the job has ended by then.
    """
    with commands.stoppable():
        for number, job in enumerate(jobs, 1):
            print(f"\n[{number} of {len(jobs)}] {' '.join(job.overrides)}", flush=True)
            job.code = _apart(job.command)
    print(f"\n{_table(jobs)}")
    labels = {job.folder.path: " ".join(o for o in job.overrides if _varies(o, jobs)) for job in jobs}
    for home in dict.fromkeys(job.home for job in jobs):
        _over_folds(home, labels, least=1 if len({_fold(job) for job in jobs}) > 1 else 2)
    return max((_exit_code(job.code) for job in jobs), default=commands.DONE)


def _over_folds(home: Path, labels: Mapping[Path, str], least: int) -> None:
    found = folds.read(home, labels, least)
    if found:
        print("\n" + commands.shown("\n\n".join(folds.table(one) for one in found)))
        print(f"\nper case: {folds.write(home, found)} and {folds.CSV}")


def _apart(command: list[str]) -> int:
    """The exit code of a command in a process of its own, which is told of SIGTERM and Ctrl-C and waited for."""
    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        clean = {k: v for k, v in os.environ.items() if k not in _LAUNCHED}
        process = subprocess.Popen(command, env=clean)
        if stopped:  # before there was a process to tell
            process.terminate()
        code = _waited(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped or code in (commands.PREEMPTED, -signal.SIGTERM):
        raise SIGTERMException
    if code in (commands.INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    return code


def _waited(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(_ALSO_TOLD)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        raise


def _home(composed: DictConfig) -> Path:
    """`run.dir`, `runs/<run.name>`, or a name that the same command line finds again, whichever folds it asks for."""
    if composed.run.dir:
        return Path(composed.run.dir)
    arguments = sorted(a for a in sys.argv[1:] if not a.startswith("-") and _key(a) != "data.fold")
    return Path("runs") / (composed.run.name or f"sweep-{short_hash(arguments)}")


def _table(jobs: Sequence[Job]) -> str:
    """Best first; a job that failed is named with its exit code."""
    results = [(job.folder.summary().get("val/dice"), job) for job in jobs]
    results.sort(key=lambda item: -1 if item[0] is None else item[0], reverse=True)
    lines = ["sweep, best first"]
    for value, job in results:
        dice = "  -   " if value is None else f"{value:.4f}"
        lines.append(f"  {dice}  {job.folder.path}  {' '.join(job.overrides)}{_failure(job.code)}")
    return "\n".join(lines)


def _failure(code: int | None) -> str:
    if not code:
        return ""
    return f"  failed with exit code {code}" if code > 0 else f"  killed by {signal.Signals(-code).name}"


def _exit_code(code: int | None) -> int:
    """A job that the system killed had, most likely, too little memory; any other signal is a crash."""
    if code == -signal.SIGKILL:
        return commands.USER
    return commands.BUG if code is None or code < 0 else code


def _fold(job: Job) -> str:
    return next((o.partition("=")[2] for o in job.overrides if _key(o) == "data.fold"), "")


def _varies(override: str, jobs: Sequence[Job]) -> bool:
    return _key(override) != "data.fold" and not all(override in job.overrides for job in jobs)


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
