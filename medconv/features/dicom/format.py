"""DICOM as an image format: what of a folder is a case, and which function reads what."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.formats import Contours, ImageFormat, choice_of
from medconv.features.dicom import rtstruct_label, seg_label, series, volumes
from medconv.features.dicom.files import is_dicom, list_files
from medconv.utils.errors import explained

log = logging.getLogger(__name__)


def _cases(root: Path, name: str) -> list[tuple[str, Path]]:
    """The id and path of each series, named after its folder below `root`, and by number and description if
    needed.

    Localizers, colour images and files that are not images are skipped.
    Raises: ValueError: series of several modalities, two with the same name, or a folder that cannot be read.
    """
    found: list[tuple[str, Path]] = []
    # By modality.
    first_case_of: dict[str, str] = {}
    without_dicom: list[Path] = []
    for folder in _visible_folders(root):
        if not is_dicom(folder):
            without_dicom.append(folder)
            continue
        subfolders = folder.relative_to(root).parts
        content = series.find_series(folder)
        if content.skipped:
            log.info("%s %s: skipped %s", name, folder, series.summarize(content.skipped))
        for series_name, path, modality in series.cases(content, folder):
            case_id = "_".join(filter(None, (*subfolders, series_name))) or root.resolve().name
            found.append((case_id, path))
            if modality:
                first_case_of.setdefault(modality, case_id)
    if not found:
        return []
    if len(first_case_of) > 1:
        kinds = ", ".join(f"{modality} (such as {case_id})" for modality, case_id in first_case_of.items())
        raise ValueError(
            f"{name} {root}: series of several modalities, {kinds}; expected one, or a list (.txt, .json) of "
            "one modality"
        )
    _warn_of_unreadable(f"{name} {root}", without_dicom)
    return found


def _visible_folders(root: Path) -> list[Path]:
    """The folder and all below it, without hidden ones."""
    folders = [root, *sorted(path for path in root.rglob("*") if path.is_dir())]
    return [
        folder
        for folder in folders
        if not any(name.startswith(".") for name in folder.relative_to(root).parts)
    ]


def _warn_of_unreadable(source: str, folders: Sequence[Path]) -> None:
    for folder in folders:
        with explained(f"{source}: {folder} cannot be read", OSError):
            files = list_files(folder)
        if files:
            log.warning(
                "%s: skipped %s, no file there can be read as DICOM (DICM after 128 bytes)", source, folder
            )


def _structures(path: Path, image: Path, grid: Grid) -> np.ndarray:
    """The structures that a path takes, by `#roi=`. Raises: ValueError: as the kinds of files say."""
    is_segmentation = seg_label.segmentation_file(choice_of(path)[0]) is not None
    return (seg_label.read_chosen if is_segmentation else rtstruct_label.read)(path, image, grid)


def _missing_slices(path: Path, image: Path, grid: Grid) -> list[str]:
    """Warnings about contours; a segmentation has every slice of its segments."""
    if seg_label.segmentation_file(choice_of(path)[0]) is not None:
        return []
    return rtstruct_label.missing_slices(path, image, grid)


def _grid(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    volume = volumes.volumes(path)[0]
    return volumes.shape(volume), volumes.affine(volume)


DICOM = ImageFormat(
    read=volumes.read,
    grid=_grid,
    is_mine=is_dicom,
    stamp=series.stamp,
    cases=_cases,
    contours=Contours(_structures, _missing_slices),
    label=seg_label.read,
    names=seg_label.names,
    as_displayed=True,
)
