"""The switches to measure, and the measurements of each choice."""

import math
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from typing import Any

from torch import nn

from medconv.training.autotune.trial import Choice, Trial
from medconv.utils.hardware import resolve_precision


@dataclass
class Candidate:
    """A choice and its measurement: seconds of its steps, or a remark why it was rejected."""

    choice: Choice
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int | None = None
    remark: str = ""
    trial: Trial | None = None

    @property
    def per_sample(self) -> float:
        """Seconds; infinite if it is rejected or not yet timed."""
        if self.remark or not self.seconds:
            return math.inf
        return median(self.seconds) / self.batch_size

    def row(self) -> dict[str, Any]:
        """Plain values."""
        is_timed = math.isfinite(self.per_sample)
        return {
            "choice": asdict(self.choice),
            "batch_size": self.batch_size,
            "seconds": self.per_sample * self.batch_size if is_timed else None,
            "memory_bytes": self.memory_bytes,
            "remark": self.remark,
        }


def choices(set_by_user: dict[str, Any], network: nn.Module, gpu: bool) -> list[Choice]:
    """The candidates, plain ones first.

    Args:
        set_by_user: fields of `Choice`; values that are not None stay.
        network: whose layers decide which switches matter.
        gpu: whether it trains on one.
    """
    # On a CPU, fast_norm leaves the work of batch norms to torch
    batch_norms = (nn.BatchNorm2d, nn.BatchNorm3d) if gpu else ()
    kinds = (nn.InstanceNorm2d, nn.InstanceNorm3d, *batch_norms)
    has_norms = any(type(layer) in kinds for layer in network.modules())
    fast_precision = resolve_precision("auto", "gpu" if gpu else "cpu")
    options: dict[str, list[Any]] = {
        "precision": list(dict.fromkeys(["32-true", fast_precision])),
        "channels_last": [False, True],
        "fast_norm": [False, True] if has_norms else [False],
        "fast_depthwise": [True],
        "activation_checkpointing": ["none"],
        "compile": [False],
    }
    options |= {key: [value] for key, value in set_by_user.items() if value is not None}
    candidates = []
    for values in product(*options.values()):
        choice = Choice(**dict(zip(options, values, strict=True)))
        # Without channels_last, fast_norm changes nothing
        if choice.channels_last or not choice.fast_norm or set_by_user.get("fast_norm"):
            candidates.append(choice)
    return candidates
