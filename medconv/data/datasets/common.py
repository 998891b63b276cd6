"""What the dataset layouts share: case ids, the channels of files, and reading of JSON."""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medconv.data.case import Case, Dataset
from medconv.data.io import raster
from medconv.data.io.images import num_channels, stem
from medconv.data.io.label_values import (
    Names,
    check_one_numbering,
    check_several_values,
    names_of,
    relabel_by_name,
    relabel_of,
)
from medconv.targets.label_map import LabelMapTargets
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import Argument, ArgumentError, explained
from medconv.utils.logging import some

# Of a case id; most file systems allow names of 255 bytes, and temporary files have longer ones
_MAX_ID_BYTES = 200
_MAX_BYTES = 256 * 2**20  # of a JSON file; a dataset.json of 100,000 cases has some 20 MB
_NOT_JSON = (ValueError, RecursionError)  # with numbers of thousands of digits, and nested lists

log = logging.getLogger(__name__)


def folder_of(root: str | Path | None, content: str, example: str) -> Path:
    """The folder of a dataset.

    Args:
        content: what it holds, for messages.
        example: such a path.
    Raises:
        ArgumentError: not set, or no folder.
    """
    if root is None or str(root) == "":
        raise ArgumentError(
            "root",
            f" is not set: give the folder that holds {content}, such as ",
            Argument("root"),
            f"={example}",
        )
    folder = Path(root)
    if folder.is_file():
        raise ArgumentError("root", f"={folder}: is a file; give its folder, {folder.parent}")
    if not folder.is_dir():
        raise ArgumentError("root", f"={folder}: no such folder")
    return folder


def modalities_of(files: Sequence[Path], modality: str) -> tuple[str, ...]:
    """One name per channel of the first readable file.

    Args:
        files: images, each with all channels.
        modality: name of the channels of volumes; those of pictures are colours.
    """
    for path in files:
        try:
            count = num_channels(path)
        except ValueError:  # `check` reports it with its case
            continue
        if raster.is_picture(path):
            return raster.CHANNELS[count]
        return (modality,) * count
    return (modality,)


def ids_of(files: Sequence[Path], root: Path, source: Path) -> list[str]:
    """A case id for each file: its stem, or its path below `root` if stems repeat.

    Args:
        root: folder that does not belong to the ids.
        source: table or folder that names the files, for messages.

    Raises:
        ValueError: two files with one id.
    """
    ids = [stem(path) for path in files]
    if len(set(ids)) < len(ids):
        ids = ["_".join([*_folder_names(path, root), stem(path)]) for path in files]
    counts = Counter(ids)
    repeated = [str(path) for path, case_id in zip(files, ids, strict=True) if counts[case_id] > 1]
    if repeated:
        twice = [str(path) for path, count in Counter(files).items() if count > 1]
        if twice:
            raise ValueError(f"{source}: listed more than once: {some(twice, 6)}")
        raise ValueError(
            f"{source}: images that would be one case: {some(repeated, 6)}; expected one of each name"
        )
    return ids


def id_error(case_id: str) -> str | None:
    """Why a text cannot be a case id, which names files; None: it can."""
    try:
        size = len(os.fsencode(case_id))
    except UnicodeEncodeError:
        size = 0
    if 0 < size <= _MAX_ID_BYTES and _is_file_name(case_id):
        return None
    if len(case_id) <= _MAX_ID_BYTES:
        description = repr(case_id)
    else:
        description = f"one of {size} bytes, {case_id[:20]!r}..."
    return f"a case id names a file, of at most {_MAX_ID_BYTES} bytes, and cannot be {description}"


def id_errors(cases: Sequence[Case]) -> dict[str, str]:
    """Case id to why it cannot be one, for those that cannot."""
    found = {case.id: id_error(case.id) for case in cases}
    return {
        case.id: f"{case.images[0]}: {found[case.id]}" for case in cases if found[case.id] and case.images
    }


def _is_file_name(name: str) -> bool:
    """Whether a text is one name without folders, not hidden and without control characters."""
    return Path(name).name == name and name[0] != "." and min(name) >= " "


def _folder_names(path: Path, root: Path) -> list[str]:
    """The folders between `root` and a file; all of its folders if it is elsewhere."""
    folder = path.parent.relative_to(root) if path.is_relative_to(root) else path.parent
    return [name for name in folder.parts if name not in ("/", ".", "..")]


def build_dataset(
    name: str,
    cases: list[Case],
    class_names: tuple[str, ...],
    targets: SegmentationTargets | None,
    modalities: tuple[str, ...],
    path: Path,
    errors: Mapping[str, str] | None,
    label_names: Mapping[str, Names] | None = None,
) -> Dataset:
    """A dataset with its cases sorted by id; label files that name their values are matched by name.

    Args:
        cases: in any order.
        path: file or folder that defines the dataset, for messages.
        errors: case id to error; None: no errors.
        label_names: those that label files state, by case; None: they are read here.

    Raises:
        ValueError: an id twice, masks of which some hold 0 and 255 as `relabel_of` has it, or names that
            contradict each other or the classes.
    """
    # Formats of volumes hold label values as they are
    pictures = [case.label for case in cases if case.label is not None and raster.is_picture(case.label)]
    if pictures and len(class_names) > 2:
        check_several_values(pictures, len(class_names))
    elif pictures:
        relabel = relabel_of(pictures)
        cases = [replace(case, relabel=relabel or case.relabel) for case in cases]
    files = {case.id: case.label for case in cases}
    names = names_of(files) if label_names is None else label_names
    if names and (targets is None or isinstance(targets, LabelMapTargets)):
        relabels = relabel_by_name(files, names, class_names, None if targets is None else targets.ignore)
        cases = [replace(case, relabel=relabels.get(case.id, case.relabel)) for case in cases]
    elif names:  # regions are of values, which may have no name of their own
        check_one_numbering(files, names, class_names)
    counts = Counter(case.id for case in cases)
    repeated = sorted(case_id for case_id, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(f"{path}: case ids that occur more than once: {some(repeated, 20)}")
    return Dataset(
        name=name,
        cases=tuple(sorted(cases, key=lambda case: case.id)),
        class_names=class_names,
        modalities=modalities,
        errors={**id_errors(cases), **(errors or {})},
        targets=targets,  # type: ignore[arg-type]
    )


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: not readable, too large, or not JSON.
    """
    with explained(f"{path}: cannot be read", OSError):
        size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{path}: {size / 2**20:.0f} MB, expected JSON of at most {_MAX_BYTES // 2**20} MB")
    with explained(f"{path}: cannot be read", OSError), explained(f"{path}: not valid JSON", *_NOT_JSON):
        return json.loads(path.read_text(encoding="utf-8-sig"))  # some programs write a BOM
