"""`medconv` in a fresh process that reports which heavy libraries its commands have imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from helpers.waiting import PATIENCE_S

CODE = """
import contextlib, io, json, os, sys
from medconv.cli.main import main
ended = []
for line, *words in json.loads(sys.argv[1]):
    os.environ["COMP_LINE"] = line
    sys.argv = ["medconv", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    heavy = {"torch", "lightning", "monai", "scipy", "matplotlib"}
    ended.append((code, out.getvalue(), err.getvalue(), sorted(heavy & set(sys.modules))))
print(json.dumps(ended))
"""


class Ended(NamedTuple):
    """How a command ended. Args: loaded: heavy libraries that it, or a command before it, has imported."""

    code: int
    out: str
    err: str
    loaded: list[str]


@cache
def in_turn(
    *commands: tuple[str, ...], line: bool = False, cwd: Path | None = None, package: Path | None = None
) -> list[Ended]:
    """Commands of `medconv`, one after the other in one fresh process.

    Args:
        line: the first word of each is the line that a shell completes.
        package: folder of another `medconv`.
    """
    lines = [words if line else ("", *words) for words in commands]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(lines)],
        cwd=cwd,
        env={**os.environ, **({} if package is None else {"PYTHONPATH": str(package)})},
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*ended) for ended in json.loads(done.stdout)]
