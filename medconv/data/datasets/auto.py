"""`data=auto`: tells Decathlon and nnU-Net folders apart."""

from __future__ import annotations

from pathlib import Path

from medconv.data.case import Dataset
from medconv.data.datasets.common import _read_meta
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.nnunet import nnunet


def auto(root: str | Path) -> Dataset:
    """Tell Medical Segmentation Decathlon and nnU-Net v2 raw folders apart by their `dataset.json`."""
    meta = _read_meta(root)
    if "channel_names" in meta:
        return nnunet(root)
    if "training" in meta or "modality" in meta:
        return msd(root)
    raise ValueError(
        f"{Path(root) / 'dataset.json'}: neither a Decathlon file (keys `modality`, `training`) nor an "
        f"nnU-Net v2 one (keys `channel_names`, `file_ending`); it has {sorted(meta)}"
    )
