"""What all tasks have in common: the optimizer and its schedule, clipping, division over ranks, what
checkpoints carry.
"""

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

from medconv.targets.monitor import DICE, MonitoredMetric
from medconv.training.distributed.strategy import shard
from medconv.training.optim.lr_schedulers import ProgressSchedule

Batch = dict[str, Any]
_NORM = GradClipAlgorithmType.NORM


class Task(LightningModule):
    """Trains a network; what its loss looks at and how it is validated is the subclass's.

    Args:
        network: takes images (batch, channels, *spatial).
        optimizer, scheduler: take parameters, and the optimizer.
        record: plain values that every checkpoint carries, enough to build the network and its input again;
            its key `validation` is filled with what the last validation found of each case, `rows`.
        memory_format: of the network's input.
    """

    monitored: ClassVar[MonitoredMetric] = DICE
    kinds: ClassVar[tuple[str, ...]] = ()  # of outcomes that it is for; none: label maps

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
        self.gradient_seen: Callable[[Tensor, Optimizer], None] = lambda norm, optimizer: None  # a guard's
        self._sharded = False

    def forward(self, image: Tensor) -> Any:
        return self.network(image.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return _telling(loss)

    @abstractmethod
    def loss_of(self, batch: Batch) -> Tensor:
        """Of a training batch; the same each time for the same batch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(
            p for part in self.trained for p in part.parameters() if p.requires_grad
        )
        scheduler = self.make_scheduler(optimizer)
        if not isinstance(scheduler, ProgressSchedule):  # torch's own count epochs
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}
        scheduler.total_steps = self.trainer.estimated_stepping_batches
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def trained(self) -> list[nn.Module]:
        """What has parameters to train."""
        return [self.network]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["medconv"] = {**self.record, "validation": self.rows}

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Also for a fused optimizer, which Lightning refuses for the sake of fp16's loss scaling, where
        there is none.

        The norm that clipping needs also tells whether all gradients are finite.
        """
        plugin, clip, by = (
            self.trainer.precision_plugin,
            gradient_clip_val or 0.0,
            gradient_clip_algorithm or _NORM,
        )
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
        """Under `trainer.strategy=fsdp` whatever trains is divided over the ranks here."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self._sharded:
            assert self.device_mesh is not None
            for part in self.trained:
                shard(part, self.device_mesh["data_parallel"])
            self._sharded = True


def _telling(loss: Tensor) -> Tensor:
    """The same loss; where it is not finite all gradients are NaN, of themselves they might not tell."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def gather(mine: dict[str, Any]) -> dict[str, Any]:
    """One dictionary of all ranks' entries, in the order of their keys."""
    parts: list[Any] = [mine]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
    return dict(sorted((key, value) for part in parts for key, value in part.items()))
