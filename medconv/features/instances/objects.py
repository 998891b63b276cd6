"""Object maps, with a value for each object, and maps of the two classes that a network learns of them.

An object is its interior and a border, one voxel wide, within it. Interiors of neighbours do not touch, so
that each one is the seed of its object.
Source: classes as of Caicedo et al. 2019, doi:10.1002/cyto.a.23863; seeded watershed of Meyer 1992, by
scikit-image.
"""

import numpy as np
from scipy.ndimage import find_objects, generate_binary_structure, label, maximum_filter, minimum_filter

from medconv.targets.base import HIGHEST
from medconv.utils.logging import some
from medconv.utils.optional_imports import needed

INTERIOR = 1
BORDER = 2
_LOOKED_AT = 1000  # objects of a label map, for doubts


def check_installed() -> None:
    """Raises: ValueError: scikit-image is not installed."""
    needed("skimage", "instances", "one value per object")


def classes_of(objects: np.ndarray) -> np.ndarray:
    """The classes of an object map: 0, `INTERIOR` or `BORDER`.

    An object without interior, as it is thin, is all interior, but for what touches another object.

    Shape: (*spatial) integers -> same.
    """
    from skimage.segmentation import find_boundaries

    # of two objects that touch by a face, both have a border there
    is_border = find_boundaries(objects, connectivity=1, mode="inner")
    is_object = objects > 0
    for border in (is_border & _touches(objects), np.zeros_like(is_border)):
        has_interior = np.zeros(int(objects.max(initial=0)) + 1, bool)
        has_interior[objects[is_object & ~is_border]] = True
        is_border = np.where(has_interior[objects], is_border, border)
    return np.where(is_border, BORDER, np.where(is_object, INTERIOR, 0)).astype(objects.dtype)


def _touches(objects: np.ndarray) -> np.ndarray:
    """Where an object shares a face with another one. Shape: (*spatial) -> bool."""
    cross = generate_binary_structure(objects.ndim, 1)
    highest = maximum_filter(objects, footprint=cross)
    lowest = minimum_filter(np.where(objects > 0, objects, highest), footprint=cross)
    touches: np.ndarray = (objects > 0) & (highest != lowest)
    return touches


def objects_of(classes: np.ndarray) -> np.ndarray:
    """The objects of a map of classes, numbered from 1: each interior that hangs together by faces, and the
    border that is nearest to it.

    Shape: (*spatial) integers -> (*spatial) int16; int32 for more objects than a label map holds, such as the
        speckle of a network that has hardly been trained.
    """
    from skimage.segmentation import watershed

    seeds, num_objects = label(classes == INTERIOR)
    # of a constant image, watershed grows all seeds by a voxel in turn
    objects: np.ndarray = watershed(np.zeros(classes.shape, np.uint8), seeds, mask=classes > 0)
    return objects.astype(np.int16 if num_objects <= HIGHEST else np.int32)


def doubts_of(objects: np.ndarray) -> list[str]:
    """Why a label map may have no value of its own for each object."""
    in_pieces: list[str] = []
    boxes = [(value, box) for value, box in enumerate(find_objects(objects), start=1) if box is not None]
    for value, box in boxes[:_LOOKED_AT]:
        _, num_pieces = label(objects[box] == value, np.ones((3,) * objects.ndim))
        if num_pieces > 1:
            in_pieces.append(str(value))
    if in_pieces and len(boxes) == 1:
        return ["all objects have one value, so those that touch are one; each object needs its own"]
    if in_pieces:
        return [f"some values are those of several objects, or of one in pieces: {some(in_pieces, 5)}"]
    return []
