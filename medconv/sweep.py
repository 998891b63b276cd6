"""A sweep: every job a fresh process in a folder of its own, then a table, and a summary over folds.

A fresh process is what lets a job use several devices (Lightning starts their processes from the command line) and leaves
the rest of a sweep alone when a job fails.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from medconv import commands, folds, slurm, sweeptable
from medconv.jobs import Job, told, value, varied
from medconv.reports import OF_A_SWEEP

# What launchers leave behind, which would make a sweep's next job believe that it is a rank of the last one.
_LAUNCHED = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
_ALSO_TOLD = 2.0  # seconds for a job to end by a Ctrl-C that the terminal sent to it as well


def run(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str] = (), first: int = 1) -> None:
    """Run the jobs, one after another or by Slurm; a job that fails leaves the others alone.

    Args: launcher: Hydra's settings of it. keys: in which the sweep's jobs differ, if these are not all. first: number.
    Raises: KeyboardInterrupt, SIGTERMException: the sweep, or a job, was stopped; the job has ended by then.
    """
    with commands.stoppable():
        titles = [f"[{i} of {len(jobs)}] {' '.join(job.overrides)}" for i, job in enumerate(jobs, 1)]
        if keys:
            titles = [f"[trial {i}] {' '.join(f'{k}={value(job, k)}' for k in keys)}" for i, job in enumerate(jobs, first)]
        if slurm.wanted(launcher):
            print("\n".join(titles), flush=True)
            slurm.run(jobs, launcher, keys or varied(jobs))
            return
        for title, job in zip(titles, jobs, strict=True):
            print(f"\n{title}", flush=True)
            job.begin()
            job.code = _apart(job.command, told(job, keys or varied(jobs)))


def finish(jobs: Sequence[Job]) -> int:
    """Print and write what came of the jobs. Returns: the exit code."""
    print(f"\n{sweeptable.text(jobs)}")
    keys = [key for key in varied(jobs) if key != "data.fold"]
    labels = {job.folder.path: " ".join(f"{k}={value(job, k)}" for k in keys if value(job, k)) for job in jobs}
    several = len({value(job, "data.fold") for job in jobs}) > 1
    for home in dict.fromkeys(job.home for job in jobs):
        print(f"\nas a table: {sweeptable.write(home, [job for job in jobs if job.home == home])}")
        _over_folds(home, labels, least=1 if several else 2)
    return max((_exit_code(job.code) for job in jobs), default=commands.DONE)


def plan(jobs: Sequence[Job], launcher: Mapping[str, Any]) -> str:
    """What `run` would start."""
    if slurm.wanted(launcher):
        return slurm.script(jobs, launcher, varied(jobs))
    return "\n".join(shlex.join(["medconv-train", *job.arguments]) for job in jobs)


def _over_folds(home: Path, labels: Mapping[Path, str], least: int) -> None:
    found = folds.read(home, labels, least)
    if found:
        print("\n" + commands.shown("\n\n".join(folds.table(one) for one in found)))
        print(f"\nper case: {folds.write(home, found)} and {folds.CSV}")


def _apart(command: list[str], told: str = "") -> int:
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
        clean = {k: v for k, v in os.environ.items() if k not in _LAUNCHED and not k.startswith("TORCHELASTIC_")}
        process = subprocess.Popen(command, env={**clean, OF_A_SWEEP: told})
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


def _exit_code(code: int | None) -> int:
    """A job that the system killed had, most likely, too little memory; any other signal is a crash."""
    if code == -signal.SIGKILL:
        return commands.USER
    return commands.BUG if code is None or code < 0 else code
