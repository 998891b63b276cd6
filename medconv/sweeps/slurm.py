"""`hydra/launcher=slurm`: the jobs of a sweep as one Slurm job array, submitted as a readable script.

Each job is a command line, as in a sweep on one machine. So it may have several processes and machines, and a
job that fails does not stop the others. `run.dry_run=true` prints the script and submits nothing.
"""

import json
import logging
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from medconv.config import ConfigError
from medconv.sweeps.job import Job, value, values_json
from medconv.training.report import OF_A_SWEEP
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE, PREEMPTED, USER

SCRIPT, SENT = "sweep.sbatch", "slurm.json"
_CONFIG, _CODE = "sent", "exit_code"  # in a job's folder: the hash of the config that was submitted
_ANSWER = 120.0  # seconds until a Slurm command must have answered
_LATE = 30.0  # seconds until files that other machines wrote must be visible here
# keys of hydra.launcher; with hyphens they are options of sbatch
_SETTINGS = [
    *("partition", "account", "qos", "time", "mem", "nodes"),
    *("ntasks_per_node", "gpus_per_node", "cpus_per_task"),
]

log = logging.getLogger(__name__)


def is_slurm(launcher: Mapping[str, Any]) -> bool:
    """Args: launcher: Hydra's settings of it."""
    target = launcher.get("_target_")
    return target is not None and getattr(get_object(target), "submits_an_array", False)


