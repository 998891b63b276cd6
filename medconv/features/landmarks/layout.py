"""`data=landmarks`: images, and a file of points for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from medconv.data.case import Dataset
from medconv.data.datasets.folder import pairs_of
from medconv.features.landmarks.points import point_files, read_points, suffix_of
from medconv.features.landmarks.targets import LandmarkTargets
from medconv.utils.errors import ArgumentError


def landmarks(
    images: str | Mapping[str, str],
    labels: str,
    names: Sequence[str] | None = None,
    sigma_mm: float = 3.0,
    threshold: float = 0.2,
    modality: str = "MRI",
    root: str | None = None,
) -> Dataset:
    """Pairs of an image and a file of points.

    Args:
        images: a pattern or folder, or one for each channel by its name, such as {t1: ..., t2: ...}.
        labels: a pattern or folder of files that `read_points` takes, or a table of all cases.
        names: of the points; None: all that files have.
        sigma_mm, threshold: as of `LandmarkTargets`.
        modality: of all channels without names.
        root: folder in which relative patterns begin; None: the current one.
    Raises:
        ValueError: no such folder, no pairs, no points, or a number out of range. A missing image or file
            becomes an error of its case.
    """
    pairs = pairs_of(images, labels, modality, root, find_labels=point_files)
    given = list(names) if names is not None else _names(pairs.labels)
    if not given:
        raise ArgumentError("labels", f"={labels}: no file there has a point")
    suffix = suffix_of(next(iter(pairs.labels.values())))
    settings = {"names": given, "sigma_mm": sigma_mm, "threshold": threshold, "suffix": suffix}
    return pairs.dataset(LandmarkTargets.from_fields(settings), "landmarks")


def _names(files: Mapping[str, Path]) -> list[str]:
    """Names of the points of all files that can be read, sorted; others are errors of their case later."""
    names: set[str] = set()
    for case, path in files.items():
        try:
            names |= read_points(path, case).keys()
        except ValueError:
            continue
    return sorted(names)
