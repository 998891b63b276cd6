"""What the values of label maps mean, and how far off each class's surface may be: read from files and
options.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.datasets import common
from medconv.inference.output_dir import RECORD
from medconv.targets.segmentation import SegmentationTargets, names_of

_RECORD_BYTES = (
    100_000_000  # a record names every image of every case; anything beyond this is something else
)


def targets_of(predictions: Path, references: Path) -> SegmentationTargets | None:
    """From what `predict` left beside its output, else the references' dataset.json; None where neither is
    there.

    Raises: ValueError: a file that does not say it, named.
    """
    record = predictions / RECORD
    if record.is_file():
        return _of_record(record)
    root = references.absolute().parent  # of `.`, too
    if (root / "dataset.json").is_file():
        return common.targets_of(root)
    return None


def agreed_targets(predictions: Sequence[Path], references: Path) -> SegmentationTargets | None:
    """`targets_of` several folders of predictions. Raises: ValueError: they mean different things."""
    found = [targets_of(folder, references) for folder in predictions]
    for folder, targets in zip(predictions, found, strict=True):
        if targets != found[0]:
            said = " and ".join(", ".join(each.names) if each else "numbers" for each in (found[0], targets))
            raise ValueError(
                f"{folder}: its classes differ from those of {predictions[0]}: {said}, or their label values"
            )
    return found[0]


def numbered(values: Collection[int] | Collection[str]) -> SegmentationTargets:
    """Each label value that occurs is a class, named by its number."""
    known = sorted({int(value) for value in values} - {0})
    return SegmentationTargets(tuple(map(str, known)), tuple((value,) for value in known))


def check_declared(
    path: Path, label: np.ndarray, targets: SegmentationTargets, ignore: int | None = None
) -> None:
    """Raises: ValueError: a value above those of all classes that is not `ignore` either."""
    highest = int(label.max(initial=0, where=label != (-1 if ignore is None else ignore)))
    if highest >= targets.num_values:
        raise ValueError(
            f"{path}: label value {highest} is not declared, expected 0 to {targets.num_values - 1}"
        )


def tolerances(options: Sequence[str]) -> dict[str | None, float]:
    """From `2` (every class) and `NAME=5` (one class) to millimetres by class; None stands for every other
    one.

    Raises: ValueError: no number of millimetres, 0 or more.
    """
    found: dict[str | None, float] = {}
    for option in options:
        name, equals, number = option.rpartition("=")
        try:
            mm = float(number)
        except ValueError:
            mm = -1.0
        if not (math.isfinite(mm) and mm >= 0) or (equals and not name):
            raise ValueError(
                f"--tolerance-mm {option}: expected millimetres, such as 2, or NAME=MM for one class"
            )
        found[name if equals else None] = mm
    return found


@dataclass(frozen=True)
class Tolerance:
    """How far off a surface may be. Args: given_mm: by class; None stands for every class without an own
    one, 1 mm.
    """

    given_mm: Mapping[str | None, float]

    def of(self, names: Sequence[str]) -> dict[str, float]:
        rest = self.given_mm.get(None, 1.0)
        return {name: self.given_mm.get(name, rest) for name in names}

    def by_class(self, names: Sequence[str]) -> dict[str, float]:
        """As `of`, for the names of all classes. Raises: ValueError: a tolerance for a class that there is
        not.
        """
        unknown = [name for name in self.given_mm if name is not None and name not in names]
        if unknown:
            raise ValueError(
                f"--tolerance-mm: no class {', '.join(map(repr, unknown))}; there are {', '.join(names)}"
            )
        return self.of(names)


def recorded_images(predictions: Path) -> dict[str, Path]:
    """Case to its (first) image, as the record beside the predictions names it, where that file is still
    there.
    """
    try:
        cases = _read(predictions / RECORD)["cases"]
        found = {case: Path(entry["images"][0]) for case, entry in cases.items() if entry["images"]}
        return {case: path for case, path in found.items() if path.is_file()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # no record, or one of before images were in it; pictures do without


def _read(record: Path) -> Any:
    if record.stat().st_size > _RECORD_BYTES:
        raise ValueError("too large")
    return json.loads(record.read_text(encoding="utf-8"))


def _of_record(path: Path) -> SegmentationTargets:
    try:
        content = _read(path)
        plain = "targets" in content
        targets = (
            SegmentationTargets.from_plain(content["targets"])
            if plain
            else SegmentationTargets.of_classes(names_of(content["class_names"]))
        )
        if not targets.names:
            raise ValueError("no class")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a JSON object whose `class_names` is a list of names, or whose `targets` "
            "says what each name stands for; without this file the classes are taken from dataset.json, or "
            "numbered"
        ) from error
    return targets
