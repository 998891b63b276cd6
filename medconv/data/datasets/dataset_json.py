"""Folders that a `dataset.json` describes.

`data=msd`: Medical Segmentation Decathlon; `data=nnunet`: raw folders of nnU-Net, version 2 and 1;
`data=auto` recognises them.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, folder_of, read_json
from medconv.data.io.images import stem, suffixes
from medconv.data.io.raster import CHANNELS, channels, is_picture
from medconv.data.preprocessing.normalisation import BY_CHANNEL_NAME
from medconv.targets.parse import parse_labels
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.errors import ArgumentError
from medconv.utils.logging import some

log = logging.getLogger(__name__)

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
_MAX_NAMED = 20  # cases named in one line


def auto(root: str | Path) -> Dataset:
    """Read a Medical Segmentation Decathlon or nnU-Net raw folder; its `dataset.json` tells which.

    Raises:
        ValueError: neither of the two, or as `msd` and `nnunet`.
    """
    meta = read_dataset_json(root)
    if "channel_names" in meta or has_channel_files(Path(root), meta):
        return nnunet(root)
    if "training" in meta or "modality" in meta:
        return msd(root)
    raise ValueError(
        f"{Path(root) / 'dataset.json'}: neither a Decathlon file (keys `modality`, `training`) nor an "
        f"nnU-Net v2 one (keys `channel_names`, `file_ending`); it has {sorted(meta)}"
    )


def msd(root: str | Path) -> Dataset:
    """Medical Segmentation Decathlon: `dataset.json` lists image and label of every training case.

    Raises:
        ValueError: no such folder, or an invalid `dataset.json`.
    """
    meta = read_dataset_json(root)  # also refuses a root that is not set
    folder = Path(root)
    path = folder / "dataset.json"
    if "training" not in meta and "channel_names" in meta:
        raise ValueError(
            f"{path}: has the keys of nnU-Net v2 (`channel_names`), not of the Decathlon; take data=nnunet"
        )
    entries = meta.get("training")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: key `training` must list at least one case, got {entries!r}")
    if has_channel_files(folder, meta):
        raise ValueError(
            f"{path}: its images have names of nnU-Net (CASE_0000.nii.gz), not of the Decathlon; "
            "take data=nnunet"
        )
    cases = []
    for entry in entries:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("image", "label")
        ):
            raise ValueError(
                f"{path}: every entry of `training` needs the keys `image` and `label`, two paths"
            )
        image = _below(folder, entry["image"])
        cases.append(Case(id=stem(image), images=(image,), label=_below(folder, entry["label"])))
    return _dataset(meta, path, cases, names_by_number(meta.get("modality"), path, "modality"), {})


def nnunet(root: str | Path) -> Dataset:
    """nnU-Net raw: `imagesTr/CASE_0000.nii.gz` per channel, `labelsTr/CASE.nii.gz`, regions, `ignore`; or the
    cases that the key `dataset` lists, wherever their files are.

    Of version 2, and of version 1, whose `dataset.json` is that of the Decathlon.

    Raises:
        ValueError: no such folder, an invalid `dataset.json`, or no images. A missing channel, image or label
            becomes an error of its case.
    """
    meta = read_dataset_json(root)  # also refuses a root that is not set
    folder = Path(root)
    path = folder / "dataset.json"
    modalities = _modalities(folder, meta)
    errors: dict[str, str] = {}
    if "dataset" in meta:
        cases = _listed_cases(meta["dataset"], path, len(modalities))
    else:
        cases, errors = _cases_in_folders(folder, meta, len(modalities))
    return _dataset(meta, path, cases, _colours(cases, modalities), errors)


def _colours(cases: Sequence[Case], names: tuple[str, ...]) -> tuple[str, ...]:
    """The channels of pictures that hold all of them, as other layouts call them, whatever their names are;
    those of volumes stay, and so do nnU-Net's words for a normalisation.
    """
    are_pictures = bool(cases) and all(len(case.images) == 1 and is_picture(case.images[0]) for case in cases)
    if not are_pictures or any(name.strip().lower() in BY_CHANNEL_NAME for name in names):
        return names
    return CHANNELS.get(len(names), names)


def _dataset(
    meta: Mapping[str, Any],
    path: Path,
    cases: list[Case],
    modalities: tuple[str, ...],
    errors: Mapping[str, str],
) -> Dataset:
    """With the labels of a `dataset.json`. Args: path: of that file; errors: what is wrong with a case."""
    class_names, targets = parse_labels(meta, path)
    warn_of_count(meta, cases, path)
    return build_dataset(
        name=str(meta.get("name", path.parent.name)),
        cases=cases,
        class_names=class_names,
        targets=targets,
        modalities=modalities,
        path=path,
        errors=errors,
    )


def _listed_cases(entries: Any, path: Path, num_channels: int) -> list[Case]:
    """The cases of the key `dataset`: id to `images`, a path for each channel, and `label`.

    Raises: ValueError: another form.
    """
    expected = f"{{images: [paths of {num_channels} channels], label: path}}"
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{path}: key `dataset` must map case ids to {expected}, got {entries!r:.80}")
    cases = []
    for case_id, entry in entries.items():
        images = entry.get("images") if isinstance(entry, dict) else None
        texts = [*images, entry.get("label")] if isinstance(images, list) else []
        is_valid = len(texts) > 1 and all(isinstance(text, str) for text in texts)
        *files, label = (_below(path.parent, text) for text in texts) if is_valid else (None,)
        if label is None or len(files) != num_files(files[0], num_channels):
            raise ValueError(f"{path}: case {case_id} of key `dataset` must be {expected}, got {entry!r:.80}")
        cases.append(Case(case_id, tuple(files), label))
    return cases


def _cases_in_folders(
    folder: Path, meta: Mapping[str, Any], num_channels: int
) -> tuple[list[Case], dict[str, str]]:
    """The cases of `imagesTr` and `labelsTr`, and what is wrong with some."""
    path = folder / "dataset.json"
    ending = str(meta.get("file_ending", ".nii.gz"))
    if ending not in suffixes():
        raise ValueError(f"{path}: file_ending must be one of {suffixes()}, got {ending!r}")
    images = _images(folder / "imagesTr", ending)
    channels_by_case = _channels_by_case(images)
    count = num_files(images[0], num_channels)
    errors: dict[str, str] = {}
    for case_id, numbers in _invalid_channels(channels_by_case, count).items():
        expected = f"expected channels 0 to {count - 1} of every case"
        errors[case_id] = f"{folder / 'imagesTr'}: {expected}, found {numbers}"
    labels = {stem(label): label for label in _with_ending(folder / "labelsTr", ending)}
    cases = []
    for case_id, files in _ordered_files(channels_by_case).items():
        label = labels.pop(case_id, folder / "labelsTr" / f"{case_id}{ending}")
        missing_channels = missing_numbers(files, count)
        cases.append(Case(case_id, files, label, missing_channels=missing_channels))
    for case_id, label in labels.items():
        errors[case_id] = f"{label}: no image {case_id}_0000{ending} in {folder / 'imagesTr'}"
        cases.append(Case(case_id, (), label))
    return cases, errors


def channel_of(path: Path, num_channels: int) -> int | None:
    """The channel of a file `CASE_0000`, `CASE_0001`, ...; None: its name says none of these channels."""
    match = _CHANNEL.match(stem(path))
    number = int(match["channel"]) if match else num_channels
    return number if number < num_channels else None


def missing_numbers(files: Sequence[Path], num_channels: int) -> tuple[int, ...]:
    """The channels that no file has, `CASE_0000`, `CASE_0001`, ...; empty if there are too many files."""
    numbers = {channel_of(path, num_channels) for path in files}
    return () if None in numbers else tuple(sorted(set(range(num_channels)).difference(numbers)))


def _below(folder: Path, text: str) -> Path:
    """A path of a `dataset.json`, which may have been written on Windows."""
    return folder / text.replace("\\", "/")


def has_channel_files(folder: Path, meta: Mapping[str, Any]) -> bool:
    """Whether a Decathlon's `dataset.json` is of nnU-Net version 1: it lists CASE.nii.gz, the file is
    CASE_0000.nii.gz.
    """
    entries = meta.get("training")
    first = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(first, dict) or not isinstance(first.get("image"), str):
        return False
    listed = _below(folder, first["image"])
    suffix = listed.name.removeprefix(stem(listed))
    return not listed.exists() and listed.with_name(f"{stem(listed)}_0000{suffix}").exists()


def _modalities(folder: Path, meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Raises: ValueError: not of nnU-Net, or no names of the channels."""
    path = folder / "dataset.json"
    key = "channel_names"
    if key not in meta and "modality" in meta:
        if not has_channel_files(folder, meta):
            raise ValueError(
                f"{path}: has the keys of the Decathlon (`modality`), not of nnU-Net v2; take data=msd"
            )
        key = "modality"
    return names_by_number(meta.get(key), path, key)


