"""`medconv predict`: write a label map for each image, or one table for classification and regression."""

from pathlib import Path
from typing import Any

from medconv.cli.parsers import Parser, add_device, add_trust


def parser() -> Parser:
    command = Parser(
        "predict",
        "--checkpoint runs/NAME/checkpoints/best.ckpt --input images/ --output predictions/",
        "Predict images with trained networks: a label map for each image of a segmentation, or for "
        "classification and regression one table, predictions.csv.",
    )
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    files = {**file, "nargs": "+", "action": "extend", "default": []}
    needed, flag = {"type": Path, "required": True}, {"action": "store_true"}
    add: Any = command.add_argument_group("networks").add_argument
    add("--checkpoint", **files, help="a run's checkpoints/best.ckpt; several are averaged")
    exported = "exported ONNX models with their metadata; averaged with the checkpoints"
    add("--exported-model", **files, help=exported)
    add("--postprocess", **file, help="apply the steps in a file of medconv find-postprocessing")
    add = command.add_argument_group("input and output").add_argument
    images = "an image, a folder of images or DICOM, or a list (.txt or .json)"
    add("--input", **needed, metavar="PATH", help=images)
    add("--output", **needed, metavar="FOLDER", help="folder for the label maps, or for predictions.csv")
    add("--save-probabilities", **flag, help="also write OUTPUT/probabilities/CASE.nii.gz, 4D")
    spacing = "in mm (right, anterior, superior), in place of the headers'; without numbers, the headers' own"
    add("--source-spacing-mm", type=float, nargs="*", metavar="MM", help=spacing)
    quality = "several networks: also write OUTPUT/quality/CASE.json and OUTPUT/uncertainty/CASE.nii.gz"
    add("--quality", **flag, help=quality)
    calibration = "with --quality, metrics.json of medconv evaluate: also write the expected Dice"
    add("--calibration", **file, help=calibration)
    add("--saliency", **flag, help="classification: also write Grad-CAM, OUTPUT/saliency/CASE.png")
    dicom = "DICOM input: also write OUTPUT/dicomseg/CASE.dcm, which refers to the slices"
    add("--dicom-seg", **flag, help=dicom)
    add("--overwrite", **flag, help="replace these cases' results in OUTPUT; resumes if it was stopped")
    title = "sliding window and test-time augmentation (default: as validated in training)"
    add = command.add_argument_group(title).add_argument
    add("--mirror-axes", type=int, nargs="*", metavar="AXIS", help="axes to flip; without a number, no flips")
    add("--overlap", type=float, help="overlap of windows, from 0 to below 1")
    add("--sw-batch-size", type=int, metavar="N", help="windows, or whole images, in one forward pass")
    general = command.general()
    add_device(general)
    workers = "cases loaded at once; N + 2 are in memory; default 1"
    general.add_argument("--workers", type=int, default=1, metavar="N", help=workers)
    add_trust(general, "network classes")
    return command
