"""Read the files of one case: its errors, its warnings, and what the fingerprint needs of it."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from medconv.data.case import MAX_SHEAR, Case, Dataset, Grid
from medconv.data.case_files import image_of, label_of
from medconv.data.io import class_masks
from medconv.data.io.formats import shown, structures_of
from medconv.data.io.grids import in_c_order, on_grid, rounding_doubts, to_canonical
from medconv.data.io.images import (
    channel_doubts,
    lacks_orientation,
    missing_slices,
    nifti_image,
    shape_and_affine,
)
from medconv.data.io.label_values import contradictions
from medconv.data.io.raster import are_picture_channels, is_picture, turn_doubts
from medconv.data.preprocessing.normalisation import range_error
from medconv.data.preprocessing.preprocess import content_box
from medconv.data.preprocessing.value_bands import even_step, percentiles, sampled
from medconv.metrics.dice import value_counts
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.logging import size_text

REPORT_VERSION = 11  # raise it when a report measures more or otherwise
_MAX_SAMPLES = 5_000  # voxels per case whose intensities are sampled
_MIN_SAMPLES = 100
_ALL_SAMPLES = 20_000_000  # over all cases, if that leaves each the lowest number
# Of the usual difference between neighbouring slices, each relative to the slices' own spread.
_REPEATED = 0.1
_LEAST_INT16 = -32768  # what many programs write where there is no data
_FAR_BELOW = 1000  # times farther below zero than the highest value is above: no image's own value
_QUARTERS = (2**14, 2**15, 3 * 2**14, 2**16)  # of the range of uint16
_SAME_FORM = 0.01  # voxels, by which corners may differ
_SAME_SPACING = 0.01  # relative
_NAMED = 5  # cases in a message
_SLICES_AT_ONCE = 16


@dataclass
class CaseReport:
    """The content of one case, its errors and warnings.

    Args:
        grid, channels, low, high: of its files; lowest and highest intensity of all channels.
        no_data: lowest values of channels that probably stand for no data.
        shape, spacing_mm: of the content, in canonical (RAS) axis order.
        oriented: every file says where left and right are.
        class_voxels: one count per class, without voxels to ignore.
        ignored_voxels: their number.
        intensities: (channels, sampled voxels), NaN of missing channels.
        thickness_mm: (classes, axes), see `thickness_of`; None for image-level targets.
        content: hash of the image's voxels, see `note_content`.
        percentiles: of each channel, see `value_bands`.
    """

    case: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    grid: Grid | None = None
    channels: int = 0
    low: float = 0.0
    high: float = 0.0
    no_data: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    spacing_mm: tuple[float, ...] = ()
    flat: bool = False
    oriented: bool = True
    class_voxels: tuple[int, ...] = ()
    ignored_voxels: int = 0
    intensities: np.ndarray | None = None
    thickness_mm: np.ndarray | None = None
    content: str = ""
    percentiles: tuple[tuple[float, ...], ...] = ()


def samples_per_case(dataset: Dataset) -> int:
    """Voxels of a case whose intensities are sampled: fewer only each time that the cases have doubled, since
    all cases are read again then.
    """
    samples = _MAX_SAMPLES
    while samples * len(dataset.cases) > _ALL_SAMPLES and samples > _MIN_SAMPLES:
        samples //= 2
    return max(_MIN_SAMPLES, samples)


def examine(case: Case, dataset: Dataset) -> CaseReport:
    """Examine the files of one case; errors go into the report, none is raised."""
    report = CaseReport(case.id)
    if case.id in dataset.errors:
        report.errors.append(dataset.errors[case.id])
        return report
    image = label = None
    try:
        image = _image(case, dataset, report)
        report.percentiles = percentiles(image, case.missing_channels)
    except ValueError as error:
        report.errors.append(str(error))
    own_examine = dataset.targets.family.own("examine")
    if own_examine:
        own_examine(case, image, dataset, report)
    else:
        try:
            label = _label(case, dataset, report)
        except ValueError as error:
            report.errors.append(str(error))
    if image is not None and label is not None:
        assert report.grid is not None
        note_content(image, report)
        if are_picture_channels(dataset.modalities):
            labelled = image
            if dataset.targets.ignore is not None and (label != dataset.targets.ignore).any():
                labelled = image[:, label != dataset.targets.ignore]
            report.intensities = sampled(labelled, samples_per_case(dataset))
        canonical_label, _ = to_canonical(label[None], report.grid)
        some = (slice(None, None, 7),) * label.ndim  # of the voxels, which mostly tell that they differ
        if label.any() and any(
            np.array_equal(channel[some], label[some]) and np.array_equal(channel, label) for channel in image
        ):
            report.warnings.append(
                f"{case.images[0]}: a channel has the values of the label map, so the answer is in the image"
            )
        report.thickness_mm = thickness_of(canonical_label[0], report.class_voxels, report.spacing_mm)
        if report.intensities is None:
            report.intensities = _sample_foreground(image, label, dataset)
    if report.intensities is not None and case.missing_channels:
        report.intensities[list(case.missing_channels)] = np.nan
    return report


def note_content(image: np.ndarray, report: CaseReport, is_cropped: bool = True) -> None:
    """Complete the report by what follows from an image and its grid. Shape: (channels, X, Y, Z).

    Args: is_cropped: whether prepared images are cropped to their content.
    """
    assert report.grid is not None
    canonical, report.spacing_mm = to_canonical(image, report.grid)
    report.flat = report.grid.shape[2] == 1
    report.shape = canonical.shape[1:]
    if is_cropped:
        report.shape = tuple(axis.stop - axis.start for axis in content_box(canonical))
    # By its hash the same image is found under two ids, whatever its format, type and axis order; but many
    # constant images may be equal by chance.
    if report.low != report.high:
        digest = blake2b(digest_size=8, key=repr(canonical.shape).encode())
        for channel in canonical:
            digest.update(np.ascontiguousarray(channel).data)  # a copy of turned axes alone
        report.content = digest.hexdigest()


def _image(case: Case, dataset: Dataset, report: CaseReport) -> np.ndarray:
    """The image of a case. Raises: ValueError: it cannot be read."""
    image, grid = image_of(case)
    path = case.images[0]
    if len(image) != len(dataset.modalities):
        names = ", ".join(dataset.modalities)
        report.errors.append(f"{path}: expected the channels {names}, found {len(image)} channels")
    present = np.delete(image, case.missing_channels, axis=0) if case.missing_channels else image
    odd = sum(int((~np.isfinite(plane)).sum()) for channel in present for plane in channel)
    if odd:
        report.errors.append(f"{path}: {odd} voxels are NaN or infinite, expected finite numbers")
    ranges = [(float(channel.min()), float(channel.max())) for channel in present]
    if not odd:
        for channel, (low, high) in zip(present, ranges, strict=True):
            error = range_error(channel, low, high)
            report.errors += [f"{path}: {error}"] if error else []
        report.warnings += [f"{path}: {pair}" for pair in repeated_slices(present)]
    if any(wrapped_negatives(channel, *low_high) for channel, low_high in zip(present, ranges, strict=True)):
        report.warnings.append(
            f"{path}: values near 0 and near 65535, none between; negative values may be stored as unsigned"
        )
    if any(low == high for low, high in ranges):
        report.warnings.append(f"{path}: a channel is constant")
    report.no_data = tuple(low for low, high in ranges if is_no_data(low, high))
    report.low = min(low for low, _ in ranges)
    report.high = max(high for _, high in ranges)
    if grid.shape[2] > 1 == min(grid.shape):
        report.errors.append(
            f"{path}: shape {grid.shape}, expected several slices along each axis; a 2D image has its one "
            "slice along the third axis"
        )
    report.grid = grid
    report.channels = len(image)
    for image_path in case.images:
        report.warnings += header_doubts(image_path)
    if len(case.images) > 1:
        report.warnings += channel_doubts(case.images)
    report.oriented = not any(map(lacks_orientation, case.images))
    if grid.shear > MAX_SHEAR:
        shear = f"{grid.shear:.1f} degrees off a right angle"
        report.warnings.append(f"{path}: its axes are {shear}; it is used as it is")
    return image


def _label(case: Case, dataset: Dataset, report: CaseReport) -> np.ndarray:
    """The label map to learn. Raises: ValueError: it cannot be read, or is not on the image's grid."""
    label, grid = label_of(case)
    assert case.label is not None
    file = shown(case.label)
    further_relabels = case.soft_label.further_relabels if case.soft_label else ()
    for path, relabel in zip(case.label_files, (case.relabel, *further_relabels), strict=True):
        if path is None:
            continue
        report.errors += contradictions(path, relabel, dataset.class_names, case.annotated)
        is_of_masks = class_masks.is_of_masks(path)
        for mask in [mask for _, mask in class_masks.files(path)] if is_of_masks else [path]:
            report.warnings += header_doubts(mask)
            if is_picture(mask) and is_picture(case.images[0]):
                report.warnings += turn_doubts(case.images[0], mask)
            elif is_of_masks and not is_picture(mask):  # which are put together on the image's grid
                mask_grid = Grid.of(*shape_and_affine(mask)).with_spacing_mm(case.source_spacing_mm)
                report.warnings += rounding_doubts(case.images[0], grid, mask, mask_grid)
    if structures_of(case.label):
        report.warnings += missing_slices(case.label, case.images[0], grid)
    assert isinstance(dataset.targets, SegmentationTargets)
    report.warnings += [f"{file}: {doubt}" for doubt in dataset.targets.label_doubts(label)]
    label = dataset.targets.learned_label(label)
    num_classes = len(dataset.class_names)
    ignore = dataset.targets.ignore
    counts = value_counts(label)
    if ignore is not None and ignore < len(counts):
        report.ignored_voxels = int(counts[ignore])
        counts[ignore] = 0
    undeclared = (num_classes + np.flatnonzero(counts[num_classes:])).tolist()
    if undeclared:
        also = "" if ignore is None else f", and {ignore} to be ignored"
        expected = f"expected 0 to {num_classes - 1}{also}"
        report.errors.append(f"{file}: label values {undeclared} are not declared, {expected}")
    if not counts.any():
        report.warnings.append(f"{file}: every voxel has the value to ignore")
    elif not counts[1:].any():
        report.warnings.append(f"{file}: no foreground, every voxel is background")
    elif not counts[0]:
        report.warnings.append(f"{file}: no background, every voxel is foreground")
    # Values that are not declared are an error of the case, and of no class.
    report.class_voxels = tuple(np.pad(counts, (0, num_classes))[:num_classes].tolist())
    if report.grid is not None:
        label = on_grid(label, case.images[0], report.grid, file, grid)
        report.warnings += rounding_doubts(case.images[0], report.grid, file, grid)
    return label


