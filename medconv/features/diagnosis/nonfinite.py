"""Finds where a step became non-finite: runs its batch again with hooks on every layer, and saves both.

A pass is traced as one row for each tensor: the batch, every layer's output, the loss, and the gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from medconv.training.callbacks.nonfinite_guard import ForwardPass, RunningStatistics, StepRecord, generators
from medconv.training.distributed import of_all_ranks
from medconv.utils import checkpoint_io
from medconv.utils.atomic_io import replacing
from medconv.utils.logging import some

log = logging.getLogger(__name__)
# Plain values of one rank, which ranks exchange and the saved file holds.
Finding = dict[str, Any]
# A tensor's place in the computation, by which the first bad one of all ranks is found
INPUT = "input"
OUTPUT = "output"
LOSS = "loss"
GRADIENT = "gradient of output"
WEIGHT = "gradient of weights"
_ORDER_OF_COMPUTATION = (INPUT, OUTPUT, LOSS, GRADIENT, WEIGHT)


class Diagnosis:
    """Explains a step whose gradient is not finite; all ranks take part.

    Args:
        statistics: of the module's batch norms, which another pass would change.
        folder: where batches are saved.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, statistics: RunningStatistics, folder: Path
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._statistics = statistics
        self._folder = folder

    def explain(self, step: StepRecord, saves: bool) -> str:
        """What is wrong, in sentences; the trace is logged if the batch is saved, since it is long."""
        findings = self._earliest_findings(step)
        path = self._save(step, findings[0]) if saves else None
        if path is not None and findings[0]["first"]:
            rows = [LayerRecord(**row) for row in findings[0]["rows"]]
            log.warning(
                "step %d, layer by layer up to the first non-finite tensor:\n%s", step.number, table(rows)
            )
        return self._message(step, findings, path)

    def _earliest_findings(self, step: StepRecord) -> list[Finding]:
        """Findings of the ranks on which the first non-finite tensor comes earliest in the computation."""
        findings = of_all_ranks(self._finding(step))
        earliest = min(finding["severity"] for finding in findings)
        return [finding for finding in findings if finding["severity"] == earliest]

    def _finding(self, step: StepRecord) -> Finding:
        """This rank's forward pass whose first non-finite tensor comes earliest in the computation."""
        findings = [self._examine_pass(step, index) for index in range(len(step.passes))]
        return min(findings, key=lambda finding: finding["severity"])

    def _save(self, step: StepRecord, finding: Finding) -> Path | None:
        """Weights and batch, written by the rank that has the batch; all ranks gather FSDP's weights.

        None: the disk took no file, as a warning says; the run ends or goes on for another reason.
        """
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
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=True) as partial, partial.open("wb") as file:
                checkpoint_io.save(content, file)
        except OSError as error:
            log.warning("%s: the batch of this step cannot be written (%s)", path, error.strerror or error)
            return None
        return path

    def _message(self, step: StepRecord, findings: Sequence[Finding], path: Path | None) -> str:
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
            f"step {step.number}: the {quantity} is not finite{rank}, in case {cases}.",
            f"First non-finite tensor: {first}.",
            _advice(finding),
        ]
        if path is not None:
            sentences.append(f"The batch and its layer trace are in {path}.")
        return " ".join(sentences)

    def _examine_pass(self, step: StepRecord, index: int) -> Finding:
        forward = step.passes[index]
        rows = self._trace(forward, step.scale)
        first = first_bad(rows)
        samples = _suspects(forward.batch)
        describe = self._trainer.train_dataloader.dataset.dataset.describe  # type: ignore[union-attr]
        return {
            "severity": severity(first),
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
        rows = inputs(forward.batch)
        if forward.loss is not None:
            rows.append(LayerRecord.of("loss", "loss", LOSS, forward.loss))
        # Under FSDP a single rank cannot run a pass
        if any(isinstance(p, DTensor) for p in module.parameters()):
            return rows
        random_states = generators(module.device)
        statistics = self._statistics.now()
        try:
            set_generators(forward.rng, module.device)
            with self._trainer.precision_plugin.forward_context():
                return trace(
                    module,
                    forward.batch,
                    lambda: module.loss_of(forward.batch),  # type: ignore[operator]
                    scale,
                )
        except (RuntimeError, MemoryError):  # it takes more memory than the step did
            log.debug("the step could not be traced layer by layer", exc_info=True)
            return rows
        finally:
            set_generators(random_states, module.device)
            self._statistics.restore(statistics)


def _suspects(batch: dict[str, Any]) -> list[int]:
    """Numbers of the samples whose image is not finite; all samples if every image is finite."""
    numbers = [int(number) for number in batch["sample"]]
    images = zip(numbers, batch["image"], strict=True)
    with_bad_image = [number for number, image in images if not bool(image.isfinite().all())]
    return with_bad_image or numbers


def _advice(finding: Finding) -> str:
    if finding["first"] and finding["first"]["role"] == INPUT:
        return "Look at this image; `medconv preprocess` can verify its preprocessed copy."
    return "A lower learning rate, gradient clipping or precision 32-true helps if values grow."


def _full(value: Tensor) -> Tensor:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu()


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class LayerRecord:
    """A tensor of the pass.

    Args:
        name: of the layer.
        kind: class of the layer.
        role: which of the layer's tensors, such as OUTPUT.
        bad: number of its values that are not finite.
        total: number of its values.
        low: smallest finite value; None: no value is finite.
        high: largest finite value; None: no value is finite.
    """

    name: str
    kind: str
    role: str
    bad: int
    total: int
    low: float | None
    high: float | None

    @classmethod
    def of(cls, name: str, kind: str, role: str, tensor: Tensor) -> Self:
        values = tensor.detach()
        finite = values[values.isfinite()]
        return cls(
            name=name,
            kind=kind,
            role=role,
            bad=values.numel() - finite.numel(),
            total=values.numel(),
            low=float(finite.min()) if finite.numel() else None,
            high=float(finite.max()) if finite.numel() else None,
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        if self.role == LOSS:
            return "the loss alone"
        return f"{self.name} ({self.kind}), {self.role}, {self.bad} of {self.total} values"


def severity(row: LayerRecord | None) -> int:
    """Position in the computation: 0 for the batch, larger for later tensors, largest for None."""
    if row is None:
        return len(_ORDER_OF_COMPUTATION)
    return _ORDER_OF_COMPUTATION.index(row.role)


def first_bad(rows: Sequence[LayerRecord]) -> LayerRecord | None:
    """The first row, in the order of computation, with a value that is not finite."""
    return next((row for row in rows if row.bad), None)


def table(rows: Sequence[LayerRecord], max_rows: int = 12) -> str:
    """The last `max_rows` rows up to and including the first non-finite one, one line each."""
    end = next((index + 1 for index, row in enumerate(rows) if row.bad), len(rows))
    begin = max(0, end - max_rows)
    lines = [("layer", "tensor", "not finite", "min", "max"), *map(_cells, rows[begin:end])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded_lines = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded_lines.append("  ".join(cells).rstrip())
    return "\n".join(padded_lines)


def _cells(row: LayerRecord) -> tuple[str, ...]:
    not_finite = f"{row.bad} of {row.total}" if row.bad else "-"
    return f"{row.name} ({row.kind})", row.role, not_finite, _number(row.low), _number(row.high)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def inputs(batch: Mapping[str, Any]) -> list[LayerRecord]:
    """Rows of the floating-point tensors of a batch. NaN beside the image is a label that is missing."""
    rows = []
    for name, value in batch.items():
        if _is_floating_point(value):
            known = value if name == "image" else value.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
            rows.append(LayerRecord.of(name, "batch", INPUT, known))
    return rows


def trace(
    module: nn.Module, batch: Mapping[str, Any], loss_of: Callable[[], Tensor], scale: float = 1.0
) -> list[LayerRecord]:
    """Rows of one forward and backward pass, in the order of computation. Does not touch `.grad`.

    Args:
        module: to trace.
        batch: its input.
        loss_of: runs the module on the batch.
        scale: of the loss before backward, as in fp16 training.
    """
    rows = inputs(batch)
    output_gradients: list[LayerRecord] = []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _training(module),
        _recording(module, rows, output_gradients),
    ):
        loss = loss_of()
        rows.append(LayerRecord.of("loss", "loss", LOSS, loss))
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        gradients: Sequence[Tensor | None] = ()
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss * scale, list(trained.values()), allow_unused=True)
    rows += output_gradients
    for name, gradient in zip(trained, gradients, strict=False):
        if gradient is not None:
            rows.append(LayerRecord.of(name, "parameter", WEIGHT, gradient))
    return rows


@contextmanager
def _recording(module: nn.Module, outputs: list[LayerRecord], gradients: list[LayerRecord]) -> Iterator[None]:
    """Inside, hooks append the output of each layer to `outputs`, and its gradient to `gradients`."""
    # Activation checkpointing calls a layer again during backward
    called: set[str] = set()

    def hook_of(name: str, kind: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            if name in called:
                return
            called.add(name)
            for tensor in _tensors(output):
                outputs.append(LayerRecord.of(name, kind, OUTPUT, tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: gradients.append(LayerRecord.of(name, kind, GRADIENT, g)))

        return hook

    hooks = []
    for name, layer in module.named_modules():
        if name and not name.startswith("loss"):
            hooks.append(layer.register_forward_hook(hook_of(name, type(layer).__name__)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in training mode and not compiled, since compiled modules call no hooks."""
    modes = {layer: layer.training for layer in module.modules()}
    compiled_calls = {layer: layer._compiled_call_impl for layer in module.modules()}
    module.train()
    for layer in compiled_calls:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, compiled_call in compiled_calls.items():
            layer.training = modes[layer]
            layer._compiled_call_impl = compiled_call


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in a layer's output."""
    return [leaf for leaf in tree_leaves(output) if _is_floating_point(leaf)]


def _is_floating_point(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def set_generators(states: Sequence[Tensor], device: torch.device) -> None:
    """Restores what `generators` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
