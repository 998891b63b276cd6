"""From a folder on disk to a list of cases: one function per layout, all returning a `Dataset`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Case, Dataset
from medconv.data.files import VOLUMES, in_folder, read_label, stem
from medconv.data.labels import declared
from medconv.data.phantom import write_phantom
from medconv.targets import Targets

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")


def auto(root: str | Path) -> Dataset:
    """Tell Medical Segmentation Decathlon and nnU-Net v2 raw folders apart by their `dataset.json`."""
    meta = _read_meta(root)
    if "channel_names" in meta:
        return nnunet(root)
    if "training" in meta or "modality" in meta:
        return msd(root)
    raise ValueError(
        f"{Path(root) / 'dataset.json'}: neither a Decathlon file (keys `modality`, `training`) nor an nnU-Net v2 one "
        f"(keys `channel_names`, `file_ending`); it has {sorted(meta)}"
    )


def msd(root: str | Path) -> Dataset:
    """Medical Segmentation Decathlon: `dataset.json` lists image and label of every training case."""
    meta, root = _read_meta(root), Path(root)  # in this order: root may not be set
    path = root / "dataset.json"
    entries = meta.get("training")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: key `training` must list at least one case, got {entries!r}")
    if not all(isinstance(e, dict) and {"image", "label"} <= set(e) for e in entries):
        raise ValueError(f"{path}: every entry of `training` needs the keys `image` and `label`")
    cases = [Case(stem(Path(e["image"])), (root / e["image"],), root / e["label"]) for e in entries]
    modalities = _numbered(meta.get("modality"), path, "modality")
    return _dataset(str(meta.get("name", root.name)), cases, *_labels(meta, path), modalities, path)


def nnunet(root: str | Path) -> Dataset:
    """nnU-Net v2 raw: `imagesTr/CASE_0000.nii.gz` per channel, `labelsTr/CASE.nii.gz`; regions and `ignore` as there."""
    meta, root = _read_meta(root), Path(root)  # in this order: root may not be set
    path = root / "dataset.json"
    modalities = _numbered(meta.get("channel_names"), path, "channel_names")
    ending = str(meta.get("file_ending", ".nii.gz"))
    if ending not in VOLUMES:
        raise ValueError(f"{path}: file_ending must be one of {VOLUMES}, got {ending!r}")
    images = sorted(p for p in (root / "imagesTr").glob(f"*{ending}") if not p.name.startswith("."))
    if not images:
        raise ValueError(f"{root / 'imagesTr'}: no *{ending} file there; an nnU-Net dataset keeps CASE_0000{ending} in it")
    names, targets = _labels(meta, path)
    groups, wrong = _grouped(images, len(modalities))
    expected = f"{root / 'imagesTr'}: expected channels 0 to {len(modalities) - 1} of every case"
    faults = {case: f"{expected}, found {found}" for case, found in wrong.items()}
    cases = [Case(case, files, root / "labelsTr" / f"{case}{ending}") for case, files in groups.items()]
    return _dataset(str(meta.get("name", root.name)), cases, names, targets, modalities, path, faults)


def phantom(root: str | Path, spatial_dims: int, num_cases: int, seed: int = 0) -> Dataset:
    """The phantom dataset, written first where it is not there."""
    return msd(write_phantom(Path(root), spatial_dims=spatial_dims, num_cases=num_cases, seed=seed))


def folder(images: str, labels: str, class_names: Sequence[str] | None = None, modality: str = "MRI") -> Dataset:
    """Pairs from two glob patterns; what the `*` of each stands for is the case's id and must be the same in both. A folder
    that matches is a DICOM series. In the place of a pattern a folder of images, which are called by their stems.

    Args: class_names: background first; None numbers as many classes as the first 20 labels show.
    """
    from medconv.data.listing import modalities_of  # which is made of this one

    if not images or not labels:
        raise ValueError("data=folder needs both data.images and data.labels, as glob patterns such as 'scans/*_t1.nii.gz'")
    image_files, label_files = _files(images, "data.images"), _files(labels, "data.labels")
    if not set(image_files) & set(label_files):
        stands = f"{', '.join(list(image_files)[:3])} in images, for {', '.join(list(label_files)[:3])} in labels"
        raise ValueError(f"data=folder: no case has both an image and a label; the `*` stands for {stands}")
    faults = {case: f"{image_files[case]}: no label matches {labels}" for case in set(image_files) - set(label_files)}
    faults |= {case: f"{label_files[case]}: no image matches {images}" for case in set(label_files) - set(image_files)}
    cases = [
        Case(case, (image_files[case],) if case in image_files else (), label_files.get(case))
        for case in {**image_files, **label_files}
    ]
    names = tuple(class_names) if class_names else _names_in(list(label_files.values())[:20])
    home = Path(images) if "*" not in images else Path(images.partition("*")[0] + "x").parent  # what stands before any `*`
    modalities = modalities_of(list(image_files.values()), modality)
    return _dataset(home.name or "folder", cases, names, None, modalities, Path(images), faults)


def group_channels(files: Sequence[Path], num_channels: int) -> dict[str, tuple[Path, ...]]:
    """Case id to its channel files, from names `CASE_0000`, `CASE_0001`, ...

    Raises: ValueError: a case that lacks a channel or has one too many; each is named.
    """
    groups, wrong = _grouped(files, num_channels)
    if wrong:
        named = "; ".join(f"{case} has {found}" for case, found in list(wrong.items())[:20])
        raise ValueError(f"{files[0].parent}: every case needs channels 0 to {num_channels - 1}: {named}")
    return groups


def _grouped(files: Sequence[Path], num_channels: int) -> tuple[dict[str, tuple[Path, ...]], dict[str, list[int]]]:
    """Case id to its channel files; and the channels that were found, of those cases that have others than they need."""
    groups: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in files:
        match = _CHANNEL.match(stem(path))
        if match is None:
            raise ValueError(f"{path}: expected a name that ends in a channel number, such as CASE_0000.nii.gz")
        groups[match["case"]][int(match["channel"])] = path
    wanted = list(range(num_channels))
    wrong = {case: sorted(found) for case, found in groups.items() if sorted(found) != wanted}
    return {case: tuple(path for _, path in sorted(found.items())) for case, found in groups.items()}, wrong


def class_names_of(root: Path) -> tuple[str, ...]:
    """The class names in a folder's `dataset.json`, background first."""
    return _labels(_read_meta(root), root / "dataset.json")[0]


