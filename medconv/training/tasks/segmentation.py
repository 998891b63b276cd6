"""Segmentation: loss on patches, sliding-window Dice of whole cases on the image's own grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from medconv.data.loading.datamodule import Batch
from medconv.inference.sliding_window import SlidingWindow
from medconv.metrics import dice as metrics_dice
from medconv.metrics.dice import ClassScores, dice, mean_per_class
from medconv.models.deep_supervision import DeepSupervision
from medconv.targets.segmentation import SegmentationTargets
from medconv.training.losses.segmentation import cross_entropy, over_heads
from medconv.training.tasks.base import Task, gather


class Segmentation(Task):
    """Trains a network on patches and validates it on whole cases.

    Args:
        network: (batch, channels, *spatial) -> logits (batch, classes, *spatial), or a list of them, finest
            first.
        loss: (logits, label (batch, 1, *spatial)) -> scalar; for other targets than plain classes a
            `SegmentationLoss`.
        targets: what the network's channels mean.
        to_native: (logits (classes, *spatial), case id) -> label map (X, Y, Z) on the case's own grid.
        deep_supervision: also train heads on the coarser stages of our U-Net; see
            `medconv.models.DeepSupervision`.
        overlap, sw_batch_size, mirror_axes, slice_axis, flip_label_pairs: of the sliding window.
        optimizer, scheduler, record, memory_format: see `Task`; a row of `validation` is the Dice of each
            class.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        targets: SegmentationTargets,
        patch_size: Sequence[int],
        to_native: Callable[[Tensor, str], np.ndarray],
        record: dict[str, Any],
        deep_supervision: bool = False,
        overlap: float = 0.5,
        sw_batch_size: int = 4,
        mirror_axes: Sequence[int] = (),
        slice_axis: int | None = None,
        flip_label_pairs: Sequence[tuple[int, int]] = (),
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(network, loss, optimizer, scheduler, record, memory_format)
        if not isinstance(deep_supervision, bool):
            raise ValueError(f"task.deep_supervision must be true or false, got {deep_supervision}")
        self.supervision = DeepSupervision(network, targets.num_outputs) if deep_supervision else None
        self.targets, self.spatial_dims = targets, len(patch_size)
        self.window = SlidingWindow(
            tuple(patch_size), overlap, sw_batch_size, tuple(mirror_axes), slice_axis, tuple(flip_label_pairs)
        )
        self.to_native = to_native
        self.rows: dict[str, ClassScores] = {}
        self.case_losses: dict[str, float | None] = {}  # None: no voxel of the case is known

    def loss_of(self, batch: Batch) -> Tensor:
        image = batch["image"].contiguous(memory_format=self.memory_format)
        outputs = self.network(image) if self.supervision is None else self.supervision(self.network, image)
        return over_heads(self.loss, outputs, batch["label"], self.spatial_dims)

    def on_validation_epoch_start(self) -> None:
        self.rows, self.case_losses = {}, {}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """One case; returns its id and its prediction on the preprocessed grid for `ImageLogger`."""
        case = batch["case"]
        logits = self.window(self, batch["image"]).float()
        prediction = self.to_native(logits[0], case)
        self.rows[case] = dice(prediction, batch["reference"].cpu().numpy(), self.targets)
        self.case_losses[case] = cross_entropy(logits, batch["label"], self.targets)
        return {"case": case, "prediction": self.targets.decode(logits[0])}

    def on_validation_epoch_end(self) -> None:
        """Gathers the cases of all ranks; each case counts once."""
        self.rows = gather(self.rows)
        self.case_losses = gather(self.case_losses)
        if self.trainer.sanity_checking or not self.rows:
            return
        per_class = mean_per_class(list(self.rows.values()))
        mean = metrics_dice.mean(per_class)
        loss = metrics_dice.mean(self.case_losses)
        self.log("val/cross_entropy", math.nan if loss is None else loss, rank_zero_only=True)
        self.log("val/dice", math.nan if mean is None else mean, prog_bar=True)
        for name, value in per_class.items():
            self.log(f"val/dice/{name}", math.nan if value is None else value, rank_zero_only=True)

    @property
    def trained(self) -> list[nn.Module]:
        heads = self.supervision is not None and len(self.supervision.heads)
        return [self.network, self.supervision] if heads else [self.network]  # type: ignore[list-item]
