"""A training patch out of our store against reading the whole volume and cropping it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from benchmarks.datasets import Dataset
from benchmarks.peers.medconv_data import data_module
from benchmarks.results import Row, conditions
from benchmarks.stores import box_of, random_boxes, reads
from medconv.data.loading.patch import crop

REFERENCE = ".nii.gz, whole"


def run(options: argparse.Namespace, dataset: Dataset) -> list[Row]:
    """Image and label each time, at random places; from the store as the training loader reads them,
    checks included.
    """
    own = {
        "mode": "read",
        "raw": dataset.raw,
        "patch": dataset.patch,
        "spacing": dataset.spacing_mm,
        "workers": 2,
    }
    settings = argparse.Namespace(**vars(options), **own)
    data = data_module(settings, dataset.home / "medconv")
    patches = data.train_dataloader().dataset
    packed = dataset.home / "one" / "packed"
    plain = dataset.home / "one" / "plain"
    _copy_first_case(dataset.raw, packed, plain)
    image: Any = nib.load(packed / "images.nii.gz")
    size = [min(p, n) for p, n in zip(dataset.patch, image.shape, strict=True)]
    boxes = random_boxes(image.shape, size, options.reads)
    numbers = {tuple(start): number for number, start in enumerate(boxes)}
    readers: dict[str, tuple[Path, Callable[[Sequence[int]], Any]]] = {
        REFERENCE: (packed, partial(_whole, packed, dataset.patch)),
        ".nii, whole": (plain, partial(_whole, plain, dataset.patch)),
        ".nii, memory-mapped": (plain, partial(_mapped, plain, dataset.patch)),
        "our store": (data.store.folder, lambda start: patches[numbers[tuple(start)]]),
    }
    times = reads(readers, boxes, REFERENCE)
    kind = {
        "benchmark": "read",
        "case": f"{dataset.name}, patch {'x'.join(map(str, dataset.patch))}",
        "reference": REFERENCE,
    }
    return [
        {**kind, "variant": n, **row, "times_as_fast": 1 / row["ratio"], **conditions()}
        for n, row in times.items()
    ]


def _copy_first_case(raw: Path, packed: Path, plain: Path) -> None:
    """As it is and without compression."""
    for folder in (packed, plain):
        folder.mkdir(parents=True, exist_ok=True)
    for kind in ("images", "labels"):
        file = min((raw / f"{kind}Tr").iterdir())
        shutil.copyfile(file, packed / f"{kind}.nii.gz")
        nib.save(nib.load(file), plain / f"{kind}.nii")


def _whole(folder: Path, size: Sequence[int], start: Sequence[int]) -> list[np.ndarray]:
    patches = []
    for kind, dtype in (("images", np.float32), ("labels", np.uint8)):
        (path,) = folder.glob(f"{kind}.*")
        image: Any = nib.load(path)
        patches.append(crop(np.asarray(image.dataobj, dtype)[None], start, size))
    return patches


def _mapped(folder: Path, size: Sequence[int], start: Sequence[int]) -> list[np.ndarray]:
    """nibabel reads an uncompressed file by memory map, so that slicing it reads few pages."""
    patches = []
    for kind, dtype in (("images", np.float32), ("labels", np.uint8)):
        image: Any = nib.load(folder / f"{kind}.nii")
        inside = [max(0, min(s, n - p)) for s, n, p in zip(start, image.shape, size, strict=True)]
        raw = np.asanyarray(image.dataobj.get_unscaled())[None]
        patches.append(
            box_of(raw, inside, [min(p, n) for p, n in zip(size, image.shape, strict=True)]).astype(dtype)
        )
    return patches
