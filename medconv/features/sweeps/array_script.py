"""The batch script of a sweep: a job array with a task per job.

A job whose time is nearly up saves a checkpoint, ends with its own exit code and is queued again. So is one
that lost a process.
"""

import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.config import ConfigError
from medconv.features.sweeps.batch_system import SLURM, BatchSystem
from medconv.features.sweeps.job import RUN_JOB, Job, values_json
from medconv.training.loggers import HPARAMS
from medconv.utils.exit_codes import PREEMPTED
from medconv.utils.signals import PREEMPTING

# Keys of hydra.launcher that, with hyphens, are options of sbatch.
_SBATCH_KEYS = (
    "partition",
    "account",
    "qos",
    "time",
    "mem",
    "nodes",
    "ntasks_per_node",
    "gpus_per_node",
    "cpus_per_task",
)
# What is read for every batch system
_KEYS = ("_target_", "system", "at_once", "setup", "options", "poll_seconds")
_MAX_RESTARTS = 50  # a job that cannot go on must not come back for ever


def script(jobs: Sequence[Job], system: BatchSystem, launcher: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The batch script of an array with a task per job.

    Args:
        keys: in which the sweep's jobs differ.

    Raises:
        ConfigError: a setting that the batch system would misread.
    """
    _check_keys(system, launcher)
    options = _sbatch_options(jobs, launcher) if system is SLURM else _options(jobs, system, launcher)
    cases = [f"{index}) {_shell_variables(job, keys)} ;;" for index, job in enumerate(jobs, system.first)]
    return (_HEAD + (_SLURM if system is SLURM else _PLAIN)).format(
        options="\n".join(f"{system.directive} {option}" for option in options),
        index=system.index,
        requeue=system.requeue or ":",
        max_restarts=_MAX_RESTARTS,
        setup="".join(f"{line}\n" for line in _list(launcher, "setup")),
        cwd=shlex.quote(str(Path.cwd())),
        cases="\n    ".join(cases),
        python=shlex.quote(sys.executable),
        run_job=RUN_JOB,
        preempted=PREEMPTED,
        signalled=" | ".join(str(128 + number) for number in sorted(PREEMPTING)),
        aborted=128 + signal.SIGABRT,
    )


def _check_keys(system: BatchSystem, launcher: Mapping[str, Any]) -> None:
    """Raises: ConfigError: a key that nothing reads, or a number out of range."""
    known = {*_KEYS, *(_SBATCH_KEYS if system is SLURM else ())}
    for key in launcher:
        if key not in known:
            raise ConfigError(
                f"hydra.launcher.{key}: there is no such key for {system.name}; "
                "hydra.launcher.options=[...] adds any option"
            )
    at_once = launcher.get("at_once")
    if at_once is not None and (type(at_once) is not int or at_once < 1):
        raise ConfigError(f"hydra.launcher.at_once must be null or a number of at least 1, got {at_once}")
    seconds = launcher.get("poll_seconds", 10)
    if type(seconds) not in (int, float) or not seconds > 0:
        raise ConfigError(f"hydra.launcher.poll_seconds must be a number above 0, got {seconds}")


def _sbatch_options(jobs: Sequence[Job], launcher: Mapping[str, Any]) -> list[str]:
    # YAML 1.1: 12:00:00 is a number in base 60.
    if type(launcher.get("time")) is int:
        raise ConfigError(
            f"hydra.launcher.time must be quoted, as '04:00:00'; without quotes YAML reads {launcher['time']}"
        )
    home = jobs[0].home.absolute()
    max_running = f"%{launcher['at_once']}" if launcher.get("at_once") else ""
    log_folder = str(home).replace("%", "%%")
    settings = {
        "job-name": f"medconv-{home.name}",
        "array": f"0-{len(jobs) - 1}{max_running}",
        "output": f"{log_folder}/slurm-%A_%a.log",
    }
    for key in _SBATCH_KEYS:
        if launcher.get(key) is not None:
            settings[key.replace("_", "-")] = str(launcher[key])
    options = [f"--{name}={_quoted(setting)}" for name, setting in settings.items()]
    options += ["--signal=USR1@180", "--requeue", "--open-mode=append"]
    return [*options, *_user_options(launcher)]


def _options(jobs: Sequence[Job], system: BatchSystem, launcher: Mapping[str, Any]) -> list[str]:
    home = str(jobs[0].home.absolute())
    if re.search(r"\s", home):
        raise ConfigError(f"hydra/launcher={system.name}: the sweep's folder must have no blanks, got {home}")
    values = {
        "name": f"medconv-{jobs[0].home.absolute().name}",
        "tasks": max(len(jobs), 2),  # PBS has no array of one task
        "limit": system.limit.format(at_once=launcher["at_once"]) if launcher.get("at_once") else "",
        "folder": home,
    }
    return [*(line.format(**values) for line in system.settings), *_user_options(launcher)]


def _user_options(launcher: Mapping[str, Any]) -> list[str]:
    options = _list(launcher, "options")
    for option in options:
        if "\n" in option:  # it would begin another line of the script
            raise ConfigError(f"hydra.launcher: each option must be one line, got {option!r}")
    return options


def _shell_variables(job: Job, keys: Sequence[str]) -> str:
    """What the script needs of a job."""
    folder = shlex.quote(str(job.folder.path.absolute()))
    values = shlex.quote(values_json(job, keys))
    return f"folder={folder} arguments=({shlex.join(job.arguments)}); export {HPARAMS}={values}"


def _list(launcher: Mapping[str, Any], key: str) -> list[str]:
    """A setting of several lines.

    Raises:
        ConfigError: not a list; a string would be taken letter by letter.
    """
    lines = launcher.get(key) or []
    if not isinstance(lines, list):
        raise ConfigError(
            f"hydra.launcher.{key} must be a list, as in hydra.launcher.{key}=[{lines!r}], got {lines!r}"
        )
    return [str(line) for line in lines]


def _quoted(text: str) -> str:
    """Quoted for sbatch: it ends a value at a blank or `#`; a backslash is an escape, even in quotes."""
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    escaped = re.sub(r'(["\\])', r"\\\1", text)
    return f'"{escaped}"'


_HEAD = """\
#!/usr/bin/env bash
# The jobs of a sweep, one for each task of the array.
# A job whose time is nearly up saves a checkpoint, ends with {preempted} and is queued again.
{options}

{setup}export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
cd {cwd} || exit 1
case "${index}" in
    {cases}
    *) echo "no job for {index}=${index}" >&2; exit 0 ;;
