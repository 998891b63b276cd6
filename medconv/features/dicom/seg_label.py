"""DICOM SEG as label maps, by highdicom: label values are segment numbers, whose names the file states.

`seg.dcm#roi=liver;tumour` takes these segments as the labels 1 and 2.
"""

from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.formats import choice_of, structures_of
from medconv.features.dicom.files import has_dicom_start, list_files
from medconv.features.dicom.rtstruct_label import structure_number
from medconv.utils.errors import explained
from medconv.utils.optional_imports import needed

_RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
_SAME_VOXELS = 0.1  # voxels of the image, by which those of the segmentation may be off


def read(path: Path, image: Path, grid: Grid) -> np.ndarray | None:
    """The segments on the grid of the image; None: no DICOM SEG, but an image that may be a label map.

    Slices without foreground may be missing. Shape: (X, Y, Z) int16.
    Args:
        path: the file, or a folder that holds just this one.
        image: for messages.
        grid: of the image.

    Raises:
        ValueError: damaged, segments that overlap, or voxels that are not those of the image.
    """
    file = segmentation_file(path)
    return None if file is None else _on_grid(file, image, grid)


def read_chosen(path: Path, image: Path, grid: Grid) -> np.ndarray:
    """The segments that `path` takes, which may overlap: the later one counts. Args: as for `read`.

    Raises: ValueError: as `read`, or not exactly one segment has a name.
    """
    file, _ = choice_of(path)
    label = np.zeros(grid.shape, np.int16)
    for value, accepted in enumerate(structures_of(path), 1):
        if accepted:
            number = structure_number(file, accepted, names(file))
            label[_on_grid(file, image, grid, number) > 0] = value
    return label


def _on_grid(file: Path, image: Path, grid: Grid, segment: int | None = None) -> np.ndarray:
    """Segment numbers on the grid of the image. Args: segment: this one alone; None: all."""
    highdicom = needed("highdicom", "dicomseg", "reading DICOM SEG", file)
    segments = None if segment is None else [segment]
    with explained(f"{file}: cannot be read as DICOM SEG of exclusive segments on one grid without a tilt"):
        volume = highdicom.seg.segread(file).get_volume(segment_numbers=segments, combine_segments=True)
    to_image = np.linalg.inv(grid.matrix) @ _RAS_FROM_LPS @ volume.affine
    if len(volume.array) == 1:  # one slice has no step to the next, its file may state any
        to_image[:3, 0] /= np.abs(to_image[:3, 0]).max()
    # One voxel along an axis of the segmentation, in voxels of the image: a permutation with signs
    steps = np.rint(to_image[:3, :3]).astype(int)
    first = np.rint(to_image[:3, 3]).astype(int)
    last = np.array(volume.array.shape) - 1
    is_permutation = (np.abs(steps).sum(0) == 1).all() and (np.abs(steps).sum(1) == 1).all()
    off = np.abs(to_image[:3, :3] - steps) @ last + np.abs(to_image[:3, 3] - first)
    if not is_permutation or off.max() > _SAME_VOXELS:
        raise ValueError(
            f"{file}: its voxels are not those of {image}; expected a segmentation of this image"
        )
    axes = np.abs(steps).argmax(1)  # of the segmentation, in the order of the image
    signs = steps[range(3), axes]
    content = volume.array.transpose(axes)[tuple(slice(None, None, sign) for sign in signs)]
    start = np.minimum(first, first + signs * last[axes])
    stop = start + content.shape
    inside = tuple(
        slice(max(0, -begin), size - max(0, end - shape))
        for begin, end, size, shape in zip(start, stop, content.shape, grid.shape, strict=True)
    )
    label = np.zeros(grid.shape, np.int16)
    label[tuple(map(slice, start.clip(0), np.minimum(stop, grid.shape)))] = content[inside]
    if np.count_nonzero(content) > np.count_nonzero(label):
        raise ValueError(f"{file}: segments reach beyond {image}; expected a segmentation of this image")
    return label


def names(path: Path) -> dict[int, str]:
    """The label of each segment by its number; empty: no DICOM SEG."""
    file = segmentation_file(path)
    if file is None:
        return {}
    segments = _header(file, "SegmentSequence").get("SegmentSequence") or ()
    return {int(segment.SegmentNumber): str(segment.get("SegmentLabel") or "") for segment in segments}


def segmentation_file(path: Path) -> Path | None:
    """The file of a segmentation; None: there is another one, or more than one."""
    with explained(f"{path}: cannot be read", OSError):
        files = [path / name for name, *_ in list_files(path)] if path.is_dir() else [path]
        is_dicom = len(files) == 1 and files[0].is_file() and has_dicom_start(files[0])
    return files[0] if is_dicom and _header(files[0], "Modality").get("Modality") == "SEG" else None


def _header(file: Path, keyword: str) -> Any:
    pydicom = needed("pydicom", "dicom", "reading DICOM SEG", file)
    with explained(f"{file}: its DICOM header cannot be used"):
        return pydicom.dcmread(file, stop_before_pixels=True, specific_tags=[keyword], force=True)
