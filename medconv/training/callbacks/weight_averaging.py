"""Weight averaging: the mean of the weights over a training is validated, saved and used."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from medconv.utils.hardware import read_at_once


class AverageWeights(WeightAveraging):
    """Averages the weights over training; the weight of a step is its number to the power `power`.

    The averaging window grows with the training, so it does not depend on the length of the run. The first
    `begin` steps are skipped, since their weights are poor; until then the mean equals the current weights.
    Validation and checkpoints use the averaged weights; training continues with the current ones, which the
    checkpoint also holds. Buffers, such as batch norm statistics, are averaged too.

    Args:
        power: 0 weighs all steps equally; with 2, half of the mean comes from the last fifth of the steps.
        begin: number of skipped steps.
        every: steps between two updates of the mean.
    Raises:
        ValueError: values out of range.
    Source: polynomial-decay averaging, Shamir & Zhang 2013, arXiv:1212.1824; that averages of a trajectory
        generalise better, Izmailov et al. 2018, arXiv:1803.05407.
    """

    def __init__(self, power: float = 2.0, begin: int = 300, every: int = 4) -> None:
        if not power >= 0:
            raise ValueError(f"power must be 0 or more, got {power}")
        if type(begin) is not int or begin < 0:
            raise ValueError(f"begin must be a whole number of at least 0, got {begin}")
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every}")
        self.power = power
        self.begin = begin
        self.every = every
        self._left_out_step = -1
        self._skipped: Tensor | None = None
        self._own: list[Tensor] | None = None  # the module's, while it has the mean in their place
        super().__init__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            # On the device to which the module will be moved; it is not there yet
            self._average_model = _Mean(pl_module, trainer.strategy.root_device, self._update)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None or step_idx == self._left_out_step:
            return False
        return step_idx < self.begin or step_idx % self.every == 0

    def leave_out(self, step_idx: int) -> None:
        """Called when it is known that the optimizer has skipped the step. Args: step_idx: from 0."""
        self._left_out_step = step_idx
        if self._latest_update_step == step_idx + 1 and self._average_model is not None:
            # The skipped step was counted, with the weight 0
            self._average_model.n_averaged -= 1

    def leave_out_if(self, skipped: Tensor | None) -> None:
        """Called before an update. Args: skipped: on the device, whether the optimizer has skipped the step;
        None: it has not.
        """
        self._skipped = skipped

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # a test after it is of the mean
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._own is not None:  # a run that is stopped in the middle of a validation
            self._swap_models(pl_module)  # in place, so in the checkpoint as well
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    @torch.no_grad()
    def _swap_models(self, pl_module: LightningModule) -> None:
        """The mean in place of the module's weights, or these again, as they were: neither is rounded to the
        other's precision.
        """
        assert self._average_model is not None
        current = list(_tensors(pl_module))
        if self._own is None:
            self._own = [tensor.clone() for tensor in current]
            torch._foreach_copy_(current, list(_tensors(self._average_model.module)))
        else:
            torch._foreach_copy_(current, self._own)
            self._own = None

    def _update(self, mean: list[Tensor], current: list[Tensor], count: int) -> None:
        """Moves the mean toward the current tensors, in place. Args: count: number of earlier updates."""
        averaged_steps = max(0, count - self.begin)
        share = (self.power + 1) / (averaged_steps + self.power + 1)
        skipped = self._skipped
        if skipped is None or read_at_once(skipped):
            if not skipped:
                torch._foreach_lerp_(mean, current, share)
            return
        # Decided on the device: a skipped step has the share 0
        move(mean, current, torch.where(skipped, 0.0, share))


def move(mean: list[Tensor], current: list[Tensor], share: Tensor) -> None:
    """`torch._foreach_lerp_` by a share on the device, which would be a launch for each tensor."""
    differences = torch._foreach_sub(current, mean)
    torch._foreach_mul_(differences, share.to(mean[0].dtype))
    torch._foreach_add_(mean, differences)


class _Mean(AveragedModel):
    """Weights, buffers and the number of updates, which stays on the host: to read it would be to wait.

    Args:
        module: whose weights are averaged.
        device: of the mean.
        update: of floating-point tensors, called with mean, current values and the number of updates.
    """

    n_averaged: Tensor

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        update: Callable[[list[Tensor], list[Tensor], int], None],
    ) -> None:
        super().__init__(module, device, use_buffers=True)
        self.n_averaged = self.n_averaged.cpu()
        self._update = update

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        count = int(self.n_averaged)
        averages: list[Tensor] = []
        currents: list[Tensor] = []
        copies: list[Tensor] = []
        sources: list[Tensor] = []
        for average, current in zip(_tensors(self.module), _tensors(model), strict=True):
            if count and average.is_floating_point():
                averages.append(average)
                # With precision=bf16-true and 64-true, the mean stays fp32
                currents.append(current.to(average.dtype))
            else:  # the first weights, and numbers of batches
                copies.append(average)
                sources.append(current)
        if averages:
            self._update(averages, currents, count)
        if copies:
            torch._foreach_copy_(copies, sources)
        self.n_averaged += 1


def _tensors(module: nn.Module) -> chain[Tensor]:
    return chain(module.parameters(), module.buffers())
