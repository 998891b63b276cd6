"""The datasets of the data benchmark, in nnU-Net's raw layout: generated, or the files of a dataset by
links.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from scipy import ndimage

from medconv.data.datasets.dataset_json import auto
from medconv.utils.atomic_io import write_text

_GRAIN = 8  # voxels from one value of the smooth field to the next


@dataclass(frozen=True)
class Dataset:
    """Args: raw: its folder, DatasetXXX_Name. spacing_mm: of its files. target_mm: what `prepare`
    resamples to.
    """

    name: str
    raw: Path
    patch: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    target_mm: tuple[float, ...]

    @property
    def home(self) -> Path:
        """The folder for the contestants' prepared data."""
        return self.raw.parent.parent / ("patch" + "x".join(map(str, self.patch)))


def generated(
    folder: Path,
    name: str,
    number: int,
    shape: Sequence[int],
    cases: int,
    spacing_mm: Sequence[float],
    modality: str,
) -> Path:
    """A dataset of smooth anatomy and noise, three classes, int16, unless it is there already. Returns:
    its folder.
    """
    key = f"{name}-{'x'.join(map(str, shape))}-{cases}-{'x'.join(map(str, spacing_mm))}"
    raw = folder / key / "raw" / f"Dataset{number:03d}_{name}"
    if not (raw / "dataset.json").is_file():
        _make_folders(raw)
        for case in range(cases):
            image, label = volume(shape, case, modality)
            affine = np.diag([*spacing_mm, 1.0])
            nib.save(nib.Nifti1Image(image, affine), raw / "imagesTr" / f"case{case:03d}_0000.nii.gz")
            nib.save(nib.Nifti1Image(label, affine), raw / "labelsTr" / f"case{case:03d}.nii.gz")
        _describe(raw, name, modality, ("background", "organ", "lesion"), cases)
    return raw


def volume(shape: Sequence[int], seed: int, modality: str) -> tuple[np.ndarray, np.ndarray]:
    """Image (int16; Hounsfield units for CT) and label (uint8, 0 to 2) of one case."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=[-(-n // _GRAIN) + 1 for n in shape]).astype(np.float32)
    smooth = ndimage.zoom(coarse, [n / m for n, m in zip(shape, coarse.shape, strict=True)], order=1)
    label = (smooth > 0.6).astype(np.uint8) + (smooth > 1.2)
    scale, offset, low = (300, 0, -1024) if modality == "CT" else (100, 500, 1)
    image = offset + scale * smooth + scale / 15 * rng.standard_normal(shape, np.float32)
    return np.rint(image).clip(low, 3000).astype(np.int16), label.astype(np.uint8)


def linked(folder: Path, number: int, root: Path, cases: int | None) -> Path:
    """The first cases of a Decathlon or nnU-Net folder of one channel. Raises: ValueError: no such dataset,
    or several channels.
    """
    dataset = auto(root)
    if len(dataset.modalities) != 1:
        raise ValueError(f"--root {root}: one channel is needed, got {list(dataset.modalities)}")
    chosen = dataset.cases[:cases]
    name = "".join(c for c in dataset.name if c.isalnum())
    raw = folder / f"{name}-{len(chosen)}" / "raw" / f"Dataset{number:03d}_{name}"
    if not (raw / "dataset.json").is_file():
        _make_folders(raw)
        for case in chosen:
            assert case.label is not None
            for link, file in (
                (f"imagesTr/{case.id}_0000.nii.gz", case.images[0]),
                (f"labelsTr/{case.id}.nii.gz", case.label),
            ):
                (raw / link).unlink(missing_ok=True)
                (raw / link).symlink_to(file.resolve())
        _describe(raw, name, dataset.modalities[0], dataset.class_names, len(chosen))
    return raw


def spacing_of(raw: Path) -> tuple[float, ...]:
    """mm of its first case, axes as in the file."""
    first: Any = nib.load(min((raw / "imagesTr").iterdir()))
    return tuple(float(mm) for mm in first.header.get_zooms()[:3])


def _make_folders(raw: Path) -> None:
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True, exist_ok=True)


def _describe(raw: Path, name: str, modality: str, classes: Sequence[str], cases: int) -> None:
    """Written last: its presence means that the dataset is complete."""
    meta = {
        "name": name,
        "channel_names": {"0": modality},
        "labels": {class_name: value for value, class_name in enumerate(classes)},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    write_text(raw / "dataset.json", json.dumps(meta))
