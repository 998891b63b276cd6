"""Normalisation of one channel, and the values that no normalisation can bring into range.

Float32 is enough for usual values; where a square or a difference would overflow or vanish, float64 is used.
"""

from collections.abc import Mapping

import numpy as np

_LARGEST, _LEAST = 1e12, 1e-8  # sums of squares of larger values may overflow in float32; a vanishing std
_ROUNDING = 1e-6  # of a float32, relative, with some calculation before
_NO_DATA = 1e6  # float32 has 7 digits: beside values this much farther away, all others become one value


def wide(values: np.ndarray) -> np.ndarray:
    """The same values, as float64 where float32 cannot hold their squares or differences."""
    largest = max(abs(float(values.max(initial=0))), abs(float(values.min(initial=0))))
    return values if largest < _LARGEST else values.astype(np.float64)


def range_error(channel: np.ndarray) -> str:
    """A no-data value, such as -3.4e38, so far from all others that normalisation makes them one value; empty
    if there is none.
    """
    low, high = float(channel.min()), float(channel.max())
    inside = (channel > low) & (channel < high)
    inner_low = float(channel.min(where=inside, initial=np.inf))
    inner_high = float(channel.max(where=inside, initial=-np.inf))
    if inner_low > inner_high:
        return ""  # at most two values
    spread = inner_high - inner_low or min(high - inner_high, inner_low - low)
    if high - low <= _NO_DATA * spread:
        return _interpolated_error(channel[inside], low, high) if high - low > _LARGEST else ""
    value, others = high, (low, inner_high)
    if inner_low - low > high - inner_high:
        value, others = low, (inner_low, high)
    if others[1] - others[0] <= _ROUNDING * max(map(abs, others)):
        return ""  # they are one value already, as in masks of 0, 0.9999999 and 1
    count = int((channel == np.float32(value)).sum())
    return (
        f"values from {low:.4g} to {high:.4g}, but all others lie between {inner_low:.4g} and "
        f"{inner_high:.4g}: {value:.4g} ({count} voxels) looks like a no-data value; replace it, for "
        "example by the value of the background"
    )


def _interpolated_error(inner: np.ndarray, low: float, high: float) -> str:
    """The same of an image that was resampled since: values lie between the no-data value and all others."""
    first, last = np.percentile(inner.astype(np.float64), [25, 75])
    if not 0 < _NO_DATA * (last - first) < high - low:
        return ""
    value = low if first - low > high - last else high
    return (
        f"values from {low:.4g} to {high:.4g}, but half of those between lie from {first:.4g} to {last:.4g}: "
        f"{value:.4g} looks like a no-data value that resampling has mixed with its neighbours; replace "
        "it before that, for example by the value of the background"
    )


def normalise(
    channel: np.ndarray, name: str, statistics: Mapping[str, float], mask: np.ndarray | None = None
) -> np.ndarray:
    """One channel by `zscore`, `zscore_nonzero`, `rescale`, `ct`, `dataset` or `none`.

    Shape: (*spatial), unchanged.
    Args: statistics: of all cases, see `Fingerprint.intensities`; for `ct` and `dataset`. mask: (*spatial),
        the voxels that `zscore_nonzero` normalises; others stay.
    Raises: ValueError: as `range_error`, or values that differ become one value or infinite.
    """
    if error := range_error(channel):
        raise ValueError(error)
    if name == "zscore_nonzero" and mask is not None and not mask.all():
        normalised = channel.copy()
        normalised[mask] = normalise(channel[mask], "zscore", statistics) if mask.any() else 0
        return normalised
    low, high = float(channel.min()), float(channel.max())
    if low == high and name in ("zscore", "zscore_nonzero", "rescale"):
        return np.zeros_like(channel)
    normalised = _by_name(channel, low, high, name, statistics)
    if not (np.isfinite(after := (float(normalised.min()), float(normalised.max()))).all()) or (
        low != high and after[0] == after[1]
    ):
        found = f"values from {low:.4g} to {high:.4g} become {after[0]:.4g} to {after[1]:.4g}"
        raise ValueError(f"{found} by data.normalisation={name}, expected finite values that differ")
    return normalised


def _by_name(
    channel: np.ndarray, low: float, high: float, name: str, statistics: Mapping[str, float]
) -> np.ndarray:
    if name == "none":
        return channel
    values = wide(channel)
    if name in ("zscore", "zscore_nonzero"):
        centred: np.ndarray = values - values.mean()
        std = float(values.std())
        return centred / (std if std > _LEAST else float(values.std(dtype=np.float64)))
    if name == "rescale":
        return (values - low) / (high - low)
    if name == "ct":
        values = values.clip(statistics["percentile_00_5"], statistics["percentile_99_5"])
    return (values - statistics["mean"]) / (statistics["std"] or 1.0)
