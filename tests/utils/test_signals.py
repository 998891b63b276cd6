"""medconv/utils/signals.py: stop requests by signal, and Slurm's requeue."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading

import pytest
from helpers.waiting import PATIENCE_S, until

from medconv.utils import signals


@pytest.fixture(autouse=True)
def hangups_are_not_ignored():
    """As `nohup pytest` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_before_training_ends_the_process_at_once():
    for number in signals.PREEMPTING:
        with pytest.raises(signals.RunInterrupted) as error, signals.raising():
            os.kill(os.getpid(), number)
        assert error.value.number == number


def test_signals_set_the_request_once_the_training_loop_checks_it():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
    try:
        _send_signals()
    finally:
        signal.signal(signal.SIGINT, before)


def _send_signals():
    request = signals.StopRequest()
    with pytest.raises(KeyboardInterrupt), request.noted():
        os.kill(os.getpid(), signal.SIGINT)
    request.defer()
    with request.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGUSR1  # SIGTERM does not cancel the requeue
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class WatchersTime:
    """In the place of `time`: the thread that watches a wait looks only when a test lets it."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self._sleeps = threading.Semaphore(0)
        self._may_look = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self._sleeps.release()
        self._may_look.acquire()

    def let_look(self) -> None:
        """Once; returns when the thread sleeps again."""
        self._sleeps.acquire()
        self._may_look.release()
        self._sleeps.acquire()
        self._sleeps.release()


@pytest.fixture
def clock(monkeypatch):
    clock = WatchersTime()
    monkeypatch.setattr(signals, "time", clock)
    return clock


@pytest.mark.parametrize("number", [*signals.PREEMPTING, signal.SIGINT])
def test_a_signal_ends_a_wait_that_does_not_end(number, clock):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        request = signals.StopRequest()
        request.defer()
        with pytest.raises(signals.RunInterrupted) as error, request.noted(), request.waiting():
            os.kill(os.getpid(), number)
            clock.let_look()
            assert request.number == number  # it may still end
            clock.seconds += signals.WAIT_SECONDS + 1
            clock.let_look()
        assert error.value.number == number
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_does_not_end_a_step(clock):
    request = signals.StopRequest()
    request.defer()
    with request.noted():
        os.kill(os.getpid(), signal.SIGUSR1)
        clock.seconds += 1000  # a long step
        clock.let_look()
        with request.waiting():
            clock.let_look()  # the wait has just begun
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGUSR1


def test_what_ends_a_wait_ends_with_the_handlers(monkeypatch):
    """Without them its signal would end this process."""
    monkeypatch.setattr(signals, "WAIT_SECONDS", 0.05)
    before = set(threading.enumerate())
    request = signals.StopRequest()
    request.defer()
    with request.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        (watcher,) = set(threading.enumerate()) - before
    with request.waiting():
        watcher.join()


TRAINING = """
import pathlib, sys, time
from medconv.utils import signals
begun, number, seconds = sys.argv[1:]
request = signals.StopRequest()
request.defer()
with request.noted():
    pathlib.Path(begun).touch()
    deadline = time.monotonic() + float(seconds)
    while not request.number and time.monotonic() < deadline:
        time.sleep(0.01)
    print("the step is done", flush=True)
    print("the step is done", file=sys.stderr, flush=True)
pathlib.Path(number).write_text(str(int(request.number)))
"""


def noted_as_its_terminal_closes(folder, seconds, *prefix):
    """The signal that a training notes within so many seconds. Args: prefix: of its command."""
    begun, number = folder / "begun", folder / "number"
    ours, of_process = os.openpty()
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", TRAINING, str(begun), str(number), str(seconds)],
        stdin=of_process,
        stdout=of_process,
        stderr=of_process,
        cwd=folder,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that its end sends SIGHUP
    )
    os.close(of_process)
    until(begun.exists)
    os.close(ours)
    assert process.wait(PATIENCE_S) == 0
    return number.read_text()


def test_a_closed_terminal_requests_a_stop_and_output_to_it_raises_nothing(tmp_path):
    assert noted_as_its_terminal_closes(tmp_path, PATIENCE_S) == str(int(signal.SIGHUP))


def test_with_nohup_a_closed_terminal_stops_nothing(tmp_path):
    assert noted_as_its_terminal_closes(tmp_path, 1, "nohup") == "0"
    assert (tmp_path / "nohup.out").read_text().splitlines() == ["the step is done"] * 2


def test_a_refused_requeue_is_a_warning(tmp_path, monkeypatch, caplog):
    signals.requeue()  # no job
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    signals.requeue()
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'slurm_requeue: disabled' >&2; exit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    signals.requeue()
    assert ["No such file" in caplog.messages[0], "disabled" in caplog.messages[1], len(caplog.messages)] == [
        True,
        True,
        2,
    ]


def test_a_job_is_requeued_a_limited_number_of_times(tmp_path, monkeypatch, caplog):
    """So a run whose time is always up before its first step ends."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for most, restarts in (("", "49"), ("", "50"), ("3", "2"), ("3", "3")):
        monkeypatch.setenv("MAX_RESTARTS", most)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        signals.requeue()
    assert (tmp_path / "requeued").read_text() == "requeue 12\n" * 2
    assert [m for m in caplog.messages if "MAX_RESTARTS" in m][1].startswith(
        "job 12 is not requeued: Slurm has restarted it 3 times"
    )


def test_a_limit_of_cpu_time_asks_once():
    """Beyond the soft limit the system would send SIGXCPU each second, also to a process that is ending."""
    code = (
        "import resource, time; from medconv.utils import signals\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 60))\n"
        "try:\n"
        "    with signals.raising():\n"
        "        while True: pass\n"
        "except signals.RunInterrupted as stopped:\n"
        "    end = time.process_time() + 1.5\n"
        "    while time.process_time() < end: pass\n"
        "    print(int(stopped.number))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{signal.SIGXCPU:d}\n", done