def _sample_foreground(image: np.ndarray, label: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Voxels spread evenly over the foreground, of an empty label map over all labelled voxels.

    Shape: (channels, X, Y, Z) -> (channels, about `samples_per_case`).
    """
    stored = in_c_order(label.T)  # in file order, the first axis fastest
    is_labelled = np.True_ if dataset.targets.ignore is None else stored != dataset.targets.ignore
    voxel_indices = np.flatnonzero((stored > 0) & is_labelled)
    count = samples_per_case(dataset)
    step = max(1, len(voxel_indices) // count)
    if not len(voxel_indices):
        voxel_indices = np.flatnonzero(np.broadcast_to(is_labelled, stored.shape))
        step = even_step(max(1, len(voxel_indices)), count)
    z, y, x = np.unravel_index(voxel_indices[::step], stored.shape)
    return np.stack([channel[x, y, z] for channel in image])


def thickness_of(label: np.ndarray, class_voxels: Sequence[int], spacing_mm: Sequence[float]) -> np.ndarray:
    """How thick the structures of each class are along each axis: the mean length of their runs of voxels.

    A ball of diameter d has 2/3 d, a plate across an axis its thickness. Components count by their number of
    runs, so many small lesions are not hidden by a large one.

    Shape: label (X, Y, Z) -> (classes, axes), in mm; 0 for a class without voxels.
    Args:
        class_voxels: one count per class, the background's first. Higher label values do not count.
    """
    num_classes = len(class_voxels)
    thickness = np.zeros((num_classes, label.ndim))
    for axis, voxel_mm in enumerate(spacing_mm):
        num_runs = np.zeros(num_classes, np.int64)
        before = (slice(None),) * axis
        first_row = label[*before, :1]
        begins_run = label[*before, 1:] != label[*before, :-1]
        for values in (first_row.ravel(), label[*before, 1:][begins_run]):
            num_runs += np.bincount(values, minlength=num_classes)[:num_classes]
        thickness[:, axis] = voxel_mm * np.array(class_voxels) / np.maximum(num_runs, 1)
    return thickness


def repeated_slices(image: np.ndarray) -> Iterator[str]:
    """Neighbouring slices along the third axis that are equal, or nearly so: one was probably copied.

    Slices of two values, as of a shape, are left out: they are equal by chance.
    Shape: (channels, X, Y, Z).
    """
    if image.shape[3] < 3:
        return
    pairs: dict[int, str] = {}
    for channel in image:
        deviations = []  # of each slice
        differences = []  # the mean from each slice to the next
        for first in range(0, channel.shape[2], _SLICES_AT_ONCE):
            # With the first of those after them; in memory the voxels of a slice lie far apart.
            slices = in_c_order(channel[:, :, first : first + _SLICES_AT_ONCE + 1].T)
            deviations += [values.std(dtype=np.float64) for values in slices[:_SLICES_AT_ONCE]]
            differences += [
                np.abs(after - before).mean(dtype=np.float64) for before, after in pairwise(slices)
            ]
        spread = np.array(deviations)
        apart = np.array(differences)
        usable = (spread[1:] > 0) & (spread[:-1] > 0)  # an empty slice repeats no other
        if usable.sum() < 2:
            continue
        share = apart / np.maximum(spread[1:] + spread[:-1], np.finfo(np.float64).tiny)
        is_repeated = usable & (share <= _REPEATED * np.median(share[usable]))
        for z in np.flatnonzero(is_repeated):
            if _has_two_values(channel[:, :, z]) and _has_two_values(channel[:, :, z + 1]):
                continue
            pairs[int(z)] = "equal" if apart[z] == 0 else "nearly equal"
    if pairs:
        text = ", ".join(f"{z} and {z + 1} ({how})" for z, how in sorted(pairs.items())[:_NAMED])
        more = f" and {len(pairs) - _NAMED} more pairs" if len(pairs) > _NAMED else ""
        yield f"slices {text}{more} of {image.shape[3]} (third axis, from 0) repeat each other"


def _has_two_values(plane: np.ndarray) -> bool:
    return bool(((plane == plane.min()) | (plane == plane.max())).all())


def is_no_data(low: float, high: float) -> bool:
    """Whether the lowest value of a channel probably stands for no data, whatever was interpolated since."""
    return low == _LEAST_INT16 or -low > _FAR_BELOW * high > 0


def wrapped_negatives(channel: np.ndarray, low: float, high: float) -> bool:
    """Whether negative int16 values, as those of CT, were stored as unsigned ones: 65536 too large.

    Args:
        low, high: lowest and highest value.
    """
    if low < 0 or not _QUARTERS[2] < high < _QUARTERS[3]:
        return False
    is_between = (channel > _QUARTERS[0]) & (channel < _QUARTERS[2])
    if is_between.any():
        return False
    upper = channel[channel >= _QUARTERS[2]]
    return bool(upper.min() < upper.max())  # one value alone is that of a saturated detector


def header_doubts(path: Path) -> Iterator[str]:
    """Warnings about the header of a NIfTI file; none for other formats."""
    image = nifti_image(path)
    if image is None:
        return
    header: Any = image.header
    proxy: Any = image.dataobj  # typed without the offset
    # More bytes than the header describes: further slices, or a larger type
    expected = proxy.offset + prod(image.shape) * image.get_data_dtype().itemsize
    stored = path.stat().st_size if path.suffix == ".nii" else 0
    if path.suffix == ".gz":
        with path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            stored = int.from_bytes(file.read(), "little")  # the last member's bytes, modulo 4 GB
    if stored > expected:
        described = f"{size_text(image.shape)} of {image.get_data_dtype()}"
        yield f"{path}: {stored - expected} bytes follow the voxels that its header describes ({described})"
    # sform and qform, or sform and voxel size, that differ, or one that cannot be read
    try:
        sform, s_code = header.get_sform(coded=True)
        qform, q_code = header.get_qform(coded=True)
    except ValueError as error:  # not a valid quaternion
        yield f"{path}: its qform cannot be read ({error}); the sform is used"
        return
    if not s_code:
        return
    shape = header.get_data_shape()
    distance = Grid.of(shape, sform).corner_distance(Grid.of(shape, qform)) if q_code else 0
    if distance > _SAME_FORM:
        yield f"{path}: sform and qform differ by {distance:.3g} voxels; the sform is used"
        return
    stated_mm = header["pixdim"][1:4]
    spacing_mm = np.linalg.norm(sform[:3, :3], axis=0)
    has_slices = np.array([*shape, 1, 1][:3]) > 1
    if (np.abs(stated_mm / spacing_mm - 1) > _SAME_SPACING)[has_slices].any():
        stated = size_text(stated_mm, 4)
        yield f"{path}: pixdim states {stated} mm, sform {size_text(spacing_mm, 4)} mm, which is used"
