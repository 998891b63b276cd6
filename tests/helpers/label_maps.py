"""Folders of predicted and reference label maps, with images, as several test files evaluate them."""

from pathlib import Path

import nibabel as nib
import numpy as np


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([-1.0, -1, 2, 1])), path)
    return path


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