def num_files(image: Path, num_channels: int) -> int:
    """Files of a case: one per channel, or a single picture that holds all its colours."""
    if not is_picture(image) or num_channels == 1:
        return num_channels
    try:
        return 1 if channels(image) == num_channels else num_channels
    except ValueError:  # the check reports it with its case
        return num_channels


def _images(folder: Path, ending: str) -> list[Path]:
    """Raises: ValueError: no file with this ending in the folder."""
    images = _with_ending(folder, ending)
    if not images:
        raise ValueError(
            f"{folder}: no *{ending} file there; an nnU-Net dataset keeps CASE_0000{ending} in it"
        )
    others = {path.name for path in folder.glob("[!.]*")} - {path.name for path in images}
    if others:
        log.warning("%s: not read, as file_ending is %s: %s", folder, ending, some(sorted(others)))
    return images


def _with_ending(folder: Path, ending: str) -> list[Path]:
    """The files of a folder with an ending, but for hidden ones."""
    return sorted(path for path in folder.glob(f"*{ending}") if not path.name.startswith("."))


def group_channels(files: Sequence[Path], num_channels: int) -> dict[str, tuple[Path, ...]]:
    """Case id to its channel files, of which some may be missing, from names `CASE_0000`, `CASE_0001`, ...

    Raises:
        ValueError: names each case with further channels.
    """
    channels_by_case = _channels_by_case(files)
    numbers_by_case = {case_id: sorted(channels) for case_id, channels in channels_by_case.items()}
    further = [
        f"{case_id} has {numbers}"
        for case_id, numbers in numbers_by_case.items()
        if numbers[-1] >= num_channels
    ]
    if further:
        named = some(further, _MAX_NAMED)
        raise ValueError(
            f"{files[0].parent}: a case has channels 0 to {num_channels - 1}, but {named}; "
            "if these numbers count cases, give a list of files (.txt)"
        )
    return _ordered_files(channels_by_case)


