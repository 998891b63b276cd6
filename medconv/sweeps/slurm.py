"""`hydra/launcher=slurm`: a sweep's jobs as one job array, by a script that anybody can read and send by
hand.

Each job is a command line of its own, as in a sweep on one machine; so it may have several processes and
machines, and one that fails leaves the others alone. `run.dry_run=true` shows the script and sends nothing.
"""

from __future__ import annotations

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

from medconv.config import ConfigError
from medconv.sweeps.job import Job, told, value
from medconv.training.report import OF_A_SWEEP
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE, PREEMPTED, USER

SCRIPT, SENT = "sweep.sbatch", "slurm.json"
_CONFIG = "sent"  # in a job's folder: the hash of the config that was sent
_ANSWER = 120.0  # seconds until a command of Slurm's has answered
_LATE = 30.0  # seconds until a file that another machine wrote is seen here
_SETTINGS = {  # of hydra.launcher, to sbatch's own options
    **{name: name.replace("_", "-") for name in ("partition", "account", "qos", "time", "mem", "nodes")},
    **{name: name.replace("_", "-") for name in ("ntasks_per_node", "gpus_per_node", "cpus_per_task")},
}

log = logging.getLogger(__name__)


def wanted(launcher: Mapping[str, Any]) -> bool:
    return str(launcher.get("_target_", "")).endswith(".Slurm")


def script(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The batch script of an array with a task for each job. Args: keys: in which the sweep's jobs differ."""
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
        **{option: launcher[key] for key, option in _SETTINGS.items() if launcher.get(key) is not None},
    }
    lines = [f"#SBATCH --{name}={_quoted(_line(str(given)))}" for name, given in options.items()]
    lines += [f"#SBATCH {_line(option)}" for option in _list(launcher, "options")]
    cases = [f"{i}) {_assigned(job, keys)} ;;" for i, job in enumerate(jobs)]
    setup = "\n".join(_list(launcher, "setup"))
    return _TEMPLATE.format(
        options="\n".join(lines),
        setup=f"{setup}\n" if setup else "",
        cwd=shlex.quote(str(Path.cwd())),
        cases="\n    ".join(cases),
        python=shlex.quote(sys.executable),
        preempted=PREEMPTED,
    )


def run(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Send the jobs as one array and wait until it has left the queue; each job then has its exit code.

    A sweep that was started before, and whose array is still in the queue, is waited for and not sent again;
    nor is a job that has been trained to its end.
    Raises: ConfigError: sbatch is not here, or refuses.
    """
    home = jobs[0].home
    home.mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs if not _done(job)]
    if left:
        _wait(
            home,
            left,
            _waiting(home, jobs, left) or _send(home, left, script(left, launcher, keys)),
            launcher,
        )
    for job in jobs:
        job.code = _code(job)


def _wait(home: Path, jobs: Sequence[Job], number: str, launcher: Mapping[str, Any]) -> None:
    print(f"array {number} with {len(jobs)} jobs: logs are {home / f'slurm-{number}_*.log'}", flush=True)
    try:
        while _in_queue(number):
            time.sleep(float(launcher.get("poll_seconds") or 10))
    except (KeyboardInterrupt, SystemExit):
        print(
            f"array {number} stays in the queue; the same command waits for it, `scancel {number}` ends it",
            flush=True,
        )
        raise
    deadline = time.monotonic() + _LATE
    while any(_exit_code(job) is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(1)
    (home / SENT).unlink(missing_ok=True)


def _send(home: Path, jobs: Sequence[Job], content: str) -> str:
    for job in jobs:
        job.begin()
        job.folder.path.mkdir(parents=True, exist_ok=True)
        _exit_file(job).unlink(missing_ok=True)
        write_text(job.folder.path / _CONFIG, job.config)
    write_text(home / SCRIPT, content)
    # to be found by, where sbatch is not heard to its end
    name = f"medconv-{home.absolute().name}-{secrets.token_hex(4)}"
    _remember(home, jobs, name, None)
    try:
        said = _slurm("sbatch", "--parsable", f"--job-name={name}", str(home / SCRIPT))
        found = re.match(r"\d+", said)
        if found is None:
            raise ConfigError(f"hydra/launcher=slurm: sbatch said {said!r} instead of a job's number")
    except ConfigError as error:
        if not isinstance(error.__cause__, subprocess.TimeoutExpired):
            (home / SENT).unlink()
        raise
    _remember(home, jobs, name, found[0])
    return found[0]


def _remember(home: Path, jobs: Sequence[Job], name: str, number: str | None) -> None:
    content = {"name": name, "array": number, "jobs": [job.folder.path.name for job in jobs]}
    write_text(home / SENT, json.dumps(content) + "\n")


def _waiting(home: Path, jobs: Sequence[Job], left: Sequence[Job]) -> str | None:
    """The number of an array of this sweep that is still in the queue. Args: left: those without an end."""
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
    if not {job.folder.path.name for job in left} <= set(names) <= {job.folder.path.name for job in jobs}:
        raise ConfigError(
            f"{home}: array {number} with other jobs of this sweep is in the queue; wait, or `scancel "
            f"{number}`"
        )
    return number


def _in_queue(number: str) -> bool:
    try:
        return bool(_slurm("squeue", "--noheader", "--jobs", number))
    except ConfigError as error:
        if "Invalid job id" in str(error):  # it ended some minutes ago
            return False
        if isinstance(error.__cause__, FileNotFoundError):  # there never will be an answer
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
    """As the script wrote it; a job that never came to that was ended by Slurm."""
    code = _exit_code(job)
    if code is None and not _trained(job):
        job.note(
            "ended by Slurm, such as for its time or memory, or cancelled; its log is in the sweep's folder"
        )
        return USER
    return code or DONE


def _exit_code(job: Job) -> int | None:
    try:
        return int(_exit_file(job).read_text())
    except (OSError, ValueError):
        return None


def _exit_file(job: Job) -> Path:
    return job.folder.path / "exit_code"


def _done(job: Job) -> bool:
    """Whether an array has trained this very config: files of the user's own may have changed since."""
    path = job.folder.path / _CONFIG
    return _exit_code(job) == 0 and _trained(job) and path.is_file() and path.read_text() == job.config


def _trained(job: Job) -> bool:
    """To its end, and that is what is asked for."""
    return value(job, "run.resume") in ("", "auto") and job.folder.summary().get("status") == "done"


def _folder(job: Job) -> Path:
    return job.folder.path.absolute()


def _assigned(job: Job, keys: Sequence[str]) -> str:
    """What the script needs of a job, as variables of the shell."""
    folder, own = shlex.quote(str(_folder(job))), shlex.quote(told(job, keys))
    return f"folder={folder} arguments=({shlex.join(job.arguments)}); export {OF_A_SWEEP}={own}"


def _list(launcher: Mapping[str, Any], key: str) -> list[str]:
    """Raises: ConfigError: a text, which would be taken letter by letter."""
    given = launcher.get(key) or []
    if not isinstance(given, list):
        raise ConfigError(
            f"hydra.launcher.{key} must be a list, as in hydra.launcher.{key}=[{given!r}], got {given!r}"
        )
    return [str(line) for line in given]


def _quoted(text: str) -> str:
    """For sbatch, which ends a value at a blank or a `#`, and takes a backslash for an escape, also within
    quotes.
    """
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _line(text: str) -> str:
    """Raises: ConfigError: a text that would end its line and begin another one of the script."""
    if "\n" in text:
        raise ConfigError(f"hydra.launcher: options are of one line each, got {text!r}")
    return text


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
