"""`medconv export`: write a trained network in the formats of other programs."""

import argparse
import logging
from pathlib import Path

from medconv import doors
from medconv.cli.parsers import Group, Parser, add_package
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import start_logging

# The same as in job.py, whose import would load torch.
OPSET = 18
TOLERANCE = 1e-4
log = logging.getLogger(__name__)


def parser() -> Parser:
    command = Parser(
        "export",
        "--checkpoint runs/NAME/checkpoints/best.ckpt --format onnx --output model.onnx",
        "Write the network of a checkpoint in another format, with its metadata beside it. Its logits are "
        "compared with the checkpoint's; if they differ, nothing is written.",
    )
    _add_input_and_output(command.add_argument_group("input and output"))
    _add_comparison(command.add_argument_group("comparison with the checkpoint"))
    add_package(command.general())
    return command


def run_command(options: argparse.Namespace) -> int:
    """`medconv export` with these options. Returns: the exit code."""
    from medconv.features.export.export import export
    from medconv.features.export.job import ExportOptions

    start_logging()
    checkpoint, *further = options.checkpoint
    if further:
        raise ValueError(
            "--checkpoint takes one network here, or the folder of a run for the mean of several"
        )
    choices = ExportOptions(
        format=options.format, opset=options.opset, case=options.case, tolerance=options.tolerance
    )
    export(checkpoint, options.output, choices, options.package)
    if options.case is None:
        log.info("--case IMAGE also compares the logits on a real case")
    return DONE


def _add_input_and_output(group: Group) -> None:
    group.add_argument(
        "--checkpoint",
        type=Path,
        action="append",  # as predict has it, to say what is not the same
        required=True,
        metavar="PATH",
        help="a run's folder or its checkpoints/best.ckpt; of several networks, their mean",
    )
    formats = ", ".join(doors.mapping("EXPORTS"))
    group.add_argument("--format", required=True, metavar="FORMAT", help=f"one of {formats}")
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="file to write; for bundle, nnunet and safetensors, a new folder (nnunet: DatasetNNN_NAME)",
    )
    group.add_argument("--opset", type=int, metavar="N", help=f"ONNX operator set; default {OPSET}")


def _add_comparison(group: Group) -> None:
    group.add_argument(
        "--case",
        type=Path,
        metavar="IMAGE",
        help="also compare logits on this image, not only on random patches",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="largest allowed difference, relative to the largest logit; default %(default)g",
    )
