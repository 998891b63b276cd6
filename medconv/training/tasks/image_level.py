"""Classification and regression of whole images: the loss of a batch, scores over all validation cases."""

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
from medconv.data.loading.datamodule import Batch
from medconv.inference.tta import flips, mean_over_flips
from medconv.metrics import image_level
from medconv.targets.image_level import ImageLevelTargets
from medconv.targets.monitor import AUC, MAE, MonitoredMetric
from medconv.training.losses.image_level import ImageLevelLoss
from medconv.training.tasks.base import Task, gather
from medconv.training.tasks.mixup import Mixup

# outputs: probabilities or values, from `ImageLevelTargets.decode`; values: the case's label
CaseOutputs = dict[str, list[float]]
_SMALLEST = 1e-7  # probability, so that its logarithm is finite


class ImageLevelTask(Task):
    """Trains and validates a network for image-level targets.

    Args:
        network: (batch, channels, *spatial) -> outputs (batch, image_targets.num_outputs); for regression in
            the units of the labels.
        image_targets: what the outputs mean.
        spatial_dims: of the images.
        seed: of mixup. mixup: alpha of `Mixup`.
        mirror_axes: spatial axes of mirror test-time augmentation: decoded outputs are averaged over all
            flips.
        loss, optimizer, scheduler, record, memory_format: see `Task`.
    Raises: ValueError: the targets are of another kind, or values are out of range.
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
        self.rows: dict[str, CaseOutputs] = {}

    def loss_of(self, batch: Batch) -> Tensor:
        assert isinstance(self.loss, ImageLevelLoss)
        target = self.loss.target(batch["label"])
        image, target = self.mixup(batch["image"], target, batch["sample"])
        return self.loss(self(image), target)

    def on_validation_epoch_start(self) -> None:
        self.rows = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """A batch of cases; returns their ids and outputs for `ImageLogger`."""
        outputs = mean_over_flips(self, batch["image"], self.image_targets, self.flips)
        cases = zip(batch["case"], outputs.tolist(), batch["label"].float().tolist(), strict=True)
        self.rows.update({case: {"outputs": row, "values": values} for case, row, values in cases})
        return {"case": batch["case"], "outputs": outputs}

    def on_validation_epoch_end(self) -> None:
        """Gathers the cases of all ranks; each case counts once."""
        self.rows = gather(self.rows)
        if self.trainer.sanity_checking or not self.rows:
            return
        outputs, truth = arrays(self.rows)
        scores = image_level.measure(self.image_targets, outputs, truth)
        for name, value in {**scores, **self._cross_entropy(outputs, truth)}.items():
            shown = f"val/{name}" == self.monitored.name
            score = math.nan if value is None else value
            self.log(f"val/{name}", score, prog_bar=shown, rank_zero_only=not shown)

    def _cross_entropy(self, outputs: np.ndarray, truth: np.ndarray) -> dict[str, float]:
        """Mean over cases, and over labels if there are several."""
        if self.image_targets.kind == "regression":
            return {}
        present = image_level.positives(self.image_targets, truth)
        multilabel = self.image_targets.kind == "multilabel"
        of_truth = np.where(present, outputs, 1 - outputs) if multilabel else outputs[present]
        return {"cross_entropy": float(-np.log(of_truth.clip(_SMALLEST)).mean())}


class Classification(ImageLevelTask):
    """Multiclass or multilabel classification of images."""

    monitored: ClassVar[MonitoredMetric] = AUC
    kinds: ClassVar[tuple[str, ...]] = ("multiclass", "multilabel")


class Regression(ImageLevelTask):
    """Regression of one or several values per image."""

    monitored: ClassVar[MonitoredMetric] = MAE
    kinds: ClassVar[tuple[str, ...]] = ("regression",)


def arrays(rows: dict[str, CaseOutputs]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (cases, outputs) and labels (cases, values) of all cases."""
    outputs, values = (np.array([row[key] for row in rows.values()]) for key in ("outputs", "values"))
    return outputs, values
