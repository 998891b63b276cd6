"""A phantom dataset: synthetic abdomens, written as NIfTI files in Medical Segmentation Decathlon layout.

Tests, the quick start and benchmarks train on it: small, quick to write, and not trivial to learn. Organs of
different sizes, a thin vessel, a lesion that is sometimes absent; anisotropic grids, orientations and
intensity scales that differ between cases.

Anatomy is analytic, in mm along (Right, Anterior, Superior) about the centre of the field of view. 2-D is the
same code without the last axis: an axial slice through the same body. `points_mm` is (spatial_dims, *grid).
The order of the random draws is fixed: the same seed gives the same bytes.
"""

import json
import logging
import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel import orientations
from numpy.typing import NDArray
from scipy.linalg import expm
from scipy.ndimage import gaussian_filter
from scipy.spatial import cKDTree

from medconv.data.case import Dataset
from medconv.data.datasets.dataset_json import msd

_LOG = logging.getLogger(__name__)
Array = NDArray[np.float64]

LABELS = ("background", "large_organ", "medium_organ", "small_organ", "vessel", "lesion")

# Tissues are painted into one array: 0 is air, 1..5 are the labels, 6..8 are anatomy without a label
_LARGE = 1
_MEDIUM = 2
_SMALL = 3
_VESSEL = 4
_LESION = 5
_BODY = 6
_BOWEL = 7
_GAS = 8
# Relative signal by tissue. Medium organ, small organ and bowel share one mean: only size, position and gas
# differ
_SIGNAL = np.array(
    [
        0.0,  # air
        0.64,  # large organ
        0.84,  # medium organ
        0.84,  # small organ
        1.3,  # vessel
        0.18,  # lesion
        0.3,  # body
        0.84,  # bowel
        0.1,  # gas
    ]
)

# By the number of spatial dimensions
_FIELD_MM = {2: (128.0, 128.0), 3: (100.0, 100.0, 90.0)}
_IN_PLANE_MM = {2: (0.9, 1.4), 3: (1.6, 2.2)}
_THROUGH_PLANE_MM = {2: (5.0, 5.0), 3: (2.4, 3.6)}
ORIENTATIONS = {2: ("RAS", "LPS", "LAS", "ARS", "PLS"), 3: ("RAS", "LPS", "LAS", "PIR", "ASL", "SRA")}

# Tissue: centre and semi-axes along (R, A, S), as shares of half the first field of view; later ones cover
# earlier ones
_ELLIPSOIDS = {
    _BODY: ((0.0, 0.0, 0.0), (0.94, 0.82, np.inf)),  # an elliptic cylinder, open above and below
    _BOWEL: ((0.02, 0.60, 0.10), (0.20, 0.14, 0.24)),  # the distractor: as bright as an organ, but background
    _LARGE: ((0.40, 0.02, 0.05), (0.36, 0.46, 0.52)),
    _MEDIUM: ((-0.48, -0.18, 0.20), (0.25, 0.30, 0.32)),
    _SMALL: ((-0.34, 0.36, -0.28), (0.16, 0.18, 0.20)),
}
_GAS_SHARE = 0.6  # of the bowel's radius
_LESION_SHARE = 0.7  # of the cases
_LESION_RADIUS_MM = (5.0, 7.0)
_VESSEL_RADIUS_MM = (2.9, 3.3)
_WARP_MM = 5.0
_BIAS = 0.25  # largest relative change of the signal by the coil's sensitivity
_NOISE = 0.04  # standard deviation, relative to the signal
_SCALE_MAX = 16000.0  # the largest signal, about 1.3 x (1 + _BIAS) of it, still fits into int16
_SCALE_RANGE = 1000.0
_WAVES = 4  # plane waves of a smooth field
_INT16_FROM_SCALE = 400.0  # below it rounding to integers would add to the noise: float32


