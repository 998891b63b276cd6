"""The classes of label maps, from files, and the surface tolerance of each class, from options."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Relabel
from medconv.data.datasets import dataset_json
from medconv.data.datasets.common import read_json
from medconv.data.datasets.patterns import files_of, labels_of
from medconv.data.io.class_masks import is_of_masks
from medconv.data.io.formats import choice_of, structures_of, without_structures
from medconv.data.io.images import in_folder
from medconv.data.io.label_values import comparable_name
from medconv.data.io.manifest import MANIFEST, read_manifest
from medconv.data.per_case import by_case
from medconv.metrics.dice import value_counts
from medconv.targets.base import names_of
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError, explained
from medconv.utils.logging import some

_DEFAULT_TOLERANCE_MM = 1.0

log = logging.getLogger(__name__)


def reference_files(
    references: Path, prediction_sets: Sequence[Collection[str]], find: Callable[[Path, str], dict[str, Path]]
) -> dict[str, Path]:
    """Case id to its reference.

    Args:
        prediction_sets: the cases of each folder of predictions.
        find: as `patterns.files_of`.
    Raises: ValueError: as `find`, or predictions without a reference.
    """
    files = find(references, "references")
    predicted_cases = {case for cases in prediction_sets for case in cases}
    missing = sorted(predicted_cases - set(files))
    if missing:
        hint = ""
        if not predicted_cases & set(files):
            hint = (
                f"; it has {some(sorted(files), 3)}; if names differ, give patterns with {{id}} in the place "
                "of the case id, such as 'labels/{id}_manual.png', for both"
            )
        raise ValueError(f"references {references}: no file there for {some(missing, 20)}{hint}")
    return files


def label_files(path: Path, argument: str, class_names: Sequence[str] | None) -> dict[str, Path]:
    """Case id to its label map, or its mask for each class.

    Args: class_names: as `class_names_of`.
    Raises: ArgumentError: as `patterns.labels_of`, or nothing says which label value a mask stands for.
    """
    if class_names is None and is_of_masks(path) and not structures_of(path):
        raise ArgumentError(
            argument,
            f" {path}: nothing beside the predictions names their classes; add #roi=NAME;NAME, in the order "
            "of their label values",
        )
    return labels_of(path, argument, class_names)


def _of_manifest(predictions: Path) -> SegmentationTargets | None:
    """Raises: ValueError: a manifest without the classes."""
    path = predictions / MANIFEST
    if not path.is_file():
        return None
    expected = (
        f"{path}: expected a JSON object whose `class_names` is a list of names, or whose `targets` says "
        "what each name stands for; without this file the classes are taken from dataset.json, or numbered"
    )
    with explained(expected, OSError, ValueError, KeyError, TypeError):
        content: Any = read_json(path)
        if "targets" in content:
            targets = SegmentationTargets.from_plain(content["targets"]).of_answers
        else:  # names alone, which a person may have written
            targets = LabelMapTargets.of_classes(names_of(content["class_names"]))
        if not targets.names:
            raise ValueError("no class")
    return targets


def renumbering(targets: SegmentationTargets | None, references: Path) -> Relabel | None:
    """Label values of the references by their dataset.json, to those of the same names in the predictions;
    None: they are the same, or nothing says what they are. Joined datasets, for example, have values of
    their own.

    Raises:
        ValueError: the values differ, and a class of the references has no value in the predictions.
    """
    try:
        declared = _of_references(references)
    except (OSError, ValueError):
        return None  # it was not needed
    if not isinstance(targets, LabelMapTargets) or not isinstance(declared, LabelMapTargets):
        return None
    if targets.draws_classes:  # in place of label values
        return None
    there = {comparable_name(name): value for name, (value,) in declared.by_name.items()}
    here = {comparable_name(name): value for name, (value,) in targets.by_name.items()}
    differing = [name for name in here if there.get(name, here[name]) != here[name]]
    if not differing:
        return None
    missing = [name for name in there if name not in here]
    if missing:
        raise ValueError(
            f"references {references}: their dataset.json gives {differing[0]} another label value than the "
            f"predictions have, and names {', '.join(missing)}, which these do not have; expected one "
            "numbering, or the same names"
        )
    pairs = {0: 0} | {there[name]: here[name] for name in there}
    if declared.ignore is not None and targets.ignore is not None:
        pairs[declared.ignore] = targets.ignore
    log.info("references: label values of %s are matched by name, as their dataset.json differs", references)
    further = [name for name in here if name not in there]
    if further:
        log.warning(
            "references: %s has no %s, so that each predicted voxel of it is wrong; "
            "--annotated '*=%s' leaves it out",
            references,
            ", ".join(further),
            ",".join(name for name in targets.by_name if comparable_name(name) in there),
        )
    return tuple(sorted(pairs.items()))


def _of_references(references: Path) -> SegmentationTargets | None:
    root = references.absolute().parent  # absolute, as the references may be `.`
    if (root / "dataset.json").is_file():
        return dataset_json.targets_of(root)
    return None


def agreed_targets(predictions: Sequence[Path], references: Path) -> SegmentationTargets | None:
    """The targets of folders of predictions by the manifests beside them, else by the references'
    dataset.json; None: neither exists. A folder without a manifest takes those of the others.

    Raises:
        ValueError: their classes differ, or such a file does not have them.
    """
    agreed: SegmentationTargets | None = None
    first_folder = predictions[0]
    for folder in predictions:
        targets = _of_manifest(folder)
        if agreed is None:
            agreed = targets
            first_folder = folder
        elif targets is not None and targets != agreed:
            names = f"{', '.join(agreed.names)} and {', '.join(targets.names)}"
            raise ValueError(
                f"{folder}: its classes differ from those of {first_folder}: {names}, or their label values"
            )
    return _of_references(references) if agreed is None else agreed


def class_names_of(targets: SegmentationTargets | None) -> list[str] | None:
    """The class of each label value, as label files may name it; empty names of values that regions share."""
    if targets is None:
        return None
    names = [""] * targets.num_values
    if isinstance(targets, LabelMapTargets):
        for value, name in targets.value_names.items():
            names[value] = name
    return names


def numbered(values: Collection[int] | Collection[str]) -> SegmentationTargets:
    """A class for each label value that occurs, named by its number."""
    foreground = sorted({int(value) for value in values} - {0})  # 0 is the background
    names = tuple(map(str, foreground))
    return LabelMapTargets(names, tuple((value,) for value in foreground))


def values_in(label: np.ndarray) -> set[int]:
    """The values of a label map."""
    return set(np.flatnonzero(value_counts(label)).tolist())


def check_declared(
    path: Path | str, label: np.ndarray, targets: SegmentationTargets, ignore: int | None = None
) -> None:
    """Check that a label map has no value above those of all classes, other than `ignore`.

    Args:
        path: the file, or what stands for it in messages.
        ignore: a value that it may have, too.
    Raises:
        ValueError: it has; names the file.
    """
    ignored_value = -1 if ignore is None else ignore  # -1: no value is ignored
    highest = int(label.max(initial=0, where=label != ignored_value))
    if highest >= targets.num_values:
        raise ValueError(
            f"{path}: label value {highest} is not declared, expected 0 to {targets.num_values - 1}"
        )


def tolerances(options: Sequence[str]) -> dict[str | None, float]:
    """From `2` (all classes) and `NAME=5` (one class) to millimetres by class; None stands for all other
    classes.

    Raises:
        ValueError: not a number of millimetres, 0 or more.
    """
    by_class: dict[str | None, float] = {}
    for option in options:
        # the last `=`: a class name may contain others
        name, equals, number = option.rpartition("=")
        try:
            mm = float(number)
        except ValueError:
            mm = -1.0
        is_valid = math.isfinite(mm) and mm >= 0
        lacks_name = equals and not name
        if not is_valid or lacks_name:
            raise ArgumentError(
                "tolerance_mm", f" {option}: expected millimetres, such as 2, or NAME=MM for one class"
            )
        by_class[name if equals else None] = mm
    return by_class


def tolerance_of(by_class: Mapping[str | None, float], names: Sequence[str]) -> dict[str, float]:
    """The tolerance of surface Dice of each name, in mm.

    Args:
        by_class: as `tolerances` returns it; without None, all other classes have 1 mm.
    """
    default = by_class.get(None, _DEFAULT_TOLERANCE_MM)
    return {name: by_class.get(name, default) for name in names}


def check_tolerances(by_class: Mapping[str | None, float], names: Sequence[str]) -> None:
    """Check that each tolerance is for one of these names. Raises: ValueError: it is not."""
    unknown = [name for name in by_class if name is not None and name not in names]
    if unknown:
        raise ArgumentError(
            "tolerance_mm", f": no class {', '.join(map(repr, unknown))}; there are {', '.join(names)}"
        )


def annotated(options: Sequence[str], cases: Collection[str], names: Sequence[str]) -> dict[str, list[str]]:
    """From `siteA_*=liver,spleen` to the annotated classes of each case that lacks some.

    Raises:
        ValueError: names a pattern that no case matches, a case that matches two, an unknown class.
    """
    setting: dict[str, list[str]] = {}
    for option in options:
        pattern, _, text = option.rpartition("=")
        classes = text.split(",")
        for name in classes:
            if name not in names:
                raise ArgumentError(
                    "annotated", f" {option}: no class {name!r}; there are {', '.join(names)}"
                )
        if pattern in setting:
            raise ArgumentError("annotated", f" {option}: the pattern is there twice")
        setting[pattern] = classes
    classes_by_case: dict[str, list[str]] = by_case(setting, sorted(cases), "annotated")
    return classes_by_case


def with_annotated_structures(
    files: Mapping[str, Path],
    relabel: Mapping[str, Relabel | None],
    options: Sequence[str],
    targets: SegmentationTargets | None,
    cases: Collection[str] | None = None,
) -> dict[str, Path]:
    """The files of a rater; contours, and masks of each class, may lack classes that are not annotated.

    Args:
        relabel: how these files are read, see `label_values.relabels`.
        targets: None: classes are numbered.
        cases: of all references, where a rater lacks some; None: those of `files`.
    """
    paths = dict(files)
    # label maps have no structures
    structure_counts = [len(structures_of(path)) for path in files.values()]
    structure_count = max(structure_counts, default=0)
    if not options or not structure_count:
        return paths
    all_values = range(1, 1 + structure_count)
    numbers = {str(value): (value,) for value in all_values}
    values_of: Mapping[str, tuple[int, ...]] = targets.by_name if targets else numbers
    for case, names in annotated(options, cases or files, list(values_of)).items():
        if case not in paths:
            continue
        annotated_values = {value for name in names for value in values_of[name]}
        read_as = dict(relabel.get(case) or ())
        others = [value for value in all_values if read_as.get(value, value) not in annotated_values]
        paths[case] = without_structures(paths[case], others)
    return paths


def recorded_images(predictions: Path) -> dict[str, Path]:
    """Case to its (first) image, from the manifest beside the predictions, if that file still exists."""
    manifest_path = predictions / MANIFEST
    try:
        cases = read_json(manifest_path)["cases"]
        images = {}
        for case, entry in cases.items():
            paths = entry["images"]
            if paths and choice_of(Path(paths[0]))[0].exists():  # a file, or a folder of DICOM slices
                images[case] = Path(paths[0])
        return images
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no manifest, or not one of ours; the report is made without images


def train_cases(predictions: Path, cases: Collection[str]) -> list[str]:
    """The cases that the network was trained on, by the manifest beside the predictions."""
    trained = set(read_manifest(predictions).get("train_cases", []))
    return [case for case in cases if case in trained]


def images_of(
    predictions: Path, references: Path, folder: Path | None, cases: Sequence[str]
) -> dict[str, Path]:
    """Case to its image, CASE.nii.gz or its first channel CASE_0000.nii.gz, for cases that have one.

    Args:
        folder: None: the images that the manifest beside the predictions names, else `imagesTr` beside
            `labelsTr` (or `imagesTs` beside `labelsTs`), if it exists.
    Raises:
        ValueError: `folder` holds no image of these cases.
    """
    if folder is not None:
        images = _images_of_cases(files_of(folder, "images"), cases)
        if not images:
            raise ArgumentError("images", f" {folder}: no image of any case there, such as {cases[0]}.nii.gz")
        return images
    recorded = recorded_images(predictions)
    if recorded:
        return recorded
    labels_folder = references.absolute()  # the references may be `.`
    images_folder = labels_folder.with_name(labels_folder.name.replace("labels", "images"))
    if images_folder == labels_folder:
        return {}
    try:
        return _images_of_cases(in_folder(images_folder, "images"), cases)
    except ValueError:
        return {}  # no such folder: the report is made without images


def _images_of_cases(images: Mapping[str, Path], cases: Sequence[str]) -> dict[str, Path]:
    images_by_case = {case: images.get(case) or images.get(f"{case}_0000") for case in cases}
    return {case: path for case, path in images_by_case.items() if path}
