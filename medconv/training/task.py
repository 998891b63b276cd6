"""The Lightning module of every run: loss, optimizer and schedule, validation, content of checkpoints."""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from medconv.data.loading.patch import Batch
from medconv.models.deep_supervision import DeepSupervision
from medconv.performance.switches import to_memory_format
from medconv.targets import Targets
from medconv.training.callbacks.nonfinite_guard import NonfiniteGuard
from medconv.training.callbacks.time_budget import TimeBudget
from medconv.training.distributed import of_all_ranks, shard
from medconv.training.growing_patch import GrowingPatch
from medconv.training.losses.fit import FittedLoss
from medconv.training.optim.lr_schedulers import ProgressSchedule
from medconv.training.validation import Validation

# (image, encoded labels, sample numbers) -> image and labels of which each is the mean of two samples
Mixup = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

log = logging.getLogger(__name__)


class Task(LightningModule):
    """Trains a network on batches of samples and validates it on whole cases.

    Args:
        network: takes images (batch, channels, *spatial).
        loss: of the network's outputs and encoded labels.
        optimizer: takes parameters.
        scheduler: takes the optimizer.
        targets: what the network's outputs mean.
        validation: a batch of cases to their rows.
        record: plain values for every checkpoint, enough to rebuild the network and its preprocessing; its
            key `validation` is filled with the rows of the last validation, one per case, and `temperature`
            with that of their answers.
        deep_supervision: also train heads on the coarser stages of our U-Net; see
            `medconv.models.DeepSupervision`.
        mixup: mixes the samples of training batches.
        growing_patch: cuts training batches.
        memory_format: of the network's input.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: FittedLoss,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        targets: Targets,
        validation: Validation,
        record: dict[str, Any],
        deep_supervision: bool = False,
        mixup: Mixup | None = None,
        growing_patch: GrowingPatch | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.supervision = DeepSupervision(network, targets.num_outputs) if deep_supervision else None
        self.trained: list[nn.Module] = [network]  # modules with parameters to train
        if self.supervision is not None and len(self.supervision.heads):
            self.trained.append(self.supervision)
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.targets = targets
        self.monitored = targets.monitored  # callbacks ask for it
        self.validation = validation
        self.mixup = mixup
        self.growing_patch = growing_patch
        self.record = record
        self.memory_format = memory_format
        # Of the last complete validation; rows by case id
        self.rows: dict[str, Any] = {}
        self.temperature: float | None = None
        # Of the running validation
        self._new_rows: dict[str, Any] = {}
        self._new_losses: dict[str, float | None] = {}
        self._sharded = False
        self._has_lightnings_bar = False
        self._keeps_predictions = False  # in the running validation, for pictures

    def on_fit_start(self) -> None:
        self._has_lightnings_bar = self.trainer.progress_bar_callback is not None

    def forward(self, image: Tensor) -> Any:
        return self.network(to_memory_format(image, self.memory_format))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        # Lightning reads a value for its bar from the device in every step, so not without a bar
        self.log("train/loss", loss.detach(), prog_bar=self._has_lightnings_bar)
        return _with_nan_gradient_if_bad(loss)

    def loss_of(self, batch: Batch) -> Tensor:
        """The loss of a training batch; deterministic for a batch and the random state."""
        if self.growing_patch is not None:
            batch = self.growing_patch(batch, self.lr_schedulers().progress)  # type: ignore[union-attr]
        image = batch["image"]
        label = self.targets.encode(batch["label"])
        if self.mixup is not None:
            image, label = self.mixup(image, label, batch["sample"])
        if self.supervision is None:
            outputs = self(image)
        else:
            outputs = self.supervision(self.network, to_memory_format(image, self.memory_format))
        # what a batch may say of its samples beside the label
        further = {key: batch[key] for key in ("annotated", "values") if key in batch}
        loss: Tensor = self.loss(outputs, label, **further)
        return loss

    def on_validation_epoch_start(self) -> None:
        self._new_rows = {}
        self._new_losses = {}
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        shows_predictions = any(getattr(callback, "shows_predictions", False) for callback in callbacks)
        # Nobody looks at the answers of the sanity check
        is_shown = self.trainer.is_global_zero and not self.trainer.sanity_checking
        self._keeps_predictions = shows_predictions and is_shown

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Returns what callbacks with `shows_predictions` show."""
        validated = self.validation(self, batch, self._keeps_predictions)
        self._new_rows.update(validated.rows)
        self._new_losses.update(validated.losses)
        return validated.predicted

    def on_validation_epoch_end(self) -> None:
        """Logs the scores of the cases of all ranks; each case counts once."""
        if self.trainer.sanity_checking:  # of a few cases, before any training
            return
        rows = gather(self._new_rows)
        losses = gather(self._new_losses)
        if not rows:
            return
        prefix = "test" if self.trainer.testing else "val"
        if prefix == "val":
            self.temperature = self.targets.scores.temperature(rows)
        if self.temperature is not None:
            rows = self.targets.scores.at_temperature(rows, self.temperature)
            self.log(f"{prefix}/temperature", self.temperature, rank_zero_only=True)
        self.rows = rows
        for name, value in self.targets.scores.logged(rows, losses).items():
            is_monitored = f"val/{name}" == self.monitored.name
            score = math.nan if value is None else value
            # Callbacks of all ranks read the monitored metric; the others are for rank 0's logs
            self.log(f"{prefix}/{name}", score, prog_bar=is_monitored, rank_zero_only=not is_monitored)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()
        self._keeps_predictions = False

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def configure_optimizers(self) -> Any:
        parameters = (parameter for module in self.trained for parameter in module.parameters())
        optimizer = self.make_optimizer(parameter for parameter in parameters if parameter.requires_grad)
        scheduler = self.make_scheduler(optimizer)
        interval = "epoch"  # torch's schedules count epochs
        if isinstance(scheduler, ProgressSchedule):
            length = self.trainer.estimated_stepping_batches
            scheduler.set_length(length)
            interval = "step"
            callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
            if math.isinf(length) and not any(isinstance(callback, TimeBudget) for callback in callbacks):
                self._begin_without_an_end()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    def _begin_without_an_end(self) -> None:
        """A trainer of one's own that neither steps nor epochs end has no progress, by which patches grow."""
        growing, self.growing_patch = self.growing_patch, None
        log.warning(
            "this trainer has no number of steps or epochs, so the learning rate stays%s; set max_steps or "
            "max_epochs, or take medconv train with trainer.max_time",
            "" if growing is None else ", and patches have their full size from the start",
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["medconv"] = {**self.record, "validation": self.rows, "temperature": self.temperature}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Without weight averaging a training goes on with its own weights, not with their mean."""
        self.temperature = checkpoint.get("medconv", {}).get("temperature")
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        averages = any(isinstance(callback, WeightAveraging) for callback in callbacks)
        if not averages and "current_model_state" in checkpoint:
            checkpoint["state_dict"] = checkpoint["current_model_state"]

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Clips also with a fused optimizer, which Lightning refuses even without fp16's loss scaling.

        The norm needed for clipping also shows whether all gradients are finite.
        """
        plugin = self.trainer.precision_plugin
        max_norm = gradient_clip_val or 0.0
        algorithm = gradient_clip_algorithm or GradClipAlgorithmType.NORM
        parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if getattr(plugin, "scaler", None) is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif algorithm == GradClipAlgorithmType.NORM and max_norm > 0:
            # Clips by the norm from above, which is not computed again
            clip_grads_with_norm_(parameters, max_norm, norm)
        else:
            Precision.clip_gradients(plugin, optimizer, max_norm, algorithm)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            # Lightning has no hook with the norm
            if isinstance(callback, NonfiniteGuard):
                callback.on_gradient_norm(norm, optimizer)

    def configure_model(self) -> None:
        """Shards the trained modules over the ranks if `trainer.strategy=fsdp`, or makes them double.

        Lightning makes them double only after it has loaded a checkpoint, which would round its weights.
        """
        if isinstance(self.trainer.precision_plugin, DoublePrecision):
            self.double()
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not self._sharded:
            assert self.device_mesh is not None
            for module in self.trained:
                shard(module, self.device_mesh["data_parallel"])
            self._sharded = True


def _with_nan_gradient_if_bad(loss: Tensor) -> Tensor:
    """The same loss; if it is not finite, all gradients become NaN, which they might not without this."""
    if torch.is_anomaly_enabled() and loss.isnan():  # names the operation of the network
        return loss
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def gather(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries of all ranks in one dictionary, sorted by key. Args: entries: of this rank."""
    merged: dict[str, Any] = {}
    for entries_of_rank in of_all_ranks(entries):
        merged.update(entries_of_rank)
    return dict(sorted(merged.items()))
