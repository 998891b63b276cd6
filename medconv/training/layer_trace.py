"""Traces one forward and backward pass: every layer's output and gradient. For debugging only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

INPUT = "input"
OUTPUT = "output"
LOSS = "loss"
GRADIENT = "gradient of output"
WEIGHT = "gradient of weights"
_ORDER_OF_COMPUTATION = (INPUT, OUTPUT, LOSS, GRADIENT, WEIGHT)


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
    """Rows of the floating-point tensors of a batch."""
    return [
        LayerRecord.of(name, "batch", INPUT, value)
        for name, value in batch.items()
        if _is_floating_point(value)
    ]


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


def generators(device: torch.device) -> list[Tensor]:
    """States of the random generators that a forward pass may use, for instance for dropout."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_generators(states: Sequence[Tensor], device: torch.device) -> None:
    """Restores what `generators` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in a layer's output."""
    return [leaf for leaf in tree_leaves(output) if _is_floating_point(leaf)]


def _is_floating_point(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
