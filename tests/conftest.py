"""What all tests share: where real images lie. That this file is here also puts `tests/` on the import path."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder that MEDCONV_REALDATA names, else `../shared/data` beside the repository; skips where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("MEDCONV_REALDATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no real images: {folder} is absent; MEDCONV_REALDATA may name their folder")
    return folder
