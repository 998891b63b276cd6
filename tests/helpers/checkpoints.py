"""Small checkpoints in a run's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from medconv.training.checkpoint.writer import AtomicCheckpointIO
from medconv.utils import checkpoint_io

CONTENT = {
    "medconv": {"config": {}},
    "state_dict": {"weight": torch.arange(2000.0)},
    "curves": {"metrics.csv": 3},
}


def saved(folder: Path, *numbers: float) -> Path:
    """Writes a checkpoint for each number, one after the other, as `last.ckpt`; the number is the first weight."""
    io = AtomicCheckpointIO()
    for number in numbers:
        weight = torch.arange(2000.0)
        weight[0] = number
        io.save_checkpoint({**CONTENT, "state_dict": {"weight": weight}}, folder / "checkpoints/last.ckpt")
    io.teardown()
    return folder / "checkpoints/last.ckpt"


def first(path: Path) -> float:
    """The first weight of a checkpoint."""
    return float(checkpoint_io.read(path)["state_dict"]["weight"][0])
