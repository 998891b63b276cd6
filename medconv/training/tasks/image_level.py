"""Whole images: a class, findings or numbers of each; the loss on training samples, scores over all
validation cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from medconv.data.augmentation.parameters import check_axes
from medconv.inference.tta import flips, mean_over_flips
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.monitor import AUC, MAE, MonitoredMetric
from medconv.training.losses.image_level import ImageLevelLoss
from medconv.training.tasks.base import Batch, Task, gather
from medconv.training.tasks.mixup import Mixup

Row = dict[
    str, list[float]
]  # outputs: what they mean, as `ImageLevelTargets.decode` gives it; values: the truth
_LEAST = 1e-7  # of a probability, so that its logarithm is finite


class ImageLevelTask(Task):
    """Trains a network that gives a few outputs for an image, and validates it on whole images.

    Args:
        network: (batch, channels, *spatial) -> outputs (batch, image_targets.num_outputs); of numbers in
            their own units.
        outcome: what the outputs mean.
        spatial_dims: of the images.
        seed: of mixup. mixup: as of `Mixup`.
        mirror_axes: spatial axes of mirror test-time augmentation: what the outputs mean is averaged over all
            flips.
        loss, optimizer, scheduler, record, memory_format: as of `Task`; a row of `validation` is a `Row`.
    Raises: ValueError: an outcome of another kind, or values out of range.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: ImageLevelLoss,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        image_targets: ImageLevelTargets,
        spatial_dims: int,
        record: dict[str, Any],
        seed: int = 0,
        mixup: float = 0.0,
        mirror_axes: Sequence[int] = (),
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(network, loss, optimizer, scheduler, record, memory_format)
        if image_targets.kind not in self.kinds:
            raise ValueError(
                f"task: {type(self).__name__} is for {' or '.join(self.kinds)}, got {image_targets.kind}"
            )
        self.image_targets, self.mixup = image_targets, Mixup(mixup, seed)
        self.flips = flips(check_axes("task.mirror_axes", mirror_axes, spatial_dims))
        self.rows: dict[str, Row] = {}

    def loss_of(self, batch: Batch) -> Tensor:
        assert isinstance(self.loss, ImageLevelLoss)
        target = self.loss.target(batch["label"])
        image, target = self.mixup(batch["image"], target, batch["sample"])
        return self.loss(self(image), target)

    def on_validation_epoch_start(self) -> None:
        self.rows = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Whole cases; returns their ids and outputs, for the pictures."""
        outputs = mean_over_flips(self, batch["image"], self.image_targets, self.flips)
        found = zip(batch["case"], outputs.tolist(), batch["label"].float().tolist(), strict=True)
        self.rows.update({case: {"outputs": mine, "values": values} for case, mine, values in found})
        return {"case": batch["case"], "outputs": outputs}

    def on_validation_epoch_end(self) -> None:
        """Every rank brings its own cases; each case counts once."""
        self.rows = gather(self.rows)
        if self.trainer.sanity_checking or not self.rows:
            return
        outputs, truth = arrays(self.rows)
        for name, value in {
            **image_level.measure(self.image_targets, outputs, truth),
            **self._more(outputs, truth),
        }.items():
            shown = f"val/{name}" == self.monitored.name
            self.log(
                f"val/{name}", math.nan if value is None else value, prog_bar=shown, rank_zero_only=not shown
            )

    def _more(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float]:
        """Cross-entropy, of findings the mean over them."""
        if self.image_targets.kind == "regression":
            return {}
        present = image_level.positives(self.image_targets, truth)
        given = (
            np.where(present, outputs, 1 - outputs)
            if self.image_targets.kind == "multilabel"
            else outputs[present]
        )
        return {"cross_entropy": float(-np.log(given.clip(_LEAST)).mean())}


class Classification(ImageLevelTask):
    """One of some classes for each image, or any of some findings."""

    monitored: ClassVar[MonitoredMetric] = AUC
    kinds: ClassVar[tuple[str, ...]] = ("multiclass", "multilabel")


class Regression(ImageLevelTask):
    """One number for each image, or several."""

    monitored: ClassVar[MonitoredMetric] = MAE
    kinds: ClassVar[tuple[str, ...]] = ("regression",)


def arrays(rows: dict[str, Row]) -> tuple[np.ndarray, np.ndarray]:
    """Of all cases: outputs (cases, outputs) and truth (cases, values)."""
    return np.array([row["outputs"] for row in rows.values()]), np.array(
        [row["values"] for row in rows.values()]
    )
