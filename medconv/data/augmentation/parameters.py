"""Augmentation parameters of each sample, sampled from (seed, sample number) alone; applied elsewhere."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations, permutations
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medconv.data.augmentation.spatial import control_points, reach
from medconv.data.random_streams import RandomStream, generator
from medconv.utils.errors import ArgumentError

PLACE = ("rotation", "scale", "shift", "elastic")
PER_CHANNEL = (
    *("blur", "simulate_low_resolution", "brightness", "additive_brightness", "contrast"),
    *("gamma_inverted", "gamma"),
)
VALUES = ("noise", *PER_CHANNEL)
MOVES = ("moved", "matrix", "shift", "flips", "elastic")  # the spatial fields of `Parameters`
THICK = 3.0  # times the finest spacing: axes with a larger spacing are not resampled
_ZOOM_OUT = 1.25  # patches that show a larger area have zeros at their borders
# Of the control point distance; splines may fold beyond (Choi & Lee 2000, Graphical Models 62:89)
_FOLDS = 0.4
_RANGES = {
    **dict.fromkeys(("noise_std", "blur_sigma"), 0.0),
    **dict.fromkeys(("scale", "simulate_low_resolution", "brightness", "contrast", "gamma"), 0.01),
    "additive_brightness": -np.inf,
}


@dataclass(frozen=True)
class Parameters:
    """The parameters of each sample of a batch; always on the CPU.

    Shape:
        moved (batch,): whether the sample is resampled at all.
        matrix (batch, axes, axes), shift (batch, axes): an output voxel at p from the centre shows the input
            at matrix @ p + shift + elastic, in voxels. flips (batch, axes): are part of the matrix.
        elastic (batch, axes, *control points): displacements in voxels.
        noise_std, noise_seed (batch,).
        blur (batch, channels, axes): deviation in voxels; simulate_low_resolution (batch, channels, axes):
        share of the voxels. brightness, additive_brightness, contrast, gamma_inverted, gamma (batch,
        channels).
    """

    moved: Tensor
    matrix: Tensor
    shift: Tensor
    flips: Tensor
    elastic: Tensor
    noise_std: Tensor
    noise_seed: Tensor
    blur: Tensor
    simulate_low_resolution: Tensor
    brightness: Tensor
    additive_brightness: Tensor
    contrast: Tensor
    gamma_inverted: Tensor
    gamma: Tensor

    def per_row(self) -> dict[str, Tensor]:
        """The parameters per channel, name to values, with samples and channels flattened into rows."""
        return {name: getattr(self, name).flatten(0, 1) for name in PER_CHANNEL}


@dataclass(eq=False, repr=False)
class ParameterSampler:
    """Samples parameters.

    Args:
        seed: with the sample number it determines all parameters.
        spacing_mm: of the patch, one number per spatial axis. Axes with more than three times the finest
            spacing are not resampled: not rotated, scaled, deformed, blurred or lowered in resolution.
        patch_size: of the output, in voxels. The input may be larger, with the same centre, see `read_size`.
        p: transform to probability, 0 if absent: those of `PLACE` and `noise` per sample, the others of
            `VALUES` per channel.
        rotation_deg: largest angle in each plane. scale: range of the shown area, as factor of the patch.
            shift: largest, as share of the patch. elastic_mm: largest displacement of the control points,
            elastic_spacing_mm apart.
        mirror_axes: spatial axes along which each sample is flipped with probability 0.5; or `all`.
        noise_std: range, in units of the image, as additive_brightness. blur_sigma: range in voxels.
            simulate_low_resolution: range of the share of voxels along an axis. brightness, contrast, gamma:
            range of a factor about 0, of one about the mean, of an exponent; as often below 1 as above.
    Raises: ValueError: values out of range.
    """

    seed: int
    spacing_mm: Sequence[float]
    patch_size: tuple[int, ...]
    _: KW_ONLY
    p: Mapping[str, float] = field(default_factory=dict)
    rotation_deg: float = 30.0
    scale: Sequence[float] = (0.7, 1.4)
    shift: float = 0.05
    elastic_mm: float = 5.0
    elastic_spacing_mm: float = 25.0
    mirror_axes: Any = ()
    noise_std: Sequence[float] = (0.0, 0.1)
    blur_sigma: Sequence[float] = (0.5, 1.0)
    simulate_low_resolution: Sequence[float] = (0.5, 1.0)
    brightness: Sequence[float] = (0.75, 1.25)
    additive_brightness: Sequence[float] = (-0.2, 0.2)
    contrast: Sequence[float] = (0.75, 1.25)
    gamma: Sequence[float] = (0.7, 1.5)

    def __post_init__(self) -> None:
        self.spacing_mm, self.patch_size = tuple(self.spacing_mm), tuple(self.patch_size)
        self.p = dict.fromkeys((*PLACE, *VALUES), 0.0) | dict(self.p or {})
        self.mirror_axes = mirrored_axes(self.mirror_axes, len(self.spacing_mm))
        self._check()
        spacing = np.array(self.spacing_mm)
        self.thin = spacing <= THICK * min(self.spacing_mm)
        self._distance = tuple(max(1.0, self.elastic_spacing_mm / mm) for mm in self.spacing_mm)
        self._from_mm = spacing / spacing[:, None]  # a matrix in mm to one in voxels
        bends = bool(self.p["elastic"])
        points = control_points(self.patch_size, self._distance) if bends else (0,) * len(spacing)
        self._no_control = np.zeros((len(spacing), *points))
        self._stray = self.elastic_mm * self.thin / spacing * bends
        self.max_read_size = self._largest_size()

    def sample(self, numbers: Sequence[int], num_channels: int = 1) -> Parameters:
        """Draw the parameters of these samples, each from its own number."""
        rows = []
        for number in numbers:
            draw = self._dice(RandomStream.VALUES, number)
            noise = self._chosen(draw, "noise", _between(draw, self.noise_std), 0.0), int(2**62 * draw())
            channels = [self._draw_values(draw) for _ in range(num_channels)]
            rows.append((*self._draw_place(number), *noise, *zip(*channels, strict=True)))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return Parameters(
            *(torch.from_numpy(c.astype(np.float32) if c.dtype == np.float64 else c) for c in columns)
        )

    def read_size(self, number: int) -> tuple[int, ...]:
        """Voxels around the centre that sample `number` needs; at most `max_read_size`."""
        moved, matrix, shift, *_ = self._draw_place(number)
        if not moved:
            return self.patch_size
        far = reach(matrix, np.array(shift) * self.patch_size, self.patch_size) + self._stray
        return tuple(int(n) for n in np.minimum(self._holding(far), self.max_read_size))

    def _dice(self, stream: RandomStream, number: int) -> Callable[[], float]:
        """A function that returns the next random number of a sample, from 0 to 1."""
        rng = generator(self.seed, stream, number)

        def numbers() -> Iterator[float]:
            while True:
                yield from rng.random(32).tolist()  # in blocks, because a call costs as much as ten numbers

        return numbers().__next__

    def _draw_place(self, number: int) -> tuple[Any, ...]:
        """`Parameters` from `moved` to `elastic`. Unused numbers are drawn, too, which keeps the others."""
        axes, draw = len(self.spacing_mm), self._dice(RandomStream.PLACE, number)
        turns, zooms, shifts, bends = (draw() < self.p[name] for name in PLACE)
        matrix = np.eye(axes)
        for a, b in combinations(range(axes), 2):
            angle = np.deg2rad(self.rotation_deg) * (2 * draw() - 1)
            if turns and self.thin[a] and self.thin[b]:
                matrix = matrix @ _plane_rotation(axes, a, b, angle)
        zoom = _between(draw, self.scale)
        shares = [(2 * draw() - 1) * self.shift * shifts for _ in range(axes)]
        along = zip(shares, self.thin, self.patch_size, strict=True)
        shift = [share if thin else round(share * n) / n for share, thin, n in along]
        flips = [draw() < 0.5 and axis in self.mirror_axes for axis in range(axes)]
        if zooms:
            matrix = np.where(self.thin, zoom, 1.0)[:, None] * matrix
        matrix = matrix * self._from_mm * np.where(flips, -1.0, 1.0)
        return turns or zooms or shifts or bends, matrix, shift, flips, self._draw_control(number) * bends

    def _draw_control(self, number: int) -> np.ndarray:
        if not self.p["elastic"]:
            return self._no_control
        rng, axes = generator(self.seed, RandomStream.ELASTIC, number), len(self.spacing_mm)
        size = self.elastic_mm * rng.random() * self.thin / np.array(self.spacing_mm)
        control: np.ndarray = rng.uniform(-1, 1, self._no_control.shape) * size.reshape(-1, *(1,) * axes)
        return control

    def _draw_values(self, draw: Callable[[], float]) -> tuple[Any, ...]:
        """`Parameters` from `blur` to `gamma`, of one channel."""
        blur = [_between(draw, self.blur_sigma) * thin for thin in self.thin]
        share = _between(draw, self.simulate_low_resolution)
        shares = [share if thin else 1.0 for thin in self.thin]
        return (
            self._chosen(draw, "blur", blur, [0.0] * len(blur)),
            self._chosen(draw, "simulate_low_resolution", shares, [1.0] * len(blur)),
            self._chosen(draw, "brightness", _factor(draw, self.brightness), 1.0),
            self._chosen(draw, "additive_brightness", _between(draw, self.additive_brightness), 0.0),
            self._chosen(draw, "contrast", _factor(draw, self.contrast), 1.0),
            self._chosen(draw, "gamma_inverted", _factor(draw, self.gamma), 1.0),
            self._chosen(draw, "gamma", _factor(draw, self.gamma), 1.0),
        )

    def _chosen(self, draw: Callable[[], float], name: str, value: Any, neutral: Any) -> Any:
        return value if draw() < self.p[name] else neutral

    def _largest_size(self) -> tuple[int, ...]:
        """For a patch rotated in one plane and scaled up to `_ZOOM_OUT`; what lies outside is 0."""
        if not any(self.p[name] for name in PLACE):
            return self.patch_size
        half, spacing = np.array(self.patch_size) / 2, np.array(self.spacing_mm)
        far = half.copy()
        for i, j in permutations(np.flatnonzero(self.thin), 2) if self.p["rotation"] else ():
            other = half[j] * spacing[j] / spacing[i]
            angle = min(np.deg2rad(self.rotation_deg), np.arctan2(other, half[i]))
            far[i] = max(far[i], half[i] * np.cos(angle) + other * np.sin(angle))
        zoom = min(max(1.0, self.scale[1]), _ZOOM_OUT) if self.p["scale"] else 1.0
        shift = self.shift * np.array(self.patch_size) if self.p["shift"] else 0.0
        return self._holding(far * np.where(self.thin, zoom, 1.0) + shift + self._stray)

    def _holding(self, far: np.ndarray) -> tuple[int, ...]:
        """The smallest size with the centre of the patch that includes voxels `far` from it."""
        return tuple(int(n + 2 * ceil(f + 1 - n / 2)) for n, f in zip(self.patch_size, far, strict=True))

    def _check(self) -> None:
        names = (*PLACE, *VALUES)
        unknown = [name for name in self.p if name not in names]
        if unknown or any(not 0 <= chance <= 1 for chance in self.p.values()):
            what = f"probabilities from 0 to 1 of {', '.join(names)}"
            raise ValueError(f"augmentation.p gives {what}, got {unknown or self.p}")
        for key, low in _RANGES.items():
            values = _listed(getattr(self, key))
            numbers = len(values) == 2 and all(isinstance(v, (int, float)) for v in values)
            if not numbers or not low <= values[0] <= values[1] < np.inf:
                what = f"a range [low, high] from {low:g} upwards"
                raise ValueError(f"augmentation.{key} must be {what}, got {values}")
        if (shares := self.simulate_low_resolution)[1] > 1:
            what = "augmentation.simulate_low_resolution is a share of the voxels, at most 1"
            raise ValueError(f"{what}, got {list(shares)}")
        for key in ("rotation_deg", "shift", "elastic_mm"):
            if not isinstance(value := getattr(self, key), (int, float)) or not 0 <= value < np.inf:
                raise ValueError(f"augmentation.{key} must be 0 or more, got {value}")
        if self.p["elastic"] and not self.elastic_mm <= _FOLDS * self.elastic_spacing_mm:
            raise ValueError(
                f"augmentation.elastic_mm must be at most {_FOLDS} of augmentation.elastic_spacing_mm, or "
                f"tissue folds over itself, got {self.elastic_mm} and {self.elastic_spacing_mm}"
            )


def mirrored_axes(axes: Sequence[int] | str, spatial_dims: int) -> tuple[int, ...]:
    """The axes of `augmentation.mirror_axes`. Raises: ValueError: not different spatial axes, nor `all`."""
    if axes == "all":
        return tuple(range(spatial_dims))
    return check_axes("augmentation.mirror_axes", axes, spatial_dims, also=", or `all`")


def check_axes(key: str, axes: Any, spatial_dims: int, also: str = "") -> tuple[int, ...]:
    """The axes of a key. Raises: ArgumentError: not different spatial axes of the image."""
    is_list = isinstance(axes, Sequence) and not isinstance(axes, str)
    valid = is_list and all(type(axis) is int and 0 <= axis < spatial_dims for axis in axes)
    if not valid or len(set(axes)) != len(axes):
        what = f"different spatial axes from 0 to {spatial_dims - 1}{also}"
        raise ArgumentError(key, f" must be {what}, got {axes}")
    return tuple(axes)


def _listed(values: Sequence[float] | float) -> list[float]:
    return list(values) if isinstance(values, Sequence) else [values]


def _plane_rotation(axes: int, a: int, b: int, angle: float) -> np.ndarray:
    rotation = np.eye(axes)
    rotation[[a, b], [a, b]] = np.cos(angle)
    rotation[a, b], rotation[b, a] = -np.sin(angle), np.sin(angle)
    return rotation


def _factor(draw: Callable[[], float], limits: Sequence[float]) -> float:
    """As often below 1 as above, if the range contains 1."""
    (low, high), below = limits, draw() < 0.5
    if low < 1 < high:
        low, high = (low, 1.0) if below else (1.0, high)
    return _between(draw, (low, high))


def _between(draw: Callable[[], float], limits: Sequence[float]) -> float:
    low, high = limits
    return low + draw() * (high - low)
