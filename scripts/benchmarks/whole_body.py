"""One volume of whole-body size, from the file to the label map: CPU seconds and peak memory, by slices and
classes, each in a process of its own. The network is a toy, so what counts is all else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from torch import nn

from benchmarks import results
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.load import LoadedModel
from medconv.inference.predictor import Predictor
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets.label_map import LabelMapTargets
from medconv.utils.hardware import keep_freed_memory

OURS = "medconv"
MONAI = "MONAI's window, all classes resampled"
SPACING_MM = (0.8, 0.8, 1.0)
NETWORK_MM = 1.5
PATCH = 64
_SHOWN = ["case", "variant", "seconds", "peak_gib"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=512, help="rows and columns of a slice")
    parser.add_argument("--slices", type=int, nargs="+", default=[300, 700])
    parser.add_argument("--classes", type=int, nargs="+", default=[3, 105])
    parser.add_argument("--overlap", type=float, default=0.0)
    parser.add_argument(
        "--peer-gib",
        type=float,
        default=12.0,
        help="the peer is left out where its logits on the image's grid alone take more",
    )


def run(options: argparse.Namespace) -> list[results.Row]:
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for slices in options.slices:
            image = _ct(Path(folder) / f"{slices}.nii.gz", options.size, slices)
            for classes in options.classes:
                rows += _rows(image, options, slices, classes)
    return rows


def show(rows: Sequence[results.Row]) -> str:
    return results.table(rows, _SHOWN)


def _rows(image: Path, options: argparse.Namespace, slices: int, classes: int) -> list[results.Row]:
    case = f"{options.size} x {options.size} x {slices}, {classes} classes, overlap {options.overlap:g}"
    logits_gib = classes * 4 * options.size**2 * slices / 2**30
    variants = [OURS] if logits_gib > options.peer_gib else [OURS, MONAI]
    rows: list[results.Row] = []
    for variant in variants:
        measured = _in_a_process(variant, image, classes, options.overlap)
        kind: results.Row = {"benchmark": "whole_body", "case": case, "reference": OURS, "variant": variant}
        rows.append({**kind, **results.conditions(), "ratio": 1.0, "spread": 0.0, **measured})
    for row in rows:
        row["ratio"] = row["seconds"] / rows[0]["seconds"]
    return rows


def _in_a_process(variant: str, image: Path, classes: int, overlap: float) -> dict[str, float]:
    """CPU seconds and peak memory of the prediction; libraries are loaded before and do not count."""
    command = [sys.executable, "-m", "benchmarks.whole_body", variant, str(image), str(classes), str(overlap)]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _ct(path: Path, size: int, slices: int) -> Path:
    """Bodies have air around them."""
    random = np.random.default_rng(0)
    volume = np.full((size, size, slices), -1000, np.int16)
    margin = size // 8
    body = volume[margin:-margin, margin:-margin]
    body[:] = random.normal(0, 200, (*body.shape[:2], 1)).astype(np.int16)
    body += np.linspace(-100, 100, slices).astype(np.int16)
    nib.save(nib.Nifti1Image(volume, np.diag([*SPACING_MM, 1.0])), path)
    return path


def _network(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, classes, 1)).eval()


def _with_medconv(image: Path, classes: int, overlap: float) -> np.ndarray:
    keep_freed_memory()
    targets = LabelMapTargets.of_classes(["background", *(f"organ{index}" for index in range(1, classes))])
    statistics = {"percentile_00_5": -900.0, "percentile_99_5": 900.0, "mean": 0.0, "std": 300.0}
    model = LoadedModel(
        _network(classes),
        PreprocessingConfig(3, (NETWORK_MM,) * 3, ("ct",), (statistics,)),
        SlidingWindow((PATCH,) * 3, overlap),
        ("background", *targets.names),
        targets,
        ("CT",),
        "32-true",
        torch.contiguous_format,
    )
    model = replace(model, spacing_range_mm=tuple((mm, mm) for mm in SPACING_MM))
    return Predictor([model])(image)


def _with_monai(image: Path, classes: int, overlap: float) -> np.ndarray:
    """A plain script: load, resample, sliding windows, all classes back to the image's grid, argmax."""
    from monai.inferers import sliding_window_inference
    from monai.transforms import LoadImage, ScaleIntensityRange, Spacing

    volume: Any = LoadImage(image_only=True, ensure_channel_first=True)(image)
    volume = ScaleIntensityRange(-900, 900, -3, 3, clip=True)(volume)
    native_size = tuple(volume.shape[1:])
    volume = Spacing((NETWORK_MM,) * 3, mode="bilinear")(volume)
    network = _network(classes)
    with torch.inference_mode():
        batch = volume.as_tensor()[None].float()
        logits: Any = sliding_window_inference(
            batch, (PATCH,) * 3, 4, network, overlap=overlap, mode="gaussian"
        )
        native = nn.functional.interpolate(logits, size=native_size, mode="trilinear")
        return native.argmax(1)[0].short().numpy()


_PREDICT: dict[str, Callable[[Path, int, float], np.ndarray]] = {OURS: _with_medconv, MONAI: _with_monai}


def _main() -> None:
    variant, image, classes, overlap = sys.argv[1:]
    torch.set_num_threads(1)
    # The peak so far is forgotten; `ru_maxrss` would be that of the parent process, if it is larger.
    Path("/proc/self/clear_refs").write_text("5")
    before_kb = _status_kb("VmRSS")
    start = time.process_time()
    _PREDICT[variant](Path(image), int(classes), float(overlap))
    seconds = time.process_time() - start
    peak_gib = (_status_kb("VmHWM") - before_kb) / 2**20
    print(json.dumps({"seconds": seconds, "peak_gib": peak_gib}))


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    _main()
