"""Guard against non-finite losses and gradients: skips the step or stops the run.

The check is the norm of the gradient, which clipping computes anyway: it is non-finite if any gradient is. A
non-finite loss makes its gradient NaN. On a GPU the norm is read one step later, so that no step waits for
the device; the optimizer and the mean of the weights skip the step on the device. Gradients are summed over
the ranks, so all ranks decide alike without communication. Only then does a feature, if it is there, run the
batch again to find the layer that was the cause.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from medconv import doors
from medconv.training.callbacks.weight_averaging import AverageWeights
from medconv.training.distributed import of_all_ranks
from medconv.utils import cluster
from medconv.utils.exit_codes import DONE, USER
from medconv.utils.hardware import HostCopy

log = logging.getLogger(__name__)
# Of fp16's loss; at a higher scale a gradient may overflow only because of the scale.
_LOWEST_SCALE = 1.0


@dataclass
class ForwardPass:
    """What is needed to repeat a forward pass.

    Args:
        rng: states of the random generators before it.
        loss: the value that went backward.
    """

    batch: dict[str, Any]
    rng: list[Tensor]
    loss: Tensor | None = None


@dataclass
class StepRecord:
    """An optimizer step, until its gradient is known to be finite.

    Args:
        number: from 1.
        passes: its forward passes, several if gradients are accumulated.
        statistics: batch norm statistics before the step.
        bad: whether the gradient is non-finite.
        scale: of the loss.
        scaled: whether fp16's scaler takes the step.
    """

    number: int
    passes: list[ForwardPass] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    bad: HostCopy | None = None
    scale: float = 1.0
    scaled: bool = False


class RunningStatistics:
    """The running statistics of batch norms, which a forward pass changes before its loss is known to be
    finite; a skipped step restores them.
    """

    def __init__(self, module: nn.Module) -> None:
        # Tensors of one type are copied together; the counts of batches are whole numbers.
        means_and_variances: list[Tensor] = []
        counts: list[Tensor] = []
        layers: Any = module.modules()
        for layer in layers:
            for name, group in (
                ("running_mean", means_and_variances),
                ("running_var", means_and_variances),
                ("num_batches_tracked", counts),  # which a norm of another package may lack
            ):
                if isinstance(getattr(layer, name, None), Tensor):
                    group.append(getattr(layer, name))
        self._groups = [group for group in (means_and_variances, counts) if group]

    def now(self) -> list[Tensor]:
        """A copy of all running statistics, one tensor per type: few launches on a GPU."""
        return [torch.cat([each.detach().reshape(-1) for each in group]) for group in self._groups]

    def restore(self, saved: Sequence[Tensor], where: Tensor | None = None) -> None:
        """Restore what `now` returned.

        Args:
            saved: from `now`.
            where: a bool tensor on the device, whether to, so that nothing waits for the device; None: yes.
        """
        if where is not None:
            saved = [torch.where(where, old, new) for old, new in zip(saved, self.now(), strict=True)]
        for group, restored in zip(self._groups, saved, strict=True):
            sizes = [value.numel() for value in group]
            shaped = []
            for piece, value in zip(restored.split(sizes), group, strict=True):
                shaped.append(piece.view_as(value))
            # one launch for all of them
            torch._foreach_copy_(group, shaped)


class NonfiniteError(ValueError):
    """A loss or gradient is not finite; the message says in which step, and what a diagnosis found."""


class NonfiniteGuard(Callback):
    """Watches every step's gradient; `Task` calls `on_gradient_norm` before the optimizer's step.

    Args:
        folder: where batches are saved.
        nan_policy: `stop` the run, or `skip` the step; a skipped step changes no weights, optimizer states
            or averages.
        max_skipped_steps: of a run; one more stops it.
        averages: of the weights, which leave out skipped steps.
        late: whether the norm is read a step later; None: on a GPU, if the optimizer can skip a step itself.
    Raises:
        NonfiniteError: in its hooks.
    """

    def __init__(
        self,
        folder: Path,
        nan_policy: str = "stop",
        max_skipped_steps: int = 10,
        averages: Sequence[AverageWeights] = (),
        late: bool | None = None,
    ) -> None:
        self.folder = folder
        self.averages = averages
        self.late = late
        self.skips = nan_policy == "skip"
        self.max_skipped_steps = max_skipped_steps
        self.skipped = 0
        self._step = StepRecord(0)  # the one that is being computed
        # The step before, until its norm is read
        self._unread: StepRecord | None = None

    def state_dict(self) -> dict[str, Any]:
        self.settle()  # before the optimizer's state is read
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._statistics = RunningStatistics(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._step.passes:
            self._step.number = trainer.global_step + 1
            self._step.statistics = self._statistics.now()
        self._step.passes.append(ForwardPass(batch, generators(pl_module.device)))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._step.passes[-1].loss = loss.detach()

    def on_gradient_norm(self, norm: Tensor, optimizer: Optimizer) -> None:
        """Args: norm: of all gradients of all ranks, before the optimizer's step."""
        self.settle()
        step = self._step
        self._step = StepRecord(0)
        full_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        bad = ~full_norm.isfinite()
        step.bad = HostCopy(bad)
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if self._reads_late(optimizer, scaler):
            self._skip_on_device(step, optimizer, bad)
            return
        if scaler is not None:
            step.scale = float(scaler.get_scale())
            step.scaled = True
        self._handle(step, optimizer)
        for average in self.averages:
            average.leave_out_if(None)

    def _reads_late(self, optimizer: Optimizer, scaler: Any) -> bool:
        """fp16's scaler reads the norm in every step itself. The first step of an optimizer with momentum
        must not be skipped on the device, since its momentum would be undefined.
        """
        has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        is_first_step = not optimizer.state
        if scaler is not None or (is_first_step and has_momentum) or not can_skip_step(optimizer):
            return False
        return self._module.device.type == "cuda" if self.late is None else self.late

    def _skip_on_device(self, step: StepRecord, optimizer: Optimizer, bad: Tensor) -> None:
        """Lets the device skip the step if it is bad; the host learns of it in `settle`."""
        self._statistics.restore(step.statistics, bad)
        # As torch's GradScaler tells an optimizer to skip a step
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        self._unread = step
        self._optimizer = optimizer
        for average in self.averages:
            average.leave_out_if(bad)

    def settle(self) -> None:
        """Read the norm of the step before, if that is still to do."""
        step = self._unread
        self._unread = None
        if step is None or not step.bad:
            return
        for state in self._optimizer.state.values():
            if type(state.get("step")) is int:
                # It was counted on the host, before the norm was read
                state["step"] -= 1
        present = self._statistics.now()
        if self._step.passes:  # the next step has begun, and has changed them
            self._statistics.restore(self._step.statistics)
        self._handle(step, None)
        self._statistics.restore(present)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._unread is not None:
            self.settle()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()

    def _handle(self, step: StepRecord, optimizer: Optimizer | None) -> None:
        """Skips a bad step or stops the run.

        Args:
            step: whose norm has been read.
            optimizer: about to take the step; None: it has skipped the step.
        """
        if not bool(step.bad):
            return
        if step.scale > _LOWEST_SCALE and not self._has_bad_loss(step):
            return  # the scaler skips the step and lowers the scale
        if optimizer is not None:
            self._statistics.restore(step.statistics)
        stops = not self.skips or self.skipped >= self.max_skipped_steps
        # Of skipped steps only the first is saved: files are large
        message = self._explained(step, saves=stops or not self.skipped)
        limit = f"max_skipped_steps={self.max_skipped_steps}"
        if stops and self.skips:
            self._stop(f"{message} Skipped steps before this one: {self.skipped} ({limit}).")
        if stops:
            self._stop(f"{message} nan_policy=skip skips such steps.")
        self.skipped += 1
        for average in self.averages:
            average.leave_out(step.number - 1)
        if optimizer is not None:
            self._withhold_gradients(step, optimizer)
        log.warning("skipped (%d of at most %d): %s", self.skipped, self.max_skipped_steps, message)

    def _explained(self, step: StepRecord, saves: bool) -> str:
        """What is wrong with a step, in sentences. Args: saves: whether its batch is worth a file."""
        sentences = [
            remark.explain(step, saves, self._trainer, self._module, self._statistics, self.folder)
            for remark in doors.objects(doors.REMARKS)
        ]
        return " ".join(sentences) or f"step {step.number}: the loss or its gradient is not finite."

    def _has_bad_loss(self, step: StepRecord) -> bool:
        """Whether a loss itself is not finite, on any rank."""
        losses = [forward.loss for forward in step.passes if forward.loss is not None]
        bad_here = any(not bool(loss.isfinite()) for loss in losses)
        return any(of_all_ranks(bad_here))

    def _withhold_gradients(self, step: StepRecord, optimizer: Optimizer) -> None:
        """Makes the optimizer's next step change nothing."""
        checks_scaled_gradients = getattr(optimizer, "_step_supports_amp_scaling", False)
        if not (step.scaled and checks_scaled_gradients):
            # Optimizers ignore parameters without a gradient
            optimizer.zero_grad(set_to_none=True)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    # The scaler checks the gradients in the step, and skips it
                    parameter.grad.fill_(torch.nan)

    def _stop(self, message: str) -> None:
        """Rank 0 raises the message, the others end silently: Lightning kills the first process if one that
        it started ends with an error.
        """
        if self._trainer.is_global_zero:
            raise NonfiniteError(message)
        raise SystemExit(DONE if cluster.launcher() is None else USER)


def can_skip_step(optimizer: Optimizer) -> bool:
    """Whether its step does nothing if its `found_inf`, on the device, is 1."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if is_fused and getattr(optimizer, "_step_supports_amp_scaling", False):
        return True
    return bool(getattr(optimizer, "heeds_found_inf", False))


def generators(device: torch.device) -> list[Tensor]:
    """States of the random generators that a forward pass may use, for instance for dropout."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
