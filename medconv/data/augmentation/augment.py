"""Augmentation of a whole batch on its device; one code for 2D and 3D.

Parameters are sampled separately, from (seed, sample number) alone: a batch gives the same result as its
samples one by one, on the device or in a loader worker, and a prediction can be transformed like its sample.
Source: the list of transforms follows Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medconv.data.augmentation import intensity, spatial
from medconv.data.augmentation.parameters import MOVES, PER_CHANNEL, Parameters, RandomParameters
from medconv.utils.hardware import to_device

Images = Tensor | Sequence[Tensor]
Pair = tuple[Tensor, Tensor | None]  # image and label


@dataclass(eq=False, repr=False, kw_only=True)
class Augment(RandomParameters):
    """All moves as one resampling; then noise, blur with low resolution, brightness, contrast, gamma.

    Args:
        flip_label_pairs: label values that swap when a sample is mirrored along `left_right_axis`.
        left_right_axis: a spatial axis; None: no axis runs from left to right.

    The others are those of `RandomParameters`.
    """

    flip_label_pairs: Sequence[Sequence[int]] = ()
    left_right_axis: int | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Augment a batch; the input is kept.

        Shape: image (batch, channels, *spatial), label as of `apply`; sample (batch,) numbers.
        Image and label may be lists of samples of different sizes; image-level labels (batch, n) stay.
        """
        label = batch["label"]
        image_level = isinstance(label, Tensor) and label.ndim == 2
        numbers = torch.as_tensor(batch["sample"])
        num_channels = len(batch["image"][0])
        parameters = self.sample(numbers.tolist(), num_channels)
        image, label_map = self.apply(batch["image"], None if image_level else label, parameters)
        return {**batch, "image": image, "label": label if image_level else label_map, "sample": numbers}

    def apply(self, image: Images, label: Images | None, parameters: Parameters) -> Pair:
        """Linear interpolation for images, nearest neighbour for label maps, 0 outside; the input is kept.

        Labels that are floating-point are probabilities of classes, (batch, classes, *spatial), and are
        interpolated as images are.
        """
        if label is not None and label[0].is_floating_point():
            moved, label = self._move_probabilities(image, label, parameters)
        else:
            moved, label = self.apply_spatial(image, label, parameters)
        values = moved.float()
        intensity.add_noise(values, parameters.noise_std, parameters.noise_seed)
        # A row is one channel of one sample; rows are views of `values`, changed in place.
        rows = values.flatten(0, 1)
        of_row = {name: getattr(parameters, name).flatten(0, 1) for name in PER_CHANNEL}
        intensity.soften(rows, of_row["blur"], of_row["simulate_low_resolution"])
        gain = of_row["brightness"]
        offset = of_row["additive_brightness"]
        intensity.change(rows, (gain != 1) | (offset != 0), intensity.scale_, gain, offset)
        contrast = of_row["contrast"]
        intensity.change(rows, contrast != 1, intensity.stretch_, contrast)
        gamma = of_row["gamma_inverted"]
        intensity.change(rows, gamma != 1, partial(intensity.bend_, inverted=True), gamma)
        gamma = of_row["gamma"]
        intensity.change(rows, gamma != 1, intensity.bend_, gamma)
        return values.to(moved.dtype), label

    def apply_spatial(self, image: Images, label: Images | None, parameters: Parameters) -> Pair:
        """The spatial part of `apply`."""
        batch_size = len(image)
        num_channels = len(image[0])
        out = image[0].new_empty((batch_size, num_channels, *self.patch_size))
        out_label = None
        if label is not None:
            out_label = label[0].new_empty((batch_size, 1, *self.patch_size))
        moves = {name: getattr(parameters, name) for name in MOVES}
        is_faster_stacked = spatial.is_faster_stacked(label, len(self.patch_size), out.device)
        if is_faster_stacked and isinstance(image, Tensor) and not isinstance(label, Sequence):
            self._move(image, label, moves, out, out_label)
        else:
            for i in range(batch_size):
                one = slice(i, i + 1)
                self._move(
                    image[i][None],
                    None if label is None else label[i][None],
                    {name: values[one] for name, values in moves.items()},
                    out[one],
                    None if out_label is None else out_label[one],
                )
        if out_label is not None and self.flip_label_pairs and self.left_right_axis is not None:
            mirrored = _index(parameters.flips[:, self.left_right_axis], out_label.device)
            out_label[mirrored] = swapped_values(out_label[mirrored], self.flip_label_pairs)
        return out, out_label

    def _move(
        self,
        image: Tensor,
        label: Tensor | None,
        moves: dict[str, Tensor],
        out: Tensor,
        out_label: Tensor | None,
    ) -> None:
        """Write all samples into `out`: resampled where they move, else at most mirrored."""
        moved = moves["moved"]
        # parameters are on the CPU, so this waits for no device
        if bool(moved.any()):
            samples = _index(moved, image.device)
            field = None
            control_points = moves["elastic"][moved]
            if control_points.any():
                control_points = to_device(control_points, image.device)
                field = spatial.spline_field(control_points, self.patch_size, self._distance)
            resampled, resampled_label = spatial.resample(
                image[samples].float(),
                None if label is None else label[samples],
                moves["matrix"][moved],
                moves["shift"][moved] * torch.tensor(self.patch_size),  # voxels, from a share of the patch
                field,
                self.patch_size,
            )
            out[samples] = resampled.to(out.dtype)
            if out_label is not None and resampled_label is not None:
                out_label[samples] = resampled_label
        flips = moves["flips"]
        # Equal flips together, for few kernel launches.
        for pattern in {tuple(row) for row in flips[~moved].tolist()}:
            has_pattern = (flips == torch.tensor(pattern)).all(1) & ~moved
            samples = _index(has_pattern, image.device)
            dims = [2 + axis for axis, flipped in enumerate(pattern) if flipped]
            out[samples] = centre(image, self.patch_size)[samples].flip(dims)
            if label is not None and out_label is not None:
                out_label[samples] = centre(label, self.patch_size)[samples].flip(dims)

    def _move_probabilities(
        self, image: Images, label: Images, parameters: Parameters
    ) -> tuple[Tensor, Tensor]:
        """`apply_spatial` of probabilities, which move as further channels of the image."""
        num_channels = len(image[0])
        joined: Images
        if isinstance(image, Tensor) and isinstance(label, Tensor):
            joined = torch.cat([image, label.to(image.dtype)], 1)
        else:
            pairs = zip(image, label, strict=True)
            joined = [torch.cat([one, of_one.to(one.dtype)]) for one, of_one in pairs]
        moved, _ = self.apply_spatial(joined, None, parameters)
        # Contiguous, as intensities of the image are changed in place
        probabilities = moved[:, num_channels:].contiguous()
        if self.flip_label_pairs and self.left_right_axis is not None:
            samples = _index(parameters.flips[:, self.left_right_axis], probabilities.device)
            # The first channel is that of label value 1
            channels = [(first - 1, second - 1) for first, second in self.flip_label_pairs]
            probabilities[samples] = swapped_channels(probabilities[samples], channels)
        return moved[:, :num_channels].contiguous(), probabilities.to(label[0].dtype)


def _index(mask: Tensor, device: torch.device) -> Tensor | slice:
    """Indices where a mask is true; a slice if it is true everywhere, which is several times faster."""
    if bool(mask.all()):
        return slice(None)
    return to_device(mask.nonzero().flatten(), device)


def swapped_channels(values: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """The channels of each pair exchanged. Shape: (batch, channels, *spatial)."""
    if not pairs:
        return values
    order = list(range(values.shape[1]))
    for first, second in pairs:
        order[first] = second
        order[second] = first
    return values[:, order]


def swapped_values(label: Tensor, pairs: Sequence[Sequence[int]]) -> Tensor:
    """The values of each pair exchanged."""
    exchanged = label.clone()
    for first, second in pairs:
        exchanged.masked_fill_(label == first, second)
        exchanged.masked_fill_(label == second, first)
    return exchanged


def centre(array: Tensor, size: Sequence[int]) -> Tensor:
    """Centre crop of the last axes, as a view. Shape: (..., *spatial) -> (..., *size)."""
    for axis, voxels in enumerate(size, start=-len(size)):
        first = (array.shape[axis] - voxels) // 2
        array = array.narrow(axis, first, voxels)
    return array
