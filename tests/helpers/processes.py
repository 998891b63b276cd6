"""Commands in forked processes, which need not load the libraries again."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from helpers import tiny
from helpers.waiting import until

from medconv.cli.entrypoint import guard
from medconv.cli.main import run
from medconv.features.sweeps import run_job
from medconv.features.sweeps.job import RUN_JOB
from medconv.utils.signals import PREEMPTING


class Forked:
    """A command in the background, in a fork of this process that need not load the libraries again.

    Its output is in the file `output`. Args: command: a subcommand of `medconv`.
    """

    def __init__(self, *arguments: str, cwd: Path, command: str = "train", **environment: str) -> None:
        self.output = cwd / f"output{time.monotonic_ns()}"
        self.output.touch()
        self.pid, self.code = os.fork(), None
        if self.pid:
            return
        gc.freeze()
        file = os.open(self.output, os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        os.environ.update(environment, PYTHONPATH=tiny.PYTHONPATH)
        sys.argv = [str(tiny.ROOT / "train.py"), *arguments]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = guard(partial(run, [command, *arguments]))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait(self) -> tuple[int, str]:
        """Exit code, and what it printed."""
        until(self.ended)
        return int(self.code or 0), self.output.read_text()


class ForkedJob:
    """In the place of `subprocess.Popen` for the jobs of a sweep or the members of an ensemble: `medconv` in a fork
    of this process.

    Its process id is appended to the file `job_pids` in the working directory.
    """

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        assert command[1] == "-m" and command[2] in (RUN_JOB, "medconv"), command
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            with Path("job_pids").open("a") as file:
                file.write(f"{self.pid}\n")
            return
        gc.freeze()
        for number in PREEMPTING:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        arguments = command[3:]
        sys.argv = ["medconv", *arguments]
        job = partial(run_job.train, Path(arguments[0]), arguments[1:])
        code = guard(job if command[2] == RUN_JOB else partial(run, arguments))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired: it has not ended after so many seconds."""
        deadline = time.monotonic() + (timeout if timeout is not None else math.inf)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("medconv", timeout or 0)
            time.sleep(0.02)
        return code


# to be put in the place of the module `subprocess` where jobs and members are started
FORKED = SimpleNamespace(Popen=ForkedJob, TimeoutExpired=subprocess.TimeoutExpired)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
