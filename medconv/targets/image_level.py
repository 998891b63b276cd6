"""What a network is asked of a whole image: one of some classes, any of some findings, or numbers."""

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
    """What each case has a value of, or several, and what a network's outputs mean.

    Args:
        kind: `classes` exclude each other, a softmax; a case has the index of one of them. `findings` may
            come together, a sigmoid each; a case has 0 or 1 for each. `numbers`: a case has one for each
            name, in whatever unit.
        names: in the order of the outputs.
    """

    kind: str
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the kind of an outcome must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if len(self.names) < (2 if self.kind == "multiclass" else 1):
            raise ValueError(f"too few names of {self.kind}: {list(self.names)}")

    @classmethod
    def from_plain(cls, content: Any) -> ImageLevelTargets:
        """From what `plain` gave, in a file that somebody may have sent. Raises: ValueError: anything
        else.
        """
        if not isinstance(content, Mapping) or not {"kind", "names"} <= set(content):
            raise ValueError("an outcome needs kind and names")
        return cls(str(content["kind"]), names_of(content["names"]))

    def plain(self) -> dict[str, Any]:
        """Names, as YAML, JSON and checkpoints hold them."""
        return {"kind": self.kind, "names": list(self.names)}

    @property
    def num_outputs(self) -> int:
        """Of the network: one per name."""
        return len(self.names)

    @property
    def num_values(self) -> int:
        """Of a case: the index of its class, or a value for each name."""
        return 1 if self.kind == "multiclass" else len(self.names)

    def fault(self, values: Sequence[float]) -> str | None:
        """What is wrong with the values of a case, in words; None: nothing."""
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
        """What logits mean: probabilities, or the numbers themselves. Shape: (..., outputs) -> the same,
        float32.
        """
        logits = logits.float()
        if self.kind == "regression":
            return logits
        return torch.softmax(logits, -1) if self.kind == "multiclass" else torch.sigmoid(logits)


def image_targets_of(derived: Values) -> ImageLevelTargets | None:
    """What is asked of whole images; None: label maps."""
    plain = derived["image_targets"]
    return None if plain is None else ImageLevelTargets.from_plain(plain)
