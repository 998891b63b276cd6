"""`data=folder` and `data=image_mask`: images and labels by two glob patterns, or in two folders."""

import re
from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, modalities_of
from medconv.data.io.images import in_folder, read_label


def folder(
    images: str, labels: str, class_names: Sequence[str] | None = None, modality: str = "MRI"
) -> Dataset:
    """Pairs from two glob patterns: the text that `*` matches is the case id. A matching folder is a DICOM
    series. Instead of a pattern, a folder of images: their stems are the case ids.

    Args: class_names: background first; None numbers the classes of the first 20 labels.
    """
    if not images or not labels:
        advice = "as folders or as glob patterns such as 'scans/*_t1.nii.gz'"
        raise ValueError(f"this layout needs both data.images and data.labels, {advice}")
    image_files, label_files = _files(images, "data.images"), _files(labels, "data.labels")
    if not image_files.keys() & label_files:
        ids = f"{', '.join(list(image_files)[:3])} in images, {', '.join(list(label_files)[:3])} in labels"
        raise ValueError(f"data=folder: no case has both an image and a label; the `*` matches {ids}")
    without_label, without_image = image_files.keys() - label_files, label_files.keys() - image_files
    errors = {case: f"{image_files[case]}: no label matches {labels}" for case in without_label}
    errors |= {case: f"{label_files[case]}: no image matches {images}" for case in without_image}
    cases = [
        Case(case, (image_files[case],) if case in image_files else (), label_files.get(case))
        for case in {**image_files, **label_files}
    ]
    names = tuple(class_names) if class_names else _names_in(list(label_files.values())[:20])
    home = Path(images.partition("*")[0] + "x").parent if "*" in images else Path(images)
    modalities = modalities_of(list(image_files.values()), modality)
    return build_dataset(home.name or "folder", cases, names, None, modalities, Path(images), errors)


def _files(pattern: str, key: str) -> dict[str, Path]:
    if "*" not in pattern and Path(pattern).is_dir():
        return in_folder(Path(pattern), key)
    if "*" not in pattern:
        raise ValueError(f"{key}={pattern}: needs a `*` in the place of the case id, or a folder of images")
    if "**" in pattern:
        raise ValueError(f"{key}={pattern}: `**` is not supported, a `*` matches a part of one name")
    matcher = re.compile("([^/]*)".join(re.escape(part) for part in pattern.split("*")))
    files: dict[str, Path] = {}
    for name in sorted(glob("*".join(escape(part) for part in pattern.split("*")))):  # noqa: PTH207 - may be absolute
        if match := matcher.fullmatch(name):
            case = "_".join(dict.fromkeys(match.groups()))
            if case in files:
                raise ValueError(f"{key}={pattern}: {files[case]} and {name} would both be case {case}")
            files[case] = Path(name)
    if not files:
        raise ValueError(f"{key}={pattern}: no file matches")
    return files


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
            "renumber them, or name every number in data.class_names"
        )
    return ("background", *(str(value) for value in range(1, max(highest, 1) + 1)))
