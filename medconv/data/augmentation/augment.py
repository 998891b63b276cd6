"""Augmentation of a whole batch on its device; one code for 2D and 3D.

Parameters are sampled separately, from (seed, sample number) alone: a batch gives the same result as its
samples one by one, on the device or in a loader worker, and a prediction can be transformed like its sample.
Source: the list of transforms follows Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medconv.data.augmentation import intensity, spatial
from medconv.data.augmentation.parameters import MOVES, Parameters, ParameterSampler
from medconv.utils.hardware import to_device

Images = Tensor | Sequence[Tensor]
Pair = tuple[Tensor, Tensor | None]  # image and label


@dataclass(eq=False, repr=False, kw_only=True)
class Augment(ParameterSampler):
    """All moves as one resampling; then noise, blur with low resolution, brightness, contrast, gamma.

    Args: flip_label_pairs: label values that swap when a sample is mirrored along `left_right_axis`; the
        others as in `ParameterSampler`.
    """

    flip_label_pairs: Sequence[Sequence[int]] = ()
    left_right_axis: int | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Shape: image (batch, channels, *spatial), label (batch, 1, *spatial); sample (batch,) numbers.
        Image and label may be lists of samples of different sizes; image-level labels (batch, n) stay."""
        numbers = torch.as_tensor(batch["sample"])
        parameters = self.sample(numbers.tolist(), len(batch["image"][0]))
        values = isinstance(batch["label"], Tensor) and batch["label"].ndim == 2
        image, label = self.apply(batch["image"], None if values else batch["label"], parameters)
        return {**batch, "image": image, "label": batch["label"] if values else label, "sample": numbers}

    def apply(self, image: Images, label: Images | None, parameters: Parameters) -> Pair:
        """Linear interpolation for images, nearest neighbour for labels, 0 outside; the input is kept."""
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

    def place(self, image: Images, label: Images | None, parameters: Parameters) -> Pair:
        """The spatial part of `apply`."""
        out = image[0].new_empty((len(image), len(image[0]), *self.patch_size))
        out_label = None if label is None else label[0].new_empty((len(label), 1, *self.patch_size))
        moves = [getattr(parameters, name) for name in MOVES]
        stack = spatial.plain(label, len(self.patch_size)) or not spatial.one_by_one(image[0].device)
        if stack and isinstance(image, Tensor) and not isinstance(label, Sequence):
            self._place(image, label, moves, out, out_label)
        else:
            for i in range(len(image)):
                one = slice(i, i + 1)
                own = None if label is None else label[i][None]
                own_out = None if out_label is None else out_label[one]
                self._place(image[i][None], own, [move[one] for move in moves], out[one], own_out)
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
        """Write into `out`; equal flips together, for few kernel launches."""
        moved, matrix, shift, flips, elastic = moves
        if bool(moved.any()):
            which, size = _index(moved, image.device), self.patch_size
            control = to_device(elastic[moved], image.device)
            field = spatial.spline_field(control, size, self._distance) if elastic[moved].any() else None
            share, own = shift[moved] * torch.tensor(size), None if label is None else label[which]
            seen, seen_label = spatial.resample(image[which].float(), own, matrix[moved], share, field, size)
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
        """Swap the labels of `flip_label_pairs`."""
        there = _index(which, label.device)
        label[there] = swapped(label[there], self.flip_label_pairs)


def _index(mask: Tensor, device: torch.device) -> Tensor | slice:
    """Indices where a mask is true; a slice if it is true everywhere, which is several times faster."""
    return slice(None) if bool(mask.all()) else to_device(mask.nonzero().flatten(), device)


def swapped(label: Tensor, pairs: Sequence[Sequence[int]]) -> Tensor:
    """The values of each pair exchanged."""
    after = label.clone()
    for a, b in pairs:
        after.masked_fill_(label == a, b).masked_fill_(label == b, a)
    return after


def centre(array: Tensor, size: Sequence[int]) -> Tensor:
    """Centre crop of the last axes, as a view. Shape: (..., *spatial) -> (..., *size)."""
    for axis, n in enumerate(size, start=-len(size)):
        array = array.narrow(axis, (array.shape[axis] - n) // 2, n)
    return array
