"""What a run is told by signals: SIGTERM and Slurm's SIGUSR1 (make room, it goes on later), Ctrl-C; and
Slurm's requeue.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

log = logging.getLogger(__name__)
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


class RunInterrupted(SIGTERMException):
    """A run ended because it was told to; what it had reached is in its checkpoint.

    Args: number: of the signal. agreed: whether all processes of the run end with it.
    """

    def __init__(self, number: int = signal.SIGTERM, agreed: bool = False) -> None:
        super().__init__()
        self.number, self.agreed = number, agreed

    @property
    def by_hand(self) -> bool:
        return self.number == signal.SIGINT


class StopRequest:
    """What this process has been told so far: the number of a signal, 0 as long as there was none."""

    number = 0
    # whether the run looks at the note; before, as it waits for other machines or workers, nobody would
    heard = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, once the run looks at the note, signals are only noted. A second Ctrl-C stops it at
        once.
        """
        with handled(self._note, *PREEMPTING), handled(self._interrupt, signal.SIGINT):
            yield

    def _note(self, number: int, frame: Any) -> None:
        if not self.heard:
            raise RunInterrupted(number)
        if self.number != signal.SIGUSR1:  # which asks for more, that the job is put back
            self.number = number

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.number == signal.SIGINT or not self.heard:
            raise KeyboardInterrupt
        self.number = signal.SIGINT
        log.info("interrupted: the run stops after this step and keeps it; once more stops it now")


@contextmanager
def raising() -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 raise `RunInterrupted` wherever the process is: before training there is
    nothing to keep.
    """

    def stop(number: int, frame: Any) -> None:
        raise RunInterrupted(number)

    with handled(stop, *PREEMPTING):
        yield


def requeue() -> None:
    """Ask Slurm to start this job again; without effect outside of a job. What Slurm refuses is said, and no
    error.

    At most `MAX_RESTARTS` times, a variable of the environment that scripts/slurm/train.sbatch sets; 50 where
    it is not set.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts >= int(os.environ.get("MAX_RESTARTS") or 50):
        log.warning(
            "Slurm has started job %s again %d times, and is not asked once more (MAX_RESTARTS)",
            job,
            restarts,
        )
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False
        )
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    if problem:
        log.warning("Slurm does not requeue job %s: %s", job, problem)
    else:
        log.info("Slurm requeues job %s", job)


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Signals go to the handler; not those that are ignored, as a shell has it for Ctrl-C in its
    background jobs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: one that Python did not set
