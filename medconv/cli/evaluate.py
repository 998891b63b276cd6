"""`medconv evaluate`: compare predicted label maps, or a table of predictions, with references."""

from pathlib import Path

from medconv.cli.parsers import Group, Parser
from medconv.utils.cores import num_cores

_MAX_WORKERS = 8


def parser() -> Parser:
    command = Parser(
        "evaluate",
        "--predictions predictions/ --references labelsTr/ --output metrics.json",
        "Compare predictions with references. Print a table; write all metrics as JSON, one row per case "
        "as CSV, and a report as HTML.",
    )
    _add_input_and_output(command.add_argument_group("input and output"))
    _add_segmentation(command.add_argument_group("segmentation"))
    _add_image_level(command.add_argument_group("classification and regression"))
    cores = num_cores()
    command.general().add_argument(
        "--workers",
        type=int,
        default=min(_MAX_WORKERS, cores),
        metavar="N",
        help="cases to measure in parallel; default: one per core, at most 8",
    )
    return command


def _add_input_and_output(group: Group) -> None:
    group.add_argument(
        "--predictions",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder of predicted label maps, a pattern with {id} for the case id, or predictions.csv",
    )
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON file; CSV and HTML are written beside it",
    )
    group.add_argument(
        "--compare", type=Path, metavar="PREDICTIONS", help="other predictions, to compare by a paired test"
    )
    group.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="images for the report; default: the predicted images, or imagesTr beside labelsTr",
    )


def _add_segmentation(group: Group) -> None:
    group.add_argument(
        "--references",
        type=Path,
        metavar="FOLDER",
        help="folder of reference label maps with the same names, or a pattern with {id}",
    )
    group.add_argument(
        "--raters",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="reference label maps by further raters, a folder or pattern each",
    )
    group.add_argument(
        "--consensus",
        choices=("majority", "staple"),
        help="with --raters: how all raters become one reference; default majority",
    )
    group.add_argument(
        "--tolerance-mm",
        action="append",
        default=[],
        metavar="MM|NAME=MM",
        help="tolerance of the surface Dice, for all classes or one; default 1; may be repeated",
    )
    group.add_argument(
        "--annotated",
        action="append",
        default=[],
        metavar="CASES=NAME,NAME",
        help="the references of these cases annotate only these classes; ignore others; may be repeated",
    )
    group.add_argument(
        "--lesions",
        type=float,
        nargs="?",
        # The value of `--lesions` alone; without it there are no lesion-wise scores.
        const=0.5,
        metavar="IOU",
        help="add lesion-wise metrics; lesions match at this intersection over union or more, default 0.5",
    )
    group.add_argument(
        "--centreline",
        action="store_true",
        help="add clDice, the share of centrelines that is right: for vessels and other thin structures",
    )


def _add_image_level(group: Group) -> None:
    group.add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help="table (.csv) with a column `path` or `case`, and the labels",
    )
    group.add_argument(
        "--label-columns",
        nargs="+",
        default=[],
        metavar="NAME",
        help="columns of --labels; default `label`, or the predicted names",
    )
    group.add_argument(
        "--split", choices=("train", "val", "test"), help="use only rows of --labels in this split"
    )
    group.add_argument(
        "--split-column", metavar="NAME", help="column of --labels that names the split; default `split`"
    )
