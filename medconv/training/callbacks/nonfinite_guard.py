"""Guard against losses and gradients that are not finite: the step is not taken; its batch and a layer trace
are kept.

The check is the norm of the gradient, which clipping needs anyway: one number that is not finite if any
gradient is not. On a GPU it is read one step later, when the device has long passed it, so that no step
waits; the device itself leaves out the optimizer's step. Gradients are the sum of all ranks', so every rank
finds the same without talking. A loss that is not finite is spread into its gradient. Only then is the batch
run once more, with hooks on every layer: the log shows the layers up to the first that gives a value that is
not finite, the saved file holds all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from medconv.models.layers.batchnorm_stats import RunningStatistics
from medconv.training import layer_trace
from medconv.training.callbacks.weight_averaging import AverageWeights
from medconv.utils import cluster
from medconv.utils.atomic_io import replacing
from medconv.utils.exit_codes import DONE, USER
from medconv.utils.logging import some

log = logging.getLogger(__name__)
CHOICES = ("stop", "skip")
_OVERFLOWS = (
    1.0  # of fp16's loss scale; above it a gradient may be too large for it, which is the scale's fault
)


class NonfiniteError(ValueError):
    """A loss or gradient is not finite; the message names step, cases and layer."""


@dataclass
class _Held:
    """What one forward pass was made of. Args: loss: as it went backward. rng: the states of the
    generators before it.
    """

    batch: dict[str, Any]
    rng: list[Tensor]
    loss: Tensor | None = None


@dataclass
class _Step:
    """An optimizer step, until its gradient is known to be finite.

    Args: statistics: the batch norms' before it. bad: whether the gradient is not finite, on the device.
    scale: of the loss. scaled: whether fp16's scaler takes the step.
    """

    number: int
    held: list[_Held] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    bad: Tensor | None = None
    scale: float = 1.0
    scaled: bool = False


class NonfiniteGuard(Callback):
    """Watches every step's gradient. The task calls `seen` with its norm, before the optimizer's step.

    Args:
        folder: where batches are saved. nan_policy: `stop` the run, or `skip` the step; of a skipped one
        weights, optimizer and averages do not change. max_skipped_steps: steps of a run; the next one stops
        it.
        late: whether the norm is read a step later; None: on a GPU, where the optimizer can leave out a step
            by itself.
    Raises: ValueError: values out of range. Of its hooks: NonFinite.
    """

    def __init__(
        self, folder: Path, nan_policy: str = "stop", max_skipped_steps: int = 10, late: bool | None = None
    ) -> None:
        if nan_policy not in CHOICES:
            raise ValueError(f"run.nan_policy must be one of {CHOICES}, got {nan_policy!r}")
        if max_skipped_steps < 1:
            raise ValueError(f"run.max_skipped_steps must be at least 1, got {max_skipped_steps}")
        self.folder, self.skips, self.max_skipped_steps, self.late = (
            folder,
            nan_policy == "skip",
            max_skipped_steps,
            late,
        )
        self.skipped = 0
        self._step, self._pending = _Step(0), None  # type: tuple[_Step, _Step | None]

    def state_dict(self) -> dict[str, Any]:
        self.settle()  # before the optimizer's state is read
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._module = trainer, pl_module
        self._statistics = RunningStatistics(pl_module)
        pl_module.gradient_seen = self.seen  # type: ignore[assignment]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._step.held:
            self._step.number = trainer.global_step + 1
            self._step.statistics = self._statistics.now()
        self._step.held.append(_Held(batch, layer_trace.generators(pl_module.device)))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._step.held[-1].loss = loss.detach()

    def seen(self, norm: Tensor, optimizer: Optimizer) -> None:
        """The norm of all gradients, of all ranks, before the optimizer's step."""
        step, self._step = self._step, _Step(0)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        step.bad = ~whole.isfinite()
        self.settle()
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if not self._reads_late(optimizer, scaler):
            step.scale, step.scaled = (1.0, False) if scaler is None else (float(scaler.get_scale()), True)
            self._handle(step, optimizer)
            return
        self._statistics.restore(step.statistics, step.bad)
        optimizer.grad_scale, optimizer.found_inf = None, step.bad.float()  # type: ignore[attr-defined]
        self._pending, self._optimizer = step, optimizer

    def _reads_late(self, optimizer: Optimizer, scaler: Any) -> bool:
        """The scaler of fp16 reads in every step itself. Where the first step is left out, momentum would
        be undefined.
        """
        begins = not optimizer.state and any(group.get("momentum") for group in optimizer.param_groups)
        if scaler is not None or begins or not can_leave_out(optimizer):
            return False
        return self._module.device.type == "cuda" if self.late is None else self.late

    def settle(self) -> None:
        """Read what is still to be read of the step before."""
        step, self._pending = self._pending, None
        if step is not None and bool(step.bad):
            for state in self._optimizer.state.values():  # counted by the host, which did not know
                if type(state.get("step")) is int:
                    state["step"] -= 1
            self._handle(step, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stands before the mean of the weights, which must know of a step whether it was taken."""
        last = trainer.global_step - 1
        if self._pending is not None and any(mean.should_update(step_idx=last) for mean in _means(trainer)):
            self.settle()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()

    def _handle(self, step: _Step, optimizer: Optimizer | None) -> None:
        """Args: optimizer: about to take the step; None: it has left it out."""
        if not bool(step.bad):
            return
        if step.scale > _OVERFLOWS and not self._loses(step):
            return  # the scaler leaves the step out and lowers the scale
        if optimizer is not None:
            self._statistics.restore(step.statistics)
        found = self._of_all_ranks(self._found(step))
        worst = min(fault["severity"] for fault in found)
        guilty = [fault for fault in found if fault["severity"] == worst]
        stops = not self.skips or self.skipped >= self.max_skipped_steps
        path = self._saved(step, guilty[0]) if stops or not self.skipped else None
        words = self._words(step, guilty, path)
        if path is not None and guilty[0]["first"]:
            rows = [layer_trace.Row(**row) for row in guilty[0]["rows"]]
            log.warning(
                "step %d, layer by layer up to the first such value:\n%s",
                step.number,
                layer_trace.table(rows),
            )
        if stops:
            limit = (
                f" Skipped before it: {self.skipped} (run.max_skipped_steps={self.max_skipped_steps})."
                if self.skips
                else ""
            )
            self._stop(words + (limit or " run.nan_policy=skip leaves such steps out."))
        self._skip(step, optimizer, words)

    def _loses(self, step: _Step) -> bool:
        """Whether a loss itself is not finite, on any rank."""
        mine = any(not bool(one.loss.isfinite()) for one in step.held if one.loss is not None)
        return any(rank["loss"] for rank in self._of_all_ranks({"loss": mine}))

    def _skip(self, step: _Step, optimizer: Optimizer | None, words: str) -> None:
        self.skipped += 1
        for mean in _means(self._trainer):
            mean.left_out = step.number - 1
        if optimizer is not None and step.scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
            for parameter in (
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ):
                parameter.grad.fill_(
                    torch.nan
                )  # the scaler looks at them as late as in the step, and leaves that out
        elif optimizer is not None:
            optimizer.zero_grad(set_to_none=True)  # optimizers leave alone what has no gradient
        log.warning("skipped (%d of at most %d): %s", self.skipped, self.max_skipped_steps, words)

    def _stop(self, words: str) -> None:
        """One message of all ranks. Lightning kills the first where one that it started ends with an
        error.
        """
        if self._trainer.is_global_zero:
            raise NonfiniteError(words)
        raise SystemExit(DONE if cluster.launcher() is None else USER)

    def _found(self, step: _Step) -> dict[str, Any]:
        """What is wrong with this rank's part of the step: of the pass whose fault is the first on the way
        to a gradient.
        """
        found = [self._looked(step, index) for index in range(len(step.held))]
        return min(found, key=lambda fault: fault["severity"])

    def _looked(self, step: _Step, index: int) -> dict[str, Any]:
        held = step.held[index]
        rows = self._traced(held, step.scale)
        bad = layer_trace.first_bad(rows)
        numbers = _numbers(held.batch)
        inside = [
            n
            for n, image in zip(numbers, held.batch["image"], strict=True)
            if not bool(image.isfinite().all())
        ]
        describe = self._trainer.train_dataloader.dataset.dataset.describe  # type: ignore[union-attr]
        return {
            "severity": layer_trace.severity(bad),
            "index": index,
            "rank": self._trainer.global_rank,
            "loss": None if held.loss is None else float(held.loss) / step.scale,
            "first": bad.plain() if bad else None,
            "rows": [row.plain() for row in rows],
            "samples": inside or numbers,
            "cases": ["{} ({})".format(*describe(n)) for n in inside or numbers],
        }

    def _traced(self, held: _Held, scale: float) -> list[layer_trace.Row]:
        """Of the pass, run once more; where that cannot be, of what is known of it, for other ranks wait
        for an answer.
        """
        module = self._module
        loss = [] if held.loss is None else [layer_trace.Row.of("loss", "loss", layer_trace.LOSS, held.loss)]
        known = [*layer_trace.inputs(held.batch), *loss]
        if any(isinstance(p, DTensor) for p in module.parameters()):  # FSDP knows its own way back alone
            return known
        before, statistics = layer_trace.generators(module.device), self._statistics.now()
        try:
            layer_trace.set_generators(held.rng, module.device)
            with self._trainer.precision_plugin.forward_context():
                return layer_trace.trace(module, held.batch, lambda: module.loss_of(held.batch), scale)  # type: ignore[operator]
        except (RuntimeError, MemoryError):  # it takes more memory than the step did
            log.debug("the step is not looked at layer by layer", exc_info=True)
            return known
        finally:
            layer_trace.set_generators(before, module.device)
            self._statistics.restore(statistics)

    def _of_all_ranks(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if self._trainer.world_size == 1:
            return [mine]
        parts: list[Any] = [None] * self._trainer.world_size
        distributed.all_gather_object(parts, mine)
        return parts

    def _saved(self, step: _Step, fault: dict[str, Any]) -> Path:
        """By the rank whose batch it is; FSDP's weights are gathered by all of them."""
        path, module = self.folder / f"step{step.number}.ckpt", self._module
        state = {name: _whole(value) for name, value in module.state_dict().items()}
        if self._trainer.global_rank == fault["rank"]:
            held = step.held[fault["index"]]
            batch = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in held.batch.items()}
            about = {"step": step.number, "batch": batch, "rng": held.rng, "scale": step.scale, **fault}
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=True) as partial:
                torch.save({"state_dict": state, "medconv": dict(module.record), "nonfinite": about}, partial)  # type: ignore[arg-type]
        return path

    def _words(self, step: _Step, guilty: Sequence[dict[str, Any]], path: Path | None) -> str:
        one = guilty[0]
        what = "loss" if one["loss"] is None or not -float("inf") < one["loss"] < float("inf") else "gradient"
        where = f" on rank {one['rank']}" if self._trainer.world_size > 1 else ""
        first = (
            layer_trace.Row(**one["first"]).words() if one["first"] else "no layer, when it was run once more"
        )
        cases = some([case for fault in guilty for case in fault["cases"]])
        kept = f"The batch and its layer trace are in {path}." if path else ""
        text = (
            f"step {step.number}: the {what} is not finite{where}, of case {cases}. The first that is "
            f"not: {first}."
        )
        return f"{text} {_advice(one)} {kept}".strip()


def can_leave_out(optimizer: Optimizer) -> bool:
    """Whether its step does nothing where its `found_inf`, on the device, is 1."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    torchs = fused and getattr(optimizer, "_step_supports_amp_scaling", False)
    return torchs or getattr(optimizer, "heeds_found_inf", False)


def _advice(fault: dict[str, Any]) -> str:
    if fault["first"] and fault["first"]["what"] == layer_trace.INPUT:
        return (
            "Look at this image; `medconv preprocess` with --verify reads what was prepared of it once more."
        )
    return (
        "A lower optimizer.lr, a trainer.gradient_clip_val or trainer.precision=32-true help where "
        "values grow."
    )


def _means(trainer: Trainer) -> list[AverageWeights]:
    return [callback for callback in trainer.callbacks if isinstance(callback, AverageWeights)]  # type: ignore[attr-defined]


def _numbers(batch: dict[str, Any]) -> list[int]:
    return [int(number) for number in batch["sample"]]


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
