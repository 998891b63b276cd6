"""Folders of predicted and reference label maps, with images, as several test files evaluate them."""

import json
import math
from pathlib import Path

import nibabel as nib
import numpy as np

from medconv.data.io.manifest import MANIFEST

SHAPE = (6, 5, 4)
SPACED = np.diag([1.0, 2, 3, 1])


def save(path: Path, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([-1.0, -1, 2, 1]) if affine is None else affine), path)
    return path


def save_spaced(path: Path, array: np.ndarray) -> Path:
    """A label map on the grid of `folders`."""
    return save(path, array, SPACED)


def label_of(*counts: int) -> np.ndarray:
    """So many voxels of 1, of 2, ..., one class after the other from the start."""
    values = np.repeat(np.arange(1, len(counts) + 1), counts)
    return np.pad(values, (0, math.prod(SHAPE) - len(values))).astype(np.uint8).reshape(SHAPE)


def folders(
    root: Path, predicted: dict[str, np.ndarray], true_labels: dict[str, np.ndarray]
) -> tuple[Path, Path]:
    """Folders of these predictions and references."""
    for name, labels in (("predictions", predicted), ("labelsTr", true_labels)):
        (root / name).mkdir(exist_ok=True)
        for case, label in labels.items():
            save_spaced(root / name / f"{case}.nii.gz", label)
    return root / "predictions", root / "labelsTr"


def with_names(predictions: Path, *names: str) -> None:
    """A manifest that names the classes."""
    (predictions / MANIFEST).write_text(json.dumps({"checkpoint": "x", "class_names": names}))


def label(size: int, shape: tuple[int, ...] = (12, 14, 10)) -> np.ndarray:
    """Class 1 of this width, and class 2."""
    array = np.zeros(shape, np.uint8)
    array[2 : 2 + size, 3:9], array[9:11, 9:12] = 1, 2
    return array


def dataset(root: Path, cases: tuple[str, ...] = ("a", "b", "c"), images: bool = True) -> tuple[Path, Path]:
    """Images, references, predictions that get worse from case to case, and other predictions.

    Returns: the folders of predictions and references.
    """
    for i, case in enumerate(cases):
        save(root / "labelsTr" / f"{case}.nii.gz", label(6))
        save(root / "out" / f"{case}.nii.gz", label(6 - i))
        save(root / "other" / f"{case}.nii.gz", label(3))
        if images:
            save(
                root / "imagesTr" / f"{case}_0000.nii.gz",
                np.random.default_rng(i).normal(size=(12, 14, 10)).astype("f4"),
            )
    return root / "out", root / "labelsTr"
