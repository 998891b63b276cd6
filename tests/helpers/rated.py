"""The tiny datasets with label maps of a second rater, or with probabilities in place of label maps."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
from helpers.volumes import CLASSES, save

from medconv.data.case import Dataset
from medconv.data.datasets.dataset_json import msd
from medconv.features.raters.targets import SoftTargets


def add_rater(root: Path, cases: int | None = None) -> Path:
    """labelsTr2: class 1 of the first rater lacks its last plane; the axes run in other directions.

    Args:
        root: of a dataset in the layout of the Decathlon.
        cases: how many the rater has; None: all.
    """
    for path in sorted((root / "labelsTr").iterdir())[:cases]:
        image = nib.load(path)
        label = np.asarray(image.dataobj).astype(np.uint8)
        planes = np.flatnonzero((label == 1).any((1, 2)))
        last_plane = label[planes[-1]]
        last_plane[last_plane == 1] = 0
        flipped = np.diag([-1.0, 1.0, 1.0, 1.0])
        flipped[0, 3] = len(label) - 1
        save(root / "labelsTr2" / path.name, label[::-1], image.affine @ flipped)
    return root


def with_raters(root: Path, cases: int | None = None) -> Dataset:
    return SoftTargets.with_soft_labels(msd(add_rater(root, cases)), "labelsTr2/{id}.nii.gz", None, str(root))


def write_probabilities(root: Path) -> Path:
    """labelsTr holds 3/4 of the probability of each class in place of label maps."""
    for path in (root / "labelsTr").iterdir():
        image = nib.load(path)
        label = np.asarray(image.dataobj)
        channels = [label == value for value in range(1, len(CLASSES))]
        save(path, 0.75 * np.stack(channels, -1).astype(np.float32), image.affine)
    return root
