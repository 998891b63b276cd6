"""From the files of a case to its label map, by one trained network or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from medconv.data.case import Case, Grid
from medconv.data.io.images import read_image
from medconv.data.preprocessing.preprocess import (
    CropInfo,
    PreprocessingConfig,
    on_content_grid,
    preprocess,
    to_native,
)
from medconv.inference.exported import load as exported_load
from medconv.inference.load import LoadedModel, load, with_window
from medconv.targets.segmentation import SegmentationTargets
from medconv.utils.hardware import autocast_dtype
from medconv.utils.logging import size_text

_SHEARED = 0.5  # degrees, as in training's checks
_FAR = 2.0  # a spacing this many times below or above that of all training cases causes a warning
Finish = Callable[[np.ndarray, Grid, SegmentationTargets], np.ndarray]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Input:
    """A case as the networks take it. Args: arrays: one per preprocessing. warning: unusual properties."""

    case: Case
    arrays: list[np.ndarray]
    crop: CropInfo
    warning: str | None = None


@dataclass(frozen=True)
class Scores:
    """The networks' outputs for a case.

    Args:
        logits: (outputs, *spatial) per preprocessing: the mean over the members that share it.
        weights: per preprocessing, its share of the members.
    """

    logits: list[Tensor]
    weights: list[float]
    crop: CropInfo
    targets: SegmentationTargets

    def label(self) -> np.ndarray:
        """The label map on the image's own grid, (X, Y, Z) int16; with one preprocessing, the same as
        `restore` in validation.
        """
        if len(self.logits) == 1:
            values = self.targets.decode(on_content_grid(self.logits[0], self.crop))
        else:
            values = self.targets.decode_mean(self._mean())
        return to_native(values.cpu().numpy(), self.crop)

    def probabilities(self) -> Iterator[np.ndarray]:
        """One channel after the other, each (X, Y, Z) float32: background and classes, which add up to 1, or
        regions. Outside the crop all is background."""
        for number, channel in enumerate(self._mean()):
            outside = float(number == 0 and self.targets.exclusive)
            yield to_native(channel.cpu().numpy(), self.crop, outside)

    def on_cpu(self) -> Scores:
        return Scores([logits.cpu() for logits in self.logits], self.weights, self.crop, self.targets)

    def _mean(self) -> Iterator[Tensor]:
        for channels in zip(*map(self._each_probability, self.logits), strict=True):
            yield sum(
                (w * p for w, p in zip(self.weights, channels, strict=True)), torch.zeros_like(channels[0])
            )

    def _each_probability(self, logits: Tensor) -> Iterator[Tensor]:
        """Channel by channel, so that not all of them are in memory on the native grid."""
        channels, again = (on_content_grid(logits, self.crop) for _ in range(2))
        yield from self.targets.probabilities(channels, again)


class Predictor:
    """One trained network, or the mean of several.

    Members with the same preprocessing, such as the folds of one configuration: the mean of their logits, on
    the prepared grid. Where preprocessing differs, such as 2D and 3D, logits have no common grid and scale:
    the mean of the probabilities on the image's own grid, each member having the same weight.
    Args: finish: post-processing of the label map, (label, grid, targets) -> label.
    Raises: ValueError: members that were not trained for the same targets, channels or dimensions.
    Source: means over folds as in Isensee et al. 2021, doi:10.1038/s41592-020-01008-z.
    """

    def __init__(
        self, members: Sequence[LoadedModel], device: str = "cpu", finish: Finish | None = None
    ) -> None:
        self.members, self.device, self.finish = tuple(members), device, finish
        first = self.members[0]
        for other in self.members[1:]:
            _check_same(first, other)
        self.targets, self.class_names, self.modalities = first.targets, first.class_names, first.modalities
        self.preprocessings: list[PreprocessingConfig] = []
        for member in self.members:
            if member.preprocessing not in self.preprocessings:
                self.preprocessings.append(member.preprocessing)

    @property
    def segmentation_targets(self) -> SegmentationTargets:
        assert isinstance(self.targets, SegmentationTargets)
        return self.targets

    @classmethod
    def load(
        cls,
        checkpoints: Sequence[Path | str],
        device: str = "cpu",
        trusted: Sequence[str] = (),
        mirror_axes: Sequence[int] | None = None,
        overlap: float | None = None,
        sw_batch_size: int | None = None,
        finish: Finish | None = None,
        models: Sequence[Path | str] = (),
    ) -> Predictor:
        """From checkpoints and exported models; None keeps what each was validated with.

        Raises: ValueError: as `inference.load.load` and `inference.exported.load.load`.
        """
        members = load_members(checkpoints, device, trusted, mirror_axes, models)
        return cls([with_window(member, overlap, sw_batch_size) for member in members], device, finish)

    def __call__(self, *images: Path | str) -> np.ndarray:
        """The label map of a case, (X, Y, Z) int16, from its files: one per channel, or one with all of them.

        Raises: ValueError: its files cannot be read, or do not fit the network.
        """
        paths = tuple(Path(path) for path in images)
        return self.label(self.scores(self.read(Case(paths[0].name, paths))))

    def read(self, case: Case) -> Input:
        """Raises: ValueError: its files cannot be read, or do not fit the network."""
        image, grid = read_image(case.images)
        self._check(case.images[0], image, grid)
        prepared = [preprocess(image, grid, preprocessing) for preprocessing in self.preprocessings]
        crop = prepared[0][1]  # the same for all: the crop does not depend on the preprocessing
        warnings = [self._spacing_warning(crop)]
        if grid.shear > _SHEARED:
            warnings.append(f"its axes are {grid.shear:.1f} degrees off a right angle; it is used as it is")
        return Input(case, [array for array, _ in prepared], crop, "; ".join(filter(None, warnings)) or None)

    @torch.inference_mode()
    def scores(self, case_input: Input) -> Scores:
        """Raises: ValueError: the networks' logits are not finite."""
        logits, weights = [], []
        for preprocessing, array in zip(self.preprocessings, case_input.arrays, strict=True):
            sharing = [member for member in self.members if member.preprocessing == preprocessing]
            image = torch.from_numpy(array)[None].to(self.device)
            logits.append(self._mean(sharing, image))
            weights.append(len(sharing) / len(self.members))
            if not finite(logits[-1]):
                raise ValueError(
                    f"the network's logits are not finite (trainer.precision={sharing[0].precision})"
                )
        return Scores(logits, weights, case_input.crop, self.segmentation_targets)

    @torch.inference_mode()
    def label(self, scores: Scores) -> np.ndarray:
        """After post-processing; (X, Y, Z) int16."""
        label = with_cpu_fallback(scores, Scores.label)
        return (
            label if self.finish is None else self.finish(label, scores.crop.grid, self.segmentation_targets)
        )

    @torch.inference_mode()
    def probabilities(self, scores: Scores) -> Iterator[np.ndarray]:
        """As `Scores.probabilities`, before post-processing."""
        yield from scores.probabilities()

    def _mean(self, members: Sequence[LoadedModel], image: Tensor) -> Tensor:
        total = self._logits(members[0], image)
        for member in members[1:]:
            other = self._logits(member, image)
            total = total.to(other.device) + other if other.device != total.device else total.add_(other)
        return total / len(members) if len(members) > 1 else total

    def _logits(self, member: LoadedModel, image: Tensor) -> Tensor:
        with autocast(member.precision, self.device):
            logits = member.window(
                lambda windows: member.network(windows.contiguous(memory_format=member.memory_format)), image
            )
        return logits[0].float()

    def _check(self, path: Path, image: np.ndarray, grid: Grid) -> None:
        preprocessing = self.preprocessings[0]
        if len(image) != len(self.modalities):
            names = f"{len(self.modalities)} channels ({', '.join(self.modalities)})"
            raise ValueError(f"{path}: the network was trained on {names}, found {len(image)}")
        if (grid.shape[2] == 1) != (preprocessing.image_dims == 2):
            dims = f"{preprocessing.spatial_dims}D" + (
                " on slices of volumes" if preprocessing.slice_axis is not None else ""
            )
            raise ValueError(f"{path}: the network is {dims}, the image has shape {grid.shape}")
        if not np.isfinite(image).all():
            raise ValueError(f"{path}: has voxels that are NaN or infinite, expected finite numbers")

    def _spacing_warning(self, crop: CropInfo) -> str | None:
        for member in self.members:
            spacing, ranges = crop.native_spacing_mm, member.spacing_range_mm
            if any(
                mm * _FAR < low or mm > _FAR * high for mm, (low, high) in zip(spacing, ranges, strict=False)
            ):
                trained = " x ".join(f"{low:.3g} to {high:.3g}" for low, high in ranges)
                here = size_text(spacing[: len(ranges)], 3)
                return (
                    f"its spacing, {here} mm (right, anterior, superior), is far from that of "
                    f"training, {trained} mm"
                )
        return None


