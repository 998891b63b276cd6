"""Processes that a command starts for other commands of ours: how they ended, and how they are ended."""

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from medconv.utils.exit_codes import BUG, INTERRUPTED, PREEMPTED, USER
from medconv.utils.signals import PREEMPTING

_CTRL_C_SECONDS = 2.0  # time to end by a Ctrl-C that the terminal sent to them as well


def exit_code(code: int) -> int:
    """The exit code of ours. SIGKILL most likely means too little memory: the user's; others are crashes."""
    if code == -signal.SIGKILL:
        return USER
    return BUG if code < 0 else code


def end_of(code: int) -> str:
    """How a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def was_interrupted(code: int) -> bool:
    return code in (INTERRUPTED, -signal.SIGINT)


def was_preempted(code: int) -> bool:
    return code == PREEMPTED or -code in PREEMPTING


def end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait until they have ended by Ctrl-C. A second one would abort their step, so SIGTERM follows."""
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CTRL_C_SECONDS)
        if process.poll() is None:
            process.terminate()
    for process in processes:
        process.wait()
