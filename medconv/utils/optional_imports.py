"""Optional packages, which only some parts need; each belongs to an extra of medconv."""

from importlib import import_module
from pathlib import Path
from typing import Any


def needed(package: str, extra: str, purpose: str, path: Path | None = None) -> Any:
    """Import a package.

    Args:
        extra: of medconv that has the package.
        purpose: what needs the package, such as "reading DICOM".
        path: the file that needs it; None: no single file does.

    Raises:
        ValueError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        subject = f"{path}: {purpose}" if path else purpose
        raise ValueError(f"{subject} needs the package {package}: pip install 'medconv[{extra}]'") from error
