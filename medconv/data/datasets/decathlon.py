"""`data=msd`: Medical Segmentation Decathlon folders."""

from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import build_dataset, names_by_number, parse_labels, read_dataset_json
from medconv.data.io.images import stem


def msd(root: str | Path) -> Dataset:
    """Medical Segmentation Decathlon: `dataset.json` lists image and label of every training case."""
    meta, root = read_dataset_json(root), Path(root)  # in this order: root may be None
    path = root / "dataset.json"
    if "training" not in meta and "channel_names" in meta:
        raise ValueError(
            f"{path}: has the keys of nnU-Net v2 (`channel_names`), not of the Decathlon; take data=nnunet"
        )
    entries = meta.get("training")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: key `training` must list at least one case, got {entries!r}")
    if not all(isinstance(e, dict) and {"image", "label"} <= set(e) for e in entries):
        raise ValueError(f"{path}: every entry of `training` needs the keys `image` and `label`")
    cases = [Case(stem(Path(e["image"])), (root / e["image"],), root / e["label"]) for e in entries]
    modalities = names_by_number(meta.get("modality"), path, "modality")
    return build_dataset(str(meta.get("name", root.name)), cases, *parse_labels(meta, path), modalities, path)
