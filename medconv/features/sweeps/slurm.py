"""`hydra/launcher=slurm`: submit the jobs of a sweep as one Slurm job array, and wait for it.

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
from medconv.features.sweeps.job import Job, value
from medconv.features.sweeps.slurm_script import script
from medconv.training.data_setup import files_state
from medconv.training.run_dir import short_hash
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE, USER

# In the sweep's folder.
SCRIPT = "sweep.sbatch"
SENT = "slurm.json"
# In a job's folder.
_STATE_FILE = "sent"  # the state of the job when it was submitted
_CODE_FILE = "exit_code"
_ANSWER_SECONDS = 120.0  # until a Slurm command must have answered
_VISIBLE_SECONDS = 30.0  # until files that other machines wrote must be visible here

log = logging.getLogger(__name__)


def is_slurm(launcher: Mapping[str, Any]) -> bool:
    """Args: launcher: Hydra's settings of it."""
    return launcher.get("_target_") == "medconv.features.sweeps.slurm.run"  # conf/hydra/launcher/slurm.yaml


def run(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Submit the jobs as one array and wait until it has left the queue; each job then has its exit code.

    An array of an earlier start that is still in the queue is waited for and not submitted again; neither is
    a job that is already trained on the same files.

    Raises:
        ConfigError: sbatch is missing or refuses.
    """
    home = jobs[0].home
    home.mkdir(parents=True, exist_ok=True)
    states = _states(jobs)
    jobs_to_run = [job for job in jobs if not _is_done(job, states)]
    if jobs_to_run:
        array = _array_in_queue(home, jobs, jobs_to_run)
        if array is None:
            array = _submit(home, jobs_to_run, states, script(jobs_to_run, launcher, keys))
        poll_seconds = float(launcher.get("poll_seconds") or 10)
        _wait(home, jobs_to_run, array, poll_seconds)
    for job in jobs:
        job.code = _code(job)


def _wait(home: Path, jobs: Sequence[Job], array: str, poll_seconds: float) -> None:
    try:
        print(f"array {array} with {len(jobs)} jobs: logs are {home / f'slurm-{array}_*.log'}", flush=True)
        while _is_in_queue(array):
            time.sleep(poll_seconds)
    except (KeyboardInterrupt, SystemExit):
        print(
            f"array {array} stays in the queue: run the same command again to wait for it, or "
            f"`scancel {array}` to cancel it",
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
        name: of the array in the queue; unique, to find it again if sbatch does not answer in time.
        array: the number that sbatch answered; None: it has not answered.
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
                array=str(int(array)) if array else None,
                jobs=list(content["jobs"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, home: Path) -> None:
        content = {"name": self.name, "array": self.array, "jobs": self.jobs}
        write_text(home / SENT, json.dumps(content) + "\n")


def _submit(home: Path, jobs: Sequence[Job], states: Mapping[Path, str], content: str) -> str:
    """Returns: the number of the array. Args: states: see `_states`. content: of the script."""
    for job in jobs:
        job.begin()
        job.folder.path.mkdir(parents=True, exist_ok=True)
        (job.folder.path / _CODE_FILE).unlink(missing_ok=True)
        write_text(job.folder.path / _STATE_FILE, states[job.folder.path])
    write_text(home / SCRIPT, content)
    name = f"medconv-{home.absolute().name}-{secrets.token_hex(4)}"
    folders = [job.folder.path.name for job in jobs]
    # Before sbatch: it may submit the array and then not answer.
    _SentArray(name, None, folders).write(home)
    try:
        answer = _slurm("sbatch", "--parsable", f"--job-name={name}", str(home / SCRIPT))
        number = re.match(r"\d+", answer)
        if number is None:
            raise ConfigError(f"hydra/launcher=slurm: sbatch answered {answer!r}, expected a job number")
    except ConfigError as error:
        if not isinstance(error.__cause__, subprocess.TimeoutExpired):
            (home / SENT).unlink()
        raise
    _SentArray(name, number[0], folders).write(home)
    return number[0]


def _array_in_queue(home: Path, jobs: Sequence[Job], jobs_to_run: Sequence[Job]) -> str | None:
    """The number of an array of this sweep that is still in the queue.

    Raises:
        ConfigError: it has other jobs than `jobs_to_run`.
    """
    sent = _SentArray.read(home)
    if sent is None:
        return None
    array = sent.array
    if array is None and sent.name:
        numbers = _slurm("squeue", "--noheader", "--name", sent.name, "--format=%F").split()
        array = numbers[0] if numbers else None
    if array is None or not _is_in_queue(array):
        return None
    all_folders = {job.folder.path.name for job in jobs}
    folders_to_run = {job.folder.path.name for job in jobs_to_run}
    if not folders_to_run <= set(sent.jobs) <= all_folders:
        raise ConfigError(
            f"{home}: array {array} with other jobs of this sweep is in the queue; wait for it, or "
            f"`scancel {array}`"
        )
    return array


def _is_in_queue(array: str) -> bool:
    try:
        return bool(_slurm("squeue", "--noheader", "--jobs", array))
    except ConfigError as error:
        # Slurm forgets an array some minutes after its end.
        if "Invalid job id" in str(error):
            return False
        # Asking again cannot help.
        if isinstance(error.__cause__, FileNotFoundError):
            raise
        log.warning("%s; asking again", error)
        return True


def _slurm(*command: str) -> str:
    """The output of a Slurm command.

    Raises:
        ConfigError: it is missing, fails or does not answer.
    """
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
        )
    except FileNotFoundError as error:
        raise ConfigError(f"hydra/launcher=slurm: there is no {command[0]} on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"hydra/launcher=slurm: {command[0]} did not answer") from error
    if process.returncode:
        reason = " ".join(process.stderr.split())
        raise ConfigError(f"hydra/launcher=slurm: {command[0]} failed: {reason}")
    return process.stdout.strip()


def _code(job: Job) -> int:
    """The exit code that the script wrote. Without one, Slurm has ended the job."""
    code = _exit_code(job)
    if code is None and not _is_trained(job):
        job.write_error("ended by Slurm (time limit, memory or scancel); its log is in the sweep's folder")
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
