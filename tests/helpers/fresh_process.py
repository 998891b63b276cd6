"""`medconv` in a fresh process that reports which heavy libraries it has imported."""

from __future__ import annotations

import subprocess
import sys

from helpers.waiting import PATIENCE_S

HEAVY = ("torch", "lightning", "monai", "scipy", "matplotlib")
CODE = f"""
import sys
from medconv.cli.main import main
sys.argv = ["medconv", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded", *sorted(set(sys.modules) & {set(HEAVY)}), file=sys.stderr)
"""


def run_medconv(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The last line on standard error is `loaded`, followed by the heavy libraries that were imported."""
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(
        command, env=environment or None, text=True, capture_output=True, timeout=PATIENCE_S, check=False
    )
