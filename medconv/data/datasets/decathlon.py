"""`data=msd`: Medical Segmentation Decathlon folders."""

from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import (
    build_dataset,
    names_by_number,
    parse_labels,
    read_dataset_json,
    warn_of_count,
)
from medconv.data.datasets.nnunet import has_channel_files
from medconv.data.io.images import stem


def msd(root: str | Path) -> Dataset:
    """Medical Segmentation Decathlon: `dataset.json` lists image and label of every training case.

    Args:
        root: folder that holds `dataset.json`.

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
        if not isinstance(entry, dict) or not {"image", "label"} <= set(entry):
            raise ValueError(f"{path}: every entry of `training` needs the keys `image` and `label`")
        case = Case(
            id=stem(Path(entry["image"])), images=(folder / entry["image"],), label=folder / entry["label"]
        )
        cases.append(case)
    warn_of_count(meta, cases, path)
    modalities = names_by_number(meta.get("modality"), path, "modality")
    class_names, targets = parse_labels(meta, path)
    return build_dataset(
        name=str(meta.get("name", folder.name)),
        cases=cases,
        class_names=class_names,
        targets=targets,
        modalities=modalities,
        path=path,
    )
