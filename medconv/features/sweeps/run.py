"""A sweep: each job is a fresh process with its own folder; then a table, and a summary over folds.

In a fresh process a job may use several devices (Lightning starts their processes from the command line), and
a job that fails does not stop the others.
"""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv import config
from medconv.features.cross_validation import report as cross_validation_report
from medconv.features.cross_validation import results as cross_validation
from medconv.features.sweeps import array_script, job_array, table
from medconv.features.sweeps.batch_system import BatchSystem
from medconv.features.sweeps.job import Job, settings_of, unique, value, values_json, varied
from medconv.training.loggers import HPARAMS
from medconv.utils import child_processes, cluster, signals
from medconv.utils.exit_codes import BUG, DONE
from medconv.utils.logging import shown

# Variables that a launcher sets. A job that inherited them would take itself for a rank of an earlier job.
_LAUNCHER_VARIABLES = re.compile(
    "((LOCAL|NODE|GROUP)_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)


def run(
    jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str] = (), numbers: Sequence[int] = ()
) -> None:
    """Run the jobs, each once, one after another or as a job array. One that fails does not stop the others.

    Args:
        launcher: Hydra's settings of the launcher.
        keys: in which all jobs of the sweep differ, if `jobs` are only some of them.
        numbers: of the Optuna trials.

    Raises:
        KeyboardInterrupt, signals.RunInterrupted: the sweep, or a job, was stopped; no job runs any more.
    """
    titles = _titles(jobs, keys, numbers)
    # Jobs with the same folder are the same run.
    titled_jobs = {job.folder.path: (title, job) for title, job in zip(titles, jobs, strict=True)}
    varied_keys = keys or varied(jobs)
    with signals.raising():
        system = BatchSystem.of(launcher)
        if system is not None:
            print("\n".join(titles), flush=True)
            job_array.run([job for _, job in titled_jobs.values()], system, launcher, varied_keys)
        else:
            for title, job in titled_jobs.values():
                print(f"\n{title}", flush=True)
                _run(job, values_json(job, varied_keys))
    for job in jobs:
        _, job_that_ran = titled_jobs[job.folder.path]
        job.code = job_that_ran.code


def _titles(jobs: Sequence[Job], keys: Sequence[str], numbers: Sequence[int]) -> list[str]:
    titles = []
    if numbers:
        for number, job in zip(numbers, jobs, strict=True):
            titles.append(f"[trial {number}] {settings_of(job, keys)}")
        return titles
    for number, job in enumerate(jobs, 1):
        titles.append(f"[{number} of {len(jobs)}] {' '.join(job.overrides)}")
    return titles


def check_no_launcher() -> None:
    """Check that this process runs alone.

    Raises:
        ConfigError: torchrun or srun started this process as one of several.
    """
    launcher = cluster.launcher()
    if launcher is not None:
        raise config.ConfigError(
            f"-m starts a sweep, and its jobs start their own processes; run it without {launcher.name}"
        )


def finish(jobs: Sequence[Job]) -> int:
    """Print and write the results. Returns: the exit code."""
    jobs = unique(jobs)
    print(f"\n{table.text(jobs)}")
    keys = [key for key in varied(jobs) if key != "data.fold"]
    labels = {job.folder.path: settings_of(job, keys) for job in jobs}
    folds = {value(job, "data.fold") for job in jobs}
    # Of jobs of one fold, only several of the same settings are a cross-validation.
    min_folds = 1 if len(folds) > 1 else 2
    homes = dict.fromkeys(job.home for job in jobs)
    for home in homes:
        path = table.write(home, [job for job in jobs if job.home == home])
        print(f"\nas a table: {path}")
        _print_cross_validations(home, labels, min_folds)
    return max(
        (BUG if job.code is None else child_processes.exit_code(job.code) for job in jobs), default=DONE
    )


def plan(jobs: Sequence[Job], launcher: Mapping[str, Any]) -> str:
    """The commands, or the batch script, that `run` would start."""
    jobs = unique(jobs)
    system = BatchSystem.of(launcher)
    if system is not None:
        return array_script.script(jobs, system, launcher, varied(jobs))
    return "\n".join(shlex.join(["medconv", "train", *job.arguments]) for job in jobs)


def _print_cross_validations(home: Path, labels: Mapping[Path, str], min_folds: int) -> None:
    results = cross_validation.read(home, labels, min_folds)
    if not results:
        return
    tables = [cross_validation_report.table(result) for result in results]
    print("\n" + shown("\n\n".join(tables)))
    path = cross_validation_report.write(home, results)
    print(f"\nper case: {path} and {cross_validation.CSV}")


def _run(job: Job, values: str) -> None:
    """Run a job to its end.

    Raises:
        KeyboardInterrupt, signals.RunInterrupted: the job was stopped.
    """
    job.begin()
    job.code = _run_process(job.command, values)
    if child_processes.was_interrupted(job.code):
        raise KeyboardInterrupt
    # A job that lost one of its own processes has failed instead: it has an error file.
    if child_processes.was_preempted(job.code) and not job.has_error:
        raise signals.RunInterrupted


def _run_process(command: list[str], values: str = "") -> int:
    """Run a command in its own process, pass signals on to it, and wait for it. Returns: its exit code."""
    process: subprocess.Popen[bytes] | None = None
    stopped_by = 0
    interrupted = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped_by
        stopped_by = number
        if process is not None:
            process.send_signal(number)

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True

    with signals.handled(stop, *signals.PREEMPTING):
        with signals.handled(interrupt, signal.SIGINT):  # else the process would be left behind
            process = subprocess.Popen(command, env=_environment(values))
        if stopped_by:  # the signal came before there was a process
            process.send_signal(stopped_by)
        try:
            if interrupted:
                raise KeyboardInterrupt
            code = process.wait()
        except KeyboardInterrupt:
            child_processes.end([process])
            raise
    if stopped_by:
        raise signals.RunInterrupted(stopped_by)
    return code


def _environment(values: str) -> dict[str, str]:
    """The environment of a job. Args: values: what the sweep varies, as JSON."""
    environment = {HPARAMS: values}
    for name, text in os.environ.items():
        if name != HPARAMS and not _LAUNCHER_VARIABLES.fullmatch(name):
            environment[name] = text
    return environment
