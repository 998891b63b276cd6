"""`data=nnunet`: nnU-Net v2 raw folders."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, names_by_number, parse_labels, read_dataset_json
from medconv.data.io.images import stem, volume_suffixes

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")


def nnunet(root: str | Path) -> Dataset:
    """nnU-Net v2 raw: `imagesTr/CASE_0000.nii.gz` per channel, `labelsTr/CASE.nii.gz`, regions, `ignore`."""
    meta, root = read_dataset_json(root), Path(root)  # in this order: root may be None
    path = root / "dataset.json"
    if "channel_names" not in meta and "modality" in meta:
        raise ValueError(
            f"{path}: has the keys of the Decathlon (`modality`), not of nnU-Net v2; take data=msd"
        )
    modalities = names_by_number(meta.get("channel_names"), path, "channel_names")
    ending = str(meta.get("file_ending", ".nii.gz"))
    if ending not in volume_suffixes():
        raise ValueError(f"{path}: file_ending must be one of {volume_suffixes()}, got {ending!r}")
    images = sorted(p for p in (root / "imagesTr").glob(f"*{ending}") if not p.name.startswith("."))
    if not images:
        what = f"an nnU-Net dataset keeps CASE_0000{ending} in it"
        raise ValueError(f"{root / 'imagesTr'}: no *{ending} file there; {what}")
    names, targets = parse_labels(meta, path)
    groups, invalid = _group_channels(images, len(modalities))
    expected = f"{root / 'imagesTr'}: expected channels 0 to {len(modalities) - 1} of every case"
    errors = {case: f"{expected}, found {channels}" for case, channels in invalid.items()}
    cases = [Case(case, files, root / "labelsTr" / f"{case}{ending}") for case, files in groups.items()]
    return build_dataset(str(meta.get("name", root.name)), cases, names, targets, modalities, path, errors)


def group_channels(files: Sequence[Path], num_channels: int) -> dict[str, tuple[Path, ...]]:
    """Case id to its channel files, from names `CASE_0000`, `CASE_0001`, ...

    Raises: ValueError: names each case with missing or extra channels.
    """
    groups, invalid = _group_channels(files, num_channels)
    if invalid:
        cases = "; ".join(f"{case} has {channels}" for case, channels in list(invalid.items())[:20])
        raise ValueError(f"{files[0].parent}: every case needs channels 0 to {num_channels - 1}: {cases}")
    return groups


def _group_channels(
    files: Sequence[Path], num_channels: int
) -> tuple[dict[str, tuple[Path, ...]], dict[str, list[int]]]:
    """Case id to its channel files; and of cases with missing or extra channels, the channel numbers."""
    groups: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in files:
        match = _CHANNEL.match(stem(path))
        if match is None:
            raise ValueError(f"{path}: expected a name that ends in a channel number, as CASE_0000.nii.gz")
        groups[match["case"]][int(match["channel"])] = path
    expected = list(range(num_channels))
    invalid = {case: sorted(files) for case, files in groups.items() if sorted(files) != expected}
    return {case: tuple(path for _, path in sorted(f.items())) for case, f in groups.items()}, invalid
