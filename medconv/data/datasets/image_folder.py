"""`data=imagefolder`: a folder per class, ROOT/CLASS/*.png, or ROOT/train/CLASS/*.png beside val and test."""

import logging
from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import ids_of, modalities_of
from medconv.data.datasets.csv_table import SPLITS
from medconv.data.io.images import check_endings, known, suffixes
from medconv.targets.multiclass import MulticlassTargets
from medconv.utils.logging import some

log = logging.getLogger(__name__)


def imagefolder(
    root: str | Path | None, class_names: Sequence[str] | None = None, modality: str = "MRI"
) -> Dataset:
    """A case per image file; its class is the name of its folder.

    Args: class_names: in the order of the outputs; None sorts the names of the folders.
    Raises: ValueError: no such folder, fewer than two classes, a folder without an image, or one that is not
    a class.
    """
    if root is None or str(root) == "":
        raise ValueError(
            "data.root is not set: give the folder that holds a folder per class, such as "
            "data.root=/data/xray"
        )
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"data.root={root}: no such folder")
    top = _folders(root)
    parents = {path: SPLITS[path.name.lower()] for path in top if path.name.lower() in SPLITS}
    if "train" not in parents.values():
        parents = {root: ""}
    elif ignored := [path.name for path in top if path not in parents]:
        log.warning(
            "%s: folders that are not read: %s; splits are %s", root, *map(", ".join, (ignored, SPLITS))
        )
    folders = [(folder, split) for parent, split in parents.items() for folder in _folders(parent)]
    names = tuple(map(str, class_names or sorted({folder.name for folder, _ in folders})))
    if len(names) < 2:
        raise ValueError(
            f"data.root={root}: expected a folder for each of two classes or more, found "
            f"{', '.join(names) or 'none'}"
        )
    files = [(path, folder, split) for folder, split in folders for path in _images(folder, names)]
    ids = ids_of([path for path, _, _ in files], root, root)
    cases = [
        Case(case, (path,), values=(float(names.index(folder.name)),), split=split)
        for case, (path, folder, split) in zip(ids, files, strict=True)
    ]
    modalities = modalities_of([path for path, _, _ in files], modality)
    ordered = tuple(sorted(cases, key=lambda case: case.id))
    return Dataset(root.absolute().name, ordered, names, modalities, targets=MulticlassTargets(names))


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path, names: Sequence[str]) -> list[Path]:
    if folder.name not in names:
        raise ValueError(f"{folder}: its name is not a class; data.class_names has {', '.join(names)}")
    shown = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    images = [path for path in shown if path.name.endswith(suffixes())]
    check_endings(shown, suffixes(), "data.root")
    if below := [
        path.name for path in _folders(folder) if any(p.name.endswith(suffixes()) for p in path.iterdir())
    ]:
        log.warning("%s: images in folders below it are not read: %s", folder, some(below))
    if not images:
        raise ValueError(f"{folder}: no image there ({known()}), expected those of class {folder.name}")
    return images
