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
from types import FrameType

from medconv import doors
from medconv.utils.atomic_io import DISK_FAILED, NO_ACCESS, NO_ROOM, TOO_MANY_FILES
from medconv.utils.errors import reason
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
PEER_LOST = ("medconv.utils.cluster", "PeerLostError")
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Modules outside of libraries that are not a user's either: the start, and what torch generates.
_NOT_USER_MODULES = ("__main__", "torch.")
# These may lie outside of Python's folders for libraries, such as in a folder of PYTHONPATH.
_LIBRARIES = ("torch", "lightning", "numpy")

log = logging.getLogger("medconv")


def guard(command: Callable[[], int]) -> int:
    """Run a command. Returns: its exit code, or the exit code of its error, whose message is printed."""
    code = _guarded(command)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more when it exits, which would fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except _imported(*USER_ERRORS) as error:
        log.debug("the error came from", exc_info=True)
        location = _user_code_location(error)
        _print_error(f"{location}: {message(error)}" if location else message(error))
        return USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except RunInterrupted as error:
        name = signal.Signals(error.number).name
        print(f"stopped by {name}; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED if error.by_hand else PREEMPTED
    except _imported(PEER_LOST) as error:
        _print_error(str(error))
        return PREEMPTED
    except SystemExit as error:
        # Lightning turns the one into the other.
        if isinstance(error.__context__, KeyboardInterrupt):
            return INTERRUPTED
        if isinstance(error.code, str):  # of code of a user's
            _print_error(error.code)
            return USER
        # argparse exits with 2.
        return USER if error.code == 2 else int(error.code or 0)
    except ModuleNotFoundError as error:
        # One feature may import another, whose folder somebody has deleted
        feature = doors.missing_feature(error.name or "")
        if feature is None:
            return _unexpected(error)
        _print_error(f"this needs {feature}, which this installation lacks")
        return USER
    except Exception as error:
        return _unexpected(error)


def _print_error(text: str) -> None:
    print(shown(f"error: {text}"), file=sys.stderr)


def _unexpected(error: Exception) -> int:
    """A file that cannot be written or read is the user's, and so is code of a user's; all else is a bug."""
    # Such as `medconv train --help | head -1`
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return USER
    location = _user_code_location(error)
    problem = _file_problem(error, location) if isinstance(error, OSError) else None
    if problem:
        log.debug("the error came from", exc_info=True)
        _print_error(problem)
        return USER
    traceback.print_exc()
    if location:
        _print_error(f"{location}: {type(error).__name__}: {error}")
        return USER
    print("error: this is a bug in medconv, please report it with the lines above", file=sys.stderr)
    return BUG


def _file_problem(error: OSError, location: str | None) -> str | None:
    """What is wrong with a file of the user's, such as one in a folder that was deleted; None: a bug, or an
    error in code of the user's. Args: location: of that code.
    """
    file = _file_of(error)
    name = file or "a file"
    if error.errno in NO_ROOM:
        return f"{name}: cannot be written ({reason(error)})"
    if error.errno in DISK_FAILED:
        return f"{name}: its disk or network file system failed ({reason(error)})"
    if error.errno in TOO_MANY_FILES:
        return f"{name}: {reason(error)}; `ulimit -n 65536` permits more"
    if file and error.errno in NO_ACCESS:
        return f"{name}: no access ({reason(error)})"
    if file and location is None and not os.path.abspath(file).startswith(_PACKAGE):  # noqa: PTH100 - any text
        return f"{name}: {reason(error)}"
    return None


def _user_code_location(error: BaseException) -> str | None:
    """File and line of a user's code that raised the error, itself or by what it called of a library."""
    libraries = _library_folders()
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            # What medconv does below a user's code is not the user's.
            location = None
        elif _is_user_code(frame, libraries):
            location = f"{file}, line {line}"
    return location


def _library_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for name in _LIBRARIES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            folders.append(str(Path(file).parents[1]))
    return tuple(f"{folder}{os.sep}" for folder in folders)


def _is_user_code(frame: FrameType, libraries: tuple[str, ...]) -> bool:
    file = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__"))
    if file.startswith(libraries) or module.startswith(_NOT_USER_MODULES):
        return False
    # Code that `exec` made has no file.
    return Path(file).is_file()


def _imported(*names: tuple[str, str]) -> tuple[type[BaseException], ...]:
    """Those classes whose modules are imported; an error cannot be of any other."""
    classes = [getattr(sys.modules.get(module), name, None) for module, name in names]
    return tuple(error_class for error_class in classes if error_class is not None)


def _file_of(error: BaseException | None) -> str | None:
    """The file that the error names, or an earlier error in its context; None: none does."""
    while error is not None:
        if isinstance(error, OSError) and error.filename:
            name = error.filename
            # TensorBoard opens its files by bytes
            return os.fsdecode(name) if isinstance(name, bytes) else str(name)
        error = error.__context__
    return None


def _reader_is_gone() -> bool:
    """Whether the pipe that standard output goes to has been closed at its other end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
