"""Segmentation: loss on patches, sliding-window Dice on whole volumes in the image's own grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from medconv import metrics
from medconv.inference import SlidingWindow
from medconv.losses import cross_entropy, over_heads
from medconv.networks import DeepSupervision
from medconv.performance.parallel import shard
from medconv.schedules import ProgressSchedule
from medconv.targets import Targets

Batch = dict[str, Any]
_NORM = GradClipAlgorithmType.NORM


class Segmentation(LightningModule):
    """Trains a network on patches and validates it on whole cases.

    Args:
        network: (batch, channels, *spatial) -> logits (batch, classes, *spatial), or a list of them, finest first.
        loss: (logits, label (batch, 1, *spatial)) -> scalar; of other targets than plain classes a `losses.Targeted`.
        optimizer, scheduler: take parameters, and the optimizer.
        targets: what the network's channels mean.
        to_native: (logits (classes, *spatial), case id) -> label map (X, Y, Z) on the case's own grid.
        record: plain values that every checkpoint carries, enough to build the network and its input again; its key
            `validation` is filled with the Dice of each case (case id to class to value) of the last validation.
        deep_supervision: train our U-Net with heads on its coarser stages as well; see `medconv.networks.DeepSupervision`.
        overlap, window_batch_size, mirror_axes, slice_axis, label_pairs: of the sliding window over whole cases.
        memory_format: of the network's input.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        targets: Targets,
        patch_size: Sequence[int],
        to_native: Callable[[Tensor, str], np.ndarray],
        record: dict[str, Any],
        deep_supervision: bool = False,
        overlap: float = 0.5,
        window_batch_size: int = 4,
        mirror_axes: Sequence[int] = (),
        slice_axis: int | None = None,
        label_pairs: Sequence[tuple[int, int]] = (),
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__()
        self.network, self.loss = network, loss
        if not isinstance(deep_supervision, bool):
            raise ValueError(f"task.deep_supervision must be true or false, got {deep_supervision}")
        self.supervision = DeepSupervision(network, targets.num_outputs) if deep_supervision else None
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.targets, self.spatial_dims = targets, len(patch_size)
        self.window = SlidingWindow(
            tuple(patch_size), overlap, window_batch_size, tuple(mirror_axes), slice_axis, tuple(label_pairs)
        )
        self.to_native, self.record, self.memory_format = to_native, record, memory_format
        self.rows: dict[str, metrics.Row] = {}
        self.case_losses: dict[str, float | None] = {}  # None where no voxel of the case is known
        self.gradient_seen: Callable[[Tensor, Optimizer], None] = lambda norm, optimizer: None  # a guard's
        self._sharded = False

    def forward(self, image: Tensor) -> Any:
        return self.network(image.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return _telling(loss)

    def loss_of(self, batch: Batch) -> Tensor:
        image = batch["image"].contiguous(memory_format=self.memory_format)
        outputs = self.network(image) if self.supervision is None else self.supervision(self.network, image)
        return over_heads(self.loss, outputs, batch["label"], self.spatial_dims)

    def on_validation_epoch_start(self) -> None:
        self.rows, self.case_losses = {}, {}

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """One whole case; returns its id and its prediction on the prepared grid, for the pictures."""
        case = batch["case"]
        logits = self.window(self, batch["image"]).float()
        prediction = self.to_native(logits[0], case)
        self.rows[case] = metrics.dice(prediction, batch["reference"].cpu().numpy(), self.targets)
        self.case_losses[case] = cross_entropy(logits, batch["label"], self.targets)
        return {"case": case, "prediction": self.targets.decode(logits[0])}

    def on_validation_epoch_end(self) -> None:
        """Every rank brings its own cases; each case counts once."""
        self.rows = _gather(self.rows)
        self.case_losses = _gather(self.case_losses)
        if self.trainer.sanity_checking or not self.rows:
            return
        per_class = metrics.mean_per_class(list(self.rows.values()))
        mean = metrics.mean(per_class)
        loss = metrics.mean(self.case_losses)
        self.log("val/cross_entropy", math.nan if loss is None else loss, rank_zero_only=True)
        self.log("val/dice", math.nan if mean is None else mean, prog_bar=True)
        for name, value in per_class.items():
            self.log(f"val/dice/{name}", math.nan if value is None else value, rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(p for part in self._trained for p in part.parameters() if p.requires_grad)
        scheduler = self.make_scheduler(optimizer)
        if not isinstance(scheduler, ProgressSchedule):  # torch's own count epochs
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
        scheduler.total_steps = self.trainer.estimated_stepping_batches
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _trained(self) -> list[nn.Module]:
        """What has parameters to train."""
        heads = self.supervision is not None and len(self.supervision.heads)
        return [self.network, self.supervision] if heads else [self.network]  # type: ignore[list-item]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["medconv"] = {**self.record, "validation": self.rows}

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Also for a fused optimizer, which Lightning refuses for the sake of fp16's loss scaling, where there is none.

        The norm that clipping needs also tells whether all gradients are finite.
        """
        plugin, clip, by = self.trainer.precision_plugin, gradient_clip_val or 0.0, gradient_clip_algorithm or _NORM
        parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if getattr(plugin, "scaler", None) is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif by == _NORM and clip > 0:
            clip_grads_with_norm_(parameters, clip, norm)
        else:
            Precision.clip_gradients(plugin, optimizer, clip, by)
        self.gradient_seen(norm, optimizer)

    def configure_model(self) -> None:
        """Under `trainer.strategy=fsdp` the network and its heads are divided over the ranks here."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self._sharded:
            assert self.device_mesh is not None
            for part in self._trained:
                shard(part, self.device_mesh["data_parallel"])
            self._sharded = True


def _telling(loss: Tensor) -> Tensor:
    """The same loss; where it is not finite all gradients are NaN, of themselves they might not tell."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def _gather(mine: dict[str, Any]) -> dict[str, Any]:
    """One dictionary of all ranks' entries, in the order of their keys."""
    parts: list[Any] = [mine]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
    return dict(sorted((key, value) for part in parts for key, value in part.items()))
