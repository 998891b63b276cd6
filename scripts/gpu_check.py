"""`python scripts/gpu_check.py`: check on this machine every claim about CUDA, the most important first.

Runs from a checkout, without network and without pytest. `--device cpu --tiny` runs every part in a small
form anywhere; `--write-docs` writes docs/gpu-queue.md from the claims and the results in docs/results/.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = [str(ROOT), str(ROOT / "scripts")]  # so that medconv need not be installed, here and in commands
sys.path[:0] = [place for place in PLACES if place not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])])

from gpu_checks.command import main  # noqa: E402 - needs the path

if __name__ == "__main__":
    sys.exit(main())
