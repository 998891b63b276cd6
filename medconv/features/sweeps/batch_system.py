"""Batch systems with job arrays: what differs between Slurm, PBS, SGE, LSF and others, in a few words."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from medconv.config import ConfigError

RUN = "medconv.features.sweeps.job_array.run"  # as options of conf/hydra/launcher name it
_ANSWER_SECONDS = 120.0  # until a command must have answered


@dataclass(frozen=True)
class BatchSystem:
    """The words of a batch system; `hydra.launcher.system` of its option has them.

    Args:
        name: in messages and in names of files.
        directive: that begins a line of settings in a script.
        settings: of each script; {name}, {tasks}, {limit} and {folder} are filled in.
        limit: of the tasks that run at once, {at_once}; where `settings` has {limit}.
        index: the environment variable with a task's number.
        first: the number of the first task.
        submit: the command that reads a script, {script} or standard input, and prints the array's number.
        poll: the command that prints something while the array {job} is in the queue.
        gone: a regular expression of the error of `poll` for an array that has left the queue.
        cancel: the command for {job}, in messages.
        requeue: what the script of a preempted task does, in bash, so that it is queued again; empty: the
            same command submits it again.
        find: the command that prints the number of an array {name}, in case `submit` has not answered.
        hopeless: a regular expression of what `poll` says of an array that waits for what may never come.
    """

    name: str
    directive: str
    index: str
    submit: str
    poll: str
    gone: str
    cancel: str
    settings: Sequence[str] = ()
    limit: str = ""
    first: int = 1
    requeue: str = ""
    find: str = ""
    hopeless: str = ""

    @classmethod
    def of(cls, launcher: Mapping[str, Any]) -> "BatchSystem | None":
        """That of Hydra's settings of a launcher; None: jobs run on this machine.

        Raises:
            ConfigError: a word is missing, unknown or not of its type.
        """
        if launcher.get("_target_") != RUN:
            return None
        words = launcher.get("system")
        if words is None:
            return SLURM
        types: dict[str, type] = {field.name: int if field.name == "first" else str for field in fields(cls)}
        types["settings"] = list
        missing = {field.name for field in fields(cls)[:7]} - {*words}
        for name in sorted({*words} - {*types}) or sorted(missing):
            raise ConfigError(
                f"hydra.launcher.system: {name} is {'missing' if name in missing else 'unknown'}"
            )
        for name, word in words.items():
            if not isinstance(word, types[name]):
                raise ConfigError(
                    f"hydra.launcher.system.{name} must be {types[name].__name__}, got {word!r}"
                )
        return cls(**words)

    def ask(self, command: str, stdin: str = "", **values: str) -> str:
        """The output of one of its commands. Args: values: by placeholder.

        Raises:
            ConfigError: it is missing, fails or does not answer.
        """
        words = [word.format(**values) for word in shlex.split(command)]
        try:
            process = subprocess.run(
                words, input=stdin, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
            )
        except FileNotFoundError as error:
            raise self.error(f"there is no {words[0]} on this machine") from error
        except subprocess.TimeoutExpired as error:
            raise self.error(f"{words[0]} did not answer") from error
        if process.returncode:
            reason = " ".join((process.stderr or process.stdout).split())
            raise self.error(f"{words[0]} failed: {reason}")
        return process.stdout.strip()

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"hydra/launcher={self.name}: {reason}")


SLURM = BatchSystem(
    name="slurm",
    directive="#SBATCH",
    index="SLURM_ARRAY_TASK_ID",
    first=0,
    submit="sbatch --parsable --job-name={name} {script}",
    poll="squeue --noheader --jobs {job} --format=%r",
    gone="Invalid job id",  # some minutes after its end, Slurm forgets an array
    cancel="scancel {job}",
    find="squeue --noheader --name {name} --format=%F",
    hopeless="Partition|BadConstraints|DependencyNever|Held|ReqNodeNotAvail",
)
