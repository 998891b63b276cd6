"""A case as a PNG: image, reference and predictions, in planes where they differ most."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from medconv.data.datasets.patterns import files_of
from medconv.data.io.grids import on_grid
from medconv.data.io.images import in_folder, read_image, read_label
from medconv.data.preprocessing.orientation import to_canonical
from medconv.data.preprocessing.preprocess import content_box
from medconv.evaluation.labels import recorded_images
from medconv.metrics import visualization

_MARGIN_MM = 10.0  # around the foreground


def case_png(paths: Sequence[Path], image: Path | None, ignore: int | None = None) -> bytes:
    """One row per plane; columns: the image (if there is one), and each label map.

    Args: paths: the reference, then predictions. ignore: the reference's label value of voxels where
        nothing is shown.
    Raises: ValueError: a file that cannot be read, or an image on another grid.
    """
    (reference, grid), *others = (read_label(path, paths[-1]) for path in paths)
    is_labelled = reference != (-1 if ignore is None else ignore)
    turned = [
        on_grid(label, paths[0], grid, path, its_grid)
        for path, (label, its_grid) in zip(paths[1:], others, strict=True)
    ]
    arrays = [np.where(is_labelled, label, 0)[None] for label in (reference, *turned)]
    if image is not None:
        voxels, image_grid = read_image([image])
        arrays.append(on_grid(voxels[0], paths[0], grid, image, image_grid)[None])
    canonical = [to_canonical(array, grid) for array in arrays]
    spacing = canonical[0][1][:2] if grid.shape[2] == 1 else canonical[0][1]
    flat = [array[0, ..., 0] if grid.shape[2] == 1 else array[0] for array, _ in canonical]
    box = _surroundings(np.stack(flat[: len(paths)]), spacing)
    labels = [array[box] for array in flat[: len(paths)]]
    wrong = np.any([label != labels[0] for label in labels[1:]], axis=0)
    shown = flat[-1][box] if image else None
    return visualization.png(visualization.overlay(shown, labels, spacing, wrong if wrong.any() else None))


def images_of(
    predictions: Path, references: Path, folder: Path | None, cases: Sequence[str]
) -> dict[str, Path]:
    """Case to its image, CASE.nii.gz or its first channel CASE_0000.nii.gz, for cases that have one.

    Args: folder: None: the images that the manifest beside the predictions names, else `imagesTr` beside
        `labelsTr` (or `imagesTs` beside `labelsTs`), if it exists.
    Raises: ValueError: `folder` holds no image of these cases.
    """
    if folder is None and (recorded := recorded_images(predictions)):
        return recorded
    if folder is not None:
        images = _paired(files_of(folder, "--images"), cases)
        if not images:
            raise ValueError(f"--images {folder}: no image of any case there, such as {cases[0]}.nii.gz")
        return images
    labels = references.absolute()  # of `.`, too
    beside = labels.with_name(labels.name.replace("labels", "images"))
    try:
        return {} if beside == labels else _paired(in_folder(beside, "--images"), cases)
    except ValueError:
        return {}  # no such folder: the report is made without images


def _paired(images: Mapping[str, Path], cases: Sequence[str]) -> dict[str, Path]:
    pairs = {case: images.get(case) or images.get(f"{case}_0000") for case in cases}
    return {case: path for case, path in pairs.items() if path}


def _surroundings(labels: np.ndarray, spacing_mm: Sequence[float]) -> tuple[slice, ...]:
    """The box of all foreground with a margin, or the whole image; (labels, *spatial) -> slices."""
    pairs = zip(content_box(labels), (round(_MARGIN_MM / mm) for mm in spacing_mm), strict=True)
    return tuple(slice(max(0, side.start - margin), side.stop + margin) for side, margin in pairs)
