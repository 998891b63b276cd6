"""The one place where errors become messages on standard error and exit codes."""

import logging
import os
import select
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

from medconv.utils.atomic_io import NO_ACCESS, NO_ROOM
from medconv.utils.exit_codes import BUG, INTERRUPTED, PREEMPTED, USER
from medconv.utils.logging import message, shown
from medconv.utils.signals import RunInterrupted

# Module and class. Importing them here would load torch, which takes seconds.
USER_ERRORS = (
    ("builtins", "ValueError"),
    ("hydra.errors", "HydraException"),
    ("omegaconf.errors", "OmegaConfBaseException"),
    ("lightning.fabric.utilities.exceptions", "MisconfigurationException"),
)
_NOT_OWN = ("__main__", "torch.")  # modules outside of libraries: the start, and what torch generates
PEER_LOST = ("medconv.utils.cluster", "PeerLostError")

log = logging.getLogger("medconv")


def guard(command: Callable[[], int]) -> int:
    """Run a command. Returns: its exit code, or the exit code of its error, whose message is printed."""
    code = _guarded(command)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more when it exits, which would fail with a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except _imported(*USER_ERRORS) as error:
        log.debug("the error came from", exc_info=True)
        place = _own_code(error)
        print(shown(f"error: {f'{place}: ' if place else ''}{message(error)}"), file=sys.stderr)
        return USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RunInterrupted as error:
        number = signal.Signals(error.number)
        print(f"stopped by {number.name}; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED if number == signal.SIGINT else PREEMPTED
    except _imported(PEER_LOST) as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return PREEMPTED
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning turns the one into the other
            return INTERRUPTED
        return USER if error.code == 2 else int(error.code or 0)  # argparse exits with 2
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """A file that cannot be written or read is the user's, and so is code of a user's; all else is a bug."""
    if isinstance(error, BrokenPipeError) and _reader_is_gone():  # such as `medconv train --help | head -1`
        return USER
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        print(shown(f"error: {_file_of(error)}: cannot be written ({error.strerror})"), file=sys.stderr)
        return USER
    log.debug("the error came from", exc_info=True)
    if isinstance(error, OSError) and error.errno in NO_ACCESS and error.filename:
        print(shown(f"error: {error.filename}: no access ({error.strerror})"), file=sys.stderr)
        return USER
    traceback.print_exc()
    if place := _own_code(error):
        print(shown(f"error: {place}: {type(error).__name__}: {error}"), file=sys.stderr)
        return USER
    print("error: this is a bug in medconv, please report it with the lines above", file=sys.stderr)
    return BUG


def _own_code(error: BaseException) -> str | None:
    """File and line of a user's code that raised the error, itself or by what it called of a library."""
    package = f"{Path(__file__).parents[1]}{os.sep}"
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # a library may lie elsewhere, such as in a folder of PYTHONPATH
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "lightning", "numpy")]
    folders = tuple(f"{folder}{os.sep}" for folder in (*libraries, *(Path(f).parents[1] for f in files if f)))
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if file.startswith(package):
            place = None
        elif Path(file).is_file() and not file.startswith(folders) and not module.startswith(_NOT_OWN):
            place = f"{file}, line {line}"
    return place


def _imported(*names: tuple[str, str]) -> tuple[type[BaseException], ...]:
    """Those classes whose modules are imported; an error cannot be of any other."""
    classes = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(each for each in classes if each is not None)


def _file_of(error: BaseException | None) -> str:
    """The file that the error names, or an earlier error in its context."""
    while error is not None:
        if isinstance(error, OSError) and error.filename:
            return str(error.filename)
        error = error.__context__
    return "a file"


def _reader_is_gone() -> bool:
    """Whether the pipe that standard output goes to has been closed at its other end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
