"""Stop requests by signal (SIGTERM, Slurm's SIGUSR1, Ctrl-C), and Slurm's requeue."""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)


class RunInterrupted(SystemExit):
    """A run or command was stopped by a signal; a run's checkpoint holds the last step.

    Args: number: of the signal. agreed: whether all processes of the run stop at the same step.
    """

    def __init__(self, number: int = signal.SIGTERM, agreed: bool = False) -> None:
        super().__init__()
        self.number, self.agreed = number, agreed

    @property
    def by_hand(self) -> bool:
        return self.number == signal.SIGINT


class StopRequest:
    """The stop signal that this process has received; `number` is 0 while there is none."""

    def __init__(self) -> None:
        self.number, self._deferred = 0, False

    def defer(self) -> None:
        """From now on the training loop checks `number`, and a signal no longer raises at once.

        Before, the run may wait for other machines or workers.
        """
        self._deferred = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, signals raise, or after `defer` set `number`. A second Ctrl-C stops at once."""
        with handled(self._note, *PREEMPTING), handled(self._interrupt, signal.SIGINT):
            yield

    def _note(self, number: int, frame: Any) -> None:
        if not self._deferred:
            raise RunInterrupted(number)
        if self.number != signal.SIGUSR1:  # SIGUSR1 also requests a requeue
            self.number = number

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.number == signal.SIGINT or not self._deferred:
            raise KeyboardInterrupt
        self.number = signal.SIGINT
        log.info("Stopping after this step and saving a checkpoint; press Ctrl-C again to abort.")


@contextmanager
def raising() -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 raise `RunInterrupted`: before training there is nothing to save."""

    def stop(number: int, frame: Any) -> None:
        raise RunInterrupted(number)

    with handled(stop, *PREEMPTING):
        yield


def requeue() -> None:
    """Requeue this Slurm job; no effect outside of a job. If Slurm refuses, log a warning.

    At most `MAX_RESTARTS` times, an environment variable that scripts/slurm/train.sbatch sets; default 50.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts >= int(os.environ.get("MAX_RESTARTS") or 50):
        log.warning("job %s is not requeued: Slurm has restarted it %d times (MAX_RESTARTS)", job, restarts)
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        command = ["scontrol", "requeue", job]
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        log.info("Slurm requeued job %s", job)
    except (OSError, subprocess.SubprocessError) as error:
        problem = (getattr(error, "stderr", None) or "").strip() or error
        log.warning("Slurm did not requeue job %s: %s", job, problem)


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Inside, `handler` handles these signals, except those that are ignored.

    A shell ignores Ctrl-C in its background jobs.
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
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: not set by Python