def load_members(
    checkpoints: Sequence[Path | str],
    device: str = "cpu",
    trusted: Sequence[str] = (),
    mirror_axes: Sequence[int] | None = None,
    models: Sequence[Path | str] = (),
) -> list[LoadedModel]:
    """From checkpoints and exported models. Raises: ValueError: as `inference.load.load` and
    `inference.exported.load.load`, or no mean can be taken over them.
    """
    members = [load(Path(path), trusted, device, mirror_axes) for path in checkpoints]
    members += [exported_load.load(Path(path), device, mirror_axes) for path in models]
    for other in members[1:]:
        _check_same(members[0], other)
    return members


def autocast(precision: str, device: str) -> torch.autocast:
    """The autocast that Lightning uses for this `trainer.precision`."""
    dtype = autocast_dtype(precision)
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)


def finite(logits: Tensor) -> bool:
    """Whether all logits are finite; tested channel by channel, since the test copies its input."""
    return bool(torch.stack([channel.isfinite().all() for channel in logits]).all())


def with_cpu_fallback(scores: Scores, work: Callable[[Scores], Result]) -> Result:
    """`work(scores)`, on the CPU if the GPU runs out of memory."""
    try:
        return work(scores)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return work(scores.on_cpu())


def _check_same(first: LoadedModel, other: LoadedModel) -> None:
    """Raises: ValueError: no mean can be taken over the two."""
    for name, property_of in (
        ("targets", lambda m: m.targets.description),
        ("classes", lambda m: ", ".join(m.class_names)),
        ("channels", lambda m: f"{len(m.modalities)}: {', '.join(m.modalities)}"),
        ("images", lambda m: f"{m.preprocessing.image_dims}D"),
    ):
        if property_of(first) != property_of(other):
            raise ValueError(
                f"{other.path}: cannot be averaged with {first.path}, its {name} differ: "
                f"{property_of(other)}; there {property_of(first)}"
            )
