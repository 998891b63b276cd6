"""`medconv predict`: write a label map for each image, or one table for classification and regression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medconv.cli.parsers import Parser, add_device, add_trust


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from medconv.inference.predict import run_command  # loads torch

    return run_command(options)


def parser() -> Parser:
    command = Parser(
        "predict",
        "--checkpoint runs/NAME/checkpoints/best.ckpt --input images/ --output predictions/",
        "Predict images with trained networks: a label map for each image of a segmentation, or for "
        "classification and regression one table, predictions.csv.",
    )
    files: dict[str, Any] = {"type": Path, "metavar": "FILE", "nargs": "+", "action": "extend", "default": []}
    add = command.group("networks").add_argument
    add("--checkpoint", **files, help="a run's checkpoints/best.ckpt; several are averaged")
    add(
        "--exported-model",
        **files,
        help="exported ONNX models with their metadata; averaged with the checkpoints",
    )
    add(
        "--postprocess",
        type=Path,
        metavar="FILE",
        help="apply the steps in a file of medconv find-postprocessing",
    )
    add = command.group("input and output").add_argument
    add(
        "--input",
        type=Path,
        required=True,
        metavar="PATH",
        help="an image, a folder of images or DICOM, or a list (.txt or .json)",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder for the label maps, or for predictions.csv",
    )
    add("--save-probabilities", action="store_true", help="also write OUTPUT/probabilities/CASE.nii.gz, 4D")
    add(
        "--saliency",
        action="store_true",
        help="classification: also write Grad-CAM, OUTPUT/saliency/CASE.png",
    )
    add(
        "--dicom-seg",
        action="store_true",
        help="DICOM input: also write OUTPUT/dicomseg/CASE.dcm, which refers to the slices",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace these cases' results in OUTPUT; resumes if it was stopped",
    )
    add = command.group(
        "sliding window and test-time augmentation (default: as validated in training)"
    ).add_argument
    add("--mirror-axes", type=int, nargs="*", metavar="AXIS", help="axes to flip; without a number, no flips")
    add("--overlap", type=float, help="overlap of windows, from 0 to below 1")
    add("--sw-batch-size", type=int, metavar="N", help="windows, or whole images, in one forward pass")
    general = command.general()
    add_device(general)
    general.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="cases loaded at once; N + 2 are in memory; default 1",
    )
    add_trust(general, "network classes")
    return command
