"""The classes of label maps, from files, and the surface tolerance of each class, from options."""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.data.datasets import common
from medconv.data.io.rtstruct import structures_of, without
from medconv.data.per_case import check_source_spacing, source_spacing
from medconv.inference import manifest
from medconv.inference.manifest import MANIFEST
from medconv.targets.base import names_of
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import explained
from medconv.utils.logging import some

_MAX_BYTES = 100_000_000  # of a manifest; a larger file is something else


def targets_of(predictions: Path, references: Path) -> SegmentationTargets | None:
    """From the manifest beside the predictions, else from the references' dataset.json; None: neither exists.

    Raises: ValueError: such a file without the classes; names it.
    """
    if (path := predictions / MANIFEST).is_file():
        return _from_manifest(path)
    root = references.absolute().parent  # of `.`, too
    if (root / "dataset.json").is_file():
        return common.targets_of(root)
    return None


def agreed_targets(predictions: Sequence[Path], references: Path) -> SegmentationTargets | None:
    """`targets_of` several folders of predictions; unknown ones are those of the others.

    Raises: ValueError: their classes differ.
    """
    found = [(folder, targets_of(folder, references)) for folder in predictions]
    known = [(folder, targets) for folder, targets in found if targets is not None]
    if not known:
        return None
    first, targets = known[0]
    for folder, other in known[1:]:
        if other != targets:
            names = " and ".join(", ".join(each.names) for each in (targets, other))
            raise ValueError(
                f"{folder}: its classes differ from those of {first}: {names}, or their label values"
            )
    return targets


def numbered(values: Collection[int] | Collection[str]) -> SegmentationTargets:
    """A class for each label value that occurs, named by its number."""
    foreground = sorted({int(value) for value in values} - {0})
    return LabelMapTargets(tuple(map(str, foreground)), tuple((value,) for value in foreground))


def check_declared(
    path: Path, label: np.ndarray, targets: SegmentationTargets, ignore: int | None = None
) -> None:
    """Raises: ValueError: a label value above those of all classes, other than `ignore`."""
    highest = int(label.max(initial=0, where=label != (-1 if ignore is None else ignore)))
    if highest >= targets.num_values:
        raise ValueError(
            f"{path}: label value {highest} is not declared, expected 0 to {targets.num_values - 1}"
        )


def tolerances(options: Sequence[str]) -> dict[str | None, float]:
    """From `2` (all classes) and `NAME=5` (one class) to millimetres by class; None stands for all other
    classes.

    Raises: ValueError: not a number of millimetres, 0 or more.
    """
    by_class: dict[str | None, float] = {}
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
        by_class[name if equals else None] = mm
    return by_class


def tolerance_of(by_class: Mapping[str | None, float], names: Sequence[str]) -> dict[str, float]:
    """The tolerance of surface Dice of each name, in mm. Args: by_class: as `tolerances` returns it; 1 mm
    for all others without None.
    """
    default = by_class.get(None, 1.0)
    return {name: by_class.get(name, default) for name in names}


def check_tolerances(by_class: Mapping[str | None, float], names: Sequence[str]) -> None:
    """Raises: ValueError: a tolerance for none of these names."""
    unknown = [name for name in by_class if name is not None and name not in names]
    if unknown:
        raise ValueError(
            f"--tolerance-mm: no class {', '.join(map(repr, unknown))}; there are {', '.join(names)}"
        )


def annotated(options: Sequence[str], cases: Collection[str], names: Sequence[str]) -> dict[str, list[str]]:
    """From `siteA_*=liver,spleen` to the annotated classes of each case that lacks some.

    Raises: ValueError: names a pattern that no case matches, a case that matches two, an unknown class.
    """
    found: dict[str, list[str]] = {}
    for option in options:
        pattern, _, text = option.rpartition("=")
        classes, matched = text.split(","), [case for case in cases if fnmatchcase(case, pattern)]
        if unknown := [name for name in classes if name not in names]:
            raise ValueError(f"--annotated {option}: no class {unknown[0]!r}; there are {', '.join(names)}")
        if not matched:
            raise ValueError(f"--annotated {option}: no case matches; the cases are {some(sorted(cases))}")
        if twice := [case for case in matched if case in found]:
            raise ValueError(f"--annotated {option}: another pattern matches case {twice[0]}, too")
        found |= dict.fromkeys(matched, classes)
    return found


