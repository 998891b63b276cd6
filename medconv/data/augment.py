"""Augmentation of a whole batch at once, on the device the batch is on; 2D and 3D from the same code.

Parameters are sampled apart from applied, and only from (seed, sample number): a batch gives what its samples give one
by one, on the device or in a loader worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Parameters:
    """What is done to each sample of a batch.

    Shape: matrix (batch, axes, axes) and shift (batch, axes), a share of the patch: an output position p in mm from the
    centre shows the input at matrix @ p + shift * patch. gain, offset, noise_std (batch,): in units of the normalised
    image. noise_seed (batch,).
    """

    matrix: Tensor
    shift: Tensor
    gain: Tensor
    offset: Tensor
    noise_std: Tensor
    noise_seed: Tensor


class Augment:
    """Rotation, scaling and shift as one resampling, then contrast, brightness and noise.

    Args:
        seed: with the sample number it decides everything.
        spacing_mm: of the patch, one number per spatial axis; an axis pair whose spacings differ by more than a factor
            of three is not rotated into each other.
        rotation_deg, scale, shift: largest angle, largest relative zoom, largest shift as share of the patch.
        mirror_axes: spatial axes along which each sample is flipped or not, by chance.
        contrast, brightness, noise_std: largest relative gain, largest offset, largest standard deviation of noise,
            the last two in standard deviations of the image.
    """

    def __init__(
        self,
        seed: int,
        spacing_mm: Sequence[float],
        rotation_deg: float = 0.0,
        scale: float = 0.0,
        shift: float = 0.0,
        contrast: float = 0.0,
        brightness: float = 0.0,
        noise_std: float = 0.0,
        mirror_axes: Sequence[int] = (),
    ) -> None:
        self.seed, self.spacing_mm, self.mirror_axes = seed, tuple(spacing_mm), tuple(mirror_axes)
        self.rotation_deg, self.scale, self.shift = rotation_deg, scale, shift
        self.contrast, self.brightness, self.noise_std = contrast, brightness, noise_std
        ranges = {k: v for k, v in vars(self).items() if k not in ("seed", "spacing_mm", "mirror_axes")}
        wrong = {k: v for k, v in ranges.items() if not v >= 0}
        if wrong or not scale < 1:
            raise ValueError(f"augment: every range must be 0 or more, and scale below 1, got {wrong or {'scale': scale}}")
        axes = len(self.spacing_mm)
        if len(set(self.mirror_axes)) != len(self.mirror_axes) or any(not 0 <= a < axes for a in self.mirror_axes):
            raise ValueError(
                f"augment.mirror_axes must be different spatial axes from 0 to {axes - 1}, got {list(mirror_axes)}"
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Shape: image (batch, channels, *spatial), label (batch, 1, *spatial); sample (batch,) numbers."""
        parameters = self.sample(batch["sample"].tolist())
        image, label = self.apply(batch["image"], batch["label"], parameters)
        return {**batch, "image": image, "label": label}

    def sample(self, numbers: Sequence[int]) -> Parameters:
        """Draw the parameters of these samples, each from its own number."""
        drawn = [self._draw(np.random.default_rng([self.seed, 2, n])) for n in numbers]
        columns = [torch.from_numpy(np.stack(column)) for column in zip(*drawn, strict=True)]
        return Parameters(*(c if c.dtype == torch.int64 else c.float() for c in columns))

    def apply(self, image: Tensor, label: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Image by linear, label by nearest-neighbour interpolation; 0 comes in from outside."""
        if self.rotation_deg or self.scale or self.shift or self.mirror_axes:
            grid = self._grid(image.shape, parameters).to(image.device)
            image = F.grid_sample(image, grid, mode="bilinear", align_corners=False)
            label = F.grid_sample(label.float(), grid, mode="nearest", align_corners=False).to(label.dtype)
        return self._intensity(image, parameters), label

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        axes = len(self.spacing_mm)
        matrix = np.eye(axes) * np.exp(rng.uniform(-1, 1) * -np.log1p(-self.scale))
        for a, b in combinations(range(axes), 2):
            angle = np.deg2rad(self.rotation_deg) * rng.uniform(-1, 1)
            if max(self.spacing_mm[a], self.spacing_mm[b]) <= 3 * min(self.spacing_mm[a], self.spacing_mm[b]):
                matrix = matrix @ _plane_rotation(axes, a, b, angle)
        shift, gain, offset = rng.uniform(-1, 1, axes), rng.uniform(-1, 1), rng.uniform(-1, 1)
        noise_std, noise_seed = rng.uniform(0, 1), rng.integers(2**62)
        flips = [-1.0 if axis in self.mirror_axes and rng.uniform() < 0.5 else 1.0 for axis in range(axes)]
        return (
            matrix * flips,
            shift * self.shift,
            np.array(1 + gain * self.contrast),
            np.array(offset * self.brightness),
            np.array(noise_std * self.noise_std),
            np.array(noise_seed),
        )

    def _grid(self, shape: Sequence[int], parameters: Parameters) -> Tensor:
        """`F.affine_grid` counts axes from the last and positions from -1 to 1; the matrix is in mm."""
        half = torch.tensor([n * s / 2 for n, s in zip(shape[2:], self.spacing_mm, strict=True)])
        linear = parameters.matrix * half[None, None, :] / half[None, :, None]
        theta = torch.cat([linear.flip(1, 2), 2 * parameters.shift.flip(1)[:, :, None]], dim=2)
        return F.affine_grid(theta, list(shape), align_corners=False)

    def _intensity(self, image: Tensor, parameters: Parameters) -> Tensor:
        def per_sample(values: Tensor) -> Tensor:
            return values.to(image).reshape(-1, *(1,) * (image.ndim - 1))

        if self.contrast or self.brightness:
            image = image * per_sample(parameters.gain) + per_sample(parameters.offset)
        if self.noise_std:
            image = image + per_sample(parameters.noise_std) * _noise(image, parameters.noise_seed)
        return image


def _plane_rotation(axes: int, a: int, b: int, angle: float) -> np.ndarray:
    rotation = np.eye(axes)
    rotation[[a, b], [a, b]] = np.cos(angle)
    rotation[a, b], rotation[b, a] = -np.sin(angle), np.sin(angle)
    return rotation


def _noise(image: Tensor, seeds: Tensor) -> Tensor:
    noise = torch.empty_like(image)
    generator = torch.Generator(image.device)
    for sample, seed in zip(noise, seeds.tolist(), strict=True):
        sample.normal_(generator=generator.manual_seed(seed))
    return noise
