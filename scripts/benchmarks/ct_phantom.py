"""Abdomens in the size of a CT: an organ, a thin vessel and small nodules, in the Decathlon's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
from scipy.ndimage import zoom

from medconv.utils.atomic_io import write_text

SHAPE = (512, 512, 300)
SPACING_MM = (0.8, 0.8, 1.0)
COUNT = 8
CLASSES = ("background", "liver", "vessel", "nodule")
# Hounsfield units
_AIR = -1000
_FAT = -80
_BRIGHTNESS = {"liver": 60, "vessel": 160, "nodule": 110}
_NOISE = 15
VESSEL_MM = 6.0  # diameter
NODULE_MM = (8.0, 14.0)  # range of diameters
_NODULES = 6  # per case
_GRAIN = 16  # voxels from one value of the smooth texture to the next


def made(folder: Path, shape: Sequence[int] = SHAPE, count: int = COUNT) -> Path:
    """A folder with dataset.json, imagesTr and labelsTr; what is there already is kept."""
    root = folder / f"Task90_CT-{'x'.join(map(str, shape))}"
    for name in ("imagesTr", "labelsTr"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = f"ct_{number:03}.nii.gz"
        if (root / "labelsTr" / name).is_file():
            continue
        image, label = drawn(number, shape)
        affine = np.diag([*SPACING_MM, 1.0])
        nib.save(nib.Nifti1Image(image, affine), root / "imagesTr" / name)
        nib.save(nib.Nifti1Image(label, affine), root / "labelsTr" / name)
    training = [
        {"image": f"./imagesTr/ct_{number:03}.nii.gz", "label": f"./labelsTr/ct_{number:03}.nii.gz"}
        for number in range(count)
    ]
    content = {
        "name": "CT",
        "modality": {"0": "CT"},
        "labels": {str(value): name for value, name in enumerate(CLASSES)},
        "numTraining": count,
        "numTest": 0,
        "training": training,
        "test": [],
    }
    write_text(root / "dataset.json", json.dumps(content, indent=1))
    return root


def drawn(seed: int, shape: Sequence[int] = SHAPE) -> tuple[np.ndarray, np.ndarray]:
    """An image (int16, Hounsfield units) and its label map (uint8), both of this shape."""
    rng = np.random.default_rng(seed)
    # mm from the centre, along each axis, to be broadcast
    axes = [(np.arange(n) - (n - 1) / 2) * mm for n, mm in zip(shape, SPACING_MM, strict=True)]
    x, y, z = np.ix_(*(axis.astype(np.float32) for axis in axes))
    size_mm = np.array(shape) * SPACING_MM
    body = (x / (0.45 * size_mm[0])) ** 2 + (y / (0.36 * size_mm[1])) ** 2 < 1
    label = np.zeros(shape, np.uint8)
    centre = np.array([0.12, 0.05, 0.1]) * size_mm + rng.normal(0, 5, 3)
    radii = np.array([0.2, 0.18, 0.3]) * size_mm * rng.uniform(0.9, 1.1, 3)
    liver = ((x - centre[0]) / radii[0]) ** 2 + ((y - centre[1]) / radii[1]) ** 2
    label[liver + ((z - centre[2]) / radii[2]) ** 2 < 1] = 1
    _draw_vessel(label, rng, x, y, axes[2], size_mm)
    for _ in range(_NODULES):
        _draw_nodule(label, rng, axes, size_mm)
    ground = np.where(body, np.float32(_FAT), np.float32(_AIR))
    image = np.broadcast_to(ground, shape).copy()
    for value, name in enumerate(CLASSES[1:], start=1):
        image[label == value] = _BRIGHTNESS[name]
    image += 40 * _texture(rng, shape) * body
    image += rng.normal(0, _NOISE, shape).astype(np.float32)
    return np.rint(image).clip(-1024, 3000).astype(np.int16), label


def _draw_vessel(
    label: np.ndarray,
    rng: np.random.Generator,
    x: np.ndarray,
    y: np.ndarray,
    z_mm: np.ndarray,
    size_mm: np.ndarray,
) -> None:
    """A tube that winds from the lowest slice to the highest."""
    phase = rng.uniform(0, 2 * np.pi, 2)
    for index, z in enumerate(z_mm):
        turn = 2 * np.pi * z / size_mm[2]
        x_centre = -0.15 * size_mm[0] + 0.06 * size_mm[0] * np.sin(turn + phase[0])
        y_centre = 0.06 * size_mm[1] * np.cos(2 * turn + phase[1])
        inside = (x[..., 0] - x_centre) ** 2 + (y[..., 0] - y_centre) ** 2 < (VESSEL_MM / 2) ** 2
        label[:, :, index][inside] = 2


def _draw_nodule(
    label: np.ndarray, rng: np.random.Generator, axes: Sequence[np.ndarray], size_mm: np.ndarray
) -> None:
    """A ball somewhere in the middle of the body; only the box around it is looked at."""
    radius = rng.uniform(*NODULE_MM) / 2
    centre = rng.uniform(-0.2, 0.2, 3) * size_mm
    box = []
    squared_distances = []
    for axis, middle in zip(axes, centre, strict=True):
        begin, end = np.searchsorted(axis, (middle - radius, middle + radius))
        box.append(slice(begin, end))
        squared_distances.append((axis[begin:end] - middle) ** 2)
    x2, y2, z2 = np.ix_(*squared_distances)
    label[tuple(box)][x2 + y2 + z2 < radius**2] = 3


def _texture(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """A smooth random field, about -1 to 1."""
    coarse = rng.normal(size=[-(-n // _GRAIN) + 1 for n in shape]).astype(np.float32)
    factors = [n / m for n, m in zip(shape, coarse.shape, strict=True)]
    return zoom(coarse, factors, order=1) / 2
