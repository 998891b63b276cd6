"""Targets that are images: how they are scaled, compared and scored."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from medconv.features.continuous.metrics import METRICS, Row, means
from medconv.targets.base import Family, Targets
from medconv.targets.scores import MonitoredMetric, NamedScores

IMAGES = Family(
    examine="medconv.features.continuous.labels:examine_pair",
    labels="medconv.features.continuous.labels",
    validation="medconv.features.continuous.inference:image_validation",
    keeps="medconv.features.continuous.inference:kept",
    forward="medconv.features.continuous.inference:ImageForward",
    output="medconv.features.continuous.inference:OutputImages",
    evaluate="medconv.features.continuous.evaluation:evaluate",
    views="medconv.features.continuous.views:ImageViews",
)


@dataclass(frozen=True)
class ContinuousTargets(Targets):
    """An image of numbers on the grid of the input.

    With `same_units` the network learns the difference to the first channel of the input, on the prepared
    grid and in units of that image's standard deviation: intensities of scans may have arbitrary units. Else
    it learns the target itself, standardised by mean and standard deviation of the data set's targets.

    Args:
        same_units: whether the target is the same quantity as the first channel.
        mean, std, low: of the targets, in their units; low: the smallest value, which is written where the
            input is empty. Without effect with `same_units`.
    """

    kind: ClassVar[str] = "continuous"
    family: ClassVar[Family] = IMAGES
    per_voxel: ClassVar[bool] = True
    exclusive: ClassVar[bool] = False
    default_loss: ClassVar[str] = "image_l1"
    monitored: ClassVar[MonitoredMetric] = MonitoredMetric("val/psnr", "PSNR")
    output_meaning: ClassVar[str] = (
        "with targets.same_units: the output times the standard deviation of the first channel's voxels that "
        "are not 0, plus that channel, resampled; else the output times targets.std plus targets.mean"
    )
    unbounded: ClassVar[bool] = True
    loss_kinds: ClassVar[tuple[str, ...]] = ("regression",)
    names: tuple[str, ...] = ("target",)
    same_units: bool = False
    mean: float = 0.0
    std: float = 1.0
    low: float = 0.0

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> Self:
        same_units = content.get("same_units")
        numbers: list[Any] = [content.get(name) for name in ("mean", "std", "low")]
        # `type`, as True and False are of class int
        are_finite = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        if type(same_units) is not bool or not are_finite or not content["std"] > 0:
            raise ValueError("continuous targets need same_units, mean, a positive std, and low")
        mean, std, low = map(float, numbers)
        return cls(same_units=same_units, mean=mean, std=std, low=low)

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self), "names": list(self.names)}

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def description(self) -> str:
        if self.same_units:
            return f"{self.kind}: the difference to the image"
        return f"{self.kind}: mean {self.mean:.6g}, std {self.std:.6g}"

    @property
    def scores(self) -> "ImageScores":
        return ImageScores()

    def encode(self, label: Tensor) -> Tensor:
        """Shape: (batch, 1 or 2, *spatial), as `labels.prepared` gives it -> same, in units of the loss."""
        return label.float() if self.same_units else (label.float() + self.low - self.mean) / self.std

    def random_labels(self, batch: int, patch_size: Sequence[int]) -> Tensor:
        mean = self.mean - self.low
        return mean + self.std * torch.randn(batch, 1 + self.same_units, *patch_size)

    def compare(
        self, loss: Callable[..., Tensor], outputs: Tensor, encoded: Tensor, annotated: Tensor | None = None
    ) -> Tensor:
        # images, not differences: SSIM sees structures
        image = outputs.float() + encoded[:, 1:] if self.same_units else outputs.float()
        return loss(image, encoded[:, :1])

    def scale(self, image: np.ndarray) -> tuple[float, float]:
        """Mean and standard deviation of the answers' units. Args: image: the input's first channel."""
        return scale_of(image) if self.same_units else (self.mean, self.std)

    @property
    def outside(self) -> float:
        """The value where the input is empty, and the network sees nothing."""
        return 0.0 if self.same_units else self.low


def scale_of(image: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of an image's voxels that are not 0; std 1 if it is constant."""
    values = image[image != 0].astype(np.float64)
    if not values.size:
        return 0.0, 1.0
    return float(values.mean()), float(values.std()) or 1.0


class ImageScores(NamedScores):
    """A row of a checkpoint's `validation` has the metrics of `METRICS`, measured on the native grid."""

    words = METRICS

    def of_case(self, row: Row) -> Row:
        return row

    def means(self, rows: Sequence[Row]) -> dict[str, Any]:
        return means(rows)
