"""`medconv evaluate`: compare predicted label maps, or a table of predictions, with references."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from medconv import doors
from medconv.cli.parsers import Group, Parser, add_package, flag_of
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, start_logging

if TYPE_CHECKING:
    from medconv.evaluation.results import Evaluation

_MAX_WORKERS = 8
# Options that have an effect for one kind of predictions alone.
_FOR_TABLES = ("label_columns", "split", "split_column")
_FOR_CLASSES = ("raters", "consensus", "tolerance_mm", "lesions", "centreline", "annotated")
_FOR_LABEL_MAPS = ("references", *_FOR_CLASSES)


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
    general = command.general()
    add_package(general)
    general.add_argument(
        "--workers",
        type=int,
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
        help="table (.csv) with a column `path` or `case`, and the labels; with --references both count",
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


def run_command(options: argparse.Namespace) -> int:
    """Check the options, evaluate, write the results and print them. Returns: the exit code."""
    from medconv.evaluation.results import check_writable, table, write

    start_logging()
    output: Path = options.output
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: expected a JSON file; CSV and HTML are written beside it")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    is_table = options.predictions.suffix == ".csv"
    has_both = not is_table and None not in (options.references, options.labels)
    is_table |= options.labels is not None and not has_both
    if has_both and options.split is not None:
        raise ValueError(
            f"--split {options.split} is for rows of --labels, and label maps of all splits would be scored "
            "beside them: evaluate --labels alone"
        )
    # all options are checked before the work
    evaluations: dict[Path, Callable[[], Evaluation]] = {}
    if is_table or has_both:  # first, since it takes no time
        path = output.with_suffix(".table.json") if has_both else output
        evaluations[path] = _table_evaluation(options, () if has_both else _FOR_LABEL_MAPS)
    if not is_table:
        evaluations[output] = _label_map_evaluation(options, () if has_both else _FOR_TABLES)
    for path in evaluations:
        check_writable(path, _read_files(options))
    _check_packages(options, is_table)
    for path, evaluate in evaluations.items():
        evaluation = evaluate()
        # scores are written before the report, which reads images and may fail
        write(evaluation, path)
        print(shown(table(evaluation)))
        print(f"\nper case: {path} and {path.with_suffix('.csv')}")
        for page_of in doors.objects(doors.REPORTS):
            page = page_of(evaluation)
            if page is not None:
                report = path.with_suffix(".html")
                write_text(report, page)
                print(f"report:   {report}")
    return DONE


def _check_packages(options: argparse.Namespace, is_table: bool) -> None:
    """Raises: ConfigError: predictions are of a kind that a package brings which the user has not named."""
    from medconv.config.instantiate import check_named
    from medconv.data.datasets.patterns import home
    from medconv.data.io.manifest import MANIFEST, read_manifest
    from medconv.evaluation.results import table_path
    from medconv.targets import all_kinds

    for predictions in filter(None, (options.predictions, options.compare)):
        folder = table_path(predictions).parent if is_table else home(predictions)
        content = read_manifest(folder)
        targets = content.get("targets")
        if isinstance(targets, dict) and targets.get("kind") not in list(all_kinds()):
            check_named(content.get("packages"), folder / MANIFEST)


def _label_map_evaluation(
    options: argparse.Namespace, without_effect: tuple[str, ...]
) -> Callable[[], Evaluation]:
    """The function that evaluates folders.

    Args: without_effect: names of options.
    Raises: ValueError: the options do not fit each other.
    """
    from medconv.evaluation import labels, segmentation
    from medconv.evaluation.results import own_evaluation
    from medconv.metrics.segmentation import MetricSelection
    from medconv.utils.hardware import num_cores

    if options.references is None:
        raise ValueError(
            "--references is needed: the folder of reference label maps; for classification and regression, "
            "--labels: a table (.csv)"
        )
    for name in _given(options, without_effect):
        raise ValueError(
            f"{flag_of(name)} is for classification and regression, whose predictions are a table (.csv)"
        )
    workers = options.workers or min(_MAX_WORKERS, num_cores())
    own = own_evaluation(options.predictions)
    if own:
        for name in _given(options, _FOR_CLASSES):
            raise ValueError(
                f"{flag_of(name)} is for label maps of classes, which {options.predictions} does not hold"
            )
        folders = (options.predictions, options.references, options.compare)
        return partial(own, *folders, workers=workers, images=options.images)
    if options.lesions is not None and not 0 < options.lesions <= 1:
        raise ValueError(f"--lesions must be above 0 and at most 1, got {options.lesions}")
    return partial(
        segmentation.evaluate,
        options.predictions,
        options.references,
        options.compare,
        tolerance_mm=labels.tolerances(options.tolerance_mm),
        workers=workers,
        images=options.images,
        selection=MetricSelection(options.lesions, options.centreline),
        annotated=options.annotated,
        raters=options.raters,
        consensus=options.consensus,
    )


def _table_evaluation(
    options: argparse.Namespace, without_effect: tuple[str, ...]
) -> Callable[[], Evaluation]:
    """The function that evaluates tables. Args and errors: as of `_label_map_evaluation`."""
    from medconv.evaluation.results import of_table

    if options.labels is None:
        raise ValueError(
            f"--labels is needed: the table (.csv) that {options.predictions} is measured against"
        )
    for name in _given(options, without_effect):
        raise ValueError(f"{flag_of(name)} is for label maps; --labels are for classification and regression")
    if options.split_column is not None and options.split is None:
        raise ValueError(f"--split-column {options.split_column} has no effect without --split")
    return partial(
        of_table,
        options.predictions,
        options.labels,
        options.compare,
        label_columns=options.label_columns,
        split=options.split,
        split_column=options.split_column or "split",
        images=options.images,
    )


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Those of the options that the user set."""
    values = {name: getattr(options, name) for name in names}
    return [name for name, value in values.items() if not (value is None or value is False or value == [])]


def _read_files(options: argparse.Namespace) -> list[Path]:
    """The tables and descriptions that an evaluation reads, where an output could replace them."""
    from medconv.data.datasets.patterns import home
    from medconv.data.io.manifest import MANIFEST
    from medconv.evaluation.results import table_path

    prediction_sets = [options.predictions]
    if options.compare is not None:
        prediction_sets.append(options.compare)
    files: list[Path] = []
    if options.labels is not None:
        tables = [table_path(path) for path in prediction_sets]
        manifests = [path.with_name(MANIFEST) for path in tables]
        files = [*tables, *manifests, options.labels]
    if options.references is None:
        return files
    # points of all cases may be one table
    files += [path for path in (*prediction_sets, options.references) if path.is_file()]
    manifests = [home(path) / MANIFEST for path in prediction_sets]
    # absolute, as the references may be `.`
    dataset_folder = home(options.references).absolute().parent
    return [*files, *manifests, dataset_folder / "dataset.json"]
