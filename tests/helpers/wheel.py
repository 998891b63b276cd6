"""medconv as a user has it: its wheel, built from this checkout and unpacked into a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers import tiny
from helpers.waiting import PATIENCE_S


def install(folder: Path) -> Path:
    """Returns: the folder to import from; the command is `bin/medconv` in it."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = folder / "dist"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(tiny.ROOT)]
    subprocess.run([*pip, *build], check=True, timeout=PATIENCE_S)
    (wheel,) = built.glob("medconv-*.whl")
    unpack = ["install", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run([*pip, *unpack], check=True, timeout=PATIENCE_S)
    return folder / "site"


def start(installed: Path, cwd: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A program in whose way no checkout is: `medconv` and `python` are those of the wheel."""
    places = [str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed), "PATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
