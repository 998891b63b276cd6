"""Weight averaging: the mean of the weights over a training is validated, saved and used."""

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


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
    Raises: ValueError: values out of range.
    Source: polynomial-decay averaging, Shamir & Zhang 2013, arXiv:1212.1824; that averages of a trajectory
        generalise better, Izmailov et al. 2018, arXiv:1803.05407.
    """

    def __init__(self, power: float = 2.0, begin: int = 300, every: int = 4) -> None:
        if not power >= 0:
            raise ValueError(f"weight_averaging.power must be 0 or more, got {power}")
        if type(begin) is not int or begin < 0:
            raise ValueError(f"weight_averaging.begin must be a whole number of at least 0, got {begin}")
        if type(every) is not int or every < 1:
            raise ValueError(f"weight_averaging.every must be a whole number of at least 1, got {every}")
        self.power, self.begin, self.every = power, begin, every
        self._left_out = -1
        super().__init__(multi_avg_fn=self._update)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._device = trainer.strategy.root_device  # where the module will be moved; it is not there yet
        super().setup(trainer, pl_module, stage)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None or step_idx == self._left_out:
            return False
        return step_idx < self.begin or step_idx % self.every == 0

    def leave_out(self, step_idx: int) -> None:
        """Called before the step would count: the optimizer has skipped it. Args: step_idx: from 0."""
        self._left_out = step_idx

    @torch.no_grad()
    def _update(self, mean: list[Tensor], now: list[Tensor], count: Tensor) -> None:
        """Args: count: number of earlier updates."""
        counted = max(0.0, float(count) - self.begin)
        if not mean[0].is_floating_point():
            torch._foreach_copy_(mean, now)
        else:
            torch._foreach_lerp_(mean, now, (self.power + 1) / (counted + self.power + 1))
