"""The parameters of augmentation: drawn here from (seed, sample number) alone, applied by `augment.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations, permutations
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medconv.data.augmentation.blocks import Blocks, visible, whole
from medconv.data.augmentation.spatial import control_points, mirrored_axes, reach
from medconv.data.random_streams import RandomStream, generator
from medconv.utils.errors import Argument, ArgumentError

SPATIAL = ("rotation", "scale", "shift", "elastic")
PER_CHANNEL = (
    "blur",
    "simulate_low_resolution",
    "brightness",
    "additive_brightness",
    "contrast",
    "gamma_inverted",
    "gamma",
)
INTENSITY = ("noise", *PER_CHANNEL)
MOVES = ("moved", "matrix", "shift", "flips", "elastic")  # the spatial fields of `Parameters`
_THICK = 3.0  # times the finest spacing: axes with a larger spacing are not resampled
_ZOOM_OUT = 1.25  # patches that show a larger area have zeros at their borders
# Of the control point distance; splines may fold beyond (Choi & Lee 2000, Graphical Models 62:89)
_FOLDS = 0.4
_LOWEST = {  # of the ranges [low, high]
    "noise_std": 0.0,
    "blur_sigma": 0.0,
    "scale": 0.01,
    "simulate_low_resolution": 0.01,
    "brightness": 0.01,
    "contrast": 0.01,
    "gamma": 0.01,
    "additive_brightness": -np.inf,
}
Draw = Callable[[], float]  # returns the next random number of a sample, from 0 to 1


@dataclass(frozen=True)
class Parameters:
    """The parameters of each sample of a batch; always on the CPU.

    Shape:
        moved (batch,): whether the sample is resampled at all.
        matrix (batch, axes, axes), shift (batch, axes): an output voxel at p from the centre shows the input
            at matrix @ p + shift + elastic, in voxels; `shift` itself is a share of the patch.
        flips (batch, axes): are part of the matrix.
        elastic (batch, axes, *control points): displacements in voxels.
        noise_std, noise_seed (batch,).
        blur (batch, channels, axes): standard deviation in voxels.
        simulate_low_resolution (batch, channels, axes): share of the voxels.
        brightness, additive_brightness, contrast, gamma_inverted, gamma (batch, channels).
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


