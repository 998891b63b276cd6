"""Traces one forward and backward pass: every layer's output and gradient. For debugging only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

INPUT, OUTPUT, LOSS, GRADIENT, WEIGHT = "input", "output", "loss", "gradient of output", "gradient of weights"
_ORDER = (INPUT, OUTPUT, LOSS, GRADIENT, WEIGHT)


@dataclass(frozen=True)
class LayerRecord:
    """A tensor of the pass.

    Args:
        name, kind: of the layer. what: which of its tensors.
        bad: number of its `total` values that are not finite. low, high: range of the finite ones.
    """

    name: str
    kind: str
    what: str
    bad: int
    total: int
    low: float | None
    high: float | None

    @classmethod
    def of(cls, name: str, kind: str, what: str, tensor: Tensor) -> Self:
        values = tensor.detach()
        finite = values[values.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
        return cls(name, kind, what, values.numel() - finite.numel(), values.numel(), low, high)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        if self.what == LOSS:
            return "the loss alone"
        return f"{self.name} ({self.kind}), {self.what}, {self.bad} of {self.total} values"


def severity(row: LayerRecord | None) -> int:
    """Position in the computation: 0 for the batch, larger for later tensors, largest for None."""
    return len(_ORDER) if row is None else _ORDER.index(row.what)


def first_bad(rows: Sequence[LayerRecord]) -> LayerRecord | None:
    """The first row, in the order of computation, with a value that is not finite."""
    return next((row for row in rows if row.bad), None)


def table(rows: Sequence[LayerRecord], most: int = 12) -> str:
    """The `most` rows up to and including the first non-finite one, one line each."""
    end = next((index + 1 for index, row in enumerate(rows) if row.bad), len(rows))
    cells = [("layer", "tensor", "not finite", "min", "max"), *map(_cells, rows[max(0, end - most) : end])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _cells(row: LayerRecord) -> tuple[str, ...]:
    low, high = ("-" if value is None else f"{value:.4g}" for value in (row.low, row.high))
    return f"{row.name} ({row.kind})", row.what, f"{row.bad} of {row.total}" if row.bad else "-", low, high


def inputs(batch: Mapping[str, Any]) -> list[LayerRecord]:
    floats = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return [LayerRecord.of(name, "batch", INPUT, value) for name, value in floats.items()]


def trace(
    module: nn.Module, batch: Mapping[str, Any], loss_of: Callable[[], Tensor], scale: float = 1.0
) -> list[LayerRecord]:
    """Rows of one forward and backward pass, in the order of computation. Does not touch `.grad`.

    Args: loss_of: runs the module on the batch. scale: of the loss before backward, as in fp16 training.
    """
    rows = inputs(batch)
    back: list[LayerRecord] = []
    with torch.inference_mode(False), torch.enable_grad(), _training(module), _watched(module, rows, back):
        loss = loss_of()
        rows.append(LayerRecord.of("loss", "loss", LOSS, loss))
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        gradients: Sequence[Tensor | None] = ()
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss * scale, list(trained.values()), allow_unused=True)
    rows += back
    for name, gradient in zip(trained, gradients, strict=False):
        if gradient is not None:
            rows.append(LayerRecord.of(name, "parameter", WEIGHT, gradient))
    return rows


@contextmanager
def _watched(module: nn.Module, rows: list[LayerRecord], back: list[LayerRecord]) -> Iterator[None]:
    """Inside, hooks append the output of each layer to `rows`, and its gradient to `back`."""
    seen: set[str] = set()  # activation checkpointing calls a layer again during backward

    def watch(name: str, kind: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            if name in seen:
                return
            seen.add(name)
            for tensor in _tensors(output):
                rows.append(LayerRecord.of(name, kind, OUTPUT, tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: back.append(LayerRecord.of(name, kind, GRADIENT, g)))

        return hook

    parts = [(name, part) for name, part in module.named_modules() if name and not name.startswith("loss")]
    hooks = [part.register_forward_hook(watch(name, type(part).__name__)) for name, part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in training mode and not compiled, since compiled modules call no hooks."""
    before = {part: (part.training, part._compiled_call_impl) for part in module.modules()}
    module.train()
    for part in before:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, (training, call) in before.items():
            part.training, part._compiled_call_impl = training, call


def generators(device: torch.device) -> list[Tensor]:
    """States of the random generators that a forward pass may use, for instance for dropout."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_generators(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in a layer's output."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
