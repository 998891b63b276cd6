"""Cases from a folder per class: ROOT/CLASS/*.png, or ROOT/train/CLASS/*.png beside val and test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import ids_of, modalities_of
from medconv.data.datasets.csv_table import PARTS
from medconv.data.io.images import KNOWN, SUFFIXES
from medconv.targets.image_level import ImageLevelTargets


def imagefolder(
    root: str | Path | None, class_names: Sequence[str] | None = None, modality: str = "MRI"
) -> Dataset:
    """A case per image file; its class is the name of its folder.

    Args: class_names: in the order of the outputs; None sorts the folders' names.
    Raises: ValueError: no such folder, fewer than two classes, a folder without an image, or one that is no
    class.
    """
    if root is None or str(root) == "":
        raise ValueError(
            "data.root is not set: give the folder that holds a folder per class, such as "
            "data.root=/data/xray"
        )
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"data.root={root}: no such folder")
    above = {path: PARTS[path.name.lower()] for path in _folders(root) if path.name.lower() in PARTS}
    homes = above if "train" in above.values() else {root: ""}
    folders = [(folder, part) for home, part in homes.items() for folder in _folders(home)]
    names = (
        tuple(map(str, class_names)) if class_names else tuple(sorted({folder.name for folder, _ in folders}))
    )
    if len(names) < 2:
        raise ValueError(
            f"data.root={root}: expected a folder for each of two classes or more, found "
            f"{', '.join(names) or 'none'}"
        )
    found = [(path, folder, part) for folder, part in folders for path in _images(folder, names)]
    ids = ids_of([path for path, _, _ in found], root, root)
    cases = [
        Case(case, (path,), values=(float(names.index(folder.name)),), part=part)
        for case, (path, folder, part) in zip(ids, found, strict=True)
    ]
    image_targets = ImageLevelTargets("multiclass", names)
    modalities = modalities_of([path for path, _, _ in found], modality)
    ordered = tuple(sorted(cases, key=lambda case: case.id))
    return Dataset(root.absolute().name, ordered, names, modalities, image_targets=image_targets)


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path, names: Sequence[str]) -> list[Path]:
    if folder.name not in names:
        raise ValueError(f"{folder}: its name is no class; data.class_names has {', '.join(names)}")
    images = sorted(p for p in folder.iterdir() if p.name.endswith(SUFFIXES) and not p.name.startswith("."))
    if not images:
        raise ValueError(f"{folder}: no image there ({KNOWN}); it should hold those of class {folder.name}")
    return images
