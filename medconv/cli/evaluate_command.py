"""What `medconv evaluate` does with its options: check them, evaluate, write the results and print them."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from medconv.cli.flags import flag_of
from medconv.data.datasets.patterns import home
from medconv.evaluation import image_level, labels, segmentation
from medconv.evaluation.evaluate import Evaluation, check_writable, table, table_path, write
from medconv.inference.manifest import MANIFEST
from medconv.metrics.segmentation import MetricSelection
from medconv.utils.atomic_io import write_text
from medconv.utils.exit_codes import DONE
from medconv.utils.logging import shown, start_logging

# Options that have an effect for one kind of predictions alone.
_FOR_TABLES = ("label_columns", "split", "split_column")
_FOR_LABEL_MAPS = ("references", "raters", "consensus", "tolerance_mm", "lesions", "centreline", "annotated")


def run_command(options: argparse.Namespace) -> int:
    """`medconv evaluate` with these options. Returns: the exit code."""
    start_logging()
    output: Path = options.output
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: expected a JSON file; CSV and HTML are written beside it")
    if options.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {options.workers}")
    is_table = options.labels is not None or options.predictions.suffix == ".csv"
    # all options are checked before the work
    evaluate = _table_evaluation(options) if is_table else _label_map_evaluation(options)
    check_writable(output, _read_files(options))
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
            "--references is needed: the folder of reference label maps; for classification and regression, "
            "--labels: a table (.csv)"
        )
    for name in _given(options, _FOR_TABLES):
        raise ValueError(
            f"{flag_of(name)} is for classification and regression, whose predictions are a table (.csv)"
        )
    if options.lesions is not None and not 0 < options.lesions <= 1:
        raise ValueError(f"--lesions must be above 0 and at most 1, got {options.lesions}")
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
    if options.labels is None:
        raise ValueError(
            f"--labels is needed: the table (.csv) that {options.predictions} is measured against"
        )
    for name in _given(options, _FOR_LABEL_MAPS):
        raise ValueError(f"{flag_of(name)} is for label maps; --labels are for classification and regression")
    if options.split_column is not None and options.split is None:
        raise ValueError(f"--split-column {options.split_column} has no effect without --split")
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


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Those of the options that the user set."""
    return [name for name in names if getattr(options, name) not in (None, False, [])]


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
