"""A phantom dataset: synthetic abdomens, written as NIfTI files in Medical Segmentation Decathlon layout.

Tests, the quick start and benchmarks train on it: small, quick to write, and not trivial to learn. Organs of
different sizes, a thin vessel, a lesion that is sometimes absent; anisotropic grids, orientations and
intensity scales that differ between cases.

`phantom_anatomy` draws the cases.
"""

import json
import logging
import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel import orientations
from numpy.typing import NDArray

from medconv.data.case import Dataset
from medconv.data.datasets.decathlon import msd
from medconv.data.datasets.phantom_anatomy import (
    LABELS,
    ORIENTATIONS,
    Array,
    draw_anatomy,
    draw_grid,
    draw_image,
)

_LOG = logging.getLogger(__name__)


def write_phantom(root: Path, *, spatial_dims: int = 3, num_cases: int = 30, seed: int = 0) -> Path:
    """Write the phantom dataset to `root`, unless a dataset is there already, and return `root`.

    Volumes of about 53 x 53 x 30 voxels, int16 or float32, in a varying axis order; or images of 111 x 111.

    It is written to a sibling folder `.<name>.<random>.partial`, then renamed, so a killed process leaves
    only that folder. If several processes write at once, the first one wins. A dataset with other arguments
    is kept; a warning names it.

    Args:
        root: a new or empty folder, or one with a dataset.
        spatial_dims: 2 or 3.
        num_cases: at least 1.
        seed: the same seed gives the same bytes; case i does not depend on num_cases.

    Raises:
        ValueError: an argument out of range, or `root` is neither empty nor a dataset.
    """
    _check_arguments(spatial_dims, num_cases, seed)
    description = f"Synthetic abdomens: {spatial_dims}-D, {num_cases} cases, seed {seed}. Not a real patient."
    target = Path(root).resolve()
    if _is_written(target, description):
        return Path(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    _LOG.info("writing the %d-D phantom, %d cases, to %s", spatial_dims, num_cases, target)
    try:
        _write_dataset(partial, description, spatial_dims, num_cases, seed)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Path(root)


def _check_arguments(spatial_dims: int, num_cases: int, seed: int) -> None:
    if spatial_dims not in (2, 3):
        raise ValueError(f"spatial_dims must be 2 or 3, got {spatial_dims}")
    if num_cases < 1:
        raise ValueError(f"num_cases must be at least 1, got {num_cases}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")


def _is_written(root: Path, description: str) -> bool:
    """Whether a dataset is at `root`; warns if it was written with other arguments."""
    # Before looking for dataset.json: another process may write the whole dataset in between
    is_occupied = root.exists() and (not root.is_dir() or any(root.iterdir()))
    dataset = root / "dataset.json"
    if dataset.exists():
        if description not in dataset.read_text(encoding="utf-8", errors="replace"):
            _LOG.warning("%s is kept, although other arguments were requested (%s)", dataset, description)
        return True
    if is_occupied:
        raise ValueError(
            f"the phantom needs a new or empty folder, but {root} is not empty and "
            "holds no dataset.json; choose another folder"
        )
    return False


def _publish(partial: Path, root: Path) -> None:
    """Rename the finished folder to `root`; if another process was faster, keep its dataset."""
    try:
        partial.replace(root)  # POSIX: also over an empty folder, never over a filled one
    except OSError:
        if not (root / "dataset.json").exists():
            raise
        _LOG.info("another process has written %s meanwhile; it is kept", root)


def _write_dataset(root: Path, description: str, spatial_dims: int, num_cases: int, seed: int) -> None:
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    names = [f"phantom_{index:03d}.nii.gz" for index in range(num_cases)]

    def write(index: int) -> None:
        _write_case(root, names[index], spatial_dims, [seed, index])

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(write, range(num_cases)))  # `list` raises the error of a thread
    content = {
        "name": "phantom",
        "description": description,
        "licence": "CC0-1.0",
        "modality": {"0": "MRI"},
        "labels": {str(value): name for value, name in enumerate(LABELS)},
        "numTraining": num_cases,
        "numTest": 0,
        "training": [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names],
        "test": [],
    }
    text = json.dumps(content, indent=2) + "\n"
    (root / "dataset.json").write_text(text, encoding="utf-8")


def _write_case(root: Path, name: str, spatial_dims: int, seed: list[int]) -> None:
    """Draw one case on a random grid, apply a random orientation, and save image and label."""
    rng = np.random.default_rng(seed)
    points_mm, affine = draw_grid(rng, spatial_dims)
    tissue = draw_anatomy(rng, points_mm)
    image = draw_image(rng, tissue, points_mm)
    label = np.where(tissue < len(LABELS), tissue, 0).astype(np.uint8)
    orientation = str(rng.choice(ORIENTATIONS[spatial_dims]))
    _save(root / "imagesTr" / name, image, affine, orientation)
    _save(root / "labelsTr" / name, label, affine, orientation)


def _save(path: Path, array: NDArray[np.generic], affine: Array, orientation: str) -> None:
    """Write an array as NIfTI.

    Args:
        path: of the file.
        array: voxels with axes to right, anterior, superior; without the last axis in 2-D.
        affine: its affine.
        orientation: of the axes in the file, such as `LPS`.
    """
    volume = array.reshape((*array.shape, 1)[:3])
    transform = orientations.ornt_transform(
        orientations.axcodes2ornt("RAS"), orientations.axcodes2ornt(orientation)
    )
    file_affine = affine @ orientations.inv_ornt_aff(transform, volume.shape)
    nifti = nib.Nifti1Image(orientations.apply_orientation(volume, transform), file_affine)
    nifti.header.set_xyzt_units("mm")
    nifti.set_sform(file_affine, code=1)
    nifti.set_qform(file_affine, code=1)
    nib.save(nifti, path)  # nibabel's gzip header holds neither time nor file name


def phantom(root: str | Path, spatial_dims: int, num_cases: int, seed: int = 0) -> Dataset:
    """The phantom dataset; it is written first if it is absent.

    Args:
        root: see `write_phantom`.
        spatial_dims: 2 or 3.
        num_cases: at least 1.
        seed: see `write_phantom`.

    Raises:
        ValueError: as `write_phantom`.
    """
    folder = write_phantom(Path(root), spatial_dims=spatial_dims, num_cases=num_cases, seed=seed)
    return msd(folder)
