"""What the check of a dataset warns of: repeated slices and images, no-data values, doubtful headers."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.nifti1 import Nifti1Pair

from medconv.data.case import Grid
from medconv.data.io.images import nifti_image
from medconv.utils.logging import size_text, some
from medconv.utils.memory_order import in_c_order

# Of the usual difference between neighbouring slices, each relative to the slices' own spread.
_REPEATED = 0.1
_LEAST_INT16 = -32768  # what many programs write where there is no data
_FAR_BELOW = 1000  # times farther below zero than the highest value is above: no image's own value
_QUARTERS = (2**14, 2**15, 3 * 2**14, 2**16)  # of the range of uint16
_SAME_FORM = 0.01  # voxels, by which corners may differ
_SAME_SPACING = 0.01  # relative
_FEW = 5  # times fewer slices than rows in every case, at 1 x 1 x 1 mm
_FAR_SPACING = 5  # times the median spacing of all cases, or a fifth of it
_NAMED = 5  # cases in a message
_SLICES_AT_ONCE = 16


def repeated_slices(image: np.ndarray) -> Iterator[str]:
    """Neighbouring slices along the third axis that are equal, or nearly so: one was probably copied.

    Slices of two values, as of a shape, are left out: they are equal by chance.
    Shape: (channels, X, Y, Z).
    """
    if image.shape[3] < 3:
        return
    pairs: dict[int, str] = {}
    for channel in image:
        spread, apart = _spread_and_change(channel)
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
        yield f"of {image.shape[3]} slices (third axis, from 0), {text}{more} repeat each other"


def _has_two_values(plane: np.ndarray) -> bool:
    return bool(((plane == plane.min()) | (plane == plane.max())).all())


def _spread_and_change(channel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The standard deviation of each slice, and the mean difference from each to the next.

    Shape: (X, Y, Z) -> (Z,), (Z - 1,).
    """
    spread = []
    apart = []
    for first in range(0, channel.shape[2], _SLICES_AT_ONCE):
        # With the first of those after them; in memory the voxels of a slice lie far apart.
        slices = in_c_order(channel[:, :, first : first + _SLICES_AT_ONCE + 1].T)
        spread += [values.std(dtype=np.float64) for values in slices[:_SLICES_AT_ONCE]]
        apart += [np.abs(after - before).mean(dtype=np.float64) for before, after in pairwise(slices)]
    return np.array(spread), np.array(apart)


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


def header_doubts(path: Path) -> list[str]:
    """Warnings about the header of a NIfTI file; none for other formats."""
    image = nifti_image(path)
    if image is None:
        return []
    return [f"{path}: {doubt}" for doubt in (*_disagreeing_forms(image.header), *_surplus(path, image))]


def _disagreeing_forms(header: Any) -> Iterator[str]:
    """A warning if sform and qform, or sform and voxel size, differ, or one cannot be read."""
    try:
        sform, s_code = header.get_sform(coded=True)
        qform, q_code = header.get_qform(coded=True)
    except ValueError as error:  # not a valid quaternion
        yield f"its qform cannot be read ({error}); the sform is used"
        return
    if not s_code:
        return
    shape = header.get_data_shape()
    distance = Grid.of(shape, sform).corner_distance(Grid.of(shape, qform)) if q_code else 0
    if distance > _SAME_FORM:
        yield f"sform and qform differ by {distance:.3g} voxels; the sform is used"
        return
    stated_mm = header["pixdim"][1:4]
    spacing_mm = np.linalg.norm(sform[:3, :3], axis=0)
    has_slices = np.array([*shape, 1, 1][:3]) > 1
    if (np.abs(stated_mm / spacing_mm - 1) > _SAME_SPACING)[has_slices].any():
        stated = size_text(stated_mm, 4)
        yield f"pixdim states {stated} mm, sform {size_text(spacing_mm, 4)} mm, which is used"


def _surplus(path: Path, image: Nifti1Pair) -> Iterator[str]:
    """A warning if a file holds more bytes than its header describes: of further slices, or a larger type."""
    proxy: Any = image.dataobj  # typed without the offset
    expected = proxy.offset + prod(image.shape) * image.get_data_dtype().itemsize
    if path.suffix == ".gz":
        with path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            stored = int.from_bytes(file.read(), "little")  # the last member's bytes, modulo 4 GB
    elif path.suffix == ".nii":
        stored = path.stat().st_size
    else:
        return
    if stored > expected:
        described = f"{size_text(image.shape)} of {image.get_data_dtype()}"
        yield f"{stored - expected} bytes follow the voxels that its header describes ({described})"


def lost_spacing(shapes: Sequence[Sequence[int]], spacings_mm: Sequence[Sequence[float]]) -> list[str]:
    """A warning if every volume has 1 x 1 x 1 mm and far fewer slices than rows; else none."""
    thin = [max(shape) >= _FEW * min(shape) and min(shape) > 1 for shape in shapes]
    unit = [tuple(spacing) == (1.0, 1.0, 1.0) for spacing in spacings_mm]
    if not thin or not all(thin) or not all(unit):
        return []
    few = int(np.median([min(shape) for shape in shapes]))
    many = int(np.median([max(shape) for shape in shapes]))
    return [
        f"all {len(shapes)} volumes have 1 x 1 x 1 mm, but {few} slices of {many} rows: their headers may "
        "have lost the spacing, from which resampling, plan and distances follow; correct the headers, or "
        "set source_spacing_mm, such as [1.25,1.25,10] (right, anterior, superior)"
    ]


def far_spacing(cases: Sequence[str], spacings_mm: Sequence[Sequence[float]]) -> list[str]:
    """A warning if cases have voxels several times as long as the median case, or as short; else none.

    Such headers are often wrong, in metres or pixels, and resampling makes those images huge or tiny.
    """
    if not cases:
        return []
    spacings = np.array(spacings_mm)
    median = np.median(spacings, axis=0)
    ratio = spacings / median
    is_far = ((ratio > _FAR_SPACING) | (ratio < 1 / _FAR_SPACING)).any(axis=1)
    if not is_far.any():
        return []
    far_cases = [case for case, far in zip(cases, is_far, strict=True) if far]
    example = " x ".join(f"{mm:.4g}" for mm in spacings[is_far][0])
    usual = " x ".join(f"{mm:.4g}" for mm in median)
    return [
        f"{named(far_cases)}: spacing {example} mm, where the median of all {len(cases)} cases is {usual} "
        "mm; if the headers are wrong, correct them or set data.source_spacing_mm for these cases"
    ]


def same_images(contents: Mapping[str, str]) -> list[str]:
    """A warning that names cases with one image; none if all images differ.

    Args:
        contents: case id to a hash of its image.
    """
    by_content: defaultdict[str, list[str]] = defaultdict(list)
    for case_id, content in contents.items():
        by_content[content].append(case_id)
    groups = [" = ".join(cases) for cases in by_content.values() if len(cases) > 1]
    if not groups:
        return []
    return [
        f"cases with the same image: {some(groups)}; where one of them is in validation or test, training "
        "skips the others"
    ]


def named(cases: Sequence[str]) -> str:
    """Such as `7 cases (a, b, c, d, e, ...)`."""
    text = ", ".join(cases[:_NAMED]) + (", ..." if len(cases) > _NAMED else "")
    return f"{len(cases)} case{'s' if len(cases) > 1 else ''} ({text})"
