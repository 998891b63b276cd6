"""What an image format is, and paths that choose a part of a file: `dwi#b=50`, `rs.dcm#roi=heart;lung`."""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medconv.data.case import Grid

# At the end of a path: #2 (volume), #b=50 (b-value) or #roi=heart;lung (structures)
_CHOICE = re.compile(r"(?<=[^/])#(\d+|b=\d+(?:\.\d+)?|roi=[^/]*)$")
ROI = "#roi="


class Contours(NamedTuple):
    """How structures that are drawn as contours become labels; of the path that names them, image and grid.

    Args:
        read: gives the label map on the grid of the image, (X, Y, Z) int16.
        missing_slices: gives warnings about structures that leave out a slice.
    """

    read: Callable[[Path, Path, Grid], np.ndarray]
    missing_slices: Callable[[Path, Path, Grid], list[str]]


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """A format of images. One that is not the core's own enters by the door `IMAGE_FORMATS`.

    Args:
        suffixes: of its files, with their dot, such as `.nrrd`; empty: `is_mine` knows them by their content.
        read: path to voxels, (X, Y, Z) or (X, Y, Z, channels), and the 4 x 4 affine from voxels to mm (right,
            anterior, superior). Raises ValueError, naming the path, for damaged files.
        grid: path to shape and affine, without reading the voxels.
        write: writes a label map, (X, Y, Z), with its affine, to a path; None: label maps of such images are
            written as NIfTI.
        voxel_file: path of a header to the file of its voxels; None: both are one file.
        is_mine: whether a file or folder without a suffix of any format has this format.
        stamp: total bytes, and a number that changes if a file of the image does; None: of one file, or two.
        cases: ids and paths of the images in a folder and below, of a format without suffixes. The second
            argument names the first one in messages.
        contours: how labels that a path names by `#roi=` are read.
        label: how label maps that are no images (DICOM SEG) are read, as `Contours.read`; None for images.
        names: the names that a label file states of its values, without its voxels.
        as_displayed: whether slices are stored as displayed: the first axis along a row, the second down. A
            picture may then be the label map of such an image.
    """

    suffixes: tuple[str, ...] = ()
    read: Callable[[Path], tuple[np.ndarray, np.ndarray]]
    grid: Callable[[Path], tuple[tuple[int, ...], np.ndarray]]
    write: Callable[[Path, np.ndarray, np.ndarray], None] | None = None
    voxel_file: Callable[[Path], Path] | None = None
    is_mine: Callable[[Path], bool] | None = None
    stamp: Callable[[Path], list[int]] | None = None
    cases: Callable[[Path, str], list[tuple[str, Path]]] | None = None
    contours: Contours | None = None
    label: Callable[[Path, Path, Grid], np.ndarray | None] | None = None
    names: Callable[[Path], dict[int, str]] | None = None
    as_displayed: bool = False


def choice_of(path: Path) -> tuple[Path, str]:
    """A path without its choice, and the choice; empty: everything is read.

    `dwi#2` is the second volume of the series `dwi`, `dwi#b=50` that b-value; of contours,
    `rs.dcm#roi=heart;lung` are two structures.
    """
    match = _CHOICE.search(str(path))
    if match is None or os.path.exists(path):  # noqa: PTH110 without an error for names that are too long
        return path, ""
    series_path = str(path)[: match.start()]
    return Path(series_path), match[0]


def structures_of(path: str | Path) -> list[str]:
    """The structures that a path or pattern takes, in the order of their label values; empty: it takes none.

    Each may be several names, `Heart|Herz`, of which a file has one; upper and lower case are the same. An
    empty name is a label value that the file need not have.
    """
    _, choice = choice_of(Path(path))
    if not choice.startswith(ROI):
        return []
    return choice.removeprefix(ROI).split(";")


def shown(path: str | Path) -> Path:
    """A path or pattern for messages: without the structures that it takes, of which there may be many."""
    return choice_of(Path(path))[0] if structures_of(path) else Path(path)


def without_structures(path: Path, values: Collection[int]) -> Path:
    """The path without the structures of these label values, as `heart;;lung`.

    Args:
        path: of any label map; one that takes no structures stays as it is.
        values: label values, from 1.
    """
    names = structures_of(path)
    if not names:
        return path
    kept = ["" if value in values else name for value, name in enumerate(names, 1)]
    file, _ = choice_of(path)
    return Path(f"{file}{ROI}{';'.join(kept)}")
