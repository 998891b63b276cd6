"""`hydra/launcher=slurm`, `pbs`, `sge` or `lsf`: submit the jobs of a sweep as one array, and wait for it.

Each job is a command line, as in a sweep on one machine. So it may have several processes and machines, and a
job that fails does not stop the others. `run.dry_run=true` prints the script and submits nothing.
"""

import json
import logging
import re
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medconv.config import ConfigError, data_of
from medconv.features.sweeps.array_script import script
from medconv.features.sweeps.batch_system import BatchSystem
from medconv.features.sweeps.job import Job, value
from medconv.training.data_setup import files_state
from medconv.training.run_dir import short_hash
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE, USER

# In the sweep's folder.
SCRIPT = "sweep.sh"
SENT = "array.json"
# In a job's folder.
_STATE_FILE = "sent"  # the state of the job when it was submitted
_CODE_FILE = "exit_code"
_VISIBLE_SECONDS = 30.0  # until files that other machines wrote must be visible here

log = logging.getLogger(__name__)


def run(jobs: Sequence[Job], system: BatchSystem, launcher: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Submit the jobs as one array and wait until it has left the queue; each job then has its exit code.

    An array of an earlier start that is still in the queue is waited for and not submitted again; neither is
    a job that is already trained on the same files.

    Raises:
        ConfigError: the batch system is missing or refuses.
    """
    home = jobs[0].home
    home.mkdir(parents=True, exist_ok=True)
    states = _states(jobs)
    jobs_to_run = [job for job in jobs if not _is_done(job, states)]
    if jobs_to_run:
        array = _array_in_queue(home, system, jobs, jobs_to_run)
        if array is None:
            content = script(jobs_to_run, system, launcher, keys)
            array = _submit(home, system, jobs_to_run, states, content)
        _wait(home, system, jobs_to_run, array, float(launcher.get("poll_seconds") or 10))
    for job in jobs:
        job.code = _code(job, system)


def _wait(home: Path, system: BatchSystem, jobs: Sequence[Job], array: str, poll_seconds: float) -> None:
    told = ""
    try:
        print(f"array {array} with {len(jobs)} jobs; their logs are in {home}", flush=True)
        while state := _state_in_queue(system, array):
            lines = dict.fromkeys(state.splitlines())
            reasons = ", ".join(
                line for line in lines if system.hopeless and re.search(system.hopeless, line)
            )
            if reasons not in ("", told):
                log.warning("array %s waits, perhaps for ever: %s", array, reasons)
                told = reasons
            time.sleep(poll_seconds)
    except (KeyboardInterrupt, SystemExit):
        print(
            f"array {array} stays in the queue: run the same command again to wait for it, or "
            f"`{system.cancel.format(job=array)}` to cancel it",
            flush=True,
        )
        raise
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while any(_exit_code(job) is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(1)
    (home / SENT).unlink(missing_ok=True)


@dataclass(frozen=True)
class _SentArray:
    """What was submitted, as `SENT` in the sweep's folder holds it.

    Args:
        name: of the array in the queue; unique, to find it again if there is no answer in time.
        array: the number that was answered; None: there was no answer.
        jobs: names of the run folders.
    """

    name: str
    array: str | None
    jobs: list[str]

    @classmethod
    def read(cls, home: Path) -> "_SentArray | None":
        try:
            content = json.loads((home / SENT).read_text(encoding="utf-8"))
            array = content["array"]
            return cls(
                name=str(content.get("name", "")),
                array=_array_number(str(array)) if array else None,
                jobs=list(content["jobs"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, home: Path) -> None:
        content = {"name": self.name, "array": self.array, "jobs": self.jobs}
        write_text(home / SENT, json.dumps(content) + "\n")


def _submit(
    home: Path, system: BatchSystem, jobs: Sequence[Job], states: Mapping[Path, str], content: str
) -> str:
    """Returns: the number of the array. Args: states: see `_states`. content: of the script."""
    for job in jobs:
        job.begin()
        job.folder.path.mkdir(parents=True, exist_ok=True)
        (job.folder.path / _CODE_FILE).unlink(missing_ok=True)
        write_text(job.folder.path / _STATE_FILE, states[job.folder.path])
    write_text(home / SCRIPT, content)
    name = f"medconv-{home.absolute().name}-{secrets.token_hex(4)}"
    folders = [job.folder.path.name for job in jobs]
    # Before the command: it may submit the array and then not answer.
    _SentArray(name, None, folders).write(home)
    try:
        answer = system.ask(system.submit, stdin=content, name=name, script=str(home / SCRIPT))
        number = _array_number(answer)
        if number is None:
            program = system.submit.partition(" ")[0]
            raise system.error(f"{program} answered {answer!r}, expected a job number")
    except ConfigError as error:
        if not isinstance(error.__cause__, subprocess.TimeoutExpired):
            (home / SENT).unlink()
        raise
    _SentArray(name, number, folders).write(home)
    return number


def _array_number(answer: str) -> str | None:
    """That of an answer, such as 123, 123;cluster, 123[].server, 123.1-4:1 or Job <123> is submitted."""
    number = re.search(r"\b\d+(\[\])?", answer)
    return number[0] if number else None


def _array_in_queue(
    home: Path, system: BatchSystem, jobs: Sequence[Job], jobs_to_run: Sequence[Job]
) -> str | None:
    """The number of an array of this sweep that is still in the queue.

    Raises:
        ConfigError: it has other jobs than `jobs_to_run`.
    """
    sent = _SentArray.read(home)
    if sent is None:
        return None
    array = sent.array
    if array is None and sent.name and system.find:
        numbers = system.ask(system.find, name=sent.name).split()
        array = numbers[0] if numbers else None
    if array is None or not _state_in_queue(system, array):
        return None
    all_folders = {job.folder.path.name for job in jobs}
    folders_to_run = {job.folder.path.name for job in jobs_to_run}
    if not folders_to_run <= set(sent.jobs) <= all_folders:
        raise ConfigError(
            f"{home}: array {array} with other jobs of this sweep is in the queue; wait for it, or "
            f"`{system.cancel.format(job=array)}`"
        )
    return array


def _state_in_queue(system: BatchSystem, array: str) -> str:
    """What the batch system says of an array; empty: it has left the queue."""
    try:
        return system.ask(system.poll, job=array)
    except ConfigError as error:
        if re.search(system.gone, str(error)):
            return ""
        # Asking again cannot help.
        if isinstance(error.__cause__, FileNotFoundError):
            raise
        log.warning("%s; asking again", error)
        return "unknown"


def _code(job: Job, system: BatchSystem) -> int:
    """The exit code that the script wrote. Without one, the batch system has ended the job."""
    code = _exit_code(job)
    if code is None and not _is_trained(job):
        cancel = system.cancel.partition(" ")[0]
        job.write_error(
            f"ended by the batch system (time limit, memory or {cancel}); its log is in the sweep's folder"
        )
        return USER
    return code or DONE


def _exit_code(job: Job) -> int | None:
    try:
        return int((job.folder.path / _CODE_FILE).read_text())
    except (OSError, ValueError):
        return None


def _is_done(job: Job, states: Mapping[Path, str]) -> bool:
    """Whether an array has trained exactly this config on these files.

    A job that is submitted since the times of files have changed finds its run finished, if only they have;
    if images have changed, it refuses and names the cases.
    """
    if _exit_code(job) != 0 or not _is_trained(job):
        return False
    path = job.folder.path / _STATE_FILE
    return path.is_file() and path.read_text() == states[job.folder.path]


def _states(jobs: Sequence[Job]) -> dict[Path, str]:
    """By run folder: hashes of the config, for YAML files may change, and of the files of the data."""
    files = {data: _files_hash(data) for data in {job.data for job in jobs}}
    return {job.folder.path: f"{job.config} {files[job.data]}" for job in jobs}


def _files_hash(data: str) -> str:
    """Args: data: see `Job`. Returns: empty if this machine has no such dataset."""
    try:
        composed = OmegaConf.create({"data": json.loads(data)})
        return short_hash(files_state(data_of(composed)))
    except (ValueError, OmegaConfBaseException):
        return ""


def _is_trained(job: Job) -> bool:
    """Whether it is trained to its end, and `run.resume` does not ask for a new start."""
    return value(job, "run.resume") in ("", "auto") and job.folder.summary().get("status") == "done"
