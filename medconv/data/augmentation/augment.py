"""Augmentation of a whole batch at once, on the device the batch is on; 2D and 3D from the same code.

Parameters are sampled apart from applied, and only from (seed, sample number): a batch gives what its samples
give one by one, on the device or in a loader worker, and what was done to a sample can be done to a
prediction of it.
Source: the list of transforms follows Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medconv.data.augmentation import intensity, spatial
from medconv.data.augmentation.parameters import MOVES, Parameters, Sampling

Batch = Tensor | Sequence[Tensor]


class Augment(Sampling):
    """Rotation, scaling, shift, elastic deformation and mirroring as one resampling; then noise, blur with
    low resolution, brightness, contrast, gamma.

    Args:
        flip_label_pairs: label values that swap where a sample is mirrored along `left_right_axis`.
        ranges: what `Sampling` takes: seed, spacing_mm, patch_size, probabilities and ranges.
    Raises: ValueError: values out of range.
    """

    def __init__(
        self,
        *args: Any,
        flip_label_pairs: Sequence[Sequence[int]] = (),
        left_right_axis: int | None = None,
        **ranges: Any,
    ) -> None:
        super().__init__(*args, **ranges)
        self.flip_label_pairs, self.left_right_axis = tuple(flip_label_pairs), left_right_axis

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Shape: image (batch, channels, *spatial), label (batch, 1, *spatial); sample (batch,) numbers.
        Image and label may also be lists of samples of different sizes. They come back with `patch_size`. A
        label of values stays as it is: (batch, values)."""
        numbers = torch.as_tensor(batch["sample"])
        parameters = self.sample(numbers.tolist(), len(batch["image"][0]))
        values = isinstance(batch["label"], Tensor) and batch["label"].ndim == 2
        image, label = self.apply(batch["image"], None if values else batch["label"], parameters)
        return {**batch, "image": image, "label": batch["label"] if values else label, "sample": numbers}

    def apply(
        self, image: Batch, label: Batch | None, parameters: Parameters
    ) -> tuple[Tensor, Tensor | None]:
        """Image by linear, label by nearest-neighbour interpolation; 0 comes in from outside. The input
        stays as it is.
        """
        moved, label = self.place(image, label, parameters)
        values = moved.float()
        rows, of_rows = values.flatten(0, 1), parameters.per_row()
        intensity.add_noise(values, parameters.noise_std, parameters.noise_seed)
        intensity.soften(rows, of_rows["blur"], of_rows["simulate_low_resolution"])
        intensity.scale_values(rows, of_rows["brightness"], of_rows["additive_brightness"])
        intensity.stretch(rows, of_rows["contrast"])
        intensity.bend(rows, of_rows["gamma_inverted"], inverted=True)
        intensity.bend(rows, of_rows["gamma"], inverted=False)
        return values.to(moved.dtype), label

    def place(
        self, image: Batch, label: Batch | None, parameters: Parameters
    ) -> tuple[Tensor, Tensor | None]:
        """The part of `apply` that moves voxels."""
        out = image[0].new_empty((len(image), len(image[0]), *self.patch_size))
        out_label = None if label is None else label[0].new_empty((len(label), 1, *self.patch_size))
        moves = [getattr(parameters, name) for name in MOVES]
        stack = spatial.plain(label, len(self.patch_size)) or not spatial.one_by_one(image[0].device)
        if stack and isinstance(image, Tensor) and not isinstance(label, Sequence):
            self._place(image, label, moves, out, out_label)
        else:
            for i in range(len(image)):
                one = slice(i, i + 1)
                pair = (
                    (None, None) if label is None or out_label is None else (label[i][None], out_label[one])
                )
                self._place(image[i][None], pair[0], [move[one] for move in moves], out[one], pair[1])
        if out_label is not None and self.flip_label_pairs and self.left_right_axis is not None:
            self._swap(out_label, parameters.flips[:, self.left_right_axis])
        return out, out_label

    def _place(
        self,
        image: Tensor,
        label: Tensor | None,
        moves: Sequence[Tensor],
        out: Tensor,
        out_label: Tensor | None,
    ) -> None:
        """Into `out`; alike samples at once, so that an accelerator is asked few times."""
        moved, matrix, shift, flips, elastic = moves
        if bool(moved.any()):
            which, field = _index(moved, image.device), self._field(elastic[moved], image.device)
            share = shift[moved] * torch.tensor(self.patch_size)
            own = None if label is None else label[which]
            seen, seen_label = spatial.resample(
                image[which].float(), own, matrix[moved], share, field, self.patch_size
            )
            out[which] = seen.to(out.dtype)
            if out_label is not None and seen_label is not None:
                out_label[which] = seen_label
        for pattern in {tuple(row) for row in flips[~moved].tolist()}:
            which = _index((flips == torch.tensor(pattern)).all(1) & ~moved, image.device)
            dims = [2 + axis for axis, flipped in enumerate(pattern) if flipped]
            for source, target in ((image, out), (label, out_label)):
                if source is not None and target is not None:
                    target[which] = centre(source, self.patch_size)[which].flip(dims)

    def _swap(self, label: Tensor, which: Tensor) -> None:
        """Left becomes right."""
        for i in which.nonzero().flatten().tolist():
            before = label[i].clone()
            for a, b in self.flip_label_pairs:
                label[i].masked_fill_(before == a, b).masked_fill_(before == b, a)

    def _field(self, control: Tensor, device: torch.device) -> Tensor | None:
        return (
            spatial.spline_field(control.to(device), self.patch_size, self._distance)
            if control.any()
            else None
        )


def _index(mask: Tensor, device: torch.device) -> Tensor | slice:
    """Where a mask holds; a slice where it holds everywhere, which copies and writes several times faster."""
    return slice(None) if bool(mask.all()) else mask.nonzero().flatten().to(device)


def centre(array: Tensor, size: Sequence[int]) -> Tensor:
    """The middle of the last axes, a view. Shape: (..., *spatial) -> (..., *size)."""
    for axis, n in enumerate(size, start=-len(size)):
        array = array.narrow(axis, (array.shape[axis] - n) // 2, n)
    return array
