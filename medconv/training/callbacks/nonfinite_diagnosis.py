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
from medconv.training.layer_trace import LayerRecord
from medconv.utils.atomic_io import replacing
from medconv.utils.hardware import HostCopy
from medconv.utils.logging import some

log = logging.getLogger(__name__)
# Plain values of one rank, which ranks exchange and the saved file holds.
Finding = dict[str, Any]


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


class Diagnosis:
    """Diagnoses steps of one training. Args: folder: where batches are saved."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, statistics: RunningStatistics, folder: Path
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._statistics = statistics
        self._folder = folder

    def finding(self, step: StepRecord) -> Finding:
        """This rank's forward pass whose first non-finite tensor comes earliest in the computation."""
        findings = [self._examine_pass(step, index) for index in range(len(step.passes))]
        return min(findings, key=lambda finding: finding["severity"])

    def of_all_ranks(self, finding: Finding) -> list[Finding]:
        if self._trainer.world_size == 1:
            return [finding]
        findings: list[Any] = [None] * self._trainer.world_size
        distributed.all_gather_object(findings, finding)
        return findings

    def save(self, step: StepRecord, finding: Finding) -> Path:
        """Weights and batch, written by the rank that has the batch; all ranks gather FSDP's weights."""
        path = self._folder / f"step{step.number}.ckpt"
        state = {name: _full(value) for name, value in self._module.state_dict().items()}
        if self._trainer.global_rank != finding["rank"]:
            return path
        forward = step.passes[finding["index"]]
        nonfinite = {
            "step": step.number,
            "batch": {name: _on_host(value) for name, value in forward.batch.items()},
            "rng": forward.rng,
            "scale": step.scale,
            **finding,
        }
        content = {
            "state_dict": state,
            "medconv": dict(self._module.record),  # type: ignore[arg-type]
            "nonfinite": nonfinite,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as partial:
            torch.save(content, partial)
        return path

    def message(self, step: StepRecord, findings: Sequence[Finding], path: Path | None) -> str:
        """Args: findings: of the ranks with a non-finite value. path: the saved file, if there is one."""
        finding = findings[0]
        loss = finding["loss"]
        quantity = "loss" if loss is None or not math.isfinite(loss) else "gradient"
        rank = f" on rank {finding['rank']}" if self._trainer.world_size > 1 else ""
        cases = some([case for of_rank in findings for case in of_rank["cases"]])
        first = "none when the batch was run again"
        if finding["first"]:
            first = LayerRecord(**finding["first"]).words()
        sentences = [
            f"step {step.number}: the {quantity} is not finite{rank}, of case {cases}.",
            f"First non-finite tensor: {first}.",
            _advice(finding),
        ]
        if path is not None:
            sentences.append(f"The batch and its layer trace are in {path}.")
        return " ".join(sentences)

    def _examine_pass(self, step: StepRecord, index: int) -> Finding:
        forward = step.passes[index]
        rows = self._trace(forward, step.scale)
        first = layer_trace.first_bad(rows)
        samples = _suspects(forward.batch)
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

    def _trace(self, forward: ForwardPass, scale: float) -> list[LayerRecord]:
        """Every tensor of the pass, run again. If that fails: batch and loss, since other ranks wait."""
        module = self._module
        rows = layer_trace.inputs(forward.batch)
        if forward.loss is not None:
            rows.append(LayerRecord.of("loss", "loss", layer_trace.LOSS, forward.loss))
        # Under FSDP a single rank cannot run a pass
        if any(isinstance(p, DTensor) for p in module.parameters()):
            return rows
        random_states = layer_trace.generators(module.device)
        statistics = self._statistics.now()
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
            layer_trace.set_generators(random_states, module.device)
            self._statistics.restore(statistics)


def _suspects(batch: dict[str, Any]) -> list[int]:
    """Numbers of the samples whose image is not finite; all samples if every image is finite."""
    numbers = [int(number) for number in batch["sample"]]
    images = zip(numbers, batch["image"], strict=True)
    with_bad_image = [number for number, image in images if not bool(image.isfinite().all())]
    return with_bad_image or numbers


def _advice(finding: Finding) -> str:
    if finding["first"] and finding["first"]["role"] == layer_trace.INPUT:
        return "Look at this image; `medconv preprocess` can verify its preprocessed copy."
    return "A lower learning rate, gradient clipping or precision 32-true helps if values grow."


def _full(value: Tensor) -> Tensor:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu()


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
