"""`data=nnunet`: nnU-Net v2 raw folders."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, names_by_number, parse_labels, read_dataset_json
from medconv.data.io.images import stem, volume_suffixes

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
_MAX_NAMED = 20  # cases named in one line


def nnunet(root: str | Path) -> Dataset:
    """nnU-Net v2 raw: `imagesTr/CASE_0000.nii.gz` per channel, `labelsTr/CASE.nii.gz`, regions, `ignore`.

    Args:
        root: folder that holds `dataset.json`.

    Raises:
        ValueError: no such folder, an invalid `dataset.json`, or no images. Missing channels become an error
            of their case.
    """
    meta = read_dataset_json(root)  # also refuses a root that is not set
    folder = Path(root)
    path = folder / "dataset.json"
    if "channel_names" not in meta and "modality" in meta:
        raise ValueError(
            f"{path}: has the keys of the Decathlon (`modality`), not of nnU-Net v2; take data=msd"
        )
    modalities = names_by_number(meta.get("channel_names"), path, "channel_names")
    ending = str(meta.get("file_ending", ".nii.gz"))
    if ending not in volume_suffixes():
        raise ValueError(f"{path}: file_ending must be one of {volume_suffixes()}, got {ending!r}")
    images = _images(folder / "imagesTr", ending)
    class_names, targets = parse_labels(meta, path)
    channels_by_case = _channels_by_case(images)
    errors = {}
    for case_id, numbers in _invalid_channels(channels_by_case, len(modalities)).items():
        expected = f"expected channels 0 to {len(modalities) - 1} of every case"
        errors[case_id] = f"{folder / 'imagesTr'}: {expected}, found {numbers}"
    cases = []
    for case_id, files in _ordered_files(channels_by_case).items():
        label = folder / "labelsTr" / f"{case_id}{ending}"
        cases.append(Case(case_id, files, label))
    return build_dataset(
        name=str(meta.get("name", folder.name)),
        cases=cases,
        class_names=class_names,
        targets=targets,
        modalities=modalities,
        path=path,
        errors=errors,
    )


def _images(folder: Path, ending: str) -> list[Path]:
    """Raises: ValueError: no file with this ending in the folder."""
    images = sorted(path for path in folder.glob(f"*{ending}") if not path.name.startswith("."))
    if not images:
        raise ValueError(
            f"{folder}: no *{ending} file there; an nnU-Net dataset keeps CASE_0000{ending} in it"
        )
    return images


def group_channels(files: Sequence[Path], num_channels: int) -> dict[str, tuple[Path, ...]]:
    """Case id to its channel files, from names `CASE_0000`, `CASE_0001`, ...

    Args:
        files: of one folder.
        num_channels: that each case must have.

    Raises:
        ValueError: names each case with missing or extra channels.
    """
    channels_by_case = _channels_by_case(files)
    invalid = _invalid_channels(channels_by_case, num_channels)
    if invalid:
        cases = "; ".join(
            f"{case_id} has {numbers}" for case_id, numbers in list(invalid.items())[:_MAX_NAMED]
        )
        raise ValueError(f"{files[0].parent}: every case needs channels 0 to {num_channels - 1}: {cases}")
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
