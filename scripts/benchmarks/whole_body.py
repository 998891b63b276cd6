"""One volume of whole-body size, from the file to the label map: CPU seconds and peak memory, by slices and
classes, each in a process of its own. The network is a toy, so what counts is all else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from torch import nn

from benchmarks import results, whole_body_plot
from benchmarks.peers import toy_prediction
from benchmarks.peers.process import importable
from benchmarks.peers.toy_prediction import NETWORK_MM, PATCH, SPACING_MM
from medconv.data.case import Case
from medconv.data.preprocessing.preprocess import PreprocessingConfig
from medconv.inference.load import LoadedModel
from medconv.inference.predict import output_in, predict
from medconv.inference.predictor import Predictor
from medconv.inference.sliding_window import SlidingWindow
from medconv.targets.label_map import LabelMapTargets
from medconv.utils.hardware import keep_freed_memory

OURS = "medconv"
SAVED = "medconv, probabilities saved"
MONAI = "MONAI's window, all classes resampled"
NNUNET = "nnU-Net 2.8.1"
_PEERS = {"monai": MONAI, "nnunet": NNUNET}
_NNUNET_SCRIPT = Path(__file__).parent / "peers/nnunet_predict.py"
_SHOWN = ["case", "variant", "seconds", "ratio", "peak_gib"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=512, help="rows and columns of a slice")
    parser.add_argument("--slices", type=int, nargs="+", default=[300, 700])
    parser.add_argument("--classes", type=int, nargs="+", default=[3, 105])
    parser.add_argument("--overlap", type=float, default=0.0)
    parser.add_argument("--probabilities", action="store_true", help="also with files of all probabilities")
    parser.add_argument("--peers", nargs="*", choices=("monai", "nnunet"), default=["monai"])
    parser.add_argument("--nnunet-python", help="of an environment with nnunetv2, for --peers nnunet")
    parser.add_argument(
        "--peer-gib",
        type=float,
        default=12.0,
        help="the peers are left out where their logits on the image's grid alone take more",
    )
    parser.add_argument("--plot", type=Path, help="time and memory by volume and classes, as SVG")


def run(options: argparse.Namespace) -> list[results.Row]:
    if "nnunet" in options.peers and options.nnunet_python is None:
        raise ValueError("--peers nnunet needs --nnunet-python: the python of an environment with nnunetv2")
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for slices in options.slices:
            image = _ct(Path(folder) / f"{slices}.nii.gz", options.size, slices)
            for classes in options.classes:
                rows += _rows(image, options, slices, classes)
    if options.plot:
        whole_body_plot.draw(rows, options.plot)
    return rows


def show(rows: Sequence[results.Row]) -> str:
    return results.table(rows, _SHOWN)


def _rows(image: Path, options: argparse.Namespace, slices: int, classes: int) -> list[results.Row]:
    case = f"{options.size} x {options.size} x {slices}, {classes} classes, overlap {options.overlap:g}"
    rows: list[results.Row] = []
    for variant in _variants(options, slices, classes):
        measured = _in_a_process(variant, image, classes, options)
        row: results.Row = {"benchmark": "whole_body", "case": case, "reference": OURS, "variant": variant}
        row |= {"voxels": options.size**2 * slices, "classes": classes}
        rows.append({**row, **results.conditions(), "spread": 0.0, **measured})
    for row in rows:
        row["ratio"] = row["seconds"] / rows[0]["seconds"]
    return rows


def _variants(options: argparse.Namespace, slices: int, classes: int) -> list[str]:
    variants = [OURS]
    if options.probabilities:
        variants.append(SAVED)
    logits_gib = classes * 4 * options.size**2 * slices / 2**30
    if logits_gib <= options.peer_gib:
        variants += [_PEERS[peer] for peer in options.peers]
    return variants


def _in_a_process(variant: str, image: Path, classes: int, options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds and peak memory of the prediction."""
    if variant == NNUNET:
        command = [options.nnunet_python, str(_NNUNET_SCRIPT)]
    else:
        command = [sys.executable, "-m", "benchmarks.whole_body", variant]
    command += [str(image), str(classes), str(options.overlap)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=importable())
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


def _predictor(classes: int, overlap: float) -> Predictor:
    targets = LabelMapTargets.of_classes(["background", *(f"organ{index}" for index in range(1, classes))])
    model = LoadedModel(
        toy_prediction.network(classes),
        PreprocessingConfig(3, (NETWORK_MM,) * 3, ("ct",), (toy_prediction.STATISTICS,)),
        SlidingWindow((PATCH,) * 3, overlap),
        ("background", *targets.names),
        targets,
        ("CT",),
        "32-true",
        torch.contiguous_format,
    )
    model = replace(model, spacing_range_mm=tuple((mm, mm) for mm in SPACING_MM))
    return Predictor([model])


def _with_medconv(image: Path, classes: int, overlap: float) -> np.ndarray:
    keep_freed_memory()
    return _predictor(classes, overlap)(image)


def _with_saved_probabilities(image: Path, classes: int, overlap: float) -> None:
    """As `medconv predict --save-probabilities`, with its files."""
    predictor = _predictor(classes, overlap)
    with tempfile.TemporaryDirectory(dir=image.parent) as folder:
        output = output_in(Path(folder), predictor, probabilities=True)
        predict(predictor, [Case("ct", (image,))], output)


def _with_monai(image: Path, classes: int, overlap: float) -> np.ndarray:
    """A plain script: load, resample, sliding windows, all classes back to the image's grid, argmax."""
    from monai.inferers import sliding_window_inference
    from monai.transforms import LoadImage, ScaleIntensityRange, Spacing

    volume: Any = LoadImage(image_only=True, ensure_channel_first=True)(image)
    volume = ScaleIntensityRange(-900, 900, -3, 3, clip=True)(volume)
    native_size = tuple(volume.shape[1:])
    volume = Spacing((NETWORK_MM,) * 3, mode="bilinear")(volume)
    network = toy_prediction.network(classes)
    with torch.inference_mode():
        batch = volume.as_tensor()[None].float()
        logits: Any = sliding_window_inference(
            batch, (PATCH,) * 3, 4, network, overlap=overlap, mode="gaussian"
        )
        native = nn.functional.interpolate(logits, size=native_size, mode="trilinear")
        return native.argmax(1)[0].short().numpy()


_PREDICT: dict[str, Callable[[Path, int, float], object]] = {
    OURS: _with_medconv,
    SAVED: _with_saved_probabilities,
    MONAI: _with_monai,
}


def _main() -> None:
    variant, image, classes, overlap = sys.argv[1:]
    torch.set_num_threads(1)
    toy_prediction.report(partial(_PREDICT[variant], Path(image), int(classes), float(overlap)))


if __name__ == "__main__":
    _main()