def targets_of(root: Path) -> Targets:
    """What the label values in a folder's `dataset.json` stand for: classes or regions, and what to ignore."""
    return _labels(_read_meta(root), root / "dataset.json")[1]


def split(
    cases: Sequence[Case], fold: int | str, num_folds: int, splits: Path | None = None
) -> tuple[list[Case], list[Case]]:
    """Training and validation cases of a fold; fold `all` trains on every case and validates on none.

    Sorted case ids, shuffled once with seed 12345 and cut into `num_folds`: the split of nnU-Net, so that fold k
    means the same cases there and here. A group takes the place of its cases' ids.
    Args: splits: a `splits_final.json` (list of {"train": ids, "val": ids}) that takes the place of the rule.
    """
    ordered = sorted(cases, key=lambda case: case.id)
    units = sorted({case.group or case.id for case in ordered})
    if fold == "all":
        return ordered, []
    number = int(fold) if str(fold).isdecimal() else -1
    if splits is not None:
        return _from_file(ordered, number, splits)
    if not 2 <= num_folds <= len(units):
        what = "groups" if any(case.group for case in ordered) else "cases"
        raise ValueError(f"data.num_folds must lie between 2 and the number of {what}, {len(units)}, got {num_folds}")
    if not 0 <= number < num_folds:
        raise ValueError(f"data.fold must be `all` or lie in 0..{num_folds - 1}, got {fold}")
    shuffled = np.arange(len(units))
    np.random.RandomState(12345).shuffle(shuffled)
    held_out = {units[i] for i in np.array_split(shuffled, num_folds)[number]}
    return (
        [case for case in ordered if (case.group or case.id) not in held_out],
        [case for case in ordered if (case.group or case.id) in held_out],
    )


