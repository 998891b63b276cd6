"""Error messages of prediction: why a case failed, and errors that stop all cases."""

import logging
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path

from medconv.utils.atomic_io import NO_ROOM
from medconv.utils.hardware import out_of_memory

log = logging.getLogger(__name__)


def unwritable(path: Path, case_id: str, error: OSError) -> ValueError:
    """The error to raise when a result cannot be written, as all further ones could not.

    Args:
        path: the output folder.
    """
    if error.errno not in NO_ROOM:
        return ValueError(f"case {case_id}: cannot write to {path} ({error.strerror or error})")
    free_mb = shutil.disk_usage(path).free / 1e6
    return ValueError(
        f"case {case_id}: no room in {path} ({error.strerror}), {free_mb:.1f} MB are free. Finished cases "
        "are kept; free some space and rerun the command to resume"
    )


def check_all_predicted(failed: Mapping[str, str], num_cases: int) -> None:
    """Args: failed: case id to reason. Raises: ValueError: some cases failed; names each with its reason."""
    if failed:
        lines = "\n".join(f"  case {case_id}: {reason}" for case_id, reason in failed.items())
        raise ValueError(f"{len(failed)} of {num_cases} cases could not be predicted\n{lines}")


def reason(error: Exception) -> str:
    """Why a case failed, on one line; the traceback of an unexpected error goes to the log."""
    if isinstance(error, ValueError):
        return str(error)
    lines = str(error).strip().splitlines()
    first_line = lines[0] if lines else ""
    text = f"{type(error).__name__}: {first_line}"
    if out_of_memory(error):
        return f"out of memory ({text}); try sw_batch_size=1, the CPU as the device, or fewer workers"
    log.error("%s", "".join(traceback.format_exception(error)))
    return f"{text} (a bug in medconv, please report it with the lines above)"