def script(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The batch script of an array with a task per job. Args: keys: in which the sweep's jobs differ.

    Raises: ConfigError: a setting that sbatch would misread.
    """
    if type(launcher.get("time")) is int:  # YAML 1.1: 12:00:00 is a number in base 60
        raise ConfigError(
            f"hydra.launcher.time must be quoted, as '04:00:00'; without quotes YAML reads {launcher['time']}"
        )
    home = jobs[0].home.absolute()
    at_once = f"%{launcher['at_once']}" if launcher.get("at_once") else ""
    options = {
        "job-name": f"medconv-{home.name}",
        "array": f"0-{len(jobs) - 1}{at_once}",
        "output": str(home).replace("%", "%%") + "/slurm-%A_%a.log",
        **{k.replace("_", "-"): launcher[k] for k in _SETTINGS if launcher.get(k) is not None},
    }
    lines = [f"--{name}={_quoted(str(setting))}" for name, setting in options.items()]
    lines += _list(launcher, "options")
    for line in lines:
        if "\n" in line:  # it would begin another line of the script
            raise ConfigError(f"hydra.launcher: each option must be one line, got {line!r}")
    cases = [f"{i}) {_assigned(job, keys)} ;;" for i, job in enumerate(jobs)]
    return _TEMPLATE.format(
        options="\n".join(f"#SBATCH {line}" for line in lines),
        setup="".join(f"{line}\n" for line in _list(launcher, "setup")),
        cwd=shlex.quote(str(Path.cwd())),
        cases="\n    ".join(cases),
        python=shlex.quote(sys.executable),
        preempted=PREEMPTED,
    )


def run(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Submit the jobs as one array and wait until it has left the queue; each job then has its exit code.

    An array of an earlier start that is still in the queue is waited for and not submitted again; neither is
    a job that is already trained.
    Raises: ConfigError: sbatch is missing or refuses.
    """
    home = jobs[0].home
    home.mkdir(parents=True, exist_ok=True)
    todo = [job for job in jobs if not _done(job)]
    if todo:
        number = _in_queue_already(home, jobs, todo) or _submit(home, todo, script(todo, launcher, keys))
        _wait(home, todo, number, float(launcher.get("poll_seconds") or 10))
    for job in jobs:
        job.code = _code(job)


def _wait(home: Path, jobs: Sequence[Job], number: str, poll_seconds: float) -> None:
    print(f"array {number} with {len(jobs)} jobs: logs are {home / f'slurm-{number}_*.log'}", flush=True)
    try:
        while _in_queue(number):
            time.sleep(poll_seconds)
    except (KeyboardInterrupt, SystemExit):
        stays = f"array {number} stays in the queue: run the same command again to wait for it, or"
        print(f"{stays} `scancel {number}` to cancel it", flush=True)
        raise
    deadline = time.monotonic() + _LATE
    while any(_exit_code(job) is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(1)
    (home / SENT).unlink(missing_ok=True)


def _submit(home: Path, jobs: Sequence[Job], content: str) -> str:
    for job in jobs:
        job.begin()
        job.folder.path.mkdir(parents=True, exist_ok=True)
        (job.folder.path / _CODE).unlink(missing_ok=True)
        write_text(job.folder.path / _CONFIG, job.config)
    write_text(home / SCRIPT, content)
    # A unique name finds the array again if sbatch does not answer in time.
    name = f"medconv-{home.absolute().name}-{secrets.token_hex(4)}"
    sent = {"name": name, "array": None, "jobs": [job.folder.path.name for job in jobs]}
    write_text(home / SENT, json.dumps(sent) + "\n")
    try:
        answer = _slurm("sbatch", "--parsable", f"--job-name={name}", str(home / SCRIPT))
        number = re.match(r"\d+", answer)
        if number is None:
            raise ConfigError(f"hydra/launcher=slurm: sbatch said {answer!r} instead of a job's number")
    except ConfigError as error:
        if not isinstance(error.__cause__, subprocess.TimeoutExpired):
            (home / SENT).unlink()
        raise
    write_text(home / SENT, json.dumps({**sent, "array": number[0]}) + "\n")
    return number[0]


def _in_queue_already(home: Path, jobs: Sequence[Job], todo: Sequence[Job]) -> str | None:
    """The number of an array of this sweep that is still in the queue. Args: todo: jobs that are not done."""
    try:
        sent = json.loads((home / SENT).read_text(encoding="utf-8"))
        number, names = sent["array"] and str(int(sent["array"])), list(sent["jobs"])
        name = "" if number else str(sent["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if name:
        number = next(iter(_slurm("squeue", "--noheader", "--name", name, "--format=%F").split()), None)
    if not number or not _in_queue(number):
        return None
    if not {job.folder.path.name for job in todo} <= set(names) <= {job.folder.path.name for job in jobs}:
        raise ConfigError(
            f"{home}: array {number} with other jobs of this sweep is in the queue; wait for it, or "
            f"`scancel {number}`"
        )
    return number


def _in_queue(number: str) -> bool:
    try:
        return bool(_slurm("squeue", "--noheader", "--jobs", number))
    except ConfigError as error:
        if "Invalid job id" in str(error):  # Slurm forgets an array some minutes after its end
            return False
        if isinstance(error.__cause__, FileNotFoundError):  # asking again cannot help
            raise
        log.warning("%s; asking again", error)
        return True


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER)
    except FileNotFoundError as error:
        raise ConfigError(f"hydra/launcher=slurm: there is no {command[0]} on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"hydra/launcher=slurm: {command[0]} did not answer") from error
    if done.returncode:
        raise ConfigError(f"hydra/launcher=slurm: {command[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _code(job: Job) -> int:
    """The exit code that the script wrote. Without one, Slurm has ended the job."""
    code = _exit_code(job)
    if code is None and not _trained(job):
        job.write_error("ended by Slurm (time limit, memory or scancel); its log is in the sweep's folder")
        return USER
    return code or DONE


def _exit_code(job: Job) -> int | None:
    try:
        return int((job.folder.path / _CODE).read_text())
    except (OSError, ValueError):
        return None


def _done(job: Job) -> bool:
    """Whether an array has trained exactly this config: the user's own YAML files may have changed since."""
    path = job.folder.path / _CONFIG
    return _exit_code(job) == 0 and _trained(job) and path.is_file() and path.read_text() == job.config


def _trained(job: Job) -> bool:
    """Whether it is trained to its end, and `run.resume` does not ask for a new start."""
    return value(job, "run.resume") in ("", "auto") and job.folder.summary().get("status") == "done"


def _assigned(job: Job, keys: Sequence[str]) -> str:
    """What the script needs of a job, as shell variables."""
    folder, values = shlex.quote(str(job.folder.path.absolute())), shlex.quote(values_json(job, keys))
    return f"folder={folder} arguments=({shlex.join(job.arguments)}); export {OF_A_SWEEP}={values}"


def _list(launcher: Mapping[str, Any], key: str) -> list[str]:
    """Raises: ConfigError: not a list; a string would be taken letter by letter."""
    lines = launcher.get(key) or []
    if not isinstance(lines, list):
        raise ConfigError(
            f"hydra.launcher.{key} must be a list, as in hydra.launcher.{key}=[{lines!r}], got {lines!r}"
        )
    return [str(line) for line in lines]


def _quoted(text: str) -> str:
    """Quoted for sbatch: it ends a value at a blank or `#`; a backslash is an escape, even in quotes."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


_TEMPLATE = """\
#!/usr/bin/env bash
# The jobs of a sweep, one for each task of the array.
# A job whose time is nearly up saves a checkpoint, ends with {preempted} and is queued again.
{options}
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

{setup}export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
cd {cwd} || exit 1
case "$SLURM_ARRAY_TASK_ID" in
    {cases}
    *) echo "no job $SLURM_ARRAY_TASK_ID" >&2; exit 1 ;;
esac

# --cpus-per-task: srun does not take it from the job
srun ${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} --kill-on-bad-exit=0 --wait=120 \\
    {python} -m medconv.cli train "${{arguments[@]}}"
code=$?
if [ "$code" -eq {preempted} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 50 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit "$code"
fi
echo "$code" > "$folder/exit_code"
exit "$code"
"""
