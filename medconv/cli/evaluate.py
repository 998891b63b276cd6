"""`medconv evaluate`: compare predicted label maps, or a table of predictions, with references."""

import os
from pathlib import Path
from typing import Any

from medconv.cli.parsers import Parser


def parser() -> Parser:
    command = Parser(
        "evaluate",
        "--predictions predictions/ --references labelsTr/ --output metrics.json",
        "Compare predictions with references. Prints a table and writes all metrics as JSON, the cases as "
        "CSV and a report as HTML.",
    )
    path: dict[str, Any] = {"type": Path, "metavar": "PATH"}
    folder, file = {**path, "metavar": "FOLDER"}, {**path, "metavar": "FILE"}
    add = command.add_argument_group("input and output").add_argument
    add(
        "--predictions",
        **path,
        required=True,
        help="folder of predicted label maps, a pattern with {id} for the case id, or predictions.csv",
    )
    add("--output", **file, required=True, help="JSON file; CSV and HTML are written beside it")
    add("--compare", type=Path, metavar="PREDICTIONS", help="other predictions, compared by a paired test")
    images = "images for the report; default: those that were predicted, or imagesTr beside labelsTr"
    add("--images", **folder, help=images)
    add = command.add_argument_group("segmentation").add_argument
    add(
        "--references",
        **folder,
        help="folder of reference label maps of the same names, or a pattern with {id}",
    )
    tolerance = "tolerance of the surface Dice, for all classes or one; default 1; may be repeated"
    add("--tolerance-mm", action="append", default=[], metavar="MM|NAME=MM", help=tolerance)
    annotated = "references of these cases have these classes alone, others do not count; may be repeated"
    add("--annotated", action="append", default=[], metavar="CASES=NAME,NAME", help=annotated)
    lesions = "also lesion-wise scores; lesions match from this intersection over union on, default 0.5"
    add("--lesions", type=float, nargs="?", const=0.5, metavar="IOU", help=lesions)
    add = command.add_argument_group("classification and regression").add_argument
    add("--labels", **file, help="table (.csv) with a column `path` or `case`, and the labels")
    columns = "columns of --labels; default `label`, or the predicted names"
    add("--label-columns", nargs="+", default=[], metavar="NAME", help=columns)
    add("--split", choices=("train", "val", "test"), help="only the rows of --labels of this split")
    add("--split-column", metavar="NAME", help="column of --labels that names the split; default `split`")
    workers = "cases measured at once; default: one per core, at most 8"
    cores = len(os.sched_getaffinity(0))
    command.general().add_argument("--workers", type=int, default=min(8, cores), metavar="N", help=workers)
    return command
