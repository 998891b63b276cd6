"""What the dataset layouts share: dataset.json, case ids, and the channels of files."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.data.case import Case, Dataset
from medconv.data.io import raster
from medconv.data.io.images import num_channels, stem
from medconv.targets import parse
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import explained

_MAX_BYTES = 200  # of a case id; most file systems allow names of 255, and temporary files have longer ones
_NO_JSON = (json.JSONDecodeError, UnicodeDecodeError, RecursionError)


def modalities_of(files: Sequence[Path], modality: str) -> tuple[str, ...]:
    """One name per channel of the first readable file: colours for pictures, else `modality` repeated."""
    for path in files:
        try:
            count = num_channels(path)
        except ValueError:  # `check` reports it with its case
            continue
        return raster.CHANNELS[count] if raster.is_picture(path) else (modality,) * count
    return (modality,)


def ids_of(files: Sequence[Path], root: Path, source: Path) -> list[str]:
    """A case id for each file: its stem, or its path below `root` if stems repeat.

    Raises: ValueError: two files with one id.
    """
    ids = [stem(path) for path in files]
    if len(set(ids)) < len(ids):
        ids = ["_".join((*_below(path, root), stem(path))) for path in files]
    counts = Counter(ids)
    if twice := [str(path) for path, case in zip(files, ids, strict=True) if counts[case] > 1]:
        named = ", ".join(twice[:6])
        raise ValueError(f"{source}: images that would be one case: {named}; expected one of each name")
    return ids


def id_error(case: str) -> str | None:
    """Why a text cannot be a case id, which names files; None: it can."""
    try:
        size = len(os.fsencode(case))
    except UnicodeEncodeError:
        size = 0
    if 0 < size <= _MAX_BYTES and Path(case).name == case and case[0] != "." and min(case) >= " ":
        return None
    shown = repr(case) if len(case) <= _MAX_BYTES else f"one of {size} bytes, {case[:20]!r}..."
    return f"a case id names a file, of at most {_MAX_BYTES} bytes, and cannot be {shown}"


def _below(path: Path, root: Path) -> tuple[str, ...]:
    folder = path.parent.relative_to(root) if path.is_relative_to(root) else path.parent
    return tuple(part for part in folder.parts if part not in ("/", ".", ".."))


def targets_of(root: Path) -> SegmentationTargets:
    """The targets in a folder's `dataset.json`: classes or regions, and the value to ignore."""
    return parse_labels(read_dataset_json(root), root / "dataset.json")[1]


def build_dataset(
    name: str,
    cases: list[Case],
    class_names: tuple[str, ...],
    targets: SegmentationTargets | None,
    modalities: tuple[str, ...],
    path: Path,
    errors: Mapping[str, str] | None = None,
) -> Dataset:
    """A dataset with its cases sorted by id. Raises: ValueError: an id twice."""
    if twice := sorted(case for case, count in Counter(case.id for case in cases).items() if count > 1):
        raise ValueError(f"{path}: case ids that occur more than once: {', '.join(twice[:20])}")
    ordered = tuple(sorted(cases, key=lambda case: case.id))
    return Dataset(name, ordered, class_names, modalities, errors or {}, targets)  # type: ignore[arg-type]


def read_dataset_json(root: str | Path | None) -> dict[str, Any]:
    """Raises: ValueError: no folder, no dataset.json in it, or not a JSON object."""
    if root is None or str(root) == "":
        advice = "give the folder that holds dataset.json, such as data.root=/data/Task04"
        raise ValueError(f"data.root is not set: {advice}")
    folder = Path(root)
    if not folder.is_dir():
        raise ValueError(f"data.root={folder}: no such folder")
    path = folder / "dataset.json"
    if not path.is_file():
        content = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise ValueError(f"{folder}: no dataset.json there; the folder holds {content}")
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(meta).__name__}")
    return meta


def read_json(path: Path) -> Any:
    """Raises: ValueError: not readable, or not JSON."""
    with explained(f"{path}: cannot be read", OSError), explained(f"{path}: not valid JSON", *_NO_JSON):
        return json.loads(path.read_text(encoding="utf-8"))


def names_by_number(names: Any, path: Path, key: str) -> tuple[str, ...]:
    """{"0": "T1", "1": "FLAIR"} to ("T1", "FLAIR")."""
    if not isinstance(names, dict) or sorted(names) != sorted(str(i) for i in range(len(names))) or not names:
        what = 'must map channel numbers to names, such as {"0": "MRI"}'
        raise ValueError(f"{path}: key `{key}` {what}, got {names!r}")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def parse_labels(meta: Mapping[str, Any], path: Path) -> tuple[tuple[str, ...], SegmentationTargets]:
    """Class names and targets from the content of a `dataset.json`."""
    return parse.parse_labels(meta.get("labels"), meta.get("regions_class_order"), path)
