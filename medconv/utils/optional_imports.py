"""Packages that only some image formats need; each belongs to an extra of ours."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def needed(package: str, extra: str, what: str, path: Path) -> Any:
    """The package. Raises: ValueError: it is not installed; says what needs it, and how it is installed."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ValueError(
            f"{path}: {what} needs the package {package}: pip install 'medconv[{extra}]'"
        ) from error
