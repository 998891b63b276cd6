"""A dataset of two contrasts in the layout of nnU-Net, of which some cases lack the second."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np


def write_two_contrasts(
    root: Path,
    cases: int = 6,
    lacking: tuple[int, ...] = (1, 4),
    shape: tuple[int, ...] = (24, 20, 1),
    noise: tuple[float, float] = (0.5, 0.1),
) -> Path:
    """A lesion in each case, at a random position; clearer in FLAIR than in T1, in whose noise it is faint.

    Args:
        lacking: cases without a second contrast.
        noise: of T1 and of FLAIR; the lesion is brighter by 1.
    """
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for case in range(cases):
        rng = np.random.default_rng(case)
        centre = [rng.uniform(0.3, 0.7) * voxels for voxels in shape[:2]]
        rows, columns = np.ogrid[: shape[0], : shape[1]]
        distance = np.hypot(rows - centre[0], columns - centre[1])
        label = np.zeros(shape, np.uint8)
        label[distance < shape[1] / 5] = 1
        for channel in (0, 1):
            image = 5 + label + rng.normal(0, noise[channel], shape)
            if channel == 0 or case not in lacking:
                save(root / f"imagesTr/case_{case}_{channel:04d}.nii.gz", image.astype(np.float32))
        save(root / f"labelsTr/case_{case}.nii.gz", label)
    labels = {"background": 0, "lesion": 1}
    meta = {"channel_names": {"0": "T1", "1": "FLAIR"}, "labels": labels, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps({**meta, "numTraining": cases}))
    return root


def save(path: Path, array: np.ndarray) -> None:
    nib.save(nib.Nifti1Image(array, np.diag([1.0, 1, 1, 1])), path)
