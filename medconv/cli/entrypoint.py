"""What a command ends with: its error becomes a message on standard error and an exit code, here and
nowhere else.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Callable

from medconv.utils.atomic_io import NO_ACCESS, NO_ROOM
from medconv.utils.exit_codes import BUG, INTERRUPTED, PREEMPTED, USER
from medconv.utils.logging import message, shown

# Module and class. Importing them here would load torch, which takes seconds.
USER_ERRORS = (
    ("hydra.errors", "HydraException"),
    ("omegaconf.errors", "OmegaConfBaseException"),
    ("lightning.fabric.utilities.exceptions", "MisconfigurationException"),
)
STOPPED = ("lightning.pytorch.utilities.exceptions", "SIGTERMException")
PEER_LOST = ("medconv.utils.cluster", "PeerLostError")

log = logging.getLogger("medconv")


def guard(command: Callable[[], int]) -> int:
    """Run a command. Returns: its exit code, or that of the error that it ended with."""
    try:
        return command()
    except _user_errors() as error:
        log.debug("the error came from", exc_info=True)
        print(f"error: {shown(message(error))}", file=sys.stderr)
        return USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except _loaded(STOPPED) as error:
        number = getattr(error, "number", signal.SIGTERM)
        print(f"stopped by {signal.Signals(number).name}; the same command goes on", file=sys.stderr)
        return INTERRUPTED if number == signal.SIGINT else PREEMPTED
    except _loaded(PEER_LOST) as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return PREEMPTED
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning turns the one into the other
            return INTERRUPTED
        return USER if error.code == 2 else int(error.code or 0)  # argparse exits with 2
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """A file that cannot be written or read is the user's; anything else is a bug."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        print(shown(f"error: {_file_of(error)}: cannot be written ({error.strerror})"), file=sys.stderr)
        return USER
    log.debug("the error came from", exc_info=True)
    if isinstance(error, OSError) and error.errno in NO_ACCESS and error.filename:
        print(shown(f"error: {error.filename}: no access ({error.strerror})"), file=sys.stderr)
        return USER
    traceback.print_exc()
    print("error: this is a bug in medconv, please report it with the lines above", file=sys.stderr)
    return BUG


def _user_errors() -> tuple[type[BaseException], ...]:
    return (ValueError, *_loaded(*USER_ERRORS))


def _loaded(*names: tuple[str, str]) -> tuple[type[BaseException], ...]:
    """The classes whose modules are loaded; an error can be of no other."""
    found = (
        getattr(sys.modules.get(module), name, None) for module, name in names
    )  # None: its import has not come so far
    return tuple(one for one in found if one is not None)


def _file_of(error: BaseException | None) -> str:
    """That an error names, or the one before it: where a disk is full, ending fails as well."""
    while error is not None:
        if isinstance(error, OSError) and error.filename:
            return str(error.filename)
        error = error.__context__
    return "a file"
