"""A sweep: every job a fresh process in a folder of its own, then a table, and a summary over folds.

A fresh process is what lets a job use several devices (Lightning starts their processes from the command
line) and leaves the rest of a sweep alone when a job fails.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv import config
from medconv.evaluation import cross_validation
from medconv.sweeps import slurm, table
from medconv.sweeps.job import Job, told, unique, value, varied
from medconv.training.report import OF_A_SWEEP
from medconv.utils import cluster, signals
from medconv.utils.exit_codes import BUG, DONE, INTERRUPTED, PREEMPTED, USER
from medconv.utils.logging import shown

# What launchers leave behind, which would make a sweep's next job believe that it is a rank of the last one.
_LAUNCHED = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "LOCAL_WORLD_SIZE",
)
_ALSO_TOLD = 2.0  # seconds for a job to end by a Ctrl-C that the terminal sent to it as well


def run(
    jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str] = (), numbers: Sequence[int] = ()
) -> None:
    """Run the jobs, one after another or by Slurm; a job that fails leaves the others alone, equal ones are
    run once.

    Args: launcher: Hydra's settings of it. keys: in which the sweep's jobs differ, if these are not all.
    numbers: of trials.
    Raises: KeyboardInterrupt, signals.RunInterrupted: the sweep, or a job, was stopped; the job has ended by
    then.
    """
    titles = [f"[{i} of {len(jobs)}] {' '.join(job.overrides)}" for i, job in enumerate(jobs, 1)]
    if numbers:
        own = [" ".join(f"{k}={value(job, k)}" for k in keys) for job in jobs]
        titles = [f"[trial {number}] {said}" for number, said in zip(numbers, own, strict=True)]
    once = {job.folder.path: (title, job) for title, job in zip(titles, jobs, strict=True)}
    with signals.raising():
        if slurm.wanted(launcher):
            print("\n".join(titles), flush=True)
            slurm.run([job for _, job in once.values()], launcher, keys or varied(jobs))
        else:
            for title, job in once.values():
                print(f"\n{title}", flush=True)
                _run(job, told(job, keys or varied(jobs)))
    for job in jobs:
        job.code = once[job.folder.path][1].code


def need_alone() -> None:
    """Raises: ConfigError: a launcher of several processes started this one."""
    started = cluster.launcher()
    if started is not None:
        raise config.ConfigError(
            f"-m is a sweep, whose jobs start processes of their own; start it without {started.name}"
        )


def finish(jobs: Sequence[Job]) -> int:
    """Print and write what came of the jobs. Returns: the exit code."""
    jobs = unique(jobs)
    print(f"\n{table.text(jobs)}")
    keys = [key for key in varied(jobs) if key != "data.fold"]
    labels = {
        job.folder.path: " ".join(f"{k}={value(job, k)}" for k in keys if value(job, k)) for job in jobs
    }
    several = len({value(job, "data.fold") for job in jobs}) > 1
    for home in dict.fromkeys(job.home for job in jobs):
        print(f"\nas a table: {table.write(home, [job for job in jobs if job.home == home])}")
        _over_folds(home, labels, least=1 if several else 2)
    return max((_exit_code(job.code) for job in jobs), default=DONE)


def plan(jobs: Sequence[Job], launcher: Mapping[str, Any]) -> str:
    """What `run` would start."""
    jobs = unique(jobs)
    if slurm.wanted(launcher):
        return slurm.script(jobs, launcher, varied(jobs))
    return "\n".join(shlex.join(["medconv", "train", *job.arguments]) for job in jobs)


def _over_folds(home: Path, labels: Mapping[Path, str], least: int) -> None:
    found = cross_validation.read(home, labels, least)
    if found:
        print("\n" + shown("\n\n".join(cross_validation.table(one) for one in found)))
        print(f"\nper case: {cross_validation.write(home, found)} and {cross_validation.CSV}")


def _run(job: Job, told: str) -> None:
    """Raises: KeyboardInterrupt, signals.RunInterrupted: it was stopped. One that lost a process of its
    own has failed instead.
    """
    job.begin()
    job.code = _apart(job.command, told)
    if job.code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if job.code in (PREEMPTED, *(-number for number in signals.PREEMPTING)) and not job.noted:
        raise signals.RunInterrupted


def _apart(command: list[str], told: str = "") -> int:
    """The exit code of a command in a process of its own, which is told of signals and Ctrl-C and waited
    for.
    """
    process: subprocess.Popen[bytes] | None = None
    stopped = 0

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = number
        if process is not None:
            process.send_signal(number)

    with signals.handled(stop, *signals.PREEMPTING):
        clean = {
            k: v for k, v in os.environ.items() if k not in _LAUNCHED and not k.startswith("TORCHELASTIC_")
        }
        process = subprocess.Popen(command, env={**clean, OF_A_SWEEP: told})
        if stopped:  # before there was a process to tell
            process.send_signal(stopped)
        code = _waited(process)
    if stopped:
        raise signals.RunInterrupted(stopped)
    return code


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Raises: KeyboardInterrupt: by a Ctrl-C. A second one would make the job give up its step, so SIGTERM
    follows.
    """
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(_ALSO_TOLD)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise


def _exit_code(code: int | None) -> int:
    """A job that the system killed had, most likely, too little memory; any other signal is a crash."""
    if code == -signal.SIGKILL:
        return USER
    return BUG if code is None or code < 0 else code
