"""A trace of a few steps by torch.profiler, with the layers by their names."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

_LAYER = "layer "  # what ranges of layers begin with
_BACKWARD = "autograd::engine::evaluate_function"  # torch's range of a node of the backward pass
_SHOWN = 5  # layers in the log

log = logging.getLogger(__name__)


class Trace(Callback):
    """Records a few steps by torch.profiler as `trace/*.pt.trace.json`, for TensorBoard and Perfetto.

    The forward pass of each layer is a range with its name, and the log gets the slowest layers. A compiled
    network has no layers that could be named.

    Args:
        folder: for the traces.
        skip: batches before recording starts.
        steps: recorded batches.
    """

    def __init__(self, folder: Path, skip: int = 5, steps: int = 5) -> None:
        self.folder = folder
        self.skip = skip
        self.steps = steps
        self._profile: torch.profiler.profile | None = None
        self._layers = ExitStack()  # their ranges, while the profile runs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._layers.enter_context(layer_ranges(getattr(pl_module, "network", nn.Identity())))
            self._profile = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=self.skip, warmup=2, active=self.steps, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
            )
            self._profile.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:
            self._stop()
            if not any(self.folder.glob("*.json")):
                log.warning("the profiler wrote no trace: recording starts after %d batches", self.skip + 2)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._profile is not None:
            self._stop()

    def _stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._profile = None
        self._layers.close()

    def _write(self, profile: torch.profiler.profile) -> None:
        torch.profiler.tensorboard_trace_handler(str(self.folder))(profile)
        seconds = layer_seconds(profile.events() or [])
        total = sum(seconds.values())
        if total:
            slowest = [f"{name} {value / total:.0%}" for name, value in seconds.most_common(_SHOWN)]
            log.info("profile: share of the time of all layers, forward and backward: %s", ", ".join(slowest))


@contextmanager
def layer_ranges(network: nn.Module) -> Iterator[None]:
    """Inside, each forward pass of a layer with parameters is a range of torch's profilers with its name."""
    handles: list[RemovableHandle] = []
    is_compiled = any(module._compiled_call_impl is not None for module in network.modules())
    for name, layer in network.named_modules():
        has_own = any(True for _ in layer.parameters(recurse=False)) or is_parametrized(layer)
        # a parametrization computes the weight inside the layer's forward pass
        if has_own and not is_compiled and ".parametrizations." not in name:
            handles += _range_of(layer, name)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _range_of(layer: nn.Module, name: str) -> list[RemovableHandle]:
    open_ranges: list[Any] = []  # several if activation checkpointing computes the layer again

    def begin(*_: Any) -> None:
        open_range = torch.profiler.record_function(f"{_LAYER}{name}")
        open_range.__enter__()
        open_ranges.append(open_range)

    def end(*_: Any) -> None:
        if open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    return [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end, always_call=True)]


def layer_seconds(events: Iterable[Any]) -> Counter[str]:
    """Seconds of each layer's forward and backward pass, on the device if there is one.

    A backward operator has the sequence number of the forward operator that it belongs to.
    Args: events: of a profile with `layer_ranges`.
    """
    by_start = sorted(events, key=lambda event: event.time_range.start)
    on_device = any(event.device_time_total for event in by_start)
    seconds: Counter[str] = Counter()
    layer_of: dict[int, str] = {}
    layer = ""
    layer_end = -math.inf
    for event in by_start:
        microseconds = event.device_time_total if on_device else event.cpu_time_total
        if event.name.startswith(_LAYER):
            layer = event.name.removeprefix(_LAYER)
            layer_end = event.time_range.end
            seconds[layer] += microseconds / 1e6
        elif event.name.startswith(_BACKWARD):
            if event.sequence_nr in layer_of:
                seconds[layer_of[event.sequence_nr]] += microseconds / 1e6
        elif event.sequence_nr >= 0 and event.time_range.start < layer_end:
            layer_of.setdefault(event.sequence_nr, layer)
    return seconds
