"""What all contestants of the benchmark `whole_body` share: network, grid, intensities, and how they are
measured. Nothing here needs medconv, as peers run where it is not installed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

SPACING_MM = (0.8, 0.8, 1.0)
NETWORK_MM = 1.5
PATCH = 64
# Of the foreground's intensities, under nnU-Net's names.
STATISTICS = {"percentile_00_5": -900.0, "percentile_99_5": 900.0, "mean": 0.0, "std": 300.0}


def network(classes: int) -> nn.Module:
    """One whose own time is small, so that all else counts."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, classes, 1)).eval()


def report(predict: Callable[[], object]) -> None:
    """Print CPU seconds and peak memory of `predict` as JSON, beside the libraries loaded before."""
    # The peak so far is forgotten; `ru_maxrss` would be that of the parent process, if it is larger.
    Path("/proc/self/clear_refs").write_text("5")
    before_kb = _status_kb("VmRSS")
    start = time.process_time()
    predict()
    seconds = time.process_time() - start
    peak_gib = (_status_kb("VmHWM") - before_kb) / 2**20
    print(json.dumps({"seconds": seconds, "peak_gib": peak_gib}))


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
