"""Where the values of each image lie, to find one that is far from all others.

A CT that is stored 1024 too high, or scaled to 0 to 1, looks right in every viewer. Normalisations that adapt
to an image, such as zscore, remove such a difference; the others hand it to the network.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

import numpy as np

PERCENTILES = (5, 25, 50, 75, 95)
ADAPTING = ("zscore", "zscore_nonzero", "rescale")  # normalisations by the image's own values
_SAMPLES = 5_000  # voxels of an image
_FEWEST = 4  # cases, with fewer of which nothing is known of the others
_SHIFT = 0.25  # of the usual width, by which all percentiles lie beyond those of all others
_AIR = -500  # Hounsfield units, below which are air and lungs
_SCALE = 5  # times the width of all others, or a fifth of it


def percentiles(image: np.ndarray, missing: Sequence[int] = ()) -> tuple[tuple[float, ...], ...]:
    """`PERCENTILES` of each channel, of voxels spread evenly over the image; () of a missing channel.

    Shape: (channels, *spatial) -> (channels, percentiles).
    """
    rows = np.percentile(sampled(image, _SAMPLES).astype(np.float64), PERCENTILES, axis=1).T
    return tuple(() if channel in missing else tuple(row) for channel, row in enumerate(rows.tolist()))


def sampled(image: np.ndarray, count: int) -> np.ndarray:
    """Voxels spread evenly over the image: (channels, *spatial) -> (channels, about `count`)."""
    flat = image.reshape(len(image), -1)
    return flat[:, :: even_step(flat.shape[1], count)].copy()


def even_step(voxels: int, count: int) -> int:
    """The distance of about `count` voxels that are spread evenly over an image, whatever its shape.

    A distance that shares a factor with the length of an axis would miss slices, or all but one.
    """
    step = max(1, voxels // count)
    while gcd(step, voxels) > 1:
        step -= 1
    return step


@dataclass(frozen=True)
class Band:
    """Where one channel of several images lies.

    Args:
        lowest, highest: of each percentile over the images.
        widths: from the first percentile to the last: the smallest, median and largest over the images.
        cases: their number.
    """

    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    widths: tuple[float, float, float]
    cases: int

    def far(self, row: Sequence[float]) -> bool:
        """Whether an image is shifted or scaled against all of these. Args: row: its percentiles."""
        if self.cases < _FEWEST or not row:
            return False
        margin = _SHIFT * self.widths[1]
        pairs = list(zip(row, self.lowest, self.highest, strict=True))
        is_above = all(value > high + margin for value, _, high in pairs)
        is_below = all(value < low - margin for value, low, _ in pairs)
        width = row[-1] - row[0]
        is_wider = width > _SCALE * self.widths[2] > 0
        is_narrower = 0 < width < self.widths[0] / _SCALE
        return is_above or is_below or is_wider or is_narrower

    def text(self) -> str:
        return f"{self.lowest[0]:.4g} to {self.highest[-1]:.4g}"

    def plain(self) -> dict[str, Any]:
        return {key: list(value) if key != "cases" else value for key, value in asdict(self).items()}

    @classmethod
    def from_plain(cls, content: Any) -> "Band":
        """The inverse of `plain`. Raises: LookupError, TypeError or ValueError: damaged."""
        smallest, median, largest = map(float, content["widths"])
        return cls(
            lowest=tuple(map(float, content["lowest"])),
            highest=tuple(map(float, content["highest"])),
            widths=(smallest, median, largest),
            cases=int(content["cases"]),
        )


def band_of(rows: Sequence[Sequence[float]]) -> Band | None:
    """The band of one channel. Args: rows: the percentiles of each image, () where it lacks the channel."""
    values = np.array([row for row in rows if row])
    if not len(values):
        return None
    widths = values[:, -1] - values[:, 0]
    return Band(
        lowest=tuple(values.min(0).tolist()),
        highest=tuple(values.max(0).tolist()),
        widths=(float(widths.min()), float(np.median(widths)), float(widths.max())),
        cases=len(values),
    )


def are_hounsfield(rows: Sequence[Sequence[float]]) -> bool:
    """Whether a channel's values are those of CT: in each image much air, and little beyond soft tissue.

    Args:
        rows: the percentiles of each image, () where it lacks the channel.
    """
    values = np.array([row for row in rows if row])
    if not len(values):
        return False
    low, _, middle, upper, high = values.T
    # Air has -1000, what lies outside the scanner's circle down to -3024; soft tissue some 50. Phases and
    # velocities, which reach as low, lie as high on the other side; MR that is filled with -1024, higher.
    has_air = (low >= -3100) & (low <= _AIR) & (middle >= -1100)
    has_tissue = (middle <= 100) & (upper <= 200) & (high >= _AIR) & (high <= 0.7 * np.abs(low))
    return bool((has_air & has_tissue).all())


def far_cases(rows: Sequence[Sequence[float]]) -> list[tuple[int, Band]]:
    """Indices of images that are far from all others in one channel, each with the band of these others."""
    values = np.array([row or (np.nan,) * len(PERCENTILES) for row in rows])
    values = np.column_stack([values, values[:, -1] - values[:, 0]])
    present = np.flatnonzero(~np.isnan(values[:, 0]))
    # Only an image with the lowest or highest of some column can be far from all others
    candidates: set[int] = set()
    for column in values[present].T if len(present) else ():
        candidates |= {int(present[column.argmin()]), int(present[column.argmax()])}
    far = []
    for index in sorted(candidates):
        band = band_of([row for other, row in enumerate(rows) if other != index])
        if band is not None and band.far(rows[index]):
            far.append((index, band))
    return far


def advice(normalisation: str) -> str:
    return (
        f"normalisation={normalisation} does not adapt to that; if the image has another unit or offset, "
        "such as a CT that is stored 1024 too high, correct the file"
    )


def row_text(row: Sequence[float]) -> str:
    return f"{row[0]:.4g} to {row[-1]:.4g}"
