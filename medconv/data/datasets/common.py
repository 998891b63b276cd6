"""TODO."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.data.case import Case, Dataset
from medconv.data.io import raster
from medconv.data.io.images import num_channels, stem
from medconv.targets.parse import declared
from medconv.targets.segmentation import SegmentationTargets


def modalities_of(files: Sequence[Path], modality: str) -> tuple[str, ...]:
    """One per channel of the first file that can be read: colours of pictures, else as many as the file
    has.
    """
    for path in files:
        try:
            count = num_channels(path)
        except ValueError:  # which `check` will say of its case
            continue
        return raster.CHANNELS[count] if raster.is_picture(path) else (modality,) * count
    return (modality,)


def ids_of(files: Sequence[Path], root: Path, source: Path) -> list[str]:
    """An id for each file: its stem, or where stems repeat its path from `root`. Raises: ValueError: a
    file twice.
    """
    ids = [stem(path) for path in files]
    if len(set(ids)) < len(ids):
        ids = ["_".join((*_below(path, root), stem(path))) for path in files]
    if len(set(ids)) < len(ids):
        counts = Counter(ids)
        twice = [str(path) for path, case in zip(files, ids, strict=True) if counts[case] > 1]
        raise ValueError(
            f"{source}: images that would be one case: {', '.join(twice[:6])}; expected one of each name"
        )
    return ids


def _below(path: Path, root: Path) -> tuple[str, ...]:
    folder = path.parent.relative_to(root) if path.is_relative_to(root) else path.parent
    return tuple(part for part in folder.parts if part not in ("/", ".", ".."))


def class_names_of(root: Path) -> tuple[str, ...]:
    """The class names in a folder's `dataset.json`, background first."""
    return _labels(_read_meta(root), root / "dataset.json")[0]


def targets_of(root: Path) -> SegmentationTargets:
    """What the label values in a folder's `dataset.json` stand for: classes or regions, and what to
    ignore.
    """
    return _labels(_read_meta(root), root / "dataset.json")[1]


def _dataset(
    name: str,
    cases: list[Case],
    class_names: tuple[str, ...],
    targets: SegmentationTargets | None,
    modalities: tuple[str, ...],
    path: Path,
    faults: Mapping[str, str] | None = None,
) -> Dataset:
    ids = [case.id for case in cases]
    twice = sorted({case for case in ids if ids.count(case) > 1})
    if twice:
        raise ValueError(f"{path}: case ids that occur more than once: {', '.join(twice[:20])}")
    ordered = tuple(sorted(cases, key=lambda case: case.id))
    return Dataset(name, ordered, class_names, modalities, faults or {}, targets)


def _read_meta(root: str | Path | None) -> dict[str, Any]:
    if root is None or str(root) == "":
        raise ValueError(
            "data.root is not set: give the folder that holds dataset.json, such as data.root=/data/Task04"
        )
    folder = Path(root)
    if not folder.is_dir():
        raise ValueError(f"data.root={folder}: no such folder")
    path = folder / "dataset.json"
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:5]
        raise ValueError(
            f"{folder}: no dataset.json there; the folder holds {', '.join(found) if found else 'nothing'}"
        )
    meta = _read_json(path)
    if not isinstance(meta, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(meta).__name__}")
    return meta


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def _numbered(names: Any, path: Path, key: str) -> tuple[str, ...]:
    """{"0": "T1", "1": "FLAIR"} to ("T1", "FLAIR")."""
    if not isinstance(names, dict) or sorted(names) != sorted(str(i) for i in range(len(names))) or not names:
        raise ValueError(
            f'{path}: key `{key}` must map channel numbers to names, such as {{"0": "MRI"}}, got {names!r}'
        )
    return tuple(str(names[str(i)]) for i in range(len(names)))


def _labels(meta: Mapping[str, Any], path: Path) -> tuple[tuple[str, ...], SegmentationTargets]:
    return declared(meta.get("labels"), meta.get("regions_class_order"), path)
