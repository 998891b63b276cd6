"""Digests of files, by which results say what made them."""

import hashlib
from pathlib import Path


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
