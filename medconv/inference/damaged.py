"""Errors about a checkpoint whose metadata is damaged or of another version."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

import medconv
from medconv.utils.errors import with_class

# Errors that a damaged or forged file can cause in the objects that are built from it.
_ERRORS = (
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    OmegaConfBaseException,
)


@contextmanager
def explaining_damage(path: Path, metadata: Any) -> Iterator[None]:
    """Inside, an error that damaged metadata causes becomes one that names the checkpoint.

    Args:
        metadata: of the checkpoint, not checked yet.
    Raises:
        ValueError: instead of such an error.
    """
    try:
        yield
    except _ERRORS as error:
        raise ValueError(
            f"{path}: damaged, or of another version{_version(metadata)}: "
            f"its metadata cannot be read ({_damage(error)})"
        ) from error


def _damage(error: BaseException) -> str:
    """An error on one line, with the key of the config that it is about."""
    key = getattr(error, "full_key", None)
    return f"config.{key}: {with_class(error)}" if key else with_class(error)


def _version(metadata: Any) -> str:
    """The version that wrote a checkpoint, in words; empty if it does not say."""
    written_by = metadata.get("version") if isinstance(metadata, dict) else None
    if not isinstance(written_by, str):
        return ""
    return f" (written by medconv {written_by[:20]}, this is {medconv.__version__})"
