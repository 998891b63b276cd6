"""What evaluations of label maps and of tables share: protocol, files and table of their results."""

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from medconv.data.datasets.common import read_json
from medconv.data.datasets.patterns import home
from medconv.data.io.manifest import MANIFEST, TABLE
from medconv.targets import Targets, all_kinds
from medconv.utils.atomic_io import write_text
from medconv.utils.csv_cells import csv_text
from medconv.utils.errors import ArgumentError, explained, reason
from medconv.utils.logging import some


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


def table_path(path: Path) -> Path:
    """The table of image-level predictions in a folder that `medconv predict` wrote; a file as it is."""
    return path / TABLE if path.is_dir() else path


def of_table(predictions: Path, labels: Path, compare: Path | None = None, **options: Any) -> Evaluation:
    """The evaluation of predictions that are a table, by the family of targets that has one.

    Raises: ValueError: no family has, as its feature is not installed; or as the family says.
    """
    for kind in all_kinds().values():
        evaluate_table = kind.family.own("evaluate_table")
        if evaluate_table:
            tables = (table_path(predictions), labels, compare and table_path(compare))
            evaluation: Evaluation = evaluate_table(*tables, **options)
            return evaluation
    raise ValueError(f"{predictions}: this installation has no feature for tables of predictions")


def own_evaluation(predictions: Path) -> Callable[..., Evaluation] | None:
    """What evaluates these images, by the manifest beside them; None: they are label maps of classes.

    Args: predictions: folder, or pattern with `{id}`.
    Raises: ValueError: its targets are of no kind, or incomplete.
    """
    manifest = home(predictions) / MANIFEST
    try:
        content = read_json(manifest)["targets"]
    except (ValueError, KeyError, TypeError):  # whoever reads label maps says what is wrong with it
        return None
    with explained(f"{manifest}: its `targets` are not usable"):
        targets = Targets.from_plain(content)
    evaluate: Callable[..., Evaluation] | None = targets.family.own("evaluate")
    return evaluate


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


def check_writable(output: Path, read_files: Collection[Path]) -> None:
    """Fail before the work, not after it.

    Args:
        read_files: the tables and descriptions that this evaluation reads.
    Raises:
        ArgumentError: the output, or a file beside it, cannot be written, or is read by this evaluation.
    """
    resolved_files = {path.resolve() for path in read_files}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for path in (output, output.with_suffix(".csv"), output.with_suffix(".html")):
            if path.resolve() in resolved_files:
                raise ArgumentError("output", f" {output}: would replace {path}, which this evaluation reads")
            if path.is_dir():
                raise ArgumentError("output", f" {path}: cannot be written ({os.strerror(errno.EISDIR)})")
        # `os.access` may be wrong on network file systems
        probe = output.with_name(f".{os.getpid()}.{output.name}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ArgumentError("output", f" {output}: cannot be written ({reason(error)})") from error


def plain_number(value: float | None, digits: int = 4) -> str:
    """A number as tables of the terminal print it; integers without decimals."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.{digits}f}"


def training_notes(result: Mapping[str, Any]) -> list[str]:
    """A line for each set of predictions with cases that its network was trained on."""
    sets = {"predictions": result, "compare": result.get("compare", {})}
    notes = []
    for name, summary in sets.items():
        cases = summary.get("train_cases")
        if cases:
            notes.append(
                f"{name}: cases with names of training cases: {len(cases)} ({some(cases, 2)}); "
                "their scores are optimistic"
            )
    return notes
