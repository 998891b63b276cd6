"""Tiny datasets as real files, for the tests in this folder."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from helpers.waiting import PATIENCE_S

from medconv.data.case import Dataset
from medconv.data.datasets.dataset_json import msd
from medconv.data.preprocessing.preprocess import PreprocessingConfig

SHAPE = (12, 14, 10)
AFFINE = np.diag([1.0, 1.5, 2.0, 1.0])
CLASSES = ("background", "big", "small")


def save(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, affine), path)
    return path


def save_raw(path: Path, edit: Callable[[np.ndarray], Any], array: np.ndarray | None = None) -> Path:
    """A file whose header says what nibabel would never write: `edit` changes its fields in place."""
    image = nib.Nifti1Image(image_array(0) if array is None else array, AFFINE)
    raw = bytearray(image.to_bytes())
    header = np.frombuffer(raw[:348], dtype=nib.nifti1.header_dtype).copy()
    edit(header)
    raw[:348] = header.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(bytes(raw)) if path.name.endswith(".gz") else bytes(raw))
    return path


def truncate(path: Path, share: float = 0.5) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def label_array(seed: int, shape: Sequence[int] = SHAPE) -> np.ndarray:
    """Two boxes, of values 1 and 2, that differ from case to case."""
    label = np.zeros(shape, np.uint8)
    label[(slice(2, 7), slice(2 + seed % 3, 8), slice(1, 6))[: len(shape)]] = 1
    label[(slice(8, 11), slice(9, 12), slice(0, 9))[: len(shape)]] = 2
    return label


def image_array(seed: int, shape: Sequence[int] = SHAPE) -> np.ndarray:
    """The boxes of `label_array` on noise; no voxel is 0."""
    noise = np.random.default_rng(seed).normal(10, 0.1, shape)
    return (noise + np.array([0.0, 2.0, 5.0])[label_array(seed, shape)]).astype(np.float32)


def pixels(seed: int, shape: Sequence[int] = (8, 9)) -> np.ndarray:
    """The values of a picture, rows from the top."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_msd(
    root: Path, num_cases: int = 3, shape: Sequence[int] = SHAPE, affine: np.ndarray = AFFINE
) -> Path:
    """Decathlon layout: `case_0`, `case_1`, ..., one channel, `CLASSES`."""
    entries = []
    for i in range(num_cases):
        entry = {"image": f"./imagesTr/case_{i}.nii.gz", "label": f"./labelsTr/case_{i}.nii.gz"}
        save(root / entry["image"], image_array(i, shape), affine)
        save(root / entry["label"], label_array(i, shape), affine)
        entries.append(entry)
    labels = {str(value): name for value, name in enumerate(CLASSES)}
    write_json(root, {"name": "Tiny", "modality": {"0": "MRI"}, "labels": labels, "training": entries})
    return root


def write_nnunet(root: Path, num_cases: int = 3, shape: Sequence[int] = SHAPE) -> Path:
    """nnU-Net v2 raw layout: two channels, T1 and FLAIR, `CLASSES`; channel 1 is channel 0 plus 100."""
    for i in range(num_cases):
        for channel in (0, 1):
            save(root / f"imagesTr/case_{i}_{channel:04d}.nii.gz", image_array(i, shape) + 100 * channel)
        save(root / f"labelsTr/case_{i}.nii.gz", label_array(i, shape))
    labels = {name: value for value, name in enumerate(CLASSES)}
    channels = {"0": "T1", "1": "FLAIR"}
    write_json(
        root,
        {"channel_names": channels, "labels": labels, "file_ending": ".nii.gz", "numTraining": num_cases},
    )
    return root


def write_json(root: Path, meta: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(json.dumps(meta), encoding="utf-8")
    return root


def edit_json(root: Path, **changes: Any) -> Path:
    """Change keys of `dataset.json`; None takes a key away."""
    meta = {**json.loads((root / "dataset.json").read_text(encoding="utf-8")), **changes}
    return write_json(root, {key: value for key, value in meta.items() if value is not None})


def tiny(root: Path, num_cases: int = 3, **settings: Any) -> Dataset:
    return msd(write_msd(root, num_cases, **settings))


def preprocessing_config(
    spacing_mm: Sequence[float] = (1.0, 1.5, 2.0), normalisation: str = "none", channels: int = 1
) -> PreprocessingConfig:
    """By default the native spacing of the tiny datasets and their values as they are."""
    known = {"percentile_00_5": 0.0, "percentile_99_5": 1.0, "mean": 0.0, "std": 1.0}
    return PreprocessingConfig(
        len(spacing_mm), tuple(spacing_mm), (normalisation,) * channels, (known,) * channels
    )


def affine_of(
    axes: Sequence[int], signs: Sequence[int], spacing_mm: Sequence[float], origin: Sequence[float]
) -> np.ndarray:
    """Array axis i runs along world axis `axes[i]`, forwards or backwards, in steps of `spacing_mm[i]`."""
    affine = np.zeros((4, 4))
    for i, (axis, sign, mm) in enumerate(zip(axes, signs, spacing_mm, strict=True)):
        affine[axis, i] = sign * mm
    affine[:3, 3], affine[3, 3] = origin, 1
    return affine


ORIENTATIONS = [
    (p, s) for p in itertools.permutations(range(3)) for s in itertools.product((1, -1), repeat=3)
]


def rotation(angles_deg: Sequence[float]) -> np.ndarray:
    """A proper rotation of space, from angles about the three axes."""
    matrix = np.eye(3)
    for (a, b), angle in zip(((0, 1), (0, 2), (1, 2)), np.deg2rad(angles_deg), strict=True):
        plane = np.eye(3)
        plane[a, a] = plane[b, b] = np.cos(angle)
        plane[a, b], plane[b, a] = -np.sin(angle), np.sin(angle)
        matrix = matrix @ plane
    return matrix


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return 2 * np.count_nonzero(one & other) / (np.count_nonzero(one) + np.count_nonzero(other))


def unprivileged(function: Callable[..., Any], *arguments: Any) -> str:
    """What a function raises, in words, in a process that root's rights are taken from; '' where it raises
    nothing.
    """
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()

    def run() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            function(*arguments)
            answers.put("")
        except Exception as error:
            answers.put(f"{type(error).__name__}: {error}")

    process = fork.Process(target=run)
    process.start()
    message = answers.get(timeout=PATIENCE_S)
    process.join(timeout=PATIENCE_S)
    return str(message)


OBLIQUE_MM = (0.8, 1.25, 3.0)


def oblique(angles_deg: tuple[float, float, float] = (20, -35, 10), origin: float = 0.0) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = rotation(angles_deg) @ np.diag(OBLIQUE_MM)
    affine[:3, 3] = origin
    return affine
