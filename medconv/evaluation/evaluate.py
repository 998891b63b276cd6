"""`medconv evaluate`: predicted against reference label maps, or image-level predictions against labels.

Prints a table, and writes all results as JSON, the cases as CSV, and a report as HTML.
"""

import argparse
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from medconv.data.datasets.patterns import home
from medconv.evaluation import image_level, labels, segmentation
from medconv.evaluation.rendering import training_notes
from medconv.inference.manifest import MANIFEST
from medconv.inference.output_table import TABLE
from medconv.metrics.segmentation_metrics import MetricSelection
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, some, start_logging

# option to its words in messages
_IMAGE_LEVEL_OPTIONS = {
    "label_columns": "label columns",
    "split": "split",
    "split_column": "split column",
}


class Evaluation(Protocol):
    """The result of an evaluation; each kind of predictions implements it.

    Args:
        result: the content of the JSON file.
        counted: what `without_prediction` lists.
    """

    @property
    def result(self) -> Mapping[str, Any]: ...

    @property
    def counted(self) -> str: ...

    def csv_rows(self) -> Iterable[Sequence[Any]]:
        """The header, then the rows."""

    def score_lines(self) -> list[str]:
        """The scores, for the terminal."""

    def comparison_lines(self) -> list[str]:
        """The comparison with other predictions, for the terminal."""

    def page(self) -> str:
        """The HTML report; reads the files of the worst cases again."""


def run_command(options: argparse.Namespace) -> int:
    """`medconv evaluate` with these options. Returns: the exit code."""
    start_logging()
    output: Path = options.output
    if output.suffix != ".json":
        raise ValueError(f"output {output}: expected a JSON file; CSV and HTML are written beside it")
    if options.workers < 1:
        raise ValueError(f"workers must be at least 1, got {options.workers}")
    is_table = options.labels is not None or options.predictions.suffix == ".csv"
    # all options are checked before the work
    evaluate = _table_evaluation(options) if is_table else _label_map_evaluation(options)
    _check_writable(output, options)
    evaluation = evaluate()
    # scores are written before the report, which reads images and may fail
    write(evaluation, output)
    print(shown(table(evaluation)))
    report = output.with_suffix(".html")
    write_text(report, evaluation.page())
    print(f"\nper case: {output} and {output.with_suffix('.csv')}")
    print(f"report:   {report}")
    return DONE


def _label_map_evaluation(options: argparse.Namespace) -> Callable[[], Evaluation]:
    """The function that evaluates folders. Raises: ValueError: the options do not fit each other."""
    if options.references is None:
        raise ValueError(
            "references are needed: the folder of reference label maps; for classification and regression, "
            "labels: a table (.csv)"
        )
    for option, words in _IMAGE_LEVEL_OPTIONS.items():
        if getattr(options, option):
            raise ValueError(
                f"{words}: for classification and regression only, whose predictions are a table (.csv)"
            )
    if options.lesions is not None and not 0 < options.lesions <= 1:
        raise ValueError(f"lesions: expected an overlap above 0 and at most 1, got {options.lesions}")
    return partial(
        segmentation.evaluate,
        options.predictions,
        options.references,
        options.compare,
        tolerance_mm=labels.tolerances(options.tolerance_mm),
        workers=options.workers,
        images=options.images,
        selection=MetricSelection(options.lesions, options.centreline),
        annotated=options.annotated,
        raters=options.raters,
        consensus=options.consensus,
    )


def _table_evaluation(options: argparse.Namespace) -> Callable[[], Evaluation]:
    """The function that evaluates tables. Raises: ValueError: the options do not fit each other."""
    has_label_map_options = (
        options.references is not None
        or bool(options.tolerance_mm)
        or options.lesions is not None
        or options.centreline
        or bool(options.annotated)
        or bool(options.raters)
        or options.consensus is not None
    )
    if options.labels is None or has_label_map_options:
        raise ValueError(
            f"predictions {options.predictions}: image-level predictions are measured against labels, a "
            "table (.csv), without references, raters, tolerance, lesions, centreline and annotated classes"
        )
    if options.split_column is not None and options.split is None:
        raise ValueError(f"split column {options.split_column}: has no effect without a split")
    return partial(
        image_level.evaluate,
        table_path(options.predictions),
        options.labels,
        options.compare and table_path(options.compare),
        label_columns=options.label_columns,
        split=options.split,
        split_column=options.split_column or "split",
        images=options.images,
    )


def table_path(path: Path) -> Path:
    """The table of image-level predictions in a folder that `medconv predict` wrote; a file as it is."""
    return path / TABLE if path.is_dir() else path


def write(evaluation: Evaluation, path: Path) -> None:
    """`path` as JSON, and beside it a CSV with the cases (with `compare`, of both sets).

    Those of an earlier evaluation are removed first, so that none of them stands beside another JSON if
    this process is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".html", ".csv"):
        path.with_suffix(suffix).unlink(missing_ok=True)
    write_text(path, json.dumps(evaluation.result, indent=2, allow_nan=False) + "\n")
    # complete or absent: `write_text` renames the finished file
    write_text(path.with_suffix(".csv"), csv_text(evaluation.csv_rows()))


def table(evaluation: Evaluation) -> str:
    """The scores, how many cases have no prediction or label, and the comparison."""
    result = evaluation.result
    lines = evaluation.score_lines()
    for kind in ("prediction", "label"):
        missing = result.get(f"without_{kind}")
        if missing:
            total = len(missing) + len(result["cases"])
            count = f"{len(missing)} of {total} {evaluation.counted}"
            lines.append(f"{count} have no {kind} and are not counted: {some(missing)}")
    lines += training_notes(result)
    if "comparison" in result:
        lines += evaluation.comparison_lines()
    return "\n".join(lines)


def _check_writable(output: Path, options: argparse.Namespace) -> None:
    """Fail before the work, not after it.

    Raises:
        ValueError: the output, or a file beside it, cannot be written, or is read by this evaluation.
    """
    read_files = {path.resolve() for path in _read_files(options)}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for path in (output, output.with_suffix(".csv"), output.with_suffix(".html")):
            if path.resolve() in read_files:
                raise ValueError(f"output {output}: would replace {path}, which this evaluation reads")
            if path.is_dir():
                raise ValueError(f"output {path}: cannot be written ({os.strerror(errno.EISDIR)})")
        # `os.access` may be wrong on network file systems
        probe = output.with_name(f".{os.getpid()}.{output.name}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"output {output}: cannot be written ({error.strerror})") from error


def _read_files(options: argparse.Namespace) -> list[Path]:
    """The tables and descriptions that an evaluation reads, where an output could replace them."""
    prediction_sets = [options.predictions]
    if options.compare is not None:
        prediction_sets.append(options.compare)
    if options.references is None:
        tables = [table_path(path) for path in prediction_sets]
        manifests = [path.with_name(MANIFEST) for path in tables]
        return [*tables, *manifests, options.labels]
    manifests = [home(path) / MANIFEST for path in prediction_sets]
    # absolute, as the references may be `.`
    dataset_folder = home(options.references).absolute().parent
    return [*manifests, dataset_folder / "dataset.json"]