def _from_file(cases: Sequence[Case], fold: int, path: Path) -> tuple[list[Case], list[Case]]:
    folds = _read_json(path)
    if not isinstance(folds, list) or not all(isinstance(f, dict) and {"train", "val"} <= set(f) for f in folds):
        raise ValueError(f"{path}: expected a list of folds, each with the keys `train` and `val`")
    if not 0 <= fold < len(folds):
        raise ValueError(f"{path}: data.fold must be `all` or lie in 0..{len(folds) - 1}, got {fold}")
    by_id = {case.id: case for case in cases}
    train, val = folds[fold]["train"], folds[fold]["val"]
    unknown = sorted({*train, *val} - set(by_id))
    if unknown or set(train) & set(val):
        raise ValueError(f"{path}: unknown cases {unknown[:20]}, cases in both parts {sorted(set(train) & set(val))[:20]}")
    return [by_id[case] for case in train], [by_id[case] for case in val]


def _dataset(
    name: str,
    cases: list[Case],
    class_names: tuple[str, ...],
    targets: Targets | None,
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
        raise ValueError("data.root is not set: give the folder that holds dataset.json, such as data.root=/data/Task04")
    folder = Path(root)
    if not folder.is_dir():
        raise ValueError(f"data.root={folder}: no such folder")
    path = folder / "dataset.json"
    if not path.is_file():
        found = sorted(p.name for p in folder.iterdir())[:5]
        raise ValueError(f"{folder}: no dataset.json there; the folder holds {', '.join(found) if found else 'nothing'}")
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
        raise ValueError(f'{path}: key `{key}` must map channel numbers to names, such as {{"0": "MRI"}}, got {names!r}')
    return tuple(str(names[str(i)]) for i in range(len(names)))


def _labels(meta: Mapping[str, Any], path: Path) -> tuple[tuple[str, ...], Targets]:
    return declared(meta.get("labels"), meta.get("regions_class_order"), path)


def _files(pattern: str, key: str) -> dict[str, Path]:
    return in_folder(Path(pattern), key) if "*" not in pattern and Path(pattern).is_dir() else _by_wildcard(pattern, key)


def _by_wildcard(pattern: str, key: str) -> dict[str, Path]:
    if "*" not in pattern:
        raise ValueError(f"{key}={pattern}: needs a `*` where the case's name stands, or a folder of images")
    if "**" in pattern:
        raise ValueError(f"{key}={pattern}: `**` is not supported, one `*` stands for one part of a name")
    matcher = re.compile("([^/]*)".join(re.escape(part) for part in pattern.split("*")))
    found: dict[str, Path] = {}
    for name in sorted(glob("*".join(escape(part) for part in pattern.split("*")))):  # noqa: PTH207 - may be absolute
        match = matcher.fullmatch(name)
        if match is None:
            continue
        case = "_".join(dict.fromkeys(match.groups()))
        if case in found:
            raise ValueError(f"{key}={pattern}: {found[case]} and {name} would both be case {case}")
        found[case] = Path(name)
    if not found:
        raise ValueError(f"{key}={pattern}: no file matches")
    return found


def _names_in(labels: Sequence[Path]) -> tuple[str, ...]:
    values, fault = {0}, ""
    for path in labels:
        try:
            values |= set(np.unique(read_label(path)[0]).tolist())
        except ValueError as error:  # which `check` will say of its case
            fault = str(error)
    highest = max(values)
    if fault and not highest:
        raise ValueError(f"data.class_names is not set, and no label tells how many classes there are ({fault})")
    if len(values) <= highest // 2:
        raise ValueError(
            f"data=folder: labels hold {sorted(values)[:8]}, expected 0, 1, 2, ... for the classes; number them so, or give "
            "each number a name by data.class_names"
        )
    return ("background", *(str(value) for value in range(1, max(highest, 1) + 1)))
