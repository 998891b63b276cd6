"""What layouts of pictures share: pairs of pictures and masks, the channels of files, and ids for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medconv.data import picture
from medconv.data.case import Dataset
from medconv.data.files import num_channels, stem
from medconv.data.layout import folder


def image_mask(images: str, labels: str, class_names: Sequence[str] | None = None) -> Dataset:
    """Pictures and their masks: two glob patterns as for `folder`, or two folders in which a pair has one stem.

    Args: class_names: background first; None numbers as many classes as the first 20 masks show.
    """
    if not images or not labels:
        raise ValueError("data=image_mask needs both data.images and data.labels, as folders or as glob patterns")
    found = folder(images, labels, class_names)
    files = [case.images[0] for case in found.cases if case.images]
    return replace(found, modalities=modalities_of(files, "MRI"))


def modalities_of(files: Sequence[Path], modality: str) -> tuple[str, ...]:
    """One per channel of the first file that can be read: colours of pictures, else as many as the file has."""
    for path in files:
        try:
            count = num_channels(path)
        except ValueError:  # which `check` will say of its case
            continue
        return picture.CHANNELS[count] if picture.is_picture(path) else (modality,) * count
    return (modality,)


def ids_of(files: Sequence[Path], root: Path, source: Path) -> list[str]:
    """An id for each file: its stem, or where stems repeat its path from `root`. Raises: ValueError: a file twice."""
    ids = [stem(path) for path in files]
    if len(set(ids)) < len(ids):
        ids = ["_".join((*_below(path, root), stem(path))) for path in files]
    if len(set(ids)) < len(ids):
        counts = Counter(ids)
        twice = [str(path) for path, case in zip(files, ids, strict=True) if counts[case] > 1]
        raise ValueError(f"{source}: images that would be one case: {', '.join(twice[:6])}; expected one of each name")
    return ids


def _below(path: Path, root: Path) -> tuple[str, ...]:
    folder = path.parent.relative_to(root) if path.is_relative_to(root) else path.parent
    return tuple(part for part in folder.parts if part not in ("/", ".", ".."))