@dataclass(eq=False, repr=False)
class RandomParameters:
    """Draws the `Parameters` of samples from the ranges and probabilities of an augmentation.

    Args:
        seed: with the sample number it determines all parameters.
        spacing_mm: of the patch, one number per spatial axis. Axes with more than three times the finest
            spacing are not resampled: not rotated, scaled, deformed, blurred or lowered in resolution.
        patch_size: of the output, in voxels. The input may be larger, with the same centre, see `read_size`.
        p: transform to probability, 0 if absent: those of `SPATIAL` and `noise` per sample, the others of
            `INTENSITY` per channel.
        rotation_deg: largest angle in each plane.
        scale: range of the shown area, as factor of the patch.
        shift: largest, as share of the patch.
        elastic_mm: largest displacement of the control points.
        elastic_spacing_mm: distance of the control points.
        mirror_axes: spatial axes along which each sample is flipped with probability 0.5; or `all`.
        noise_std: range, in units of the image.
        blur_sigma: range in voxels.
        simulate_low_resolution: range of the share of voxels along an axis.
        brightness: range of a factor about 0; as often below 1 as above.
        additive_brightness: range, in units of the image.
        contrast: range of a factor about the mean; as often below 1 as above.
        gamma: range of an exponent; as often below 1 as above.
    Raises:
        ValueError: values out of range.
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
        self.spacing_mm = tuple(self.spacing_mm)
        self.patch_size = tuple(self.patch_size)
        never = dict.fromkeys((*SPATIAL, *INTENSITY), 0.0)
        self.p = {**never, **(self.p or {})}
        self.mirror_axes = mirrored_axes(self.mirror_axes, len(self.spacing_mm))
        self._check()
        spacing = np.array(self.spacing_mm)
        self.thin = spacing <= _THICK * min(self.spacing_mm)
        self._from_mm = spacing / spacing[:, None]  # times a matrix in mm, it is one in voxels
        # Of control points, in voxels.
        self._distance = tuple(max(1.0, self.elastic_spacing_mm / mm) for mm in self.spacing_mm)
        is_elastic = bool(self.p["elastic"])
        points = control_points(self.patch_size, self._distance) if is_elastic else (0,) * len(spacing)
        self._no_control = np.zeros((len(spacing), *points))
        self._max_displacement = self.elastic_mm * self.thin / spacing * is_elastic  # voxels along each axis
        self.max_read_size = self._largest_size()

    def sample(self, numbers: Sequence[int], num_channels: int = 1) -> Parameters:
        """Draw the parameters of these samples, each from its own number."""
        samples = []
        for number in numbers:
            draw = generator(self.seed, RandomStream.VALUES, number).random
            # Unused numbers are drawn, too, here and below: so a probability changes nothing else
            noise_std = between(draw, self.noise_std)
            has_noise = draw() < self.p["noise"]
            noise_seed = int(2**62 * draw())
            channels = [self._draw_channel(draw) for _ in range(num_channels)]
            fields: dict[str, Any] = {name: [each[name] for each in channels] for name in PER_CHANNEL}
            fields |= {"noise_std": noise_std if has_noise else 0.0, "noise_seed": noise_seed}
            samples.append({**self._draw_moves(number), **fields})
        tensors = {}
        for name in samples[0]:
            values = np.array([sample[name] for sample in samples])
            if values.dtype == np.float64:
                values = values.astype(np.float32)
            tensors[name] = torch.from_numpy(values)
        return Parameters(**tensors)

    def read_size(self, number: int) -> tuple[int, ...]:
        """Voxels around the centre that sample `number` needs; at most `max_read_size`."""
        moves = self._draw_moves(number)
        if not moves["moved"]:
            return self.patch_size
        shift = np.array(moves["shift"]) * self.patch_size  # voxels
        distance = reach(moves["matrix"], shift, self.patch_size) + self._max_displacement
        read_size = np.minimum(size_that_holds(self.patch_size, distance), self.max_read_size)
        return tuple(int(voxels) for voxels in read_size)

    def read_blocks(self, number: int) -> Blocks:
        """All that sample `number` shows of a box of `max_read_size` with the patch's centre."""
        moves = self._draw_moves(number)
        if not moves["moved"]:
            margin = np.subtract(self.max_read_size, self.patch_size) // 2
            return whole(self.patch_size).shifted(margin)
        control = abs(moves["elastic"]).reshape(len(self.patch_size), -1)
        return visible(
            moves["matrix"],
            np.array(moves["shift"]) * self.patch_size,  # voxels
            self.patch_size,
            self.max_read_size,
            displacement=control.max(1, initial=0.0),  # the spline does not exceed its control points
        )

    def _draw_moves(self, number: int) -> dict[str, Any]:
        """The `MOVES` of one sample."""
        axes = len(self.spacing_mm)
        draw = generator(self.seed, RandomStream.PLACE, number).random
        is_drawn = {name: draw() < self.p[name] for name in SPATIAL}
        # One rotation in each plane of two thin axes, in mm.
        matrix = np.eye(axes)
        for first, second in combinations(range(axes), 2):
            angle = np.deg2rad(self.rotation_deg) * (2 * draw() - 1)
            if is_drawn["rotation"] and self.thin[first] and self.thin[second]:
                rotation = np.eye(axes)
                rotation[[first, second], [first, second]] = np.cos(angle)
                rotation[first, second] = -np.sin(angle)
                rotation[second, first] = np.sin(angle)
                matrix = matrix @ rotation
        zoom = between(draw, self.scale)
        if is_drawn["scale"]:
            matrix = np.where(self.thin, zoom, 1.0)[:, None] * matrix
        shift = []  # shares of the patch; along a thick axis a whole number of voxels
        for voxels, is_thin in zip(self.patch_size, self.thin, strict=True):
            share = (2 * draw() - 1) * self.shift * is_drawn["shift"]
            shift.append(share if is_thin else round(share * voxels) / voxels)
        flips = [draw() < 0.5 and axis in self.mirror_axes for axis in range(axes)]
        matrix = matrix * self._from_mm * np.where(flips, -1.0, 1.0)
        # Displacements of the control points, in voxels. Shape: (axes, *points).
        elastic = self._no_control
        if is_drawn["elastic"]:
            rng = generator(self.seed, RandomStream.ELASTIC, number)
            largest = self.elastic_mm * rng.random() * self.thin / np.array(self.spacing_mm)
            elastic = rng.uniform(-1, 1, elastic.shape) * largest.reshape(-1, *(1,) * axes)
        return {
            "moved": any(is_drawn.values()),
            "matrix": matrix,
            "shift": shift,
            "flips": flips,
            "elastic": elastic,
        }

    def _draw_channel(self, draw: Draw) -> dict[str, Any]:
        """The values of `PER_CHANNEL`, of one channel."""
        # The order is that of the random numbers: another one would change every seeded run.
        blur = [between(draw, self.blur_sigma) * thin for thin in self.thin]
        resolution = between(draw, self.simulate_low_resolution)
        resolutions = [resolution if thin else 1.0 for thin in self.thin]
        has_blur = draw() < self.p["blur"]
        is_coarse = draw() < self.p["simulate_low_resolution"]
        values: dict[str, Any] = {
            "blur": blur if has_blur else [0.0] * len(blur),
            "simulate_low_resolution": resolutions if is_coarse else [1.0] * len(blur),
        }
        for name, limits, is_factor in (
            ("brightness", self.brightness, True),
            ("additive_brightness", self.additive_brightness, False),
            ("contrast", self.contrast, True),
            ("gamma_inverted", self.gamma, True),
            ("gamma", self.gamma, True),
        ):
            value = between(draw, limits, is_factor)
            neutral = 1.0 if is_factor else 0.0
            values[name] = value if draw() < self.p[name] else neutral
        return values

    def _largest_size(self) -> tuple[int, ...]:
        """For a patch rotated in one plane and scaled up to `_ZOOM_OUT`; what lies outside is 0."""
        if not any(self.p[name] for name in SPATIAL):
            return self.patch_size
        distance = np.array(self.patch_size) / 2
        if self.p["rotation"]:
            distance = rotated_half(self.patch_size, self.spacing_mm, self.rotation_deg, self.thin)
        zoom = 1.0
        if self.p["scale"]:
            zoom = min(max(1.0, self.scale[1]), _ZOOM_OUT)
        shift = self.shift * np.array(self.patch_size) if self.p["shift"] else 0.0
        distance = distance * np.where(self.thin, zoom, 1.0)
        distance = distance + shift + self._max_displacement
        return size_that_holds(self.patch_size, distance)

    def _check(self) -> None:
        names = (*SPATIAL, *INTENSITY)
        unknown = [name for name in self.p if name not in names]
        are_numbers = all(isinstance(probability, (int, float)) for probability in self.p.values())
        if unknown or not are_numbers or any(not 0 <= probability <= 1 for probability in self.p.values()):
            raise ArgumentError(
                "p", f" must be probabilities from 0 to 1 of {', '.join(names)}, got {unknown or self.p}"
            )
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            limits = list(value) if isinstance(value, Sequence) else [value]
            are_two_numbers = len(limits) == 2 and all(isinstance(limit, (int, float)) for limit in limits)
            if not are_two_numbers or not lowest <= limits[0] <= limits[1] < np.inf:
                raise ArgumentError(
                    name, f" must be a range [low, high] from {lowest:g} upwards, got {limits}"
                )
        if self.simulate_low_resolution[1] > 1:
            raise ArgumentError(
                "simulate_low_resolution",
                f" is a share of the voxels, at most 1, got {list(self.simulate_low_resolution)}",
            )
        for name in ("rotation_deg", "shift", "elastic_mm"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < np.inf:
                raise ArgumentError(name, f" must be 0 or more, got {value}")
        if not isinstance(self.elastic_spacing_mm, (int, float)) or not 0 < self.elastic_spacing_mm < np.inf:
            raise ArgumentError("elastic_spacing_mm", f" must be above 0, got {self.elastic_spacing_mm}")
        if self.p["elastic"] and not self.elastic_mm <= _FOLDS * self.elastic_spacing_mm:
            raise ArgumentError(
                "elastic_mm",
                f" must be at most {_FOLDS} of ",
                Argument("elastic_spacing_mm"),
                f", or tissue folds over itself, got {self.elastic_mm} and {self.elastic_spacing_mm}",
            )


def between(draw: Draw, limits: Sequence[float], is_factor: bool = False) -> float:
    """Uniform from low to high; a factor is as often below 1 as above, if the range contains 1."""
    low, high = limits
    if is_factor:
        is_below = draw() < 0.5
        if low < 1 < high:
            low, high = (low, 1.0) if is_below else (1.0, high)
    return low + draw() * (high - low)


def rotated_half(
    patch_size: Sequence[int], spacing_mm: Sequence[float], rotation_deg: float, rotates: np.ndarray
) -> np.ndarray:
    """How far a rotation in one plane takes the corners of a patch from its centre.

    Shape: (axes,), in voxels.
    Args:
        rotation_deg: largest angle.
        rotates: the axes that may be rotated; bool.
    """
    half = np.array(patch_size) / 2
    spacing = np.array(spacing_mm)
    distance = half.copy()
    for axis, partner in permutations(np.flatnonzero(rotates), 2):
        partner_half = half[partner] * spacing[partner] / spacing[axis]  # in voxels of `axis`
        # The corner is farthest where it comes to lie on the axis.
        angle = min(np.deg2rad(rotation_deg), np.arctan2(partner_half, half[axis]))
        rotated = half[axis] * np.cos(angle) + partner_half * np.sin(angle)
        distance[axis] = max(distance[axis], rotated)
    return distance


def size_that_holds(patch_size: Sequence[int], distance: np.ndarray) -> tuple[int, ...]:
    """The smallest size with the centre of the patch that includes voxels this far from it."""
    size = []
    for voxels, far in zip(patch_size, distance, strict=True):
        # One voxel more to interpolate from; the same on both sides, so that the centre stays.
        margin = ceil(far + 1 - voxels / 2)
        size.append(int(voxels + 2 * margin))
    return tuple(size)
