"""Image-level targets: multiclass, multilabel and regression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medconv.config import Values
from medconv.targets.segmentation import names_of

KINDS = ("multiclass", "multilabel", "regression")


@dataclass(frozen=True)
class ImageLevelTargets:
    """The values that each case has, and what a network's outputs mean.

    Args:
        kind: `multiclass`: exclusive classes, softmax; a case has the index of one class. `multilabel`:
            independent findings, a sigmoid each; a case has 0 or 1 for each. `regression`: a case has a
            number for each name, in any unit.
        names: of the outputs, in their order.
    """

    kind: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"the kind of image-level targets must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        if len(self.names) < (2 if self.kind == "multiclass" else 1):
            raise ValueError(f"too few names of {self.kind}: {list(self.names)}")

    @classmethod
    def from_plain(cls, content: Any) -> ImageLevelTargets:
        """The inverse of `plain`; the content may be untrusted. Raises: ValueError: invalid."""
        if not isinstance(content, Mapping) or not {"kind", "names"} <= set(content):
            raise ValueError("image-level targets need kind and names")
        return cls(str(content["kind"]), names_of(content["names"]))

    def plain(self) -> dict[str, Any]:
        """As plain types, for YAML, JSON and checkpoints."""
        return {"kind": self.kind, "names": list(self.names)}

    @property
    def num_outputs(self) -> int:
        """Outputs of the network: one per name."""
        return len(self.names)

    @property
    def num_values(self) -> int:
        """Values of a case: the index of its class, or one for each name."""
        return 1 if self.kind == "multiclass" else len(self.names)

    def invalid_reason(self, values: Sequence[float]) -> str | None:
        """Why the values of a case are invalid; None if they are valid."""
        if len(values) != self.num_values:
            return f"expected {self.num_values} values, got {len(values)}"
        if self.kind == "multiclass" and values[0] not in range(len(self.names)):
            return f"expected the index of one of {len(self.names)} classes, got {values[0]:g}"
        if self.kind == "multilabel" and not set(values) <= {0.0, 1.0}:
            return f"expected 0 or 1 for each of {', '.join(self.names)}, got {list(values)}"
        if not all(map(math.isfinite, values)):
            return f"expected finite numbers, got {list(values)}"
        return None

    def decode(self, logits: Tensor) -> Tensor:
        """Logits to probabilities, or to numbers for regression. Shape: (..., outputs) -> same, float32."""
        logits = logits.float()
        if self.kind == "regression":
            return logits
        return torch.softmax(logits, -1) if self.kind == "multiclass" else torch.sigmoid(logits)


def image_targets_of(derived: Values) -> ImageLevelTargets | None:
    """The image-level targets of a run; None if it predicts label maps."""
    plain = derived["image_targets"]
    return None if plain is None else ImageLevelTargets.from_plain(plain)
