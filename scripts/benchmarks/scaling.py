"""Training by one process and by several, the same command except `trainer.devices`: samples a second of
each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import Row, conditions, table
from medconv.config import ConfigError
from medconv.features.diagnosis.alternating import compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="the first is the reference")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each, in turn")
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--overrides", nargs="*", default=[], help="further ones of the training command")


def run(options: argparse.Namespace) -> list[Row]:
    speeds: dict[int, list[float]] = {devices: [] for devices in options.devices}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.pairs):
            for devices in options.devices:
                speeds[devices].append(_speed(devices, Path(folder) / f"{number}-{devices}", options))
    first = options.devices[0]
    return [_row(devices, speeds[devices], speeds[first], first) for devices in options.devices]


def show(rows: Sequence[Row]) -> str:
    return table(rows, ("variant", "samples_per_second", "ratio", "spread", "efficiency"))


def _speed(devices: int, folder: Path, options: argparse.Namespace) -> float:
    """Samples a second of a run in its own processes, validation and start not counted; one thread per
    process on a CPU.
    """
    overrides = [
        *("trainer.max_time=null", f"trainer.max_steps={options.steps}", f"trainer.devices={devices}"),
        *(
            "trainer.num_sanity_val_steps=0",
            "trainer.limit_val_batches=0",
            "trainer.enable_progress_bar=false",
        ),
        *("data.num_workers=0", "logger=none", "callbacks=none", "augmentation=none", "model.norm=instance"),
        *(f"run.dir={folder}", *options.overrides),
    ]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "medconv.cli", "train", *overrides]
    done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"{' '.join(command)} ended with code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return float(summary["samples_per_second"])


def _row(devices: int, speeds: list[float], reference: list[float], first: int) -> Row:
    """`ratio` is of seconds per sample, as everywhere; `efficiency` is the speed-up over the number of
    devices.
    """
    timed = compared([1 / speed for speed in speeds], [1 / speed for speed in reference])
    return {
        "benchmark": "scaling",
        "case": "python train.py",
        "reference": f"trainer.devices={first}",
        "variant": f"trainer.devices={devices}",
        **timed,
        "samples_per_second": median(speeds),
        "efficiency": first / devices / timed["ratio"],
        **conditions(),
    }
