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
from medconv.data.datasets.csv_table import csv
from medconv.data.io import raster
from medconv.data.io.images import stamp
from medconv.targets import Targets
from medconv.utils.progress import track

_SPLITS = ("train", "val", "test")
_TABLE = "labels.csv"
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


def medmnist(
    root: str | Path | None,
    cache_dir: str | Path,
    class_names: Sequence[str] | None = None,
    target_type: str | None = None,
) -> Dataset:
    """The cases of FILE.npz with its own splits; images are written as PNG or NIfTI to `cache_dir`.

    Args: class_names: None numbers them. target_type: as for `csv`; ordinal labels are classes.
    Raises: ValueError: not a MedMNIST file, or no space left.
    """
    if root is None or not Path(root).is_file():
        problem = "is not set" if root is None else f"{root}: no such file"
        raise ValueError(
            f"data.root={problem}, expected a MedMNIST file, such as data.root=/data/pneumoniamnist.npz"
        )
    path = Path(root)
    identity = sha256(repr([str(path.resolve()), *stamp(path)]).encode()).hexdigest()[:12]
    home = Path(cache_dir) / f"{path.stem}-files-{identity}"
    if not (home / _TABLE).is_file():
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(home.with_name(f".{home.name}.lock")):  # only one process unpacks
                if not home.exists():
                    _unpack(path, home)
        except OSError as error:
            raise ValueError(f"data.cache_dir: cannot write to {home} ({error.strerror})") from error
    columns = _columns(home)
    kind = target_type or ("multiclass" if len(columns) == 1 else "multilabel")
    numbers = _all_classes(home) if kind in ("multiclass", "ordinal") else None
    dataset = csv(
        home / _TABLE, label_columns=columns, target_type=kind, class_names=numbers, modality="grey"
    )
    return _with_names(replace(dataset, name=path.stem), class_names)


def _with_names(dataset: Dataset, names: Sequence[str] | None) -> Dataset:
    """The dataset with these names, in the order of the numbers. Raises: ValueError: too few or too many."""
    if not names:
        return dataset
    if len(names) != (count := len(dataset.class_names)):
        raise ValueError(f"data.class_names needs a name for each of {count} outputs, got {list(names)}")
    named = Targets.from_plain({**dataset.targets.plain(), "names": list(map(str, names))})
    return replace(dataset, targets=named, class_names=named.names)


def _unpack(path: Path, home: Path) -> None:
    """Write to a sibling folder and rename it, so that the folder is complete or absent."""
    arrays = _arrays(path)
    partial = home.with_name(f".{home.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "images").mkdir(parents=True)
        with (partial / _TABLE).open("w", newline="", encoding="utf-8") as file:
            table = tables.writer(file)
            num_columns = arrays["train"][1].shape[1]
            columns = ["label"] if num_columns == 1 else [f"finding_{i}" for i in range(num_columns)]
            table.writerow(["path", "split", *columns])
            for split, (images, labels) in arrays.items():
                for i, image in enumerate(track(images, f"unpacking {split}")):
                    name = _write(partial, f"images/{split}_{i:05d}", image)
                    table.writerow([name, split, *labels[i].astype(np.int64).tolist()])
        partial.replace(home)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, name: str, image: np.ndarray) -> str:
    if image.ndim == 2 or image.shape[-1] == 3:
        raster.write_picture(folder / f"{name}.png", image)
        return f"{name}.png"
    nib.save(nib.Nifti1Image(image, np.eye(4)), folder / f"{name}.nii.gz")
    return f"{name}.nii.gz"


def _arrays(path: Path) -> Arrays:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"data.root={path}: not a MedMNIST file, expected .npz with plain arrays")
    keys = [f"{split}_{what}" for split in _SPLITS for what in ("images", "labels")]
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [key for key in keys if key not in file]:
                raise ValueError(
                    f"{path}: no array {missing[0]} in it, expected those of MedMNIST: {', '.join(keys)}"
                )
            arrays = {split: (file[f"{split}_images"], file[f"{split}_labels"]) for split in _SPLITS}
    except ValueError as error:
        ours = str(error).startswith(str(path))
        raise error if ours else ValueError(f"{path}: not a MedMNIST file ({error})") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path}: damaged, or not a MedMNIST file (.npz of plain arrays): {error}"
        ) from error
    for split, (images, labels) in arrays.items():
        if (
            images.dtype != np.uint8
            or images.ndim not in (3, 4)
            or labels.ndim != 2
            or len(labels) != len(images)
        ):
            raise ValueError(
                f"{path}: {split}_images must be (n, height, width), (n, height, width, 3) or (n, x, y, z) "
                f"uint8 with a row of {split}_labels each, got {images.shape} {images.dtype} and "
                f"{labels.shape}"
            )
        if labels.dtype.kind not in "iub":
            raise ValueError(f"{path}: {split}_labels must be whole numbers, got {labels.dtype}")
    return arrays


def _columns(home: Path) -> list[str]:
    with (home / _TABLE).open(newline="", encoding="utf-8") as file:
        return next(tables.reader(file))[2:]


def _all_classes(home: Path) -> list[str]:
    """0 to the highest label, including labels without an example."""
    with (home / _TABLE).open(newline="", encoding="utf-8") as file:
        highest = max(int(row["label"]) for row in tables.DictReader(file))
    return [str(label) for label in range(highest + 1)]
