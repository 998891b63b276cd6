"""Finds where a step became non-finite: runs its batch again with hooks on every layer, and saves both."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from medconv.models.layers.batchnorm_stats import RunningStatistics
from medconv.training import layer_trace
from medconv.utils.atomic_io import replacing
from medconv.utils.hardware import HostCopy
from medconv.utils.logging import some

log = logging.getLogger(__name__)


@dataclass
class ForwardPass:
    """What is needed to repeat a forward pass.

    Args: rng: states of the random generators before it. loss: the value that went backward.
    """

    batch: dict[str, Any]
    rng: list[Tensor]
    loss: Tensor | None = None


@dataclass
class StepRecord:
    """An optimizer step, until its gradient is known to be finite.

    Args:
        passes: its forward passes, several if gradients are accumulated.
        statistics: batch norm statistics before the step.
        bad: whether the gradient is non-finite.
        scale: of the loss. scaled: whether fp16's scaler takes the step.
    """

    number: int
    passes: list[ForwardPass] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    bad: HostCopy | None = None
    scale: float = 1.0
    scaled: bool = False


class Diagnosis:
    """Diagnoses steps of one training. Args: folder: where batches are saved."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, statistics: RunningStatistics, folder: Path
    ) -> None:
        self._trainer, self._module = trainer, module
        self._statistics, self._folder = statistics, folder

    def finding(self, step: StepRecord) -> dict[str, Any]:
        """This rank's forward pass whose first non-finite tensor comes earliest in the computation."""
        findings = [self._examine_pass(step, index) for index in range(len(step.passes))]
        return min(findings, key=lambda finding: finding["severity"])

    def of_all_ranks(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if self._trainer.world_size == 1:
            return [mine]
        parts: list[Any] = [None] * self._trainer.world_size
        distributed.all_gather_object(parts, mine)
        return parts

    def save(self, step: StepRecord, finding: dict[str, Any]) -> Path:
        """Weights and batch, written by the rank that has the batch; all ranks gather FSDP's weights."""
        path, module = self._folder / f"step{step.number}.ckpt", self._module
        state = {name: _full(value) for name, value in module.state_dict().items()}
        if self._trainer.global_rank == finding["rank"]:
            bad_pass = step.passes[finding["index"]]
            batch = {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in bad_pass.batch.items()}
            about = {"step": step.number, "batch": batch, "rng": bad_pass.rng, "scale": step.scale, **finding}
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=True) as partial:
                torch.save({"state_dict": state, "medconv": dict(module.record), "nonfinite": about}, partial)  # type: ignore[arg-type]
        return path

    def message(self, step: StepRecord, findings: Sequence[dict[str, Any]], path: Path | None) -> str:
        """Args: findings: of the ranks with a non-finite value. path: the saved file, if there is one."""
        one = findings[0]
        what = "loss" if one["loss"] is None or not math.isfinite(one["loss"]) else "gradient"
        where = f" on rank {one['rank']}" if self._trainer.world_size > 1 else ""
        row = one["first"]
        first = layer_trace.LayerRecord(**row).words() if row else "none when the batch was run again"
        cases = some([case for finding in findings for case in finding["cases"]])
        saved = f"The batch and its layer trace are in {path}." if path else ""
        text = (
            f"step {step.number}: the {what} is not finite{where}, of case {cases}. First non-finite tensor: "
            f"{first}."
        )
        return f"{text} {_advice(one)} {saved}".strip()

    def _examine_pass(self, step: StepRecord, index: int) -> dict[str, Any]:
        forward = step.passes[index]
        rows = self._trace(forward, step.scale)
        first = layer_trace.first_bad(rows)
        numbers = [int(number) for number in forward.batch["sample"]]
        images = zip(numbers, forward.batch["image"], strict=True)
        samples = [number for number, image in images if not bool(image.isfinite().all())] or numbers
        describe = self._trainer.train_dataloader.dataset.dataset.describe  # type: ignore[union-attr]
        return {
            "severity": layer_trace.severity(first),
            "index": index,
            "rank": self._trainer.global_rank,
            "loss": None if forward.loss is None else float(forward.loss) / step.scale,
            "first": first.plain() if first else None,
            "rows": [row.plain() for row in rows],
            "samples": samples,
            "cases": ["{} ({})".format(*describe(number)) for number in samples],
        }

    def _trace(self, forward: ForwardPass, scale: float) -> list[layer_trace.LayerRecord]:
        """Every tensor of the pass, run again. If that fails: batch and loss, since other ranks wait."""
        module = self._module
        rows = layer_trace.inputs(forward.batch)
        if forward.loss is not None:
            rows.append(layer_trace.LayerRecord.of("loss", "loss", layer_trace.LOSS, forward.loss))
        if any(isinstance(p, DTensor) for p in module.parameters()):  # FSDP cannot run a pass on one rank
            return rows
        before, statistics = layer_trace.generators(module.device), self._statistics.now()
        try:
            layer_trace.set_generators(forward.rng, module.device)
            with self._trainer.precision_plugin.forward_context():
                return layer_trace.trace(
                    module,
                    forward.batch,
                    lambda: module.loss_of(forward.batch),  # type: ignore[operator]
                    scale,
                )
        except (RuntimeError, MemoryError):  # it takes more memory than the step did
            log.debug("the step could not be traced layer by layer", exc_info=True)
            return rows
        finally:
            layer_trace.set_generators(before, module.device)
            self._statistics.restore(statistics)


def _advice(finding: dict[str, Any]) -> str:
    if finding["first"] and finding["first"]["what"] == layer_trace.INPUT:
        return "Look at this image; `medconv preprocess` with --verify checks its preprocessed copy."
    return (
        "A lower optimizer.lr, a trainer.gradient_clip_val or trainer.precision=32-true helps if values grow."
    )


def _full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