esac
"""
# Each task is a step of srun, which starts its processes and passes signals to them
_SLURM = """
export MEDCONV_ERROR_FILE="$folder/error-$SLURM_JOB_ID"  # the first process that fails writes there why
rm -f "$MEDCONV_ERROR_FILE" "$folder/exit_code"
# --cpus-per-task: srun does not take it from the job
srun ${{SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}} --kill-on-bad-exit=0 --wait=120 \\
    {python} -m {run_job} "$folder" "${{arguments[@]}}"
code=$?
# a process that still imports Python's modules is ended by the signals that ask to stop: nothing has failed
case "$code" in {signalled}) code={preempted} ;; esac
# NCCL's watchdog ends a process by SIGABRT if another one is lost: that is {preempted}, unless one has failed
tasks=${{SLURM_NTASKS:-$((${{SLURM_JOB_NUM_NODES:-1}} * ${{SLURM_NTASKS_PER_NODE:-1}}))}}
if [ "$code" -eq {aborted} ] && [ "$tasks" -gt 1 ] && [ ! -s "$MEDCONV_ERROR_FILE" ]; then
    code={preempted}
fi
rm -f "$MEDCONV_ERROR_FILE"
# not $SLURM_JOB_ID: that of the last task is the array's own, by which Slurm requeues all tasks
task="${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
# whether Slurm ends this job: it is queued again, perhaps by the run itself, or cancelled
completing() {{ [ "$(squeue --noheader --jobs "$task" --format=%T)" = COMPLETING ]; }}
if [ "$code" -eq {preempted} ]; then
    # scontrol would queue a cancelled job again, too
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ] && ! completing; then
        scontrol requeue "$task"
    fi
    completing && exit "$code"  # without a code in the folder: the job has not ended, or is cancelled
fi
echo "$code" > "$folder/exit_code"
exit "$code"
"""
# One process for each task, which starts others for `trainer.devices`
_PLAIN = """
rm -f "$folder/exit_code"
# beside the run's folder, which a start with run.resume=never moves aside; a restart goes on with the run
restarts=$(cat "$folder.restarts" 2> /dev/null || echo 0)
export MEDCONV_RESTARTS="$restarts" MEDCONV_JOB="${{JOB_ID:-${{LSB_JOBID:-${{PBS_JOBID:-}}}}}}"
{python} -m {run_job} "$folder" "${{arguments[@]}}" &
running=$!
# a batch system may tell this script alone that the task's time is up
trap 'told=1; kill -TERM "$running"' TERM USR1 USR2
told=1
while [ -n "$told" ]; do  # a signal interrupts `wait`
    told=
    wait "$running"
    code=$?
done
# a process that still imports Python's modules is ended by the signals that ask to stop: nothing has failed
case "$code" in {signalled}) code={preempted} ;; esac
if [ "$code" -eq {preempted} ]; then
    echo $((restarts + 1)) > "$folder.restarts"
    if [ "$restarts" -lt {max_restarts} ]; then
        {requeue}
    fi
fi
rm -f "$folder.restarts"
echo "$code" > "$folder/exit_code"
exit "$code"
"""
