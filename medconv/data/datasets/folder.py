"""`data=folder` and `data=image_mask`: images and labels by patterns, or in two folders."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, id_errors, modalities_of
from medconv.data.datasets.patterns import files_of, home, labels_of
from medconv.data.io.formats import shown, structures_of
from medconv.data.io.images import read_label
from medconv.data.io.label_values import class_names_of, names_of, relabel_of
from medconv.data.io.raster import MAX_CLASSES, is_picture
from medconv.targets import Targets
from medconv.utils.errors import Argument, ArgumentError

_NUM_LABELS_READ = 20  # to find the classes of a dataset that does not name them


def folder(
    images: str | Mapping[str, str],
    labels: str,
    class_names: Sequence[str] | None = None,
    modality: str = "MRI",
    root: str | None = None,
) -> Dataset:
    """Pairs from two patterns or folders, see `patterns.files_of`.

    Args:
        images: a pattern, or one for each channel by its name, such as {t1: ..., flair: ...}.
        labels: a pattern or a folder; with `{class}` in it, a mask for each class.
        class_names: background first; None takes the names of structures or masks, or those that label files
            state, or numbers the classes of the first 20 labels.
        modality: of all channels; names in `images` are modalities themselves.
        root: folder in which relative patterns begin; None: the current one.

    Raises:
        ValueError: no such folder, no pairs, or classes that cannot be told. A missing channel or label
            becomes an error of its case.
    """
    pairs = pairs_of(images, labels, modality, root, partial(labels_of, class_names=class_names))
    label_names = names_of(pairs.labels)
    names = tuple(class_names or _structure_names(_in_root(root, labels)) or class_names_of(label_names))
    if class_names and len(names) == 1:
        raise ArgumentError(
            "class_names",
            f"={list(names)}: the first name is the background's; expected one for each class, too",
        )
    if not names:
        names = _numbered_names(list(pairs.labels.values())[:_NUM_LABELS_READ])
    return build_dataset(
        name=pairs.name("folder"),
        cases=pairs.cases,
        class_names=names,
        targets=None,
        modalities=pairs.modalities,
        path=pairs.home,
        errors=pairs.errors,
        label_names=label_names,
    )


class Pairs(NamedTuple):
    """Cases of images and label files.

    Args:
        labels: case id to label file.
        errors: case id to what it lacks.
        home: folder of the images.
    """

    cases: list[Case]
    labels: dict[str, Path]
    modalities: tuple[str, ...]
    errors: dict[str, str]
    home: Path

    def name(self, otherwise: str) -> str:
        """That of the folder which holds images and labels. Args: otherwise: if it has none."""
        folders = [self.home, *(path.parent for path in self.labels.values())]
        common = Path(os.path.commonpath([os.path.abspath(folder) for folder in folders]))  # noqa: PTH100 - `..`
        return common.name or self.home.name or otherwise

    def dataset(self, targets: Targets, name: str) -> Dataset:
        """The dataset of these cases, whose labels are no label maps. Args: name: if the folder has none."""
        return Dataset(
            name=self.name(name),
            cases=tuple(sorted(self.cases, key=lambda case: case.id)),
            class_names=targets.names,
            modalities=self.modalities,
            errors={**id_errors(self.cases), **self.errors},
            targets=targets,
        )


def pairs_of(
    images: str | Mapping[str, str],
    labels: str,
    modality: str,
    root: str | None,
    find_labels: Callable[[str, str], dict[str, Path]] = files_of,
) -> Pairs:
    """The cases of two patterns or folders, whatever the labels are.

    Args: as of `folder`. find_labels: gives case id to label file, as `files_of`.
    Raises:
        ValueError: no such folder, or no pairs.
    """
    if not images or not labels:
        raise ArgumentError(
            "images" if not images else "labels",
            " is not set: this layout needs both ",
            Argument("images"),
            " and ",
            Argument("labels"),
            ", as folders or as patterns such as 'scans/{id}_t1.nii.gz'",
        )
    if root is not None and not Path(root).is_dir():
        raise ArgumentError("root", f"={root}: no such folder")
    patterns = {key: _in_root(root, pattern) for key, pattern in _by_channel(images, modality).items()}
    labels = _in_root(root, labels)
    channels = {key: files_of(pattern, key) for key, pattern in patterns.items()}
    label_files = find_labels(labels, "labels")
    image_files = _first_channels(list(channels.values()))
    _check_pairs(image_files, label_files)
    cases: list[Case] = []
    errors: dict[str, str] = {}
    for case_id in {**image_files, **label_files}:
        files = [files_by_case.get(case_id) for files_by_case in channels.values()]
        label = label_files.get(case_id)
        present = tuple(path for path in files if path is not None)
        missing_channels = tuple(channel for channel, path in enumerate(files) if path is None)
        cases.append(Case(case_id, present, label, missing_channels=missing_channels))
        for pattern, path in zip(patterns.values(), files, strict=True):
            if path is None:
                file = shown(label) if label else image_files[case_id]
                errors[case_id] = f"{file}: no image matches {pattern}"
        if label is None:
            errors[case_id] = f"{image_files[case_id]}: no label matches {shown(labels)}"
    if isinstance(images, Mapping):
        modalities = tuple(images)
    else:
        modalities = modalities_of(list(image_files.values()), modality)
    return Pairs(cases, label_files, modalities, errors, home(next(iter(patterns.values()))))


def _in_root(root: str | None, pattern: str) -> str:
    return pattern if root is None else str(Path(root) / pattern)


def _by_channel(images: Any, modality: str) -> dict[str, str]:
    """Argument, for messages, to pattern.

    Raises: ValueError: no patterns, or a modality besides those of the patterns.
    """
    if isinstance(images, str):
        return {"images": images}
    if not isinstance(images, Mapping) or not all(isinstance(pattern, str) for pattern in images.values()):
        raise ArgumentError(
            "images",
            f"={images}: expected a pattern, or one for each channel "
            "such as {t1: 'a/{id}_t1.nii.gz', flair: ...}",
        )
    if modality != "MRI":
        raise ArgumentError(
            "modality", f"={modality}: the names in ", Argument("images"), " are the modalities; set one"
        )
    return {f"images.{name}": pattern for name, pattern in images.items()}


def _first_channels(channels: Sequence[Mapping[str, Path]]) -> dict[str, Path]:
    """Case id to the file of its first channel that exists."""
    image_files: dict[str, Path] = {}
    for files in reversed(channels):
        image_files.update(files)
    return image_files


def _check_pairs(image_files: Mapping[str, Path], label_files: Mapping[str, Path]) -> None:
    """Raises: ValueError: no case has both."""
    if image_files.keys() & label_files.keys():
        return
    image_ids = ", ".join(sorted(image_files)[:3])
    label_ids = ", ".join(list(label_files)[:3])
    raise ArgumentError(
        "images",
        " and ",
        Argument("labels"),
        f": no case has both an image and a label; ids are {image_ids} in images, {label_ids} in labels; "
        "write {id} in the place of the case id and * for all else, such as 'masks/{id}_*.png'",
    )


def _structure_names(labels: str) -> tuple[str, ...]:
    """The background and the first name of each structure of an RTSTRUCT pattern; empty for other labels.

    Raises: ValueError: a structure without a name.
    """
    structures = [names.split("|")[0] for names in structures_of(labels)]
    if "" in structures:
        raise ArgumentError("labels", f"={labels}: a structure has no name, expected #roi=NAME;NAME")
    return ("background", *structures) if structures else ()


def _numbered_names(labels: Sequence[Path]) -> tuple[str, ...]:
    """Class names by the values of some label maps: background, 1, 2, ...

    Raises: ValueError: no label can be read, their values are not those of classes, or as `relabel_of`.
    """
    if relabel_of(labels) is not None:
        return ("background", "1")
    values = {0}
    error_text = ""
    for path in labels:
        try:
            label, _ = read_label(path)
        except ValueError as error:  # `check` reports it with its case
            error_text = str(error)
        else:
            values |= set(np.unique(label).tolist())
    highest = max(values)
    if error_text and not highest:
        problem = f" is not set, and no label tells how many there are ({error_text})"
        raise ArgumentError("class_names", problem)
    if len(values) > MAX_CLASSES and any(map(is_picture, labels)):
        raise ArgumentError(
            "labels",
            f": they hold {len(values)} values, more than a mask of classes has; a value for each object is "
            "learned by data=instances; else name the classes in ",
            Argument("class_names"),
        )
    # Most numbers are missing, as with 0 and 255, or 0, 500 and 600
    if len(values) <= highest // 2:
        raise ArgumentError(
            "labels",
            f": they hold {sorted(values)[:8]}, expected 0, 1, 2, ... for the classes; renumber them, or "
            "name the classes in ",
            Argument("class_names"),
            ", without the value of ignore_label",
        )
    return ("background", *(str(value) for value in range(1, max(highest, 1) + 1)))
