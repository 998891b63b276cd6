"""`medconv predict`: write a label map for each image, or one table for classification and regression."""

from pathlib import Path

from medconv.cli.parsers import Group, Parser, add_device, add_trust


def parser() -> Parser:
    command = Parser(
        "predict",
        "--checkpoint runs/NAME/checkpoints/best.ckpt --input images/ --output predictions/",
        "Predict images with trained networks. Segmentation writes a label map for each image; "
        "classification and regression write one table, predictions.csv.",
    )
    _add_networks(command.add_argument_group("networks"))
    input_and_output = command.add_argument_group("input and output")
    _add_input_and_output(input_and_output)
    _add_extra_outputs(input_and_output)
    inference_title = "sliding window and test-time augmentation (default: as validated in training)"
    _add_inference(command.add_argument_group(inference_title))
    general = command.general()
    add_device(general)
    general.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="cases to load in parallel, fewer if memory would run out; N + 2 cases are in memory; default 1",
    )
    add_trust(general, "network classes")
    return command


def _add_networks(group: Group) -> None:
    group.add_argument(
        "--checkpoint",
        type=Path,
        nargs="+",
        # A second `--checkpoint` adds to the first.
        action="extend",
        required=True,
        metavar="FILE",
        help="a run's checkpoints/best.ckpt; several are averaged",
    )
    group.add_argument(
        "--postprocess",
        type=Path,
        metavar="FILE",
        help="apply the post-processing in a file from medconv find-postprocessing",
    )


def _add_input_and_output(group: Group) -> None:
    group.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="PATH",
        help="an image, a folder of images or DICOM, or a list (.txt or .json)",
    )
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder for the label maps, or for predictions.csv",
    )
    group.add_argument(
        "--save-probabilities", action="store_true", help="also write OUTPUT/probabilities/CASE.nii.gz, 4D"
    )
    group.add_argument(
        "--source-spacing-mm",
        type=float,
        nargs="*",
        metavar="MM",
        help="replace the headers' spacing, in mm (right, anterior, superior); without numbers, keep it",
    )


def _add_extra_outputs(group: Group) -> None:
    group.add_argument(
        "--quality",
        action="store_true",
        help="also write OUTPUT/quality/CASE.json, an estimate of Dice, and OUTPUT/uncertainty/CASE.nii.gz",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="with --quality: metrics.json of medconv evaluate, to also write the expected Dice",
    )
    group.add_argument(
        "--saliency",
        action="store_true",
        help="for classification, also write Grad-CAM pictures, OUTPUT/saliency/CASE.png",
    )
    group.add_argument(
        "--dicom-seg",
        action="store_true",
        help="for DICOM input, also write OUTPUT/dicomseg/CASE.dcm, which refers to the slices",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the results of these cases in OUTPUT; resume a stopped replacement",
    )


def _add_inference(group: Group) -> None:
    group.add_argument(
        "--mirror-axes",
        type=int,
        nargs="*",
        metavar="AXIS",
        help="axes to flip in test-time augmentation; without numbers, no flips",
    )
    group.add_argument("--overlap", type=float, help="overlap of windows, from 0 to below 1")
    group.add_argument(
        "--sw-batch-size", type=int, metavar="N", help="windows, or whole images, in one forward pass"
    )
