"""Label maps in a file for each class: `{id}/segmentations/{class}.nii.gz`.

The path of such a label has `{class}` where its files have the name of a class, and names the classes in the
order of their label values (`formats.structures_of`): `p1/{class}.nii.gz#roi=liver;spleen`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from medconv.data.io.formats import choice_of, structures_of

CLASS = "{class}"


def is_of_masks(path: str | Path) -> bool:
    """Whether a label is a file for each class."""
    return CLASS in str(path)


def files(path: Path) -> list[tuple[int, Path]]:
    """Label value and file of each class.

    Raises: ValueError: none, or more than one, of the names of a class has a file.
    """
    template, _ = choice_of(path)
    found: list[tuple[int, Path]] = []
    for value, accepted in enumerate(structures_of(path), 1):
        if not accepted:  # a class that this case does not annotate
            continue
        named = [Path(str(template).replace(CLASS, name)) for name in accepted.split("|")]
        present = [file for file in named if file.exists()]
        if len(present) != 1:
            problem = f"{present[1]} is there, too" if present else "no such file"
            raise ValueError(
                f"{named[0]}: {problem}; expected a mask of each class, empty if the case has none of it"
            )
        found.append((value, present[0]))
    return found


def combined(path: Path, shape: Sequence[int], read: Callable[[Path], np.ndarray]) -> np.ndarray:
    """The label map of masks; where they overlap, the later class counts.

    Shape: (X, Y, Z) int16.

    Args:
        shape: (X, Y, Z) of the image.
        read: gives the label map of a file on the grid of the image.

    Raises:
        ValueError: as `files` and `read`, or a mask with more than one value besides 0.
    """
    label = np.zeros(shape, np.int16)
    for value, file in files(path):
        mask = read(file)
        inside = mask > 0
        if (mask[inside] != mask.max()).any():
            raise ValueError(f"{file}: expected a mask of 0 and one other value, for the voxels of its class")
        label[inside] = value
    return label


def names(path: Path) -> dict[int, str]:
    """The class of each label value."""
    return {value: name.split("|")[0] for value, name in enumerate(structures_of(path), 1) if name}
