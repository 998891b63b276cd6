"""`data=nnunet`: nnU-Net v2 raw folders."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import _dataset, _labels, _numbered, _read_meta
from medconv.data.io.images import VOLUMES, stem

_CHANNEL = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")


def nnunet(root: str | Path) -> Dataset:
    """nnU-Net v2 raw: `imagesTr/CASE_0000.nii.gz` per channel, `labelsTr/CASE.nii.gz`; regions and
    `ignore` as there.
    """
    meta, root = _read_meta(root), Path(root)  # in this order: root may not be set
    path = root / "dataset.json"
    modalities = _numbered(meta.get("channel_names"), path, "channel_names")
    ending = str(meta.get("file_ending", ".nii.gz"))
    if ending not in VOLUMES:
        raise ValueError(f"{path}: file_ending must be one of {VOLUMES}, got {ending!r}")
    images = sorted(p for p in (root / "imagesTr").glob(f"*{ending}") if not p.name.startswith("."))
    if not images:
        raise ValueError(
            f"{root / 'imagesTr'}: no *{ending} file there; an nnU-Net dataset keeps CASE_0000{ending} in it"
        )
    names, targets = _labels(meta, path)
    groups, wrong = _grouped(images, len(modalities))
    expected = f"{root / 'imagesTr'}: expected channels 0 to {len(modalities) - 1} of every case"
    faults = {case: f"{expected}, found {found}" for case, found in wrong.items()}
    cases = [Case(case, files, root / "labelsTr" / f"{case}{ending}") for case, files in groups.items()]
    return _dataset(str(meta.get("name", root.name)), cases, names, targets, modalities, path, faults)


def group_channels(files: Sequence[Path], num_channels: int) -> dict[str, tuple[Path, ...]]:
    """Case id to its channel files, from names `CASE_0000`, `CASE_0001`, ...

    Raises: ValueError: a case that lacks a channel or has one too many; each is named.
    """
    groups, wrong = _grouped(files, num_channels)
    if wrong:
        named = "; ".join(f"{case} has {found}" for case, found in list(wrong.items())[:20])
        raise ValueError(f"{files[0].parent}: every case needs channels 0 to {num_channels - 1}: {named}")
    return groups


def _grouped(
    files: Sequence[Path], num_channels: int
) -> tuple[dict[str, tuple[Path, ...]], dict[str, list[int]]]:
    """Case id to its channel files; and the channels that were found, of those cases that have others than
    they need.
    """
    groups: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in files:
        match = _CHANNEL.match(stem(path))
        if match is None:
            raise ValueError(
                f"{path}: expected a name that ends in a channel number, such as CASE_0000.nii.gz"
            )
        groups[match["case"]][int(match["channel"])] = path
    wanted = list(range(num_channels))
    wrong = {case: sorted(found) for case, found in groups.items() if sorted(found) != wanted}
    return {case: tuple(path for _, path in sorted(found.items())) for case, found in groups.items()}, wrong
