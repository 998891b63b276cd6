"""Why a case could not be predicted, in words; and what ends the work on all of them."""

from __future__ import annotations

import logging
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from medconv.utils.atomic_io import NO_ROOM

log = logging.getLogger(__name__)


class UnwritableError(ValueError):
    """No further case could be written either."""


def unwritable(path: Path, case: str, error: OSError) -> UnwritableError:
    """Args: path: the folder."""
    if error.errno not in NO_ROOM:
        return UnwritableError(f"case {case}: cannot write to {path} ({error.strerror or error})")
    free = shutil.disk_usage(path).free
    return UnwritableError(
        f"case {case}: no room in {path} ({error.strerror}), {free / 1e6:.1f} MB are free. What was written "
        "stays; make room, and the same command goes on from there"
    )


def need_none(failed: Mapping[str, str], number: int) -> None:
    """Raises: ValueError: some of so many cases failed; names each with its reason."""
    if failed:
        lines = "\n".join(f"  case {case}: {reason}" for case, reason in failed.items())
        raise ValueError(f"{len(failed)} of {number} cases could not be predicted\n{lines}")


def reason(error: Exception) -> str:
    """Why a case failed, on one line; of an error that is ours, the traceback goes to the log."""
    if isinstance(error, ValueError):
        return str(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    text = f"{type(error).__name__}: {first}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return f"memory ran out ({text}); what helps: --sw-batch-size 1, --device cpu, fewer --workers"
    log.error("%s", "".join(traceback.format_exception(error)))
    return f"{text} (a bug in medconv, please report it with the lines above)"
