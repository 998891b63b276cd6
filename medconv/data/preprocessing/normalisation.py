"""Normalisation of one channel, and the values that no normalisation can bring into range.

Float32 is enough for usual values; where a square or a difference would overflow or vanish, float64 is used.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medconv.data.io.raster import are_picture_channels
from medconv.utils.errors import ArgumentError

NORMALISATIONS = ("zscore", "zscore_nonzero", "ct", "dataset", "rescale", "none")
DATASET_NORMALISATIONS = ("ct", "dataset")  # use the intensities of all cases
# Names of channels that are words of nnU-Net for a normalisation, in small letters
BY_CHANNEL_NAME = {
    "ct": "ct",
    "nonorm": "none",
    "zscore": "zscore",
    "rescale_to_0_1": "rescale",
    "rgb_to_0_1": "dataset",  # like a division by 255, one linear function for all images
}
LARGEST = 1e12  # sums of squares of larger values may overflow in float32
_SMALLEST_STD = 1e-8  # below, squares of differences vanish in float32
_VALUES_AT_ONCE = 2**17
_NO_LIMITS = (-np.inf, np.inf)
_ROUNDING = 1e-6  # of a float32, relative, with some calculation before
_STRIDE = 8  # along each axis, between voxels that are looked at first
_NO_DATA = 1e6  # float32 has 7 digits: beside values this much farther away, all others become one value


def normalisation_for(
    normalisation: str | Sequence[str] | None, modalities: Sequence[str], of_pictures: str = "dataset"
) -> tuple[str, ...]:
    """One normalisation per channel.

    Args:
        normalisation: one name for all channels, or one for each; None: `ct` for CT, `of_pictures` for
            pictures, that of nnU-Net's words such as `noNorm`, `zscore` for all others.
        modalities: of the channels.
    Raises:
        ValueError: unknown names, or not one per channel.
    """
    if normalisation is None:
        if are_picture_channels(tuple(modalities)):
            return (of_pictures,) * len(modalities)
        return tuple(BY_CHANNEL_NAME.get(name.strip().lower(), "zscore") for name in modalities)
    is_single = isinstance(normalisation, str) or not isinstance(normalisation, Sequence)
    names: tuple[Any, ...] = (normalisation,) * len(modalities) if is_single else tuple(normalisation)
    if len(names) != len(modalities):
        raise ArgumentError(
            "normalisation", f" needs one name, or one for each of {len(modalities)} channels, got {names}"
        )
    check_normalisation(names)
    return names


def check_normalisation(names: Sequence[str]) -> None:
    """Raises: ValueError: a name that is not one of `NORMALISATIONS`."""
    unknown = [name for name in names if name not in NORMALISATIONS]
    if unknown:
        raise ArgumentError("normalisation", f" must be one of {NORMALISATIONS} per channel, got {unknown}")


def range_error(channel: np.ndarray, low: float, high: float) -> str:
    """A no-data value, such as -3.4e38, so far from all others that normalisation makes them one value; empty
    if there is none.

    Args:
        low, high: lowest and highest value.
    """
    # Mostly some of the voxels already show that no value is far from all others.
    some_values = channel[tuple(slice(None, None, _STRIDE) for _ in channel.shape)]
    between = some_values[(some_values > low) & (some_values < high)]
    if between.size and high - low <= LARGEST:
        spread = float(between.max()) - float(between.min())
        if spread > 0 and high - low <= _NO_DATA * spread:
            return ""
    return _outlier_error(channel, low, high)


def _outlier_error(channel: np.ndarray, low: float, high: float) -> str:
    """As `range_error`, of all voxels."""
    between = (channel > low) & (channel < high)
    inner_low = float(channel.min(where=between, initial=np.inf))
    inner_high = float(channel.max(where=between, initial=-np.inf))
    if inner_low > inner_high:
        return ""  # at most two values
    gap_below = inner_low - low
    gap_above = high - inner_high
    spread = inner_high - inner_low or min(gap_above, gap_below)
    if high - low <= _NO_DATA * spread:
        return _interpolated_error(channel[between], low, high) if high - low > LARGEST else ""
    # The outlier is the extreme with the larger gap; the remaining values include the other extreme.
    if gap_below > gap_above:
        outlier = low
        remaining_range = (inner_low, high)
    else:
        outlier = high
        remaining_range = (low, inner_high)
    if remaining_range[1] - remaining_range[0] <= _ROUNDING * max(map(abs, remaining_range)):
        return ""  # they are one value already, as in masks of 0, 0.9999999 and 1
    count = int((channel == np.float32(outlier)).sum())
    return (
        f"values from {low:.4g} to {high:.4g}, but all others lie between {inner_low:.4g} and "
        f"{inner_high:.4g}: {outlier:.4g} ({count} voxels) looks like a no-data value; replace it, for "
        "example by the value of the background"
    )


def _interpolated_error(inner: np.ndarray, low: float, high: float) -> str:
    """The same of an image that was resampled since: values lie between the no-data value and all others."""
    first_quartile, last_quartile = np.percentile(inner.astype(np.float64), [25, 75])
    if not 0 < _NO_DATA * (last_quartile - first_quartile) < high - low:
        return ""
    outlier = low if first_quartile - low > high - last_quartile else high
    return (
        f"values from {low:.4g} to {high:.4g}, but half of those between lie from {first_quartile:.4g} to "
        f"{last_quartile:.4g}: {outlier:.4g} looks like a no-data value that resampling has mixed with its "
        "neighbours; replace it before that, for example by the value of the background"
    )


def normalise(
    channel: np.ndarray, name: str, statistics: Mapping[str, float], mask: np.ndarray | None = None
) -> np.ndarray:
    """One channel by `zscore`, `zscore_nonzero`, `rescale`, `ct`, `dataset` or `none`.

    Shape: (*spatial), unchanged.
    Args:
        statistics: of all cases, see `Fingerprint.intensities`; for `ct` and `dataset`.
        mask: (*spatial), the voxels that `zscore_nonzero` normalises; others stay.
    Raises:
        ValueError: as `range_error`, or values that differ become one value or infinite.
    """
    low = float(channel.min())
    high = float(channel.max())
    if error := range_error(channel, low, high):
        raise ValueError(error)
    if name == "zscore_nonzero" and mask is not None and not mask.all():
        normalised = channel.copy()
        normalised[mask] = normalise(channel[mask], "zscore", statistics) if mask.any() else 0
        return normalised
    if low == high and name in ("zscore", "zscore_nonzero", "rescale"):
        return np.zeros_like(channel)
    normalised = _by_name(channel, low, high, name, statistics)
    new_low = float(normalised.min())
    new_high = float(normalised.max())
    is_finite = bool(np.isfinite([new_low, new_high]).all())
    became_one_value = low != high and new_low == new_high
    if not is_finite or became_one_value:
        raise ValueError(
            f"values from {low:.4g} to {high:.4g} become {new_low:.4g} to {new_high:.4g} by "
            f"normalisation={name}, expected finite values that differ"
        )
    return normalised


def _by_name(
    channel: np.ndarray, low: float, high: float, name: str, statistics: Mapping[str, float]
) -> np.ndarray:
    """Values that are clipped to limits first, less a centre, divided by a scale."""
    if name == "none":
        return channel
    values = channel if max(abs(low), abs(high)) < LARGEST else channel.astype(np.float64)
    limits = _NO_LIMITS
    if name == "ct":
        limits = (statistics["percentile_00_5"], statistics["percentile_99_5"])
    if name in DATASET_NORMALISATIONS:
        centre = statistics["mean"]
        scale = statistics["std"] or 1.0
    elif name == "rescale":
        centre = low
        scale = high - low
    else:  # zscore
        centre = values.mean()
        scale = float(values.std())
        if scale <= _SMALLEST_STD:
            scale = float(values.std(dtype=np.float64))
    standardised = np.empty_like(values, order="C")
    # Some planes at a time, which stay in the cache between the three steps
    planes = max(1, _VALUES_AT_ONCE * len(values) // max(1, values.size))
    for first in range(0, len(values), planes):
        target = standardised[first : first + planes]
        np.clip(values[first : first + planes], *limits, out=target)
        target -= centre
        target /= scale
    return standardised
