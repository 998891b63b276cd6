"""`data=folder` and `data=image_mask`: images and labels by patterns, or in two folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, modalities_of
from medconv.data.datasets.patterns import files_of, home
from medconv.data.io.images import read_label
from medconv.data.io.rtstruct import structures_of


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
        class_names: background first; None takes structures' names, or numbers the classes of the first 20
            labels.
        modality: of all channels; names in `images` are modalities themselves.
        root: folder in which relative patterns begin; None: the current one.
    """
    if not images or not labels:
        advice = "as folders or as patterns such as 'scans/{id}_t1.nii.gz'"
        raise ValueError(f"this layout needs both data.images and data.labels, {advice}")
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"data.root={root}: no such folder")
    patterns = {key: _below(root, pattern) for key, pattern in _by_channel(images, modality).items()}
    labels = _below(root, labels)
    channels = {key: files_of(pattern, key) for key, pattern in patterns.items()}
    label_files = files_of(labels, "data.labels")
    image_files = {case: path for files in reversed(channels.values()) for case, path in files.items()}
    if not image_files.keys() & label_files:
        ids = f"{', '.join(sorted(image_files)[:3])} in images, {', '.join(list(label_files)[:3])} in labels"
        advice = "write {id} in the place of the case id and * for all else"
        raise ValueError(f"data=folder: no case has both an image and a label; ids are {ids}; {advice}")
    errors = {
        case: f"{label_files.get(case) or image_files[case]}: no image matches {patterns[key]}"
        for case in {**image_files, **label_files}
        for key, files in channels.items()
        if case not in files
    }
    without_label = image_files.keys() - label_files
    errors |= {case: f"{image_files[case]}: no label matches {labels}" for case in without_label}
    cases = [
        Case(case, tuple(files[case] for files in channels.values() if case in files), label_files.get(case))
        for case in {**image_files, **label_files}
    ]
    names = tuple(class_names or ()) or _names_of(labels) or _names_in(list(label_files.values())[:20])
    if isinstance(images, Mapping):
        modalities = tuple(images)
    else:
        modalities = modalities_of(list(image_files.values()), modality)
    place = home(next(iter(patterns.values())))
    return build_dataset(place.name or "folder", cases, names, None, modalities, place, errors)


def _below(root: str | None, pattern: str) -> str:
    return pattern if root is None else str(Path(root) / pattern)


def _by_channel(images: Any, modality: str) -> dict[str, str]:
    """Key, for messages, to pattern."""
    if isinstance(images, str):
        return {"data.images": images}
    if not isinstance(images, Mapping) or not all(isinstance(pattern, str) for pattern in images.values()):
        what = "a pattern, or one for each channel such as {t1: 'a/{id}_t1.nii.gz', flair: ...}"
        raise ValueError(f"data.images={images}: expected {what}")
    if modality != "MRI":
        raise ValueError(f"data.modality={modality}: the names in data.images are the modalities; set one")
    return {f"data.images.{name}": pattern for name, pattern in images.items()}


def _names_of(labels: str) -> tuple[str, ...]:
    """The first name of each structure that a pattern of RTSTRUCT files takes; empty: it is none."""
    structures = [names.split("|")[0] for names in structures_of(labels)]
    if "" in structures:
        raise ValueError(f"data.labels={labels}: a structure has no name, expected #roi=NAME;NAME")
    return ("background", *structures) if structures else ()


def _names_in(labels: Sequence[Path]) -> tuple[str, ...]:
    values, error_text = {0}, ""
    for path in labels:
        try:
            values |= set(np.unique(read_label(path)[0]).tolist())
        except ValueError as error:  # `check` reports it with its case
            error_text = str(error)
    highest = max(values)
    if error_text and not highest:
        raise ValueError(f"data.class_names is not set, and no label tells how many there are ({error_text})")
    if len(values) <= highest // 2:
        raise ValueError(
            f"data=folder: labels hold {sorted(values)[:8]}, expected 0, 1, 2, ... for the classes; "
            "renumber them, or name the classes in data.class_names, without the value of data.ignore_label"
        )
    return ("background", *(str(value) for value in range(1, max(highest, 1) + 1)))
