"""Oracle of the planes of a picture: a mask for each class."""

import numpy as np


def planes_of_most_foreground(label: np.ndarray) -> list[tuple[int, int]]:
    """(axis, index) of the plane across each axis of a 3D label map, from the last axis to the first."""
    masks = [label == value for value in np.unique(label) if value > 0]
    planes = []
    for axis in (2, 1, 0):
        share = np.zeros(label.shape[axis])
        for mask in masks:
            for index in range(label.shape[axis]):
                share[index] += np.take(mask, index, axis).mean() / mask.mean()
        planes.append((axis, int(np.argmax(share)) if masks else label.shape[axis] // 2))
    return planes
