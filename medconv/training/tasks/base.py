"""The base of all tasks: optimizer and schedule, gradient clipping, sharding, content of checkpoints."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from lightning import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from medconv.data.loading.datamodule import Batch
from medconv.targets.monitor import DICE, MonitoredMetric
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.distributed.strategy import shard
from medconv.training.optim.lr_schedulers import ProgressSchedule

_NORM = GradClipAlgorithmType.NORM


class Task(LightningModule):
    """Trains a network. Subclasses define the loss of a batch and the validation.

    Args:
        network: takes images (batch, channels, *spatial).
        optimizer: takes parameters. scheduler: takes the optimizer.
        record: plain values for every checkpoint, enough to rebuild the network and its preprocessing; its
            key `validation` is filled with the rows of the last validation, one per case.
        memory_format: of the network's input.
    """

    monitored: ClassVar[MonitoredMetric] = DICE
    kinds: ClassVar[tuple[str, ...]] = ()  # of image-level targets that it is for; none: label maps

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        record: dict[str, Any],
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__()
        self.network, self.loss = network, loss
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.record, self.memory_format = record, memory_format
        self.rows: dict[str, Any] = {}
        self._sharded = False

    def forward(self, image: Tensor) -> Any:
        return self.network(image.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return _with_nan_gradient_if_bad(loss)

    @abstractmethod
    def loss_of(self, batch: Batch) -> Tensor:
        """The loss of a training batch; deterministic for a batch and the random state."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(
            p for part in self.trained for p in part.parameters() if p.requires_grad
        )
        scheduler = self.make_scheduler(optimizer)
        if not isinstance(scheduler, ProgressSchedule):  # torch's schedules count epochs
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
        scheduler.set_length(self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def trained(self) -> list[nn.Module]:
        """Modules with parameters to train."""
        return [self.network]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["medconv"] = {**self.record, "validation": self.rows}

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips also with a fused optimizer, which Lightning refuses even without fp16's loss scaling.

        The norm needed for clipping also shows whether all gradients are finite.
        """
        plugin = self.trainer.precision_plugin
        clip, algorithm = gradient_clip_val or 0.0, gradient_clip_algorithm or _NORM
        parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if getattr(plugin, "scaler", None) is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif algorithm == _NORM and clip > 0:
            clip_grads_with_norm_(parameters, clip, norm)
        else:
            Precision.clip_gradients(plugin, optimizer, clip, algorithm)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, NonfiniteGuard):  # Lightning has no hook with the norm
                callback.on_gradient_norm(norm, optimizer)

    def configure_model(self) -> None:
        """Shards the trained modules over the ranks if `trainer.strategy=fsdp`."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self._sharded:
            assert self.device_mesh is not None
            for part in self.trained:
                shard(part, self.device_mesh["data_parallel"])
            self._sharded = True


def _with_nan_gradient_if_bad(loss: Tensor) -> Tensor:
    """The same loss; if it is not finite, all gradients become NaN, which they might not without this."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def gather(mine: dict[str, Any]) -> dict[str, Any]:
    """The entries of all ranks in one dictionary, sorted by key."""
    parts: list[Any] = [mine]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
    return dict(sorted((key, value) for part in parts for key, value in part.items()))
