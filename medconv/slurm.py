"""`hydra/launcher=slurm`: a sweep's jobs as one job array, by a script that anybody can read and send by hand.

Each job is a command line of its own, as in a sweep on one machine; so it may have several processes and machines, and one
that fails leaves the others alone. `run.dry_run=true` shows the script and sends nothing.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv import commands
from medconv.atomic import write_text
from medconv.config import ConfigError
from medconv.jobs import Job, told
from medconv.reports import OF_A_SWEEP

SCRIPT, SENT = "sweep.sbatch", "slurm.json"
_SETTINGS = {  # of hydra.launcher, to sbatch's own options
    **{name: name.replace("_", "-") for name in ("partition", "account", "qos", "time", "mem", "nodes")},
    **{name: name.replace("_", "-") for name in ("ntasks_per_node", "gpus_per_node", "cpus_per_task")},
}

log = logging.getLogger(__name__)


def wanted(launcher: Mapping[str, Any]) -> bool:
    return str(launcher.get("_target_", "")).endswith(".Slurm")


def script(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The batch script of an array with a task for each job. Args: keys: in which the sweep's jobs differ."""
    home = jobs[0].home.absolute()
    at_once = f"%{launcher['at_once']}" if launcher.get("at_once") else ""
    options = {
        "job-name": f"medconv-{home.name}",
        "array": f"0-{len(jobs) - 1}{at_once}",
        "output": home / "slurm-%A_%a.log",
        **{option: launcher[key] for key, option in _SETTINGS.items() if launcher.get(key) is not None},
    }
    lines = [f"#SBATCH --{name}={_line(str(given))}" for name, given in options.items()]
    lines += [f"#SBATCH {_line(option)}" for option in launcher.get("options") or ()]
    cases = [f"{i}) {_assigned(job, keys)} ;;" for i, job in enumerate(jobs)]
    setup = "\n".join(launcher.get("setup") or ())
    return _TEMPLATE.format(
        options="\n".join(lines),
        setup=f"{setup}\n" if setup else "",
        cwd=shlex.quote(str(Path.cwd())),
        cases="\n    ".join(cases),
        python=shlex.quote(sys.executable),
        preempted=commands.PREEMPTED,
    )


def run(jobs: Sequence[Job], launcher: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Send the jobs as one array and wait until it has left the queue; each job then has its exit code.

    A sweep that was started before, and whose array is still in the queue, is waited for and not sent again.
    Raises: ConfigError: sbatch is not here, or refuses.
    """
    home = jobs[0].home
    home.mkdir(parents=True, exist_ok=True)
    number = _waiting(home, jobs) or _send(home, jobs, script(jobs, launcher, keys))
    print(f"array {number} with {len(jobs)} jobs: logs are {home / f'slurm-{number}_*.log'}", flush=True)
    try:
        while _in_queue(number):
            time.sleep(float(launcher.get("poll_seconds") or 10))
    except (KeyboardInterrupt, SystemExit):
        print(f"array {number} stays in the queue; the same command waits for it, `scancel {number}` ends it", flush=True)
        raise
    (home / SENT).unlink(missing_ok=True)
    for job in jobs:
        job.code = _code(job)


def _send(home: Path, jobs: Sequence[Job], content: str) -> str:
    for job in jobs:
        job.begin()
        job.folder.path.mkdir(parents=True, exist_ok=True)
        (job.folder.path / "exit_code").unlink(missing_ok=True)
    write_text(home / SCRIPT, content)
    said = _slurm("sbatch", "--parsable", str(home / SCRIPT))
    found = re.match(r"\d+", said)
    if found is None:
        raise ConfigError(f"hydra/launcher=slurm: sbatch said {said!r} instead of a job's number")
    write_text(home / SENT, json.dumps({"array": found[0], "jobs": [job.folder.path.name for job in jobs]}) + "\n")
    return found[0]


def _waiting(home: Path, jobs: Sequence[Job]) -> str | None:
    """The number of an array of this sweep that is still in the queue."""
    try:
        sent = json.loads((home / SENT).read_text(encoding="utf-8"))
        number, names = str(int(sent["array"])), list(sent["jobs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not _in_queue(number):
        return None
    if names != [job.folder.path.name for job in jobs]:
        raise ConfigError(
            f"{home}: array {number} with other jobs of this sweep is in the queue; wait, or `scancel {number}`"
        )
    return number


def _in_queue(number: str) -> bool:
    try:
        return bool(_slurm("squeue", "--noheader", "--jobs", number))
    except ConfigError as error:
        if "Invalid job id" in str(error):  # it ended some minutes ago
            return False
        log.warning("%s; asking again", error)
        return True


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except FileNotFoundError as error:
        raise ConfigError(f"hydra/launcher=slurm: there is no {command[0]} on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"hydra/launcher=slurm: {command[0]} did not answer") from error
    if done.returncode:
        raise ConfigError(f"hydra/launcher=slurm: {command[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _code(job: Job) -> int:
    """As the script wrote it; a job that never came to that was ended by Slurm."""
    try:
        return int((job.folder.path / "exit_code").read_text())
    except (OSError, ValueError):
        job.note("ended by Slurm, such as for its time or memory, or cancelled; its log is in the sweep's folder")
        return commands.USER


def _folder(job: Job) -> Path:
    return job.folder.path.absolute()


def _assigned(job: Job, keys: Sequence[str]) -> str:
    """What the script needs of a job, as variables of the shell."""
    folder, own = shlex.quote(str(_folder(job))), shlex.quote(told(job, keys))
    return f"folder={folder} arguments=({shlex.join(job.arguments)}); export {OF_A_SWEEP}={own}"


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
srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" --kill-on-bad-exit=0 --wait=120 \\
    {python} -m medconv.train "${{arguments[@]}}"
code=$?
if [ "$code" -eq {preempted} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 50 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit "$code"
fi
echo "$code" > "$folder/exit_code"
exit "$code"
"""