def with_annotated_structures(
    references: Mapping[str, Path], options: Sequence[str], targets: SegmentationTargets | None
) -> dict[str, Path]:
    """The references; contours (RTSTRUCT) may lack the structures of classes that are not annotated.

    Args: options: as `annotated` takes them. targets: None: classes are numbered.
    """
    paths = dict(references)
    count = max((len(structures_of(path)) for path in references.values()), default=0)
    if not options or not count:
        return paths
    numbers = {str(value): (value,) for value in range(1, 1 + count)}
    by_name: Mapping[str, tuple[int, ...]] = targets.by_name if targets else numbers
    for case, names in annotated(options, references, list(by_name)).items():
        known = {value for name in names for value in by_name[name]}
        paths[case] = without(paths[case], {*range(1, 1 + count)} - known)
    return paths


def recorded_images(predictions: Path) -> dict[str, Path]:
    """Case to its (first) image, from the manifest beside the predictions, if that file still exists."""
    path = predictions / MANIFEST
    try:
        cases = common.read_json(path)["cases"] if path.stat().st_size <= _MAX_BYTES else {}
        images = {case: Path(entry["images"][0]) for case, entry in cases.items() if entry["images"]}
        return {case: path for case, path in images.items() if path.is_file()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no manifest, or not one of ours; the report is made without images


def train_cases(predictions: Path, cases: Collection[str]) -> list[str]:
    """Those that the network was trained on, by the manifest beside the predictions."""
    known = {*manifest.read(predictions).get("train_cases", [])}
    return [case for case in cases if case in known]


def stated_spacing(predictions: Path) -> Any:
    """What `data.source_spacing_mm` stated of the images of these predictions, by their manifest; None:
    nothing. Raises: ValueError: the manifest's is not one.
    """
    stated = manifest.read(predictions).get("settings", {}).get("source_spacing_mm")
    if stated is not None:
        with explained(f"{predictions / MANIFEST}"):
            check_source_spacing(stated)
    return stated


def agreed_spacing(predictions: Sequence[Path], cases: Collection[str]) -> list[Any]:
    """`stated_spacing` of folders of predictions of the same cases; of one that states nothing, another's.

    Raises: ValueError: two differ for a case.
    """
    stated = [stated_spacing(folder) for folder in predictions]
    known = next((spacing for spacing in stated if spacing is not None), None)
    stated = [known if spacing is None else spacing for spacing in stated]
    for case in sorted(cases) if known is not None else ():
        found = [source_spacing(spacing, case) for spacing in stated]
        if any(spacing != found[0] for spacing in found):
            raise ValueError(
                f"case {case}: by data.source_spacing_mm in {MANIFEST} its spacing is {found[0]} mm in "
                f"{predictions[0]}, {found[-1]} in {predictions[-1]}; the same reference cannot have both"
            )
    return stated


def stated_grid(grid: Grid, stated: Any, case: str) -> Grid:
    """The grid with that spacing. Args: stated: from `stated_spacing`."""
    spacing_mm = None if stated is None else source_spacing(stated, case)
    return grid if spacing_mm is None else grid.with_spacing_mm(spacing_mm)


def _from_manifest(path: Path) -> SegmentationTargets:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("too large")
        content = common.read_json(path)
        targets = (
            SegmentationTargets.from_plain(content["targets"])
            if "targets" in content
            else LabelMapTargets.of_classes(names_of(content["class_names"]))
        )
        if not targets.names:
            raise ValueError("no class")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected a JSON object whose `class_names` is a list of names, or whose `targets` "
            "says what each name stands for; without this file the classes are taken from dataset.json, or "
            "numbered"
        ) from error
    return targets
