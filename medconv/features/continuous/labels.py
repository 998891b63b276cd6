"""Target images of cases: the check of a pair, its prepared arrays, and the reference of a validation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from medconv.data.case import Case, Dataset, Grid
from medconv.data.case_files import image_of
from medconv.data.io.grids import on_grid, rounding_doubts, to_canonical
from medconv.data.io.images import read_image
from medconv.data.loading.patch_dataset import Opaque
from medconv.data.preprocessing.examine import CaseReport, header_doubts, note_content, samples_per_case
from medconv.data.preprocessing.preprocess import CropInfo, PreprocessingConfig, resampled_shape
from medconv.data.preprocessing.resampling import zoom
from medconv.data.preprocessing.value_bands import sampled
from medconv.features.continuous.targets import ContinuousTargets, scale_of

_FAR_SPREAD = 5  # times the standard deviation of the image, or a fifth of it, is another quantity
_SMALLEST_STD = 1e-30
_ALIKE = 0.9  # correlation of image and target above which they are probably one quantity


def examine_pair(case: Case, image: np.ndarray | None, dataset: Dataset, report: CaseReport) -> None:
    """As `Family.examine`."""
    assert isinstance(dataset.targets, ContinuousTargets)
    if image is None:
        return
    grid = report.grid
    assert grid is not None
    note_content(image, report)
    report.intensities = sampled(image, samples_per_case(dataset))
    try:
        check_first_channel(dataset.targets, case)
        target = target_on(case, grid, report.warnings)
    except ValueError as error:
        report.errors.append(str(error))
        return
    report.warnings += [f"{case.label}: {doubt}" for doubt in _doubts(image[0], target, dataset.targets)]


def _doubts(image: np.ndarray, target: np.ndarray, targets: ContinuousTargets) -> list[str]:
    """What looks wrong of a target. Args: image: its first channel."""
    if target.min() == target.max():
        return [f"every voxel of the target is {target.min():.6g}"]
    if np.array_equal(image, target):
        return ["the target equals the image, so there is nothing to learn"]
    ratio = float(target.std()) / max(float(image.std()), _SMALLEST_STD)
    if targets.same_units and not 1 / _FAR_SPREAD < ratio < _FAR_SPREAD:
        return [
            f"the target varies {ratio:.3g} times as much as the image, which are to have the same units "
            "(data.layout.same_units=true)"
        ]
    is_alike = image.std() > 0 and np.corrcoef(image.ravel()[::7], target.ravel()[::7])[0, 1] > _ALIKE
    if not targets.same_units and is_alike and 1 / _FAR_SPREAD < ratio < _FAR_SPREAD:
        return [
            "the target looks like the image; if both have the same units, set data.layout.same_units=true"
        ]
    return []


def target_on(case: Case, grid: Grid, doubts: list[str] | None = None) -> np.ndarray:
    """The target of a case on the grid of its image. Shape: (X, Y, Z) float32.

    Args: doubts: gets those about the file's header.
    Raises:
        ValueError: it cannot be read, is on another grid, or has other than one channel of finite numbers.
    """
    if case.label is None:
        raise ValueError("has no target image, but training needs one")
    target, target_grid = one_channel(case.label)
    target_grid = target_grid.with_spacing_mm(case.source_spacing_mm)
    if doubts is not None:
        doubts += header_doubts(case.label)
    on_image = on_grid(target, case.images[0], grid, case.label, target_grid)
    if doubts is not None:
        doubts += rounding_doubts(case.images[0], grid, case.label, target_grid)
    return on_image


def check_first_channel(targets: ContinuousTargets, case: Case) -> None:
    """Raises: ValueError: the channel is missing to which the network learns the difference."""
    if targets.same_units and 0 in case.missing_channels:
        raise ValueError(
            "its first channel is missing, to which the network learns the difference "
            "(data.layout.same_units=true)"
        )


def one_channel(path: Path) -> tuple[np.ndarray, Grid]:
    """An image, (X, Y, Z) float32, and its grid.

    Raises: ValueError: other than one channel of finite numbers.
    """
    channels, grid = read_image([path])
    if len(channels) != 1:
        raise ValueError(f"{path}: expected an image of one channel, found {len(channels)}")
    odd = int((~np.isfinite(channels)).sum())
    if odd:
        raise ValueError(f"{path}: {odd} voxels are NaN or infinite, expected finite numbers")
    return channels[0], grid


def settings(targets: ContinuousTargets) -> Any:
    """As `Family.labels`."""
    own_units = [] if targets.same_units else [targets.low]
    return [targets.kind, targets.same_units, *own_units]


def prepared(
    targets: ContinuousTargets,
    case: Case,
    image: np.ndarray,
    crop_info: CropInfo,
    config: PreprocessingConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """As `Family.labels`: where the image is brighter than its mean; and the target less `targets.low`, so
    that what pads a patch with 0 is the lowest value. With `same_units` target and image, both in units of
    the image's standard deviation.

    Shape: image (channels, X, Y, Z) -> (*spatial) uint8, (1 or 2, *spatial) float32.
    """
    channels = np.stack([target_on(case, crop_info.grid), image[0]])
    mean, std = scale_of(image[0])
    if targets.same_units:
        channels = (channels - mean) / std
        mean = 0.0
    else:
        channels[0] -= targets.low
    resampled = on_prepared_grid(channels, crop_info, config)
    # patches are centred there, as on the foreground of label maps
    is_bright = (resampled[1] > mean).astype(np.uint8)
    return is_bright, resampled[: 1 + targets.same_units]


def on_prepared_grid(channels: np.ndarray, crop_info: CropInfo, config: PreprocessingConfig) -> np.ndarray:
    """Native channels on the grid of the prepared image. Shape: (n, X, Y, Z) -> (n, *spatial) float32."""
    canonical, spacing_mm = to_canonical(channels, crop_info.grid, config.reorients)
    cropped = canonical[:, *crop_info.slices]
    shape = resampled_shape(cropped.shape[1:], spacing_mm, config.target_mm(spacing_mm))
    resampled = np.stack([zoom(channel, shape) for channel in cropped])
    if config.image_dims == 2:
        resampled = resampled[..., 0]
    return np.ascontiguousarray(resampled, np.float32)


def reference(targets: ContinuousTargets, case: Case, grid: Grid) -> dict[str, Any]:
    """As `Family.labels`: the target, and the image's first channel, on the native grid."""
    image, _ = image_of(case)
    return {"reference": torch.from_numpy(target_on(case, grid)), "native": Opaque(image[0])}
