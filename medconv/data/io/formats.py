"""The table of volume formats by suffix. A file in this folder that calls `register` adds one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medconv.data.io import raster

Reader = Callable[[Path], tuple[np.ndarray, np.ndarray]]
GridReader = Callable[[Path], tuple[tuple[int, ...], np.ndarray]]
LabelWriter = Callable[[Path, np.ndarray, np.ndarray], None]
VoxelFile = Callable[[Path], Path]

NIBABEL = (".nii.gz", ".nii", ".hdr", ".mgz", ".mgh")  # .hdr: the header of a NIfTI pair


class VolumeFormat(NamedTuple):
    """How to read a format.

    Args:
        read: path to voxels, (X, Y, Z) or (X, Y, Z, channels), and the 4 x 4 affine from voxels to mm (right,
            anterior, superior). Raises ValueError, naming the path, for damaged files.
        grid: path to shape and affine, without reading the voxels.
        write: writes a label map, (X, Y, Z), with its affine, to a path; None: label maps of such images are
            written as NIfTI.
        voxel_file: path of a header to the file of its voxels; None: both are one file.
    """

    read: Reader
    grid: GridReader
    write: LabelWriter | None = None
    voxel_file: VoxelFile | None = None


# Formats by suffix, but for those of nibabel, Pillow and DICOM
FORMATS: dict[str, VolumeFormat] = {}


def register(
    suffix: str,
    read: Reader,
    grid: GridReader,
    write: LabelWriter | None = None,
    voxel_file: VoxelFile | None = None,
) -> None:
    """Make files that end in `suffix` readable everywhere.

    Args:
        suffix: with its dot, such as `.nrrd`.
        read: see `VolumeFormat`.
        grid: see `VolumeFormat`.
        write: see `VolumeFormat`.
        voxel_file: see `VolumeFormat`.

    Raises:
        ValueError: not a suffix, or that of another format.
    """
    taken = (*NIBABEL, *raster.SUFFIXES, *FORMATS)
    if not suffix.startswith(".") or suffix in taken:
        raise ValueError(f"expected a suffix other than {', '.join(taken)}, got {suffix!r}")
    FORMATS[suffix] = VolumeFormat(read, grid, write, voxel_file)


def written_as(paths: Sequence[Path]) -> str | None:
    """The suffix of the format that all these images have, if its label maps can be written; else None."""
    suffixes = {suffix for path in paths for suffix in FORMATS if path.name.endswith(suffix)}
    has_others = any(not path.name.endswith(tuple(FORMATS)) for path in paths)
    if has_others or len(suffixes) != 1:
        return None
    (suffix,) = suffixes
    return suffix if FORMATS[suffix].write else None
