"""Error messages of prediction: why a case failed, and errors that stop all cases."""

import logging
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path

from medconv.utils.atomic_io import NO_ROOM
from medconv.utils.hardware import out_of_memory

log = logging.getLogger(__name__)


def unwritable(path: Path, case: str, error: OSError) -> ValueError:
    """The error to raise when a result cannot be written, as all further ones could not. Args: path: the
    output folder.
    """
    if error.errno not in NO_ROOM:
        return ValueError(f"case {case}: cannot write to {path} ({error.strerror or error})")
    free = shutil.disk_usage(path).free
    return ValueError(
        f"case {case}: no room in {path} ({error.strerror}), {free / 1e6:.1f} MB are free. Finished cases "
        "are kept; free some space and rerun the command to resume"
    )


def check_all_predicted(failed: Mapping[str, str], number: int) -> None:
    """Raises: ValueError: some of `number` cases failed; names each with its reason."""
    if failed:
        lines = "\n".join(f"  case {case}: {reason}" for case, reason in failed.items())
        raise ValueError(f"{len(failed)} of {number} cases could not be predicted\n{lines}")


def reason(error: Exception) -> str:
    """Why a case failed, on one line; the traceback of an unexpected error goes to the log."""
    if isinstance(error, ValueError):
        return str(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    text = f"{type(error).__name__}: {first}"
    if out_of_memory(error):
        return f"out of memory ({text}); try --sw-batch-size 1, --device cpu, or fewer --workers"
    log.error("%s", "".join(traceback.format_exception(error)))
    return f"{text} (a bug in medconv, please report it with the lines above)"
