"""`medconv evaluate`: compare predicted label maps, or a table of predictions, with references."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from medconv.cli.parsers import Parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from medconv.evaluation.segmentation import run_command  # loads torch

    return run_command(options)


def parser() -> Parser:
    command = Parser(
        "evaluate",
        "--predictions predictions/ --references labelsTr/ --output metrics.json",
        "Compare predictions with references. Prints a table and writes all metrics as JSON, the cases as "
        "CSV and a report as HTML.",
    )
    add = command.group("input and output").add_argument
    add(
        "--predictions",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder of predicted label maps, or predictions.csv",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON file; CSV and HTML are written beside it",
    )
    add("--compare", type=Path, metavar="PREDICTIONS", help="other predictions, compared by a paired test")
    add(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="images for the report; default: those that were predicted, or imagesTr beside labelsTr",
    )
    add = command.group("segmentation").add_argument
    add("--references", type=Path, metavar="FOLDER", help="folder of reference label maps, same names")
    add(
        "--tolerance-mm",
        action="append",
        default=[],
        metavar="MM|NAME=MM",
        help="tolerance of the surface Dice, for all classes or one; default 1; may be repeated",
    )
    add = command.group("classification and regression").add_argument
    add(
        "--labels",
        type=Path,
        metavar="FILE",
        help="table (.csv) with a column `path` or `case`, and the labels",
    )
    add(
        "--label-columns",
        nargs="+",
        default=[],
        metavar="NAME",
        help="columns of --labels; default `label`, or the predicted names",
    )
    add("--split", choices=("train", "val", "test"), help="only the rows of --labels of this split")
    add("--split-column", metavar="NAME", help="column of --labels that names the split; default `split`")
    command.general().add_argument(
        "--workers",
        type=int,
        default=min(8, len(os.sched_getaffinity(0))),
        metavar="N",
        help="cases measured at once; default: one per core, at most 8",
    )
    return command
