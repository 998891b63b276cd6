"""`medconv-evaluate`: compare predicted with reference label maps; a table, and per-case values as JSON and CSV."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from medconv import commands, metrics
from medconv.data.files import check_same_grid, in_folder, read_label
from medconv.data.layout import class_names_of
from medconv.predict import RECORD
from medconv.targets import Targets


def main() -> None:
    sys.exit(commands.guard(_main))


def _main() -> int:
    options = _parser().parse_args()
    commands.start_logging()
    if options.output.suffix == ".csv":
        raise ValueError(f"--output {options.output}: expected a JSON file; the CSV is written beside it")
    result = evaluate(options.predictions, options.references)
    write(result, options.output)
    print(table(result))
    print(f"\nper case: {options.output} and {options.output.with_suffix('.csv')}")
    return commands.DONE


def evaluate(predictions: Path, references: Path) -> dict[str, Any]:
    """Dice of every prediction against the reference of the same name.

    Returns: `mean` (metric to value), `per_class` (class to metric to value), `cases` (one row each). References that
    nothing was predicted for are left alone.
    Raises: ValueError: a folder without label maps, predictions without a reference, or files at fault, all named.
    """
    predicted, known = in_folder(predictions, "--predictions"), in_folder(references, "--references")
    lacking = sorted(set(predicted) - set(known))
    if lacking:
        raise ValueError(f"--references {references}: no label map there for {', '.join(lacking[:20])}")
    names = _class_names(predictions, references)
    rows, faults = [], []
    for case, path in tqdm(predicted.items(), desc="evaluating", unit="case", leave=False, disable=None):
        try:
            rows.append({"case": case, **_compare(path, known[case], names)})
        except ValueError as error:
            faults.append(f"  case {case}: {error}")
    if faults:
        raise ValueError(f"{len(faults)} of {len(predicted)} cases cannot be evaluated\n" + "\n".join(faults))
    return _summary(rows)


def write(result: dict[str, Any], path: Path) -> None:
    """`path` as JSON, and the cases beside it as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        classes = list(result["per_class"])
        writer.writerow(["case", *(f"dice/{name}" for name in classes)])
        writer.writerows([row["case"], *(row["dice"][name] for name in classes)] for row in result["cases"])


def table(result: dict[str, Any]) -> str:
    """Per class: mean, standard deviation and the number of cases in which it is defined."""
    lines = [f"{'class':<20} {'Dice':>7} {'sd':>7} {'cases':>6}"]
    for name, values in result["per_class"].items():
        found = [row["dice"][name] for row in result["cases"] if row["dice"][name] is not None]
        sd = float(np.std(found)) if found else None
        lines.append(f"{name:<20} {_number(values['dice'])} {_number(sd)} {len(found):>6}")
    lines.append(f"{'mean foreground':<20} {_number(result['mean']['dice'])}")
    return "\n".join(lines)


def _compare(prediction: Path, reference: Path, names: tuple[str, ...] | None) -> dict[str, Any]:
    (found, grid), (wanted, wanted_grid) = read_label(prediction), read_label(reference)
    check_same_grid(reference, wanted_grid, prediction, grid)
    highest = int(max(found.max(), wanted.max()))
    if names is not None and highest >= len(names):
        raise ValueError(f"label value {highest} is not declared, expected 0 to {len(names) - 1}")
    classes = names or ("background", *(str(v) for v in range(1, highest + 1)))
    return {"dice": metrics.dice(found, wanted, Targets.of_classes(classes))}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    classes = list(dict.fromkeys(name for row in rows for name in row["dice"]))
    for row in rows:
        row["dice"] = {name: row["dice"].get(name) for name in classes}
    per_class = metrics.mean_per_class([row["dice"] for row in rows])
    return {
        "mean": {"dice": metrics.mean(per_class)},
        "per_class": {name: {"dice": value} for name, value in per_class.items()},
        "cases": rows,
    }


def _class_names(predictions: Path, references: Path) -> tuple[str, ...] | None:
    """From what `predict` left beside its output, or the references' dataset.json; None numbers the classes."""
    record = predictions / RECORD
    if record.is_file():
        try:
            return tuple(str(name) for name in json.loads(record.read_text())["class_names"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{record}: expected a JSON object whose `class_names` is a list of names") from error
    return class_names_of(references.parent) if (references.parent / "dataset.json").is_file() else None


def _number(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:7.4f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("medconv-evaluate", description=__doc__)
    parser.add_argument("--predictions", type=Path, required=True, help="folder of predicted label maps")
    parser.add_argument("--references", type=Path, required=True, help="folder of reference label maps, same names")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; a CSV of the cases is written beside it")
    return parser


if __name__ == "__main__":
    main()
