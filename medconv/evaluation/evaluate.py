"""`medconv evaluate`: predicted against reference label maps, or image-level predictions against labels.

Prints a table, and writes all results as JSON, the cases as CSV, and a report as HTML.
"""

import argparse
import csv
import errno
import io
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
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, some, start_logging

_IMAGE_LEVEL_OPTIONS = ("label_columns", "split", "split_column")


class Evaluation(Protocol):
    """What an evaluation found; what its kind of predictions decides.

    Args: result: the content of the JSON file. counted: what `without_prediction` lists.
    """

    @property
    def result(self) -> Mapping[str, Any]: ...

    @property
    def counted(self) -> str: ...

    def csv_rows(self) -> Iterable[Sequence[Any]]:
        """The header, then the rows."""

    def score_lines(self) -> list[str]:
        """Of the table in the terminal."""

    def comparison_lines(self) -> list[str]:
        """Of the same table, with `--compare`."""

    def page(self) -> str:
        """The HTML report; reads the files of the worst cases again."""


def run_command(options: argparse.Namespace) -> int:
    """`medconv evaluate` with these options. Returns: the exit code."""
    start_logging()
    output: Path = options.output
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: expected a JSON file; CSV and HTML are written beside it")
    if options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    is_table = options.labels is not None or options.predictions.suffix == ".csv"
    evaluate = (_of_tables if is_table else _of_label_maps)(options)
    _check_writable(output, options)
    evaluation = evaluate()
    write(evaluation, output)
    print(shown(table(evaluation)))
    write_text(output.with_suffix(".html"), evaluation.page())
    print(f"\nper case: {output} and {output.with_suffix('.csv')}")
    print(f"report:   {output.with_suffix('.html')}")
    return DONE


def _of_label_maps(options: argparse.Namespace) -> Callable[[], Evaluation]:
    """What evaluates folders. Raises: ValueError: the options do not fit each other."""
    if options.references is None:
        raise ValueError(
            "--references is needed: the folder of reference label maps; for classification and regression, "
            "--labels: a table"
        )
    if wrong := [f"--{name.replace('_', '-')}" for name in _IMAGE_LEVEL_OPTIONS if getattr(options, name)]:
        raise ValueError(
            f"{wrong[0]} is for classification and regression, whose --predictions is a table (.csv)"
        )
    sets = (options.predictions, options.references, options.compare)
    if options.lesions is not None and not 0 < options.lesions <= 1:
        raise ValueError(f"--lesions: expected an overlap above 0 and at most 1, got {options.lesions}")
    tolerance_mm = labels.tolerances(options.tolerance_mm)
    return partial(
        segmentation.evaluate,
        *sets,
        tolerance_mm,
        options.workers,
        options.images,
        options.lesions,
        options.annotated,
    )


def _of_tables(options: argparse.Namespace) -> Callable[[], Evaluation]:
    """What evaluates tables. Raises: ValueError: the options do not fit each other."""
    of_label_maps = (
        options.references,
        options.tolerance_mm or None,
        options.lesions,
        options.annotated or None,
    )
    if options.labels is None or any(option is not None for option in of_label_maps):
        raise ValueError(
            f"--predictions {options.predictions}: image-level predictions are measured against "
            "--labels, a table (.csv), without --references, --tolerance-mm, --lesions and --annotated"
        )
    if options.split_column is not None and options.split is None:
        raise ValueError(f"--split-column {options.split_column}: has no effect without --split PART")
    path, compare = _table(options.predictions), options.compare and _table(options.compare)
    columns = (options.label_columns, options.split, options.split_column or "split")
    return partial(image_level.evaluate, path, options.labels, compare, *columns, options.images)


def _table(path: Path) -> Path:
    return path / TABLE if path.is_dir() else path


def write(evaluation: Evaluation, path: Path) -> None:
    """`path` as JSON, and beside it a CSV with the cases (with `compare`, of both sets)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(evaluation.result, indent=2, allow_nan=False) + "\n")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(evaluation.csv_rows())
    write_text(path.with_suffix(".csv"), text.getvalue())


def table(evaluation: Evaluation) -> str:
    """The scores, how many cases have no prediction or label, and the comparison."""
    lines, result = evaluation.score_lines(), evaluation.result
    for what in ("prediction", "label"):
        if missing := result.get(f"without_{what}"):
            count = f"{len(missing)} of {len(missing) + len(result['cases'])} {evaluation.counted}"
            lines.append(f"{count} have no {what} and are not counted: {some(missing)}")
    lines += training_notes(result)
    return "\n".join([*lines, *(evaluation.comparison_lines() if "comparison" in result else [])])


def _check_writable(path: Path, options: argparse.Namespace) -> None:
    """Fail before the work, not after it. Raises: ValueError: the path, or one beside it, cannot be
    written, or is read by this evaluation.
    """
    sets = [each for each in (options.predictions, options.compare) if each is not None]
    if options.references is None:  # tables
        tables = [each / TABLE if each.is_dir() else each for each in sets]
        read = [*tables, *(table.with_name(MANIFEST) for table in tables), options.labels]
    else:
        read = [home(each) / MANIFEST for each in sets]
        read.append(home(options.references).absolute().parent / "dataset.json")
    taken = {each.resolve() for each in read}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, path.with_suffix(".csv"), path.with_suffix(".html")):
            if file.resolve() in taken:
                raise ValueError(f"--output {path}: would replace {file}, which this evaluation reads")
            if file.is_dir():
                raise ValueError(f"--output {file}: cannot be written ({os.strerror(errno.EISDIR)})")
        probe = path.with_name(f".{os.getpid()}.{path.name}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--output {path}: cannot be written ({error.strerror})") from error
