"""One training step with some switches, without data loading, timed by `perf=autotune` and benchmarks."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medconv.performance.switches import apply_switches, memory_format, to_memory_format
from medconv.utils.hardware import autocast_dtype

_MAX_NORM = 1.0  # of all gradients; its value does not affect the time
Objective = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """The switches that `perf=autotune` chooses between, by their names in `trainer` and `perf`."""

    precision: str = "32-true"
    channels_last: bool = False
    fast_norm: bool = False
    fast_depthwise: bool = False  # not chosen: it never hurts
    activation_checkpointing: str = "none"
    compile: bool = False

    def __str__(self) -> str:
        """In words: the precision, then what is on."""
        words = [self.precision]
        words += [name for name in ("channels_last", "fast_norm", "compile") if getattr(self, name)]
        if self.activation_checkpointing != "none":
            words.append(f"activation_checkpointing={self.activation_checkpointing}")
        return ", ".join(words)


@dataclass(frozen=True)
class Work:
    """What a step works on.

    Shape:
        image (batch, channels, *spatial), label (batch, 1, *spatial), on the device.
    Args:
        network: in training.
        objective: (output of the network, label) -> loss.
        optimizer: takes parameters.
    """

    network: nn.Module
    objective: Objective
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    image: Tensor
    label: Tensor

    def larger(self, times: int) -> Self:
        """The same with a batch that many times as large."""
        return replace(self, image=_repeated(self.image, times), label=_repeated(self.label, times))


def _repeated(batch: Tensor, times: int) -> Tensor:
    return batch.repeat(times, *(1,) * (batch.ndim - 1))


class Trial:
    """A copy of the network with the switches of a choice; the copy trains, the network stays as it is.

    Dropout is off: its masks depend on the memory layout, so losses would not be comparable.
    """

    def __init__(self, work: Work, choice: Choice) -> None:
        device = work.image.device
        network = deepcopy(work.network).to(device).train()
        for layer in network.modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()
        switches = asdict(choice)
        self.dtype = autocast_dtype(switches.pop("precision"))
        self.network = apply_switches(network, **switches)
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.optimizer = work.optimizer(self.parameters)
        self.objective = work.objective
        layout = memory_format(choice.channels_last, work.image.ndim - 2)
        self.image = to_memory_format(work.image, layout)
        self.label = work.label
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def step(self) -> Tensor:
        """Forward, backward, clipping and the optimizer; returns the loss, on the device."""
        loss = self.forward()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, _MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def forward(self) -> Tensor:
        with torch.autocast(self.image.device.type, self.dtype, enabled=self.dtype is not None):
            return self.objective(self.network(self.image), self.label)
