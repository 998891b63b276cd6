"""Stop requests by signal (SIGTERM, those of batch systems, SIGHUP, Ctrl-C), and Slurm's requeue."""

import logging
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)
Handler = Callable[[int, FrameType | None], None]

SIGUSR1 = getattr(signal, "SIGUSR1", None)  # Windows has neither this one
_SIGHUP = getattr(signal, "SIGHUP", None)  # nor this one
_SIGXCPU = getattr(signal, "SIGXCPU", None)
_STOPPING = (
    signal.SIGTERM,  # by a scheduler or a service manager
    SIGUSR1,  # by Slurm before its time limit
    getattr(signal, "SIGUSR2", None),  # by Grid Engine's `-notify`, and where scripts for submitit ask for it
    _SIGXCPU,  # by a limit of CPU time: Grid Engine's `s_cpu`, LSF, `ulimit -t`
    _SIGHUP,  # by a terminal that was closed
)
PREEMPTING = tuple(number for number in _STOPPING if number is not None)
_MAX_RESTARTS = 50
WAIT_SECONDS = 5.0  # for something that may never come, once a stop is requested; Docker kills after 10


class RunInterrupted(SystemExit):
    """A run or command was stopped by a signal; a run's checkpoint holds the last step.

    Args:
        number: of the signal.
        agreed: whether all processes of the run stop at the same step.
    """

    def __init__(self, number: int = signal.SIGTERM, agreed: bool = False) -> None:
        super().__init__()
        self.number = number
        self.agreed = agreed

    @property
    def by_hand(self) -> bool:
        return self.number == signal.SIGINT


class StopRequest:
    """The stop signal that this process has received; `number` is 0 while there is none."""

    def __init__(self) -> None:
        self.number = 0
        self._deferred = False
        self._noted_at = math.inf
        self._waiting_since = math.inf
        self._waking = threading.Lock()
        self._handles = False  # signals

    def defer(self) -> None:
        """From now on the training loop checks `number`, and a signal no longer raises at once.

        Before, the run may wait for other machines or workers.
        """
        self._deferred = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait between two steps, such as for a batch: it may never end, as of a dead network disk.

        A signal raises there too, after `WAIT_SECONDS`.
        """
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = math.inf

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, signals raise, or after `defer` set `number`. A second Ctrl-C stops at once."""
        with handled(self._note, *PREEMPTING), handled(self._interrupt, signal.SIGINT):
            self._handles = True
            try:
                yield
            finally:
                with self._waking:
                    self._handles = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred:
            raise RunInterrupted(number)
        if self._waits_too_long():
            self._waiting_since = math.inf  # raises once
            raise RunInterrupted(self.number)
        if self.number != SIGUSR1:  # SIGUSR1 also requests a requeue
            self.number = number
        self._watch()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.number == signal.SIGINT or not self._deferred:
            raise KeyboardInterrupt
        self.number = signal.SIGINT
        self._watch()
        log.info("Stopping after this step and saving a checkpoint; press Ctrl-C again to abort.")

    def _waits_too_long(self) -> bool:
        begin = max(self._waiting_since, self._noted_at)
        return time.monotonic() - begin > WAIT_SECONDS

    def _watch(self) -> None:
        if self._noted_at == math.inf:
            self._noted_at = time.monotonic()
            threading.Thread(target=self._end_long_wait, daemon=True).start()

    def _end_long_wait(self) -> None:
        """Wakes the main thread by another signal, whose handler raises if the wait has not ended by then."""
        while True:
            time.sleep(WAIT_SECONDS / 10)
            with self._waking:  # without the handler, the signal would end the process
                if not self._handles:
                    return
                if self._waits_too_long():
                    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def raising() -> Iterator[None]:
    """Inside, signals of `PREEMPTING` raise `RunInterrupted`: before training there is nothing to save."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise RunInterrupted(number)

    with handled(stop, *PREEMPTING):
        yield


@contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Inside, `handler` handles these signals, except those that are ignored.

    A shell ignores Ctrl-C in its background jobs, `nohup` ignores SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number == _SIGHUP:
            _discard_closed_output()
        if number == _SIGXCPU:
            _until_hard_limit()
        handler(number, frame)

    previous_handlers = {number: signal.getsignal(number) for number in numbers}
    for number, previous in previous_handlers.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            # None: the handler was not set by Python.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _until_hard_limit() -> None:
    """Beyond the soft limit of CPU time, SIGXCPU comes each second; it would end a process that is ending."""
    import resource  # Windows has none, nor the signal

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _discard_closed_output() -> None:
    """Discard what is written to a closed terminal or pipe: a progress bar would raise an error there."""
    poll = select.poll()
    for descriptor in (1, 2):  # standard output and standard error
        poll.register(descriptor, 0)
    for descriptor, events in poll.poll(0):
        if events & (select.POLLHUP | select.POLLERR):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def requeue() -> None:
    """Requeue this Slurm job; no effect outside of a job. If Slurm refuses, log a warning.

    At most `MAX_RESTARTS` times, an environment variable that scripts/slurm/train.sbatch sets; default 50.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    max_restarts = int(os.environ.get("MAX_RESTARTS") or _MAX_RESTARTS)
    if restarts >= max_restarts:
        log.warning("job %s is not requeued: Slurm has restarted it %d times (MAX_RESTARTS)", job, restarts)
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or ""
        log.warning("Slurm did not requeue job %s: %s", job, stderr.strip() or error)
        return
    log.info("Slurm requeued job %s", job)