def _channels_by_case(files: Sequence[Path]) -> dict[str, dict[int, Path]]:
    """Case id to its files by channel number.

    Raises: ValueError: a name without a channel number.
    """
    channels: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in files:
        match = _CHANNEL.match(stem(path))
        if match is None:
            raise ValueError(f"{path}: expected a name that ends in a channel number, as CASE_0000.nii.gz")
        channels[match["case"]][int(match["channel"])] = path
    return channels


def _invalid_channels(
    channels_by_case: dict[str, dict[int, Path]], num_channels: int
) -> dict[str, list[int]]:
    """The channel numbers of cases with missing or extra channels."""
    expected = list(range(num_channels))
    numbers_by_case = {case_id: sorted(files) for case_id, files in channels_by_case.items()}
    return {case_id: numbers for case_id, numbers in numbers_by_case.items() if numbers != expected}


def _ordered_files(channels_by_case: dict[str, dict[int, Path]]) -> dict[str, tuple[Path, ...]]:
    """Case id to its files in the order of the channels."""
    ordered = {}
    for case_id, files in channels_by_case.items():
        ordered[case_id] = tuple(files[number] for number in sorted(files))
    return ordered


def targets_of(root: Path) -> SegmentationTargets:
    """The targets in a folder's `dataset.json`: classes or regions, and the value to ignore.

    Raises:
        ValueError: as `read_dataset_json`, or invalid labels.
    """
    meta = read_dataset_json(root)
    _, targets = parse_labels(meta, root / "dataset.json")
    return targets


def read_dataset_json(root: str | Path | None) -> dict[str, Any]:
    """The content of a folder's `dataset.json`.

    Raises:
        ValueError: no folder, no dataset.json in it, or not a JSON object.
    """
    folder = folder_of(root, "dataset.json", "/data/Task04")
    path = folder / "dataset.json"
    if not path.is_file():
        names = sorted(entry.name for entry in folder.iterdir())
        content = ", ".join(names[:5]) or "nothing"
        raise ArgumentError(
            "root",
            f"={folder}: no dataset.json there; the folder holds {content}; without one, data=image_mask "
            "(pictures) and data=folder (other files) take data.images and data.labels",
        )
    meta = read_json(path)
    if not isinstance(meta, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(meta).__name__}")
    return meta


def warn_of_count(meta: Mapping[str, Any], cases: Sequence[Case], path: Path) -> None:
    """Warn if `numTraining` of a `dataset.json` is not the number of cases."""
    declared = meta.get("numTraining")
    if declared is not None and declared != len(cases):
        log.warning("%s: numTraining is %s, but there are %d cases", path, declared, len(cases))


def names_by_number(names: Any, path: Path, key: str) -> tuple[str, ...]:
    """{"0": "T1", "1": "FLAIR"} to ("T1", "FLAIR").

    Raises:
        ValueError: not a mapping of the numbers from 0 to names.
    """
    numbers = [str(number) for number in range(len(names))] if isinstance(names, dict) else []
    if not numbers or sorted(names) != sorted(numbers):
        raise ValueError(
            f'{path}: key `{key}` must map channel numbers to names, such as {{"0": "MRI"}}, got {names!r}'
        )
    return tuple(str(names[number]) for number in numbers)
