"""`data=imagefolder`: a folder per class, ROOT/CLASS/*.png, or ROOT/train/CLASS/*.png beside val and test."""

import logging
from collections.abc import Sequence
from pathlib import Path

from medconv.data.case import Case, Dataset
from medconv.data.datasets.common import folder_of, ids_of, modalities_of
from medconv.data.datasets.tables import spelling_error
from medconv.data.io.images import check_endings, suffix_list, suffixes
from medconv.features.image_level.csv_table import SPLITS
from medconv.features.image_level.multiclass import MulticlassTargets
from medconv.utils.errors import Argument, ArgumentError
from medconv.utils.logging import some

log = logging.getLogger(__name__)


def imagefolder(
    root: str | Path | None, class_names: Sequence[str] | None = None, modality: str = "MRI"
) -> Dataset:
    """A case per image file; its class is the name of its folder.

    Args:
        root: holds a folder per class, or the folders of the splits.
        class_names: in the order of the outputs; None sorts the names of the folders.
        modality: of volumes; pictures have their colours as channels.

    Raises:
        ValueError: no such folder, fewer than two classes, a folder without an image, or one that is not a
            class.
    """
    root = folder_of(root, "a folder per class", "/data/xray")
    class_folders = _class_folders(root)
    folder_names = sorted({folder.name for folder, _ in class_folders})
    error = None if class_names else spelling_error(folder_names)
    if error:
        raise ArgumentError(
            "root",
            f"={root}: {error}; rename a folder, or list all in ",
            Argument("class_names"),
            " if they differ",
        )
    names = tuple(str(name) for name in class_names or folder_names)
    if len(names) < 2:
        raise ArgumentError(
            "root",
            f"={root}: expected a folder for each of two classes or more, found {', '.join(names) or 'none'}",
        )
    paths: list[Path] = []
    splits: list[str] = []
    for folder, split in class_folders:
        images = _images(folder, names)
        paths += images
        splits += [split] * len(images)
    cases = []
    for case_id, path, split in zip(ids_of(paths, root, root), paths, splits, strict=True):
        class_number = names.index(path.parent.name)
        cases.append(Case(case_id, (path,), values=(float(class_number),), split=split))
    return Dataset(
        name=root.absolute().name,
        cases=tuple(sorted(cases, key=lambda case: case.id)),
        class_names=names,
        modalities=modalities_of(paths, modality),
        targets=MulticlassTargets(names),
    )


def _class_folders(root: Path) -> list[tuple[Path, str]]:
    """The folders of the classes, each with its split; empty: there are no splits."""
    folders = _folders(root)
    split_folders = [folder for folder in folders if folder.name.lower() in SPLITS]
    split_of = {folder: SPLITS[folder.name.lower()] for folder in split_folders}
    if "train" not in split_of.values():
        return [(folder, "") for folder in folders]
    ignored = [folder.name for folder in folders if folder not in split_of]
    if ignored:
        log.warning(
            "%s: folders that are not read: %s; splits are %s", root, ", ".join(ignored), ", ".join(SPLITS)
        )
    class_folders = []
    for split_folder, split in split_of.items():
        class_folders += [(folder, split) for folder in _folders(split_folder)]
    return class_folders


def _folders(root: Path) -> list[Path]:
    """The folders in a folder, but for hidden ones, sorted."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path, class_names: Sequence[str]) -> list[Path]:
    """The images of a class.

    Raises: ValueError: not a class, or no images.
    """
    if folder.name not in class_names:
        raise ValueError(f"{folder}: its name is not a class; class_names has {', '.join(class_names)}")
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    images = [path for path in visible if path.name.endswith(suffixes())]
    check_endings(visible, suffixes(), "root")
    unread = [subfolder.name for subfolder in _folders(folder) if _has_image(subfolder)]
    if unread:
        log.warning("%s: images in folders below it are not read: %s", folder, some(unread))
    if not images:
        raise ValueError(f"{folder}: no image there ({suffix_list()}), expected those of class {folder.name}")
    return images


def _has_image(folder: Path) -> bool:
    return any(path.name.endswith(suffixes()) for path in folder.iterdir())
