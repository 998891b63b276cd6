"""The parameters of augmentation for a batch: what is sampled in one place and applied in another."""

from dataclasses import dataclass

from torch import Tensor

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

    def per_row(self) -> dict[str, Tensor]:
        """The parameters per channel, name to values, with samples and channels flattened into rows."""
        return {name: getattr(self, name).flatten(0, 1) for name in PER_CHANNEL}
