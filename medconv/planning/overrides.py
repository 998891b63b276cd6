"""The values of a plan that the config sets itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlanOverrides:
    """The values of a plan that the config sets itself, by their keys; None: the planner decides."""

    spatial_dims: int | None = None
    spacing_mm: Sequence[float] | None = None
    patch_size: Sequence[int] | None = None
    batch_size: int | None = None
    normalisation: str | Sequence[str] | None = None
    strides: Sequence[Any] | None = None
    kernel_sizes: Sequence[Any] | None = None
    channels: Sequence[int] | None = None
    max_stages: int | None = None
    max_batch_size: int | None = None
    resize: Sequence[int] | None = None
    image_level: bool = False  # the network takes whole images of one size and predicts values

    def __post_init__(self) -> None:
        for key in ("max_stages", "max_batch_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"plan.{key} must be 1 or more, or null, got {value}")
        if self.resize is not None and not self.image_level:
            raise ValueError("data.resize needs cases with values; label maps keep mm, by data.spacing_mm")
        if self.resize is not None and any(n < 1 for n in self.resize):
            raise ValueError(f"data.resize needs positive numbers of voxels, got {list(self.resize)}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"data.batch_size must be at least 1, got {self.batch_size}")
