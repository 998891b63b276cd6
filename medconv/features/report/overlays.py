"""A case as a PNG: image, reference and predictions, in planes where they differ most."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medconv.data.case import Grid
from medconv.data.io.grids import on_grid, to_canonical
from medconv.data.io.images import read_image, read_label
from medconv.data.io.label_values import relabels
from medconv.data.preprocessing.preprocess import content_box
from medconv.evaluation import labels
from medconv.features.pictures import drawing
from medconv.targets.segmentation import SegmentationTargets

_MARGIN_MM = 10.0  # around the foreground


def case_picture(
    paths: Sequence[Path],
    image: Path | None,
    columns: Sequence[str],
    targets: SegmentationTargets | None = None,
) -> tuple[bytes, str]:
    """The picture of a case, without its image if that does not fit, and its caption.

    Args: columns: names of the label maps. Others: as of `case_png`.
    """
    try:
        return case_png(paths, image, targets), ", ".join(["image", *columns][image is None :])
    except ValueError as error:
        caption = f"{', '.join(columns)}; without the image: {error}"
        return case_png(paths, None, targets), caption


def case_png(paths: Sequence[Path], image: Path | None, targets: SegmentationTargets | None = None) -> bytes:
    """One row per plane; columns: the image (if there is one), and each label map.

    Args:
        paths: the reference, then predictions.
        image: its voxels are shown beside the label maps.
        targets: of the evaluation; nothing is shown where the reference has a value that they ignore. None:
            not known.
    Raises:
        ValueError: a file that cannot be read, or an image on another grid.
    """
    reference_path = paths[0]
    reference, grid = _read_label(reference_path, paths[-1], targets)
    # all on the grid of the reference
    label_maps = [reference]
    for path in paths[1:]:
        prediction, prediction_grid = _read_label(path, paths[-1], targets)
        label_maps.append(on_grid(prediction, reference_path, grid, path, prediction_grid))
    if targets is not None and targets.ignore is not None:
        is_labelled = targets.one_ignored(reference) != targets.ignore
        label_maps = [np.where(is_labelled, label_map, 0) for label_map in label_maps]
    arrays = list(label_maps)
    if image is not None:
        voxels, image_grid = read_image([image])
        first_channel = voxels[0]
        arrays.append(on_grid(first_channel, reference_path, grid, image, image_grid))
    is_slice = grid.shape[2] == 1
    planes = []
    for array in arrays:
        canonical, spacing = to_canonical(array[None], grid)  # with an axis of channels
        planes.append(canonical[0, ..., 0] if is_slice else canonical[0])
    if is_slice:
        spacing = spacing[:2]
    image_plane = planes[-1] if image else None
    return _picture(planes[: len(paths)], image_plane, spacing)


def _read_label(path: Path, like: Path, targets: SegmentationTargets | None) -> tuple[np.ndarray, Grid]:
    class_names, ignore = labels.class_names_of(targets), targets.ignore if targets else None
    return read_label(path, like, relabels({"": path}, class_names, ignore)[""])


def _picture(
    label_maps: Sequence[np.ndarray], image: np.ndarray | None, spacing_mm: Sequence[float]
) -> bytes:
    """Around the foreground of all label maps, of which the first is the reference."""
    box = _foreground_box(np.stack(label_maps), spacing_mm)
    reference, *predictions = [label_map[box] for label_map in label_maps]
    differs = np.any([prediction != reference for prediction in predictions], axis=0)
    pixels = drawing.overlay(
        None if image is None else image[box],
        [reference, *predictions],
        spacing_mm,
        differs if differs.any() else None,
    )
    return drawing.png(pixels)


def _foreground_box(labels: np.ndarray, spacing_mm: Sequence[float]) -> tuple[slice, ...]:
    """The box of all foreground with a margin; without foreground the box of the whole image.

    Shape: (labels, *spatial) -> a slice per spatial axis.
    """
    sides = []
    for side, mm in zip(content_box(labels), spacing_mm, strict=True):
        margin = round(_MARGIN_MM / mm)  # voxels
        start = max(0, side.start - margin)  # a negative start would count from the end
        sides.append(slice(start, side.stop + margin))
    return tuple(sides)
