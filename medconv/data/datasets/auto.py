"""`data=auto`: Decathlon or nnU-Net folders, recognised by their dataset.json."""

from pathlib import Path

from medconv.data.case import Dataset
from medconv.data.datasets.common import read_dataset_json
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.nnunet import has_channel_files, nnunet


def auto(root: str | Path) -> Dataset:
    """Read a Medical Segmentation Decathlon or nnU-Net raw folder; its `dataset.json` tells which.

    Args:
        root: folder that holds `dataset.json`.

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