def write_phantom(root: Path, *, spatial_dims: int = 3, num_cases: int = 30, seed: int = 0) -> Path:
    """Write the phantom dataset to `root`, unless a dataset is there already, and return `root`.

    Volumes of about 53 x 53 x 30 voxels, int16 or float32, in a varying axis order; or images of 111 x 111.

    It is written to a sibling folder `.<name>.<random>.partial`, then renamed, so a killed process leaves
    only that folder. If several processes write at once, the first one wins. A dataset with other arguments
    is kept; a warning names it.

    Args:
        root: a new or empty folder, or one with a dataset.
        seed: the same seed gives the same bytes; case i does not depend on num_cases.

    Raises:
        ValueError: an argument out of range, or `root` is neither empty nor a dataset.
    """
    if spatial_dims not in (2, 3):
        raise ValueError(f"spatial_dims must be 2 or 3, got {spatial_dims}")
    if num_cases < 1:
        raise ValueError(f"num_cases must be at least 1, got {num_cases}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    description = f"Synthetic abdomens: {spatial_dims}-D, {num_cases} cases, seed {seed}. Not a real patient."
    target = Path(root).resolve()
    # Before looking for dataset.json: another process may write the whole dataset in between
    is_occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    dataset = target / "dataset.json"
    if dataset.exists():
        if description not in dataset.read_text(encoding="utf-8", errors="replace"):
            _LOG.warning("%s is kept, although other arguments were requested (%s)", dataset, description)
        return Path(root)
    if is_occupied:
        raise ValueError(
            f"the phantom needs a new or empty folder, but {target} is not empty and "
            "holds no dataset.json; choose another folder, or name your data's layout by data=: the phantom "
            "is the default, data=folder and data=auto read your own"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}.partial"
    _LOG.info("writing the %d-D phantom, %d cases, to %s", spatial_dims, num_cases, target)
    try:
        _write_dataset(partial, description, spatial_dims, num_cases, seed)
        _publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Path(root)


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
    seeds = [[seed, index] for index in range(num_cases)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        # `list` raises the error of a thread
        list(pool.map(_write_case, repeat(root), names, repeat(spatial_dims), seeds))
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
        array: voxels with axes to right, anterior, superior; without the last axis in 2-D.
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

    Raises:
        ValueError: as `write_phantom`.
    """
    folder = write_phantom(Path(root), spatial_dims=spatial_dims, num_cases=num_cases, seed=seed)
    return msd(folder)


def draw_grid(rng: np.random.Generator, spatial_dims: int) -> tuple[Array, Array]:
    """Voxel centres in mm from the middle of the field, (spatial_dims, *grid); the RAS affine, 4 x 4."""
    in_plane = rng.uniform(*_IN_PLANE_MM[spatial_dims])
    through_plane = rng.uniform(*_THROUGH_PLANE_MM[spatial_dims])
    spacing_mm = np.array([in_plane, in_plane, through_plane])
    field_mm = np.array(_FIELD_MM[spatial_dims]) * rng.uniform(0.96, 1.04, spatial_dims)
    sizes = np.round(field_mm / spacing_mm[:spatial_dims]).astype(int)
    axes = []
    for size, step_mm in zip(sizes, spacing_mm, strict=False):
        axes.append((np.arange(size) - (size - 1) / 2) * step_mm)
    affine = np.diag([*spacing_mm, 1.0])
    affine[:3, 3] = rng.uniform(-100.0, 100.0, 3)  # scanners put the origin anywhere
    affine[:spatial_dims, 3] += [axis[0] for axis in axes]
    return np.stack(np.meshgrid(*axes, indexing="ij")), affine


@dataclass(frozen=True)
class _Ellipsoid:
    """Centre and semi-axes in mm, each (spatial_dims,), and the rotation into the ellipsoid's own axes."""

    centre_mm: Array
    semi_axes_mm: Array
    rotation: Array

    def radius(self, points_mm: Array) -> Array:
        """Distance from the centre in semi-axes, (*grid): 1 on the surface."""
        offset = np.moveaxis(points_mm, 0, -1) - self.centre_mm
        distance: Array = np.linalg.norm(offset @ self.rotation.T / self.semi_axes_mm, axis=-1)
        return distance


def draw_anatomy(rng: np.random.Generator, points_mm: Array) -> NDArray[np.uint8]:
    """Tissue of each voxel, (*grid). One warp deforms body, organs and lesion, so that they stay separate."""
    spatial_dims = len(points_mm)
    displacements = np.stack([_draw_waves(rng, points_mm) for _ in points_mm])
    warped_mm = points_mm + _WARP_MM * displacements
    reach_mm = _FIELD_MM[spatial_dims][0] / 2
    tissue = np.zeros(points_mm.shape[1:], np.uint8)
    ellipsoids = {}
    # Each moved by some mm, scaled by up to 12 % per axis, rotated by about 10°
    for label, (centre_share, semi_axes_share) in _ELLIPSOIDS.items():
        centre_mm = np.array(centre_share[:spatial_dims]) * reach_mm
        semi_axes_mm = np.array(semi_axes_share[:spatial_dims]) * reach_mm
        freedom = 0.3 if label == _BODY else 1.0  # the body moves little: it must hold the organs
        centre_mm += freedom * rng.uniform(-0.06, 0.06, spatial_dims) * reach_mm
        semi_axes_mm *= 1 + freedom * rng.uniform(-0.12, 0.12, spatial_dims)
        angles = np.triu(freedom * rng.normal(0, 0.2, (spatial_dims, spatial_dims)), 1)
        # The exponential of a skew-symmetric matrix is a rotation
        ellipsoids[label] = _Ellipsoid(centre_mm, semi_axes_mm, rotation=expm(angles - angles.T))
        tissue[ellipsoids[label].radius(warped_mm) < 1] = label
    tissue[ellipsoids[_BOWEL].radius(warped_mm) < _GAS_SHARE] = _GAS
    tissue[_draw_vessel(rng, points_mm) & (tissue > 0)] = _VESSEL
    if rng.random() < _LESION_SHARE:
        # A ball in the outer half of the large organ, away from the vessel
        organ = ellipsoids[_LARGE]
        centre = rng.uniform(-0.3, 0.3, spatial_dims)  # in semi-axes of the organ
        centre[0] = rng.uniform(0.1, 0.4)
        centre_mm = organ.centre_mm + organ.rotation.T @ (centre * organ.semi_axes_mm)
        distance_mm = np.linalg.norm(np.moveaxis(warped_mm, 0, -1) - centre_mm, axis=-1)
        tissue[distance_mm < rng.uniform(*_LESION_RADIUS_MM)] = _LESION
    return tissue


def _draw_waves(rng: np.random.Generator, points_mm: Array) -> Array:
    """A smooth field in -1..1, (*grid): the mean of plane waves of 60 to 150 mm."""
    spatial_dims = len(points_mm)
    directions = rng.normal(size=(_WAVES, spatial_dims))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    wavelengths_mm = rng.uniform(60, 150, (_WAVES, 1))
    wave_vectors = directions * (2 * np.pi / wavelengths_mm)
    phases = np.tensordot(wave_vectors, points_mm, axes=1)  # (_WAVES, *grid)
    shifts = rng.uniform(0, 2 * np.pi, _WAVES).reshape(-1, *[1] * spatial_dims)
    waves: Array = np.cos(phases + shifts).mean(axis=0)
    return waves


def _draw_vessel(rng: np.random.Generator, points_mm: Array) -> NDArray[np.bool_]:
    """A curved tube along the last axis, through the whole field of view, beside the large organ."""
    spatial_dims = len(points_mm)
    reach_mm = np.array(_FIELD_MM[spatial_dims]) / 2
    along = np.linspace(-1.2, 1.2, 1000)  # a step of about 0.1 mm, much below the radius
    curve_mm = np.stack([along * reach_mm[-1]] * spatial_dims, axis=1)
    for axis, middle_mm in zip(range(spatial_dims - 1), (4.0, -16.0), strict=False):
        bend_mm = rng.uniform(6, 10)
        tilt_mm = rng.uniform(-3, 3)
        frequency = np.pi * rng.uniform(0.9, 1.4)
        shift = rng.uniform(0, 2 * np.pi)
        wave = np.sin(frequency * along + shift)
        curve_mm[:, axis] = middle_mm + tilt_mm * along + bend_mm * wave
    radius_mm = rng.uniform(*_VESSEL_RADIUS_MM)
    voxels_mm = points_mm.reshape(spatial_dims, -1).T
    # Distances above the radius are infinite, which saves most of the search
    distance_mm: Array = cKDTree(curve_mm).query(voxels_mm, distance_upper_bound=radius_mm)[0]
    return (distance_mm < radius_mm).reshape(points_mm.shape[1:])


def draw_image(rng: np.random.Generator, tissue: NDArray[np.uint8], points_mm: Array) -> NDArray[np.generic]:
    """The simulated scan of `tissue`, (*grid): blurred edges, bias field, Rician noise, random scale."""
    signal = _SIGNAL * rng.uniform(0.95, 1.05, _SIGNAL.shape)
    waves = _draw_waves(rng, points_mm)
    clean = gaussian_filter(signal[tissue], sigma=0.5)  # in voxels
    clean = clean * (1 + _BIAS * waves / np.abs(waves).max())
    real, imaginary = rng.normal(0, _NOISE, (2, *tissue.shape))
    scale = _SCALE_MAX * _SCALE_RANGE ** -rng.random()
    image: Array = scale * np.hypot(clean + real, imaginary)
    if scale < _INT16_FROM_SCALE:
        return image.astype(np.float32)
    return np.clip(np.round(image), 0, np.iinfo(np.int16).max).astype(np.int16)
