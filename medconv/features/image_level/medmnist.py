"""`data=medmnist`: a file of arrays, unpacked once into images and a table, which `csv` reads.

Source: Yang et al. 2023, doi:10.1038/s41597-022-01721-8; keys `train_images`, `train_labels`, same for val,
test.
"""

import csv as tables
import os
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import nibabel as nib
import numpy as np
from filelock import FileLock

from medconv.data.case import Dataset
from medconv.data.datasets.tables import read_rows
from medconv.data.io import raster
from medconv.data.io.images import stamp
from medconv.features.image_level.csv_table import csv
from medconv.targets import Targets
from medconv.utils.errors import Argument, ArgumentError, reason
from medconv.utils.locks import held
from medconv.utils.progress import track

_SPLITS = ("train", "val", "test")
_TABLE = "labels.csv"
# What numpy raises for a damaged archive; for arrays of other types it raises ValueError
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, AttributeError, TypeError)
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]  # split to images and labels


def medmnist(
    root: str | Path | None,
    cache_dir: str | Path,
    class_names: Sequence[str] | None = None,
    target_type: str | None = None,
) -> Dataset:
    """The cases of FILE.npz with its own splits; images are written as PNG or NIfTI to `cache_dir`.

    Args:
        root: the file.
        cache_dir: folder for the unpacked files, which later runs use again.
        class_names: in the order of the numbers; None: the numbers are the names.
        target_type: as for `csv`; ordinal labels are classes.

    Raises:
        ValueError: not a MedMNIST file, or no space left.
    """
    if root is None or not Path(root).is_file():
        problem = " is not set" if root is None else f"={root}: no such file"
        raise ArgumentError(
            "root",
            f"{problem}, expected a MedMNIST file, such as ",
            Argument("root"),
            "=/data/pneumoniamnist.npz",
        )
    path = Path(root)
    folder = _unpacked(path, Path(cache_dir))
    header, rows = read_rows(folder / _TABLE)
    columns = header[2:]  # after path and split
    kind = target_type or ("multiclass" if len(columns) == 1 else "multilabel")
    has_classes = kind in ("multiclass", "ordinal") and columns == ["label"]
    numbers = None
    if has_classes:  # also those without an example
        highest = max(int(cells["label"]) for _, cells in rows)
        numbers = [str(label) for label in range(highest + 1)]
    dataset = csv(
        folder / _TABLE, label_columns=columns, target_type=kind, class_names=numbers, modality="grey"
    )
    return _with_names(replace(dataset, name=path.stem), class_names)


def _unpacked(path: Path, cache_dir: Path) -> Path:
    """The folder of a file's images and table; they are unpacked once, by one process."""
    # A file that was replaced gets another folder
    identity = sha256(repr([str(path.resolve()), *stamp(path)]).encode()).hexdigest()[:12]
    folder = cache_dir / f"{path.stem}-files-{identity}"
    if (folder / _TABLE).is_file():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with held(FileLock(folder.with_name(f".{folder.name}.lock"))):
            if not folder.exists():
                _unpack(path, folder)
    except OSError as error:
        raise ArgumentError("cache_dir", f": cannot write to {folder} ({reason(error)})") from error
    return folder


def _with_names(dataset: Dataset, names: Sequence[str] | None) -> Dataset:
    """The dataset with these names, in the order of the numbers.

    Raises: ValueError: too few or too many names.
    """
    if not names:
        return dataset
    num_outputs = len(dataset.class_names)
    if len(names) != num_outputs:
        raise ArgumentError(
            "class_names", f" needs a name for each of {num_outputs} outputs, got {list(names)}"
        )
    plain = {**dataset.targets.plain(), "names": [str(name) for name in names]}
    targets = Targets.from_plain(plain)
    return replace(dataset, targets=targets, class_names=targets.names)


def _unpack(path: Path, folder: Path) -> None:
    """Write to a sibling folder and rename it, so that the folder is complete or absent."""
    arrays = _read_arrays(path)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "images").mkdir(parents=True)
        _write_files(partial, arrays)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_files(folder: Path, arrays: Arrays) -> None:
    """Write the images, and a table with a row for each."""
    num_columns = arrays["train"][1].shape[1]
    columns = ["label"] if num_columns == 1 else [f"finding_{number}" for number in range(num_columns)]
    with (folder / _TABLE).open("w", newline="", encoding="utf-8") as file:
        table = tables.writer(file)
        table.writerow(["path", "split", *columns])
        for split, (images, labels) in arrays.items():
            for index, image in enumerate(track(images, f"unpacking {split}")):
                image_path = _write_image(folder, f"images/{split}_{index:05d}", image)
                row = labels[index].astype(np.int64).tolist()
                table.writerow([image_path, split, *row])


def _write_image(folder: Path, name: str, image: np.ndarray) -> str:
    """Write a picture as PNG, a volume as NIfTI; returns the name with its suffix."""
    is_picture = image.ndim == 2 or image.shape[-1] == 3
    if is_picture:
        raster.write_picture(folder / f"{name}.png", image)
        return f"{name}.png"
    nib.save(nib.Nifti1Image(image, np.eye(4)), folder / f"{name}.nii.gz")
    return f"{name}.nii.gz"


def _read_arrays(path: Path) -> Arrays:
    """Raises: ValueError: not a MedMNIST file."""
    if not zipfile.is_zipfile(path):
        raise ArgumentError("root", f"={path}: not a MedMNIST file, expected .npz with plain arrays")
    keys = [f"{split}_{content}" for split in _SPLITS for content in ("images", "labels")]
    arrays: Arrays = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in keys if key not in file]
            for split in _SPLITS if not missing else ():
                arrays[split] = (file[f"{split}_images"], file[f"{split}_labels"])
    except ValueError as error:
        raise ValueError(f"{path}: not a MedMNIST file ({error})") from error
    except _DAMAGED as error:
        raise ValueError(
            f"{path}: damaged, or not a MedMNIST file (.npz of plain arrays): {error}"
        ) from error
    if missing:
        raise ValueError(
            f"{path}: no array {missing[0]} in it, expected those of MedMNIST: {', '.join(keys)}"
        )
    for split, (images, labels) in arrays.items():
        _check_arrays(path, split, images, labels)
    return arrays


def _check_arrays(path: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raises: ValueError: other types or shapes than those of MedMNIST."""
    are_images = images.dtype == np.uint8 and images.ndim in (3, 4)
    are_rows = labels.ndim == 2 and len(labels) == len(images)
    if not are_images or not are_rows:
        raise ValueError(
            f"{path}: {split}_images must be (n, height, width), (n, height, width, 3) or (n, x, y, z) "
            f"uint8 with a row of {split}_labels each, "
            f"got {images.shape} {images.dtype} and {labels.shape}"
        )
    if labels.dtype.kind not in "iub":
        raise ValueError(f"{path}: {split}_labels must be whole numbers, got {labels.dtype}")
