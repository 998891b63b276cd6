"""`data=landmarks`: images, and a file of points for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from medconv.data.case import Dataset
from medconv.data.datasets.folder import pairs_of
from medconv.data.datasets.patterns import is_pattern
from medconv.features.landmarks.points import pattern_of, read_points
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
        labels: a pattern or folder of files that `read_points` takes.
        names: of the points; None: all that files have.
        sigma_mm, threshold: as of `LandmarkTargets`.
        modality: of all channels without names.
        root: folder in which relative patterns begin; None: the current one.
    Raises:
        ValueError: no such folder, no pairs, no points, or a number out of range. A missing image or file
            becomes an error of its case.
    """
    folder = Path(root or "") / (labels or "")
    if labels and not is_pattern(labels) and folder.is_dir():
        labels = str(Path(labels) / pattern_of(folder, "labels"))
    pairs = pairs_of(images, labels, modality, root)
    given = list(names) if names is not None else _names(list(pairs.labels.values()))
    if not given:
        raise ArgumentError("labels", f"={labels}: no file there has a point")
    targets = LandmarkTargets.from_fields({"names": given, "sigma_mm": sigma_mm, "threshold": threshold})
    return pairs.dataset(targets, "landmarks")


def _names(files: Sequence[Path]) -> list[str]:
    """Names of the points of all files that can be read, sorted; others are errors of their case later."""
    names: set[str] = set()
    for path in files:
        try:
            names |= read_points(path).keys()
        except ValueError:
            continue
    return sorted(names)
